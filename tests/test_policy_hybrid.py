"""Plans that keep, swap, recompute or hold: within the budgets, no slower than swap-only plans, no faster than the bound."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_mm.device.specs import spec_by_name
from chameleon_mm.errors import InfeasibleBudget
from chameleon_mm.plan.bounds import ideal
from chameleon_mm.plan.planner import candidate_plans, generate_plan
from chameleon_mm.plan.problem import Problem
from chameleon_mm.plan.recipes import Recipes
from chameleon_mm.plan.rewrite import rewritten_for
from chameleon_mm.plan.rule import MIN_BYTES
from chameleon_mm.plan.selection import ChoicePath
from chameleon_mm.plan.simulate import simulate
from chameleon_mm.plan.swap_plan import SwapPlan
from chameleon_mm.plan.timing import LinkCost
from chameleon_mm.plan.trace import Trace
from chameleon_mm.plan.unswapped_memory import Candidates, memory_curve, peak_memory, smallest_budget
from chameleon_mm.replayable import DEFAULT, PRODUCTS
from chameleon_mm.tools.prediction import link_of
from chameleon_mm.tools.step_on_shapes import DTYPES, StepRequest, record_step
from chameleon_mm.tools.workload import built_in
from chameleon_mm.units import allocated_size
from tests._hybrid_traces import carried_out_recomputing, random_hybrid_step
from tests._optimum import Program
from tests._traces import H200_LINK, between, chain

# --- the bound with recomputation as the linear program that it stands for, and with whole choices: by scipy's HiGHS
#
# least_step_us(trace, budget, cost, names)                  what `ideal(..., recompute=names)` is compared with
# least_step_us(..., whole=True)                             each storage dropped or not, held or not: for the choice
#
# at the tick of the peak:
#     drop[j], again[x], hold[x], runs[o]     shares, from 0 to 1; crosses: bytes
#     gone bytes + crosses - held bytes >= what is too much
#     runs[o] >= drop[j], again[j]            for each maker o of j
#     hold[x] + again[x] >= drop[j], again[j] for each input x of j that nobody saved and that is not there by itself


def least_step_us(trace: Trace, budget: int, cost: LinkCost, names: Collection[str], *, whole: bool = False) -> float:
    recipes = Recipes.of(trace, names, cost=cost)
    c = recipes.candidates
    clock = trace.clock_us()
    last = int(trace.hook_tick[c.use].max(initial=0))
    padding = int((c.size - c.nbytes).sum())
    over = np.maximum(memory_curve(trace)[:last] - padding - budget, 0)
    if not over.any():
        return float(clock[-1])
    t = int(over.argmax())
    program = _Program(recipes, t)
    before_us, after_us, tail_us = float(clock[t]), float(clock[last] - clock[t]), float(clock[-1] - clock[last])
    return tail_us + program.solve(float(over[t]), before_us, after_us, cost, whole=whole)


class _Program(Program):
    def __init__(self, recipes: Recipes, t: int) -> None:
        super().__init__()
        trace, c = recipes.trace, recipes.candidates
        self._size = allocated_size(trace.tensor_bytes).tolist()
        self._us = trace.op_us.tolist()
        self._r = recipes
        self._free = (recipes.can_hold & ((trace.tensor_dies >= t) | (trace.tensor_born > t))).tolist()
        idle = (trace.hook_tick[c.first] <= t) & (t < trace.hook_tick[c.use])
        self._again: dict[int, int] = {}
        self._hold: dict[int, int] = {}
        self._runs: dict[int, int] = {}
        self._drop = {j: self._var(1.0) for j in c.tensor[idle].tolist() if recipes.can_drop[j]}
        for j, var in self._drop.items():
            self._makes(j, var)

    def solve(self, over: float, before_us: float, after_us: float, cost: LinkCost, *, whole: bool) -> float:
        crosses, first, second = (self._var(np.inf) for _ in range(3))
        gone = [(var, float(self._size[j])) for j, var in self._drop.items()]
        held = [(var, -float(self._size[x])) for x, var in self._hold.items()]
        runs = [(var, -float(self._us[o])) for o, var in self._runs.items()]
        runs += [(var, -float(self._r.compare_us[j])) for j, var in self._drop.items()]
        self._at_least(over, *gone, *held, (crosses, 1.0))
        self._at_least(before_us, (first, 1.0))
        self._at_least(0.0, (first, 1.0), (crosses, -1 / (cost.d2h_gbps * 1e3)))
        self._at_least(after_us, (second, 1.0), *runs)
        self._at_least(0.0, (second, 1.0), (crosses, -1 / (cost.h2d_gbps * 1e3)))
        for var in (*self._drop.values(), *self._hold.values()) if whole else ():
            self.whole[var] = 1
        found = self._least_sum(first, second)
        assert found.success, found.message
        return float(found.fun)

    def _makes(self, j: int, var: int) -> None:
        """Rows for recomputing `j` to the share `var`."""
        for o in self._r.makers[j]:
            if o not in self._runs:
                self._runs[o] = self._var(1.0)
            self._at_least(0.0, (self._runs[o], 1.0), (var, -1.0))
        for x in self._r.inputs[j]:
            if self._r.saved[x] or self._free[x]:
                continue
            if x not in self._again:
                self._again[x] = self._var(1.0 if self._r.can_recompute[x] else 0.0)
                self._hold[x] = self._var(1.0 if self._r.can_hold[x] else 0.0)
                self._makes(x, self._again[x])
            self._at_least(0.0, (self._hold[x], 1.0), (self._again[x], 1.0), (var, -1.0))


ALL = DEFAULT | PRODUCTS

SLOW_LINK = LinkCost(d2h_gbps=0.7, h2d_gbps=0.9, duplex_gbps=1.2)
"""Link on which the storages saved by `random_hybrid_step` take about as long as their operators."""

_traces: dict[tuple[str, int, int, str], Trace] = {}


def traced(model: str, batch: int, seq: int, gpu: str) -> Trace:
    key = (model, batch, seq, gpu)
    if key not in _traces:
        build, spec = built_in(model, batch=batch, seq=seq), spec_by_name(gpu)
        least = MIN_BYTES
        request = StepRequest(build=build, spec=spec, dtype=DTYPES["bfloat16"], optimizer="adamw-fused", min_bytes=least)
        _traces[key] = record_step(request).trace
    return _traces[key]


def one_part_in(trace: Trace, parts: int) -> int:
    """Budget that leaves 1 / `parts` of the bytes idle at the peak, in addition to those that never move."""
    peak = peak_memory(trace)
    return max(smallest_budget(trace), peak.nbytes - peak.idle_bytes + peak.idle_bytes // parts)


def bytes_beside(trace: Trace, plan: SwapPlan) -> int:
    """Return the bytes of copies and checksums that the plan's recomputations need."""
    return rewritten_for(Recipes.of(trace, None), plan).recomputations.bytes_beside(trace) if plan.recomputed else 0


def held_to(trace: Trace, plan: SwapPlan, cost: LinkCost) -> None:
    """Check the plan's figures against `simulate`, and its memory against a walk that knows no rewritten traces."""
    timeline = simulate(trace, plan, cost)
    assert timeline.peak_bytes + bytes_beside(trace, plan) == plan.peak_bytes <= plan.hbm_budget_bytes
    assert (timeline.host_bytes, timeline.recompute_us) == (plan.host_bytes, plan.recompute_us)
    assert timeline.step_us == pytest.approx(plan.step_us)
    assert timeline.stall_us == pytest.approx(plan.stall_us, abs=1e-6)
    assert max(carried_out_recomputing(trace, plan), default=0) <= plan.hbm_budget_bytes


# --- random steps


@given(st.randoms(use_true_random=False), st.floats(0, 1), st.sampled_from([SLOW_LINK, H200_LINK]))
def test_plans_of_random_steps(random: Random, share: float, cost: LinkCost) -> None:
    trace = random_hybrid_step(random)
    budget = max(1, between(trace, share))
    swap_only = generate_plan(trace, budget, None, cost, drafts=60)
    plan = generate_plan(trace, budget, None, cost, drafts=60, recompute=ALL)
    assert plan == generate_plan(trace, budget, None, cost, drafts=60, recompute=ALL)
    held_to(trace, plan, cost)
    assert plan.step_us <= swap_only.step_us
    assert ideal(trace, budget, cost, recompute=ALL) <= plan.step_us * (1 + 1e-9) + 1e-9
    assert not swap_only.recomputed and not swap_only.held
    if not plan.recomputed:
        assert plan == swap_only
    dropped = {action.tensor for action in plan.recomputed}
    without = generate_plan(trace, budget, None, cost, drafts=60, recompute=ALL, refused=dropped)
    assert dropped.isdisjoint(action.tensor for action in without.recomputed)


@given(st.randoms(use_true_random=False), st.floats(0, 1))
def test_the_bound_is_the_linear_programs_from_below(random: Random, share: float) -> None:
    trace = random_hybrid_step(random)
    budget = max(1, between(trace, share))
    bound = ideal(trace, budget, SLOW_LINK, recompute=ALL)
    program = least_step_us(trace, budget, SLOW_LINK, ALL)
    assert trace.duration_us * (1 - 1e-9) <= bound <= program * (1 + 1e-6) + 1e-6
    assert bound >= 0.9 * program
    assert program <= least_step_us(trace, budget, SLOW_LINK, ALL, whole=True) * (1 + 1e-6) + 1e-6


@given(st.randoms(use_true_random=False), st.floats(0, 1), st.integers(0, 1 << 18))
def test_the_hosts_budget_is_kept(random: Random, share: float, host_budget: int) -> None:
    trace = random_hybrid_step(random)
    budget = max(1, between(trace, share))
    try:
        plan = generate_plan(trace, budget, host_budget, SLOW_LINK, drafts=60, recompute=ALL)
    except InfeasibleBudget:
        with pytest.raises(InfeasibleBudget):
            generate_plan(trace, budget, host_budget, SLOW_LINK, drafts=60)
    else:
        assert plan.host_bytes <= host_budget
        held_to(trace, plan, SLOW_LINK)


# --- what is asked for


def test_without_names_nothing_is_recomputed() -> None:
    trace = traced("gpt2", 8, 1024, "h100")
    cost, budget = link_of(spec_by_name("h100")), one_part_in(trace, 4)
    plan = generate_plan(trace, budget, None, cost)
    assert plan == generate_plan(trace, budget, None, cost, recompute=frozenset())
    assert plan == generate_plan(trace, budget, None, cost, recompute={"aten::unheard_of"})
    assert (plan.swaps, plan.recomputed, plan.held, plan.recompute_us) == (plan.actions, (), (), 0.0)


def test_where_swapping_costs_no_time_nothing_is_recomputed() -> None:
    trace = chain(layers=8, op_us=5_000.0)
    budget = between(trace, 0.5)
    plan = generate_plan(trace, budget, None, H200_LINK, recompute=ALL)
    assert plan == generate_plan(trace, budget, None, H200_LINK)
    assert plan.step_us == pytest.approx(trace.duration_us)
    peak = peak_memory(trace).nbytes
    assert generate_plan(trace, peak, None, H200_LINK, recompute=ALL).actions == ()


@pytest.mark.ci
def test_the_best_plan_that_only_swaps_comes_second() -> None:
    """Its limit is a quarter more time: met with long rows. With short ones it takes twice as long and is not worth a trial."""
    cost = link_of(spec_by_name("h100"))
    for tokens, rows, parts, near in ((32768, 1, 4, True), (4096, 4, 8, False)):
        trace = traced("llama-7b", rows, tokens, "h100")
        budget = one_part_in(trace, parts)
        plans = candidate_plans(trace, budget, None, cost, recompute=ALL)
        assert plans[0] == generate_plan(trace, budget, None, cost, recompute=ALL)
        assert plans[0].recomputed
        swap_only = generate_plan(trace, budget, None, cost)
        assert (swap_only.step_us <= 1.25 * plans[0].step_us) is near
        assert (plans[1:] == [swap_only]) if near else all(plan.recomputed for plan in plans)


def test_a_host_that_is_too_small_for_swapping_is_told_of_recomputation() -> None:
    trace = traced("gpt2", 8, 1024, "h100")
    cost, budget = link_of(spec_by_name("h100")), one_part_in(trace, 2)
    with pytest.raises(InfeasibleBudget, match=r"or recompute: with recompute=True \d+ bytes .* are enough"):
        generate_plan(trace, budget, 1 << 30, cost)
    plan = generate_plan(trace, budget, 1 << 30, cost, recompute=DEFAULT)
    assert plan.host_bytes <= 1 << 30
    with pytest.raises(InfeasibleBudget) as refusal:
        generate_plan(trace, one_part_in(trace, 16), 0, cost, recompute=DEFAULT)
    smallest = refusal.value.smallest_bytes
    assert smallest is not None
    assert generate_plan(trace, smallest, 0, cost, recompute=DEFAULT).host_bytes == 0
    with pytest.raises(InfeasibleBudget) as refusal:
        generate_plan(trace, one_part_in(trace, 16), 0, cost)
    assert refusal.value.smallest_bytes is not None
    assert refusal.value.smallest_bytes > smallest


def test_prices_rise_along_the_path() -> None:
    """A higher price per byte drops more, at more time for each byte. Choices for prices between two lie between theirs."""
    trace = traced("llama-7b", 4, 4096, "h100")
    recipes, problem = Recipes.of(trace, ALL), Problem.of(trace)
    path = ChoicePath.of(recipes, problem.level, one_part_in(trace, 8))
    assert path.last >= 4
    choices = [path.choice(u / 4) for u in range(4 * path.last + 1)]
    times_us = [choice.recompute_us for choice in choices]
    assert len(choices[0].dropped) == 0
    for low, between_, high in zip(choices[::4], choices[2::4], choices[4::4], strict=False):
        dropped = set(between_.dropped.tolist())
        assert set(low.dropped.tolist()) & set(high.dropped.tolist()) <= dropped
        assert dropped <= set(low.dropped.tolist()) | set(high.dropped.tolist())
    assert times_us[-1] > times_us[0]


# --- built-in models

MUST_HOLD = [
    ("llama-7b", 4, 4096, "h100", 2, 1.025, 0.98),
    ("llama-7b", 4, 4096, "h100", 4, 1.065, 0.98),
    ("llama-7b", 4, 4096, "h100", 8, 1.115, 0.97),
    ("llama-7b", 1, 32768, "h100", 8, 1.03, 0.97),
    ("llama-7b", 1, 32768, "h100", 2, 1.004, 0.98),
    ("gpt2-medium", 16, 1024, "h100", 2, 1.105, 0.98),
    ("gpt2-medium", 16, 1024, "h100", 4, 1.195, 0.98),
    ("gpt2-medium", 16, 1024, "h100", 8, 1.23, 0.97),
]
"""Model, batch, sequence, GPU, parts of the idle activations; the step over the unswapped one at most; the program's share."""


@pytest.mark.ci
@pytest.mark.parametrize(("model", "batch", "seq", "gpu", "parts", "at_most", "of_bound"), MUST_HOLD)
def test_what_was_promised(model: str, batch: int, seq: int, gpu: str, parts: int, at_most: float, of_bound: float) -> None:
    trace, cost = traced(model, batch, seq, gpu), link_of(spec_by_name(gpu))
    budget = one_part_in(trace, parts)
    plan = generate_plan(trace, budget, None, cost, recompute=ALL)
    assert plan.step_us <= at_most * trace.duration_us
    least_us = least_step_us(trace, budget, cost, ALL)
    assert of_bound <= least_us / plan.step_us <= 1
    assert 0.95 * least_us <= ideal(trace, budget, cost, recompute=ALL) <= least_us * (1 + 1e-9)
    timeline = simulate(trace, plan, cost)
    assert timeline.peak_bytes + bytes_beside(trace, plan) == plan.peak_bytes <= budget


def test_of_7b_the_choice_is_as_good_as_a_mixed_integer_program() -> None:
    """Less half a percent: that program knows one moment of the step, nothing of recomputations' memory, nothing of pieces."""
    trace, cost = traced("llama-7b", 4, 4096, "h100"), link_of(spec_by_name("h100"))
    for parts in (2, 4, 8):
        budget = one_part_in(trace, parts)
        least_us = least_step_us(trace, budget, cost, ALL, whole=True)
        plan = generate_plan(trace, budget, None, cost, recompute=ALL)
        assert least_us <= plan.step_us * (1 + 1e-3)
        assert plan.step_us <= 1.005 * least_us


@pytest.mark.ci
@pytest.mark.parametrize("gpu", ["h100", "rtx4090", "gh200"])
def test_a_larger_budget_never_takes_longer(gpu: str) -> None:
    trace, cost = traced("gpt2", 8, 1024, gpu), link_of(spec_by_name(gpu))
    before_us = float("inf")
    for i in range(20):
        budget = between(trace, i / 19)
        plan = generate_plan(trace, budget, None, cost, recompute=ALL)
        assert plan.step_us <= before_us * (1 + 1e-9)
        assert plan.peak_bytes <= budget
        assert plan.step_us <= generate_plan(trace, budget, None, cost).step_us
        before_us = plan.step_us


def test_a_slower_link_is_another_plan() -> None:
    """A plan for another link still keeps the budget, but takes longer than the plan for this one."""
    trace, cost = traced("llama-7b", 4, 4096, "h100"), link_of(spec_by_name("h100"))
    slow = replace(cost, d2h_gbps=30.0, h2d_gbps=30.0, duplex_gbps=45.0)
    budget = one_part_in(trace, 4)
    fast_plan, slow_plan = (generate_plan(trace, budget, None, link, recompute=ALL) for link in (cost, slow))
    assert slow_plan.recompute_us > fast_plan.recompute_us
    assert simulate(trace, fast_plan, slow).step_us > slow_plan.step_us
    assert int(simulate(trace, fast_plan, slow).allocated_bytes.max()) <= budget < int(memory_curve(trace).max())
    assert len(Candidates.of(trace)) >= len(slow_plan.recomputed) + sum(
        action.tensor in set(Candidates.of(trace).tensor.tolist()) for action in slow_plan.swaps
    )
