"""Page of a report: a single HTML file that needs no network.

    text = page_html(report.rows(), report.to_dict(), picture, steps)

Shapes and figures need no script. A script adds the values under the pointer, the zoom, and the table of tensors, from JSON in
the page.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from statistics import median
from typing import Any

import numpy as np

from chameleon_mm.report.step_history import StepFigures
from chameleon_mm.report.step_picture import HELD, IN_PART, RECOMPUTE, STALL, SWAPPED, WHAT_PLANS_DO, Bar, Memory, StepPicture
from chameleon_mm.swap.metrics import StepKind
from chameleon_mm.units import format_size, format_us

# --- Shapes of the page's charts as SVG text. Each chart is 1000 units wide, for its whole time, and 100 units high
#
# The browser stretches them to the available width. The drawn values can be computed from the coordinates.

WIDTH, HEIGHT = 1000, 100

MOST_POINTS = 3_000
"""Maximum number of points of a curve. If there are more values, each point is the maximum of an interval of time."""

CSS = {"in part": "part"}
"""CSS classes of kinds whose names are not valid classes."""


def number(value: float) -> str:
    """Return the text of a coordinate, rounded to 0.001, without trailing zeros."""
    return f"{value:.3f}".rstrip("0").rstrip(".") or "0"


def thinned_memory(memory: Memory) -> Memory:
    """Reduce `memory` to at most `MOST_POINTS` points, each the maximum of its interval if there are more."""
    if len(memory.at_us) <= MOST_POINTS:
        return memory
    edges = np.linspace(0.0, memory.end_us, MOST_POINTS, endpoint=False)
    until = np.append(edges[1:], memory.end_us)
    first = np.maximum(np.searchsorted(memory.at_us, edges, side="right") - 1, 0)
    behind = np.maximum(np.searchsorted(memory.at_us, until, side="left"), first + 1)
    most = np.array([memory.nbytes[a:b].max() for a, b in zip(first.tolist(), behind.tolist(), strict=True)], np.int64)
    return Memory(at_us=edges, nbytes=most, end_us=memory.end_us)


def lane(name: str, bars: Iterable[Bar], end_us: float, label: str) -> str:
    """Return the SVG of one engine: a path for each kind of bar, and an empty path for the bars of the selected tensor."""
    at = ((bar.kind, _x(bar.start_us, end_us), _x(bar.end_us, end_us)) for bar in bars)
    shapes = ((f"bar {CSS.get(kind, kind)}", f"M{start} 0H{end}V{HEIGHT}H{start}Z") for kind, start, end in at)
    return _svg(name, label, f'{_paths(shapes)}<path class="pick" d=""/>')


def memory_shapes(planned: Memory, unswapped: Memory, budget_bytes: int, end_us: float, most_bytes: int) -> str:
    curve = _curve(planned, end_us, most_bytes)
    closed = f"{curve}V{HEIGHT}H0Z" if curve else ""
    y = _y(budget_bytes, most_bytes)
    shapes = (
        f'<path class="area" d="{closed}"/>'
        f'<path class="line unswapped" d="{_curve(unswapped, end_us, most_bytes)}"/>'
        f'<path class="line planned" d="{curve}"/>'
        f'<line class="budget" x1="0" x2="{WIDTH}" y1="{y}" y2="{y}"/>'
    )
    return _svg("memory", "device memory over the step", shapes)


def strip(name: str, steps: Sequence[tuple[str, float | None]], most: float, label: str, *, line: Sequence[float] = ()) -> str:
    """Return an SVG with a bar for each step, given as (class, value); None: no value. `line`: a level for each step."""
    width = WIDTH / max(len(steps), 1)
    at = ((css, number(i * width), number((i + 0.9) * width), value) for i, (css, value) in enumerate(steps))
    bars = ((css, f"M{start} {HEIGHT}V{_y(v, most)}H{end}V{HEIGHT}Z") for css, start, end, v in at if v is not None)
    level = "".join(f"{'M0 ' if not i else 'V'}{_y(at, most)}H{number((i + 1) * width)}" for i, at in enumerate(line))
    over = f'<path class="budget" fill="none" d="{level}"/>' if level else ""
    return _svg(name, label, _paths(bars) + over)


def _svg(row: str, label: str, shapes: str) -> str:
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none"'
    return f'<svg data-row="{row}" {box} role="img" aria-label="{label}">{shapes}</svg>'


def _paths(shapes: Iterable[tuple[str, str]]) -> str:
    """Return a path for each class, with all its shapes."""
    of_class: dict[str, list[str]] = {}
    for css, shape in shapes:
        of_class.setdefault(css, []).append(shape)
    return "".join(f'<path class="{css}" data-bars="{len(them)}" d="{"".join(them)}"/>' for css, them in of_class.items())


def below_chart(end_us: float) -> str:
    """Return the HTML below a chart over time: its axis, the values under the pointer, and the zoom buttons."""
    ticks = "".join(f"<span>{format_us(end_us * i / 4)}</span>" for i in range(5))
    names = (("in", "zoom in"), ("out", "zoom out"), ("left", "earlier"), ("right", "later"), ("all", "whole step"))
    buttons = "".join(f'<button type="button" data-zoom="{name}">{text}</button>' for name, text in names)
    return (
        f'<div class="axis">{ticks}</div><p class="readout needs-script" aria-live="polite">Point at the chart, or tap it, to '
        f'read it.</p><div class="controls needs-script">{buttons}</div>'
    )


def _curve(memory: Memory, end_us: float, most_bytes: int) -> str:
    """Return the path of a step function: each value holds until the next."""
    at_us, nbytes = memory.at_us.tolist(), memory.nbytes.tolist()
    steps = "".join(
        f"{'M' if not i else 'H'}{_x(us, end_us)}{' ' if not i else 'V'}{_y(value, most_bytes)}"
        for i, (us, value) in enumerate(zip(at_us, nbytes, strict=True))
    )
    return f"{steps}H{_x(memory.end_us, end_us)}"


def _x(us: float, end_us: float) -> str:
    return number(WIDTH * us / end_us) if end_us > 0 else "0"


def _y(value: float, most: float) -> str:
    return number(HEIGHT - HEIGHT * value / most) if most > 0 else str(HEIGHT)


# --- Section of the page about the planned step: memory, compute and copies over time


def step_section(picture: StepPicture | None) -> str:
    """Return the HTML of the section. `picture`: None: there is no plan."""
    if picture is None:
        return (
            '<section id="step"><h2>The step, by its plan</h2><p>There is no plan, so nothing is predicted. One is made of the '
            "first step that is recorded to its end, unless the session was made with plans=False or no plan is within the "
            "budget.</p></section>"
        )
    end_us, most = _frame(picture)
    source, timeline, budget_bytes = picture.source, picture.timeline, picture.source.plan.hbm_budget_bytes
    measured = f", {format_us(median(source.times_us))} measured" if source.times_us else ""
    thin = max(len(picture.planned.at_us), len(picture.unswapped.at_us)) > MOST_POINTS
    thinned = f" Each point of a curve is the most within a {MOST_POINTS}th of the step." if thin else ""
    unlike = " Nobody recorded a step of these sizes: its trace follows from those of others." if source.predicted else ""
    rows = (("compute", "compute", picture.compute), ("out", "to the host", picture.out), ("back", "back", picture.back))
    lanes = "".join(f'<div class="lane"><span>{text}</span>{lane(name, bars, end_us, text)}</div>' for name, text, bars in rows)
    memory = memory_shapes(thinned_memory(picture.planned), thinned_memory(picture.unswapped), budget_bytes, end_us, most)
    return (
        f'<section id="step"><h2>The step, by its plan <span class="badge">predicted</span></h2>'
        f'<p class="note">{format_us(timeline.step_us)} predicted{measured}, of which compute waits '
        f"{format_us(timeline.stall_us)} and runs operators again for {format_us(timeline.recompute_us)}; without swapping "
        f"{format_us(picture.unswapped.end_us)}. "
        f"Memory: {format_size(picture.planned.peak_bytes)} at most by the plan, {format_size(picture.unswapped.peak_bytes)} "
        f"without swapping, within the {format_size(budget_bytes)} that it was made for.{unlike}{thinned}</p>"
        f"{_legend(picture)}"
        f'<div class="chart" tabindex="0" aria-label="The step over time; arrow keys move, + and - zoom">'
        f'<div class="lane memory"><span><b>{format_size(most)}</b><b>device memory</b><b>0</b></span>{memory}</div>'
        f'{lanes}<div class="cursor"></div></div>{below_chart(end_us)}</section>'
    )


def _frame(picture: StepPicture) -> tuple[float, int]:
    most = max(picture.source.plan.hbm_budget_bytes, picture.planned.peak_bytes, picture.unswapped.peak_bytes)
    return max(picture.planned.end_us, picture.unswapped.end_us), int(most * 1.05)


_BARS = {
    "forward": "forward", "backward": "backward", "optimizer": "optimizer", RECOMPUTE: "recomputed", STALL: "compute waits",
    SWAPPED: "copy", IN_PART: "copy of a part", HELD: "copy of what is held",
}  # fmt: skip


def _legend(picture: StepPicture) -> str:
    drawn = {bar.kind for bar in (*picture.compute, *picture.out, *picture.back)}
    lines = (("planned", "", "by the plan"), ("unswapped", "", "without swapping"), ("budget", " dash", "budget"))
    rules = [f'<li><i class="rule{dash}" style="--c:var(--{colour})"></i>{text}</li>' for colour, dash, text in lines]
    items = [f'<li><i style="--c:var(--{CSS.get(key, key)})"></i>{text}</li>' for key, text in _BARS.items() if key in drawn]
    return f'<ul class="legend">{"".join(rules + items)}</ul>'


def step_columns(picture: StepPicture) -> dict[str, Any]:
    end_us, _ = _frame(picture)
    found: dict[str, Any] = {"end_us": end_us, "budget_bytes": picture.source.plan.hbm_budget_bytes}
    for name, memory in (("planned", picture.planned), ("unswapped", picture.unswapped)):
        thin = thinned_memory(memory)
        found[name] = {
            "at_us": [round(us, 3) for us in thin.at_us.tolist()],
            "bytes": thin.nbytes.tolist(),
            "end_us": thin.end_us,
        }
    for name, bars in (("compute", picture.compute), ("out", picture.out), ("back", picture.back)):
        found[name] = {
            "from": [round(bar.start_us, 3) for bar in bars],
            "to": [round(bar.end_us, 3) for bar in bars],
            "tensor": [bar.tensor for bar in bars],
            **({"kind": [bar.kind for bar in bars]} if name == "compute" else {"bytes": [bar.nbytes for bar in bars]}),
        }
    return found


# --- Section of the page about all steps: kind, peak against budget, time and stall of each

MOST_STEPS = 1_000
"""Maximum number of steps on the page. The latest are shown; each bar is then a pixel wide."""


def steps_section(all_steps: Sequence[StepFigures]) -> str:
    steps = all_steps[-MOST_STEPS:]
    if not steps:
        return '<section id="steps"><h2>Steps</h2><p>No step has ended.</p></section>'
    budgets = [float(step.hbm_budget_bytes) for step in steps]
    peaks = [(f"{step.kind.value}-step", float(step.peak_hbm_bytes)) for step in steps]
    times = [(css, step.step_us) for (css, _), step in zip(peaks, steps, strict=True)]
    stalls = [("stall", step.stall_us) for step in steps]
    lanes = (("peak", peaks, format_size, budgets), ("time", times, format_us, ()), ("stall", stalls, format_us, ()))
    strips = ""
    for name, values, show, line in lanes:
        most = 1.05 * max((value or 0.0 for value in (*(value for _, value in values), *line)), default=0.0)
        drawn = strip(name, values, most, f"{name} of each step", line=line)
        strips += f'<div class="lane"><span>{name}, to {show(most)}</span>{drawn}</div>'
    seen = [kind for kind in StepKind if any(step.kind is kind for step in steps)]
    legend = "".join(f'<li><i class="{kind.value}-step"></i>{kind}</li>' for kind in seen)
    before = len(all_steps) - len(steps)
    older = f" The {before} before them are left out." if before else ""
    if warm_up := sum(step.warm_up for step in steps):
        first = "The first step is" if warm_up == 1 else f"The first {warm_up} steps are"
        older += f" {first} warm-up: none followed a plan yet."
    return (
        f'<section id="steps"><h2>Steps</h2><p class="note">Steps {steps[0].index} to '
        f"{steps[-1].index}: peak of device memory against the budget, time, and stall. A step that was not timed has no time."
        f'{older}</p><ul class="legend">{legend}<li><i class="rule dash" style="--c:var(--budget)"></i>budget</li></ul>'
        f'<div class="chart" tabindex="0" aria-label="Steps; arrow keys move">{strips}</div>'
        f'<p class="readout needs-script" aria-live="polite">Point at a step, or tap it, to read it.</p></section>'
    )


# --- Section of the page about the planned step's tensors: a table that the script fills, sorts and filters

MOST_TENSORS = 8_000
"""Maximum number of tensors in the page's table. The largest are shown; 5000 make a page of 2 MiB."""

_COLUMNS = (
    ("name", "tensor"), ("does", "plan"), ("bytes", "size"), ("moved_bytes", "crosses"), ("saved_us", "made"),
    ("away_us", "away"), ("back_us", "back"), ("used_us", "used"), ("stall_us", "stall"),
)  # fmt: skip


def tensor_section(picture: StepPicture | None) -> str:
    """Return the HTML of the section; empty if there is no plan."""
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
    left = picture.tensors[MOST_TENSORS:]
    out = f" The {len(left)} smallest, {format_size(sum(row.nbytes for row in left))} in all, are left out." if left else ""
    return (
        '<section id="tensors" class="needs-script"><h2>Its tensors <span class="badge">predicted</span></h2>'
        '<p class="note">What autograd saves and may move, and what is held for others to be recomputed from it. Pick a row '
        f"to see its copies in the chart above.{out}</p>"
        '<div class="controls"><input type="search" placeholder="filter by name" '
        f'aria-label="Filter by name">{buttons}</div>'
        '<p class="note count"></p>'
        f'<div class="scroll"><table class="wide cards tensors"><thead><tr>{heads}</tr></thead>'
        "<tbody></tbody></table></div>"
        '<div class="controls"><button type="button" class="more" hidden>show more</button></div></section>'
    )


def tensor_columns(picture: StepPicture) -> dict[str, Any]:
    names = ("tensor", *(key for key, _ in _COLUMNS))
    rows = [[row.nbytes if name == "bytes" else getattr(row, name) for name in names] for row in picture.tensors[:MOST_TENSORS]]
    return {"columns": names, "rows": [[round(x, 2) if isinstance(x, float) else x for x in row] for row in rows]}


_PART = re.compile(r"<!--(\w+)-->")


def page_html(
    rows: Sequence[tuple[str, str]], figures: Mapping[str, Any], picture: StepPicture | None, steps: Sequence[StepFigures]
) -> str:
    """Return the text of the page. `rows`: label and text of each figure. `figures`: the report's dict. `picture`: the latest
    planned step; None: there is none."""
    clock = "All times are of the simulator's virtual clock." if figures["simulated"] else "Times are of the device's clock."
    parts = {
        "title": html.escape(f"Swap report: {figures['device']}"),
        "style": _file("page.css"),
        "script": _file("page.js"),
        "clock": clock,
        "answer": html.escape(dict(rows).get("in short", "")),
        "problems": "".join(f'<p class="problem">{html.escape(text)}</p>' for label, text in rows if label == "PROBLEM"),
        "step": step_section(picture),
        "tensors": tensor_section(picture),
        "steps": steps_section(steps),
        "figures": "".join(
            f'<tr><th scope="row">{html.escape(label)}</th><td>{html.escape(text)}</td></tr>' for label, text in rows
        ),
        "data": _json(_data(figures, picture, steps)),
    }
    return _PART.sub(lambda match: parts[match[1]], _file("page.html"))


def _file(name: str) -> str:
    return (files("chameleon_mm.report") / name).read_text(encoding="utf-8")


def _json(data: Mapping[str, Any]) -> str:
    """Return JSON that cannot end the page's script element, even if a name contains markup."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _data(figures: Mapping[str, Any], picture: StepPicture | None, steps: Sequence[StepFigures]) -> dict[str, Any]:
    found: dict[str, Any] = {"figures": figures}
    if picture is not None:
        found["step"] = step_columns(picture)
        if picture.tensors:
            found["tensors"] = tensor_columns(picture)
    if steps:
        found["steps"] = [step.to_dict() for step in steps[-MOST_STEPS:]]
    return found
