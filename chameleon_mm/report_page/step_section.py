"""Section of the page about the step by its plan: memory, compute and copies over time.

step_section(picture), step_columns(picture)          # HTML; what the script tells numbers from
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from chameleon_mm.report_page import drawing
from chameleon_mm.report_page.step_picture import HELD, IN_PART, RECOMPUTE, STALL, SWAPPED, StepPicture
from chameleon_mm.units import format_size, format_us


def step_section(picture: StepPicture | None) -> str:
    """HTML of the section; None: there is no plan."""
    if picture is None:
        return (
            '<section id="step"><h2>The step, by its plan</h2><p>There is no plan, so nothing is predicted. One is made of the '
            "first step that is recorded to its end, unless the session was made with plans=False or no plan is within the "
            "budget.</p></section>"
        )
    end_us, most = _frame(picture)
    measured = "" if picture.measured_step_us is None else f", {format_us(picture.measured_step_us)} measured"
    thin = max(len(picture.planned.at_us), len(picture.unswapped.at_us)) > drawing.MOST_POINTS
    thinned = f" Each point of a curve is the most within a {drawing.MOST_POINTS}th of the step." if thin else ""
    unlike = (
        " Nobody recorded a step of these sizes: its trace follows from those of others." if picture.sizes_predicted else ""
    )
    rows = (("compute", "compute", picture.compute), ("out", "to the host", picture.out), ("back", "back", picture.back))
    lanes = drawing.lanes(rows, end_us)
    memory = drawing.memory_shapes(
        drawing.thinned_memory(picture.planned),
        drawing.thinned_memory(picture.unswapped),
        picture.hbm_budget_bytes,
        end_us,
        most,
    )
    return (
        f'<section id="step"><h2>The step, by its plan <span class="badge">predicted</span></h2>'
        f'<p class="note">{format_us(picture.step_us)} predicted{measured}, of which compute waits '
        f"{format_us(picture.stall_us)} and runs operators again for {format_us(picture.recompute_us)}; without swapping "
        f"{format_us(picture.unswapped_us)}. "
        f"Memory: {format_size(picture.planned.peak_bytes)} at most by the plan, {format_size(picture.unswapped.peak_bytes)} "
        f"without swapping, within a budget of {format_size(picture.hbm_budget_bytes)}.{unlike}{thinned}</p>"
        f"{_legend(picture)}"
        f'<div class="chart" tabindex="0" aria-label="The step over time; arrow keys move, + and - zoom">'
        f'<div class="lane memory"><span><b>{format_size(most)}</b><b>device memory</b><b>0</b></span>{memory}</div>'
        f'{lanes}<div class="cursor"></div></div>{drawing.below_chart(end_us)}</section>'
    )


def _frame(picture: StepPicture) -> tuple[float, int]:
    """Time and bytes that the chart goes to."""
    most = max(picture.hbm_budget_bytes, picture.planned.peak_bytes, picture.unswapped.peak_bytes)
    return max(picture.planned.end_us, picture.unswapped.end_us), int(most * 1.05)


_BARS = {
    "forward": "forward", "backward": "backward", "optimizer": "optimizer", RECOMPUTE: "recomputed", STALL: "compute waits",
    SWAPPED: "copy", IN_PART: "copy of a part", HELD: "copy of what is held",
}  # fmt: skip
"""Kinds of bars, and what the legend calls them."""


def _legend(picture: StepPicture) -> str:
    drawn = {bar.kind for bar in (*picture.compute, *picture.out, *picture.back)}
    lines = (("planned", "", "by the plan"), ("unswapped", "", "without swapping"), ("budget", " dash", "budget"))
    rules = [f'<li><i class="rule{dash}" style="--c:var(--{colour})"></i>{text}</li>' for colour, dash, text in lines]
    items = [
        f'<li><i style="--c:var(--{drawing.CSS.get(kind, kind)})"></i>{text}</li>'
        for kind, text in _BARS.items()
        if kind in drawn
    ]
    return f'<ul class="legend">{"".join(rules + items)}</ul>'


def step_columns(picture: StepPicture) -> dict[str, Any]:
    """Both curves and all bars as drawn, for the script."""
    end_us, _ = _frame(picture)
    found: dict[str, Any] = {"end_us": end_us, "budget_bytes": picture.hbm_budget_bytes}
    for name, memory in (("planned", picture.planned), ("unswapped", picture.unswapped)):
        thin = drawing.thinned_memory(memory)
        found[name] = {"at_us": _rounded(thin.at_us.tolist()), "bytes": thin.nbytes.tolist(), "end_us": thin.end_us}
    for name, bars in (("compute", picture.compute), ("out", picture.out), ("back", picture.back)):
        found[name] = drawing.columns(bars, kinds=name == "compute")
    return found


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(value, 3) for value in values]
