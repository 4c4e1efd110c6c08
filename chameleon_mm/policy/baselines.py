"""Plans that do not plan, to compare plans with.

swap everything:   every candidate goes, whole
swap first:        the largest go, whole, until the rest fits the budget
both:              out as early as possible, `depth` storages on their way at once, either way

Depth is how the activation offloading of published libraries is bounded: a number of storages in flight, whatever a copy takes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from chameleon_mm.policy.cost import LinkCost
from chameleon_mm.policy.everything import early_hooks
from chameleon_mm.policy.memory import Candidates, below_least, memory_curve
from chameleon_mm.policy.moves import Moves
from chameleon_mm.policy.plan import Action, SwapPlan
from chameleon_mm.policy.planned_memory import PlannedMemory
from chameleon_mm.policy.simulate import simulate
from chameleon_mm.trace import Trace
from chameleon_mm.trace.trace import Int64s
from chameleon_mm.units import whole_bytes


def swap_everything(trace: Trace, cost_model: LinkCost, *, depth: int = 1) -> SwapPlan:
    """Every candidate of `trace` moves. Its budget is the peak that comes of it.

    depth: a storage is reclaimed when that many later ones may be copied, and comes back with the use of the one that is used
    that many before it; 0: at once, and on demand.
    """
    candidates = Candidates.of(trace)
    actions = _early(candidates, np.arange(len(candidates)), depth)
    return _told(trace, cost_model, actions, None)


def swap_first(trace: Trace, hbm_budget: int, cost_model: LinkCost, *, depth: int = 1) -> SwapPlan:
    """The largest candidates of `trace` move, as few as are enough for `hbm_budget` bytes.

    depth: as in `swap_everything`; where the budget has no room for it, as much of it as there is room for.

    Raises `InfeasibleBudget` where all candidates are not enough, `TypeError` for a budget that is no whole number.
    """
    hbm_budget = whole_bytes("hbm_budget", hbm_budget)
    candidates, memory = Candidates.of(trace), PlannedMemory(trace, memory_curve(trace))
    largest = np.argsort(-candidates.size, kind="stable")

    def peak(count: int, depth: int) -> int:
        actions = _early(candidates, np.sort(largest[:count]), depth)
        return int(memory.allocated(Moves.of(actions, trace)).max(initial=0))

    while peak(len(largest), depth) > hbm_budget:
        if depth == 0:
            raise below_least(peak(len(largest), 0), hbm_budget)
        depth -= 1
    low, high = -1, len(largest)  # too few, enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if peak(middle, depth) <= hbm_budget else (middle, high)
    return _told(trace, cost_model, _early(candidates, np.sort(largest[:high]), depth), hbm_budget)


def _early(candidates: Candidates, which: Int64s, depth: int) -> tuple[Action, ...]:
    """Actions that move `which` of the candidates, whole and as early as possible."""
    if depth < 0:
        raise ValueError(f"depth: expected 0 storages on their way or more, got {depth}")
    which = which[np.argsort(candidates.use[which], kind="stable")]
    sendable, first, use = candidates.sendable[which], candidates.first[which], candidates.use[which]
    reclaim, back = early_hooks(sendable, first, use, depth)
    columns = (candidates.tensor[which], candidates.nbytes[which], sendable, reclaim, back, use)
    return tuple(
        Action(tensor=tensor, nbytes=nbytes, out_at=out_at, reclaim_at=reclaim_at, in_at=in_at, use_at=use_at)
        for tensor, nbytes, out_at, reclaim_at, in_at, use_at in zip(*(column.tolist() for column in columns), strict=True)
    )


def _told(trace: Trace, cost_model: LinkCost, actions: tuple[Action, ...], hbm_budget: int | None) -> SwapPlan:
    """The plan, with what it comes to."""
    plan = SwapPlan(
        fingerprint=trace.fingerprint,
        num_hooks=len(trace.hook_tick),
        actions=actions,
        hbm_budget_bytes=0,
        peak_bytes=0,
        host_bytes=0,
        step_us=0.0,
        stall_us=0.0,
    )
    timeline = simulate(trace, plan, cost_model)
    return replace(
        plan,
        hbm_budget_bytes=timeline.peak_bytes if hbm_budget is None else hbm_budget,
        peak_bytes=timeline.peak_bytes,
        host_bytes=timeline.host_bytes,
        step_us=timeline.step_us,
        stall_us=timeline.stall_us,
    )
