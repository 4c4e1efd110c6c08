"""Plans that swap all candidates, whole, without a search, as published offloading does. No plan may be worse than these.

out       as soon as each may be sent
reclaimed when `depth` later ones may be copied
back      with the use of the storage that is used `depth` before it
depth 0   reclaimed at once, back on demand

Published libraries bound activation offloading by depth: a number of storages in flight, however long a copy takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

import numpy as np

from chameleon_mm.plan.problem import Problem, Scheduled
from chameleon_mm.plan.simulate import Simulator
from chameleon_mm.plan.swap_plan import ActionColumns, SwapPlan
from chameleon_mm.plan.timing import LinkCost
from chameleon_mm.plan.trace import Bools, Float64s, Int64s, Trace
from chameleon_mm.plan.unswapped_memory import Candidates

_EACH_DEPTH = 8
"""Maximum depth up to which every depth is tried; above it only powers of two."""
_ROUNDS = 3


def early_moves(candidates: Candidates, depth: int, by_out: Int64s | None = None, again: Bools | None = None) -> ActionColumns:
    """Return the moves of `candidates`, which are in the order of their uses, at depth `depth`.

    by_out: order in which copies out cross, if known: by when they may begin, within one hook by use. again: (n,) True if an
    earlier candidate is of the same storage, if known.
    """
    if depth < 0:
        raise ValueError(f"depth: expected 0 storages on their way or more, got {depth}")
    c, n = candidates, len(candidates)
    by_out = np.argsort(c.sendable, kind="stable") if by_out is None else by_out
    depth = min(depth, n)
    later, earlier = np.full(n, -1), np.full(n, -1)  # the last ones wait for no later one, the first ones come back on demand
    later[by_out[: n - depth]] = c.sendable[by_out[depth:]]
    earlier[depth:] = c.use[: n - depth]
    reclaim = np.minimum(np.maximum(c.first, later), c.use)
    back = np.where(earlier < 0, c.use, np.maximum(reclaim, earlier)) if depth else c.use
    again = c.away_before() if again is None else again
    return ActionColumns.reclaiming(c.size, c.size, c.nbytes, (c.sendable, reclaim, back, c.use), again)


class SwapAll:
    """Swaps all candidates of one problem, whole, at any depth."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._who = np.argsort(problem.candidates.use, kind="stable")
        self._candidates = problem.candidates.take(self._who)
        self._by_out = np.argsort(self._candidates.sendable, kind="stable")
        self._again = self._candidates.away_before()
        self._clock = np.asarray(problem.time_us)

    def drafts(self, budget: int, cost: LinkCost, most_us: Callable[[], float]) -> Iterator[tuple[Scheduled, int]]:
        """Yield the plans within `budget`, the most promising first, while one may delay the step by less than `most_us()`."""
        depths = list(range(_EACH_DEPTH + 1))
        while 2 * depths[-1] < len(self._who):
            depths.append(2 * depths[-1])
        promising = []
        for depth in depths:
            delay_bound_us = self.delay_bound_us(depth, cost, enough_us=most_us())
            if delay_bound_us < most_us():
                peak_bytes = self._problem.peak_with(self._moves(depth))
                if peak_bytes <= budget:
                    promising.append((delay_bound_us, depth, peak_bytes))
        for delay_bound_us, depth, peak_bytes in sorted(promising):
            if delay_bound_us >= most_us():
                return
            yield self.at_depth(depth), peak_bytes

    def at_depth(self, depth: int) -> Scheduled:
        """Return the tentative plan of `swap_all` at `depth`."""
        return Scheduled(self._who.tolist(), self._moves(depth))

    def delay_bound_us(self, depth: int, cost: LinkCost, *, enough_us: float = inf) -> float:
        """Lower bound of the step's delay, by arithmetic over all candidates at once.

        First come waits that nothing can shorten: for copies that begin when they are waited for. Compute's delay then says
        when copies begin, and their ends say how late compute is. Each round tightens the bound from below, unless it already
        reaches `enough_us`.
        """
        clock, sendable, use, nbytes = self._clock, self._candidates.sendable, self._candidates.use, self._candidates.nbytes
        moves = self._moves(depth)
        reclaim, back = moves.reclaim_at, moves.in_at
        out_us, back_us = cost.alone_us(nbytes, cost.d2h_gbps), cost.alone_us(nbytes, cost.h2d_gbps)
        out_us[self._again] = 0.0
        late = np.zeros(len(clock))
        np.add.at(late, reclaim, np.where(reclaim == sendable, out_us, 0.0))
        np.add.at(late, use, np.where(back == use, back_us, 0.0))
        late = np.cumsum(late)
        if late[-1] >= enough_us:
            return float(late[-1])
        by_out = self._by_out[~self._again[self._by_out]]
        by_back = np.lexsort((use, back != use, back))  # at one hook the use's own goes first
        out_done, back_done = np.zeros(len(use)), np.empty(len(use))
        for _ in range(_ROUNDS):
            reached = clock + np.append(0.0, late[:-1])
            out_done[by_out] = _one_after_the_other(reached[sendable[by_out]], out_us[by_out])
            ready = np.maximum(reached[back], out_done)
            back_done[by_back] = _one_after_the_other(ready[by_back], back_us[by_back])
            np.maximum.at(late, reclaim, out_done - clock[reclaim])
            np.maximum.at(late, use, back_done - clock[use])
            late = np.maximum.accumulate(late)
        return float(late[-1])

    def _moves(self, depth: int) -> ActionColumns:
        return early_moves(self._candidates, depth, self._by_out, self._again)


def _one_after_the_other(ready_us: Float64s, took_us: Float64s) -> Float64s:
    """(n,) ends of copies that one engine runs in this order, none before it is ready."""
    before = np.cumsum(took_us) - took_us
    return np.asarray(before + took_us + np.maximum.accumulate(ready_us - before))


def swap_all(trace: Trace, cost_model: LinkCost, *, depth: int = 1) -> SwapPlan:
    """Return the plan that moves every candidate of `trace`. Its budget is its own peak.

    depth: a storage is reclaimed when `depth` later ones may be copied. It comes back with the use of the storage that is used
    `depth` before it. 0: reclaimed at once, back on demand.
    """
    candidates = Candidates.of(trace)
    return plan_of(trace, cost_model, candidates.take(np.argsort(candidates.use, kind="stable")), depth, None)


def plan_of(trace: Trace, cost_model: LinkCost, who: Candidates, depth: int, hbm_budget: int | None) -> SwapPlan:
    """Return the plan that moves `who`, ordered by their uses; without a budget its own peak is the budget."""
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
