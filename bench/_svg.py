"""A small line chart as SVG text: what a table of rates by size looks like.

    text = rates_svg("simulated H200: ...", {"pack": [(4096, 21.3), ...], ...})       # bytes -> GB/s

Written by hand, for a plotting library would be the largest dependency here, for one picture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from chameleon_mm.units import format_size

_WIDTH, _HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 130, 40, 44
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#777777")  # told apart by the colour-blind too
_STEPS = (1, 2, 5)


def rates_svg(title: str, curves: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Each of `curves` as a line: sizes in bytes on a logarithmic axis, GB/s from 0 up. Raises `ValueError` for no points."""
    points = [point for curve in curves.values() for point in curve]
    if not points:
        raise ValueError("rates_svg: expected a point or more, got none; measure a size")
    sizes = sorted({nbytes for nbytes, _ in points})
    step = _step(max(rate for _, rate in points))
    top = step * math.ceil(max(rate for _, rate in points) / step)
    span = math.log(sizes[-1] / sizes[0]) or 1.0

    def x(nbytes: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * math.log(nbytes / sizes[0]) / span

    def y(rate: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * rate / top

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for i in range(round(top / step) + 1):
        at = y(i * step)
        lines.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        lines.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{i * step:g}</text>')
    lines.append(f'<text x="{_LEFT - 40}" y="{_TOP - 6}">GB/s</text>')
    for nbytes in sizes:
        text = format_size(nbytes).replace(".00", "").replace(".0", "")
        lines.append(f'<text x="{x(nbytes):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{text}</text>')
    for i, (name, curve) in enumerate(curves.items()):
        colour, row = _COLOURS[i % len(_COLOURS)], _TOP + 10 + 18 * i
        path = " ".join(f"{x(nbytes):.1f},{y(rate):.1f}" for nbytes, rate in sorted(curve))
        # Lines that lie on one another stay visible: each later one is thinner.
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{max(1.5, 5 - i)}"/>')
        lines.append(f'<rect x="{_WIDTH - _RIGHT + 12}" y="{row - 8}" width="14" height="4" fill="{colour}"/>')
        lines.append(f'<text x="{_WIDTH - _RIGHT + 32}" y="{row}">{escape(name)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _step(largest: float) -> float:
    """A round distance between lines, for about five of them."""
    power = 10.0 ** math.floor(math.log10(largest / 5)) if largest > 0 else 1.0
    return next((power * step for step in _STEPS if power * step * 5 >= largest), power * 10)
