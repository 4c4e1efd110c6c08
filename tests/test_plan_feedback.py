"""Measured step times correct the assumed ones: a wrong model of the link costs some steps, not the training."""

from __future__ import annotations

import dataclasses
from statistics import median

import pytest

from chameleon_mm.follow.adaptation import CORRECTIONS, TRIAL_PLANS
from chameleon_mm.follow.planned_step import SAMPLES
from chameleon_mm.plan.timing import LinkCost
from chameleon_mm.plan.unswapped_memory import least_memory, memory_curve
from chameleon_mm.record.step_log import EventTimes
from chameleon_mm.swap.executor import Executor
from tests._random_models import SLOW_GPU, Step, adaptation_of, far_ahead, link_of, planning, seeds, train

pytestmark = pytest.mark.usefixtures("no_gc")

STEPS = 2 + SAMPLES * TRIAL_PLANS * (CORRECTIONS + 1)
"""Enough for each plan to be tried, and after each correction of times again."""

TRUE = link_of(SLOW_GPU)


def trained(seed: int, link: LinkCost, share: float) -> tuple[list[Step], Executor]:
    """Train within a budget at `share` between the smallest possible and the model's unswapped peak."""
    device = far_ahead()
    executor = planning(device)
    train(seed, device, executor, steps=1)
    trace = adaptation_of(executor).latest.trace  # type: ignore[union-attr]  # both are there after a recorded step
    least, most = least_memory(trace).nbytes, int(memory_curve(trace).max())
    budget = int((least + share * (most - least)) * 1.01)
    device = far_ahead()
    executor = planning(device, budget, link=link)
    steps, _ = train(seed, device, executor, steps=STEPS)
    assert all(step.peak_bytes <= budget for step in steps)
    return steps, executor


def settled_us(steps: list[Step]) -> float:
    return median(step.step_us for step in steps[-SAMPLES:])


@pytest.mark.ci
@pytest.mark.parametrize("seed", seeds(1, of=(0, 3, 4)))
@pytest.mark.parametrize("times", [0.5, 2.0, 8.0])
def test_a_link_that_was_assumed_wrong_costs_little_in_the_end(seed: int, times: float) -> None:
    """Copies of the first, recorded step show the rates before anything is planned."""
    wrong = dataclasses.replace(
        TRUE, d2h_gbps=TRUE.d2h_gbps * times, h2d_gbps=TRUE.h2d_gbps * times, duplex_gbps=TRUE.duplex_gbps * times
    )
    right, _ = trained(seed, TRUE, 0.4)
    steps, _ = trained(seed, wrong, 0.4)
    assert settled_us(steps) <= 1.03 * settled_us(right)


@pytest.mark.parametrize("seed", seeds(1, of=(0, 3, 4)))
@pytest.mark.parametrize("times", [0.2, 5.0])
def test_operators_that_were_timed_wrong_cost_little_in_the_end(
    seed: int, times: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded step is another one than those after it: kernels are loaded, the host is slow."""
    right, executor = trained(seed, TRUE, 0.4)
    recorded = adaptation_of(executor).latest
    assert recorded is not None
    true_us = recorded.trace.duration_us
    resolve = EventTimes.resolve
    monkeypatch.setattr(EventTimes, "resolve", lambda self: ((op, us * times) for op, us in resolve(self)))
    steps, executor = trained(seed, TRUE, 0.4)
    planned = adaptation_of(executor).latest
    assert planned is not None
    assert planned.times_corrected > 0
    assert planned.trace.duration_us == pytest.approx(true_us, rel=0.02)
    assert settled_us(steps) <= 1.03 * settled_us(right)
