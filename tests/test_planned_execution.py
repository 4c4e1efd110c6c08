"""The executor carries plans out as `simulate` has them: device memory to the byte, time closely. A wrong one costs time alone.

Random models on a simulated GPU whose host takes no time, as `simulate` supposes: the planner's plans at budgets from barely
feasible on, then any plans at all in their place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import Any

import pytest
import torch

import chameleon_mm as cm
from chameleon_mm.device import SPECS
from chameleon_mm.device.sim import CostModel
from chameleon_mm.device.specs import GpuSpec
from chameleon_mm.follow.adaptation import SLACK_PART, SPARE_PART
from chameleon_mm.plan.planner import generate_plan
from chameleon_mm.plan.simulate import simulate
from chameleon_mm.plan.swap_plan import Action, SwapPlan
from chameleon_mm.plan.timing import LinkCost
from chameleon_mm.plan.trace import Trace
from chameleon_mm.plan.unswapped_memory import least_memory, memory_curve
from chameleon_mm.swap.executor import Executor
from chameleon_mm.swap.swap_outs import PACK_BELOW_BYTES
from tests._random_models import (
    FULL_DUPLEX_GPU,
    NO_LIMIT,
    SLOW_GPU,
    Step,
    adaptation_of,
    far_ahead,
    link_of,
    planning,
    seeds,
    train,
)
from tests._trace_records import tensors_of
from tests._traces import away_before_first_uses_alone, plan_of, random_plan

pytestmark = pytest.mark.usefixtures("no_gc")

TIME_SHARE = 0.02
"""Largest relative difference of a step's time from the simulated time."""

Planner = Callable[[Trace, LinkCost], Sequence[SwapPlan]]


def plan_by(monkeypatch: pytest.MonkeyPatch, planner: Planner) -> None:
    """Make executors follow the plans of `planner`."""

    def plans(trace: Trace, hbm_budget: int, host_budget: int, link: LinkCost, **_: Any) -> Sequence[SwapPlan]:
        return planner(trace, link)

    monkeypatch.setattr("chameleon_mm.follow.adaptation.candidate_plans", plans)


def budgets_of(seed: int, shares: Sequence[float]) -> list[int]:
    """Return budgets for the model of `seed`, from the smallest with a plan (0) to the unswapped peak (1). Nothing is away
    between two uses, as in the first step, which follows the default rule."""
    device = far_ahead()
    executor = planning(device)
    train(seed, device, executor, steps=1)
    trace = adaptation_of(executor).latest.trace  # type: ignore[union-attr]  # both are there after a recorded step
    least, most = least_memory(away_before_first_uses_alone(trace)).nbytes, int(memory_curve(trace).max())
    return [int((least + share * (most - least)) * SPARE_PART / (SPARE_PART - 1)) + SPARE_PART for share in shares]


def assert_exact_and_clean(
    seed: int,
    budget: int = NO_LIMIT,
    *,
    spec: GpuSpec = SLOW_GPU,
    pack_below_bytes: int = 0,
    steps: int = 5,
) -> tuple[list[Step], Executor]:
    """Train by plans, with the bits of training without. Nothing remains allocated. Return the swapped steps."""
    plain, device = far_ahead(spec), far_ahead(spec)
    pool = cm.PinnedPool("64MiB", device=device)
    executor = planning(device, budget, pool=pool, pack_below_bytes=pack_below_bytes)
    expected, parameters = train(seed, plain, steps=steps)
    got, swapped = train(seed, device, executor, steps=steps)
    assert [step.loss for step in got] == [step.loss for step in expected]
    assert all(torch.equal(a, b) for a, b in zip(swapped, parameters, strict=True))
    assert not executor.registry.all()
    assert pool.stats().live_bytes == 0
    del swapped, parameters
    assert device.allocated_bytes() == 0
    return got, executor


def assert_as_simulated(steps: Sequence[Step], link: LinkCost) -> list[SwapPlan]:
    """Every step went by a plan; its peak is the simulated one, and so, closely, is its time. Returns the plans."""
    plans = []
    for step in steps:
        assert step.plan is not None
        assert step.trace is not None
        timeline = simulate(step.trace, step.plan, link)
        assert step.peak_bytes == timeline.peak_bytes
        assert step.step_us == pytest.approx(timeline.step_us, rel=TIME_SHARE)
        plans.append(step.plan)
    return plans


# --- the planner's plans


@pytest.mark.parametrize("seed", seeds(2, of=range(60)))
def test_planned_steps_are_as_simulated(seed: int) -> None:
    for budget in budgets_of(seed, (0.0, 0.3, 0.7)):
        steps, executor = assert_exact_and_clean(seed, budget)
        assert all(step.peak_bytes <= budget for step in steps)
        for plan, step in zip(assert_as_simulated(steps[1:], link_of(SLOW_GPU)), steps[1:], strict=True):
            assert plan.peak_bytes == step.peak_bytes
        assert executor.metrics.totals.budget_misses == 0


@pytest.mark.parametrize(("slack_bytes", "part_left"), [(0, SPARE_PART), (256, SPARE_PART), (1 << 20, SLACK_PART)])
def test_a_plan_leaves_room_for_blocks_that_are_larger_than_asked_for(slack_bytes: int, part_left: int) -> None:
    """Budgets here are a few MiB: the slack of four blocks is limited to the part that may be left."""
    seed, peaks = 0, []
    (budget,) = budgets_of(seed, (0.3,))
    for slack in (slack_bytes, 0):
        device = far_ahead()
        executor = planning(device, budget)
        adaptation_of(executor).planning.slack_bytes = slack
        train(seed, device, executor, steps=2)
        plan = adaptation_of(executor).latest_plan
        assert plan is not None
        peaks.append(plan.peak_bytes)
    assert peaks[0] <= budget - budget // part_left
    assert peaks[0] == peaks[1] or part_left == SLACK_PART
    assert peaks[1] > budget - budget // SLACK_PART


def test_where_there_is_no_room_for_their_slack_the_smaller_part_is_left() -> None:
    (budget,) = budgets_of(0, (0.0,))
    device = far_ahead()
    executor = planning(device, budget)
    adaptation_of(executor).planning.slack_bytes = 1 << 20
    train(0, device, executor, steps=2)
    plan = adaptation_of(executor).latest_plan
    assert plan is not None
    assert budget - budget // SLACK_PART < plan.peak_bytes <= budget - budget // SPARE_PART


def test_planned_steps_move_storages_in_part_too() -> None:
    in_part = 0
    for seed in range(4):
        for budget in budgets_of(seed, (0.3,)):
            for step in assert_exact_and_clean(seed, budget)[0][1:]:
                assert step.trace is not None and step.plan is not None
                in_part += sum(action.nbytes < tensors_of(step.trace)[action.tensor].nbytes for action in step.plan.actions)
    assert in_part > 0


@pytest.mark.parametrize("seed", seeds(1, of=range(3)))
def test_small_copies_that_share_a_call_take_as_long(seed: int) -> None:
    (budget,) = budgets_of(seed, (0.2,))
    steps, _ = assert_exact_and_clean(seed, budget, pack_below_bytes=PACK_BELOW_BYTES)
    assert_as_simulated(steps[1:], link_of(SLOW_GPU))


def test_a_session_on_a_gpu_with_a_host_does_as_its_plan_says() -> None:
    """Products are long enough that a host of 5 us per operator is ahead. The memory is an H200's, as a session assumes until
    it has measurements: copies within it are not measured."""
    spec = dataclasses.replace(SLOW_GPU, hbm_gbps=SPECS["h200"].hbm_gbps)
    device = cm.SimDevice(spec, cost=CostModel(spec=spec, matmul_efficiency=1.0))
    with device.compute():
        model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(6)))
    # To the byte, without the audits of recomputed storages: each keeps its original on the device until the next step.
    session = cm.SwapSession(device.allocated_bytes() + (5 << 20) // 2, "64MiB", device, 1024, model=model, recompute=False)
    peaks = []
    with session:
        for _ in range(6):
            device.reset_peaks()
            with session.step():
                model(torch.randn(256, 256)).square().mean().backward()
                model.zero_grad()
            peaks.append(device.peak_allocated_bytes())
    report = session.report()
    assert (report.detailed_steps, report.plan_cache_hits) == (1, 5)
    assert report.prefetches > 0
    assert peaks[-1] == report.planned_peak_bytes
    assert report.measured_step_us == pytest.approx(report.planned_step_us, rel=TIME_SHARE)
    assert max(peaks) <= session.hbm_budget_bytes


# --- any plans


@pytest.mark.parametrize("seed", seeds(2, of=range(60)))
def test_any_plan_takes_the_memory_that_was_simulated(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(seed)
    plan_by(monkeypatch, lambda trace, link: [told(trace, random_plan(rng, trace), link) for _ in range(2)])
    steps, _ = assert_exact_and_clean(seed, steps=6)
    for step in steps[1:]:
        assert step.plan is not None
        assert step.trace is not None
        assert step.peak_bytes == simulate(step.trace, step.plan, link_of(SLOW_GPU)).peak_bytes
    assert len({step.plan for step in steps[1:]}) >= 2  # both were tried


def told(trace: Trace, plan: SwapPlan, link: LinkCost) -> SwapPlan:
    """`plan` with the times that it comes to: an executor takes a step that is much slower for one whose trace is wrong."""
    timeline = simulate(trace, plan, link)
    return dataclasses.replace(plan, step_us=timeline.step_us, stall_us=timeline.stall_us)


def in_the_order_of_uses(plan: SwapPlan) -> SwapPlan:
    """Copies back in the order in which they are used, as every plan of the planner's has them."""
    actions, latest = [], 0
    for action in sorted(plan.actions, key=lambda action: action.use_at):
        latest = max(latest, action.in_at)
        actions.append(dataclasses.replace(action, in_at=latest))
    return dataclasses.replace(plan, actions=tuple(actions))


@pytest.mark.parametrize("seed", seeds(2, of=range(60)))
def test_a_plan_in_the_order_of_uses_takes_the_time_that_was_simulated(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies out keep their queue order, regardless of the one that compute waits for. Directions do not share this link. On a
    shared link, the rate depends on which of two copies was submitted first, and a copy that compute does not wait for yet is
    held back. The planner's own plans are as close on both."""
    rng = Random(seed)
    plan_by(
        monkeypatch, lambda trace, link: [told(trace, in_the_order_of_uses(random_plan(rng, trace)), link) for _ in range(2)]
    )
    steps, _ = assert_exact_and_clean(seed, spec=FULL_DUPLEX_GPU, steps=6)
    assert_as_simulated(steps[1:], link_of(FULL_DUPLEX_GPU))


# --- wrong plans


def shuffled_hooks(rng: Random, trace: Trace, plan: SwapPlan) -> list[Action]:
    """Return every action at newly drawn hooks."""

    def hooks() -> list[int]:
        return sorted(rng.randrange(plan.num_hooks) for _ in range(4))

    return [_at(action, *hooks()) for action in plan.actions]


def swapped_tensors(rng: Random, trace: Trace, plan: SwapPlan) -> list[Action]:
    """Return each action for another action's tensor."""
    tensors = [action.tensor for action in plan.actions]
    rng.shuffle(tensors)
    return [dataclasses.replace(action, tensor=tensor) for action, tensor in zip(plan.actions, tensors, strict=True)]


def any_tensors(rng: Random, trace: Trace, plan: SwapPlan) -> list[Action]:
    """Return actions on parameters, temporaries and unsaved tensors."""
    tensors = rng.sample(range(len(trace.tensor_bytes)), len(plan.actions))
    return [dataclasses.replace(action, tensor=tensor) for action, tensor in zip(plan.actions, tensors, strict=True)]


def of_another_model(rng: Random, trace: Trace, plan: SwapPlan) -> list[Action]:
    """Return another model's actions, as far as their numbers are storages here too."""
    return [action for action in another_plan().actions if action.tensor < len(trace.tensor_bytes)]


@cache
def another_plan() -> SwapPlan:
    device = far_ahead()
    executor = planning(device)
    train(99, device, executor, steps=1)
    trace = adaptation_of(executor).latest.trace  # type: ignore[union-attr]  # both are there after a recorded step
    return generate_plan(trace, least_memory(trace).nbytes, None, link_of(SLOW_GPU))


def far_too_many_bytes(rng: Random, trace: Trace, plan: SwapPlan) -> list[Action]:
    return [dataclasses.replace(action, nbytes=action.nbytes * rng.randint(1, 9)) for action in plan.actions]


def _at(action: Action, out_at: int, reclaim_at: int, in_at: int, use_at: int) -> Action:
    return dataclasses.replace(action, out_at=out_at, reclaim_at=reclaim_at, in_at=in_at, use_at=use_at)


WRONG = [shuffled_hooks, swapped_tensors, any_tensors, of_another_model, far_too_many_bytes]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("seed", seeds(1, of=range(12)))
def test_a_wrong_plan_costs_time_never_a_number(
    wrong: Callable[[Random, Trace, SwapPlan], list[Action]], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, made = Random(seed), list[SwapPlan]()
    another_plan()  # before the planner is another

    def planner(trace: Trace, link: LinkCost) -> Sequence[SwapPlan]:
        plan = generate_plan(trace, least_memory(trace).nbytes, None, link)
        made.append(plan_of(trace, wrong(rng, trace, plan)))
        return [made[-1]]

    with monkeypatch.context() as patched:
        plan_by(patched, planner)
        steps, _ = assert_exact_and_clean(seed)
    assert len(made) >= 1
    assert all(plan.actions for plan in made)
    assert all(step.plan in made for step in steps[1:])  # it was followed all the same
