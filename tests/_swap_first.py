"""A plan that follows a fixed rule and searches for nothing: the largest storages go, whole, until the rest fits the budget.

They go out as early as possible, `depth` of them on their way at once, either way.
"""

from __future__ import annotations

import numpy as np

from chameleon_mm.plan.swap_all import early_moves, plan_of
from chameleon_mm.plan.swap_plan import PlannedMemory, SwapPlan
from chameleon_mm.plan.timing import LinkCost
from chameleon_mm.plan.trace import Trace
from chameleon_mm.plan.unswapped_memory import Candidates, below_least, memory_curve
from chameleon_mm.units import parse_size


def swap_first(trace: Trace, hbm_budget: int, cost_model: LinkCost, *, depth: int = 1) -> SwapPlan:
    """Plan that moves the largest candidates of `trace`, as few as are enough for `hbm_budget` bytes.

    depth: as in `swap_all`; where the budget has no room for it, as much of it as there is room for.

    Raises `InfeasibleBudget` where all candidates are not enough, `TypeError` for a budget that is no whole number.
    """
    hbm_budget = parse_size(hbm_budget, what="hbm_budget")
    candidates, memory = Candidates.of(trace), PlannedMemory(trace, memory_curve(trace))
    largest = np.argsort(-candidates.size, kind="stable")

    def chosen(count: int) -> Candidates:
        which = np.sort(largest[:count])
        return candidates.take(which[np.argsort(candidates.use[which], kind="stable")])

    def peak(count: int, depth: int) -> int:
        return int(memory.allocated(early_moves(chosen(count), depth)).max(initial=0))

    while peak(len(largest), depth) > hbm_budget:
        if depth == 0:
            raise below_least(peak(len(largest), 0), hbm_budget)
        depth -= 1
    low, high = -1, len(largest)  # too few, enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if peak(middle, depth) <= hbm_budget else (middle, high)
    return plan_of(trace, cost_model, chosen(high), depth, hbm_budget)
