"""The bound with recomputation as the linear program that it stands for, and with whole choices: by scipy's HiGHS. For tests.

least_step_us(trace, budget, cost, names)                  what `ideal(..., recompute=names)` is compared with
least_step_us(..., whole=True)                             each storage dropped or not, held or not: for the choice

at the tick of the peak:
    drop[j], again[x], hold[x], runs[o]     shares, from 0 to 1; crosses: bytes
    gone bytes + crosses - held bytes >= what is too much
    runs[o] >= drop[j], again[j]            for each maker o of j
    hold[x] + again[x] >= drop[j], again[j] for each input x of j that nobody saved and that is not there by itself
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]  # scipy ships no types
from scipy.sparse import coo_array  # type: ignore[import-untyped]  # the same

from chameleon_mm.policy import LinkCost, memory_curve
from chameleon_mm.policy.recipes import Recipes
from chameleon_mm.trace import Trace
from chameleon_mm.units import allocated_size


def least_step_us(trace: Trace, budget: int, cost: LinkCost, names: Collection[str], *, whole: bool = False) -> float:
    recipes = Recipes.of(trace, names, cost=cost)
    c = recipes.candidates
    clock = trace.clock_us()
    last = int(trace.hook_tick[c.use].max(initial=0))
    padding = int((c.size - c.nbytes).sum())
    over = np.maximum(memory_curve(trace)[:last] - padding - budget, 0)
    if not over.any():
        return float(clock[-1])
    t = int(over.argmax())
    program = _Program(recipes, t)
    before_us, after_us, tail_us = float(clock[t]), float(clock[last] - clock[t]), float(clock[-1] - clock[last])
    return tail_us + program.solve(float(over[t]), before_us, after_us, cost, whole=whole)


class _Program:
    """Variables and rows `sum of factor * variable >= bound`."""

    def __init__(self, recipes: Recipes, t: int) -> None:
        trace, c = recipes.trace, recipes.candidates
        self._size = allocated_size(trace.tensor_bytes).tolist()
        self._us = trace.op_us.tolist()
        self._r = recipes
        self._free = (recipes.can_hold & ((trace.tensor_dies >= t) | (trace.tensor_born > t))).tolist()
        idle = (trace.hook_tick[c.first] <= t) & (t < trace.hook_tick[c.use])
        self._low: list[float] = []
        self._high: list[float] = []
        self._rows: list[tuple[list[tuple[int, float]], float]] = []
        self._again: dict[int, int] = {}
        self._hold: dict[int, int] = {}
        self._runs: dict[int, int] = {}
        self._drop = {j: self._var(1.0) for j in c.tensor[idle].tolist() if recipes.can_drop[j]}
        for j, var in self._drop.items():
            self._makes(j, var)

    def solve(self, over: float, before_us: float, after_us: float, cost: LinkCost, *, whole: bool) -> float:
        crosses, first, second = (self._var(np.inf) for _ in range(3))
        gone = [(var, float(self._size[j])) for j, var in self._drop.items()]
        held = [(var, -float(self._size[x])) for x, var in self._hold.items()]
        runs = [(var, -float(self._us[o])) for o, var in self._runs.items()]
        runs += [(var, -float(self._r.compare_us[j])) for j, var in self._drop.items()]
        self._rows += [
            ([*gone, *held, (crosses, 1.0)], over),
            ([(first, 1.0)], before_us),
            ([(first, 1.0), (crosses, -1 / (cost.d2h_gbps * 1e3))], 0.0),
            ([(second, 1.0), *runs], after_us),
            ([(second, 1.0), (crosses, -1 / (cost.h2d_gbps * 1e3))], 0.0),
        ]
        objective = np.zeros(len(self._low))
        objective[[first, second]] = 1.0
        values = [(factor, row, var) for row, (terms, _) in enumerate(self._rows) for var, factor in terms]
        factors, rows, columns = zip(*values, strict=True)
        matrix = coo_array((factors, (rows, columns)), shape=(len(self._rows), len(self._low))).tocsr()
        integrality = np.zeros(len(self._low))
        if whole:
            integrality[[*self._drop.values(), *self._hold.values()]] = 1
        found = milp(
            objective,
            constraints=LinearConstraint(matrix, [bound for _, bound in self._rows]),
            bounds=Bounds(self._low, self._high),
            integrality=integrality,
        )
        assert found.success, found.message
        return float(found.fun)

    def _makes(self, j: int, var: int) -> None:
        """Rows for recomputing `j` to the share `var`."""
        for o in self._r.makers[j]:
            if o not in self._runs:
                self._runs[o] = self._var(1.0)
            self._rows.append(([(self._runs[o], 1.0), (var, -1.0)], 0.0))
        for x in self._r.inputs[j]:
            if self._r.saved[x] or self._free[x]:
                continue
            if x not in self._again:
                self._again[x] = self._var(1.0 if self._r.can_recompute[x] else 0.0)
                self._hold[x] = self._var(1.0 if self._r.can_hold[x] else 0.0)
                self._makes(x, self._again[x])
            self._rows.append(([(self._hold[x], 1.0), (self._again[x], 1.0), (var, -1.0)], 0.0))

    def _var(self, high: float) -> int:
        self._low.append(0.0)
        self._high.append(high)
        return len(self._low) - 1
