"""Swapping all that may move, whole: what published offloading does, and what no plan is to be worse than.

out       as soon as each may be sent
reclaimed when `depth` later ones may be copied
back      with the use of the one that is used `depth` before it
depth 0   reclaimed at once, back on demand
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

import numpy as np

from chameleon_mm.policy.cost import LinkCost
from chameleon_mm.policy.draft import Draft
from chameleon_mm.policy.problem import Problem
from chameleon_mm.trace.trace import Float64s, Int64s

_EACH_DEPTH = 8
"""Depths up to it are tried one by one, then powers of two."""
_ROUNDS = 3
"""In which a bound is brought close."""


def early_hooks(sendable: Int64s, first: Int64s, use: Int64s, depth: int) -> tuple[Int64s, Int64s]:
    """(n,) hooks each of reclaims and of copies back. `sendable`, `first`, `use`: (n,) hooks of storages, by their uses.

    Copies out cross in the order of `sendable`, those of one hook in that of their uses.
    """
    return _hooks(np.argsort(sendable, kind="stable"), sendable, first, use, depth)


def _hooks(by_out: Int64s, sendable: Int64s, first: Int64s, use: Int64s, depth: int) -> tuple[Int64s, Int64s]:
    n = len(use)
    depth = min(depth, n)
    later, earlier = np.full(n, -1), np.full(n, -1)  # the last ones wait for nobody, the first ones come on demand
    later[by_out[: n - depth]] = sendable[by_out[depth:]]
    earlier[depth:] = use[: n - depth]
    reclaim = np.minimum(np.maximum(first, later), use)
    back = np.where(earlier < 0, use, np.maximum(reclaim, earlier)) if depth else use
    return reclaim, back


class Everything:
    """All candidates of one problem, whole, at any depth."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._who = np.argsort(problem.candidates.use, kind="stable")
        self._candidates = problem.candidates.take(self._who)
        self._by_out = np.argsort(self._candidates.sendable, kind="stable")
        self._clock = np.asarray(problem.time_us)

    def drafts(self, budget: int, cost: LinkCost, most_us: Callable[[], float]) -> Iterator[Draft]:
        """Those within `budget`, the most promising first, until none can make the step later by less than `most_us()`."""
        depths = list(range(_EACH_DEPTH + 1))
        while 2 * depths[-1] < len(self._who):
            depths.append(2 * depths[-1])
        promising = []
        for depth in depths:
            least_us = self.least_us(depth, cost, enough_us=most_us())
            if least_us < most_us() and self._peak_bytes(depth) <= budget:
                promising.append((least_us, depth))
        for least_us, depth in sorted(promising):
            if least_us >= most_us():
                return
            yield self.at(depth)

    def at(self, depth: int) -> Draft:
        """The draft of `swap_everything`."""
        reclaim, back = self._hooks(depth)
        return Draft(
            who=self._who.tolist(),
            gives=self._candidates.size.tolist(),
            out_at=self._candidates.sendable.tolist(),
            reclaim_at=reclaim.tolist(),
            in_at=back.tolist(),
        )

    def least_us(self, depth: int, cost: LinkCost, *, enough_us: float = inf) -> float:
        """By how much it makes the step later at the least, in arithmetic over all candidates at once.

        Waits that nothing can shorten come first: for copies that begin when they are waited for. How late compute is says when
        copies begin, and when copies end says how late it is: each time around the bound comes closer, from below. It is not
        brought closer where it is `enough_us` as it is.
        """
        clock, sendable, use, nbytes = self._clock, self._candidates.sendable, self._candidates.use, self._candidates.nbytes
        reclaim, back = self._hooks(depth)
        out_us, back_us = cost.alone_us(nbytes, cost.d2h_gbps), cost.alone_us(nbytes, cost.h2d_gbps)
        late = np.zeros(len(clock))
        np.add.at(late, reclaim, np.where(reclaim == sendable, out_us, 0.0))
        np.add.at(late, use, np.where(back == use, back_us, 0.0))
        late = np.cumsum(late)
        if late[-1] >= enough_us:
            return float(late[-1])
        by_out, by_back = self._by_out, np.lexsort((use, back != use, back))  # at one hook the use's own goes first
        out_done, back_done = np.empty(len(use)), np.empty(len(use))
        for _ in range(_ROUNDS):
            reached = clock + np.append(0.0, late[:-1])
            out_done[by_out] = _one_after_the_other(reached[sendable[by_out]], out_us[by_out])
            ready = np.maximum(reached[back], out_done)
            back_done[by_back] = _one_after_the_other(ready[by_back], back_us[by_back])
            np.maximum.at(late, reclaim, out_done - clock[reclaim])
            np.maximum.at(late, use, back_done - clock[use])
            late = np.maximum.accumulate(late)
        return float(late[-1])

    def _hooks(self, depth: int) -> tuple[Int64s, Int64s]:
        c = self._candidates
        return _hooks(self._by_out, c.sendable, c.first, c.use, depth)

    def _peak_bytes(self, depth: int) -> int:
        return self._problem.peak_without(self._candidates.size, *self._hooks(depth))


def _one_after_the_other(ready_us: Float64s, took_us: Float64s) -> Float64s:
    """(n,) ends of copies that one engine runs in this order, none before it is ready."""
    before = np.cumsum(took_us) - took_us
    return np.asarray(before + took_us + np.maximum.accumulate(ready_us - before))
