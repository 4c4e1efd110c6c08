"""A plan in numbers, while it is being sought: five values per candidate that moves.

draft.late_us(problem, cost)        what it costs: both copy engines and compute on one clock
draft.peak_bytes(problem)           device memory at most
draft.host_bytes(problem)           pinned memory at most
draft.plan(problem, ...)            the plan itself

`simulate` says the same of a plan, with spans, curves, and checks of what it is given. A search asks a thousand times and needs
none of these. The tests hold both to the same figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from chameleon_mm.policy.cost import LinkCost
from chameleon_mm.policy.moves import Moves, in_order
from chameleon_mm.policy.plan import SwapPlan
from chameleon_mm.policy.planned_memory import pinned_peak
from chameleon_mm.policy.problem import Problem
from chameleon_mm.policy.timing import walk
from chameleon_mm.trace.trace import Int64s


@dataclass(slots=True, kw_only=True)
class Draft:
    """Candidates that move, in the order of their uses, which is that of the plan."""

    who: list[int]
    """Their numbers in the problem."""
    gives: list[int]
    """Bytes of device memory that are free while it is away: all it takes, or less."""
    out_at: list[int]
    reclaim_at: list[int]
    in_at: list[int]

    def __len__(self) -> int:
        return len(self.who)

    def in_part(self, problem: Problem) -> list[int]:
        """Places in this draft of candidates of which something stays."""
        return [j for j, (i, gives) in enumerate(zip(self.who, self.gives, strict=True)) if gives < problem.size[i]]

    def moves(self, problem: Problem) -> Moves:
        """The same as arrays."""
        return problem.moves(self.who, self.gives, self.out_at, self.reclaim_at, self.in_at)

    def late_us(
        self, problem: Problem, cost: LinkCost, *, at_most: float = inf, lag_us: Sequence[float] = ()
    ) -> tuple[float, float]:
        """By how much the step is later than without it: stalls, and copies of what stays of storages that move in part.

        Stops counting where both together are beyond `at_most`. lag_us: (n,) of the problem's candidates, by how much their
        copies out are done later than the engine has them; empty: not at all.
        """
        moves = self.moves(problem)
        lags = [lag_us[i] for i in self.who] if lag_us else []
        walked = walk(moves, in_order(moves), problem.time_us, cost, at_most_us=at_most, lag_us=lags)
        return walked.stall_us, walked.head_copy_us

    def peak_bytes(self, problem: Problem) -> int:
        """Device memory at most."""
        return problem.peak_with(self.moves(problem))

    def host_bytes(self, problem: Problem) -> int:
        """Pinned memory at most: a block is held from its copy out's hook to the last use, both included."""
        return pinned_peak(len(problem.level), self.moves(problem), problem.candidates.last_use[np.asarray(self.who, np.int64)])

    def levels_within_hooks(self, problem: Problem) -> tuple[Int64s, Int64s]:
        """(K,) bytes allocated within each hook: once whole storages are reclaimed and nothing is back; once all is done."""
        after = problem.away(self.gives, self.reclaim_at, self.in_at)
        before = np.concatenate((np.zeros(1, np.int64), after[:-1]))
        for i, gives, hook in zip(self.who, self.gives, self.reclaim_at, strict=True):
            if gives == problem.size[i]:
                before[hook] += gives
        return problem.at_hook - before, problem.at_hook - after

    def plan(
        self, problem: Problem, *, stall_us: float, heads_us: float, host_bytes: int, budget: int, fingerprint: int
    ) -> SwapPlan:
        """The plan that it is a draft of."""
        return SwapPlan(
            fingerprint=fingerprint,
            num_hooks=len(problem.level),
            actions=self.moves(problem).actions([problem.tensor[i] for i in self.who]),
            hbm_budget_bytes=budget,
            peak_bytes=self.peak_bytes(problem),
            host_bytes=host_bytes,
            step_us=problem.total_us + stall_us + heads_us,
            stall_us=stall_us,
        )
