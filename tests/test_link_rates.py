"""Rates of the link from timed copies: exact where the copies are, kept where there are too few."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device import SPECS, CudaDevice, SimDevice
from chameleon_mm.device.sim import CostModel
from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.follow import link_rates
from chameleon_mm.follow.link_rates import UNMEASURED_LINK, link_cost_for, rates_of
from chameleon_mm.plan.timing import CopyEngine, LinkCost
from chameleon_mm.swap.calibration import busy_gbps, calibrate, keep, kept
from chameleon_mm.swap.metrics import CopySpan
from chameleon_mm.units import MIB
from tests._fakes import CountingDevice, UnsimulatedDevice

TRUE = LinkCost(d2h_gbps=40.0, h2d_gbps=50.0, duplex_gbps=70.0)


def spans(direction: str, count: int, *, nbytes: int = 8 * MIB, gbps: float, start_us: float = 0.0) -> list[CopySpan]:
    """Copies in a row, nothing between them."""
    took = TRUE.copy_us + nbytes / (gbps * 1e3)
    return [CopySpan(direction, start_us + i * took, start_us + (i + 1) * took, nbytes) for i in range(count)]


QUICK = [CopySpan("out", i * 1e3, i * 1e3 + 6.3, 1 << 62) for i in range(8)]
"""No link is that fast."""


@pytest.mark.parametrize(
    ("timed", "d2h_gbps"),
    [
        ([], None),
        (spans("out", 3, gbps=30.0), None),  # three pieces are too few
        (spans("out", 4, gbps=30.0), 30.0),
        (spans("out", 50, nbytes=1024, gbps=30.0), None),  # shows the fixed cost alone
        ([*spans("out", 9, gbps=30.0), CopySpan("out", 1e6, 2e6, 8 * MIB)], 30.0),  # one stalled
        (QUICK, None),
    ],
    ids=["nothing", "too few", "enough", "small", "one stalled", "too quick"],
)
def test_what_is_measured_counts_and_the_rest_is_the_other(timed: list[CopySpan], d2h_gbps: float | None) -> None:
    if d2h_gbps is None:
        assert rates_of(timed, TRUE) == TRUE
    else:
        assert rates_of(timed, TRUE).d2h_gbps == pytest.approx(d2h_gbps)


def test_each_direction_alone() -> None:
    got = rates_of([*spans("out", 8, gbps=30.0), *spans("in", 8, gbps=20.0, start_us=1e6)], TRUE)
    assert got.d2h_gbps == pytest.approx(30.0)
    assert got.h2d_gbps == pytest.approx(20.0)
    assert got.duplex_gbps == pytest.approx(70.0 * 50.0 / 90.0)  # as it stood to both alone
    assert (got.copy_us, got.piece_bytes, got.hbm_gbps) == (TRUE.copy_us, TRUE.piece_bytes, TRUE.hbm_gbps)


def test_both_ways_at_once() -> None:
    """Each direction is alone at 40 and 50. Then one runs at 30 and the other at 25, at the same time."""
    took = 1_000.0

    def beside(out_gbps: float, in_gbps: float) -> list[CopySpan]:
        return [CopySpan(way, 1e6, 1e6 + took, int(gbps * took * 1e3)) for way, gbps in (("out", out_gbps), ("in", in_gbps))]

    got = rates_of([*spans("out", 6, gbps=40.0), *spans("in", 6, gbps=50.0, start_us=1e5), *beside(30.0, 25.0)], TRUE)
    assert got.duplex_gbps == pytest.approx(55.0)
    assert got.d2h_gbps == pytest.approx(40.0)
    assert got.h2d_gbps == pytest.approx(50.0)
    # At least one, and at most the sum.
    assert [rates_of(beside(gbps, gbps), TRUE).duplex_gbps for gbps in (5.0, 500.0)] == [50.0, 90.0]


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


@given(
    st.lists(
        st.builds(CopySpan, st.sampled_from(("out", "in")), st.floats(), st.floats(), st.integers(0, 1 << 62)), max_size=20
    )
)
def test_whatever_the_clock_says_there_is_a_link(timed: Sequence[CopySpan]) -> None:
    rates_of(timed, TRUE)


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
    assert rates_of(BAD[:-1] * 8, TRUE) == TRUE


def test_what_the_link_was_long_ago_does_not_count() -> None:
    then, now = spans("out", 50, gbps=10.0), spans("out", 8, gbps=30.0, start_us=400e6)
    assert rates_of([*then, *now], TRUE).d2h_gbps == pytest.approx(30.0)
    assert rates_of([*spans("out", 5_000, gbps=10.0), *spans("out", 4_000, gbps=30.0, start_us=5e6)], TRUE).d2h_gbps == (
        pytest.approx(30.0)
    )


def test_after_hours_the_rates_are_as_exact_as_at_first() -> None:
    """Spans are on one clock that goes on. Neighbouring times on it remain distinguishable."""
    hour_us = 3_600e6
    alone = [*spans("out", 6, gbps=40.0), *spans("in", 6, gbps=50.0, start_us=1e5)]
    beside = [CopySpan(way, 1e6 + 5.0 * (way == "in"), 1e6 + 1_000.0, int(25e6)) for way in ("out", "in")]
    first = rates_of([*alone, *beside], TRUE)
    later = [dataclasses.replace(s, start_us=s.start_us + hour_us, end_us=s.end_us + hour_us) for s in (*alone, *beside)]
    got = rates_of(later, TRUE)
    for knob in ("d2h_gbps", "h2d_gbps", "duplex_gbps"):
        assert getattr(got, knob) == pytest.approx(getattr(first, knob), rel=1e-6)


def test_a_kept_link_carries_both_ways_at_most_what_it_does_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    for duplex, carried in ((25.0, 25.0), (31.0, 30.0), (15.0, 20.0), (inf, 20.0)):
        rates = {"h2d_gbps": 20.0, "d2h_gbps": 10.0, "duplex_gbps": duplex}
        monkeypatch.setattr(link_rates, "kept", lambda *_, rates=rates: rates)
        assert link_cost_for(cm.SimDevice()).duplex_gbps == carried
    monkeypatch.setattr(link_rates, "kept", lambda *_: {"h2d_gbps": inf, "d2h_gbps": 10.0, "duplex_gbps": 25.0})
    assert link_cost_for(cm.SimDevice()) == UNMEASURED_LINK


def test_a_link_that_nobody_measured_is_the_datasheets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert link_cost_for(cm.SimDevice()) == UNMEASURED_LINK


# --- measured ahead: the simulator's figures, and a cache that trusts nothing it reads


def test_the_simulators_rates_are_its_links_the_same_every_time_and_nothing_is_left(no_gc: None) -> None:
    cost = CostModel(spec=ROUND, copy_us=3.0, triton_launch_us=10.0, packed_tensor_us=0.3, event_us=0.5)
    sim = SimDevice(ROUND, cost=cost)
    figures = calibrate(sim)
    assert figures == calibrate(SimDevice(ROUND, cost=cost))
    assert sim.allocated_bytes() == 0
    # 32 MiB pieces: 3355 and 1678 us at 10 and 20 GB/s, and 3.1 us fixed.
    assert figures["h2d_gbps"] == pytest.approx(10.0, rel=0.01)
    assert figures["d2h_gbps"] == pytest.approx(20.0, rel=0.01)
    # The first piece was issued before the other direction began, and keeps its own rate: hence the tolerance.
    assert figures["duplex_gbps"] == pytest.approx(25.0, rel=0.1)
    assert figures["duplex_gbps"] > 20.0
    one, other = [0.0, 100.0, 200.0], [50.0, 250.0, 450.0]
    # Both from 50 to 200: 1.5 pieces of the one, 150 of 200 us of a piece of the other.
    assert busy_gbps([one, other], 1_000_000) == pytest.approx((1.5 + 0.75) * 1_000_000 / 150.0 / 1e3)
    assert busy_gbps([one], 1_000_000) == pytest.approx(10.0)


ROUND = dataclasses.replace(SPECS["a100"], h2d_gbps=10.0, d2h_gbps=20.0, duplex_gbps=25.0, hbm_gbps=1000.0)


class _Short(CountingDevice):
    """Device that pins a single buffer."""

    def alloc_pinned(self, nbytes: int) -> Tensor:
        if self.num_pinned:
            raise HostMemoryExhausted("pinned memory: expected 32 MiB, got nothing")
        return super().alloc_pinned(nbytes)


def test_pinned_memory_goes_back_also_on_a_machine_without_enough() -> None:
    device = CountingDevice()
    calibrate(device)
    assert (device.num_pinned, device.chunks) == (2, {})
    device = _Short()
    with pytest.raises(HostMemoryExhausted):
        calibrate(device)
    assert (device.num_pinned, device.chunks) == (1, {})
    small, counted = SimDevice(hbm_bytes="40MiB"), CountingDevice()
    counted._machine.ledger.capacity = small.capacity
    with pytest.raises(torch.OutOfMemoryError):
        calibrate(counted)
    assert (counted.num_pinned, counted.chunks) == (2, {})


# --------------------------------------------------------------------------------------------------------------------- cache


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    return tmp_path


RATES = {"h2d_gbps": 50.0, "d2h_gbps": 49.0, "duplex_gbps": 80.0}


def test_what_was_kept_is_there_for_its_device_driver_and_torch_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = UnsimulatedDevice("CUDA driver 13.0, runtime 13.0")
    assert kept(device, "link") is None
    assert not keep(SimDevice(), "link", RATES)  # simulated rates are neither kept nor found
    assert list(home.iterdir()) == []
    assert keep(UnsimulatedDevice("simulated"), "link", RATES)
    assert kept(SimDevice(), "link") is None
    assert keep(device, "link", RATES)
    assert kept(device, "link") == RATES
    assert kept(device, "other") is None
    assert kept(UnsimulatedDevice("CUDA driver 13.1, runtime 13.0"), "link") is None
    names = {file.name for file in (home / ".cache" / "chameleon_mm").iterdir()}  # and no half-written one
    assert names == {f"link-simulated-h200-{name}.json" for name in ("cuda-driver-13.0-runtime-13.0", "simulated")}
    monkeypatch.setattr(torch, "__version__", "0.1")
    assert kept(device, "link") is None


@pytest.mark.parametrize(
    "change", [{"h2d_gbps": 0.0}, {"h2d_gbps": "fast"}, {"d2h_gbps": None}, {"d2h_gbps": float("nan")}, {"duplex_gbps": None}]
)
def test_rates_that_were_tampered_with_are_passed_over(home: Path, change: dict[str, Any]) -> None:
    device = UnsimulatedDevice()
    keep(device, "link", RATES)
    assert link_cost_for(device).h2d_gbps == 50.0
    keep(device, "link", {**RATES, **change})
    assert link_cost_for(device) == UNMEASURED_LINK


# ----------------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_a_gpu_is_measured_and_remembered(home: Path) -> None:
    device = CudaDevice()
    rates = calibrate(device)
    assert min(rates["h2d_gbps"], rates["d2h_gbps"]) > 1
    assert rates["duplex_gbps"] > 0
    assert keep(device, "link", rates)
    assert kept(device, "link") == rates
