"""Counters and timings of what the executor did.

    metrics.wait(compute, event, "in")      # a wait of compute on a copy: how long it really waited is the stall
    metrics.moved(move, "out", nbytes)      # a copy's own time, piece by piece
    metrics.totals                          # bytes, reasons, fallbacks; hidden share = 1 - stall / copy time

Times need timed events, ten times as dear as untimed ones on a GPU, so a step is timed or not as a whole.
`StepTiming` times one step, of a plan on trial: `result()` is there once the step's last event is complete.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple

from chameleon_mm.device import Event, Stream
from chameleon_mm.pool.free_list import Units, units_bytes
from chameleon_mm.swap.copy_queue import Move, Piece

# --- Sums of one step's times, of which each part is added once the device has come to it


class StepSums:
    """Times of one timed step, in microseconds of the device's clock, as far as they are known."""

    __slots__ = ("begin", "copy_us", "end", "recompute_us", "stall_us")

    def __init__(self, begin: Event) -> None:
        self.begin = begin
        self.end: Event | None = None
        """Event at the step's end; None while it runs."""
        self.stall_us = self.copy_us = self.recompute_us = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the device has come to the step's end. Never waits."""
        return self.end is not None and self.end.query() and self.begin.query()

    @property
    def step_us(self) -> float:
        """Time from the step's begin to its end, once it `is_over`."""
        assert self.end is not None
        return self.end.elapsed_us(self.begin)


# --- Data about what was timed in a session, on one clock: microseconds of the device since the first timed step began
#
# copies       CopySpan          each engine's, in order compute      WaitSpan          where it waited for a copy, or
# recomputed something steps        StepSpan          timed ones; the host's clock at the beginning of each memory
# MemorySample      as hooks found it, on the host's clock


class StepKind(enum.Enum):
    """Kind of a step, known at its end: each step is of one."""

    RECORDED = "recorded"
    """Recorded operator by operator, to its end, for a plan to be made of it."""
    PLANNED = "planned"
    """Followed a plan from its first hook to its last."""
    PARTLY_PLANNED = "partly_planned"
    """Followed a plan for a part of it: it diverged, took more memory, or was recognised late."""
    BY_RULE = "by_rule"
    """Followed no plan: the default rule moved its tensors."""
    FAILED = "failed"
    """Ended by an exception."""

    def __str__(self) -> str:
        return self.value.replace("_", " ")


def hidden_fraction(stall_us: float, copy_us: float) -> float | None:
    """Share of the copies' time during which compute did not wait for them; None where nothing was copied."""
    return None if not copy_us else max(0.0, 1.0 - stall_us / copy_us)


@dataclass(frozen=True, slots=True)
class CopySpan:
    """One copy (a piece of a move) on the device's clock, in microseconds since the first timed step began."""

    direction: str
    start_us: float
    end_us: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class WaitSpan:
    """Time that compute waited for a copy, or recomputed something, on the clock of the copies."""

    kind: str
    """"out" or "in": direction of the copy that it waited for; "recompute": it waited for none."""
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class StepSpan:
    """One timed step on the clock of the copies, and when the host began it."""

    number: int
    """Number of the step among all that ended, from 0 on."""
    kind: str
    start_us: float
    end_us: float
    host_us: float
    """The device's `host_us` as the host began the step: on a GPU not later than `start_us` is."""
    unix_ns: int
    """The same moment by the wall clock, as torch.profiler has it."""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Memory as a hook of a timed step found it, on the host's clock `host_us`."""

    host_us: float
    hbm_bytes: int
    host_bytes: int
    """Pinned memory that live blocks held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSpans:
    """The latest of what was timed beside copies."""

    waits: tuple[WaitSpan, ...] = ()
    steps: tuple[StepSpan, ...] = ()
    memory: tuple[MemorySample, ...] = ()


# --- metrics

Direction = Literal["out", "in"]

EVENT_GAP_US = 10.0
"""Time between two timed events that follow each other on a GPU, whatever it waits for: less than this is no stall."""


class StepTime(NamedTuple):
    """Times of one step, in microseconds of the device's clock."""

    step_us: float
    in_stalls_us: dict[int, float]
    """Time that compute waited for each storage's copy back, 0 included, by the plan's number of the storage."""
    out_stalls_us: dict[int, float]
    """Time that compute waited for each storage's copy out, by the same numbers."""
    busy_us: float
    """Time of the step without the waits for copies of either direction."""


class StepTiming:
    """One step's timed events. Not thread-safe."""

    __slots__ = ("_end", "_start", "_waits")

    def __init__(self, compute: Stream) -> None:
        self._start = compute.record(timed=True)
        self._end: Event | None = None
        self._waits: list[tuple[Event, Event, Direction, int | None]] = []

    def waited(self, before: Event, after: Event, direction: Direction, tensor: int | None) -> None:
        """Note two events between which compute did nothing but wait for a copy; `tensor` None: of no storage of the plan."""
        self._waits.append((before, after, direction, tensor))

    def end(self, compute: Stream) -> None:
        self._end = compute.record(timed=True)

    def result(self) -> StepTime | None:
        """Times of the step; None while the device is still at it. Never waits."""
        if self._end is None or not (self._end.query() and self._start.query()):
            return None
        step_us = busy_us = self._end.elapsed_us(self._start)
        stalls: dict[Direction, Counter[int]] = {"in": Counter(), "out": Counter()}
        for before, after, direction, tensor in self._waits:
            if after.query() and before.query():
                waited_us = max(0.0, after.elapsed_us(before))
                busy_us -= waited_us
                if tensor is not None:
                    stalls[direction][tensor] += waited_us  # type: ignore[assignment]  # a counter of times
        return StepTime(step_us, _beyond_gaps(stalls["in"]), _beyond_gaps(stalls["out"]), busy_us)


def _beyond_gaps(stalls_us: Mapping[int, float]) -> dict[int, float]:
    """Stalls without those that are only the device's own pace from one event to the next."""
    return {tensor: us if us > EVENT_GAP_US else 0.0 for tensor, us in stalls_us.items()}


MAX_SPANS = 20_000
"""Number of latest copies that are kept for `save_trace`, and of latest readings of memory."""

MAX_WAITS = 10_000
"""Number of latest waits and recomputations that are kept: a storage goes out and comes back, and is waited for once."""

MAX_STEPS = 1_000
"""Number of latest timed steps whose bounds are kept."""


class _BegunStep(NamedTuple):
    """A timed step that began."""

    number: int
    begin: Event
    host_us: float
    unix_ns: int


@dataclass(slots=True, kw_only=True)
class Counters:
    """Counts of what swapping did, as a report has them."""

    timed_steps: int = 0
    """Steps begun whose copies and waits were timed: `stall_us`, `copy_us` and `hidden_fraction` are about these."""
    bytes_swapped_out: int = 0
    bytes_swapped_in: int = 0
    bytes_reclaimed: int = 0
    """Device memory reclaimed after a swap-out while the tensor was still needed later."""
    bytes_reclaimed_by_allocator: int = 0
    """Bytes of `bytes_reclaimed` that the device's allocator reclaimed itself, in the middle of an allocation."""
    state_bytes_swapped_out: int = 0
    """Bytes of optimizer state that left the device; in no other figure."""
    state_bytes_swapped_in: int = 0
    parameter_bytes_swapped_out: int = 0
    """Bytes of parameters that left the device as they had been written; in no other figure."""
    parameter_bytes_swapped_in: int = 0
    gradient_bytes_swapped_out: int = 0
    """Bytes of gradients that left the device; in no other figure."""
    gradient_bytes_swapped_in: int = 0
    swap_ins_on_demand: int = 0
    """Swap-ins that nobody had started before the use."""
    prefetches: int = 0
    """Swap-ins started before the use."""
    uses_on_device: int = 0
    """Uses that found their storage on the device: never left, still alive elsewhere, or prefetched."""
    budget_misses: int = 0
    """Checks of memory that found it above the budget with nothing left to reclaim."""
    fallbacks: int = 0
    """Storages that stayed on the device because no pinned memory was to be had, or the device refused the copy."""
    gathers: int = 0
    """Small views that were kept without the rest of their storage."""
    recomputed: int = 0
    """Storages that were dropped, to be recomputed; `recomputations`: recipes that ran for their uses."""
    bytes_recomputed: int = 0
    """Bytes of the storages that were dropped."""
    bytes_held: int = 0
    """Bytes of storages that nobody saved and that were held, for others to be recomputed from them."""
    recomputations: int = 0
    proofs: int = 0
    """Recipes compared with the original that they ran beside: before the first step that relies on them, then one a step."""
    packed_groups: int = 0
    """Packed groups of small storages: each crossed the link in one copy."""
    pageable_swap_outs: int = 0
    """Swap-outs to ordinary host memory, because no more could be pinned and the budget did not let the storage stay."""
    oom_retries: int = 0
    """Allocations of swap-ins, and operators of recorded steps, that found no memory and were tried again."""
    steps_run_again: int = 0
    """Runs of steps by `run_step` after the first, each within a tighter budget."""
    snapshots: int = 0
    """Snapshots that were taken; `snapshot_bytes`: bytes that they took, in all."""
    snapshot_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class Totals(Counters):
    """Sums since the executor began."""

    steps_by_kind: Counter[StepKind] = field(default_factory=Counter)
    """Steps that ended, on a device that could be asked: not in a graph's capture, nor in a forked child."""
    stall_us: float = 0.0
    copy_us: float = 0.0
    prefetches_timed: int = 0
    """Swap-ins in timed steps that were begun before their use and have been used."""
    prefetches_late: int = 0
    """Prefetches among them that compute had to wait for."""
    late_us: float = 0.0
    """Time that compute waited for late prefetches, in all."""
    recompute_us: float = 0.0
    """Time in which compute recomputed dropped storages, in timed steps; comparisons with originals are not in it."""
    kept_by_reason: Counter[str] = field(default_factory=Counter)
    not_recomputed_by_reason: Counter[str] = field(default_factory=Counter)
    """Storages that a plan would have recomputed and that were swapped or kept, by reason."""

    def counters(self) -> dict[str, int]:
        """The counters alone, by name."""
        return {f.name: getattr(self, f.name) for f in fields(Counters)}

    @property
    def hidden_fraction(self) -> float | None:
        """Share of the copies' time during which compute did not wait for them; None when nothing was timed."""
        return hidden_fraction(self.stall_us, self.copy_us)


class Metrics:
    """Counts and times what the executor does; resolves pairs of timed events into `Totals` once they are complete."""

    def __init__(
        self, *, host_us: Callable[[], float] = lambda: 0.0, pinned_units: Callable[[], Units] = lambda: (0, 0, 0)
    ) -> None:
        """`host_us`: the device's clock of that name. `pinned_units`: what live blocks of pinned memory hold."""
        self.totals = Totals()
        self.timed = False
        self.host_us, self.pinned_units = host_us, pinned_units
        self.memory: deque[tuple[float, int, Units]] = deque(maxlen=MAX_SPANS)
        """Readings of memory in timed steps, which checks of memory append: `host_us`, bytes allocated, `pinned_units`."""
        self.timing: StepTiming | None = None
        """Times of the running step, where a plan is on trial."""
        self.step: StepSums | None = None
        """Sums of the step that runs, or that ended last; None: it was not timed."""
        self.spans: deque[CopySpan] = deque(maxlen=MAX_SPANS)
        self._origin: Event | None = None
        self._origin_us = 0.0
        """Time of the current origin on the clock of the spans, whose zero is the first origin."""
        self._next_origin: Event | None = None
        # Each with the sums of the step that it is of.
        self._waits: deque[tuple[Event, Event, Direction, bool, StepSums | None]] = deque()
        self._moves: deque[tuple[Move, str, StepSums | None]] = deque()
        self._recomputations: deque[tuple[Event, Event, StepSums | None]] = deque()
        self._begun: _BegunStep | None = None
        """The running step, where it is timed."""
        self._ended: deque[tuple[_BegunStep, Event, StepKind]] = deque()
        """Timed steps that ended on the host, and not yet on the device."""
        # Fields of a `WaitSpan` or `StepSpan` each, as plain tuples, which the collector need not look at in a long training.
        self._wait_spans: deque[tuple[str, float, float]] = deque(maxlen=MAX_WAITS)
        self._step_spans: deque[tuple[int, str, float, float, float, int]] = deque(maxlen=MAX_STEPS)
        self._resolving = threading.Lock()
        """Lock that lets one thread resolve at a time; others only append to the deques above, which is atomic."""

    def begin_step(self, compute: Stream, *, timed: bool) -> None:
        self.timed, self.step = False, None
        if timed:
            self.time_step(compute)

    def time_step(self, compute: Stream) -> None:
        """Have the step that begins timed, if it is not."""
        if self.timed:
            return
        self.timed = True
        self.totals.timed_steps += 1
        unix_ns, host_us = time.time_ns(), self.host_us()
        origin = compute.record(timed=True)
        self.step = StepSums(origin)
        self._begun = _BegunStep(self.totals.steps_by_kind.total(), origin, host_us, unix_ns)
        if self._origin is None:
            self._origin = origin
        # A GPU tells the time between two events as 32-bit milliseconds: an hour apart they resolve a quarter of one.
        self._next_origin = origin

    def end_step(self, kind: StepKind, compute: Stream | None = None) -> None:
        """End a step of `kind`. What comes until the next step is not timed: nobody would add it up. `compute`: the stream on
        which the step ends, where its own time is asked for."""
        begun, self._begun = self._begun, None
        self.totals.steps_by_kind[kind] += 1
        self.timed = False
        if compute is not None and self.step is not None:
            self.step.end = compute.record(timed=True)
            if begun is not None:
                self._ended.append((begun, self.step.end, kind))
        if self._waits or self._recomputations or self._moves or self._ended:
            self.resolve()

    def is_complete(self, sums: StepSums) -> bool:
        """Whether all of a step's times are in its sums, as far as `resolve` has come. Never waits."""
        if not sums.is_over:
            return False
        # Lists are made at once, whoever appends meanwhile.
        waiting = (*list(self._waits), *list(self._recomputations), *list(self._moves))
        return all(entry[-1] is not sums for entry in waiting)

    def wait(
        self, compute: Stream, event: Event, direction: Direction, tensor: int | None = None, *, prefetched: bool = False
    ) -> None:
        """Order `compute` after a copy's `event`, timing how long that holds it up when this step is timed.

        `tensor`: the plan's number of the storage that it is of. `prefetched`: a copy back that began before its use.
        """
        if not self.timed:
            compute.wait(event)
            return
        before = compute.record(timed=True)
        compute.wait(event)
        after = compute.record(timed=True)
        self._waits.append((before, after, direction, prefetched, self.step))
        if self.timing is not None:
            self.timing.waited(before, after, direction, tensor)

    @contextmanager
    def timing_recomputation(self, compute: Stream) -> Iterator[None]:
        """Context in which `compute` recomputes a dropped storage; timed when this step is."""
        if not self.timed:
            yield
            return
        before = compute.record(timed=True)
        yield
        self._recomputations.append((before, compute.record(timed=True), self.step))

    def on_time(self) -> None:
        """Count a prefetch that had arrived at its use, even by the host's clock, which is ahead of the device's."""
        self.totals.prefetches_timed += self.timed

    def moved(self, move: Move, direction: str, nbytes: int) -> None:
        if direction == "out":
            self.totals.bytes_swapped_out += nbytes
        else:
            self.totals.bytes_swapped_in += nbytes
        if move.timed:
            self._moves.append((move, direction, self.step))

    def resolve(self) -> tuple[CopySpan, ...]:
        """Add up what is complete by now and return the latest copies. Never waits; any thread may ask."""
        with self._resolving:
            if self._origin is not None and self._origin.query():
                self._move_origin(self._origin)
                while self._waits and self._waits[0][1].query():
                    before, after, waited_for, prefetched, sums = self._waits.popleft()
                    self._add_wait(self._add_span(waited_for, before, after), sums, prefetched=prefetched)
                while self._recomputations and self._recomputations[0][1].query():
                    before, after, sums = self._recomputations.popleft()
                    took_us = self._add_span("recompute", before, after)
                    self.totals.recompute_us += took_us
                    if sums is not None:
                        sums.recompute_us += took_us
                while self._ended and self._ended[0][1].query():
                    self._add_step(*self._ended.popleft())
                for _ in range(len(self._moves)):
                    move, direction, sums = self._moves.popleft()
                    if not self._add_up(move, direction, sums):
                        self._moves.append((move, direction, sums))
            return tuple(self.spans)

    def timed_spans(self) -> TimedSpans:
        """The latest of what was timed, as far as it was resolved."""
        with self._resolving:
            memory = tuple(
                MemorySample(host_us, hbm_bytes, units_bytes(units)) for host_us, hbm_bytes, units in list(self.memory)
            )
            waits = tuple(WaitSpan(*fields) for fields in self._wait_spans)
            return TimedSpans(waits=waits, steps=tuple(StepSpan(*fields) for fields in self._step_spans), memory=memory)

    def _add_span(self, kind: str, before: Event, after: Event) -> float:
        """Keep what was between two events of compute. Returns how long it took."""
        assert self._origin is not None
        took_us, start_us = after.elapsed_us(before), self._origin_us + before.elapsed_us(self._origin)
        self._wait_spans.append((kind, start_us, start_us + took_us))
        return took_us

    def _add_step(self, begun: _BegunStep, end: Event, kind: StepKind) -> None:
        assert self._origin is not None
        start_us = self._origin_us + begun.begin.elapsed_us(self._origin)
        end_us = start_us + end.elapsed_us(begun.begin)
        self._step_spans.append((begun.number, kind.value, start_us, end_us, begun.host_us, begun.unix_ns))

    def _add_wait(self, stall_us: float, sums: StepSums | None, *, prefetched: bool) -> None:
        self.totals.stall_us += stall_us
        if sums is not None:
            sums.stall_us += stall_us
        if prefetched:
            self.totals.prefetches_timed += 1
            if stall_us > EVENT_GAP_US:
                self.totals.prefetches_late += 1
                self.totals.late_us += stall_us

    def _move_origin(self, origin: Event) -> None:
        """Move the origin to the beginning of the latest timed step, once the device is there."""
        following = self._next_origin
        if following is not None and following is not origin and following.query():
            self._origin_us += following.elapsed_us(origin)
            self._origin = following

    def _add_up(self, move: Move, direction: str, sums: StepSums | None) -> bool:
        """Add the complete pieces of `move`; returns whether there will be no more."""
        ended = move.ended  # asked first: another thread may be handing the last piece over
        while move.pieces and move.pieces[0].end.query():
            self._add_piece(move.pieces.popleft(), direction, sums)
        return ended and not move.pieces

    def _add_piece(self, piece: Piece, direction: str, sums: StepSums | None) -> None:
        assert self._origin is not None
        start_us, copy_us = self._origin_us + piece.start.elapsed_us(self._origin), piece.end.elapsed_us(piece.start)
        self.totals.copy_us += copy_us
        if sums is not None:
            sums.copy_us += copy_us
        self.spans.append(CopySpan(direction, start_us, start_us + copy_us, piece.nbytes))
