"""Pins memory ahead of need, chunk by chunk.

reservation = pool.reserve("8GiB", background=True)     # a thread pins it chunk by chunk; allocations that fit go on
...
reservation.wait()                                      # True; raises what pinning raised

each chunk:  cancelled, or the pool closed or gone -> end  |  pin it -> progress(done_bytes, total_bytes)
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)

Progress = Callable[[int, int], object]
"""Called with `(done_bytes, total_bytes)` after each chunk, on the thread that pins."""

PinNext = Callable[[int], int | None]
"""Pins a chunk of at most so many bytes; returns its bytes, None where there is no pool to pin for any more."""


class Reservation:
    """Progress of a `pool.reserve`. Any thread may ask."""

    def __init__(self, total_bytes: int, progress: Progress | None = None) -> None:
        self._total_bytes = total_bytes
        self._reserved_bytes = 0
        self._progress = progress
        self._error: BaseException | None = None
        self._cancelled = False
        self._ended = threading.Event()

    @property
    def total_bytes(self) -> int:
        """Bytes that were asked for, in whole units."""
        return self._total_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes pinned so far. They stay with the pool, whatever becomes of the rest."""
        return self._reserved_bytes

    @property
    def done(self) -> bool:
        """Whether it has ended: complete, cancelled or failed."""
        return self._ended.is_set()

    def cancel(self) -> None:
        """Pin no further chunk. The one under way is finished; the host does not wait for it. What is pinned stays."""
        self._cancelled = True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait, at most `timeout` seconds, until it has ended. Returns whether it has.

        Raises what ended it early: `HostMemoryExhausted` past the limit or where the device pins no more, or what `progress`
        raised. Cancelled, or its pool closed, it ends without an error and with less than `total_bytes`.
        """
        ended = self._ended.wait(timeout)
        if ended and self._error is not None:
            try:
                raise self._error
            finally:
                del self  # the error's traceback holds this frame, which would hold the error: a cycle
        return ended

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else "ended" if self.done else "under way"
        return f"<Reservation {state}: {self._reserved_bytes} of {self._total_bytes} bytes>"

    def carry_out(self, pin_next: PinNext) -> None:
        """Pin chunk after chunk; called by pools alone. Raises what ended it early."""
        try:
            self._pin_all(pin_next)
        finally:
            self._ended.set()

    def carry_out_aside(self, pin_next: PinNext) -> None:
        """Pin as `carry_out` does, on a thread of its own: `wait` raises what ended it early."""
        try:
            self._pin_all(pin_next)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to whoever waits
            _log.warning(
                "chameleon_mm: pinned pool: reserved %d of %d bytes, then: %s",
                self._reserved_bytes,
                self._total_bytes,
                str(error),
            )
            self._error = error.with_traceback(None)  # which holds this frame, and so this object: a cycle
        finally:
            self._ended.set()

    def _pin_all(self, pin_next: PinNext) -> None:
        while self._reserved_bytes < self._total_bytes and not self._cancelled:
            pinned = pin_next(self._total_bytes - self._reserved_bytes)
            if pinned is None:
                return
            self._reserved_bytes += pinned
            if self._progress is not None:
                self._progress(self._reserved_bytes, self._total_bytes)
