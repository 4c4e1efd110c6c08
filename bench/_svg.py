"""A small line chart as SVG text: what a table of rates by size looks like.

    text = rates_svg("simulated H200: ...", {"pack": [(4096, 21.3), ...], ...})       # bytes -> GB/s

Written by hand, for a plotting library would be the largest dependency here, for one picture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from chameleon_mm.units import format_size

_WIDTH, _HEIGHT = 760, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 124, 56, 60
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#777777")  # told apart by the colour-blind too
_STEPS = (1, 2, 5)
_GREY = "#555"


def rates_svg(title: str, curves: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Each of `curves` as a line: sizes in bytes on a logarithmic axis, GB/s from 0 up. Raises `ValueError` for no points."""
    points = [point for curve in curves.values() for point in curve]
    if not points:
        raise ValueError("rates_svg: expected a point or more, got none; measure a size")
    sizes = sorted({nbytes for nbytes, _ in points})
    step = _step(max(rate for _, rate in points))
    top = step * math.ceil(max(rate for _, rate in points) / step)
    span = math.log(sizes[-1] / sizes[0]) or 1.0
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x(nbytes: int) -> float:
        return _LEFT + (right - _LEFT) * math.log(nbytes / sizes[0]) / span

    def y(rate: float) -> float:
        return bottom - (bottom - _TOP) * rate / top

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT - 48}" y="22" font-size="15">{escape(title)}</text>',
        f'<text x="{_LEFT - 48}" y="{_TOP - 14}" fill="{_GREY}">GB/s</text>',
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 14}" text-anchor="middle" fill="{_GREY}">size of one tensor</text>',
    ]
    for i in range(round(top / step) + 1):
        at = y(i * step)
        lines.append(f'<line x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        lines.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{i * step:g}</text>')
    for nbytes in sizes:
        at, text = x(nbytes), format_size(nbytes).replace(".00", "").replace(".0", "")
        lines.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 5}" stroke="{_GREY}"/>')
        lines.append(f'<text x="{at:.1f}" y="{bottom + 20}" text-anchor="middle">{text}</text>')
    for i, (name, curve) in enumerate(curves.items()):
        colour, row = _COLOURS[i % len(_COLOURS)], _TOP + 8 + 22 * i
        # Lines that lie on one another stay visible: each later one is thinner, its points smaller.
        width = max(1.5, 4.5 - i)
        path = " ".join(f"{x(nbytes):.1f},{y(rate):.1f}" for nbytes, rate in sorted(curve))
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        circles = (
            f'<circle cx="{x(nbytes):.1f}" cy="{y(rate):.1f}" r="{width + 1.5}" fill="{colour}"/>' for nbytes, rate in curve
        )
        lines += circles
        key = right + 16
        lines.append(
            f'<line x1="{key}" x2="{key + 22}" y1="{row - 4}" y2="{row - 4}" stroke="{colour}" stroke-width="{width}"/>'
        )
        lines.append(f'<circle cx="{key + 11}" cy="{row - 4}" r="{width + 1.5}" fill="{colour}"/>')
        lines.append(f'<text x="{key + 30}" y="{row}">{escape(name)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _step(largest: float) -> float:
    """A round distance between lines, for about five of them."""
    power = 10.0 ** math.floor(math.log10(largest / 5)) if largest > 0 else 1.0
    return next((power * step for step in _STEPS if power * step * 5 >= largest), power * 10)
