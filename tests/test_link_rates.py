"""The link's rates from copies that were timed: exact where the copies are, kept where there are too few."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import chameleon_mm as cm
from chameleon_mm.executor.link_rates import UNMEASURED_LINK, link_cost_for, rates_of
from chameleon_mm.executor.meter import CopySpan
from chameleon_mm.policy import LinkCost
from chameleon_mm.policy.engine import CopyEngine
from chameleon_mm.units import MIB

TRUE = LinkCost(d2h_gbps=40.0, h2d_gbps=50.0, duplex_gbps=70.0)


def spans(direction: str, count: int, *, nbytes: int = 8 * MIB, gbps: float, start_us: float = 0.0) -> list[CopySpan]:
    """Copies in a row, nothing between them."""
    took = TRUE.copy_us + nbytes / (gbps * 1e3)
    return [CopySpan(direction, start_us + i * took, start_us + (i + 1) * took, nbytes) for i in range(count)]


def test_nothing_measured_is_the_other() -> None:
    assert rates_of([], TRUE) == TRUE


def test_each_direction_alone() -> None:
    got = rates_of([*spans("out", 8, gbps=30.0), *spans("in", 8, gbps=20.0, start_us=1e6)], TRUE)
    assert got.d2h_gbps == pytest.approx(30.0)
    assert got.h2d_gbps == pytest.approx(20.0)
    assert got.duplex_gbps == pytest.approx(70.0 * 50.0 / 90.0)  # as it stood to both alone
    assert (got.copy_us, got.piece_bytes, got.hbm_gbps) == (TRUE.copy_us, TRUE.piece_bytes, TRUE.hbm_gbps)


def test_three_pieces_are_too_few() -> None:
    assert rates_of(spans("out", 3, gbps=30.0), TRUE) == TRUE
    assert rates_of(spans("out", 4, gbps=30.0), TRUE).d2h_gbps == pytest.approx(30.0)


def test_small_copies_tell_of_the_fixed_cost_alone() -> None:
    assert rates_of(spans("out", 50, nbytes=1024, gbps=30.0), TRUE) == TRUE


def test_a_stalled_copy_among_many_changes_nothing() -> None:
    late = CopySpan("out", 1e6, 2e6, 8 * MIB)
    assert rates_of([*spans("out", 9, gbps=30.0), late], TRUE).d2h_gbps == pytest.approx(30.0)


def test_both_ways_at_once() -> None:
    """One direction at 30, the other at 25 beside it, after each was alone at 40 and 50."""
    alone = [*spans("out", 6, gbps=40.0), *spans("in", 6, gbps=50.0, start_us=1e5)]
    took = 1_000.0
    beside = [CopySpan("out", 1e6, 1e6 + took, int(30.0 * took * 1e3)), CopySpan("in", 1e6, 1e6 + took, int(25.0 * took * 1e3))]
    got = rates_of([*alone, *beside], TRUE)
    assert got.duplex_gbps == pytest.approx(55.0)
    assert got.d2h_gbps == pytest.approx(40.0)
    assert got.h2d_gbps == pytest.approx(50.0)


def test_both_together_are_at_least_one_and_at_most_the_sum() -> None:
    took = 1_000.0
    slow = [CopySpan(way, 0.0, took, int(5.0 * took * 1e3)) for way in ("out", "in")]
    assert rates_of(slow, TRUE).duplex_gbps == 50.0
    fast = [CopySpan(way, 0.0, took, int(500.0 * took * 1e3)) for way in ("out", "in")]
    assert rates_of(fast, TRUE).duplex_gbps == 90.0


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 2_000), st.integers(1, 64 * MIB)), max_size=30))
def test_whatever_was_copied_the_result_is_a_link(copies: Sequence[tuple[bool, float, int]]) -> None:
    """Copies as the engines of any link run them."""
    out, back = CopyEngine.pair(TRUE)
    now = 0.0
    for outward, after_us, nbytes in copies:
        now += after_us
        (out if outward else back).queue(0, nbytes, now)
    timed = [
        CopySpan(way, span.start_us, span.end_us, span.nbytes)
        for way, engine in (("out", out), ("in", back))
        for span in engine.spans
    ]
    got = rates_of(timed, UNMEASURED_LINK)
    assert max(got.d2h_gbps, got.h2d_gbps) <= got.duplex_gbps <= got.d2h_gbps + got.h2d_gbps + 1e-9


def test_a_link_that_nobody_measured_is_the_datasheets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert link_cost_for(cm.SimDevice()) == UNMEASURED_LINK
