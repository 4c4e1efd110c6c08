"""Plans that swap all candidates whole, without a search, as published offloading does. No final plan may be worse.

out       as soon as each storage may be copied
reclaimed when `depth` later storages may be copied
back      at the use of the storage that is used `depth` uses earlier
depth 0   reclaimed at once, copied back on demand

Published libraries limit activation offloading by depth: a number of storages in flight, whatever the time of a copy.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from chameleon_mm.plan.problem import Problem, Scheduled
from chameleon_mm.plan.simulate import Simulator
from chameleon_mm.plan.swap_plan import ActionColumns, SwapPlan
from chameleon_mm.plan.timing import LinkCost
from chameleon_mm.plan.trace import Trace
from chameleon_mm.plan.unswapped_memory import Candidates

_EACH_DEPTH = 8
"""Depth up to which every depth is tried. Above it, only powers of two are tried."""


def early_moves(candidates: Candidates, depth: int) -> ActionColumns:
    """Return the moves of `candidates`, given in the order of their uses, at depth `depth`."""
    c, n = candidates, len(candidates)
    by_out = np.argsort(c.sendable, kind="stable")  # copies out run in the order in which they may begin, then by use
    depth = min(depth, n)
    later, earlier = np.full(n, -1), np.full(n, -1)  # -1: the last ones wait for none, the first ones are copied back on demand
    later[by_out[: n - depth]] = c.sendable[by_out[depth:]]
    earlier[depth:] = c.use[: n - depth]
    reclaim = np.minimum(np.maximum(c.first, later), c.use)
    back = np.where(earlier < 0, c.use, np.maximum(reclaim, earlier)) if depth else c.use
    return ActionColumns.reclaiming(c.size, c.size, c.nbytes, (c.sendable, reclaim, back, c.use), c.away_before())


def drafts(problem: Problem, budget: int) -> Iterator[tuple[Scheduled, int]]:
    """Yield the plans within `budget` that move all candidates whole, and their peaks. The deepest is first: it waits least."""
    who = np.argsort(problem.candidates.use, kind="stable")
    candidates = problem.candidates.take(who)
    depths = list(range(_EACH_DEPTH + 1))
    while 2 * depths[-1] < len(who):
        depths.append(2 * depths[-1])
    for depth in reversed(depths):
        moves = early_moves(candidates, depth)
        if (peak_bytes := problem.peak_with(moves)) <= budget:
            yield Scheduled(who.tolist(), moves), peak_bytes


def swap_all(trace: Trace, cost_model: LinkCost, *, depth: int = 1) -> SwapPlan:
    """Return the plan that moves every candidate of `trace`. The plan's peak is its budget.

    depth: a storage is reclaimed when `depth` later storages may be copied. Its copy back begins at the use of the storage that
    is used `depth` uses earlier. 0: reclaimed at once, copied back on demand.
    """
    candidates = Candidates.of(trace)
    return plan_of(trace, cost_model, candidates.take(np.argsort(candidates.use, kind="stable")), depth, None)


def plan_of(trace: Trace, cost_model: LinkCost, who: Candidates, depth: int, hbm_budget: int | None) -> SwapPlan:
    """Return the plan that moves `who`, ordered by their uses. `hbm_budget`: None: the plan's peak."""
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
