"""Times of a plan (stalls, both copy engines, the step's time), by a model of the link and of compute that waits for it.

at every hook that an action names, in the order that swap_plan.py defines:
    reclaims      whole ones, then those in part, whose head is copied first; compute waits for the copy out, unless the
                  host has it since an earlier action
    copies out    ready now
    the use       its copy back, if not under way yet, is ready now; compute waits for it
    copies back   ready now; of those in part the head is copied back meanwhile
between hooks compute takes the trace's times

each engine is one FIFO per direction, and both share the link's duplex rate:
    start         max(when it is ready, when the engine is free)
    program's own queued when compute is at them; compute waits for the copies ahead
    per piece     copy_us, then its bytes at this direction's rate, or at the duplex rest while the other direction is busy

The host is assumed to be always far enough ahead. A copy is queued on its engine, whole, when compute is at its hook, and a
copy back runs after its own copy out. As in the simulated device, a copy's time is fixed when it is queued. The earlier of two
that run both ways keeps its rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

import numpy as np

from chameleon_mm.plan.swap_plan import OUT, RECLAIM_IN_PART, USE, ActionColumns, Events
from chameleon_mm.plan.trace import Float64s, Int64s, Trace
from chameleon_mm.units import MIB

# --- Cost model of the link: measured rates, a fixed cost per piece, and the rest of the duplex rate while both are busy
#
# start = max(when it may start, when its direction is free)
# end   = start + copy_us per piece + bytes at this direction's rate, or at the duplex rest during a copy the other way

PIECE_BYTES = 31 * MIB
"""Size of the pieces that queued copies are cut into. An urgent copy waits for two at most: 1.2 ms at 55 GB/s. Pieces of
17 MB reach 99 % of the link's rate, by the model of docs/transfer.md."""

SLOWEST_GBPS, FASTEST_GBPS = 1e-12, 1e15
"""Bounds far beyond any link. Within them no copy's time overflows to infinity or rounds to 0."""

COUNTED_ON = 0.8
"""Share of the link's measured rates that plans count on. What they recompute then costs nothing more until the link is slower
by a fifth (docs/policy.md, "Plans for a slower link")."""

LINK_RATES = ("d2h_gbps", "h2d_gbps", "duplex_gbps")
"""Names of the rates that are measured."""

_ROUNDING = 1e-9
"""Share by which a duplex rate may exceed the sum of both rates: a factor may have scaled all three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """The link between a device and pinned host memory. One FIFO engine per direction. Rates in 1e9 bytes a second.

    Raises `ValueError` for a rate that no link has, and a duplex rate below the faster direction's or above the sum of both.
    """

    d2h_gbps: float
    """Rate from device to host while the other direction is idle."""
    h2d_gbps: float
    duplex_gbps: float
    """Rate of both directions added up, while both are busy."""
    copy_us: float = 3.1
    """Fixed cost of a piece on its engine: published for an H200, where 4 MiB reach 53.2 of 55.4 GB/s."""
    piece_bytes: int = PIECE_BYTES
    """Size of the pieces that copies are cut into."""
    hbm_gbps: float = 2_000.0
    """Rate of a copy within device memory: the part that stays of a tensor that moves in part is copied once each way."""

    def __post_init__(self) -> None:
        for knob in (*LINK_RATES, "hbm_gbps"):
            rate = getattr(self, knob)
            if not SLOWEST_GBPS <= rate <= 2 * FASTEST_GBPS:  # NaN is not
                raise ValueError(
                    f"{knob}: expected a finite number above 0, from {SLOWEST_GBPS:g} to {FASTEST_GBPS:g} GB/s, got {rate}; "
                    f"measure the link again"
                )
        fastest, total = max(self.d2h_gbps, self.h2d_gbps), self.d2h_gbps + self.h2d_gbps
        if not fastest <= self.duplex_gbps <= total * (1 + _ROUNDING):
            raise ValueError(
                f"duplex_gbps: expected both directions together to carry at least what one does alone ({fastest}) and at most "
                f"what both do ({total}), got {self.duplex_gbps}; measure the link again"
            )

    def slowed(self, share: float) -> LinkCost:
        """Return a link with `share` of these rates."""
        slower: dict[str, Any] = {name: getattr(self, name) * share for name in LINK_RATES}
        return replace(self, **slower)

    @property
    def rates(self) -> tuple[float, float, float]:
        """The rates of `LINK_RATES`."""
        return self.d2h_gbps, self.h2d_gbps, self.duplex_gbps

    def alone_us(self, nbytes: Int64s, rate_gbps: float) -> Float64s:
        """Times of copies of these sizes at one rate, with their pieces' fixed cost."""
        return -(-nbytes // self.piece_bytes) * np.float64(self.copy_us) + nbytes / np.float64(rate_gbps * 1e3)


# --- Copies over the link that the program itself makes in a step, such as FSDP2's offload of parameters
#
# Recorded: bytes and direction of each. Each has its engine when compute is at it, behind our copies that were queued before.
# That compute waits for it until then is an assumption: true for a copy on the stream of compute, and for one on another
# stream whose result is used at once. Its time on a link without our copies is operator time.

PROGRAMS = -1
"""Number of a program's own copy on an engine."""

_AHEAD_BYTES = 64 * MIB
"""Most bytes of ours that are on an engine while a step is recorded: a copy of the program's may have waited for them."""


class ProgramCopy(NamedTuple):
    tick: int
    hook: int
    """First hook after it; one past the last: none."""
    at_us: float
    """When compute is at it, nothing swapped."""
    out_bytes: int
    back_bytes: int

    def cross(self, now_us: float, engines: tuple[CopyEngine, CopyEngine]) -> float:
        """Queue it on the engines to and from the host at `now_us`. Return the time until it has crossed."""
        copies = zip(engines, (self.out_bytes, self.back_bytes), strict=True)
        return max(engine.queue(PROGRAMS, nbytes, now_us) for engine, nbytes in copies if nbytes) - now_us


def _alone_us(program: Sequence[ProgramCopy], cost: LinkCost) -> list[float]:
    """Time until each has crossed a link without our copies."""
    idle = CopyEngine.pair(cost)
    return [copy.cross(copy.at_us, idle) for copy in program]


def program_copies(trace: Trace) -> tuple[ProgramCopy, ...]:
    """The program's own copies in `trace`, in order."""
    ops = np.flatnonzero(trace.op_out_bytes + trace.op_back_bytes)
    ticks = trace.op_tick[ops]
    hooks, at_us = np.searchsorted(trace.hook_tick, ticks), trace.clock_us()[ticks]
    columns = (ticks, hooks, at_us, trace.op_out_bytes[ops], trace.op_back_bytes[ops])
    return tuple(map(ProgramCopy._make, zip(*(column.tolist() for column in columns), strict=True)))


def without_waits(trace: Trace, cost: LinkCost) -> Trace:
    """Return `trace` without the time that its program's own copies may have waited for ours as it was recorded."""
    us = trace.op_us
    for nbytes, rate in ((trace.op_out_bytes, cost.d2h_gbps), (trace.op_back_bytes, cost.h2d_gbps)):
        least_us = np.maximum(cost.alone_us(nbytes, rate), us - cost.alone_us(np.array([_AHEAD_BYTES]), rate))
        us = np.where(nbytes > 0, np.minimum(us, least_us), us)
    return replace(trace, op_us=us)


# --- timing


class EngineSpan(NamedTuple):
    """Time in which a storage crosses the link, one way."""

    tensor: int
    """Number of the storage in the trace."""
    start_us: float
    end_us: float
    nbytes: int


class CopyEngine:
    __slots__ = ("_beside", "_copy_us", "_other", "_piece_bytes", "_rate", "_rows", "_shared_rate", "free_at_us")

    def __init__(self, cost: LinkCost, rate_gbps: float, other_gbps: float) -> None:
        self._copy_us = cost.copy_us
        self._piece_bytes = cost.piece_bytes
        self._rate = rate_gbps * 1e3  # bytes a microsecond
        self._shared_rate = (cost.duplex_gbps - other_gbps) * 1e3
        self._other: CopyEngine = self
        self._beside = 0
        """Index of the first of the other engine's spans that may overlap a copy queued from now on."""
        self.free_at_us = 0.0
        self._rows: list[tuple[int, float, float, int]] = []
        """Spans as plain tuples: a named tuple takes as long as the rest of a copy's arithmetic, and a search needs none."""

    @classmethod
    def pair(cls, cost: LinkCost) -> tuple[CopyEngine, CopyEngine]:
        """Return engines from device to host and from host to device, both idle."""
        out, back = cls(cost, cost.d2h_gbps, cost.h2d_gbps), cls(cost, cost.h2d_gbps, cost.d2h_gbps)
        out._other, back._other = back, out
        return out, back

    @property
    def spans(self) -> tuple[EngineSpan, ...]:
        """Spans of the queued copies, in the order in which they run."""
        return tuple(map(EngineSpan._make, self._rows))

    def spans_of(self, tensors: Sequence[int]) -> tuple[EngineSpan, ...]:
        """`spans` with places in `tensors` replaced by the numbers there, without the program's own."""
        rows = ((tensors[place], *rest) for place, *rest in self._rows if place != PROGRAMS)
        return tuple(map(EngineSpan._make, rows))

    def queue(self, tensor: int, nbytes: int, ready_us: float) -> float:
        """Queue a copy that may start at `ready_us`, after all earlier ones. Return when it ends."""
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
        """Return when `nbytes` whose first byte crosses at `clock_us` have crossed."""
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
    stall_us: float
    head_copy_us: float
    out_waits_us: list[float]
    """(n,) of the moves: waits at reclaims."""
    in_waits_us: list[float]
    """(n,) of the moves: waits at uses."""
    program_waits_us: list[float]
    """Waits of the program's own copies for others. `stall_us` has them, too."""
    out: CopyEngine
    """Device to host; its copies are numbered as the moves."""
    back: CopyEngine


def walk(
    moves: ActionColumns,
    events: Events,
    hook_us: Sequence[float],
    cost: LinkCost,
    *,
    program: Sequence[ProgramCopy] = (),
    at_most_us: float = inf,
) -> Walk:
    """Walk through `events`, those of `moves`. `hook_us`: (hooks,) when compute is at each, nothing swapped.

    program: the program's own copies, in order. at_most_us: stop once the step is later by more than that.
    """
    nbytes, out_at, in_at = moves.nbytes.tolist(), moves.out_at.tolist(), moves.in_at.tolist()
    head_us = (moves.stays / (cost.hbm_gbps * 1e3)).tolist()
    again, (out, back) = moves.again.tolist(), CopyEngine.pair(cost)
    out_done, back_done, out_waits, in_waits = ([0.0] * len(nbytes) for _ in range(4))
    stall = heads = late = 0.0
    program_waits: list[float] = []
    alone_us = _alone_us(program, cost) if program else []

    def pass_program(until: float, late: float) -> float:
        """Queue the program's copies before hook `until`. Return how late the step is then."""
        while len(program_waits) < len(program) and (copy := program[len(program_waits)]).hook <= until:
            crosses_us = copy.cross(copy.at_us + late, (out, back))
            program_waits.append(max(0.0, crosses_us - alone_us[len(program_waits)]))
            late += program_waits[-1]
        return late

    for hook, kind, j in zip(*(column.tolist() for column in events), strict=True):
        if program:
            late = pass_program(hook, late)
        now = hook_us[hook] + late
        if kind <= RECLAIM_IN_PART:
            if again[j]:
                continue
            if out_at[j] == hook:
                out_done[j] = out.queue(j, nbytes[j], now)
            now, late, heads = now + head_us[j], late + head_us[j], heads + head_us[j]
            wait, waits = out_done[j] - now, out_waits
        elif kind == OUT:
            out_done[j] = out.queue(j, nbytes[j], now)
            continue
        else:
            wait, waits = 0.0, in_waits
            if in_at[j] == hook:
                back_done[j] = back.queue(j, nbytes[j], max(now, out_done[j]))
                now, late, heads = now + head_us[j], late + head_us[j], heads + head_us[j]
            if kind == USE:
                wait = back_done[j] - now
        if wait > 0.0:
            late += wait
            stall += wait
            waits[j] = wait
            if late > at_most_us:
                break
    else:
        pass_program(inf, late)
    return Walk(stall + sum(program_waits), heads, out_waits, in_waits, program_waits, out, back)
