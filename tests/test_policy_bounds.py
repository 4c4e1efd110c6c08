"""Bounds that no plan can beat, and the results of rules that do not plan."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_mm.errors import InfeasibleBudget
from chameleon_mm.plan.bounds import ideal
from chameleon_mm.plan.simulate import simulate
from chameleon_mm.plan.swap_all import swap_all
from chameleon_mm.plan.timing import LinkCost
from chameleon_mm.plan.trace import StepPhase, TensorKind, Trace, TraceBuilder
from chameleon_mm.plan.unswapped_memory import Candidates, peak_memory, smallest_budget
from chameleon_mm.replayable import DEFAULT, PRODUCTS
from chameleon_mm.units import KIB, MIB
from tests._traces import H200_LINK, chain, random_plan, random_step

# 1024 bytes a microsecond out, 2048 back.
LINK = LinkCost(d2h_gbps=1.024, h2d_gbps=2.048, duplex_gbps=3.072, copy_us=0.0, hbm_gbps=1e15)

MM = frozenset({"aten::mm"})


def two_saved() -> Trace:
    """Two storages of 100 KiB, a and b, made in 40 us and 10 us, and used last first.

    tick   0 op: a   1 save a   2 save   3 op: b   4 save b   5 save   6 op   7 op   8 use b   9 op   10 use a   11 op
    us     40                            10                            50     60               60                20
    idle                        a ...                         b ... until 7           a until 9
    """
    t = TraceBuilder(start_bytes=0)
    saved = []
    for us in (40.0, 10.0):
        x = t.tensor(100 * KIB, TensorKind.ACTIVATION)
        t.op("aten::mm", StepPhase.FORWARD, us, writes=(x,))
        t.released(x)
        t.save(x)
        t.sendable(x, t.save(-1))
        saved.append(x)
    t.op("aten::mm", StepPhase.FORWARD, 50.0)
    for x in reversed(saved):
        t.op("aten::mm", StepPhase.BACKWARD, 60.0)
        t.use(x)
        t.dies(x)
    t.op("aten::mm", StepPhase.BACKWARD, 20.0)
    return t.finish()


def test_the_ideal_of_a_small_step() -> None:
    trace = two_saved()
    assert smallest_budget(trace) == 100 * KIB
    assert peak_memory(trace).nbytes == 200 * KIB
    # 50 KiB too much from tick 3 to tick 8, the use of b: b dies there. Out in 50 us, back in 25.
    # Tick 3, compute at 40: max(40, 50) + max(180, 25) + 20 = 250, the most; at tick 7, at 100: 100 + 120 + 20 = 240.
    assert ideal(trace, 150 * KIB, LINK) == 250.0
    # 100 KiB: out in 100 us, back in 50. Tick 3: 100 + 180 + 20.
    assert ideal(trace, 100 * KIB, LINK) == 300.0
    # 1 byte too much: no time.
    assert ideal(trace, 200 * KIB - 1, LINK) == 240.0
    assert ideal(trace, 200 * KIB, LINK) == ideal(trace, 10**12, LINK)
    assert ideal(trace, 200 * KIB, LINK) == trace.duration_us == 240.0


def test_the_ideal_with_recomputation() -> None:
    trace = two_saved()
    # The peak is at tick 3, where a alone is idle: 0.4 us a KiB to recompute. 40 KiB cross until compute is there, 10 are
    # recomputed: 40 + 184 + 20. One KiB more to cross would take 1 us, and save 0.4.
    assert ideal(trace, 150 * KIB, LINK, recompute=MM) == pytest.approx(244.0)


def late_peak() -> Trace:
    """Variant of `two_saved` with 1 KiB more in the operator of tick 7, when both are idle and compute alone is at 100 us."""
    trace = two_saved()
    return replace(
        trace,
        tensor_bytes=np.append(trace.tensor_bytes, KIB),
        tensor_kind=np.append(trace.tensor_kind, np.uint8(TensorKind.TEMPORARY)),
        tensor_born=np.append(trace.tensor_born, np.int32(7)),
        tensor_released=np.append(trace.tensor_released, np.int32(-2)),
        tensor_sendable=np.append(trace.tensor_sendable, np.int32(-2)),
        tensor_dies=np.append(trace.tensor_dies, np.int32(7)),
    )


def test_the_cheapest_mix_of_swapping_and_recomputing() -> None:
    trace = late_peak()
    assert peak_memory(trace).tick == 7
    budget = 101 * KIB  # 100 KiB too much at the peak
    # Swapped, all of it takes the 100 us that compute takes before the peak. Nothing has to be recomputed.
    assert ideal(trace, budget, LINK, recompute=MM) == 240.0
    # On a link of half the speed out, 50 KiB cross in that time. b recomputes 50 KiB in 10 / 2 = 5 us.
    slow = replace(LINK, d2h_gbps=0.512, duplex_gbps=2.56)
    assert ideal(trace, budget, slow, recompute=MM) == pytest.approx(245.0)
    # On one that carries hardly anything: all of b, in 10 us.
    none = LinkCost(d2h_gbps=1e-9, h2d_gbps=1e-9, duplex_gbps=1e-9, hbm_gbps=1e15)
    assert ideal(trace, budget, none, recompute=MM) == pytest.approx(250.0, abs=1e-6)


def test_the_side_of_backward_can_decide_the_mix() -> None:
    trace = late_peak()
    budget = 101 * KIB
    # Out is fast. Back, 100 KiB take 400 us, where compute has 120 until a's use. Of b, y KiB are recomputed, in 0.1 us each,
    # until both sides are as long: 120 + y / 10 = (100 - y) * 4, so y = 280 / 4.1.
    slow = LinkCost(d2h_gbps=100.0, h2d_gbps=0.256, duplex_gbps=100.0, hbm_gbps=1e15)
    assert ideal(trace, budget, slow, recompute=MM) == pytest.approx(100 + 120 + 28 / 4.1 + 20)


def test_an_empty_step_takes_no_time() -> None:
    assert ideal(TraceBuilder(start_bytes=0).finish(), 0, LINK) == 0.0


@pytest.mark.parametrize("recompute", [(), DEFAULT])
def test_a_budget_below_what_never_moves(recompute: Collection[str]) -> None:
    with pytest.raises(InfeasibleBudget, match=r"expected a budget of 102400 bytes \(100.0 KiB\) or more, .* got 102399"):
        ideal(two_saved(), 100 * KIB - 1, LINK, recompute=recompute)


@given(st.randoms(use_true_random=False), st.sampled_from([H200_LINK, LINK]))
def test_no_plan_beats_the_ideal(random: Random, link: LinkCost) -> None:
    trace = random_step(random)
    timeline = simulate(trace, random_plan(random, trace), link)
    bound = ideal(trace, timeline.peak_bytes, link)
    assert trace.duration_us * (1 - 1e-9) <= bound <= timeline.step_us * (1 + 1e-9) + 1e-9
    mixed = ideal(trace, timeline.peak_bytes, link, recompute=DEFAULT | PRODUCTS)
    assert trace.duration_us * (1 - 1e-9) <= mixed <= bound * (1 + 1e-9) + 1e-9


# --- plans that do not plan


def test_swap_all_at_once_and_on_demand_reaches_the_smallest_budget() -> None:
    for trace in (chain(layers=4), chain(layers=3, micro_batches=2)):
        plan = swap_all(trace, H200_LINK, depth=0)
        assert plan.peak_bytes == plan.hbm_budget_bytes == smallest_budget(trace)
        assert plan.moved_bytes == Candidates.of(trace).nbytes.sum()


def test_swap_all_with_storages_on_their_way() -> None:
    trace = chain(layers=4, saved_bytes=(8 * MIB,) * 4)
    plans = [swap_all(trace, H200_LINK, depth=depth) for depth in (0, 1, 3)]
    # A chain of equal storages: each that is on its way when memory is fullest takes 8 MiB more.
    assert [plan.peak_bytes - plans[0].peak_bytes for plan in plans] == [0, 8 * MIB, 24 * MIB]
    assert plans[1].step_us < plans[0].step_us
    by_use = sorted(plans[2].actions, key=lambda action: action.use_at)
    assert [action.in_at for action in by_use[3:]] == [
        max(b.reclaim_at, a.use_at) for a, b in zip(by_use, by_use[3:], strict=False)
    ]
    assert [action.in_at for action in by_use[:3]] == [action.use_at for action in by_use[:3]]
