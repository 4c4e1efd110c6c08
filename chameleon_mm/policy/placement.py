"""When what moves goes and comes, so that memory is within the budget at every hook and copies have the most time.

copies out    as soon as each may be sent: the engine takes them one after the other
copies back   last hook to first: memory that is needed at hook k is taken from what is used latest; that comes back after k
reclaims      first hook to last: memory that is needed at hook k is reclaimed at k, from what was copied out first
in part       a part that stays needs memory of its own for a moment: at a hook with room for it, or all of it moves

Both sweeps only decide who is away, never that fewer are than `cover` found enough, so neither can end without room. What the
sweeps never send away is no longer part of the plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from chameleon_mm.policy.cost import LinkCost
from chameleon_mm.policy.draft import Draft
from chameleon_mm.policy.problem import Problem
from chameleon_mm.units import ALLOCATION_UNIT_BYTES

Lead = float | Mapping[int, float]
"""Microseconds by which copies back are to be done before their uses: for all, or by tensor of the trace (0 for the others)."""


def place(
    problem: Problem,
    budget: int,
    taken: Mapping[int, int],
    *,
    ready: Sequence[int] | None = None,
    latest: Callable[[Mapping[int, int]], Mapping[int, int]] | None = None,
) -> Draft:
    """The hooks of `taken`, candidate -> bytes, a cover of `problem`. Time: O(K + n log n).

    ready: (n,) hooks from which copies out begin, not before they are sendable, which is the default. latest: of a cover, by
    candidate, the hook until which its copy back need not begin (`latest_back`); by default it begins as soon as there is room.
    """
    taken = dict(taken)
    ready = problem.sendable if ready is None else ready
    while True:
        in_at = _copies_back(problem, budget, taken, latest(taken) if latest is not None else {})
        reclaim_at = _reclaims(problem, budget, taken, in_at, ready)
        who = sorted(reclaim_at, key=lambda i: (problem.use[i], i))
        draft = Draft(
            who=who,
            gives=[taken[i] for i in who],
            out_at=[min(ready[i], reclaim_at[i]) for i in who],
            reclaim_at=[reclaim_at[i] for i in who],
            in_at=[in_at[i] for i in who],
        )
        more = _make_room(problem, budget, draft)
        if not more:
            return draft
        taken.update(more)


def latest_back(problem: Problem, taken: Mapping[int, int], cost: LinkCost, lead_us: Lead) -> dict[int, int]:
    """Candidate -> the last hook at which its copy back begins in time, if they cross in the order of their uses.

    In time: done `lead_us` before the use, even were the other direction busy all the while, and compute never late.
    """
    who = sorted(taken, key=lambda i: (problem.use[i], i))
    if not who:
        return {}
    slower = max(cost.duplex_gbps - cost.d2h_gbps, cost.h2d_gbps / 2)
    nbytes = np.array([problem.nbytes[i] - problem.size[i] + taken[i] for i in who])
    copy_us = -(-nbytes // cost.piece_bytes) * cost.copy_us + nbytes / (slower * 1e3)
    clock = np.asarray(problem.time_us)
    due = clock[[problem.use[i] for i in who]] - lead_of(problem, who, lead_us)
    rest_us = np.cumsum(copy_us[::-1])[::-1]  # of all copies from this one to the last
    start = np.minimum.accumulate((due + rest_us - copy_us)[::-1])[::-1] - rest_us
    hooks = np.searchsorted(clock, start, side="right") - 1
    return dict(zip(who, np.maximum(hooks, 0).tolist(), strict=True))


def lead_of(problem: Problem, who: Sequence[int], lead_us: Lead) -> NDArray[np.float64]:
    """Of each candidate of `who`."""
    if isinstance(lead_us, Mapping):
        return np.array([lead_us.get(problem.tensor[i], 0.0) for i in who])
    return np.full(len(who), lead_us)


def _copies_back(problem: Problem, budget: int, taken: Mapping[int, int], held: Mapping[int, int]) -> dict[int, int]:
    """Candidate -> first hook at which there is room for it to be back, room until its use; last used, last back.

    held: hooks before which it is not back even so.
    """
    first, use = problem.first, problem.use
    waiting = sorted(taken, key=lambda i: (use[i], -first[i], i))  # the last one is the next to be away
    holding = sorted(held, key=held.__getitem__)
    here = [0] * (len(problem.level) + 1)  # by hook: bytes of what was not away before it
    in_at: dict[int, int] = {}
    away, seen = 0, len(problem.level)
    for k, excess in zip(*map(reversed, problem.over(budget, problem.falls)), strict=True):
        away -= sum(here[k + 1 : seen + 1])
        seen = k
        while holding and held[holding[-1]] > k:
            i = holding.pop()
            if i not in in_at:
                in_at[i] = held[i]
                if first[i] <= k:
                    away += taken[i]
                    here[first[i]] += taken[i]
        while away < excess:
            i = waiting.pop()
            if first[i] <= k and i not in in_at:
                in_at[i] = k + 1
                away += taken[i]
                here[first[i]] += taken[i]
    for i in holding:  # not needed by what comes after it; the reclaims may still prefer it
        in_at.setdefault(i, held[i])
    return in_at


def _reclaims(
    problem: Problem, budget: int, taken: Mapping[int, int], in_at: Mapping[int, int], ready: Sequence[int]
) -> dict[int, int]:
    """Candidate -> last hook at which its memory must go; first copied out, first gone."""
    first, use = problem.first, problem.use
    who = sorted(in_at, key=lambda i: (ready[i], use[i], i))
    arrivals = sorted(range(len(who)), key=[first[i] for i in who].__getitem__, reverse=True)  # places in `who`
    climbs = problem.climbs.copy()
    climbs[list(in_at.values())] = True
    waiting: list[int] = []
    back = [0] * (len(problem.level) + 1)  # by hook: bytes of what is away
    reclaim_at: dict[int, int] = {}
    away = seen = 0
    for k, excess in zip(*problem.over(budget, climbs), strict=True):
        while arrivals and first[who[arrivals[-1]]] <= k:
            heapq.heappush(waiting, arrivals.pop())
        away -= sum(back[seen + 1 : k + 1])
        seen = k
        while away < excess:
            i = who[heapq.heappop(waiting)]
            if in_at[i] > k:
                reclaim_at[i] = k
                away += taken[i]
                back[in_at[i]] += taken[i]
    return reclaim_at


def _make_room(problem: Problem, budget: int, draft: Draft) -> dict[int, int]:
    """Moves the reclaims of what moves in part to earlier hooks, and its returns to later ones, where what stays can be copied.

    Returns candidate -> bytes that it has to give up at least, for each that finds no such hook. Sooner gone and later back can
    only lower memory, so what had its place keeps it.
    """
    parts = draft.in_part(problem)
    if not parts:
        return {}
    leaving, staying = draft.levels_within_hooks(problem)
    more: dict[int, int] = {}
    for j in parts:
        i = draft.who[j]
        stays = problem.size[i] - draft.gives[j]
        room_out = budget - leaving[problem.first[i] : draft.reclaim_at[j] + 1]
        room_back = budget - staying[draft.in_at[j] : problem.use[i] + 1]
        room = min(int(room_out.max()), int(room_back.max()))
        if room < stays:
            more[i] = problem.size[i] - max(0, room // ALLOCATION_UNIT_BYTES * ALLOCATION_UNIT_BYTES)
            continue
        draft.reclaim_at[j] = problem.first[i] + int(np.flatnonzero(room_out >= stays)[-1])
        draft.out_at[j] = min(draft.out_at[j], draft.reclaim_at[j])
        draft.in_at[j] += int(np.flatnonzero(room_back >= stays)[0])
    return more
