"""Times one step on the device, and where compute waited for copies: known once the step's last event is complete.

timing = StepTiming(compute)          # the step begins
timing.waited(before, after, "in", tensor)    # compute was made to wait for a copy, of this storage of the plan
timing.end(compute)                   # it is over; nobody waits for that
timing.result()                       # None: not yet
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal, NamedTuple

from chameleon_mm.device import Event, Stream

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
