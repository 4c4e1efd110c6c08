"""Bounds that no plan can beat: the minimum time of a step within a budget, and the minimum budget that costs no time.

at any time t before the last use, x = bytes over the budget:      x has crossed by t, and crosses back after t
    step >= max(compute before t, x / d2h) + max(compute after t until the last use, x / h2d) + compute after it
with recomputation, at the time of the peak:                       the cheapest mix of x bytes copied and y recomputed
    step >= min over x + y of the same, with the time to recompute y added to compute after t

The bound is relaxed: storages are divisible, copies have no fixed cost, and any storage may be idle at any time. So a plan may
be closer to the optimum than its share of the bound shows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from chameleon_mm.errors import InfeasibleBudget
from chameleon_mm.plan.recipes import Recipes
from chameleon_mm.plan.selection import LEAST_PRICE, NUM_PRICES
from chameleon_mm.plan.simulate import Simulator
from chameleon_mm.plan.swap_plan import SwapPlan
from chameleon_mm.plan.timing import LinkCost
from chameleon_mm.plan.trace import Float64s, Int64s, Trace
from chameleon_mm.plan.unswapped_memory import Candidates, below_least, least_memory, memory_curve, smallest_budget
from chameleon_mm.units import allocated_size, parse_size

# --- Lower bound of a step's time if saved storages may be swapped or recomputed: by a linear program, without a solver
#
# R(G) is the minimum time of operators that run again so that G bytes, less held bytes, are dropped at t. An operator runs once
# for all storages that it makes. Saved storages exist. Relaxed: shares of storages, operators and holds. For a price p
#     R(G) >= p * G + sum over the storages idle at t of min(0, make(j) - p * size(j))
#     make(j) = share of its operators' time + sum of its share of get(x) over the unsaved storages x that they read
#     get(x)  = 0 if x exists at t, else the smaller of p * size(x) and make(x)
# This is the dual of the linear program: an operator or input needed by several storages costs at least the sum of their
# shares, for any shares. A few rounds move the shares to the storages that are recomputed. Each price keeps its best sum.

_FINER = 24
"""Number of prices added around the decisive price."""
_ANY_PRICE = 1e-3
"""Price, in us per byte, if recomputation takes no time."""
_ROUNDS = 6
"""Rounds that adjust the shares. With these rounds and prices, the bound of a 7B model is within 0.5 % of a solver's."""


class RecomputeTime:
    """Lower bound of the time to recompute bytes that are dropped at one tick."""

    def __init__(self, recipes: Recipes, tick: int) -> None:
        trace, c = recipes.trace, recipes.candidates
        self._recipes = recipes
        self._size = allocated_size(trace.tensor_bytes).astype(np.float64).tolist()
        idle = np.zeros(len(self._size), np.bool_)
        idle[c.tensor] = (trace.hook_tick[c.first] <= tick) & (tick < trace.hook_tick[c.use])
        self._can_drop = (recipes.can_drop & idle).tolist()
        self._free = (recipes.can_hold & ((trace.tensor_dies >= tick) | (trace.tensor_born > tick))).tolist()
        self._saved = recipes.saved.tolist()
        self._can_hold, self._can_recompute = recipes.can_hold.tolist(), recipes.can_recompute.tolist()
        self._unsaved = [[x for x in made_of if not self._saved[x] and not self._free[x]] for made_of in recipes.inputs]
        self._order = self._needed_order()
        self._us = recipes.shares_us(self._size, self._order, self._needed, self._can_drop)
        self.lines: list[tuple[float, float]] = []
        """(price, sum): R(G) >= price * G + sum."""
        self._find_lines()

    def at(self, nbytes: Float64s) -> Float64s:
        """Return lower bounds of the time, one for each entry of `nbytes`, the bytes that are dropped."""
        price, sums = np.array(self.lines).T
        return np.asarray(np.maximum((price[:, None] * nbytes + sums[:, None]).max(axis=0), 0.0))

    def kinks(self, most: float) -> Float64s:
        """Return the bytes, from 0 to `most`, between which `at` is linear."""
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
        """Return the storages that may be recomputed and those from which they are made, inputs first."""
        needed = list(self._can_drop)
        for j in reversed(self._recipes.order):
            if needed[j]:
                for x in self._unsaved[j]:
                    needed[x] = True
        self._needed = needed
        order = [j for j in self._recipes.order if needed[j]]
        self._only_held = {x for j in order for x in self._unsaved[j] if not self._recipes.makers[x]}
        return order

    def _find_lines(self) -> None:
        which = [j for j in self._order if self._can_drop[j] and self._size[j]]
        ratio = [self._us[j] / self._size[j] for j in which if self._us[j] > 0]
        ratio = [max(price, LEAST_PRICE) for price in ratio] or [_ANY_PRICE]
        self.lines = [(0.0, 0.0)]
        prices = np.geomspace(min(ratio) * 0.5, max(ratio) * 8, NUM_PRICES)
        prices = np.append(prices, prices[-1] * 10.0 ** np.arange(1, 7))  # higher prices, for more bytes than can be recomputed
        own = np.unique(ratio)  # without holds, the result changes only at these prices
        prices = np.unique(np.append(prices, own if len(own) <= NUM_PRICES else own[:: len(own) // NUM_PRICES]))
        self.lines += list(zip(prices.tolist(), self._sums(prices).tolist(), strict=True))

    def refine(self, nbytes: float) -> None:
        lines = sorted(self.lines)
        i = max(range(len(lines)), key=lambda i: lines[i][0] * nbytes + lines[i][1])
        low, high = lines[max(i - 1, 0)][0], lines[min(i + 1, len(lines) - 1)][0]
        prices = np.geomspace(low or high / 1e3, high, _FINER + 2)[1:-1]
        self.lines += list(zip(prices.tolist(), self._sums(prices).tolist(), strict=True))

    def _sums(self, prices: Float64s) -> Float64s:
        """Return (prices,): sum of the formula above, best of a few rounds of shares."""
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
        """Return the sum for these shares, and by storage True where it is recomputed."""
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
    """Return the intersection of two lines. The second line is steeper."""
    return (a[1] - b[1]) / (b[0] - a[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ideal:
    """Relaxed bound of one step within one budget."""

    step_us: float
    swapped_bytes: float
    """Bytes swapped one way at the decisive time."""
    recomputed_us: float
    """Part of `step_us` in which operators run again."""

    def reached_by(self, step_us: float) -> float:
        """Return the share of the bound that a step of `step_us` reaches. 1 is the best possible value."""
        return self.step_us / step_us if step_us else 1.0


def ideal(trace: Trace, hbm_budget: int, cost_model: LinkCost, *, recompute: Collection[str] = ()) -> Ideal:
    """Return a lower bound of the step's time for all plans of `trace` within `hbm_budget` bytes.

    recompute: base names of operators that may run again, to recompute saved storages instead of swapping them. Ignored if the
    budget needs swaps between two uses. Raises `InfeasibleBudget` (a `ValueError`) if swapping every candidate is not enough,
    and `TypeError` for a budget that is not a whole number.
    """
    hbm_budget = parse_size(hbm_budget, what="hbm_budget")
    least = smallest_budget(trace)
    if hbm_budget < least:
        raise below_least(least, hbm_budget)
    first_uses = hbm_budget >= least_memory(trace, between_uses=False).nbytes
    step = _Step(trace, between_uses=not first_uses)
    over = np.maximum(step.least_moved - hbm_budget, 0)
    if not over.any():
        return Ideal(step_us=step.total_us, swapped_bytes=0.0, recomputed_us=0.0)
    if recompute and first_uses:
        recipes = Recipes.of(trace, recompute, cost=cost_model)
        return _cheapest_mix(recipes, step, int(over.argmax()), float(over.max()), cost_model)
    out_us, back_us = over / (cost_model.d2h_gbps * 1e3), over / (cost_model.h2d_gbps * 1e3)
    bound_us = relaxed_us(step.before_us, step.after_us, out_us, back_us)
    t = int(bound_us.argmax())
    return Ideal(step_us=float(bound_us[t]) + step.tail_us, swapped_bytes=float(over[t]), recomputed_us=0.0)


def relaxed_us(before_us: Float64s | float, after_us: Float64s | float, out_us: Float64s, back_us: Float64s) -> Float64s:
    """Return (times,): time until the last use by the formula above. The bytes over the budget cross in `out_us` and `back_us`.
    Compute takes `before_us` and `after_us`."""
    return np.maximum(before_us, out_us) + np.maximum(after_us, back_us)


def hidden_budget_bound(trace: Trace, cost_model: LinkCost) -> int:
    """Return the minimum device memory, in bytes, that a plan for `trace` needs to hide all copies."""
    step = _Step(trace, between_uses=True)
    before_bytes = step.before_us * (cost_model.d2h_gbps * 1e3)
    after_bytes = step.after_us * (cost_model.h2d_gbps * 1e3)
    needed = step.least_moved - np.minimum(before_bytes, after_bytes)
    return max(smallest_budget(trace), int(np.ceil(needed.max(initial=0.0))))


def smallest_hidden_budget(
    trace: Trace,
    cost_model: LinkCost,
    plan_for: Callable[[int], SwapPlan],
    *,
    tolerance: float = 1e-3,
    precision_bytes: int | None = None,
) -> int:
    """Return the smallest budget, in bytes, for which `plan_for(budget)` makes a plan that costs no time, found by bisection.

    tolerance: share of the step that counts as no time. precision_bytes: maximum distance of the result from the smallest
    budget; None: 1/256 of the distance from the bound to the unswapped peak. `plan_for` may raise `InfeasibleBudget`. If plans
    for larger budgets are slower, the result is any budget at which this changes.
    """
    simulator = Simulator(trace, cost_model)
    low, high = hidden_budget_bound(trace, cost_model), int(memory_curve(trace).max(initial=trace.start_bytes))
    step_bytes = max(1, (high - low) // 256 if precision_bytes is None else precision_bytes)
    if low >= high or _hides_copies(simulator, plan_for, low, tolerance):
        return min(low, high)
    while high - low > step_bytes:
        middle = (low + high) // 2
        if _hides_copies(simulator, plan_for, middle, tolerance):
            high = middle
        else:
            low = middle
    return high


def _hides_copies(simulator: Simulator, plan_for: Callable[[int], SwapPlan], budget: int, tolerance: float) -> bool:
    """True if `plan_for(budget)` keeps the budget, and its step takes at most a share `tolerance` longer than without swaps."""
    try:
        plan = plan_for(budget)
    except InfeasibleBudget:
        return False
    timeline = simulator.run(plan)
    return timeline.step_us <= simulator.trace.duration_us * (1 + tolerance) and timeline.peak_bytes <= plan.hbm_budget_bytes


class _Step:
    """Part of a step before the last use of a candidate. After that use nothing is off the device.

    between_uses: storages may be off the device between two uses as well."""

    def __init__(self, trace: Trace, *, between_uses: bool) -> None:
        candidates = Candidates.of(trace, between_uses=between_uses)
        clock = trace.clock_us()
        last = int(trace.hook_tick[candidates.use].max(initial=0))
        self.total_us = float(clock[-1])
        self.tail_us = float(clock[-1] - clock[last])
        self.before_us: Float64s = clock[:last]
        self.after_us: Float64s = clock[last] - clock[:last]
        # Rounding: a storage of 1 byte takes 512 bytes, so moving 1 byte fewer may keep 512 more.
        padding = int((candidates.size - candidates.nbytes).sum())
        self.least_moved: Int64s = memory_curve(trace)[:last] - padding


def _cheapest_mix(recipes: Recipes, step: _Step, t: int, over: float, cost_model: LinkCost) -> Ideal:
    """Return the bound with recomputation at tick `t`. Some of the `over` bytes are swapped, some recomputed."""
    out_rate, back_rate = cost_model.d2h_gbps * 1e3, cost_model.h2d_gbps * 1e3
    recompute_time = RecomputeTime(recipes, t)
    before_us, after_us = float(step.before_us[t]), float(step.after_us[t])

    def cheapest() -> tuple[float, float, float]:
        """Return the bound until the last use, the bytes that are recomputed, and the time of recomputation."""
        # Convex, and linear between these points: the kinks, and the bytes at which the two sides of a max are equal.
        points = np.unique(np.append(recompute_time.kinks(over), np.clip(over - before_us * out_rate, 0.0, over)))
        slack_us = after_us + recompute_time.at(points) - (over - points) / back_rate
        rises = int(np.searchsorted(slack_us, 0.0))
        if 0 < rises < len(points):
            points = np.append(points, np.interp(0.0, slack_us[rises - 1 : rises + 1], points[rises - 1 : rises + 1]))
        again_us = recompute_time.at(points)
        crosses = over - points
        bound_us = relaxed_us(before_us, after_us + again_us, crosses / out_rate, crosses / back_rate)
        best = int(bound_us.argmin())
        return float(bound_us[best]), float(points[best]), float(again_us[best])

    recompute_time.refine(cheapest()[1])
    bound_us, again, again_us = cheapest()
    return Ideal(step_us=bound_us + step.tail_us, swapped_bytes=over - again, recomputed_us=again_us)
