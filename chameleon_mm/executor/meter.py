"""Counts and times of what the executor did.

    meter.waited(compute, event)          # a wait of compute on a copy: how long it really waited is the stall
    meter.moved(move, "out")              # a copy's own time
    meter.totals                          # bytes, reasons, fallbacks; hidden share = 1 - stall / copy time

Times need timed events, ten times as dear as untimed ones on a GPU, so a step is timed or not as a whole.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from chameleon_mm.device import Event, Stream
from chameleon_mm.transfer import Move

MAX_SPANS = 20_000
"""Copies kept for `save_trace`: the latest."""


@dataclass(slots=True)
class CopySpan:
    """One copy on the device's clock, in microseconds since the meter's origin."""

    direction: str
    start_us: float
    end_us: float
    nbytes: int


@dataclass(slots=True)
class Totals:
    """Sums since the executor began."""

    bytes_swapped_out: int = 0
    bytes_swapped_in: int = 0
    bytes_reclaimed: int = 0
    swap_ins_on_demand: int = 0
    prefetches: int = 0
    uses_on_device: int = 0
    """Uses that found their storage on the device: never left, still alive elsewhere, or prefetched."""
    budget_misses: int = 0
    """Looks at memory that found it above the budget with nothing left to give back."""
    fallbacks: int = 0
    """Storages that stayed on the device because no pinned memory was to be had."""
    oom_retries: int = 0
    stall_us: float = 0.0
    copy_us: float = 0.0
    timed_steps: int = 0
    kept_by_reason: Counter[str] = field(default_factory=Counter)

    @property
    def hidden_fraction(self) -> float | None:
        """Share of the copies' time during which compute did not wait for them; None when nothing was timed."""
        return None if self.copy_us == 0 else max(0.0, 1.0 - self.stall_us / self.copy_us)


class Meter:
    """Resolves pairs of timed events into `Totals` once they are complete."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.timed = False
        self.spans: deque[CopySpan] = deque(maxlen=MAX_SPANS)
        self._origin: Event | None = None
        self._waits: deque[tuple[Event, Event]] = deque()
        self._moves: deque[tuple[Move, str, int]] = deque()

    def begin_step(self, compute: Stream, *, timed: bool) -> None:
        self.timed = timed
        if timed:
            self.totals.timed_steps += 1
            if self._origin is None:
                self._origin = compute.record(timed=True)

    def wait(self, compute: Stream, event: Event) -> None:
        """Order `compute` after `event`, timing how long that holds it up when this step is timed."""
        if not self.timed:
            compute.wait(event)
            return
        before = compute.record(timed=True)
        compute.wait(event)
        self._waits.append((before, compute.record(timed=True)))

    def moved(self, move: Move, direction: str, nbytes: int) -> None:
        if direction == "out":
            self.totals.bytes_swapped_out += nbytes
        else:
            self.totals.bytes_swapped_in += nbytes
        if move.timed:
            self._moves.append((move, direction, nbytes))

    def resolve(self) -> None:
        """Add up what is complete by now; never waits."""
        while self._waits and self._waits[0][1].query() and self._waits[0][0].query():
            before, after = self._waits.popleft()
            self.totals.stall_us += after.elapsed_us(before)
        unresolved: deque[tuple[Move, str, int]] = deque()
        for move, direction, nbytes in self._moves:
            if move.cancelled or not move.timed:
                continue  # taken back, or cut short: it has no time of its own
            if move.start is None or move.done is None or not (move.start.query() and move.done.query()):
                unresolved.append((move, direction, nbytes))
                continue
            self.totals.copy_us += move.done.elapsed_us(move.start)
            if self._origin is not None and self._origin.query():
                start = move.start.elapsed_us(self._origin)
                self.spans.append(CopySpan(direction, start, start + move.done.elapsed_us(move.start), nbytes))
        self._moves = unresolved
