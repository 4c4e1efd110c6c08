"""How long one step took on the device, and where compute waited for copies: known once its last event is complete.

timing = StepTiming(compute)          # the step begins
timing.waited(before, after, tensor)  # compute was made to wait, for this storage of the plan
timing.end(compute)                   # it is over; nobody waits for that
timing.result()                       # None: not yet
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from chameleon_mm.device import Event, Stream


class StepTime(NamedTuple):
    """What a step took, in microseconds of the device's clock."""

    step_us: float
    stalls_us: dict[int, float]
    """By the plan's number of the storage: how long compute waited for its copy back, 0 included."""


class StepTiming:
    """One step's timed events. Not thread-safe."""

    __slots__ = ("_end", "_start", "_waits")

    def __init__(self, compute: Stream) -> None:
        self._start = compute.record(timed=True)
        self._end: Event | None = None
        self._waits: list[tuple[Event, Event, int]] = []

    def waited(self, before: Event, after: Event, tensor: int) -> None:
        """Between the two events compute did nothing but wait for storage number `tensor`."""
        self._waits.append((before, after, tensor))

    def end(self, compute: Stream) -> None:
        self._end = compute.record(timed=True)

    def result(self) -> StepTime | None:
        """What it took; None while the device is still at it. Never waits."""
        if self._end is None or not (self._end.query() and self._start.query()):
            return None
        stalls: Counter[int] = Counter()
        for before, after, tensor in self._waits:
            if after.query() and before.query():
                stalls[tensor] += max(0.0, after.elapsed_us(before))  # type: ignore[assignment]  # a counter of times
        return StepTime(self._end.elapsed_us(self._start), dict(stalls))
