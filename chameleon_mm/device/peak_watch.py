"""Bounds on the peak of device memory in an interval of time.

    watch = PeakWatch(device)       # the interval begins
    watch.note()                    # call often: a reset of the device's peak is detected only here
    watch.end()
    watch.peak(seen_bytes)          # lower bound, upper bound

A device reports its peak since the process began or since the last reset. If that peak was reached before the interval, it is
only an upper bound, and the bytes that hooks saw are the lower bound. The library itself never resets the peak, because users
read it.
"""

from __future__ import annotations

from typing import NamedTuple

from chameleon_mm.device.protocols import Device


class Peak(NamedTuple):
    """Bounds of a peak. Equal bounds: the peak is known."""

    at_least_bytes: int
    at_most_bytes: int | None
    """Upper bound; None if unknown."""


def peak_between(before_bytes: int, after_bytes: int, seen_bytes: int) -> Peak:
    """Bounds of the peak between two readings of the device's peak. `seen_bytes`: most bytes seen allocated in between."""
    if after_bytes == before_bytes:
        return Peak(seen_bytes, max(seen_bytes, before_bytes))
    known = max(seen_bytes, after_bytes)
    return Peak(known, known if after_bytes > before_bytes else None)  # None: it was reset in between


class PeakWatch:
    """Watch of a device's peak over an interval. A reset is detected if the device reports less than at the last `note`, so
    call `note` often."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._before_bytes = self.last_bytes = device.peak_allocated_bytes()
        """The device's peak at the last `note`. Read-only for other classes."""
        self._most_bytes = device.allocated_bytes()
        self._was_reset = self._is_over = False

    def end(self) -> None:
        """End the interval. Later peaks do not count."""
        self.note()
        self._is_over = True

    def note(self) -> None:
        """Read the device's peak."""
        if self._is_over:
            return
        now = self._device.peak_allocated_bytes()
        if now < self.last_bytes:
            # It was reset. Later readings are of this interval alone; the peak between the last `note` and the reset is lost.
            self._was_reset, self._before_bytes = True, 0
        if now > self._before_bytes:
            self._most_bytes = max(self._most_bytes, now)
        self.last_bytes = now

    def peak(self, seen_bytes: int) -> Peak:
        """Bounds of the peak until the last `note`. `seen_bytes`: bytes seen allocated at some moment of the interval."""
        at_least = max(self._most_bytes, seen_bytes)
        if self._was_reset:
            return Peak(at_least, None)
        return Peak(at_least, max(at_least, self.last_bytes))
