"""Sums of one step's times, of which each part is added once the device has come to it.

sums = StepSums(begin)              # a timed event, as the step begins
sums.stall_us += ...                # by `Metrics.resolve`, at later hooks and steps
sums.end = compute.record(timed=True)
metrics.is_complete(sums)           # nothing will be added any more: sums.step_us
"""

from __future__ import annotations

from chameleon_mm.device import Event


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
