"""Choices of what to drop and what to hold, by a price of device memory: a path from nothing to all, one for each price.

path = ChoicePath.of(recipes, level, budget)
path.choice(u)                          # dropped, held: at price number u; between two prices a mix of both choices
path.estimates(u)                       # level and time of it, before any recomputation is looked at

in the order of making, at a price of p us for a byte:
    get(x)      0 where x is saved, or kept by autograd where it is; else the less of p * size, to hold it, and of making it
    make(j)     time of its operators, of comparing it with the original, and get of all that they read
    drop j      where make(j) < p * size

What an operator makes for several is shared out by their sizes. A mix takes the dearer price for some storages, spread evenly
over the order of making, and the cheaper one for the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from chameleon_mm.policy.recipes import Recipes
from chameleon_mm.policy.selection import GOLDEN
from chameleon_mm.trace.trace import Bools, Float64s, Int64s
from chameleon_mm.units import allocated_size

NUM_PRICES = 48

LEAST_PRICE = 1e-15
"""Price above 0, below all that a device could have: there are times that cannot be halved."""


class Choice(NamedTuple):
    """Storages that are dropped and storages that are held, by number."""

    dropped: Int64s
    held: Int64s
    recompute_us: float
    """Time of the operators that run again, by arithmetic over prices."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChoicePath:
    """Choices for rising prices."""

    drop: Bools
    """(m, prices) whether each is dropped."""
    held: Bools
    """(m, prices) whether each is held."""
    make_us: Float64s
    """(m, prices) time in which each dropped one is recomputed."""
    place: Float64s
    """(m,) place of each in a mix, from 0 to below 1: below the dearer price's share, that price decides."""

    @classmethod
    def of(cls, recipes: Recipes, level: Int64s, budget: int) -> ChoicePath:
        """Path of choices for a step with `level` from each hook until the next, within `budget`."""
        return _Pricing(recipes, level, budget).path()

    @property
    def last(self) -> int:
        return int(self.drop.shape[1]) - 1

    def choice(self, u: float) -> Choice:
        """Choice at price number `u`; between two prices a mix."""
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
        self._us = self._shares_us()
        self._free = self._alive_at_peaks(level)

    def _alive_at_peaks(self, level: Int64s) -> Bools:
        """(m,) whether autograd keeps each, so that it is there by itself when the most is allocated of the time until a
        recomputation reads it."""
        trace, recipes = self._recipes.trace, self._recipes
        alive = recipes.can_hold & recipes.is_kept & (recipes.needed_until >= 0)
        which = np.flatnonzero(alive)
        since = recipes.hold_hook[which].tolist()
        until = np.searchsorted(trace.hook_tick, recipes.needed_until[which], side="right").tolist()
        peaks = [a + int(level[a:b].argmax()) if a < b else a for a, b in zip(since, until, strict=True)]
        ticks = np.append(trace.hook_tick, trace.num_ticks)[peaks]
        alive[which] = trace.tensor_dies[which] >= np.minimum(recipes.needed_until[which], ticks)
        return np.asarray(alive)

    def _shares_us(self) -> list[float]:
        """(m,) time of the operators that make each, and of comparing it with the original; of an operator that makes several
        dropped ones, the share by size."""
        recipes, size, can_drop = self._recipes, self._size.tolist(), self._can_drop.tolist()
        op_us = recipes.trace.op_us.tolist()
        us = [0.0] * len(size)
        for j in recipes.order:
            for o in recipes.makers[j]:
                fresh = recipes.fresh[o]
                whole = sum(size[x] for x in fresh if can_drop[x]) if len(fresh) > 1 and can_drop[j] else 0.0
                us[j] += op_us[o] * size[j] / whole if whole else op_us[o]
            us[j] += float(recipes.compare_us[j]) if can_drop[j] else 0.0
        return us

    def prices(self) -> Float64s:
        """(prices,) rising, from below the cheapest storage to above the dearest one, in us for a byte."""
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
        """Places in a mix: storages that are dropped from the same price on are spread evenly over the order of making; what
        they are made of has the least of its readers' places."""
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
