"""Least time of any plan of a small step: a mixed-integer program, solved by scipy's HiGHS. For tests.

least_step_us(problem, budget, cost)       a bound from below, within 0.2 % of what its own best solution takes

Exact where it matters: stalls at reclaims and uses, both engines in any order, how many bytes of each storage move, what is
away from each hook until the next, room for what stays of one that moves in part. Left out, so that the bound stays one: copies
within device memory, and what one engine takes from the other (give it a duplex rate of both together).

at hook k:    reach[k] <= waited[k] <= left[k]      compute arrives; has waited for reclaims; has waited for the use, too
candidate i:  moves[i], gives[i] units, when it crosses, gone[i, k] and back[i, k]: reclaimed, returned, at hook k or before
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]  # scipy ships no types
from scipy.sparse import coo_array  # type: ignore[import-untyped]  # the same

from chameleon_mm.plan.problem import Problem
from chameleon_mm.plan.timing import LinkCost

UNIT = 512
"""Unit of the byte counts: the solver is exact only with numbers of similar size."""


def least_step_us(problem: Problem, budget: int, cost: LinkCost) -> float | None:
    """None: not settled within 30 seconds. Sizes and budget are multiples of 512."""
    return _Program(problem, budget, cost).solve()


class Program:
    """Variables from 0 on, and rows `sum of factor * variable >= bound`."""

    def __init__(self) -> None:
        self._high: list[float] = []
        self.whole: list[int] = []
        """For each variable: 1 if it is an integer."""
        self._rows: list[tuple[list[tuple[int, float]], float]] = []

    def _var(self, high: float, *, whole: bool = False) -> int:
        self._high.append(high)
        self.whole.append(int(whole))
        return len(self._high) - 1

    def _at_least(self, bound: float, *terms: tuple[int, float]) -> None:
        self._rows.append((list(terms), bound))

    def _least_sum(self, *variables: int, **options: float) -> Any:
        """Return the solution that HiGHS finds for the least sum of `variables`."""
        objective = np.zeros(len(self._high))
        objective[list(variables)] = 1.0
        values = [(factor, row, var) for row, (terms, _) in enumerate(self._rows) for var, factor in terms]
        factors, rows, columns = zip(*values, strict=True)
        matrix = coo_array((factors, (rows, columns)), shape=(len(self._rows), len(self._high))).tocsr()
        rows_hold = LinearConstraint(matrix, [bound for _, bound in self._rows], np.inf)
        return milp(objective, constraints=rows_hold, bounds=Bounds(0.0, self._high), integrality=self.whole, options=options)


class _Program(Program):
    def __init__(self, problem: Problem, budget: int, cost: LinkCost) -> None:
        super().__init__()
        self._p, self._cost = problem, cost
        self._size = [size // UNIT for size in problem.size]
        slowest = min(cost.d2h_gbps, cost.h2d_gbps) * 1e3
        pieces = sum(-(-n // cost.piece_bytes) for n in problem.nbytes)
        self._ever = problem.total_us + 2 * (pieces * cost.copy_us + sum(problem.nbytes) / slowest) + 1
        """Microseconds after which the step has ended under any plan."""
        self._much = 4.0 * max(problem.peak_bytes, budget) / UNIT
        self._over = [(int(level) - budget) // UNIT for level in problem.level]
        self._over_at_hook = [(int(level) - budget) // UNIT for level in problem.at_hook]
        self._reach_and_leave()
        self._candidates()
        self._memory()
        self._room_for_parts()
        self._one_at_a_time()

    def solve(self) -> float | None:
        found = self._least_sum(self._left[-1], time_limit=30.0, mip_rel_gap=0.002)
        if found.status != 0:
            return None
        return float(found.mip_dual_bound) + self._p.total_us - self._p.time_us[-1]

    def _reach_and_leave(self) -> None:
        time_us = self._p.time_us
        self._waited = [self._var(self._ever) for _ in time_us]
        self._left = [self._var(self._ever) for _ in time_us]
        for k, us in enumerate(time_us):
            self._at_least(0, (self._left[k], 1), (self._waited[k], -1))
            self._after_reaching(k, self._waited[k], us)

    def _after_reaching(self, hook: int, var: int, us: float) -> None:
        """`var` is a time when compute has come to `hook`."""
        if hook:
            self._at_least(us - self._p.time_us[hook - 1], (var, 1), (self._left[hook - 1], -1))
        else:
            self._at_least(us, (var, 1))

    def _candidates(self) -> None:
        p, cost, ever, n = self._p, self._cost, self._ever, len(self._p.size)
        self._moves = [self._var(1, whole=True) for _ in range(n)]
        self._in_part = [self._var(1, whole=True) for _ in range(n)]
        self._gives = [self._var(size) for size in self._size]
        self._out, self._out_end, self._in, self._in_end = ([self._var(ever) for _ in range(n)] for _ in range(4))
        self._gone: dict[tuple[int, int], int] = {}
        self._back: dict[tuple[int, int], int] = {}
        for i in range(n):
            size, first, use, moves, gives = self._size[i], p.first[i], p.use[i], self._moves[i], self._gives[i]
            self._at_least(0, (moves, size), (gives, -1))
            self._at_least(0, (gives, 1), (moves, -size), (self._in_part[i], size))
            for start, end, rate in ((self._out, self._out_end, cost.d2h_gbps), (self._in, self._in_end, cost.h2d_gbps)):
                self._at_least(0, (end[i], 1), (start[i], -1), (moves, -cost.copy_us), (gives, -UNIT / (rate * 1e3)))
            self._after_reaching(p.sendable[i], self._out[i], p.time_us[p.sendable[i]])
            self._at_least(0, (self._in[i], 1), (self._out_end[i], -1))
            for k in range(first, use):
                gone, back = self._var(1, whole=True), self._var(1, whole=True)
                self._gone[i, k], self._back[i, k] = gone, back
                self._at_least(0, (moves, 1), (gone, -1))
                before = self._gone.get((i, k - 1))
                self._at_least(0, *([(before, 1)] if before is not None else []), (back, -1))  # away for an interval at least
                if before is not None:
                    self._at_least(0, (gone, 1), (before, -1))
                    self._at_least(0, (back, 1), (self._back[i, k - 1], -1))
                self._at_least(-ever, (self._waited[k], 1), (self._out_end[i], -1), (gone, -ever))
            for k in range(first, use + 1):  # not back before hook k: its copy back begins there or later
                before = self._back.get((i, k - 1))
                earlier = [(before, ever)] if before is not None else []
                self._at_least(-ever, (self._in[i], 1), (self._waited[k], -1), (moves, -ever), *earlier)
            self._at_least(-ever, (self._left[use], 1), (self._in_end[i], -1), (moves, -ever))

    def _memory(self) -> None:
        for k, excess in enumerate(self._over):
            terms = []
            for i in range(len(self._size)) if excess > 0 else ():
                if (i, k) in self._gone:
                    away = self._away(i, (self._gone[i, k], 1.0), (self._back[i, k], -1.0))
                    terms.append((away, 1.0))
            if terms:
                self._at_least(excess, *terms)

    def _away(self, i: int, *share: tuple[int, float]) -> int:
        """Units of `i` that are away where `share` sums up to 1, and 0 where it sums up to 0."""
        away = self._var(self._size[i])
        self._at_least(0, (self._gives[i], 1), (away, -1))
        self._at_least(0, *((var, factor * self._size[i]) for var, factor in share), (away, -1))
        return away

    def _room_for_parts(self) -> None:
        """Within a hook at which something that moves in part goes or comes, all others that may be away are."""
        p, much = self._p, self._much
        within: dict[int, list[tuple[int, int]]] = {}
        for i in range(len(p.size)):
            for k in range(p.first[i], p.use[i] + 1):
                share = [(self._gone[i, min(k, p.use[i] - 1)], 1.0)]
                if (i, k - 1) in self._back:
                    share.append((self._back[i, k - 1], -1.0))
                within.setdefault(k, []).append((i, self._away(i, *share)))
        for i in range(len(p.size)):
            for k in range(p.first[i], p.use[i] + 1):
                missing = self._over_at_hook[k] + self._size[i]
                base = [(self._gives[i], 1.0), (self._in_part[i], -much)]
                base += [(away, 1.0) for j, away in within[k] if j != i]
                for changes in (self._gone, self._back):
                    if k < p.use[i]:
                        before = [(changes[i, k - 1], much)] if (i, k - 1) in changes else []
                        self._at_least(missing - 2 * much, *base, (changes[i, k], -much), *before)
                if k == p.use[i]:
                    on_demand = [(self._moves[i], -much), (self._back[i, k - 1], much)]
                    self._at_least(missing - 2 * much, *base, *on_demand)

    def _one_at_a_time(self) -> None:
        ever = self._ever
        for start, end in ((self._out, self._out_end), (self._in, self._in_end)):
            for i in range(len(start)):
                for j in range(i):
                    i_first = self._var(1, whole=True)
                    both = [(self._moves[i], -ever), (self._moves[j], -ever)]
                    self._at_least(-3 * ever, (start[j], 1), (end[i], -1), (i_first, -ever), *both)
                    self._at_least(-2 * ever, (start[i], 1), (end[j], -1), (i_first, ever), *both)
