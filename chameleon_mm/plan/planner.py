"""Make the plan from a trace, budgets and the cost of the link.

problem = Problem.of(trace)                 ticks become hooks, storages become candidates
the step fits already                       an empty plan
not even with every candidate away          try again: storages may also be away between two uses
still not                                   InfeasibleBudget, with the smallest feasible budget
selected = select(problem, ...)             candidates to move, and bytes of each: no more than needed
scheduled = schedule(problem, ...)          hooks of each copy out, reclaim and copy back
walk(moves, ...)                            the delay, as in `simulate`; the best of several selections is the plan

docs/policy.md gives the reasons, and the distance of the result from the minimum time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import inf
from typing import TypedDict, Unpack

import numpy as np

from chameleon_mm.errors import InfeasibleBudget
from chameleon_mm.plan.bounds import relaxed_us
from chameleon_mm.plan.problem import Problem, Scheduled
from chameleon_mm.plan.recipes import Recipes
from chameleon_mm.plan.rewrite import RewrittenTrace, choice_actions
from chameleon_mm.plan.search import Found, PlanLimits, Search
from chameleon_mm.plan.selection import Choice, ChoicePath
from chameleon_mm.plan.simulate import Simulator
from chameleon_mm.plan.swap_plan import SwapPlan
from chameleon_mm.plan.timing import LinkCost
from chameleon_mm.plan.trace import TensorKind, Trace
from chameleon_mm.plan.unswapped_memory import largest_of, least_memory, peak_memory, sum_over_time
from chameleon_mm.replayable import DEFAULT
from chameleon_mm.units import MIB, allocated_size, format_size, parse_size

# --- Plans that keep, swap, recompute or hold each storage. Dropped storages are chosen first, then swaps are planned
#
# 1. make a path of choices, one for each price of memory (selection.py)
# 2. for each choice: compute its level and time, and the step's time by the relaxed bound of swapping
# 3. for the best few, and mixes of neighbours: rewrite the trace, and plan its swaps as for any other step

_PLANNED = 2
"""Number of choices that are planned because their estimates are best."""
_BESIDE = 4
"""Maximum number of choices that are planned because they are neighbours of the best plan so far."""
_FAR = 1.25
"""Ratio of the best plan's time to the lowest estimate. From this ratio on, choices from the whole path are planned."""
_APART = 5
"""Number of choices from the whole path. Each takes about as long as a plan that only swaps."""
_WAITS = 1e-4
"""Minimum share of the step at which stalls count as waiting."""
_REPAIRS = 8
"""Maximum number of repairs of a choice. A repair keeps storages for whose recomputation there is no room."""
_FINER = 8
"""Number of mixes between two prices. Without mixes, plans of the built-in models take 0.6 % longer, at most 6.5 %."""


def hybrid_plans(
    trace: Trace, problem: Problem, limits: PlanLimits, names: Collection[str], refused: Collection[int]
) -> list[SwapPlan]:
    """Return plans of `trace` within `limits` that recompute, best first. `names`: base names of operators that may run again.
    `refused`: storages that may not be dropped."""
    recipes = Recipes.of(trace, names, refused, cost=limits.cost)
    if not recipes.can_drop.any():
        return []
    search = HybridSearch(problem, recipes, limits)
    search.run()
    return search.plans


class HybridSearch:
    """Search among plans that recompute, for one trace."""

    def __init__(self, problem: Problem, recipes: Recipes, limits: PlanLimits) -> None:
        self._problem, self._recipes, self._limits, self._trace = problem, recipes, limits, recipes.trace
        self._simulator = Simulator(self._trace, limits.cost)
        self.plans: list[SwapPlan] = []
        self._path = ChoicePath.of(recipes, problem.level, limits.budget)
        self._last = self._path.last * _FINER
        self._best_part = 0

    def run(self) -> None:
        """Plan the choices with the best estimates, at prices and between them. Then plan the neighbours of the best plan."""
        parts = {part: self._estimate_us(self._choice(part)) for part in range(0, self._last + 1, _FINER)}
        best = min(parts, key=lambda part: (parts[part], part))
        for part in range(max(0, best - _FINER), min(self._last, best + _FINER) + 1):
            if part not in parts:
                parts[part] = self._estimate_us(self._choice(part))
        tried = set[tuple[int, ...]]()
        for part in sorted((part for part in parts if parts[part] < inf), key=lambda part: (parts[part], part)):
            if len(tried) == _PLANNED or (self.plans and parts[part] >= self.plans[0].step_us):
                break
            self._try(part, tried)
        if not self.plans:
            self._try(self._last, tried)
        if not self.plans or self.plans[0].step_us > _FAR * min(parts.values()):
            self._halve(tried)
        for _ in range(_BESIDE):
            # If copies make compute wait, recompute more; else try to recompute less.
            step = 1 if not self.plans or self.plans[0].stall_us > _WAITS * self.plans[0].step_us else -1
            part = self._best_part + step
            while 0 <= part <= self._last and not self._try(part, tried):
                part += step
            if not (0 <= part <= self._last) or self._best_part != part:
                break

    def _halve(self, tried: set[tuple[int, ...]]) -> None:
        """Plan choices spread over the whole path, then choices around the best one, at half the distance each time. Estimates
        are useless if memory has no room for the recomputations."""
        step = max(1, self._last // _APART)
        for part in range(0, self._last + 1, step):
            self._try(part, tried)
        while (step := step // 2) and self.plans:
            for part in (self._best_part - step, self._best_part + step):
                if 0 <= part <= self._last:
                    self._try(part, tried)

    def _choice(self, part: int) -> Choice:
        return self._path.choice(part / _FINER)

    def _try(self, part: int, tried: set[tuple[int, ...]]) -> bool:
        choice = self._choice(part)
        key = (*choice.dropped.tolist(), -1, *choice.held.tolist())
        if key in tried:
            return False
        tried.add(key)
        best_us = self.plans[0].step_us if self.plans else inf
        self._plan(choice)
        self.plans.sort(key=lambda plan: plan.step_us)
        if self.plans and self.plans[0].step_us < best_us:
            self._best_part = part
        return True

    def _estimate_us(self, choice: Choice) -> float:
        """Estimate the step's time with a link never idle and recomputation without memory; infinite if above the budgets."""
        problem, limits = self._problem, self._limits
        recipes, c = self._recipes, self._recipes.candidates
        rows = recipes.row[choice.dropped]
        hooks = len(problem.level)
        level = problem.level - sum_over_time(hooks, c.size[rows], c.first[rows], c.use[rows])
        held, tick = choice.held, self._trace.hook_tick
        since = np.searchsorted(tick, self._trace.tensor_dies[held], side="right")
        until = np.maximum(np.searchsorted(tick, recipes.needed_until[held], side="right"), since)
        held_bytes = allocated_size(self._trace.tensor_bytes[held])
        level = level + sum_over_time(hooks, held_bytes, since, until)
        last = int(problem.candidates.use.max(initial=0))
        over = np.maximum(level[:last] - limits.budget, 0)
        swappable = np.ones(len(c), np.bool_)
        swappable[rows] = False
        idle = sum_over_time(hooks, c.size[swappable], c.first[swappable], c.use[swappable])
        idle += sum_over_time(hooks, held_bytes, since, until)
        if (over > idle[:last]).any() or (limits.host_budget is not None and over.max(initial=0) > limits.host_budget):
            return inf
        clock = np.asarray(problem.time_us)
        after = clock[last] - clock[:last] + choice.recompute_us
        out_us, back_us = over / (limits.cost.d2h_gbps * 1e3), over / (limits.cost.h2d_gbps * 1e3)
        relaxed = relaxed_us(clock[:last], after, out_us, back_us)
        floor = problem.total_us + choice.recompute_us
        return max(floor, float(relaxed.max(initial=0.0)) + problem.total_us - float(clock[last]))

    def _plan(self, choice: Choice) -> None:
        """Plan the swaps that remain under `choice`, and keep the plan if it is within the budgets."""
        limits = self._limits
        dropped, held = set(choice.dropped.tolist()), choice.held.tolist()
        for _ in range(_REPAIRS):
            rewritten = RewrittenTrace.of(self._recipes, dropped, held)
            beside_bytes = rewritten.recomputations.bytes_beside(self._trace)
            budget = limits.budget - beside_bytes
            problem = Problem.of(rewritten.trace)
            if problem.least_bytes <= budget:
                break
            spared = self._too_large(rewritten, problem, budget)
            if not spared:
                return
            dropped -= spared
        else:
            return
        search = Search(problem, replace(limits, budget=budget))
        if problem.peak_bytes > budget:
            search.try_ranks()
            search.try_swap_all()
            if search.best is None:
                return
        found = search.best or _nothing(problem)
        moves = rewritten.to_step(found.scheduled.moves)
        swaps = moves.actions([problem.tensor[i] for i in found.scheduled.who])
        timeline = self._simulator.run_rewritten(rewritten, swaps)
        if timeline.peak_bytes > budget:
            return
        if limits.host_budget is not None and timeline.host_bytes > limits.host_budget:
            return
        self.plans.append(
            SwapPlan(
                fingerprint=self._trace.fingerprint,
                num_hooks=len(self._trace.hook_tick),
                actions=swaps + choice_actions(self._recipes, rewritten),
                hbm_budget_bytes=limits.budget,
                peak_bytes=timeline.peak_bytes + beside_bytes,
                host_bytes=timeline.host_bytes,
                step_us=timeline.step_us,
                stall_us=timeline.stall_us,
                recompute_us=timeline.recompute_us,
            )
        )

    def _too_large(self, rewritten: RewrittenTrace, problem: Problem, budget: int) -> set[int]:
        """Return dropped storages to keep, because `budget` has no room for their recomputation even if all others are swapped.
        If some are made at a full hook: those used there, if others are made too; else all made there. Otherwise: all made
        earlier and used later, and all made next."""
        c, recipes = problem.candidates, self._recipes
        level = problem.level - sum_over_time(len(problem.level), c.size, c.first, c.use)
        use = recipes.candidates.use[recipes.row].tolist()
        last_use = recipes.candidates.last_use[recipes.row].tolist()
        made_at = rewritten.made_at
        spared = set[int]()
        for hook in np.unique(rewritten.origin[level > budget]).tolist():
            made = [j for j, at in made_at.items() if at == hook]
            used = [j for j in made if use[j] == hook]
            if made:
                spared.update(used if len(used) < len(made) else made)
            else:
                upcoming = min((at for at in made_at.values() if at >= hook), default=-1)
                spared.update(j for j, at in made_at.items() if at == upcoming or at <= hook <= last_use[j])
        return spared


_WORTH_TRYING = 0.25
"""Maximum share by which a plan that only swaps may be slower in simulation and still be worth measuring."""
_FASTER_US = 1e-3
"""Minimum time in us that a plan must gain by recomputing: less is rounding."""


class PlanOptions(TypedDict, total=False):
    """Options of `generate_plan`, which explains them, and of `candidate_plans`, which has their defaults."""

    drafts: int
    recompute: Collection[str]
    refused: Collection[int]
    counted_on: float


def generate_plan(
    trace: Trace, hbm_budget: int, host_budget: int | None, cost_model: LinkCost, **options: Unpack[PlanOptions]
) -> SwapPlan:
    """Return the fastest plan of `trace` that keeps device memory within `hbm_budget` bytes; an empty plan if the step fits.

    host_budget: bytes of pinned memory; None: no limit. drafts: number of tentative plans that a local search may evaluate if
    there are at most 16 candidates. The default takes almost a second; 0: no local search.

    recompute: base names of operators that may run again (`replayable.py`); empty: nothing is recomputed. refused: numbers of
    storages that must not be recomputed. Each storage is kept, swapped, or dropped and recomputed; inputs of recomputations may
    be held. The result is the fastest plan found, never slower than the best plan that only swaps. A plan that swaps a storage
    between two of its uses recomputes nothing. It is made only for budgets that are too small for other plans.

    counted_on: share of the link's rates that the choice assumes. The plan's times are those on the whole link.

    Deterministic. Time: about n log n in saved tensors, linear in operators.

    Raises `InfeasibleBudget`, with the smallest feasible budgets, if no plan is within the budgets; `ValueError` for a budget
    out of range; `TypeError` for a budget that is not a whole number of bytes.
    """
    return candidate_plans(trace, hbm_budget, host_budget, cost_model, at_most=1, **options)[0]


def candidate_plans(
    trace: Trace,
    hbm_budget: int,
    host_budget: int | None,
    cost_model: LinkCost,
    *,
    drafts: int = 4_500,
    at_most: int = 2,
    within: float = 0.02,
    recompute: Collection[str] = (),
    refused: Collection[int] = (),
    counted_on: float = 1.0,
) -> list[SwapPlan]:
    """Return the plan of `generate_plan`, then others whose simulated step is longer by at most the share `within`, best first.

    The model of link and operators is not exact, so a caller that can measure may try them all. After a plan that recomputes
    follows the best plan that only swaps, if its step takes at most a quarter longer. Raises as `generate_plan` does.
    """
    hbm_budget = parse_size(hbm_budget, what="hbm_budget")
    host_budget = None if host_budget is None else parse_size(host_budget, what="host_budget")
    if hbm_budget == 0:
        raise ValueError("hbm_budget: expected more than 0 bytes, got 0; say how much device memory a step may take")
    problem = Problem.of(trace)
    if problem.peak_bytes <= hbm_budget:
        return [_plan(trace, problem, hbm_budget, _nothing(problem))]
    if problem.least_bytes > hbm_budget:  # storages may also be away between two uses, and are copied back twice
        problem, recompute = Problem.of(trace, between_uses=True), ()
        if problem.least_bytes > hbm_budget:
            raise _infeasible(trace, problem, hbm_budget)
    slower = cost_model if counted_on == 1.0 else cost_model.slowed(counted_on)
    limits = PlanLimits(budget=hbm_budget, host_budget=host_budget, cost=slower)
    search = Search(problem, limits)
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
        swaps = _mixed(hybrids, swaps, at_most, within)
    if slower is cost_model:
        return swaps
    timelines = map(Simulator(trace, cost_model).run, swaps)
    return [replace(plan, step_us=t.step_us, stall_us=t.stall_us) for plan, t in zip(swaps, timelines, strict=True)]


def _swap_only(
    trace: Trace, problem: Problem, limits: PlanLimits, search: Search, at_most: int, within: float
) -> list[SwapPlan]:
    """Return the best plans that `search` found: at most `at_most`, each at most a share `within` slower than the best."""
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
    """Return the best plan that recomputes, the best that only swaps if at most a quarter slower, then more of the first
    kind."""
    best = hybrids[0]
    plans = [best, *(plan for plan in swaps[:1] if plan.step_us <= best.step_us * (1 + _WORTH_TRYING))]
    for plan in hybrids[1:]:
        if plan.step_us <= best.step_us * (1 + within) and all(plan.actions != other.actions for other in plans):
            plans.append(plan)
    return plans[:at_most]


def _nothing(problem: Problem) -> Found:
    """Return the empty plan, for a step that fits."""
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
    peak, least, least_peak = peak_memory(trace), problem.least_bytes, least_memory(trace)
    text = (
        f"hbm_budget: expected {least} bytes ({format_size(least)}) or more, got {budget} ({format_size(budget)}); the step's "
        f"peak is {peak}"
    )
    activations = peak.by_kind.get(TensorKind.ACTIVATION, 0)
    if least == problem.peak_bytes and not activations:
        text += (
            ". The peak is not in activations at all: a smaller batch does not help. Swap the optimizer's state too, shard "
            "it by FSDP2, or train adapters alone (LoRA)"
        )
    elif least == problem.peak_bytes:
        text += (
            f". None of the {format_size(activations)} of activations can be away then: each is being used, or the program "
            f"holds it as well, or it is too small to move. Raise the budget, or use a smaller batch or model"
        )
    else:
        text += (
            f"; {format_size(peak.idle_bytes)} of it could be swapped. With all away that may be, the peak is "
            f"{least_peak}. Raise the budget, or use a smaller batch or model"
        )
    if large := "; ".join(largest_of(trace, least_peak, 3)):
        text += f". Largest then: {large}"
    return InfeasibleBudget(text, smallest_bytes=least)


def _host_too_small(
    trace: Trace,
    problem: Problem,
    limits: PlanLimits,
    least_host_bytes: int,
    recompute: Collection[str],
    refused: Collection[int],
) -> InfeasibleBudget:
    """Return the error for too little pinned memory. Bisects for the smallest device budget with a plan within `host_budget`,
    then, more coarsely, with recomputation."""
    budget, host_budget = limits.budget, limits.host_budget or 0
    low, high = budget, problem.peak_bytes
    while high - low > max(MIB, high >> 10):
        middle = (low + high) // 2
        search = Search(problem, replace(limits, budget=middle))
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
