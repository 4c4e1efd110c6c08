"""Result of a plan. Small timelines are computed by hand; random ones must satisfy the general properties."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_mm.device.sim.cost_model import COPY_LATENCY_US
from chameleon_mm.device.sim.cost_model import CopyEngine as SimulatedEngine
from chameleon_mm.plan.simulate import Simulator, simulate
from chameleon_mm.plan.swap_plan import Action, ActionColumns, PlannedMemory, SwapPlan
from chameleon_mm.plan.timing import CopyEngine, EngineSpan, LinkCost
from chameleon_mm.plan.trace import StepPhase, TensorKind, Trace, TraceBuilder
from chameleon_mm.plan.unswapped_memory import Candidates, memory_curve, peak_memory
from chameleon_mm.units import round_up
from tests._oracles import assert_as_carried_out
from tests._trace_records import hooks_of, tensors_of
from tests._traces import H200_LINK, chain, plan_of, random_plan, random_step

# 1024 bytes a microsecond out, 2048 back; 2560 both ways; 10240 within device memory.
LINK = LinkCost(d2h_gbps=1.024, h2d_gbps=2.048, duplex_gbps=2.56, copy_us=10.0, hbm_gbps=10.24)
SIZE = 100 * 1024
X = 0


def small() -> Trace:
    """Trace with a storage x of 100 KiB and hooks. Ticks 0, 2, 4, ... are operators; 1, 3, 5, ... are hooks. Compute alone:

    operator    100 us makes x   50 us reads x   200 us   100 us   30 us   40 us: 520 in all
    hook                0 saves x       1 sendable      2       3       4 uses x
    reached at          100             150             350     450     480
    """
    b = TraceBuilder(start_bytes=0)
    x = b.tensor(SIZE, TensorKind.ACTIVATION)
    b.op("aten::mm", StepPhase.FORWARD, 100.0, writes=(x,))
    b.save(x)
    b.op("aten::mm", StepPhase.FORWARD, 50.0, reads=(x,))
    b.released(x)
    b.sendable(x, b.save(-1))
    b.op("aten::mm", StepPhase.FORWARD, 200.0)
    b.save(-1)
    b.op("aten::mm", StepPhase.BACKWARD, 100.0)
    b.use(-1)
    b.op("aten::mm", StepPhase.BACKWARD, 30.0)
    b.use(x)
    b.op("aten::mm", StepPhase.BACKWARD, 40.0, reads=(x,))
    b.dies(x)
    return b.finish(0xF1)


def act(out_at: int, reclaim_at: int, in_at: int, *, nbytes: int = SIZE, tensor: int = X, use_at: int = 4) -> Action:
    return Action(tensor=tensor, nbytes=nbytes, out_at=out_at, reclaim_at=reclaim_at, in_at=in_at, use_at=use_at)


def test_a_copy_out_that_is_hidden_and_one_back_that_is_late() -> None:
    trace = small()
    timeline = simulate(trace, plan_of(trace, [act(1, 2, 3)]), LINK)
    # Out: from hook 1 at 150, 10 + 102400 / 1024 = 110 us: done at 260, before hook 2 at 350.
    assert timeline.out_spans == (EngineSpan(X, 150.0, 260.0, SIZE),)
    # Back: from hook 3 at 450, 10 + 102400 / 2048 = 60 us: done at 510. Compute is at hook 4 at 480, and waits 30 us.
    assert timeline.in_spans == (EngineSpan(X, 450.0, 510.0, SIZE),)
    assert [(stall.tensor, stall.us, stall.at_use) for stall in timeline.stalls] == [(X, 30.0, True)]
    assert (timeline.stall_us, timeline.head_copy_us, timeline.step_us) == (30.0, 0.0, 550.0)
    assert timeline.tick_us.tolist() == [0, 100, 100, 150, 150, 350, 350, 450, 450, 480, 510]
    # Away from hook 2 (tick 5) until hook 3 (tick 7).
    assert timeline.allocated_bytes.tolist() == [SIZE] * 5 + [0, 0] + [SIZE] * 4
    assert (timeline.peak_bytes, timeline.host_bytes) == (SIZE, SIZE)


def several(*sizes: int) -> Trace:
    """Storages that are saved in order and used in reverse order, 100 us between any two hooks: hook k is at 100 * (k + 1).

    Storage k is saved at hook k; hook n saves nothing; storage k is used at hook 2 n - k.
    """
    b = TraceBuilder(start_bytes=0)
    for nbytes in sizes:
        x = b.tensor(nbytes, TensorKind.ACTIVATION)
        b.op("aten::mm", StepPhase.FORWARD, 100.0, writes=(x,))
        b.released(x)
        b.save(x)
        b.sendable(x, b.num_hooks)
    b.op("aten::mm", StepPhase.FORWARD, 100.0)
    b.save(-1)
    for x in reversed(range(len(sizes))):
        b.op("aten::mm", StepPhase.BACKWARD, 100.0)
        b.use(x)
        b.dies(x)
    return b.finish()


def test_whole_reclaims_come_before_those_in_part() -> None:
    trace = several(SIZE, SIZE)
    half = SIZE // 2
    # At hook 2 storage 0 goes in part, storage 1 whole: with the whole one gone, 100 KiB + the head of 50 is the most.
    actions = [act(1, 2, 4, tensor=0, nbytes=half, use_at=4), act(2, 2, 3, tensor=1, use_at=3)]
    timeline = simulate(trace, plan_of(trace, actions), LINK)
    tick = int(trace.hook_tick[2])
    assert timeline.allocated_bytes[tick] == SIZE + half
    assert timeline.allocated_bytes[tick + 1] == half


def test_two_that_go_in_part_at_one_hook_go_in_the_plans_order() -> None:
    trace = several(SIZE, 3 * SIZE)
    heads = (SIZE // 4, SIZE)
    small_one = act(1, 2, 4, tensor=0, nbytes=SIZE - heads[0], use_at=4)
    large_one = act(2, 2, 3, tensor=1, nbytes=2 * SIZE, use_at=3)
    tick = int(trace.hook_tick[2])
    both = 4 * SIZE
    # First: both storages and the first head. Second: the second storage, its head, and the rest of the first.
    after_small = both - SIZE + heads[0]
    after_large = both - 3 * SIZE + heads[1]
    for order, most in (
        ([small_one, large_one], max(both + heads[0], after_small + heads[1])),
        ([large_one, small_one], max(both + heads[1], after_large + heads[0])),
    ):
        timeline = simulate(trace, plan_of(trace, order), LINK)
        assert timeline.allocated_bytes[tick] == most
        assert timeline.allocated_bytes[tick + 1] == sum(heads)


def use_and_other_copy_back(heads: tuple[int, int]) -> tuple[Trace, SwapPlan]:
    """At hook 3 storage 1 comes back for its use there, and storage 0, which the plan has first, for a later one."""
    trace = several(SIZE, 3 * SIZE)
    later = act(1, 2, 3, tensor=0, nbytes=SIZE - heads[0], use_at=4)
    used = act(2, 2, 3, tensor=1, nbytes=3 * SIZE - heads[1], use_at=3)
    return trace, plan_of(trace, [later, used])


def test_a_uses_own_memory_is_taken_before_that_of_the_others_of_its_hook() -> None:
    heads = SIZE // 4, SIZE
    trace, plan = use_and_other_copy_back(heads)
    both = 4 * SIZE
    # The used one's head beside all but what the other lacks; then the other's head beside both.
    most = max(both - (SIZE - heads[0]) + heads[1], both + heads[0])
    assert simulate(trace, plan, LINK).allocated_bytes[int(trace.hook_tick[3])] == most < both + heads[1]


# --- the engines


def test_a_link_that_carries_nothing_more_both_ways() -> None:
    out, back = CopyEngine.pair(LinkCost(d2h_gbps=1.024, h2d_gbps=1.024, duplex_gbps=1.024, copy_us=0.0))
    assert out.queue(0, 102_400, 0.0) == 100.0
    assert back.queue(1, 102_400, 50.0) == 200.0  # nothing crosses until 100


@given(copies=st.lists(st.tuples(st.booleans(), st.integers(1, 200_000), st.floats(0, 500)), min_size=1, max_size=12))
def test_the_engines_are_the_simulated_devices(copies: list[tuple[bool, int, float]]) -> None:
    cost = LinkCost(d2h_gbps=1.0, h2d_gbps=1.5, duplex_gbps=2.0, copy_us=COPY_LATENCY_US, piece_bytes=50_000)
    ours = CopyEngine.pair(cost)
    theirs = SimulatedEngine(1.0, 0.5), SimulatedEngine(1.5, 1.0)
    for number, (back, nbytes, ready) in enumerate(copies):
        end = ours[back].queue(number, nbytes, ready)
        for offset in range(0, nbytes, cost.piece_bytes):
            span = theirs[back].schedule(min(cost.piece_bytes, nbytes - offset), ready, theirs[not back])
        assert end == pytest.approx(span.end_us, rel=1e-9)


# --- what holds of any plan


@given(st.randoms(use_true_random=False))
def test_the_empty_plan_is_the_step_as_it_was(random: Random) -> None:
    trace = random_step(random)
    timeline = simulate(trace, plan_of(trace), H200_LINK)
    assert timeline.peak_bytes == peak_memory(trace).nbytes
    assert np.array_equal(timeline.allocated_bytes, memory_curve(trace))
    assert timeline.step_us == pytest.approx(trace.duration_us, rel=1e-12)
    assert (timeline.stall_us, timeline.head_copy_us, timeline.host_bytes) == (0.0, 0.0, 0)
    assert timeline.out_spans == timeline.in_spans == ()


@given(st.randoms(use_true_random=False), st.sampled_from([H200_LINK, LINK]))
def test_memory_and_time_are_those_of_a_step_carried_out_one_by_one(random: Random, link: LinkCost) -> None:
    trace = random_step(random)
    assert_as_carried_out(trace, random_plan(random, trace), link)


@given(st.randoms(use_true_random=False))
def test_what_comes_until_the_next_look_at_memory(random: Random) -> None:
    trace = random_step(random)
    plan = random_plan(random, trace)
    timeline = simulate(trace, plan, LINK)
    curve = memory_curve(trace)
    memory = PlannedMemory(trace, curve)
    climbs = memory.growth_until_next_check(ActionColumns.of(plan.actions, trace), timeline.allocated_bytes).tolist()
    gain = {
        a.tensor: round_up(whole, 512) - round_up(whole - a.nbytes, 512)
        for a in plan.actions
        for whole in (tensors_of(trace)[a.tensor].nbytes,)
    }
    ends = [*trace.hook_tick.tolist(), trace.num_ticks - 1]
    looks = [
        k
        for k, hook in enumerate(hooks_of(trace))
        if k == 0 or hook.tensor >= 0 or any(a.reclaim_at == k for a in plan.actions)
    ]
    for look, next_look in pairwise((*looks, len(climbs))):
        highest = max(timeline.allocated_bytes[ends[look] : ends[next_look] + 1].tolist())
        assert highest <= timeline.peak_bytes
        for hook in range(look, next_look):
            reclaimed = sum(gain[a.tensor] for a in plan.actions if a.reclaim_at <= hook <= a.in_at)
            assert int(curve[ends[hook]]) - reclaimed + climbs[hook] == highest
    assert len(climbs) == len(hooks_of(trace))


def test_one_simulator_for_many_plans() -> None:
    trace = chain(layers=2)
    simulator = Simulator(trace, H200_LINK)
    for seed in range(5):
        plan = random_plan(Random(seed), trace)
        one, other = simulator.run(plan), simulate(trace, plan, H200_LINK)
        assert (one.peak_bytes, one.step_us, one.out_spans, one.in_spans) == (
            other.peak_bytes,
            other.step_us,
            other.out_spans,
            other.in_spans,
        )


# --- what is no plan for the trace


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([act(0, 2, 3)], "tensor 0: expected .* out_at of 1 or later, .* got 102400, 0, 2 and 4; make a plan for this trace"),
        ([act(1, 2, 3, use_at=3)], "use_at 4, got 102400, 1, 2 and 3"),
        ([act(1, 2, 3, nbytes=SIZE + 1)], "expected at most 102400 bytes to move, .* got 102401"),
        ([act(1, 2, 3, tensor=1)], "tensor 1: expected one of the 1 candidates, got another"),
        ([act(1, 2, 3, tensor=-1)], "tensor -1: expected one of the 1 candidates"),
        ([act(1, 2, 3), act(1, 2, 4)], "expected one action for a tensor, got two"),
    ],
)
def test_actions_that_do_not_fit_are_refused(actions: list[Action], message: str) -> None:
    trace = small()
    with pytest.raises(ValueError, match=message):
        simulate(trace, plan_of(trace, actions), LINK)


def test_a_storage_is_not_reclaimed_while_others_hold_it() -> None:
    trace = several(SIZE)
    held = replace(trace, tensor_released=np.array([4], np.int32))  # until after hook 1; hook 2 uses it
    assert len(Candidates.of(trace)) == 1
    assert len(Candidates.of(held)) == 0
    longer = small()
    held = replace(longer, tensor_released=np.array([4], np.int32))
    with pytest.raises(ValueError, match="reclaim_at of 2 or later"):
        simulate(held, plan_of(held, [act(1, 1, 3)]), LINK)
    assert simulate(held, plan_of(held, [act(1, 2, 3)]), LINK).peak_bytes == SIZE


def test_a_plan_for_another_trace_is_refused() -> None:
    trace = small()
    with pytest.raises(
        ValueError, match="expected one for fingerprint 0xf1 and 5 hooks, as this trace, got one for 0xf2 and 5"
    ):
        simulate(trace, replace(plan_of(trace), fingerprint=0xF2), LINK)
    with pytest.raises(ValueError, match="got one for 0xf1 and 6; make a plan for this trace"):
        simulate(trace, replace(plan_of(trace), num_hooks=6), LINK)
