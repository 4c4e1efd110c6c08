"""The planner: budgets hold exactly, errors name what would do, no simpler plan is better, and for small steps hardly any."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_mm.bench._planner_traces import LayerShape, layer_chain, step_of
from chameleon_mm.errors import InfeasibleBudget
from chameleon_mm.policy import (
    Candidates,
    LinkCost,
    SwapPlan,
    candidate_plans,
    generate_plan,
    ideal,
    memory_curve,
    peak_memory,
    simulate,
    smallest_budget,
    swap_everything,
    swap_first,
)
from chameleon_mm.policy.cover import RANKS, cover, used_latest
from chameleon_mm.policy.placement import latest_back, place
from chameleon_mm.policy.problem import Problem
from chameleon_mm.trace import StepPhase, TensorKind, Trace, TraceBuilder
from tests._optimum import least_step_us
from tests._traces import H200_LINK, chain, plan_of, random_step

FORWARD, BACKWARD = StepPhase.FORWARD, StepPhase.BACKWARD

SLOW_LINK = LinkCost(d2h_gbps=0.5, h2d_gbps=0.6, duplex_gbps=0.8, copy_us=1.0, piece_bytes=20_000, hbm_gbps=20.0)
"""So slow that random steps stall, so shared that both directions hinder each other, in pieces that cut most storages."""

FREE_LINK = LinkCost(d2h_gbps=1.0, h2d_gbps=1.2, duplex_gbps=2.2, copy_us=2.0)
"""Neither direction takes from the other: what `least_step_us` can say exactly."""


def stack(random: Random, most: int) -> Trace:
    """A small step: one or two stacks of saved storages, used in reverse with a swap here and there, temporaries in between."""
    b = TraceBuilder(device="none: made up", simulated=True, start_bytes=0)
    fresh: list[int] = []

    def hooked() -> None:
        while fresh:
            b.sendable(fresh.pop(), b.num_hooks - 1)

    def us() -> float:
        return random.choice((0.0, random.random() * 60, random.random() * 60))

    parts = random.choice((1, 1, 2))
    count = random.randint(max(2, most // 2), most)
    for _ in range(parts):
        held, saved = [], []
        for _ in range(max(1, count // parts)):
            x = b.tensor(512 * random.randint(1, 100), TensorKind.ACTIVATION)
            b.op("aten::mm", 1, FORWARD, us(), writes=(x,))
            b.save(x, 1)
            hooked()
            fresh.append(x)
            saved.append(x)
            if random.random() < 0.4:
                t = b.tensor(random.randrange(30_000))
                b.op("aten::add", 2, FORWARD, us(), writes=(t,))
                b.dies(t)
            if random.random() < 0.7:
                b.released(x)
            else:
                held.append(x)
        b.op("aten::loss", 3, FORWARD, us())
        for x in held:
            b.released(x)
        order = saved[::-1]
        if random.random() < 0.4:
            i, j = random.randrange(len(order)), random.randrange(len(order))
            order[i], order[j] = order[j], order[i]
        for x in order:
            b.use(x, 1)
            hooked()
            t = b.tensor(random.randrange(30_000))
            b.op("aten::mm_backward", 2, BACKWARD, 2 * us(), writes=(t,))
            b.dies(t)
            b.dies(x)
    return b.finish(fingerprint=7)


def any_step(seed: int) -> Trace:
    random = Random(seed)
    return random_step(random) if seed % 2 else stack(random, 10)


def between(trace: Trace, share: float) -> int:
    """A budget: that share of the way from the least to what the step takes without swapping."""
    least = smallest_budget(trace)
    return max(1, least + int((peak_memory(trace).nbytes - least) * share))


def held_to(trace: Trace, plan: SwapPlan, cost: LinkCost) -> None:
    """What the plan says of itself is what `simulate` says, and it keeps its budget."""
    told = simulate(trace, plan, cost)
    assert told.peak_bytes == plan.peak_bytes <= plan.hbm_budget_bytes
    assert told.host_bytes == plan.host_bytes
    assert told.step_us == pytest.approx(plan.step_us, rel=1e-9, abs=1e-6)
    assert told.stall_us == pytest.approx(plan.stall_us, rel=1e-9, abs=1e-6)
    assert [action.use_at for action in plan.actions] == sorted(action.use_at for action in plan.actions)


# --- budgets


@settings(max_examples=150)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 1.1), slow=st.booleans(), lead_us=st.sampled_from((0.0, 15.0)))
def test_a_plan_keeps_its_budget_exactly_as_simulated(seed: int, share: float, slow: bool, lead_us: float) -> None:
    trace, cost = any_step(seed), SLOW_LINK if slow else H200_LINK
    plan = generate_plan(trace, between(trace, share), None, cost, lead_us=lead_us, drafts=60)
    held_to(trace, plan, cost)
    candidates = Candidates.of(trace)
    use = dict(zip(candidates.tensor.tolist(), candidates.use.tolist(), strict=True))
    assert all(action.in_at <= action.use_at == use[action.tensor] for action in plan.actions)


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), short=st.integers(1, 5000))
def test_below_the_least_the_error_names_a_budget_that_will_do(seed: int, short: int) -> None:
    trace = any_step(seed)
    least = smallest_budget(trace)
    if least <= short:
        return
    with pytest.raises(InfeasibleBudget, match=f"expected {least} bytes") as refusal:
        generate_plan(trace, least - short, None, SLOW_LINK)
    assert refusal.value.smallest_bytes == least
    held_to(trace, generate_plan(trace, least, None, SLOW_LINK, drafts=60), SLOW_LINK)


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 0.9), of_host=st.floats(0, 0.99))
def test_a_host_budget_holds_or_the_error_names_both_ways_out(seed: int, share: float, of_host: float) -> None:
    trace = any_step(seed)
    budget = between(trace, share)
    host = int(generate_plan(trace, budget, None, SLOW_LINK, drafts=60).host_bytes * of_host)
    try:
        plan = generate_plan(trace, budget, host, SLOW_LINK, drafts=60)
    except InfeasibleBudget as refusal:
        needed, larger = refusal.smallest_host_bytes, refusal.smallest_bytes
        assert needed is not None
        assert larger is not None
        assert host < needed
        assert generate_plan(trace, budget, needed, SLOW_LINK, drafts=60).host_bytes <= needed
        assert generate_plan(trace, larger, host, SLOW_LINK, drafts=60).host_bytes <= host
    else:
        held_to(trace, plan, SLOW_LINK)
        assert plan.host_bytes <= host


def test_a_step_that_fits_is_left_alone() -> None:
    trace = chain()
    peak = peak_memory(trace).nbytes
    plan = generate_plan(trace, peak, 0, H200_LINK)
    assert plan == replace(plan_of(trace), hbm_budget_bytes=peak, peak_bytes=peak, step_us=plan.step_us)
    assert plan.step_us == pytest.approx(trace.duration_us)
    assert generate_plan(trace, peak - 1, None, H200_LINK).actions


def test_a_step_in_which_nothing_happens() -> None:
    trace = TraceBuilder(device="none: made up", simulated=True, start_bytes=4096).finish()
    assert generate_plan(trace, 4096, None, H200_LINK).peak_bytes == 4096
    with pytest.raises(InfeasibleBudget, match="not in activations at all"):
        generate_plan(trace, 4095, None, H200_LINK)


def test_a_peak_that_is_not_in_activations_is_said_to_be_so() -> None:
    b = TraceBuilder(device="none: made up", simulated=True, start_bytes=0)
    x = b.tensor(512, TensorKind.ACTIVATION)
    b.op("aten::mm", 1, FORWARD, 1.0, writes=(x,))
    b.released(x)
    b.save(x, 1)
    b.save(-1, 1)
    b.sendable(x, 1)
    b.use(x, 1)
    b.op("aten::mm_backward", 1, BACKWARD, 1.0)
    b.dies(x)
    b.tensor(1 << 20, TensorKind.OPTIMIZER)
    b.op("aten::_fused_adamw_", 1, StepPhase.OPTIMIZER, 1.0)
    with pytest.raises(InfeasibleBudget, match=r"1.00 MiB optimizer\. The peak is not in activations at all"):
        generate_plan(b.finish(), 1 << 19, None, H200_LINK)


def test_a_part_fills_the_budget_to_the_last_unit() -> None:
    trace = layer_chain(LayerShape(), 8)
    budget = trace.start_bytes + (int(memory_curve(trace).max()) - trace.start_bytes) // 3
    plan = generate_plan(trace, budget, None, H200_LINK)
    held_to(trace, plan, H200_LINK)
    assert budget - plan.peak_bytes < 512
    in_part = [action for action in plan.actions if action.nbytes < trace.tensors[action.tensor].nbytes]
    assert len(in_part) == 1


@pytest.mark.parametrize(
    ("budgets", "knobs", "told"),
    [
        ((0, None), {}, "hbm_budget: expected more than 0 bytes, got 0"),
        ((-1, None), {}, "hbm_budget: expected more than 0 bytes, got -1"),
        ((1 << 20, -1), {}, "host_budget: expected 0 bytes or more"),
        ((1 << 20, None), {"lead_us": float("nan")}, "lead_us: expected finite times"),
        ((1 << 20, None), {"lead_us": {3: -1.0}}, "lead_us: expected finite times"),
        ((1 << 20, None), {"drafts": -1}, "expected drafts of 0 or more"),
        ((1 << 20, None), {"at_most": 0}, "at_most of 1 or more"),
        ((1 << 20, None), {"within": float("nan")}, "within of 0 or more"),
    ],
)
def test_bad_arguments(budgets: tuple[int, int | None], knobs: dict[str, float], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        candidate_plans(chain(layers=2), *budgets, H200_LINK, **knobs)  # type: ignore[arg-type]  # bad ones are what is tried


def test_times_that_are_not_numbers_never_reach_the_planner() -> None:
    with pytest.raises(ValueError, match="d2h_gbps"):
        LinkCost(d2h_gbps=float("nan"), h2d_gbps=1.0, duplex_gbps=2.0)
    trace = chain(layers=2)
    with pytest.raises(ValueError, match="finite times"):
        replace(trace, op_us=trace.op_us * float("nan"))


# --- what moves


@settings(max_examples=100)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 0.99))
def test_a_cover_by_any_rank_is_enough_at_every_hook(seed: int, share: float) -> None:
    trace = any_step(seed)
    problem, budget = Problem.of(trace), between(trace, share)
    moved = []
    for rank in RANKS:
        taken = cover(problem, budget, rank(problem))
        assert taken is not None
        who = list(taken)
        away = problem.away([taken[i] for i in who], [problem.first[i] for i in who], [problem.use[i] for i in who])
        assert problem.peak_of(problem.level - away) <= budget
        assert all(0 < gives <= problem.size[i] for i, gives in taken.items())
        moved.append(sum(taken.values()))
    assert moved[0] <= min(moved) + 512 * len(problem.size), "used latest moves the fewest bytes, but for what rounding adds"


def test_bounds_of_a_cover() -> None:
    trace = chain(layers=2)
    problem, budget = Problem.of(trace), between(trace, 0.5)
    rank = used_latest(problem)
    assert cover(problem, budget, rank, most=[0] * len(problem.size)) is None
    first = min(i for i in range(len(rank)) if rank[i] == max(rank))
    taken = cover(problem, budget, rank, least=[problem.size[i] * (i == first) for i in range(len(rank))])
    assert taken is not None
    assert taken[first] == problem.size[first]


def test_copies_back_wait_for_their_time_and_leave_a_lead() -> None:
    trace = layer_chain(LayerShape(tokens=65_536), 4)  # so long that copies have time to spare
    problem, budget = Problem.of(trace), between(trace, 0.8)
    late = generate_plan(trace, budget, None, H200_LINK)
    early = generate_plan(trace, budget, None, H200_LINK, lead_us=300_000.0)
    only = late.actions[-1].tensor
    one = generate_plan(trace, budget, None, H200_LINK, lead_us={only: 300_000.0})
    assert late.stall_us == early.stall_us == one.stall_us == 0.0
    back = [{action.tensor: action.in_at for action in plan.actions} for plan in (late, early, one)]
    assert back[1][only] < back[0][only]
    assert back[2][only] < back[0][only]
    assert all(back[1][tensor] <= hook for tensor, hook in back[0].items())
    taken = cover(problem, budget, used_latest(problem))
    assert taken is not None
    eager = place(problem, budget, taken)
    timely = place(problem, budget, taken, latest=lambda taken: latest_back(problem, taken, H200_LINK, 0.0))
    assert sum(eager.in_at) < sum(timely.in_at)
    assert eager.late_us(problem, H200_LINK)[0] == timely.late_us(problem, H200_LINK)[0] == 0.0


# --- how good it is


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), slow=st.booleans(), depth=st.integers(0, 2))
def test_never_worse_than_swapping_everything(seed: int, slow: bool, depth: int) -> None:
    trace, cost = any_step(seed), SLOW_LINK if slow else H200_LINK
    everything = swap_everything(trace, cost, depth=depth)
    plan = generate_plan(trace, max(1, everything.peak_bytes), None, cost, drafts=60)
    held_to(trace, plan, cost)
    assert plan.step_us <= everything.step_us + 1e-6


@pytest.mark.parametrize("tokens", [4096, 32_768])
@pytest.mark.parametrize("less", [2, 4, 8])
def test_a_chain_comes_close_to_the_ideal(tokens: int, less: int) -> None:
    trace = layer_chain(LayerShape(tokens=tokens), 32)
    budget = trace.start_bytes + (int(memory_curve(trace).max()) - trace.start_bytes) // less
    plan = generate_plan(trace, budget, None, H200_LINK)
    held_to(trace, plan, H200_LINK)
    assert ideal(trace, budget, H200_LINK).step_us >= 0.97 * plan.step_us
    assert plan.step_us <= swap_everything(trace, H200_LINK).step_us
    if less == 4:
        for depth in range(3):
            assert swap_first(trace, budget, H200_LINK, depth=depth).step_us >= 1.10 * plan.step_us


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_uniform_chain_too(micro_batches: int) -> None:
    trace = chain(layers=16, op_us=60.0, micro_batches=micro_batches)
    budget = between(trace, 0.25)
    plan = generate_plan(trace, budget, None, H200_LINK)
    held_to(trace, plan, H200_LINK)
    assert plan.step_us <= swap_first(trace, budget, H200_LINK).step_us
    if micro_batches == 1:
        assert ideal(trace, budget, H200_LINK).step_us >= 0.97 * plan.step_us


def within_two_percent(seed: int) -> None:
    random = Random(seed)
    trace = stack(random, 10)
    problem = Problem.of(trace)
    if len(problem.size) < 4 or problem.least_bytes == problem.peak_bytes:
        return
    budget = between(trace, random.choice((0.0, 0.2, 0.4, 0.6, 0.8)))
    budget = max(problem.least_bytes, budget - budget % 512)
    plan = generate_plan(trace, budget, None, FREE_LINK)
    held_to(trace, plan, FREE_LINK)
    least_us = least_step_us(problem, budget, FREE_LINK)
    if least_us is not None:
        assert least_us <= plan.step_us + 1e-3, "the program is a bound from below"
        assert plan.step_us <= 1.02 * least_us


@pytest.mark.parametrize("seed", range(10))
def test_small_steps_come_within_two_percent_of_the_least_time_there_is(seed: int) -> None:
    within_two_percent(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 60))
def test_more_of_them(seed: int) -> None:
    within_two_percent(seed)


# --- several plans, and the same one again


def test_other_plans_of_about_the_same_time() -> None:
    trace = chain(layers=6, op_us=60.0)
    budget = between(trace, 0.4)
    plans = candidate_plans(trace, budget, None, H200_LINK, at_most=3, within=0.05)
    assert plans[0] == generate_plan(trace, budget, None, H200_LINK)
    assert len(plans) == len({plan.actions for plan in plans}) > 1
    assert [plan.step_us for plan in plans] == sorted(plan.step_us for plan in plans)
    assert plans[-1].step_us <= 1.05 * plans[0].step_us
    for plan in plans:
        held_to(trace, plan, H200_LINK)


def test_planning_is_deterministic() -> None:
    trace = stack(Random(3), 10)
    budget = between(trace, 0.2)
    assert generate_plan(trace, budget, None, SLOW_LINK) == generate_plan(trace, budget, None, SLOW_LINK)


def test_a_long_step_is_planned_by_the_same_rules() -> None:
    trace = step_of(40_000)
    budget = between(trace, 0.25)
    plan = generate_plan(trace, budget, None, H200_LINK)
    held_to(trace, plan, H200_LINK)
    assert len(plan.actions) > 500
