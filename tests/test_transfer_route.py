"""Which way a buffer goes, by its size alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_mm.transfer import Path, Thresholds
from chameleon_mm.units import KIB


@pytest.mark.parametrize(
    ("nbytes", "path"),
    [
        (0, Path.STAY), (4 * KIB - 1, Path.STAY), (4 * KIB, Path.PACK), (128 * KIB - 1, Path.PACK), (128 * KIB, Path.DIRECT),
        (1 << 40, Path.DIRECT),
    ],
)  # fmt: skip
def test_each_path_begins_where_the_one_before_it_ends(nbytes: int, path: Path) -> None:
    assert Thresholds().path(nbytes) is path


@given(st.lists(st.integers(0, 1 << 40), min_size=2, max_size=2).map(sorted), st.integers(0, 1 << 41), st.integers(0, 1 << 41))
def test_a_larger_buffer_never_takes_a_path_for_smaller_ones(ends: list[int], one: int, other: int) -> None:
    stay, pack = ends
    thresholds = Thresholds(stay_below_bytes=stay, pack_below_bytes=pack, staging_bytes=2 * pack)
    order = list(Path)
    small, large = sorted((one, other))
    assert order.index(thresholds.path(small)) <= order.index(thresholds.path(large))


@pytest.mark.parametrize(
    ("ends", "match"),
    [
        ({"stay_below_bytes": -1}, "stay_below_bytes: expected 0 bytes or more"),
        ({"pack_below_bytes": 4095}, "pack_below_bytes: expected 4096 bytes or more"),
    ],
)
def test_ends_out_of_order_are_refused(ends: dict[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Thresholds(**ends)
