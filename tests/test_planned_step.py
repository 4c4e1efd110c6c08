"""Choice among a step's plans: each is tried, and the faster is kept."""

from __future__ import annotations

import dataclasses
from array import array

import numpy as np
import pytest

from chameleon_mm.follow.planned_step import SAMPLES, PlannedStep, PlanTrial
from chameleon_mm.follow.structure import RECENT_STEPS, ExtraMemory
from chameleon_mm.plan.swap_plan import Action, SwapPlan
from chameleon_mm.plan.unswapped_memory import Candidates, memory_curve
from chameleon_mm.record.light_profiler import NOT_A_USE, StepRecord
from chameleon_mm.swap.metrics import StepTime
from chameleon_mm.units import allocated_size
from tests._trace_records import ops_of, tensors_of
from tests._traces import H200_LINK, chain, plan_of

_CHAIN = chain(layers=2)
TRACE = dataclasses.replace(_CHAIN, op_inner_bytes=np.arange(len(_CHAIN.op_us)) % 3 * 512)
FIRST = Candidates.of(TRACE)
TENSOR = int(FIRST.tensor[0])


def plan(step_us: float) -> SwapPlan:
    """Each moves most of a storage, all but as many bytes as microseconds: no two are alike."""
    sendable, first, use = (int(column[0]) for column in (FIRST.sendable, FIRST.first, FIRST.use))
    moved = Action(
        tensor=TENSOR,
        nbytes=int(FIRST.nbytes[0]) - int(step_us),
        out_at=max(sendable, first),
        reclaim_at=max(sendable, first),
        in_at=use,
        use_at=use,
    )
    return dataclasses.replace(plan_of(TRACE, [moved]), step_us=step_us)


def planned(*plans: SwapPlan) -> PlannedStep:
    hooks = len(TRACE.hook_tick)
    record = StepRecord(
        fingerprint=TRACE.fingerprint,
        features=tuple(("save", hook, "dtype", 1, 0) for hook in range(hooks)),
        save_of=array("i", [NOT_A_USE] * hooks),
    )
    made = PlannedStep(record, TRACE)
    made.add_plans(plans, H200_LINK)
    return made


def took(step_us: float, *, busy_us: float | None = None) -> StepTime:
    return StepTime(step_us, step_us if busy_us is None else busy_us)


def follow(made: PlannedStep, step_us: dict[float, float], steps: int = 1) -> list[float]:
    """Run steps under the current plan. `step_us`: actual by predicted time. Return the followed plans' predicted times."""
    followed = []
    for _ in range(steps):
        current = made.current
        assert current is not None
        predicted = current.program.plan.step_us
        followed.append(predicted)
        made.add_time(current, took(step_us[predicted]))
    return followed


def test_without_a_plan_there_is_none_to_follow() -> None:
    made = planned()
    assert made.current is None
    assert made.is_decided


def test_one_plan_needs_no_trial() -> None:
    made = planned(plan(100.0))
    assert made.is_decided
    assert follow(made, {100.0: 130.0}, 5) == [100.0] * 5


def test_each_is_tried_and_the_faster_one_kept() -> None:
    made = planned(plan(100.0), plan(101.0))
    settled_before = made.is_decided
    measured = {100.0: 120.0, 101.0: 110.0}
    assert follow(made, measured, 2 * SAMPLES) == [100.0] * SAMPLES + [101.0] * SAMPLES
    assert (settled_before, made.is_decided) == (False, True)
    assert follow(made, measured, 3) == [101.0] * 3


def test_the_one_that_was_foreseen_to_be_faster_stays_where_it_is() -> None:
    made = planned(plan(100.0), plan(101.0))
    assert follow(made, {100.0: 105.0, 101.0: 110.0}, 2 * SAMPLES + 1)[-1] == 100.0


def test_the_one_that_was_kept_is_left_when_it_becomes_slower() -> None:
    made = planned(plan(100.0), plan(101.0))
    follow(made, {100.0: 105.0, 101.0: 110.0}, 2 * SAMPLES)
    assert follow(made, {100.0: 150.0, 101.0: 110.0}, SAMPLES + 1)[-1] == 101.0


def test_a_step_that_needs_more_forgets_what_was_planned() -> None:
    made = planned(plan(100.0), plan(101.0))
    follow(made, {100.0: 105.0, 101.0: 110.0}, 2 * SAMPLES)
    made.reset_for(ExtraMemory(extra_bytes=4096, spikes={3: 512}))
    assert made.current is None
    curve = memory_curve(TRACE) + 4096
    curve[3] += 512
    assert memory_curve(made.trace).tolist() == curve.tolist()
    made.add_plans([plan(102.0)], H200_LINK)
    assert follow(made, {102.0: 1.0}) == [102.0]
    made.reset_for(ExtraMemory())
    assert memory_curve(made.trace).tolist() == memory_curve(TRACE).tolist()


def test_what_was_needed_once_is_not_planned_for_for_ever() -> None:
    made = planned()
    made.reset_for(ExtraMemory(extra_bytes=9000, spikes={3: 5000}))
    for _ in range(RECENT_STEPS - 1):
        assert made.note_extra(ExtraMemory(extra_bytes=100, spikes={4: 600}), spare_bytes=1000) is None
    assert made.note_extra(ExtraMemory(extra_bytes=300), spare_bytes=1000) == ExtraMemory(extra_bytes=300, spikes={4: 600})
    assert made.note_extra(ExtraMemory(extra_bytes=9000), spare_bytes=10_000) is None  # not worth another plan


def test_what_is_needed_now_and_then_stays_planned_for() -> None:
    made = planned()
    made.reset_for(ExtraMemory(extra_bytes=9000))
    for step in range(3 * RECENT_STEPS):
        assert made.note_extra(ExtraMemory(extra_bytes=9000 if step % RECENT_STEPS == 0 else 0), spare_bytes=0) is None


def test_what_a_step_allocates_between_its_hooks() -> None:
    made = planned()
    ticks = [*TRACE.hook_tick.tolist(), TRACE.num_ticks]
    born = {j: tensor.born for j, tensor in enumerate(tensors_of(TRACE)) if tensor.born >= 0}
    for hook in range(-1, len(ticks) - 1):
        since = ticks[hook] if hook >= 0 else -1
        for later in range(max(hook, 0), len(ticks)):
            made_bytes = sum(
                allocated_size(tensors_of(TRACE)[j].nbytes) for j, tick in born.items() if since < tick <= ticks[later]
            ) + sum(op.inner_bytes for op in ops_of(TRACE) if since < op.tick <= ticks[later])
            assert made.allocated_until[later] - (made.allocated_until[hook] if hook >= 0 else 0) == made_bytes
        between = made.ticks_between(hook, hook + 1)
        assert len(range(*between.indices(TRACE.num_ticks))) >= 1
        if ticks[hook + 1] > since + 1:
            assert (between.start, between.stop) == (since + 1, ticks[hook + 1])


def test_growth_is_foreseen_until_memory_is_checked_again() -> None:
    """Memory is not checked where a parameter or a small tensor is saved."""
    trace = dataclasses.replace(TRACE, hook_tensor=np.where(np.arange(len(TRACE.hook_tick)) % 3 == 0, TRACE.hook_tensor, -1))
    checked = [hook for hook, tensor in enumerate(trace.hook_tensor.tolist()) if tensor >= 0]
    made, curve = PlannedStep(planned().record, trace), memory_curve(trace)
    ticks = [*trace.hook_tick.tolist(), trace.num_ticks]
    for hook in range(len(trace.hook_tick)):
        for checks in (0, 1):
            later = [other for other in checked if other > hook][checks:]
            until = curve[ticks[hook] : ticks[later[0] if later else -1] + 1]
            assert made.growth_after(hook, checks) == until.max() - curve[ticks[hook]]
    assert any(made.growth_after(hook, 0) > PlannedStep(made.record, TRACE).growth_after(hook, 0) for hook in checked)


def test_the_measured_time_is_the_median_of_the_latest() -> None:
    made = planned(plan(100.0))
    assert made.current is not None
    assert made.current.step_us == 100.0
    for time in (500.0, 110.0, 120.0):
        made.add_time(made.current, took(time))
    assert isinstance(made.current, PlanTrial)
    assert made.current.step_us == 115.0


def test_operators_that_take_longer_than_the_trace_has_it() -> None:
    ops_us, heads_us, stall_us = TRACE.duration_us, 7.0, 20.0
    made = planned(dataclasses.replace(plan(100.0), step_us=ops_us + heads_us + stall_us, stall_us=stall_us))
    made.add_time(made.trials[0], took(9e9, busy_us=2.0 * ops_us + heads_us))
    assert made.slowdown == 1.0  # not judged yet
    made.add_time(made.trials[0], took(9e9, busy_us=3.0 * ops_us + heads_us))
    assert made.slowdown == pytest.approx(2.5)
    made.reset_for(ExtraMemory(extra_bytes=512))
    made.add_plans([dataclasses.replace(plan(100.0), step_us=ops_us)], H200_LINK)
    for _ in range(SAMPLES):
        made.add_time(made.trials[0], took(9e9, busy_us=2.5 * ops_us))
    made.correct_times()
    assert (made.times_corrected, made.trials) == (1, [])
    assert made.trace.duration_us == pytest.approx(2.5 * ops_us)
    made.reset_for(ExtraMemory())
    assert made.trace.duration_us == pytest.approx(2.5 * ops_us)


def test_how_long_operators_take_is_asked_of_the_plan_that_is_kept() -> None:
    ops_us = TRACE.duration_us
    made = planned(*(dataclasses.replace(plan(us), step_us=ops_us) for us in (100.0, 101.0)))
    for trial, busy_us in zip(made.trials, (0.5 * ops_us, 2.0 * ops_us), strict=True):
        for _ in range(SAMPLES):
            assert made.slowdown == 1.0
            made.add_time(trial, took(9e9 - busy_us, busy_us=busy_us))
    assert made.slowdown == pytest.approx(2.0)
