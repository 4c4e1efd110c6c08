"""Shapes of the page's charts as SVG text. Each chart is 1000 wide for its whole stretch of time, and 100 high.

    lanes(rows, end_us)                        bars of engines: a path for each kind, whatever the number of bars
    memory_shapes(planned, unswapped, ...)     two curves under the budget line
    strip(values, most)                        a bar for each step

The browser stretches them to the width that there is. What was drawn can be worked out again from the coordinates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from chameleon_mm.report_page.step_picture import Bar, Memory
from chameleon_mm.units import format_us

WIDTH, HEIGHT = 1000, 100

MOST_POINTS = 3_000
"""Points of a curve. Where there are more, each point is the most of a stretch of time."""

CSS = {"in part": "part"}
"""Classes of kinds whose names are none."""


def number(value: float) -> str:
    """Text of a coordinate, to a thousandth, without zeros at its end."""
    return f"{value:.3f}".rstrip("0").rstrip(".") or "0"


def thinned_memory(memory: Memory) -> Memory:
    """`memory` in at most `MOST_POINTS` points, each the most of its stretch where there are more."""
    if len(memory.at_us) <= MOST_POINTS:
        return memory
    edges = np.linspace(0.0, memory.end_us, MOST_POINTS, endpoint=False)
    until = np.append(edges[1:], memory.end_us)
    first = np.maximum(np.searchsorted(memory.at_us, edges, side="right") - 1, 0)
    behind = np.maximum(np.searchsorted(memory.at_us, until, side="left"), first + 1)
    most = np.array([memory.nbytes[a:b].max() for a, b in zip(first.tolist(), behind.tolist(), strict=True)], np.int64)
    return Memory(at_us=edges, nbytes=most, end_us=memory.end_us)


def lane(name: str, bars: Iterable[Bar], end_us: float, label: str) -> str:
    """SVG of one engine: a path for each kind of bar, and an empty one for the bars of a tensor that is picked."""
    by_kind: dict[str, list[str]] = {}
    for bar in bars:
        start, end = _x(bar.start_us, end_us), _x(bar.end_us, end_us)
        by_kind.setdefault(bar.kind, []).append(f"M{start} 0H{end}V{HEIGHT}H{start}Z")
    paths = "".join(
        f'<path class="bar {CSS.get(kind, kind)}" data-bars="{len(shapes)}" d="{"".join(shapes)}"/>'
        for kind, shapes in by_kind.items()
    )
    return (
        f'<svg data-row="{name}" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{label}">'
        f'{paths}<path class="pick" d=""/></svg>'
    )


def lanes(rows: Iterable[tuple[str, str, Iterable[Bar]]], end_us: float) -> str:
    """HTML of engines below each other, (name, label, bars) each."""
    return "".join(
        f'<div class="lane"><span>{label}</span>{lane(name, bars, end_us, label)}</div>' for name, label, bars in rows
    )


def memory_shapes(planned: Memory, unswapped: Memory, budget_bytes: int, end_us: float, most_bytes: int) -> str:
    """SVG of both curves and the budget."""
    curve = _curve(planned, end_us, most_bytes)
    closed = f"{curve}V{HEIGHT}H0Z" if curve else ""
    y = _y(budget_bytes, most_bytes)
    return (
        f'<svg data-row="memory" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="device memory over the step">'
        f'<path class="area" d="{closed}"/>'
        f'<path class="line unswapped" d="{_curve(unswapped, end_us, most_bytes)}"/>'
        f'<path class="line planned" d="{curve}"/>'
        f'<line class="budget" x1="0" x2="{WIDTH}" y1="{y}" y2="{y}"/></svg>'
    )


def strip(name: str, steps: Sequence[tuple[str, float | None]], most: float, label: str, *, line: Sequence[float] = ()) -> str:
    """SVG of a bar for each step, (class, value) each; None: there is no value. `line`: a level for each step as well."""
    width = WIDTH / max(len(steps), 1)
    by_class: dict[str, list[str]] = {}
    for i, (css, value) in enumerate(steps):
        if value is not None:
            start, end = number(i * width), number((i + 0.9) * width)
            by_class.setdefault(css, []).append(f"M{start} {HEIGHT}V{_y(value, most)}H{end}V{HEIGHT}Z")
    paths = "".join(
        f'<path class="{css}" data-bars="{len(shapes)}" d="{"".join(shapes)}"/>' for css, shapes in by_class.items()
    )
    level = "".join(f"{'M0 ' if not i else 'V'}{_y(at, most)}H{number((i + 1) * width)}" for i, at in enumerate(line))
    over = f'<path class="budget" fill="none" d="{level}"/>' if level else ""
    return (
        f'<svg data-row="{name}" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{label}">'
        f"{paths}{over}</svg>"
    )


def below_chart(end_us: float) -> str:
    """HTML below a chart over time: its axis, the readout, and the buttons that zoom."""
    ticks = "".join(f"<span>{format_us(end_us * i / 4)}</span>" for i in range(5))
    names = (("in", "zoom in"), ("out", "zoom out"), ("left", "earlier"), ("right", "later"), ("all", "whole step"))
    buttons = "".join(f'<button type="button" data-zoom="{name}">{text}</button>' for name, text in names)
    return (
        f'<div class="axis">{ticks}</div><p class="readout needs-script" aria-live="polite">Point at the chart, or tap it, to '
        f'read it.</p><div class="controls needs-script">{buttons}</div>'
    )


def columns(bars: Sequence[Bar], *, kinds: bool = False) -> Mapping[str, list[float] | list[str] | list[int]]:
    """The bars in columns, for the page's script."""
    found: dict[str, list[float] | list[str] | list[int]] = {
        "from": [round(bar.start_us, 3) for bar in bars],
        "to": [round(bar.end_us, 3) for bar in bars],
        "tensor": [bar.tensor for bar in bars],
    }
    return {**found, "kind": [bar.kind for bar in bars]} if kinds else {**found, "bytes": [bar.nbytes for bar in bars]}


def _curve(memory: Memory, end_us: float, most_bytes: int) -> str:
    """Path of steps: each number holds until the next."""
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
