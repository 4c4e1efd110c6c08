"""Makes the plan from a trace, budgets and the cost of the link.

problem = Problem.of(trace)                 ticks become hooks, storages candidates
fits already                                an empty plan
not even with every candidate away          the same once more, with what is idle between two uses away there, too
nor so                                      InfeasibleBudget, with the smallest budget that is feasible
taken = select_candidates(problem, ...)     what moves, and how much of it: no more bytes than needed
tentative = place(problem, ...)      when it goes, when its memory is reclaimed, when it comes back
tentative.late_us(problem, cost)            what it costs, as `simulate` has it; the best of several selections is the plan

docs/policy.md explains why, and says how far from the least time the result is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import isfinite

from chameleon_mm.errors import InfeasibleBudget
from chameleon_mm.policy.hybrid import PlanLimits, hybrid_plans
from chameleon_mm.policy.link_cost import LinkCost
from chameleon_mm.policy.plan import SwapPlan
from chameleon_mm.policy.problem import Problem
from chameleon_mm.policy.scheduling import PerTensor, Scheduled
from chameleon_mm.policy.search import Found, Search
from chameleon_mm.policy.unswapped_memory import peak_memory
from chameleon_mm.trace import TensorKind, Trace
from chameleon_mm.trace.replayable import DEFAULT
from chameleon_mm.units import MIB, format_size, whole_bytes

_WORTH_TRYING = 0.25
"""Share by which the step of a plan that only swaps may be longer, as simulated, and is still worth measuring."""
_FASTER_US = 1e-3
"""Time that a plan which recomputes has to gain over one that only swaps: less is rounding."""


def generate_plan(
    trace: Trace,
    hbm_budget: int,
    host_budget: int | None,
    cost_model: LinkCost,
    *,
    lead_us: PerTensor = 0.0,
    lag_us: PerTensor = 0.0,
    drafts: int = 4_500,
    recompute: Collection[str] = (),
    refused: Collection[int] = (),
) -> SwapPlan:
    """Plan of what of `trace` moves and when, so that device memory stays within `hbm_budget` bytes and the step takes the
    least time.

    host_budget: bytes of pinned memory; None: no limit. drafts: tentative plans that a local search may evaluate where there
    are 16 candidates or fewer, most of a second's worth; 0: none. Plans nothing where the step fits as it is.

    lead_us: how much earlier than in time copies back are to be done, for all or by tensor; where memory has no room for that,
    as early as it has. lag_us: how much later than foreseen copies out are there, for all or by tensor. The plan is the one
    that is least late even so; a storage whose copy lags gives its memory back after others, where these will do. What the plan
    says of itself, time and stalls, is as `simulate` has it, without lags.

    recompute: base names of operators that may run again (`trace.replayable`); empty: nothing is recomputed. `refused`: numbers
    of storages that must not be recomputed. Each storage is then kept, swapped or dropped and recomputed, and what others are
    made of may be held: whatever takes the least time, and never more than what only swaps. A plan by which something is away
    between two of its uses recomputes nothing; there is one only for budgets that are too small for any other.

    Deterministic. About n log n in what autograd saved, and linear in operators.

    Raises `InfeasibleBudget` where no plan is within the budgets, with the smallest that are; `ValueError` for a budget, a
    lead or a lag that is none at all, `TypeError` for a budget that is no whole number of bytes.
    """
    return candidate_plans(
        trace,
        hbm_budget,
        host_budget,
        cost_model,
        lead_us=lead_us,
        lag_us=lag_us,
        drafts=drafts,
        at_most=1,
        recompute=recompute,
        refused=refused,
    )[0]


def candidate_plans(
    trace: Trace,
    hbm_budget: int,
    host_budget: int | None,
    cost_model: LinkCost,
    *,
    lead_us: PerTensor = 0.0,
    lag_us: PerTensor = 0.0,
    drafts: int = 4_500,
    at_most: int = 2,
    within: float = 0.02,
    recompute: Collection[str] = (),
    refused: Collection[int] = (),
) -> list[SwapPlan]:
    """Return the plan of `generate_plan`, then others whose simulated step takes at most `within` (a share) longer, best first.

    A model of the link and of the operators is not exact: whoever can measure may try them all. After a plan that recomputes
    the best one that only swaps comes second, if its step takes at most a quarter longer. Raises as `generate_plan` does.
    """
    hbm_budget = whole_bytes("hbm_budget", hbm_budget)
    host_budget = None if host_budget is None else whole_bytes("host_budget", host_budget)
    _check_arguments(hbm_budget, host_budget, {"lead_us": lead_us, "lag_us": lag_us}, drafts, at_most, within)
    problem = Problem.of(trace)
    if problem.peak_bytes <= hbm_budget:
        return [_plan(trace, problem, hbm_budget, _nothing(problem))]
    if problem.least_bytes > hbm_budget:  # what is used several times may be away between its uses, too: it comes back twice
        problem, recompute = Problem.of(trace, between_uses=True), ()
        if problem.least_bytes > hbm_budget:
            raise _infeasible(trace, problem, hbm_budget)
    limits = PlanLimits(
        budget=hbm_budget,
        host_budget=host_budget,
        cost=cost_model,
        lead_us=lead_us,
        lag_us=lag_us,
    )
    search = Search(problem, hbm_budget, host_budget, cost_model, lead_us=lead_us, lag_us=lag_us)
    search.try_ranks()
    search.try_swap_all()
    search.improve(drafts)
    hybrids: list[SwapPlan] = []
    if recompute and not search.hides_all:
        hybrids = hybrid_plans(trace, problem, limits, recompute, refused)
    if not search.found and not hybrids:
        raise _host_too_small(trace, problem, limits, search.least_host_bytes or 0, recompute, refused)
    if at_most > 1 and search.found:
        search.try_others(at_most)
    swaps = _swap_only(trace, problem, limits, search, at_most, within)
    if not swaps or (hybrids and hybrids[0].step_us < swaps[0].step_us - _FASTER_US):
        return _mixed(hybrids, swaps, at_most, within)
    return swaps


def _swap_only(
    trace: Trace, problem: Problem, limits: PlanLimits, search: Search, at_most: int, within: float
) -> list[SwapPlan]:
    """The best plans that `search` found, at most so many and so much slower."""
    plans: list[SwapPlan] = []
    for found in sorted(search.found, key=lambda found: found.order):
        if len(plans) == at_most:
            break
        plan = _plan(trace, problem, limits.budget, found)
        if plans and plan.step_us > plans[0].step_us * (1 + within):
            break
        if all(plan.actions != other.actions for other in plans):
            plans.append(plan)
    return plans


def _mixed(hybrids: list[SwapPlan], swaps: list[SwapPlan], at_most: int, within: float) -> list[SwapPlan]:
    """The best plan that recomputes, the best that does not if that is no quarter slower, and then more of the first kind."""
    best = hybrids[0]
    plans = [best, *(plan for plan in swaps[:1] if plan.step_us <= best.step_us * (1 + _WORTH_TRYING))]
    for plan in hybrids[1:]:
        if plan.step_us <= best.step_us * (1 + within) and all(plan.actions != other.actions for other in plans):
            plans.append(plan)
    return plans[:at_most]


def _nothing(problem: Problem) -> Found:
    """The draft for a step that fits."""
    return Found(scheduled=Scheduled([], problem.moves([], [], [], [], [])), peak_bytes=problem.peak_bytes)


def _plan(trace: Trace, problem: Problem, budget: int, found: Found) -> SwapPlan:
    return SwapPlan(
        fingerprint=trace.fingerprint,
        num_hooks=len(problem.level),
        actions=found.scheduled.moves.actions([problem.tensor[i] for i in found.scheduled.who]),
        hbm_budget_bytes=budget,
        peak_bytes=found.peak_bytes,
        host_bytes=found.host_bytes,
        step_us=problem.total_us + found.stall_us + found.head_copy_us,
        stall_us=found.stall_us,
    )


def _infeasible(trace: Trace, problem: Problem, budget: int) -> InfeasibleBudget:
    peak, least = peak_memory(trace), problem.least_bytes
    parts = [f"{format_size(nbytes)} {kind.name.lower()}" for kind, nbytes in peak.by_kind.items()]
    if peak.inner_bytes:
        parts.append(f"{format_size(peak.inner_bytes)} inside an operator")
    text = (
        f"hbm_budget: expected {least} bytes ({format_size(least)}) or more, got {budget} ({format_size(budget)}); the step's "
        f"peak of {format_size(peak.nbytes)} is {', '.join(parts)}"
    )
    activations = peak.by_kind.get(TensorKind.ACTIVATION, 0)
    if least == problem.peak_bytes and not activations:
        text += (
            ". The peak is not in activations at all: nothing that could be swapped is idle then. Use a smaller batch or model"
        )
    elif least == problem.peak_bytes:
        text += (
            f". None of the {format_size(activations)} of activations can be away then: each is being used, or the program "
            f"holds it as well, or it is too small to move. Raise the budget, or use a smaller batch or model"
        )
    else:
        text += f", of which {format_size(peak.idle_bytes)} could be swapped. Raise the budget, or use a smaller batch or model"
    return InfeasibleBudget(text, smallest_bytes=least)


def _host_too_small(
    trace: Trace,
    problem: Problem,
    limits: PlanLimits,
    least_host_bytes: int,
    recompute: Collection[str],
    refused: Collection[int],
) -> InfeasibleBudget:
    """Find by halving the smallest device budget for which there is a plan within `host_budget`; more coarsely, what
    recomputation makes of it."""
    budget, host_budget = limits.budget, limits.host_budget or 0
    low, high = budget, problem.peak_bytes
    while high - low > max(MIB, high >> 10):
        middle = (low + high) // 2
        search = Search(problem, middle, host_budget, limits.cost)
        search.try_ranks()
        low, high = (low, middle) if search.found else (middle, high)
    low = budget
    while recompute and high - low > max(MIB, high >> 6):
        middle = (low + high) // 2
        found = hybrid_plans(trace, problem, replace(limits, budget=middle), recompute, refused)
        low, high = (low, middle) if found else (middle, high)
    also = ""
    if not recompute and not problem.goes_between_uses and hybrid_plans(trace, problem, limits, DEFAULT, refused):
        also = f"; or recompute: with recompute=True {budget} bytes ({format_size(budget)}) are enough"
    return InfeasibleBudget(
        f"host_budget: expected {least_host_bytes} bytes ({format_size(least_host_bytes)}) of pinned memory or more for an "
        f"hbm_budget of {format_size(budget)}, got {host_budget} ({format_size(host_budget)}); raise it, or hbm_budget to "
        f"{high} bytes ({format_size(high)}){also}",
        smallest_bytes=high,
        smallest_host_bytes=least_host_bytes,
    )


def _check_arguments(
    hbm_budget: int, host_budget: int | None, times_us: Mapping[str, PerTensor], drafts: int, at_most: int, within: float
) -> None:
    if hbm_budget <= 0:
        raise ValueError(
            f"hbm_budget: expected more than 0 bytes, got {hbm_budget}; say how much device memory a step may take"
        )
    if host_budget is not None and host_budget < 0:
        raise ValueError(f"host_budget: expected 0 bytes or more, or None for no limit, got {host_budget}")
    for name, given in times_us.items():
        for us in given.values() if isinstance(given, Mapping) else (given,):
            if not isfinite(us) or us < 0:
                raise ValueError(f"{name}: expected finite times of 0 us or more, got {us}")
    if drafts < 0 or at_most < 1 or not within >= 0:
        raise ValueError(
            f"expected drafts of 0 or more, at_most of 1 or more and within of 0 or more, got {drafts}, {at_most} and {within}"
        )
