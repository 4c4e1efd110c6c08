"""The picture of rates: everything lies within it, its axes have their units, and no label lies on another."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from chameleon_mm.bench._svg import rates_svg
from chameleon_mm.units import KIB, MIB
from tests._pictures import boxes, check_texts

SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB)
CURVES = {
    name: [(size, rate + i) for i, size in enumerate(SIZES)] for name, rate in (("ours", 40.0), ("loop", 1.0), ("cat", 9.0))
}
TITLE = "simulated H200, many tensors to pinned memory (simulated, no GPU took part)"


@pytest.fixture(scope="module")
def picture() -> ET.Element:
    return ET.fromstring(rates_svg(TITLE, CURVES))


def test_axes_have_their_units(picture: ET.Element) -> None:
    assert {"GB/s", "size of one tensor", "0", "50", "4 KiB", "1 MiB", TITLE, *CURVES} <= set(boxes(picture))


def test_no_text_lies_on_another_or_outside(picture: ET.Element) -> None:
    check_texts(picture)


def test_every_point_is_marked_and_every_curve_has_its_key(picture: ET.Element) -> None:
    circles = picture.findall("{*}circle")
    assert len(circles) == sum(map(len, CURVES.values())) + len(CURVES)
    assert len({circle.get("fill") for circle in circles}) == len(CURVES)
