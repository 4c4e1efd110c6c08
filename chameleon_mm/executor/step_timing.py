"""How long one step took on the device, and where compute waited for copies: known once its last event is complete.

timing = StepTiming(compute)          # the step begins
timing.waited(before, after, "in", tensor)    # compute was made to wait for a copy, of this storage of the plan
timing.end(compute)                   # it is over; nobody waits for that
timing.result()                       # None: not yet
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from chameleon_mm.device import Event, Stream

Direction = Literal["out", "in"]


class StepTime(NamedTuple):
    """What a step took, in microseconds of the device's clock."""

    step_us: float
    in_stalls_us: dict[int, float]
    """By the plan's number of the storage: how long compute waited for its copy back, 0 included."""
    out_stalls_us: dict[int, float]
    """The same of copies out."""
    busy_us: float
    """Of `step_us`: what is left without any of the waits for copies, of either direction."""


class StepTiming:
    """One step's timed events. Not thread-safe."""

    __slots__ = ("_end", "_start", "_waits")

    def __init__(self, compute: Stream) -> None:
        self._start = compute.record(timed=True)
        self._end: Event | None = None
        self._waits: list[tuple[Event, Event, Direction, int | None]] = []

    def waited(self, before: Event, after: Event, direction: Direction, tensor: int | None) -> None:
        """Between the two events compute did nothing but wait for a copy; None: of no storage of the plan."""
        self._waits.append((before, after, direction, tensor))

    def end(self, compute: Stream) -> None:
        self._end = compute.record(timed=True)

    def result(self) -> StepTime | None:
        """What it took; None while the device is still at it. Never waits."""
        if self._end is None or not (self._end.query() and self._start.query()):
            return None
        step_us = busy_us = self._end.elapsed_us(self._start)
        stalls: dict[Direction, dict[int, float]] = {"in": {}, "out": {}}
        for before, after, direction, tensor in self._waits:
            if after.query() and before.query():
                waited_us = max(0.0, after.elapsed_us(before))
                busy_us -= waited_us
                if tensor is not None:
                    stalls[direction][tensor] = stalls[direction].get(tensor, 0.0) + waited_us
        return StepTime(step_us, stalls["in"], stalls["out"], busy_us)
