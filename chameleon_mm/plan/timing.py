"""Times of a plan (stalls, both copy engines, the step's time), by a model of link and compute.

at every hook that an action names, in the order that swap_plan.py defines:
    reclaims      whole storages, then partial ones, whose head is copied first; compute waits for the copy out, unless the
                  host has the bytes since an earlier action
    copies out    are ready now
    the use       its copy back, unless queued earlier, is ready now; compute waits for it
    copies back   are ready now; for partial ones the head is copied back meanwhile
between hooks compute takes the trace's times

each engine is one FIFO per direction, and both share the link's duplex rate:
    start         max(time when ready, time when the engine is free)
    program's own queued when compute reaches them; compute waits for earlier copies
    per piece     copy_us, then bytes at this direction's rate, or at the rest of the duplex rate while the other is busy

The host is assumed to be always far enough ahead. A copy is queued on its engine as a whole when compute reaches its hook. A
copy back runs after its own copy out. As on the simulated device, a copy's time is fixed when it is queued. If two copies run
in opposite directions, the earlier one keeps its rate.
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

# --- Cost model of the link: measured rates, a fixed cost per piece, and a shared rate while both directions are busy
#
# start = max(earliest start, time when the direction is free)
# end   = start + copy_us per piece + bytes at this direction's rate, or at the rest of the duplex rate during an opposite copy

PIECE_BYTES = 31 * MIB
"""Size of the pieces that queued copies are cut into. An urgent copy waits for two at most: 1.2 ms at 55 GB/s. Pieces of
17 MB reach 99 % of the link's rate, by the model of docs/transfer.md."""

SLOWEST_GBPS, FASTEST_GBPS = 1e-12, 1e15
"""Bounds of rates, far beyond any link. Within them no copy's time overflows to infinity or rounds to 0."""

COUNTED_ON = 0.8
"""Share of the link's measured rates that plans assume. Plans that recompute lose no time on a link slower by up to a
fifth (docs/policy.md, "Plans for a slower link")."""

LINK_RATES = ("d2h_gbps", "h2d_gbps", "duplex_gbps")
"""Names of the rates that are measured."""

_ROUNDING = 1e-9
"""Share by which a duplex rate may exceed the sum of both rates, because of rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """Link between a device and pinned host memory. One FIFO engine per direction. Rates in 1e9 bytes per second.

    Raises `ValueError` for a rate out of bounds, and a duplex rate below the faster direction's rate or above the sum of both.
    """

    d2h_gbps: float
    """Rate from device to host while the other direction is idle."""
    h2d_gbps: float
    duplex_gbps: float
    """Sum of both directions' rates while both are busy."""
    copy_us: float = 3.1
    """Fixed cost of a piece on its engine: published for an H200, where 4 MiB reach 53.2 of 55.4 GB/s."""
    piece_bytes: int = PIECE_BYTES
    """Size of the pieces that copies are cut into."""
    hbm_gbps: float = 2_000.0
    """Rate of a copy within device memory. The staying part of a partial move is copied once each way."""

    def __post_init__(self) -> None:
        for knob in (*LINK_RATES, "hbm_gbps"):
            rate = getattr(self, knob)
            if not SLOWEST_GBPS <= rate <= 2 * FASTEST_GBPS:  # NaN is out of bounds too
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
        """Rates in the order of `LINK_RATES`."""
        return self.d2h_gbps, self.h2d_gbps, self.duplex_gbps

    def alone_us(self, nbytes: Int64s, rate_gbps: float) -> Float64s:
        """Return the times of copies of `nbytes` at one rate, with the fixed cost of their pieces."""
        return -(-nbytes // self.piece_bytes) * np.float64(self.copy_us) + nbytes / np.float64(rate_gbps * 1e3)


# --- Copies over the link made by the program itself, such as FSDP2's offload of parameters
#
# Bytes and direction of each copy are recorded. A copy is queued on its engine when compute reaches it, after our earlier
# copies. We assume that compute waits for it. This is true for a copy on the compute stream, and for one on another stream
# whose result is used at once. Its time on a link without our copies counts as operator time.

PROGRAMS = -1
"""Tensor number, in an engine's queue, of copies that the program itself makes; no tensor of a plan has it."""

_AHEAD_BYTES = 64 * MIB
"""Maximum bytes of our copies on an engine while a step is recorded. A copy of the program may have waited for them."""


class ProgramCopy(NamedTuple):
    tick: int
    hook: int
    """First hook after the copy; the number of hooks if there is none."""
    at_us: float
    """Time at which compute reaches the copy, without swaps."""
    out_bytes: int
    back_bytes: int

    def cross(self, now_us: float, engines: tuple[CopyEngine, CopyEngine]) -> float:
        """Queue the copy at `now_us` on the engines (to the host, from the host). Returns the time until it has crossed."""
        copies = zip(engines, (self.out_bytes, self.back_bytes), strict=True)
        return max(engine.queue(PROGRAMS, nbytes, now_us) for engine, nbytes in copies if nbytes) - now_us


def _alone_us(program: Sequence[ProgramCopy], cost: LinkCost) -> list[float]:
    """Return the times of the program's copies on a link without our copies."""
    idle = CopyEngine.pair(cost)
    return [copy.cross(copy.at_us, idle) for copy in program]


def program_copies(trace: Trace) -> tuple[ProgramCopy, ...]:
    """Return the program's own copies in `trace`, in order."""
    ops = np.flatnonzero(trace.op_out_bytes + trace.op_back_bytes)
    ticks = trace.op_tick[ops]
    hooks, at_us = np.searchsorted(trace.hook_tick, ticks), trace.clock_us()[ticks]
    columns = (ticks, hooks, at_us, trace.op_out_bytes[ops], trace.op_back_bytes[ops])
    return tuple(map(ProgramCopy._make, zip(*(column.tolist() for column in columns), strict=True)))


def without_waits(trace: Trace, cost: LinkCost) -> Trace:
    """Return `trace` without the time that the program's own copies may have waited for ours during the recording."""
    us = trace.op_us
    for nbytes, rate in ((trace.op_out_bytes, cost.d2h_gbps), (trace.op_back_bytes, cost.h2d_gbps)):
        least_us = np.maximum(cost.alone_us(nbytes, rate), us - cost.alone_us(np.array([_AHEAD_BYTES]), rate))
        us = np.where(nbytes > 0, np.minimum(us, least_us), us)
    return replace(trace, op_us=us)


class EngineSpan(NamedTuple):
    """Time span of a storage's copy in one direction."""

    tensor: int
    """Number of the storage in the trace."""
    start_us: float
    end_us: float
    nbytes: int


class CopyEngine:
    __slots__ = ("_beside", "_copy_us", "_other", "_piece_bytes", "_rate", "_rows", "_shared_rate", "free_at_us")

    def __init__(self, cost: LinkCost, rate_gbps: float, other_gbps: float) -> None:
        self._copy_us, self._piece_bytes = cost.copy_us, cost.piece_bytes
        self._rate = rate_gbps * 1e3  # bytes a microsecond
        self._shared_rate = (cost.duplex_gbps - other_gbps) * 1e3
        self._other: CopyEngine = self
        self._beside = 0
        """Index of the other engine's first span that may overlap a copy queued from now on."""
        self.free_at_us = 0.0
        self._rows: list[tuple[int, float, float, int]] = []
        """Spans as plain tuples. A named tuple takes as long as the rest of a copy's arithmetic, and a search needs none."""

    @classmethod
    def pair(cls, cost: LinkCost) -> tuple[CopyEngine, CopyEngine]:
        """Return two idle engines: from device to host, and from host to device."""
        out, back = cls(cost, cost.d2h_gbps, cost.h2d_gbps), cls(cost, cost.h2d_gbps, cost.d2h_gbps)
        out._other, back._other = back, out
        return out, back

    @property
    def spans(self) -> tuple[EngineSpan, ...]:
        """Return the spans of the queued copies, in the order in which they run."""
        return tuple(map(EngineSpan._make, self._rows))

    def spans_of(self, tensors: Sequence[int]) -> tuple[EngineSpan, ...]:
        """Return `spans` without the program's own copies. Each index into `tensors` is replaced by the number there."""
        rows = ((tensors[place], *rest) for place, *rest in self._rows if place != PROGRAMS)
        return tuple(map(EngineSpan._make, rows))

    def queue(self, tensor: int, nbytes: int, ready_us: float) -> float:
        """Queue a copy that may start at `ready_us`, after all earlier copies. Returns its end time."""
        start = max(ready_us, self.free_at_us)
        others = self._other._rows
        while self._beside < len(others) and others[self._beside][2] <= start:
            self._beside += 1
        end = start
        if self._beside == len(others):  # no overlap, the usual case
            end += -(-nbytes // self._piece_bytes) * self._copy_us + nbytes / self._rate
        else:
            for offset in range(0, nbytes, self._piece_bytes):
                end = self._piece(min(self._piece_bytes, nbytes - offset), end + self._copy_us)
        self.free_at_us = end
        self._rows.append((tensor, start, end, nbytes))
        return end

    def _piece(self, nbytes: int, clock_us: float) -> float:
        """Return the end time of `nbytes` that begin to cross at `clock_us`."""
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
    """(n,) waits at reclaims, by move."""
    in_waits_us: list[float]
    """(n,) waits at uses, by move."""
    program_waits_us: list[float]
    """Waits of the program's own copies for ours. `stall_us` includes them."""
    out: CopyEngine
    """Engine from device to host. Its copies have the numbers of the moves."""
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
    """Walk through `events`, the events of `moves`. `hook_us`: (hooks,) times at which compute reaches each, without swaps.

    program: the program's own copies, in order. at_most_us: stop once the step is delayed by more than that.
    """
    nbytes, out_at, in_at = moves.nbytes.tolist(), moves.out_at.tolist(), moves.in_at.tolist()
    head_us = (moves.stays / (cost.hbm_gbps * 1e3)).tolist()
    again, (out, back) = moves.again.tolist(), CopyEngine.pair(cost)
    out_done, back_done, out_waits, in_waits = ([0.0] * len(nbytes) for _ in range(4))
    stall = heads = late = 0.0
    program_waits: list[float] = []
    alone_us = _alone_us(program, cost) if program else []

    def pass_program(until: float, late: float) -> float:
        """Queue the program's copies before hook `until`. Returns the delay of the step after them."""
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
