"""The report's page: one HTML file of its own, which asks no network for anything.

    text = page_html(PageData(...))

The shapes, the figures and the largest tensors are in it as they are; a script adds what tells the number under the pointer, the
zoom, and the table's order and filter. What it works with is JSON in the page.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from chameleon_mm.report_page import drawing
from chameleon_mm.report_page.measured_step import MeasuredStep
from chameleon_mm.report_page.step_picture import WHAT_PLANS_DO, StepPicture, TensorRow
from chameleon_mm.saved.timed_spans import StepKind
from chameleon_mm.step_figures import StepFigures
from chameleon_mm.units import format_size, format_us

MOST_TENSORS = 8_000
"""Tensors in the page's table, the largest ones."""

MOST_STEPS = 1_000
"""Steps on the page, the latest ones."""

STATIC_ROWS = 100
"""Rows of a table that are there without the script."""

_PART = re.compile(r"<!--(\w+)-->")

_STEP_CLASS = {
    StepKind.PLANNED: "planned-step",
    StepKind.RECORDED: "recorded-step",
    StepKind.PARTLY_PLANNED: "partly-step",
    StepKind.BY_RULE: "rule-step",
    StepKind.FAILED: "failed-step",
}

_COLUMNS = (
    ("name", "tensor"), ("does", "plan"), ("bytes", "size"), ("moved_bytes", "crosses"), ("saved_us", "made"), ("away_us", "away"),
    ("back_us", "back"), ("used_us", "used"), ("stall_us", "stall"), ("measured_stall_us", "stall, measured"),
)  # fmt: skip
"""Columns of the table of tensors, and what stands above them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageData:
    """All that the page shows."""

    device: str
    simulated: bool
    rows: Sequence[tuple[str, str]]
    """Label and text of each figure."""
    figures: Mapping[str, Any]
    """The report's dict."""
    picture: StepPicture | None
    """The step planned last; None: there is none."""
    measured: MeasuredStep | None
    """The latest step that was timed in full."""
    steps: Sequence[StepFigures]


def page_html(data: PageData) -> str:
    """Text of the page."""
    title = f"Swap report: {data.device}"
    clock = "All times are of the simulator's virtual clock." if data.simulated else "Times are of the device's clock."
    parts = {
        "title": html.escape(title),
        "style": _file("page.css"),
        "script": _file("page.js"),
        "clock": clock,
        "problems": "".join(f'<p class="problem">{html.escape(text)}</p>' for label, text in data.rows if label == "PROBLEM"),
        "tiles": _tiles(data),
        "step": _step(data),
        "tensors": _tensors(data.picture),
        "measured": _measured(data),
        "steps": _steps(data),
        "figures": "".join(
            f'<tr><th scope="row">{html.escape(label)}</th><td>{html.escape(text)}</td></tr>' for label, text in data.rows
        ),
        "data": _json(_data(data)),
    }
    return _PART.sub(lambda match: parts[match[1]], _file("page.html"))


def _file(name: str) -> str:
    return (files("chameleon_mm.report_page") / name).read_text(encoding="utf-8")


def _json(data: Mapping[str, Any]) -> str:
    """JSON that ends no script, whatever a name holds."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# --- in short


def _tiles(data: PageData) -> str:
    figures = data.figures
    hidden, stall = figures["hidden_fraction"], figures["stall_us"]
    tiles = [
        ("budget", format_size(figures["hbm_budget_bytes"]), "device memory"),
        ("peak", format_size(figures["peak_hbm_bytes"]) if figures["peak_hbm_bytes"] else "not measured", "device memory"),
        ("host", format_size(figures["peak_host_bytes"]), "pinned memory at most"),
        ("moved", format_size(figures["bytes_swapped_out"]), "swapped out"),
        ("hidden", "not measured" if hidden is None else f"{100 * hidden:.1f} %", "of copy time hidden"),
        ("stall", "not measured" if stall is None else format_us(stall), "stall, timed steps"),
        ("steps", str(figures["steps"]), "steps completed"),
    ]
    return "".join(
        f'<div class="tile" data-figure="{name}"><span>{name}</span><b>{html.escape(text)}</b><span>{what}</span></div>'
        for name, text, what in tiles
    )


# --- the planned step


def _step(data: PageData) -> str:
    picture = data.picture
    if picture is None:
        return (
            '<section id="step"><h2>The step, by its plan</h2><p>No plan was made: nothing is predicted. A plan is made of the '
            "first step that is recorded to its end, unless the session was made with plans=False.</p></section>"
        )
    end_us, most = _frame(picture)
    measured = "" if picture.measured_step_us is None else f", {format_us(picture.measured_step_us)} measured"
    unlike = (
        " Nobody recorded a step of these sizes: its trace follows from those of others." if picture.sizes_predicted else ""
    )
    rows = (
        ("compute", "compute", picture.compute), ("out", "to the host", picture.out), ("back", "back", picture.back),
    )  # fmt: skip
    lanes = "".join(
        f'<div class="lane"><span>{label}</span>{drawing.lane(name, _thin(name, bars, end_us), end_us, label)}</div>'
        for name, label, bars in rows
    )
    memory = drawing.memory_shapes(
        drawing.thinned_memory(picture.planned),
        drawing.thinned_memory(picture.unswapped),
        picture.hbm_budget_bytes,
        end_us,
        most,
    )
    return (
        f'<section id="step"><h2>The step, by its plan <span class="badge">predicted</span></h2>'
        f'<p class="note">{format_us(picture.step_us)} predicted{measured}, of which compute waits {format_us(picture.stall_us)} '
        f"and runs operators again for {format_us(picture.recompute_us)}; without swapping {format_us(picture.unswapped_us)}. "
        f"Memory: {format_size(picture.planned.peak_bytes)} at most by the plan, {format_size(picture.unswapped.peak_bytes)} "
        f"without swapping, within a budget of {format_size(picture.hbm_budget_bytes)}.{unlike}</p>"
        f"{_legend()}"
        f'<div class="chart" tabindex="0" aria-label="The step over time; arrow keys move, + and - zoom">'
        f'<div class="lane memory"><span><b>{format_size(most)}</b><b>device memory</b><b>0</b></span>{memory}</div>'
        f'{lanes}<div class="cursor"></div></div>{_below(end_us)}{_thinning(picture, end_us)}</section>'
    )


def _frame(picture: StepPicture) -> tuple[float, int]:
    """Time and bytes that the chart goes to."""
    most = max(picture.hbm_budget_bytes, picture.planned.peak_bytes, picture.unswapped.peak_bytes)
    return max(picture.planned.end_us, picture.unswapped.end_us), int(most * 1.05)


def _thin(name: str, bars: Sequence[drawing.Bar], end_us: float) -> Sequence[drawing.Bar]:
    return drawing.thinned_bars(bars, end_us)


def _legend() -> str:
    bars = (
        ("forward", "forward"), ("backward", "backward"), ("optimizer", "optimizer"), ("recompute", "made again"),
        ("stall", "compute waits"), ("swapped", "copy"), ("part", "copy of a part"), ("held", "copy of what is held"),
    )  # fmt: skip
    lines = (("planned", "", "by the plan"), ("unswapped", "", "without swapping"), ("budget", " dash", "budget"))
    items = [f'<li><i style="--c:var(--{colour})"></i>{text}</li>' for colour, text in bars]
    rules = [f'<li><i class="rule{dash}" style="--c:var(--{colour})"></i>{text}</li>' for colour, dash, text in lines]
    return f'<ul class="legend">{"".join(rules + items)}</ul>'


def _below(end_us: float) -> str:
    """What stands below a chart over time: its axis, the readout, and the buttons that zoom."""
    ticks = "".join(f"<span>{format_us(end_us * i / 4)}</span>" for i in range(5))
    names = (("in", "zoom in"), ("out", "zoom out"), ("left", "earlier"), ("right", "later"), ("all", "whole step"))
    buttons = "".join(f'<button type="button" data-zoom="{name}">{text}</button>' for name, text in names)
    return (
        f'<div class="axis">{ticks}</div><p class="readout needs-script" aria-live="polite">Point at the chart, or tap it, to '
        f'read it.</p><div class="controls needs-script">{buttons}</div>'
    )


def _thinning(picture: StepPicture, end_us: float) -> str:
    """Sentences about what is drawn together."""
    told = []
    for label, bars in (
        ("copies to the host", picture.out),
        ("copies back", picture.back),
        ("bars of compute", picture.compute),
    ):
        drawn = len(drawing.thinned_bars(bars, end_us))
        if drawn < len(bars):
            told.append(f"{len(bars)} {label} are drawn as {drawn}, neighbours together.")
    if max(len(picture.planned.at_us), len(picture.unswapped.at_us)) > drawing.MOST_POINTS:
        told.append(f"Each point of a curve is the most within a {drawing.MOST_POINTS}th of the step.")
    return f'<p class="note">{" ".join(told)}</p>' if told else ""


# --- its tensors


def _tensors(picture: StepPicture | None) -> str:
    if picture is None or not picture.tensors:
        return ""
    kinds = [kind for kind in WHAT_PLANS_DO if any(row.does == kind for row in picture.tensors)]
    buttons = "".join(
        f'<button type="button" data-kind="{kind}" aria-pressed="{"false" if kind else "true"}">{kind or "all"}</button>'
        for kind in ("", *kinds)
    )
    heads = "".join(
        f'<th scope="col" aria-sort="none"{"" if key in ("name", "does") else " class=n"}>'
        f'<button type="button" data-key="{key}">{text}</button></th>'
        for key, text in _COLUMNS
    )
    listed = picture.tensors[:MOST_TENSORS]
    left = picture.tensors[MOST_TENSORS:]
    out = f" The {len(left)} smallest, {format_size(sum(row.nbytes for row in left))} in all, are left out." if left else ""
    return (
        '<section id="tensors"><h2>Its tensors <span class="badge">predicted</span></h2>'
        f'<p class="note">What autograd saves and may move, and what is held for others to be made again from it. Pick a row to '
        f"see its copies in the chart above.{out}</p>"
        '<div class="controls needs-script"><input type="search" placeholder="filter by name or operator" '
        f'aria-label="Filter by name or operator">{buttons}</div>'
        f'<p class="note count">The {min(STATIC_ROWS, len(listed))} largest of {len(picture.tensors)}</p>'
        f'<div class="scroll"><table class="wide cards tensors"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(map(_tensor_row, listed[:STATIC_ROWS]))}</tbody></table></div>"
        '<div class="controls needs-script"><button type="button" class="more" hidden>show more</button></div></section>'
    )


def _tensor_row(row: TensorRow) -> str:
    cells = [
        f"<td>{html.escape(row.name)}</td>",
        f'<td data-label="plan"><i class="mark {drawing.CSS.get(row.does, row.does)}"></i>{row.does}</td>',
    ]
    for key, label in _COLUMNS[2:]:
        value = row.nbytes if key == "bytes" else getattr(row, key)
        shown = "&ndash;" if value is None or (key == "moved_bytes" and not value) else _shown(key, value)
        cells.append(f'<td class="n" data-label="{label}">{shown}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def _shown(key: str, value: float) -> str:
    return format_size(value) if key.endswith("bytes") else format_us(value)


# --- the latest timed step


def _measured(data: PageData) -> str:
    found = data.measured
    if found is None:
        return ""
    badge = "simulated" if data.simulated else "measured"
    end_us = found.end_us
    rows = (("compute", "waits", found.compute), ("out", "to the host", found.out), ("back", "back", found.back))
    lanes = "".join(
        f'<div class="lane"><span>{label}</span>{drawing.lane(name, bars, end_us, label)}</div>' for name, label, bars in rows
    )
    waits = sum(bar.end_us - bar.start_us for bar in found.compute if bar.kind == "stall")
    copies = sum(bar.end_us - bar.start_us for bar in (*found.out, *found.back))
    return (
        f'<section id="measured"><h2>The latest timed step, as it ran <span class="badge">{badge}</span></h2>'
        f'<p class="note">Step {found.number} ({found.kind}): {format_us(found.step_us)}, of which compute waited '
        f"{format_us(waits)}; its {len(found.out) + len(found.back)} copies took {format_us(copies)}.</p>"
        f'<div class="chart" tabindex="0" aria-label="The copies over time; arrow keys move, + and - zoom">{lanes}'
        f'<div class="cursor"></div></div>{_below(end_us)}</section>'
    )


# --- all steps


def _steps(data: PageData) -> str:
    steps = data.steps[-MOST_STEPS:]
    if not steps:
        return '<section id="steps"><h2>Steps</h2><p>No step has ended.</p></section>'
    most_bytes = 1.05 * max(max(step.peak_hbm_bytes, step.hbm_budget_bytes) for step in steps)
    most_us = 1.05 * max((step.step_us or 0.0 for step in steps), default=0.0)
    classes = [_STEP_CLASS[step.kind] for step in steps]
    peaks = [(css, float(step.peak_hbm_bytes)) for css, step in zip(classes, steps, strict=True)]
    times = [(css, step.step_us) for css, step in zip(classes, steps, strict=True)]
    stalls = [("stall", step.stall_us) for step in steps]
    most_stall = 1.05 * max((step.stall_us or 0.0 for step in steps), default=0.0)
    budgets = [float(step.hbm_budget_bytes) for step in steps]
    seen = [kind for kind in StepKind if any(step.kind is kind for step in steps)]
    legend = "".join(f'<li><i class="{_STEP_CLASS[kind]}" style="--c:{_COLOURS[kind]}"></i>{kind.value}</li>' for kind in seen)
    before = len(data.steps) - len(steps)
    older = f" The {before} before them are left out." if before else ""
    return (
        f'<section id="steps"><h2>Steps</h2><p class="note">{_count(len(steps), "step")}, from {steps[0].index} to '
        f"{steps[-1].index}: peak of device memory against the budget, time, and stall. A step that was not timed has no time."
        f'{older}</p><ul class="legend">{legend}<li><i class="rule dash" style="--c:var(--budget)"></i>budget</li></ul>'
        f'<div class="chart" tabindex="0" aria-label="Steps; arrow keys move">'
        f'<div class="lane"><span>peak, to {format_size(most_bytes)}</span>'
        f"{drawing.strip('peak', peaks, most_bytes, 'peak of each step', line=budgets)}</div>"
        f'<div class="lane"><span>time, to {format_us(most_us)}</span>{drawing.strip("time", times, most_us, "time of each step")}</div>'
        f'<div class="lane"><span>stall, to {format_us(most_stall)}</span>'
        f"{drawing.strip('stall', stalls, most_stall, 'stall of each step')}</div></div>"
        f'<p class="readout needs-script" aria-live="polite">Point at a step, or tap it, to read it.</p>'
        f"{_step_table(steps)}</section>"
    )


_COLOURS = {
    StepKind.PLANNED: "var(--planned)",
    StepKind.RECORDED: "var(--recompute)",
    StepKind.PARTLY_PLANNED: "var(--part)",
    StepKind.BY_RULE: "var(--kept)",
    StepKind.FAILED: "var(--stall)",
}


def _step_table(steps: Sequence[StepFigures]) -> str:
    heads = ("step", "what it was", "peak", "budget", "host", "out", "back", "time", "stall", "hidden")
    rows = []
    for step in reversed(steps[-STATIC_ROWS:]):
        hidden = step.hidden_fraction
        texts = (
            step.kind.value, format_size(step.peak_hbm_bytes), format_size(step.hbm_budget_bytes), format_size(step.host_bytes),
            format_size(step.bytes_out), format_size(step.bytes_in), _or_dash(step.step_us), _or_dash(step.stall_us),
            "&ndash;" if hidden is None else f"{100 * hidden:.1f} %",
        )  # fmt: skip
        cells = "".join(f'<td data-label="{head}">{text}</td>' for head, text in zip(heads[1:], texts, strict=True))
        rows.append(f'<tr data-step="{step.index}"><td>step {step.index}</td>{cells}</tr>')
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    return (
        f"<details><summary>The latest {len(rows)} as a table</summary>"
        f'<div class="scroll"><table class="wide cards"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        "</details>"
    )


def _or_dash(us: float | None) -> str:
    return "&ndash;" if us is None else format_us(us)


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


# --- for the script


def _data(data: PageData) -> dict[str, Any]:
    found: dict[str, Any] = {"figures": data.figures}
    if (picture := data.picture) is not None:
        end_us, _ = _frame(picture)
        curves = {
            name: {"at_us": _rounded(thin.at_us.tolist()), "bytes": thin.nbytes.tolist(), "end_us": thin.end_us}
            for name, memory in (("planned", picture.planned), ("unswapped", picture.unswapped))
            for thin in (drawing.thinned_memory(memory),)
        }
        bars = {
            name: drawing.columns(drawing.thinned_bars(of, end_us), kinds=name == "compute")
            for name, of in (("compute", picture.compute), ("out", picture.out), ("back", picture.back))
        }
        found["step"] = {"end_us": end_us, "budget_bytes": picture.hbm_budget_bytes, **curves, **bars}
        names = ("tensor", "name", "made_by", *(key for key, _ in _COLUMNS[1:]))
        if picture.tensors:
            found["tensors"] = {"columns": names, "rows": [_values(row, names) for row in picture.tensors[:MOST_TENSORS]]}
    if (measured := data.measured) is not None:
        found["measured"] = {
            "end_us": measured.end_us,
            "compute": drawing.columns(measured.compute, kinds=True),
            "out": drawing.columns(measured.out),
            "back": drawing.columns(measured.back),
        }
    if data.steps:
        found["steps"] = [step.to_dict() for step in data.steps[-MOST_STEPS:]]
    return found


def _values(row: TensorRow, names: Iterable[str]) -> list[Any]:
    values = [row.nbytes if name == "bytes" else getattr(row, name) for name in names]
    return [round(value, 2) if isinstance(value, float) else value for value in values]


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(value, 3) for value in values]
