"""Which of a step's plans is followed: each is tried, the faster kept; unforeseen stalls want a better one."""

from __future__ import annotations

import dataclasses
from array import array

import pytest

from chameleon_mm.executor.course import MOST_PLANS, SAMPLES, WORTH_A_PLAN, Course, Variant
from chameleon_mm.executor.step_timing import StepTime
from chameleon_mm.policy import SwapPlan, memory_curve
from chameleon_mm.profiler.step_record import StepRecord
from chameleon_mm.trace.recurring import with_extra
from tests._traces import chain, plan_of

TRACE = chain(layers=2)


def plan(step_us: float, stall_us: float = 0.0) -> SwapPlan:
    return dataclasses.replace(plan_of(TRACE), step_us=step_us, stall_us=stall_us)


def course(*plans: SwapPlan) -> Course:
    nothing = StepRecord(fingerprint=TRACE.fingerprint, features=(), save_of=array("i"))
    made = Course(nothing, TRACE)
    made.offer(plans)
    return made


def took(step_us: float, stalls_us: dict[int, float] | None = None, *, busy_us: float | None = None) -> StepTime:
    return StepTime(step_us, stalls_us or {}, step_us if busy_us is None else busy_us)


def follow(made: Course, step_us: dict[float, float], steps: int = 1, stalls_us: dict[int, float] | None = None) -> list[float]:
    """Steps under whatever is current. `step_us`: what each takes, by what its plan foresaw. Returns which were followed."""
    followed = []
    for _ in range(steps):
        current = made.current
        assert current is not None
        foreseen = current.script.plan.step_us
        followed.append(foreseen)
        made.measured(current, took(step_us[foreseen], stalls_us))
    return followed


def test_without_a_plan_there_is_none_to_follow() -> None:
    made = course()
    assert made.current is None
    assert made.settled
    assert not made.wants_better()


def test_one_plan_needs_no_trial() -> None:
    made = course(plan(100.0))
    assert made.settled
    assert follow(made, {100.0: 130.0}, 5) == [100.0] * 5


def test_each_is_tried_and_the_faster_one_kept() -> None:
    made = course(plan(100.0), plan(101.0))
    settled_before = made.settled
    measured = {100.0: 120.0, 101.0: 110.0}
    assert follow(made, measured, 2 * SAMPLES) == [100.0] * SAMPLES + [101.0] * SAMPLES
    assert (settled_before, made.settled) == (False, True)
    assert follow(made, measured, 3) == [101.0] * 3


def test_the_one_that_was_foreseen_to_be_faster_stays_where_it_is() -> None:
    made = course(plan(100.0), plan(101.0))
    assert follow(made, {100.0: 105.0, 101.0: 110.0}, 2 * SAMPLES + 1)[-1] == 100.0


def test_the_one_that_was_kept_is_left_when_it_becomes_slower() -> None:
    made = course(plan(100.0), plan(101.0))
    follow(made, {100.0: 105.0, 101.0: 110.0}, 2 * SAMPLES)
    assert follow(made, {100.0: 150.0, 101.0: 110.0}, SAMPLES + 1)[-1] == 101.0


def test_a_stall_that_was_not_foreseen_wants_a_better_plan() -> None:
    made = course(plan(100.0, stall_us=10.0))
    follow(made, {100.0: 100.0}, SAMPLES - 1, {3: 30.0})
    assert not made.wants_better()  # not judged yet
    follow(made, {100.0: 100.0}, 1, {3: 30.0})
    assert made.wants_better()


def test_a_stall_that_was_foreseen_wants_none() -> None:
    made = course(plan(100.0, stall_us=10.0))
    follow(made, {100.0: 100.0}, SAMPLES, {3: 10.0 + WORTH_A_PLAN * 100.0})
    assert not made.wants_better()


def test_after_the_most_plans_the_best_of_them_stays() -> None:
    made = course(plan(100.0))
    for i in range(1, MOST_PLANS):
        follow(made, {100.0 + j: 200.0 - j for j in range(MOST_PLANS)}, SAMPLES, {0: 50.0})
        assert made.wants_better()
        made.offer([plan(100.0 + i)])
        assert not made.settled
    follow(made, {100.0 + j: 200.0 - j for j in range(MOST_PLANS)}, SAMPLES, {0: 50.0})
    assert len(made.variants) == MOST_PLANS
    assert not made.wants_better()
    assert made.current is made.variants[-1]


def test_a_step_that_needs_more_forgets_what_was_planned() -> None:
    made = course(plan(100.0), plan(101.0))
    follow(made, {100.0: 105.0, 101.0: 110.0}, 2 * SAMPLES)
    before = made.first_hook_bytes
    assert before == int(memory_curve(TRACE)[TRACE.hook_tick[0]])
    made.replace(with_extra(TRACE, 4096), [plan(102.0)])
    assert made.first_hook_bytes == before + 4096
    assert follow(made, {102.0: 1.0}) == [102.0]
    made.replace(TRACE, [])
    assert made.current is None


def test_a_plan_of_another_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="make a plan for this trace"):
        course(dataclasses.replace(plan(1.0), fingerprint=3))


def test_the_measured_time_is_the_median_of_the_latest() -> None:
    made = course(plan(100.0))
    assert made.current is not None
    assert made.current.step_us == 100.0
    for time in (500.0, 110.0, 120.0):
        made.measured(made.current, took(time))
    assert isinstance(made.current, Variant)
    assert made.current.step_us == 115.0


def test_operators_that_take_longer_than_the_trace_has_it() -> None:
    ops_us, heads_us, stall_us = TRACE.duration_us, 7.0, 20.0
    made = course(plan(ops_us + heads_us + stall_us, stall_us=stall_us))
    made.measured(made.variants[0], took(9e9, busy_us=2.0 * ops_us + heads_us))
    assert made.slowdown == 1.0  # not judged yet
    made.measured(made.variants[0], took(9e9, busy_us=3.0 * ops_us + heads_us))
    assert made.slowdown == pytest.approx(2.5)


def test_how_long_operators_take_is_asked_of_the_plan_that_is_kept() -> None:
    ops_us = TRACE.duration_us
    made = course(plan(ops_us), plan(ops_us))
    for variant, busy_us in zip(made.variants, (0.5 * ops_us, 2.0 * ops_us), strict=True):
        for _ in range(SAMPLES):
            assert made.slowdown == 1.0
            made.measured(variant, took(9e9 - busy_us, busy_us=busy_us))
    assert made.slowdown == pytest.approx(2.0)
