"""The bound of a step's time where what is saved may be swapped or recomputed: a linear program's, from below, with no solver.

at one moment t, over = bytes that are too much then:    G of them are recomputed later, at a time of R; the others cross
    step >= min over G of    max(before t, (over - G) / d2h) + max(after t + R(G), (over - G) / h2d) + tail

R(G) is the least time of operators that run again so that G bytes are gone at t, what is held for that taken off. Relaxed:
shares of storages, of operators and of holds; an operator runs once however many are made by it; what is saved is there. For a
price p

    R(G) >= p * G + sum over the storages idle at t of min(0, make(j) - p * size(j))
    make(j) = share of its operators' time + sum over what they read and nobody saved of its share of get(x)
    get(x)  = 0 where it is there at t; else the less of p * size(x) and make(x)

because what several need, an operator or what it reads, costs at least the sum of their shares, whatever these are: that is the
dual of the linear program. The shares are moved to those that are recomputed, a few times, and of each price the best counts.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from chameleon_mm.policy.choice import LEAST_PRICE, NUM_PRICES
from chameleon_mm.policy.recipes import Recipes
from chameleon_mm.trace.trace import Float64s
from chameleon_mm.units import allocated_size

_FINER = 24
"""Prices around the one that decides."""
_ANY_PRICE = 1e-3
"""Price, in us for a byte, where what can be recomputed takes no time."""
_ROUNDS = 6
"""Rounds of sharing out. With so many, and the prices above, the bound of a 7B model is within 0.5 % of a solver's."""


class RecomputeTime:
    """The least time in which bytes can be recomputed that are gone at one tick, from below."""

    def __init__(self, recipes: Recipes, tick: int) -> None:
        trace, c = recipes.trace, recipes.candidates
        self._recipes = recipes
        self._size = allocated_size(trace.tensor_bytes).astype(np.float64).tolist()
        idle = np.zeros(len(self._size), np.bool_)
        idle[c.tensor] = (trace.hook_tick[c.first] <= tick) & (tick < trace.hook_tick[c.use])
        self._can_drop = (recipes.can_drop & idle).tolist()
        there = recipes.can_hold & ((trace.tensor_dies >= tick) | (trace.tensor_born > tick))
        saved = recipes.saved
        self._free = there.tolist()
        self._saved = saved.tolist()
        self._can_hold, self._can_recompute = recipes.can_hold.tolist(), recipes.can_recompute.tolist()
        self._unsaved = [[x for x in made_of if not self._saved[x] and not self._free[x]] for made_of in recipes.inputs]
        self._order = self._needed_order()
        self._us = self._shares_us()
        self.lines: list[tuple[float, float]] = []
        """(price, sum): R(G) >= price * G + sum."""
        self._find_lines()

    def at(self, nbytes: Float64s) -> Float64s:
        """Lower bound of the time for each of `nbytes` that are gone."""
        price, sums = np.array(self.lines).T
        return np.asarray(np.maximum((price[:, None] * nbytes + sums[:, None]).max(axis=0), 0.0))

    def kinks(self, most: float) -> Float64s:
        """Bytes, from 0 to `most`, between which `at` is linear."""
        lines = sorted({(0.0, 0.0), *self.lines})
        hull: list[tuple[float, float]] = []
        for p, s in lines:
            while hull and hull[-1][0] == p and hull[-1][1] <= s:
                hull.pop()
            if hull and hull[-1][0] == p:
                continue
            while len(hull) > 1 and _crossing(hull[-2], (p, s)) <= _crossing(hull[-2], hull[-1]):
                hull.pop()
            hull.append((p, s))
        inside = [_crossing(a, b) for a, b in pairwise(hull)]
        return np.array([0.0, *(g for g in inside if 0 < g < most), most])

    def _needed_order(self) -> list[int]:
        """Storages that may be recomputed, with what they are made of, inputs first."""
        needed = list(self._can_drop)
        for j in reversed(self._recipes.order):
            if needed[j]:
                for x in self._unsaved[j]:
                    needed[x] = True
        self._needed = needed
        order = [j for j in self._recipes.order if needed[j]]
        self._only_held = {x for j in order for x in self._unsaved[j] if not self._recipes.makers[x]}
        return order

    def _shares_us(self) -> list[float]:
        """(m,) time of the operators that make each, shared out by size where one makes several, and of comparing what was
        dropped."""
        recipes, size, op_us = self._recipes, self._size, self._recipes.trace.op_us.tolist()
        us = [0.0] * len(size)
        for j in self._order:
            for o in recipes.makers[j]:
                whole = sum(size[x] for x in recipes.fresh[o] if self._needed[x] and (self._can_drop[x] or not self._saved[x]))
                us[j] += op_us[o] * (size[j] / whole if j in recipes.fresh[o] and whole else 1.0)
            us[j] += float(recipes.compare_us[j]) if self._can_drop[j] else 0.0
        return us

    def _find_lines(self) -> None:
        which = [j for j in self._order if self._can_drop[j] and self._size[j]]
        ratio = [self._us[j] / self._size[j] for j in which if self._us[j] > 0]
        ratio = [max(price, LEAST_PRICE) for price in ratio] or [_ANY_PRICE]
        self.lines = [(0.0, 0.0)]
        prices = np.geomspace(min(ratio) * 0.5, max(ratio) * 8, NUM_PRICES)
        prices = np.append(prices, prices[-1] * 10.0 ** np.arange(1, 7))  # for more bytes than can be recomputed
        own = np.unique(ratio)  # where nothing is held these are the prices at which anything changes
        prices = np.unique(np.append(prices, own if len(own) <= NUM_PRICES else own[:: len(own) // NUM_PRICES]))
        self.lines += list(zip(prices.tolist(), self._sums(prices).tolist(), strict=True))

    def refine(self, nbytes: float) -> None:
        """Add prices around the one that decides at `nbytes`."""
        lines = sorted(self.lines)
        i = max(range(len(lines)), key=lambda i: lines[i][0] * nbytes + lines[i][1])
        low, high = lines[max(i - 1, 0)][0], lines[min(i + 1, len(lines) - 1)][0]
        prices = np.geomspace(low or high / 1e3, high, _FINER + 2)[1:-1]
        self.lines += list(zip(prices.tolist(), self._sums(prices).tolist(), strict=True))

    def _sums(self, prices: Float64s) -> Float64s:
        """(prices,) the sum of the formula above, the best over a few rounds of shares."""
        readers: dict[int, list[int]] = {}
        for j in self._order:
            for x in self._unsaved[j]:
                readers.setdefault(x, []).append(j)
        share = {(x, j): np.full(len(prices), 1 / len(of)) for x, of in readers.items() for j in of}
        best = np.full(len(prices), -np.inf)
        for rounds in range(_ROUNDS):
            sums, active = self._priced(prices, share)
            best = np.maximum(best, sums)
            step = 1 / (rounds + 1.5)
            for x, of in readers.items():
                if len(of) > 1:
                    count = sum(active[j] for j in of)
                    for j in of:
                        goal = np.where(count > 0, active[j] / np.maximum(count, 1), share[x, j])
                        share[x, j] = (1 - step) * share[x, j] + step * goal
        return best

    def _priced(self, prices: Float64s, share: dict[tuple[int, int], Float64s]) -> tuple[Float64s, dict[int, Float64s]]:
        """The sum for these shares, and of each storage whether it is recomputed."""
        sums = np.zeros(len(prices))
        get = {x: prices * self._size[x] for x in self._only_held}
        again: dict[int, Float64s] = {}
        for j in self._order:
            cost = np.full(len(prices), self._us[j])
            for x in self._unsaved[j]:
                cost += share[x, j] * get[x]
            held = prices * self._size[j]
            if self._can_drop[j]:
                again[j] = (cost < held).astype(np.float64)
                sums += np.minimum(cost - held, 0.0)
            elif not self._can_recompute[j]:
                again[j], get[j] = np.zeros(len(prices)), held
            elif not self._can_hold[j]:
                again[j], get[j] = np.ones(len(prices)), cost
            else:
                again[j] = (cost < held).astype(np.float64)
                get[j] = np.minimum(cost, held)
        wanted = {j: again[j] if self._can_drop[j] else np.zeros(len(prices)) for j in self._order}
        wanted |= {x: np.zeros(len(prices)) for x in self._only_held}
        for j in reversed(self._order):
            if not self._can_drop[j]:
                wanted[j] *= again[j]
            for x in self._unsaved[j]:
                wanted[x] = np.maximum(wanted[x], wanted[j])
        return sums, wanted


def _crossing(a: tuple[float, float], b: tuple[float, float]) -> float:
    """Where two lines meet, the second one steeper."""
    return (a[1] - b[1]) / (b[0] - a[0])
