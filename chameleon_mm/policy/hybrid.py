"""Plans that keep, swap, recompute or hold, each storage for itself: what is dropped is chosen, the rest is planned as ever.

plans = hybrid_plans(trace, problem, limits, names, refused)        # simulated, best first

1. a path of choices, one for each price of memory (choice.py)
2. of each: its level and time by arithmetic, and the step as the relaxed bound of swapping has it
3. the best few, and mixes of neighbours: the trace is rewritten, what is left to move is planned as any other step
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import inf

import numpy as np

from chameleon_mm.policy.bounds import relaxed_us
from chameleon_mm.policy.choice import Choice, ChoicePath
from chameleon_mm.policy.link_cost import LinkCost
from chameleon_mm.policy.plan import SwapPlan
from chameleon_mm.policy.planned_rewrite import choice_actions
from chameleon_mm.policy.problem import Problem
from chameleon_mm.policy.recipes import Recipes
from chameleon_mm.policy.rewrite import RewrittenTrace
from chameleon_mm.policy.scheduling import PerTensor, Scheduled
from chameleon_mm.policy.search import Found, Search
from chameleon_mm.policy.simulate import Simulator
from chameleon_mm.policy.unswapped_memory import sum_over_time
from chameleon_mm.trace import Trace

_PLANNED = 2
"""Number of choices for which the rest is planned because they look best."""
_BESIDE = 4
"""Number of choices at most for which it is because they are beside the best one so far."""
_WAITS = 1e-4
"""Share of the step from which on compute is said to wait."""
_REPAIRS = 8
"""Number of times that what cannot be rebuilt for want of room is no longer dropped."""
_FINER = 8
"""Number of mixes between two prices. Without mixes plans of the built-in models take 0.6 % longer, and up to 6.5 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLimits:
    """Budgets and the link, as `generate_plan` takes them."""

    budget: int
    host_budget: int | None
    cost: LinkCost
    lead_us: PerTensor
    lag_us: PerTensor


def hybrid_plans(
    trace: Trace, problem: Problem, limits: PlanLimits, names: Collection[str], refused: Collection[int]
) -> list[SwapPlan]:
    """Plans of `trace` within `limits` that recompute, best first. `names`: base names of operators that may run again;
    `refused`: storages that may not be dropped."""
    recipes = Recipes.of(trace, names, refused, cost=limits.cost)
    if not recipes.can_drop.any():
        return []
    search = HybridSearch(problem, recipes, limits)
    search.run()
    return search.plans


class HybridSearch:
    """Searches among plans that recompute for one trace."""

    def __init__(self, problem: Problem, recipes: Recipes, limits: PlanLimits) -> None:
        self._problem = problem
        self._recipes = recipes
        self._limits = limits
        self._trace = recipes.trace
        self._simulator = Simulator(self._trace, limits.cost)
        self.plans: list[SwapPlan] = []
        self._path = ChoicePath.of(recipes, problem.level, limits.budget)
        self._last = self._path.last * _FINER
        self._best_part = 0

    def run(self) -> None:
        """Plan the choices that look best, at prices and between them, and then those beside the best plan."""
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
        for _ in range(_BESIDE):
            # Where copies make compute wait more has to be recomputed, else less may do.
            step = 1 if not self.plans or self.plans[0].stall_us > _WAITS * self.plans[0].step_us else -1
            part = self._best_part + step
            while 0 <= part <= self._last and not self._try(part, tried):
                part += step
            if not (0 <= part <= self._last) or self._best_part != part:
                break

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
        """The step on a link that is never idle, if recomputing took no memory; infinite where that exceeds the budgets."""
        problem, limits = self._problem, self._limits
        recipes, c = self._recipes, self._recipes.candidates
        rows = recipes.row[choice.dropped]
        hooks = len(problem.level)
        level = problem.level - sum_over_time(hooks, c.size[rows], c.first[rows], c.use[rows])
        held, tick = choice.held, self._trace.hook_tick
        since = np.searchsorted(tick, self._trace.tensor_dies[held], side="right")
        until = np.maximum(np.searchsorted(tick, recipes.needed_until[held], side="right"), since)
        held_bytes = self._trace.tensor_bytes[held]
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
        """Plan what is left to move under `choice`, and keep the plan if it is within the budgets."""
        limits = self._limits
        dropped, held = set(choice.dropped.tolist()), choice.held.tolist()
        for repair in range(_REPAIRS):
            rewritten = RewrittenTrace.of(self._recipes, dropped, held)
            beside_bytes = rewritten.recomputations.bytes_beside(self._trace)
            budget = limits.budget - beside_bytes
            problem = Problem.of(rewritten.trace)
            if problem.least_bytes <= budget:
                break
            spared = self._too_large(rewritten, problem, budget, gently=repair < _REPAIRS // 2)
            if not spared:
                return
            dropped -= spared
        else:
            return
        search = Search(problem, budget, limits.host_budget, limits.cost, lead_us=limits.lead_us, lag_us=limits.lag_us)
        if problem.peak_bytes <= budget:
            found = Found(scheduled=Scheduled([], problem.moves([], [], [], [], [])), peak_bytes=problem.peak_bytes)
        else:
            search.try_ranks()
            search.try_swap_all()
            if search.best is None:
                return
            found = search.best
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

    def _too_large(self, rewritten: RewrittenTrace, problem: Problem, budget: int, *, gently: bool) -> set[int]:
        """Dropped storages without whose recomputations there is more room, where `budget` has too little, whatever is swapped:
        all that is there again by then, and all that is made next. `gently`: what is used there, if that makes others as well,
        else what is made there, if anything is."""
        c, recipes = problem.candidates, self._recipes
        level = problem.level - sum_over_time(len(problem.level), c.size, c.first, c.use)
        use = recipes.candidates.use[recipes.row].tolist()
        last_use = recipes.candidates.last_use[recipes.row].tolist()
        made_at = rewritten.made_at
        spared = set[int]()
        for hook in np.unique(rewritten.origin[level > budget]).tolist():
            made = [j for j, at in made_at.items() if at == hook]
            used = [j for j in made if use[j] == hook]
            if not gently or not made:
                upcoming = min((at for at in made_at.values() if at >= hook), default=-1)
                spared.update(j for j, at in made_at.items() if at == upcoming or at <= hook <= last_use[j])
            else:
                spared.update(used if len(used) < len(made) else made)
        return spared
