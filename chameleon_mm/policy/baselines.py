"""Simple plans to compare plans with: they follow a fixed rule and search for nothing.

swap all:          every candidate goes, whole
swap largest:      the largest go, whole, until the rest fits the budget
both:              out as early as possible, `depth` storages on their way at once, either way

Depth is how the activation offloading of published libraries is bounded: a number of storages in flight, whatever a copy takes.
"""

from __future__ import annotations

import numpy as np

from chameleon_mm.policy.cost import LinkCost
from chameleon_mm.policy.memory import Candidates, below_least, memory_curve
from chameleon_mm.policy.plan import SwapPlan
from chameleon_mm.policy.planned_memory import PlannedMemory
from chameleon_mm.policy.simulate import Simulator
from chameleon_mm.policy.swap_all import early_moves
from chameleon_mm.trace import Trace
from chameleon_mm.units import whole_bytes


def swap_all(trace: Trace, cost_model: LinkCost, *, depth: int = 1) -> SwapPlan:
    """Plan that moves every candidate of `trace`. Its budget is the peak that comes of it.

    depth: a storage is reclaimed when that many later ones may be copied, and comes back with the use of the one that is used
    that many before it; 0: at once, and on demand.
    """
    candidates = Candidates.of(trace)
    return _plan(trace, cost_model, candidates.take(np.argsort(candidates.use, kind="stable")), depth, None)


def swap_first(trace: Trace, hbm_budget: int, cost_model: LinkCost, *, depth: int = 1) -> SwapPlan:
    """Plan that moves the largest candidates of `trace`, as few as are enough for `hbm_budget` bytes.

    depth: as in `swap_all`; where the budget has no room for it, as much of it as there is room for.

    Raises `InfeasibleBudget` where all candidates are not enough, `TypeError` for a budget that is no whole number.
    """
    hbm_budget = whole_bytes("hbm_budget", hbm_budget)
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
    return _plan(trace, cost_model, chosen(high), depth, hbm_budget)


def _plan(trace: Trace, cost_model: LinkCost, who: Candidates, depth: int, hbm_budget: int | None) -> SwapPlan:
    """The plan that moves `who`, ordered by their uses; without a budget its own peak is the budget."""
    moves = early_moves(who, depth)
    timeline = Simulator(trace, cost_model).run_moves(moves, who)
    return SwapPlan(
        fingerprint=trace.fingerprint,
        num_hooks=len(trace.hook_tick),
        actions=moves.actions(who.tensor.tolist()),
        hbm_budget_bytes=timeline.peak_bytes if hbm_budget is None else hbm_budget,
        peak_bytes=timeline.peak_bytes,
        host_bytes=timeline.host_bytes,
        step_us=timeline.step_us,
        stall_us=timeline.stall_us,
    )
