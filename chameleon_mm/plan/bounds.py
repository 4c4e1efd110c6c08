"""Bound that no plan can beat: the minimum time of a step within a budget.

at any time t before the last use, x = bytes over the budget:      x has crossed by t, and crosses back after t
    step >= max(compute before t, x / d2h) + max(compute after t until the last use, x / h2d) + compute after it
with recomputation, at the time of the peak:                       the cheapest mix of x bytes copied and y recomputed
    step >= min over x + y of the same, with the time to recompute y added to compute after t

The bound is relaxed: storages are divisible, copies have no fixed cost, and any storage may be idle at any time. So a plan may
be closer to the optimum than its share of the bound shows.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from chameleon_mm.plan.recipes import Recipes
from chameleon_mm.plan.timing import LinkCost
from chameleon_mm.plan.trace import Float64s, Int64s, Trace
from chameleon_mm.plan.unswapped_memory import Candidates, below_least, least_memory, memory_curve, smallest_budget
from chameleon_mm.units import allocated_size, parse_size


def ideal(trace: Trace, hbm_budget: int, cost_model: LinkCost, *, recompute: Collection[str] = ()) -> float:
    """Return a lower bound of the step's time in us for all plans of `trace` within `hbm_budget` bytes.

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
        return step.total_us
    if recompute and first_uses:
        recipes = Recipes.of(trace, recompute, cost=cost_model)
        return _cheapest_mix_us(recipes, step, int(over.argmax()), float(over.max()), cost_model) + step.tail_us
    out_us, back_us = over / (cost_model.d2h_gbps * 1e3), over / (cost_model.h2d_gbps * 1e3)
    return float(relaxed_us(step.before_us, step.after_us, out_us, back_us).max()) + step.tail_us


def relaxed_us(before_us: Float64s | float, after_us: Float64s | float, out_us: Float64s, back_us: Float64s) -> Float64s:
    """Return (times,): time until the last use by the formula above. The bytes over the budget cross in `out_us` and `back_us`.
    Compute takes `before_us` and `after_us`."""
    return np.maximum(before_us, out_us) + np.maximum(after_us, back_us)


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


def _cheapest_mix_us(recipes: Recipes, step: _Step, t: int, over: float, cost_model: LinkCost) -> float:
    """Return a lower bound of the time until the last use. Of the `over` bytes that are too many at tick `t`, some are swapped,
    some recomputed: those first whose own operators take least time for a byte. Their inputs are assumed to be there."""
    out_rate, back_rate = cost_model.d2h_gbps * 1e3, cost_model.h2d_gbps * 1e3
    trace, c = recipes.trace, recipes.candidates
    idle = c.tensor[(trace.hook_tick[c.first] <= t) & (t < trace.hook_tick[c.use])]
    dropped = idle[recipes.can_drop[idle]]
    size = allocated_size(trace.tensor_bytes)
    us = np.array(recipes.shares_us(size, np.isin(np.arange(len(size)), dropped)))
    dropped = dropped[np.argsort(us[dropped] / size[dropped])]
    again_bytes, again_us = (np.append(0.0, np.cumsum(column[dropped])) for column in (size, us))
    # Convex, and linear between these points: the storages, and the bytes at which the two sides of a max are equal.
    points = np.unique(np.clip((*again_bytes, over - step.before_us[t] * out_rate), 0.0, min(over, again_bytes[-1])))
    slack_us = step.after_us[t] + np.interp(points, again_bytes, again_us) - (over - points) / back_rate
    points = np.append(points, np.interp(0.0, slack_us, points))  # the slack rises with the bytes recomputed
    after_us, crosses = step.after_us[t] + np.interp(points, again_bytes, again_us), over - points
    return float(relaxed_us(step.before_us[t], after_us, crosses / out_rate, crosses / back_rate).min())
