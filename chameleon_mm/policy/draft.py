"""A plan in numbers, while it is being sought: five values per candidate that moves.

draft.late_us(problem, cost)        what it costs: both copy engines and compute on one clock
draft.peak_bytes(problem)           device memory at most
draft.host_bytes(problem)           pinned memory at most
draft.plan(problem, ...)            the plan itself

`simulate` says the same of a plan, with spans, curves, and checks of what it is given. A search asks a thousand times and needs
none of these. The tests hold both to the same figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from chameleon_mm.policy.cost import LinkCost
from chameleon_mm.policy.engine import CopyEngine
from chameleon_mm.policy.footprint import HOST_BLOCK_BYTES
from chameleon_mm.policy.plan import Action, SwapPlan
from chameleon_mm.policy.problem import Problem
from chameleon_mm.trace.trace import Int64s
from chameleon_mm.units import round_up

_RECLAIM, _RECLAIM_PART, _OUT, _USE, _BACK = range(5)
"""What happens at one hook, in this order."""


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

    def moved_bytes(self, problem: Problem) -> list[int]:
        """Of each candidate: what crosses the link, its last bytes."""
        padding = problem.padding
        return [gives - padding[i] for i, gives in zip(self.who, self.gives, strict=True)]

    def late_us(
        self, problem: Problem, cost: LinkCost, *, at_most: float = inf, lag_us: Sequence[float] = ()
    ) -> tuple[float, float]:
        """By how much the step is later than without it: stalls, and copies of what stays of storages that move in part.

        Stops counting where both together are beyond `at_most`. lag_us: (n,) of the problem's candidates, by how much their
        copies out are done later than the engine has them; empty: not at all.
        """
        moved = self.moved_bytes(problem)
        use = [problem.use[i] for i in self.who]
        stays_us = [(problem.nbytes[i] - n) / (cost.hbm_gbps * 1e3) for i, n in zip(self.who, moved, strict=True)]
        out, back = CopyEngine.pair(cost)
        out_done, back_done = [-1.0] * len(use), [-1.0] * len(use)
        lag = [lag_us[i] for i in self.who] if lag_us else [0.0] * len(use)
        stall = heads = late = 0.0
        time_us, out_at, in_at = problem.time_us, self.out_at, self.in_at
        for hook, what, j in self._events(problem, use):
            now = time_us[hook] + late
            if what <= _RECLAIM_PART:
                if out_at[j] == hook:
                    out_done[j] = out.queue(j, moved[j], now) + lag[j]
                now += stays_us[j]
                late += stays_us[j]
                heads += stays_us[j]
                wait = out_done[j] - now
            elif what == _OUT:
                out_done[j] = out.queue(j, moved[j], now) + lag[j]
                continue
            else:
                wait = 0.0
                if in_at[j] == hook:
                    back_done[j] = back.queue(j, moved[j], max(now, out_done[j]))
                    now += stays_us[j]
                    late += stays_us[j]
                    heads += stays_us[j]
                if what == _USE:
                    wait = back_done[j] - now
            if wait > 0.0:
                late += wait
                stall += wait
                if late > at_most:
                    break
        return stall, heads

    def _events(self, problem: Problem, use: list[int]) -> Iterator[tuple[int, int, int]]:
        """(hook, what, place in this draft), in the order in which they happen."""
        n = len(use)
        reclaim_at, out_at, in_at, used_at = (
            np.asarray(column, np.int64) for column in (self.reclaim_at, self.out_at, self.in_at, use)
        )
        reclaims = reclaim_at * 5 + _RECLAIM
        reclaims[self.in_part(problem)] += _RECLAIM_PART - _RECLAIM
        outs = np.flatnonzero(out_at < reclaim_at)  # the others begin with the reclaim that waits for them
        backs = np.flatnonzero(in_at < used_at)  # the others begin with the use that waits for them
        keys = np.concatenate((reclaims, out_at[outs] * 5 + _OUT, used_at * 5 + _USE, in_at[backs] * 5 + _BACK))
        places = np.concatenate((np.arange(n), outs, np.arange(n), backs))
        order = np.argsort(keys, kind="stable")
        hooks, what = np.divmod(keys[order], 5)
        return zip(hooks.tolist(), what.tolist(), places[order].tolist(), strict=True)

    def peak_bytes(self, problem: Problem) -> int:
        """Device memory at most."""
        return max([problem.peak_without(self.gives, self.reclaim_at, self.in_at), *self._moments_in_part(problem)])

    def host_bytes(self, problem: Problem) -> int:
        """Pinned memory at most: a block is held from its copy out's hook to the last use, both included."""
        change = np.zeros(len(problem.level) + 1, np.int64)
        blocks = [round_up(n, HOST_BLOCK_BYTES) for n in self.moved_bytes(problem)]
        np.add.at(change, np.asarray(self.out_at, np.int64), blocks)
        np.subtract.at(change, problem.candidates.last_use[np.asarray(self.who, np.int64)] + 1, blocks)
        return int(np.cumsum(change).max(initial=0))

    def levels_within_hooks(self, problem: Problem) -> tuple[Int64s, Int64s]:
        """(K,) bytes allocated within each hook: once whole storages are reclaimed and nothing is back; once all is done."""
        after = problem.away(self.gives, self.reclaim_at, self.in_at)
        before = np.concatenate((np.zeros(1, np.int64), after[:-1]))
        for i, gives, hook in zip(self.who, self.gives, self.reclaim_at, strict=True):
            if gives == problem.size[i]:
                before[hook] += gives
        return problem.at_hook - before, problem.at_hook - after

    def _moments_in_part(self, problem: Problem) -> list[int]:
        """Bytes allocated while what stays of a storage and the whole of it both are, each time that this is so."""
        parts = self.in_part(problem)
        if not parts:
            return []
        leaving, staying = self.levels_within_hooks(problem)
        moments = []
        for j in parts:
            stays = problem.size[self.who[j]] - self.gives[j]
            earlier = sum(self.gives[other] for other in parts if other < j and self.reclaim_at[other] == self.reclaim_at[j])
            moments.append(int(leaving[self.reclaim_at[j]]) - earlier + stays)
            moments.append(int(staying[self.in_at[j]]) - self._back_later(problem, j) + stays)
        return moments

    def _back_later(self, problem: Problem, j: int) -> int:
        """Bytes that come back at the same hook as `j`, but after it."""
        hook, used = self.in_at[j], self.in_at[j] == problem.use[self.who[j]]
        later = 0
        for other, i in enumerate(self.who):
            if self.in_at[other] == hook and other != j and (hook != problem.use[i], other) > (not used, j):
                later += self.gives[other]
        return later

    def plan(
        self, problem: Problem, *, stall_us: float, heads_us: float, host_bytes: int, budget: int, fingerprint: int
    ) -> SwapPlan:
        """The plan that it is a draft of."""
        columns = zip(self.who, self.moved_bytes(problem), self.out_at, self.reclaim_at, self.in_at, strict=True)
        actions = tuple(
            Action(tensor=problem.tensor[i], nbytes=n, out_at=out_at, reclaim_at=reclaim_at, in_at=in_at, use_at=problem.use[i])
            for i, n, out_at, reclaim_at, in_at in columns
        )
        return SwapPlan(
            fingerprint=fingerprint,
            num_hooks=len(problem.level),
            actions=actions,
            hbm_budget_bytes=budget,
            peak_bytes=self.peak_bytes(problem),
            host_bytes=host_bytes,
            step_us=problem.total_us + stall_us + heads_us,
            stall_us=stall_us,
        )
