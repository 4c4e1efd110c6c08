"""Times of a plan: stalls, both copy engines, the step's time, by a model of the link and of compute that waits for it.

at every hook that an action names, in the order that plan.py sets down:
    reclaims      whole ones, then those in part, whose head is copied first; compute waits for the copy out, but for what
                  the host has since an earlier action
    copies out    ready now
    the use       its copy back, if not under way yet, is ready now; compute waits for it
    copies back   ready now; of those in part the head is copied back meanwhile
between hooks compute takes what the trace says

each engine is one FIFO per direction, and both share what the link carries at once:
    start         max(when it is ready, when the engine is free)
    per piece     copy_us, then its bytes at this direction's rate, or at the duplex rest while the other direction is busy

Time is a model: the host is always far enough ahead, a copy is queued on its engine, whole, when compute is at its hook, and
one back runs after its own copy out. As in the simulated device, a copy's time is fixed when it is queued. The earlier of two
that run both ways keeps its rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from chameleon_mm.policy.action_columns import OUT, RECLAIM_IN_PART, USE, ActionColumns, Events
from chameleon_mm.policy.link_cost import LinkCost


class EngineSpan(NamedTuple):
    """Time in which a storage crosses the link, one way."""

    tensor: int
    """Number of the storage in the trace."""
    start_us: float
    end_us: float
    nbytes: int


class CopyEngine:
    """The copy engine of one direction."""

    __slots__ = ("_beside", "_copy_us", "_other", "_piece_bytes", "_rate", "_rows", "_shared_rate", "free_at_us")

    def __init__(self, cost: LinkCost, rate_gbps: float, other_gbps: float) -> None:
        self._copy_us = cost.copy_us
        self._piece_bytes = cost.piece_bytes
        self._rate = rate_gbps * 1e3  # bytes a microsecond
        self._shared_rate = (cost.duplex_gbps - other_gbps) * 1e3
        self._other: CopyEngine = self
        self._beside = 0
        """Index of the first of the other engine's spans that a copy queued from now on can run beside."""
        self.free_at_us = 0.0
        self._rows: list[tuple[int, float, float, int]] = []
        """Spans as plain tuples: a named one takes as long as the rest of a copy's arithmetic, and a search wants none."""

    @classmethod
    def pair(cls, cost: LinkCost) -> tuple[CopyEngine, CopyEngine]:
        """Engines from device to host and from host to device; both idle."""
        out, back = cls(cost, cost.d2h_gbps, cost.h2d_gbps), cls(cost, cost.h2d_gbps, cost.d2h_gbps)
        out._other, back._other = back, out
        return out, back

    @property
    def spans(self) -> tuple[EngineSpan, ...]:
        """Spans of the queued copies, in the order in which they run."""
        return tuple(map(EngineSpan._make, self._rows))

    def spans_of(self, tensors: Sequence[int]) -> tuple[EngineSpan, ...]:
        """`spans` of what was queued by its place in `tensors`."""
        rows = ((tensors[place], start_us, end_us, nbytes) for place, start_us, end_us, nbytes in self._rows)
        return tuple(map(EngineSpan._make, rows))

    def queue(self, tensor: int, nbytes: int, ready_us: float) -> float:
        """Queue a copy that may start at `ready_us`, behind what was queued before. Returns when it ends."""
        start = max(ready_us, self.free_at_us)
        others = self._other._rows
        while self._beside < len(others) and others[self._beside][2] <= start:
            self._beside += 1
        end = start
        if self._beside == len(others):  # alone, as most are
            end += -(-nbytes // self._piece_bytes) * self._copy_us + nbytes / self._rate
        else:
            for offset in range(0, nbytes, self._piece_bytes):
                end = self._piece(min(self._piece_bytes, nbytes - offset), end + self._copy_us)
        self.free_at_us = end
        self._rows.append((tensor, start, end, nbytes))
        return end

    def _piece(self, nbytes: int, clock_us: float) -> float:
        """Time at which `nbytes` whose first byte crosses at `clock_us` are through."""
        left, others = float(nbytes), self._other._rows
        for i in range(self._beside, len(others)):
            _, beside_start, beside_end, _ = others[i]
            if beside_end <= clock_us:
                continue
            alone = max(0.0, beside_start - clock_us)
            if left <= alone * self._rate:
                break
            left -= alone * self._rate
            clock_us += alone
            shared = beside_end - clock_us
            if left <= shared * self._shared_rate:
                return clock_us + left / self._shared_rate
            left -= shared * self._shared_rate
            clock_us = beside_end
        return clock_us + left / self._rate


class Walk(NamedTuple):
    """Delays of a step, and the copies behind them."""

    stall_us: float
    head_copy_us: float
    out_waits_us: list[float]
    """(n,) of the moves: waits at reclaims."""
    in_waits_us: list[float]
    """(n,) of the moves: waits at uses."""
    out: CopyEngine
    """Device to host; its copies are numbered as the moves."""
    back: CopyEngine


def walk(
    moves: ActionColumns,
    events: Events,
    hook_us: Sequence[float],
    cost: LinkCost,
    *,
    at_most_us: float = inf,
    lag_us: Sequence[float] = (),
) -> Walk:
    """Goes through `events`, those of `moves`. `hook_us`: (hooks,) when compute is at each, nothing swapped.

    at_most_us: it stops where the step is later by more than that. lag_us: (n,) by how much copies out are done later than
    their engine has them; empty: not at all.
    """
    nbytes, out_at, in_at = moves.nbytes.tolist(), moves.out_at.tolist(), moves.in_at.tolist()
    head_us = (moves.stays / (cost.hbm_gbps * 1e3)).tolist()
    lag, again = lag_us or [0.0] * len(nbytes), moves.again.tolist()
    out, back = CopyEngine.pair(cost)
    out_done, back_done, out_waits, in_waits = ([0.0] * len(nbytes) for _ in range(4))
    stall = heads = late = 0.0
    for hook, kind, j in zip(*(column.tolist() for column in events), strict=True):
        now = hook_us[hook] + late
        if kind <= RECLAIM_IN_PART:
            if again[j]:
                continue
            if out_at[j] == hook:
                out_done[j] = out.queue(j, nbytes[j], now) + lag[j]
            now += head_us[j]
            late += head_us[j]
            heads += head_us[j]
            wait, waits = out_done[j] - now, out_waits
        elif kind == OUT:
            out_done[j] = out.queue(j, nbytes[j], now) + lag[j]
            continue
        else:
            wait, waits = 0.0, in_waits
            if in_at[j] == hook:
                back_done[j] = back.queue(j, nbytes[j], max(now, out_done[j]))
                now += head_us[j]
                late += head_us[j]
                heads += head_us[j]
            if kind == USE:
                wait = back_done[j] - now
        if wait > 0.0:
            late += wait
            stall += wait
            waits[j] = wait
            if late > at_most_us:
                break
    return Walk(stall, heads, out_waits, in_waits, out, back)
