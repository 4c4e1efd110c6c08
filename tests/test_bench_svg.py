"""The picture of rates: everything lies within it, its axes have their units, and no label lies on another."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import combinations

import pytest

from chameleon_mm.bench._svg import rates_svg
from chameleon_mm.units import KIB, MIB

SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB)
CURVES = {
    name: [(size, rate + i) for i, size in enumerate(SIZES)] for name, rate in (("ours", 40.0), ("loop", 1.0), ("cat", 9.0))
}
TITLE = "simulated H200, many tensors to pinned memory (simulated, no GPU took part)"

_LETTER, _LINE = 0.6, 1.2  # of the font's size: more than any letter of a sans-serif font takes on average, and its height


@pytest.fixture(scope="module")
def picture() -> ET.Element:
    return ET.fromstring(rates_svg(TITLE, CURVES))


def boxes(picture: ET.Element) -> dict[str, tuple[float, float, float, float]]:
    """Left, top, right and bottom of every text."""
    found = {}
    for text in picture.iterfind("{*}text"):
        size = float(text.get("font-size") or picture.get("font-size") or 0)
        words = text.text or ""
        width, left, bottom = _LETTER * size * len(words), float(text.get("x") or 0), float(text.get("y") or 0)
        left -= {"middle": width / 2, "end": width}.get(text.get("text-anchor") or "", 0.0)
        found[words] = (left, bottom - _LINE * size, left + width, bottom)
    return found


def test_axes_have_their_units(picture: ET.Element) -> None:
    assert {"GB/s", "size of one tensor", "0", "50", "4 KiB", "1 MiB", TITLE, *CURVES} <= set(boxes(picture))


def test_no_text_lies_on_another_or_outside(picture: ET.Element) -> None:
    _, _, width, height = map(float, (picture.get("viewBox") or "").split())
    found = boxes(picture)
    for left, top, right, bottom in found.values():
        assert left >= 0 and top >= 0 and right <= width and bottom <= height
    apart = (
        a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1] for a, b in combinations(found.values(), 2)
    )  # left of it, right of it, above it, below it
    assert all(apart)


def test_every_point_is_marked_and_every_curve_has_its_key(picture: ET.Element) -> None:
    circles = picture.findall("{*}circle")
    assert len(circles) == sum(map(len, CURVES.values())) + len(CURVES)
    assert len({circle.get("fill") for circle in circles}) == len(CURVES)
