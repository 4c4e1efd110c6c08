"""Where the texts of an SVG picture lie, for tests that no label lies on another."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import combinations

LETTER, LINE = 0.6, 1.2  # of the font's size: more than any letter of a sans-serif font takes on average, and its height

Box = tuple[float, float, float, float]
"""Left, top, right and bottom."""


def boxes(picture: ET.Element) -> dict[str, Box]:
    """Box of every text."""
    found = {}
    for text in picture.iterfind("{*}text"):
        size = float(text.get("font-size") or picture.get("font-size") or 0)
        words = text.text or ""
        width, left, bottom = LETTER * size * len(words), float(text.get("x") or 0), float(text.get("y") or 0)
        left -= {"middle": width / 2, "end": width}.get(text.get("text-anchor") or "", 0.0)
        found[words] = (left, bottom - LINE * size, left + width, bottom)
    return found


def check_texts(picture: ET.Element) -> None:
    """Fail where a text lies on another, or outside of the picture."""
    _, _, width, height = map(float, (picture.get("viewBox") or "").split())
    found = boxes(picture)
    for words, (left, top, right, bottom) in found.items():
        assert left >= 0 and top >= 0 and right <= width and bottom <= height, words
    for (one, a), (other, b) in combinations(found.items(), 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]  # left of it, right of it, above it, below it
        assert apart, (one, other)
