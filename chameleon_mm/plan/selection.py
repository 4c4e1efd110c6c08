"""Select the bytes to move so that the rest is within the budget, and choose the storages to drop or to hold.

for every hook k with level[k] - away > budget, first to last:
    of the candidates that may be away at k select those of the lowest rank, the last one in part: just the bytes needed

With the rank "used latest" no plan moves fewer bytes (Belady, 1966, for pages of one size). This holds for any sizes because a
candidate may move in part: intervals are covered from the left, each time by the interval that reaches farthest. Other ranks
move at least as many bytes, but may stall less.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import sqrt
from operator import attrgetter
from random import Random
from typing import NamedTuple

import numpy as np

from chameleon_mm.plan.problem import Problem
from chameleon_mm.plan.recipes import Recipes
from chameleon_mm.plan.trace import Bools, Float64s, Int64s
from chameleon_mm.units import allocated_size

Rank = Callable[[Problem], Sequence[float]]
"""Function that ranks the candidates of a problem, (n,). Candidates of lower rank are selected first."""

GOLDEN = (sqrt(5) - 1) / 2
"""Fraction whose multiples spread evenly from 0 to 1, for any number of them."""


def used_latest(problem: Problem) -> Sequence[float]:
    return [-use for use in problem.use]


def spread_evenly(problem: Problem) -> Sequence[float]:
    """Rank by multiples of the golden ratio. It spreads any number of selected candidates evenly over the order of copies out.

    Then both engines are busy from the first copy to the last, for any order of uses. (This is Kronecker's sequence with the
    smallest gaps.)
    """
    return [place * GOLDEN % 1 for place in range(1, len(problem.size) + 1)]


def spread_evenly_by_bytes(problem: Problem) -> Sequence[float]:
    """Rank like `spread_evenly`, but spread over the bytes copied out. The order differs if sizes differ."""
    mean = sum(problem.size) / max(1, len(problem.size))
    before = accumulate(problem.size, initial=0)
    return [(there + size / 2) / mean * GOLDEN % 1 for there, size in zip(before, problem.size, strict=False)]


saved_first: Rank = attrgetter("sendable")


def idle_longest(problem: Problem) -> Sequence[float]:
    """Rank by the time available for both copies of a candidate, longest first."""
    time_us = problem.time_us
    return [time_us[sendable] - time_us[use] for sendable, use in zip(problem.sendable, problem.use, strict=True)]


def largest(problem: Problem) -> Sequence[float]:
    return [-size for size in problem.size]


smallest: Rank = attrgetter("size")

RANKS: Sequence[Rank] = (used_latest, spread_evenly, spread_evenly_by_bytes, idle_longest, saved_first, largest, smallest)
"""Ranks to try. The first moves the fewest bytes. The second keeps both engines busy."""


def select(
    problem: Problem,
    budget: int,
    rank: Sequence[float],
    *,
    least: Sequence[int] | None = None,
    most: Sequence[int] | None = None,
) -> dict[int, int] | None:
    """Select candidates and the bytes of device memory that each frees. Returns None if all candidates are not enough.

    least, most: (n,) minimum and maximum bytes that each candidate frees; default: 0 and its whole size. Time: O(K + n log n).
    """
    first, use = problem.first, problem.use
    most = problem.size if most is None else most
    who = sorted((i for i in range(len(most)) if most[i]), key=rank.__getitem__)
    arrivals = sorted(range(len(who)), key=[first[i] for i in who].__getitem__, reverse=True)  # places in `who`
    selected: dict[int, int] = {}
    waiting: list[int] = []
    back = [0] * (len(problem.level) + 1)  # by hook: selected bytes whose copy back begins there
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


# --- Selection of candidates that a local search can change in small steps:
#
# order            order in which candidates are selected, and in which they are copied out
# bounds           minimum and maximum bytes that each frees: (0, size), (0, 0), (size, size) or the same number twice
# eager            True: copies back begin as early as there is room; False: as late as they are in time


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPoint:
    """Point of the local search: choices that determine a plan completely."""

    order: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    eager: bool

    def select(self, problem: Problem, budget: int) -> dict[int, int] | None:
        """Select candidates and the bytes that each frees. Returns None if the bounds allow too few bytes."""
        rank = sorted(range(len(self.order)), key=self.order.__getitem__)  # position of each in the order
        least, most = zip(*self.bounds, strict=True)
        return select(problem, budget, rank, least=least, most=most)

    def send_from(self, problem: Problem, selected: Mapping[int, int]) -> list[int]:
        """Return (n,): hooks from which copies out begin, so that they cross the link in the point's order."""
        send_from = list(problem.sendable)
        last: tuple[int, int] = (-1, -1)  # hook, and position within it: actions of one hook run in the order of uses
        for i in self.order:
            if i in selected:
                hook = max(send_from[i], last[0])
                if (hook, problem.use[i]) < last:
                    hook = min(hook + 1, problem.use[i])
                send_from[i] = hook
                last = hook, problem.use[i]
        return send_from


def start_of(problem: Problem, rank: Rank, *, eager: bool) -> SearchPoint:
    """Return a point with the order of `rank`, in which each candidate may free any bytes."""
    ranked = rank(problem)
    order = tuple(sorted(range(len(ranked)), key=ranked.__getitem__))
    return SearchPoint(order=order, bounds=tuple((0, size) for size in problem.size), eager=eager)


def neighbour(problem: Problem, budget: int, point: SearchPoint, random: Random) -> SearchPoint:
    """Return `point` with one to three small changes."""
    for _ in range(random.choice((1, 1, 1, 2, 2, 3))):
        kind = random.random()
        if kind < 0.25:
            point = _reorder(point, random)
        elif kind < 0.7:
            point = _change_bounds(problem, budget, point, random)
        elif kind < 0.9:
            point = _shift_bytes(problem, budget, point, random)
        else:
            point = replace(point, eager=not point.eager)
    return point


def _reorder(point: SearchPoint, random: Random) -> SearchPoint:
    order = list(point.order)
    order.insert(random.randrange(len(order)), order.pop(random.randrange(len(order))))
    return replace(point, order=tuple(order))


def _change_bounds(problem: Problem, budget: int, point: SearchPoint, random: Random) -> SearchPoint:
    i = random.randrange(len(problem.size))
    size = problem.size[i]
    exact = _missing(problem, budget, i, random)
    bounds = list(point.bounds)
    bounds[i] = random.choice(((0, size), (size, size), (0, 0), (exact, exact)))
    return replace(point, bounds=tuple(bounds))


def _shift_bytes(problem: Problem, budget: int, point: SearchPoint, random: Random) -> SearchPoint:
    """Let one candidate free fewer bytes, and another the same number more: all, half or less of the possible bytes.

    If the link's directions differ much, the optimum often moves two storages in part. Only this change finds it.
    """
    selected = point.select(problem, budget)
    if not selected or len(problem.size) < 2:
        return point
    giver = random.choice(sorted(selected))
    taker = random.choice([i for i in range(len(problem.size)) if i != giver])
    there = selected.get(taker, 0)
    most = min(selected[giver], problem.size[taker] - there)
    amount = min(most, allocated_size(most >> random.randrange(12)))
    bounds = list(point.bounds)
    bounds[giver] = (selected[giver] - amount, selected[giver] - amount)
    bounds[taker] = (there + amount, there + amount)
    return replace(point, bounds=tuple(bounds))


def _missing(problem: Problem, budget: int, i: int, random: Random) -> int:
    """Return bytes that are over the budget at a random hook at which candidate `i` may be away; at most its size."""
    size = problem.size[i]
    excess = problem.level[problem.first[i] : problem.use[i]] - budget
    excess = excess[excess > 0]
    if not len(excess):
        return size
    missing = int(random.choice(np.unique(excess).tolist()))
    if random.random() < 0.5:
        missing -= problem.size[random.randrange(len(problem.size))]
    missing = allocated_size(missing)
    return missing if 0 < missing < size else size


# --- Choices of storages to drop and to hold, by a price of device memory. Rising prices give a path from none to all
#
# If an operator makes several storages, its time is divided among them by size. A mix uses the higher price for some storages,
# spread evenly over the order of making, and the lower price for the others.

NUM_PRICES = 48

LEAST_PRICE = 1e-15
"""Smallest price above 0, in us per byte, below that of any real device. Smaller times could not be halved."""


class Choice(NamedTuple):
    dropped: Int64s
    held: Int64s
    recompute_us: float
    """Estimated time of the operators that run again."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChoicePath:
    """Choices for rising prices."""

    drop: Bools
    """(m, prices) True if the storage is dropped at the price."""
    held: Bools
    """(m, prices) True if the storage is held at the price."""
    make_us: Float64s
    """(m, prices) time in which each dropped storage is recomputed."""
    place: Float64s
    """(m,) position of each storage in a mix, in [0, 1). If it is below the share of the higher price, that price decides."""

    @classmethod
    def of(cls, recipes: Recipes, level: Int64s, budget: int) -> ChoicePath:
        return _Pricing(recipes, level, budget).path()

    @property
    def last(self) -> int:
        return int(self.drop.shape[1]) - 1

    def choice(self, u: float) -> Choice:
        """Return the choice at price number `u`. Between two prices it is a mix."""
        low = min(int(u), self.last)
        high, share = min(low + 1, self.last), u - low
        dear = self.place < share
        drop = np.where(dear, self.drop[:, high], self.drop[:, low])
        held = np.where(dear, self.held[:, high], self.held[:, low])
        us = np.where(dear, self.make_us[:, high], self.make_us[:, low])
        return Choice(np.flatnonzero(drop), np.flatnonzero(held), float(us[drop].sum()))


class _Pricing:
    def __init__(self, recipes: Recipes, level: Int64s, budget: int) -> None:
        self._recipes = recipes
        trace, c = recipes.trace, recipes.candidates
        self._size = allocated_size(trace.tensor_bytes).astype(np.float64)
        missing = np.append(0, np.cumsum(level > budget))
        helps = np.zeros(len(self._size), np.bool_)
        helps[c.tensor] = missing[c.use] > missing[c.first]
        self._can_drop = recipes.can_drop & helps
        self._us = recipes.shares_us(self._size, self._can_drop)
        self._free = self._alive_at_peaks(level)

    def _alive_at_peaks(self, level: Int64s) -> Bools:
        """Return (m,): True if autograd keeps the storage, so that it exists at the peak before a recomputation reads it."""
        trace, recipes = self._recipes.trace, self._recipes
        alive = recipes.can_hold & recipes.is_kept & (recipes.needed_until >= 0)
        which = np.flatnonzero(alive)
        since = recipes.hold_hook[which].tolist()
        until = np.searchsorted(trace.hook_tick, recipes.needed_until[which], side="right").tolist()
        peaks = [a + int(level[a:b].argmax()) if a < b else a for a, b in zip(since, until, strict=True)]
        ticks = np.append(trace.hook_tick, trace.num_ticks)[peaks]
        alive[which] = trace.tensor_dies[which] >= np.minimum(recipes.needed_until[which], ticks)
        return np.asarray(alive)

    def prices(self) -> Float64s:
        """Return (prices,): rising prices in us per byte, from below the cheapest storage to above the most expensive one."""
        which = np.flatnonzero(self._can_drop & (self._size > 0))
        ratio = np.array(self._us)[which] / self._size[which]
        ratio = ratio[ratio > 0]
        if not len(ratio):
            return np.array([0.0, 1.0])
        ratio = np.maximum(ratio, LEAST_PRICE)
        return np.geomspace(ratio.min() * 0.5, ratio.max() * 8, NUM_PRICES)

    def path(self) -> ChoicePath:
        recipes, size, us = self._recipes, self._size.tolist(), self._us
        prices = self.prices()
        m, n = len(size), len(prices)
        drop, hold, needed = (np.zeros((m, n), np.bool_) for _ in range(3))
        get, make = np.zeros((m, n)), np.zeros((m, n))
        saved, can_drop, free = recipes.saved.tolist(), self._can_drop.tolist(), self._free.tolist()
        can_recompute, can_hold = recipes.can_recompute.tolist(), recipes.can_hold.tolist()
        unsaved = [[x for x in recipes.inputs[j] if not saved[x]] for j in range(m)]
        for x in range(m):
            if not recipes.makers[x] and not saved[x]:
                hold[x] = can_hold[x]
                get[x] = 0.0 if free[x] else prices * size[x] if can_hold[x] else np.inf
        for j in recipes.order:
            if saved[j] and not can_drop[j]:
                continue
            cost, took = us[j], us[j]
            for x in unsaved[j]:
                cost = cost + get[x]
                took = took + make[x]
            if saved[j]:
                drop[j] = cost < prices * size[j]
                make[j] = took
            elif free[j]:
                hold[j] = True
            elif not can_recompute[j]:
                hold[j] = can_hold[j]
                get[j] = prices * size[j] if can_hold[j] else np.inf
            else:
                get[j] = cost
                make[j] = took
                if can_hold[j]:
                    hold[j] = prices * size[j] <= cost
                    get[j] = np.minimum(cost, prices * size[j])
                    make[j] = np.where(hold[j], 0.0, make[j])
        for j in reversed(recipes.order):
            again = drop[j] if saved[j] else needed[j] & ~hold[j]
            if unsaved[j] and again.any():
                for x in unsaved[j]:
                    needed[x] |= again
        held = needed & hold
        new = np.append(True, ((drop[:, 1:] != drop[:, :-1]) | (held[:, 1:] != held[:, :-1])).any(axis=0))
        drop = drop[:, new]
        return ChoicePath(drop=drop, held=held[:, new], make_us=make[:, new], place=self._places(drop, unsaved))

    def _places(self, drop: Bools, unsaved: list[list[int]]) -> Float64s:
        """Return positions in a mix. Storages dropped from the same price on are spread evenly over the order of making. An
        input has the smallest position of its readers."""
        since: list[int] = drop.argmax(axis=1).tolist()
        ever: list[bool] = np.asarray(drop.any(axis=1)).tolist()
        saved, place = self._recipes.saved.tolist(), [1.0] * len(drop)
        count: dict[int, int] = {}
        for j in self._recipes.order:
            if ever[j]:
                count[since[j]] = count.get(since[j], 0) + 1
                place[j] = count[since[j]] * GOLDEN % 1
        for j in reversed(self._recipes.order):
            if ever[j] or not saved[j]:
                for x in unsaved[j]:
                    place[x] = min(place[x], place[j])
        return np.array(place)
