"""The link's rates from copies that were timed: exact where the copies are, kept where there are too few."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import inf, nan
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import chameleon_mm as cm
from chameleon_mm.adaptive import link_rates
from chameleon_mm.adaptive.link_rates import UNMEASURED_LINK, link_cost_for, rates_of
from chameleon_mm.policy import LinkCost
from chameleon_mm.policy.timing import CopyEngine
from chameleon_mm.saved.timed_spans import CopySpan
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


BAD = [
    CopySpan("in", 1e4, 1e4, 512),
    CopySpan("out", 1e4, 9e3, 8 * MIB),
    CopySpan("out", 1e4, nan, 8 * MIB),
    CopySpan("in", nan, 1e4, 8 * MIB),
    CopySpan("out", 1e4, inf, 8 * MIB),
    CopySpan("in", -inf, inf, 8 * MIB),
    CopySpan("out", 0.0, 1e300, 8 * MIB),
    CopySpan("out", 1e300, 1.1e300, 8 * MIB),
    CopySpan("in", 1e14, 1e14 + 500.0, 8 * MIB),
]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("place", [0, 3, 12])
def test_a_copy_that_was_timed_wrong_is_left_out(bad: CopySpan, place: int) -> None:
    good = [*spans("out", 6, gbps=30.0), *spans("in", 6, gbps=20.0, start_us=1e5)]
    assert rates_of([*good[:place], bad, *good[place:]], TRUE) == rates_of(good, TRUE)


def test_where_all_were_timed_wrong_the_link_is_what_it_was() -> None:
    assert rates_of(BAD[:-1] * 8, TRUE) == TRUE
    quick = [CopySpan("out", i * 1e3, i * 1e3 + 6.3, 1 << 62) for i in range(8)]  # no link is that fast
    assert rates_of(quick, TRUE) == TRUE


@given(
    st.lists(
        st.builds(CopySpan, st.sampled_from(("out", "in")), st.floats(), st.floats(), st.integers(0, 1 << 62)),
        max_size=20,
    )
)
def test_whatever_the_clock_says_there_is_a_link(timed: Sequence[CopySpan]) -> None:
    rates_of(timed, TRUE)


def test_what_the_link_was_long_ago_does_not_count() -> None:
    then, now = spans("out", 50, gbps=10.0), spans("out", 8, gbps=30.0, start_us=400e6)
    assert rates_of([*then, *now], TRUE).d2h_gbps == pytest.approx(30.0)
    assert rates_of([*spans("out", 5_000, gbps=10.0), *spans("out", 4_000, gbps=30.0, start_us=5e6)], TRUE).d2h_gbps == (
        pytest.approx(30.0)
    )


def test_after_hours_the_rates_are_as_exact_as_at_first() -> None:
    """Spans are on one clock that goes on; what is near each other on it is told apart as ever."""
    hour_us = 3_600e6
    alone = [*spans("out", 6, gbps=40.0), *spans("in", 6, gbps=50.0, start_us=1e5)]
    beside = [CopySpan(way, 1e6 + 5.0 * (way == "in"), 1e6 + 1_000.0, int(25e6)) for way in ("out", "in")]
    first = rates_of([*alone, *beside], TRUE)
    later = [dataclasses.replace(s, start_us=s.start_us + hour_us, end_us=s.end_us + hour_us) for s in (*alone, *beside)]
    got = rates_of(later, TRUE)
    for knob in ("d2h_gbps", "h2d_gbps", "duplex_gbps"):
        assert getattr(got, knob) == pytest.approx(getattr(first, knob), rel=1e-6)


def kept(monkeypatch: pytest.MonkeyPatch, *, h2d: float, d2h: float, duplex: float) -> LinkCost:
    """What becomes of kept rates."""
    rates = {"h2d_gbps": h2d, "d2h_gbps": d2h, "duplex_gbps": duplex}
    monkeypatch.setattr(link_rates, "kept", lambda *_: rates)
    return link_cost_for(cm.SimDevice())


def test_a_kept_link_carries_both_ways_at_most_what_it_does_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept(monkeypatch, h2d=20.0, d2h=10.0, duplex=25.0).duplex_gbps == 25.0
    assert kept(monkeypatch, h2d=20.0, d2h=10.0, duplex=31.0).duplex_gbps == 30.0
    assert kept(monkeypatch, h2d=20.0, d2h=10.0, duplex=15.0).duplex_gbps == 20.0
    assert kept(monkeypatch, h2d=20.0, d2h=10.0, duplex=inf).duplex_gbps == 20.0
    assert kept(monkeypatch, h2d=inf, d2h=10.0, duplex=25.0) == UNMEASURED_LINK


def test_a_link_that_nobody_measured_is_the_datasheets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert link_cost_for(cm.SimDevice()) == UNMEASURED_LINK
