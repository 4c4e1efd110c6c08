"""Bounds on the peak of device memory in an interval of time.

    watch = PeakWatch(reading_bytes)              # the interval begins, with the device's peak until then
    watch.note(reading_bytes, seen_bytes)         # call often: a reset of the device's peak is detected only here
    watch.include(part)                           # the watch of a part of this interval
    watch.peak()                                  # lower bound, upper bound

A device reports its peak since the process began or since the last reset. If that peak was reached before the interval, it is
only an upper bound, and the bytes that hooks saw are the lower bound. The library itself never resets the peak, because users
read it.
"""

from __future__ import annotations

from typing import NamedTuple

from chameleon_mm.units import format_size


class Peak(NamedTuple):
    """Bounds of a peak. Equal bounds: the peak is known."""

    at_least_bytes: int
    at_most_bytes: int | None
    """Upper bound; None if unknown."""

    @property
    def prefix(self) -> str:
        """Words before the lower bound in a text; empty if the peak is known."""
        return "" if self.at_least_bytes == self.at_most_bytes else "at least "

    def __str__(self) -> str:
        return self.prefix + format_size(self.at_least_bytes)


class PeakWatch:
    """Watch of a device's peak over an interval, by readings of the device's own peak. A lower reading shows a reset."""

    def __init__(self, peak_bytes: int) -> None:
        self._before_bytes = self.last_bytes = peak_bytes
        """The latest reading. Read-only for other classes."""
        self._most_bytes = 0
        self._was_reset = False

    def note(self, peak_bytes: int, seen_bytes: int = 0) -> None:
        """Add a reading of the device's peak. `seen_bytes`: bytes allocated at that moment."""
        if peak_bytes < self.last_bytes:
            # The peak was reset. Later readings belong to this interval; a peak between the last `note` and the reset is lost.
            self._was_reset, self._before_bytes = True, 0
        if peak_bytes > self._before_bytes:
            seen_bytes = peak_bytes
        self._most_bytes = max(self._most_bytes, seen_bytes)
        self.last_bytes = peak_bytes

    def include(self, part: PeakWatch) -> None:
        """Add the readings of the watch of a part of this interval."""
        self._most_bytes = max(self._most_bytes, part._most_bytes)
        if part._was_reset:
            self._was_reset, self._before_bytes = True, 0

    def peak(self) -> Peak:
        return Peak(self._most_bytes, None if self._was_reset else max(self._most_bytes, self.last_bytes))
