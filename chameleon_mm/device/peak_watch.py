"""Bounds the peak of device memory in a stretch of time.

    watch = PeakWatch(device)       # the stretch begins
    watch.note()                    # often: a reset of the device's peak is seen only so
    watch.end()
    watch.peak(seen_bytes)          # at least, at most

A device tells its peak since the process began or somebody reset it. A peak that the process reached before says nothing of the
stretch but that it was no higher; then what hooks saw is a lower bound. The library itself resets nothing: what a user reads is
the user's.
"""

from __future__ import annotations

from typing import NamedTuple

from chameleon_mm.device.protocols import Device


class Peak(NamedTuple):
    """Bounds of a peak; it is known itself where both are the same."""

    at_least_bytes: int
    at_most_bytes: int | None
    """Upper bound; None: not known."""


def peak_between(before_bytes: int, after_bytes: int, seen_bytes: int) -> Peak:
    """Bounds of the peak between two readings of the device's; `seen_bytes`: what was seen allocated in between."""
    if after_bytes == before_bytes:
        return Peak(seen_bytes, max(seen_bytes, before_bytes))
    known = max(seen_bytes, after_bytes)
    return Peak(known, known if after_bytes > before_bytes else None)  # None: somebody reset it in between


class PeakWatch:
    """Watches a device's peak over a stretch of time. A reset is seen where the device tells less than at the last `note`: note
    often."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._before_bytes = self.last_bytes = device.peak_allocated_bytes()
        """The device's peak as it was noted last, which others only read."""
        self._most_bytes = device.allocated_bytes()
        self._was_reset = self._is_over = False

    def end(self) -> None:
        """End the stretch: what comes later is no part of it."""
        self.note()
        self._is_over = True

    def note(self) -> None:
        """Read the device's peak."""
        if self._is_over:
            return
        now = self._device.peak_allocated_bytes()
        if now < self.last_bytes:
            # Somebody reset it: what is told from here on is of this stretch alone, and what there was before that is lost.
            self._was_reset, self._before_bytes = True, 0
        if now > self._before_bytes:
            self._most_bytes = max(self._most_bytes, now)
        self.last_bytes = now

    def peak(self, seen_bytes: int) -> Peak:
        """Bounds of the peak, as far as it was noted; `seen_bytes`: what was seen allocated at some moment."""
        at_least = max(self._most_bytes, seen_bytes)
        if self._was_reset:
            return Peak(at_least, None)
        return Peak(at_least, max(at_least, self.last_bytes))
