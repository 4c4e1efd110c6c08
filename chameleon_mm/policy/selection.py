"""Selects what moves: at every moment idle candidates, so that what stays is within the budget.

for every hook k with level[k] - away > budget, first to last:
    of the candidates that may be away at k take those of the lowest rank, the last one in part: just as much as is needed

With the rank "used latest" these are the fewest bytes that any plan can move (Belady, 1966, for pages of one size; where a
candidate may be taken in part it holds for any sizes: a cover of intervals by intervals, taken from the left, each time by the
one that reaches farthest). Other ranks move more, or the same by other candidates, and may stall less.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from math import sqrt

from chameleon_mm.policy.problem import Problem
from chameleon_mm.units import allocated_size

Rank = Callable[[Problem], Sequence[float]]
"""Ranks the candidates of a problem, (n,): those of lower rank are selected first."""


GOLDEN = (sqrt(5) - 1) / 2
"""Fraction whose multiples spread evenly from 0 to 1, however many there are."""


def used_latest(problem: Problem) -> Sequence[float]:
    return [-use for use in problem.use]


def spread_evenly(problem: Problem) -> Sequence[float]:
    """Rank by the golden ratio's multiples: however many are selected, they are spread evenly over the order of their copies
    out.

    So both engines are busy from the first to the last of them, whatever the order of uses (Kronecker's sequence; of all its
    kind this one leaves the smallest gaps).
    """
    return [place * GOLDEN % 1 for place in range(1, len(problem.size) + 1)]


def spread_evenly_by_bytes(problem: Problem) -> Sequence[float]:
    """Rank as `spread_evenly` over the bytes that are copied out, which where sizes differ is another order."""
    mean = sum(problem.size) / max(1, len(problem.size))
    before = accumulate(problem.size, initial=0)
    return [(there + size / 2) / mean * GOLDEN % 1 for there, size in zip(before, problem.size, strict=False)]


def saved_first(problem: Problem) -> Sequence[float]:
    return problem.sendable


def idle_longest(problem: Problem) -> Sequence[float]:
    """Rank by the time in which both copies of a candidate may run."""
    time_us = problem.time_us
    return [time_us[sendable] - time_us[use] for sendable, use in zip(problem.sendable, problem.use, strict=True)]


def largest(problem: Problem) -> Sequence[float]:
    return [-size for size in problem.size]


def smallest(problem: Problem) -> Sequence[float]:
    return problem.size


def deprioritising(rank: Rank, spared: Collection[int]) -> Rank:
    """Rank by `rank`, but put the candidates of `spared` after all others."""

    def deprioritised(problem: Problem) -> Sequence[float]:
        ranked = rank(problem)
        beyond = max(ranked) - min(ranked) + 1
        return [place + beyond if i in spared else place for i, place in enumerate(ranked)]

    return deprioritised


RANKS: Sequence[Rank] = (used_latest, spread_evenly, spread_evenly_by_bytes, idle_longest, saved_first, largest, smallest)
"""Ranks that are tried. The one that moves the fewest bytes is the first, the one that keeps both engines busy the second."""


def select(
    problem: Problem,
    budget: int,
    rank: Sequence[float],
    *,
    least: Sequence[int] | None = None,
    most: Sequence[int] | None = None,
) -> dict[int, int] | None:
    """Select candidates and the bytes of device memory that each gives up, or None where even all are too few.

    least, most: (n,) bytes that each frees in any case, and at the most; by default nothing, and all that it takes.
    Time: O(K + n log n).
    """
    first, use = problem.first, problem.use
    most = problem.size if most is None else most
    who = sorted((i for i in range(len(most)) if most[i]), key=rank.__getitem__)
    arrivals = sorted(range(len(who)), key=[first[i] for i in who].__getitem__, reverse=True)  # places in `who`
    selected: dict[int, int] = {}
    waiting: list[int] = []
    back = [0] * (len(problem.level) + 1)  # by hook: bytes of what is selected
    away = seen = 0
    for k, excess in zip(*problem.over(budget, problem.may_exceed_more), strict=True):
        while arrivals and first[who[arrivals[-1]]] <= k:
            place = arrivals.pop()
            heapq.heappush(waiting, place)
            i = who[place]
            if least is not None and least[i] and use[i] > seen:
                selected[i] = least[i]
                away += least[i]
                back[use[i]] += least[i]
        away -= sum(back[seen + 1 : k + 1])
        seen = k
        while away < excess:
            if not waiting:
                return None
            i = who[waiting[0]]
            more = most[i] - selected.get(i, 0)
            if use[i] <= k or not more:
                heapq.heappop(waiting)
                continue
            missing = allocated_size(excess - away)
            if more <= missing:
                heapq.heappop(waiting)
            else:
                more = missing
            selected[i] = selected.get(i, 0) + more
            away += more
            back[use[i]] += more
    return selected
