"""Counters and timings of the executor's work.

    metrics.wait(compute, event, "in")      # stall: time that compute waits for a copy
    metrics.moved(move, "out", nbytes)      # a copy's own time, piece by piece
    metrics.totals                          # bytes, reasons, fallbacks; hidden share = 1 - stall / copy time

On a GPU a timed event costs ten times an untimed one. So a step is timed as a whole or not at all. `Metrics.time_of` returns a
step's times once its last event is complete.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from math import inf
from typing import Literal, NamedTuple

from chameleon_mm.device import Event, Stream
from chameleon_mm.swap.copy_queue import Move, Piece

# --- Sums of one step's times. Each time is added once the device has reached its event


Direction = Literal["out", "in"]


class StepTime(NamedTuple):
    """Times of one step, in microseconds of the device's clock."""

    step_us: float
    busy_us: float
    """Time of the step without its waits for copies, out or back."""


class StepSums:
    """Sums of the times of one timed step that are known so far, in microseconds of the device's clock."""

    __slots__ = ("begin", "copy_us", "end", "stall_us")

    def __init__(self, begin: Event) -> None:
        self.begin = begin
        self.end: Event | None = None
        """Event at the step's end; None until `Metrics.end_step` records it."""
        self.stall_us = self.copy_us = 0.0

    @property
    def is_over(self) -> bool:
        """True if the device has reached the step's end. Never waits."""
        return self.end is not None and self.end.query() and self.begin.query()

    @property
    def step_us(self) -> float:
        """Time from the step's beginning to its end; valid once `is_over`."""
        assert self.end is not None
        return self.end.elapsed_us(self.begin)


# --- Spans that a session timed, on one clock: microseconds of the device since the first timed step began
# CopySpan        copy in one direction
# WaitSpan        time in which compute waited for a copy, or recomputed a storage
# StepSpan        timed step, and when the host began it


class StepKind(enum.Enum):
    """Kind of a step. Each step has one kind, known at its end."""

    RECORDED = "recorded"
    """Recorded operator by operator to its end, for a plan."""
    PLANNED = "planned"
    """Followed a plan from its first hook to its last."""
    PARTLY_PLANNED = "partly_planned"
    """Followed a plan for part of the step: the step diverged, took more memory, or was recognised late."""
    BY_RULE = "by_rule"
    """Followed no plan: the default rule moved its tensors."""
    FAILED = "failed"
    """Ended by an exception."""

    def __str__(self) -> str:
        return self.value.replace("_", " ")


def hidden_fraction(stall_us: float, copy_us: float) -> float | None:
    """Share of the copies' time during which compute did not wait for them; None if nothing was copied."""
    return None if not copy_us else max(0.0, 1.0 - stall_us / copy_us)


@dataclass(frozen=True, slots=True)
class CopySpan:
    """Copy of one piece of a move, on the device's clock: microseconds since the first timed step began."""

    direction: str
    start_us: float
    end_us: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class WaitSpan:
    """Interval in which compute waited for a copy or recomputed a storage, on the clock of `CopySpan`."""

    kind: str
    """Direction of the copy, "out" or "in"; "recompute" for a recomputation, without a copy."""
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class StepSpan:
    """Timed step on the clock of `CopySpan`, with the host's time at its beginning."""

    number: int
    """Index of the step among all steps that ended, from 0."""
    kind: str
    start_us: float
    end_us: float
    host_us: float
    """Value of the device's `host_us` when the host began the step. On a GPU not later than `start_us`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSpans:
    """Latest waits, steps and memory readings. Copies are in `Metrics.spans`."""

    waits: tuple[WaitSpan, ...] = ()
    steps: tuple[StepSpan, ...] = ()
    memory: tuple[tuple[float, int], ...] = ()
    """Device memory at hooks of timed steps: `host_us`, bytes allocated."""


# --- metrics

MAX_SPANS = 20_000
"""Number of latest copies kept for `save_trace`, and of latest memory readings."""

MAX_WAITS = 10_000
"""Number of latest waits and recomputations kept: half of MAX_SPANS, as a storage has two copies and one wait."""

MAX_STEPS = 1_000
"""Number of latest timed steps whose bounds are kept."""


class _BegunStep(NamedTuple):
    number: int
    begin: Event
    host_us: float


@dataclass(slots=True, kw_only=True)
class Counters:
    """Counts of the work of swapping, for a report."""

    timed_steps: int = 0
    """Timed steps that have begun. `stall_us`, `copy_us` and `hidden_fraction` cover only these."""
    bytes_swapped_out: int = 0
    bytes_swapped_in: int = 0
    bytes_reclaimed: int = 0
    """Device memory freed after copies out. Includes storages no longer needed."""
    bytes_reclaimed_by_allocator: int = 0
    """Part of `bytes_reclaimed` that the device's allocator itself reclaimed during an allocation."""
    state_bytes_swapped_out: int = 0
    """Bytes of optimizer state copied out. No other counter includes them."""
    state_bytes_swapped_in: int = 0
    parameter_bytes_swapped_out: int = 0
    """Bytes of parameters copied out because they were written. No other counter includes them."""
    parameter_bytes_swapped_in: int = 0
    gradient_bytes_swapped_out: int = 0
    """Bytes of gradients copied out. No other counter includes them."""
    gradient_bytes_swapped_in: int = 0
    swap_ins_on_demand: int = 0
    """Swap-ins that began at the use."""
    prefetches: int = 0
    """Swap-ins that began before the use."""
    budget_misses: int = 0
    """Memory checks and requests for room that found memory above the budget and nothing left to reclaim."""
    fallbacks: int = 0
    """Storages that stayed on the device because no pinned memory was left or the device refused the copy."""
    recomputed: int = 0
    """Storages dropped to be recomputed. `recomputations`: recipes that ran for them."""
    bytes_recomputed: int = 0
    """Bytes of the dropped storages."""
    bytes_held: int = 0
    """Bytes of unsaved storages that were held as sources of recipes."""
    recomputations: int = 0
    proofs: int = 0
    """Recipes whose result was compared with the kept original at its first use."""
    packed_groups: int = 0
    """Packed groups of small storages. Each group crossed the link in one copy."""
    pageable_swap_outs: int = 0
    """Swap-outs to pageable host memory, because no more memory could be pinned and the storage could not stay."""
    oom_retries: int = 0
    """Second attempts after a failed allocation: by swap-ins, operators of recorded steps, or replays."""
    steps_run_again: int = 0
    """Runs of a step that `run_step` repeated, each with a smaller budget."""
    snapshots: int = 0
    """Snapshots taken. `snapshot_bytes`: their total size."""
    snapshot_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class Totals(Counters):
    """Sums since the executor began."""

    steps_by_kind: Counter[StepKind] = field(default_factory=Counter)
    """Completed and failed steps, by kind. Steps in a graph capture or in a forked child are not counted."""
    stall_us: float = 0.0
    copy_us: float = 0.0
    recompute_us: float = 0.0
    """Time in which compute recomputed dropped storages in timed steps, without the comparisons."""
    kept_by_reason: Counter[str] = field(default_factory=Counter)
    not_recomputed_by_reason: Counter[str] = field(default_factory=Counter)
    """Number of storages that a plan recomputes but that were swapped or kept instead, by reason."""
    warnings: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Warnings by unformatted message: the first formatted message, and how often it occurred."""

    def counters(self) -> dict[str, int]:
        """Return only the counters, by name."""
        return {f.name: getattr(self, f.name) for f in fields(Counters)}

    @property
    def hidden_fraction(self) -> float | None:
        """Share of the copies' time during which compute did not wait for them; None if nothing was timed."""
        return hidden_fraction(self.stall_us, self.copy_us)


class Metrics:
    """Counters and timings of one executor. Adds pairs of timed events to `Totals` once they are complete."""

    def __init__(self, *, host_us: Callable[[], float] = lambda: 0.0) -> None:
        """`host_us()`: clock `host_us` of the device."""
        self.totals = Totals()
        self.timed = False
        self.host_us = host_us
        self.memory: deque[tuple[float, int]] = deque(maxlen=MAX_SPANS)
        """Memory readings in timed steps, appended by memory checks: `host_us`, bytes allocated."""
        self.step: StepSums | None = None
        """Sums of the running or latest step; None: it is not timed."""
        self.spans: deque[CopySpan] = deque(maxlen=MAX_SPANS)
        self._origin: Event | None = None
        self._origin_us = 0.0
        """Time of the current origin on the clock of the spans. The first origin is the zero of that clock."""
        self._next_origin: Event | None = None
        self._recomputations: deque[tuple[Event, Event]] = deque()
        # The last field of each entry holds the sums of its step.
        self._waits: deque[tuple[Event, Event, Direction, StepSums | None]] = deque()
        self._moves: deque[tuple[Move, str, StepSums | None]] = deque()
        self._begun: _BegunStep | None = None
        """Running step; None: it is not timed."""
        self._ended: deque[tuple[_BegunStep, Event, StepKind]] = deque()
        """Timed steps that ended on the host but not yet on the device."""
        # Plain tuples with the fields of `WaitSpan` and `StepSpan`: the garbage collector does not scan tuples of numbers.
        self._wait_spans: deque[tuple[str, float, float]] = deque(maxlen=MAX_WAITS)
        self._step_spans: deque[tuple[int, str, float, float, float]] = deque(maxlen=MAX_STEPS)
        self._resolving = threading.Lock()
        """Lock under which one thread resolves. Other threads only append to the deques above, which is atomic."""

    def warn(self, log: logging.Logger, message: str, *values: object) -> None:
        """Log a warning if it is the first with this `message`. The report lists it once, with a count."""
        text, count = self.totals.warnings.get(message, (message % values, 0))
        self.totals.warnings[message] = text, count + 1
        if not count:
            log.warning(message, *values)

    def begin_step(self, compute: Stream, *, timed: bool) -> None:
        self.timed, self.step = False, None
        if timed:
            self.time_step(compute)

    def time_step(self, compute: Stream) -> None:
        """Begin to time the step, unless it is timed already."""
        if self.timed:
            return
        self.timed = True
        self.totals.timed_steps += 1
        host_us = self.host_us()
        origin = compute.record(timed=True)
        self.step = StepSums(origin)
        self._begun = _BegunStep(self.totals.steps_by_kind.total(), origin, host_us)
        if self._origin is None:
            self._origin = origin
        # A GPU reports elapsed milliseconds as a 32-bit float. After an hour its resolution is 0.25 ms, so the origin must
        # move.
        self._next_origin = origin

    def end_step(self, kind: StepKind, compute: Stream | None = None) -> None:
        """End a step of `kind`. Work between steps is not timed. `compute`: stream on which the step ends; None: the step's own
        time is not needed."""
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
        """True if `resolve` has added all of a step's times to its sums. Never waits."""
        if not sums.is_over:
            return False
        # Each `list` call is atomic; other threads may append meanwhile.
        waiting = (*list(self._waits), *list(self._moves))
        return all(entry[-1] is not sums for entry in waiting)

    def time_of(self, sums: StepSums) -> StepTime | None:
        """Return the times of a step, or None while the device runs it. Its copies may run longer. Never waits."""
        self.resolve()
        if not sums.is_over or any(entry[-1] is sums for entry in list(self._waits)):
            return None
        return StepTime(sums.step_us, sums.step_us - sums.stall_us)

    def wait(self, compute: Stream, event: Event, direction: Direction) -> None:
        """Order `compute` after a copy's `event`. In a timed step, measure how long compute waits."""
        if not self.timed:
            compute.wait(event)
            return
        before = compute.record(timed=True)
        compute.wait(event)
        after = compute.record(timed=True)
        self._waits.append((before, after, direction, self.step))

    @contextmanager
    def timing_recomputation(self, compute: Stream) -> Iterator[None]:
        """Context in which `compute` recomputes a dropped storage. In a timed step, its time is measured."""
        if not self.timed:
            yield
            return
        before = compute.record(timed=True)
        yield
        self._recomputations.append((before, compute.record(timed=True)))

    def moved(self, move: Move, direction: str, nbytes: int) -> None:
        if direction == "out":
            self.totals.bytes_swapped_out += nbytes
        else:
            self.totals.bytes_swapped_in += nbytes
        if move.timed:
            self._moves.append((move, direction, self.step))

    def copied(self, start: Event, done: Event, direction: str, nbytes: int) -> None:
        """Note a copy of `nbytes` between two timed events of a timed step. The bytes are counted elsewhere."""
        move = Move.known(nbytes, done)
        move.pieces.append(Piece(start, done, nbytes))
        self._moves.append((move, direction, self.step))

    def resolve(self) -> tuple[CopySpan, ...]:
        """Add all complete times to the sums and return the latest copies. Never waits. Any thread may call it."""
        with self._resolving:
            if self._origin is not None and self._origin.query():
                self._move_origin(self._origin)
                while self._waits and self._waits[0][1].query():
                    before, after, direction, sums = self._waits.popleft()
                    stall_us = self._add_span(direction, before, after)
                    self.totals.stall_us += stall_us
                    if sums is not None:
                        sums.stall_us += stall_us
                while self._recomputations and self._recomputations[0][1].query():
                    self.totals.recompute_us += self._add_span("recompute", *self._recomputations.popleft())
                while self._ended and self._ended[0][1].query():
                    self._add_step(*self._ended.popleft())
                for _ in range(len(self._moves)):
                    entry = self._moves.popleft()
                    if not self._add_up(*entry):
                        self._moves.append(entry)
            return tuple(self.spans)

    def timed_spans(self) -> TimedSpans:
        """Return the latest resolved waits and steps, and the memory readings up to the last resolved step."""
        with self._resolving:
            later = [begun.host_us for begun in (self._begun, *(ended[0] for ended in list(self._ended))) if begun is not None]
            until_us = min(later, default=inf)
            memory = tuple(reading for reading in list(self.memory) if reading[0] < until_us)
            waits = tuple(WaitSpan(*fields) for fields in self._wait_spans)
            return TimedSpans(waits=waits, steps=tuple(StepSpan(*fields) for fields in self._step_spans), memory=memory)

    def _add_span(self, kind: str, before: Event, after: Event) -> float:
        """Store the span between two events of compute. Returns its length in us."""
        assert self._origin is not None
        took_us, start_us = after.elapsed_us(before), self._origin_us + before.elapsed_us(self._origin)
        self._wait_spans.append((kind, start_us, start_us + took_us))
        return took_us

    def _add_step(self, begun: _BegunStep, end: Event, kind: StepKind) -> None:
        assert self._origin is not None
        start_us = self._origin_us + begun.begin.elapsed_us(self._origin)
        end_us = start_us + end.elapsed_us(begun.begin)
        self._step_spans.append((begun.number, kind.value, start_us, end_us, begun.host_us))

    def _move_origin(self, origin: Event) -> None:
        """Move the origin to the beginning of the latest timed step, once the device has reached that."""
        following = self._next_origin
        if following is not None and following is not origin and following.query():
            self._origin_us += following.elapsed_us(origin)
            self._origin = following

    def _add_up(self, move: Move, direction: str, sums: StepSums | None) -> bool:
        """Add the times of the complete pieces of `move`. Returns True if no more pieces will come."""
        ended = move.ended  # read first: another thread may be handing over the last piece
        while move.pieces and move.pieces[0].end.query():
            assert self._origin is not None
            piece = move.pieces.popleft()
            start_us, copy_us = self._origin_us + piece.start.elapsed_us(self._origin), piece.end.elapsed_us(piece.start)
            self.totals.copy_us += copy_us
            if sums is not None:
                sums.copy_us += copy_us
            self.spans.append(CopySpan(direction, start_us, start_us + copy_us, piece.nbytes))
        return ended and not move.pieces
