"""Pins further chunks for a pool, when needed or ahead of it, and frees chunks: one thread at a time, never under its lock.

    with resizing:                                  # another thread pins: wait for its chunk, it may do
        with ledger.lock: carve -> done             # ... or blocks came back meanwhile
                          make_room                 # how large a chunk; unused ones leave for it
        give back what leaves; pin; take it in      # slow, and the device may have to be waited for
    again                                           # another thread may have been faster with what came

    reservation = pool.reserve("8GiB", background=True)     # a thread pins it chunk by chunk; allocations that fit go on
    each chunk:  cancelled, or the pool closed or gone -> end  |  pin it -> progress(done_bytes, total_bytes)
    reservation.wait()                                      # True; raises what pinning raised

Pinning runs at a few GB/s. Whoever finds a free block meanwhile goes on; `ledger.lock` is held for microseconds alone.

An interrupt (`KeyboardInterrupt`, a signal handler that raises) may come between any two lines here. Nothing says "somebody is
pinning" but the lock itself, which goes with the thread that leaves; and a chunk is at every moment in one of the lists of
`Chunks`, from which the next call takes it in or gives it back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.pinned.block import Owner, PinnedBlock
from chameleon_mm.pinned.host_memory import MemoryLimit
from chameleon_mm.pinned.ledger import Ledger

_log = logging.getLogger(__name__)

Progress = Callable[[int, int], object]
"""Called with `(done_bytes, total_bytes)` after each chunk, on the thread that pins."""

PinNext = Callable[[int], int | None]
"""Pins a chunk of at most so many bytes; returns its bytes, None where there is no pool to pin for any more."""

_POLL_S = 0.001
"""Seconds between two looks of a waiting `allocate`. No notification: a release may run while its lock is held."""

_LONGEST_POLL_S = 0.25
"""The longest interval at which it asks for another chunk, which costs much where the device refuses again."""


class Reservation:
    """Progress of a `pool.reserve`. Any thread may ask."""

    def __init__(self, total_bytes: int, progress: Progress | None = None) -> None:
        self.total_bytes: Final = total_bytes
        """Bytes that were asked for, in whole units."""
        self.reserved_bytes = 0
        """Bytes pinned so far. They stay with the pool, whatever becomes of the rest."""
        self._progress = progress
        self._error: BaseException | None = None
        self._cancelled = False
        self._ended = threading.Event()

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
        return f"<Reservation {state}: {self.reserved_bytes} of {self.total_bytes} bytes>"

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
                self.reserved_bytes,
                self.total_bytes,
                str(error),
            )
            self._error = error.with_traceback(None)  # which holds this frame, and so this object: a cycle
        finally:
            self._ended.set()

    def _pin_all(self, pin_next: PinNext) -> None:
        while self.reserved_bytes < self.total_bytes and not self._cancelled:
            pinned = pin_next(self.total_bytes - self.reserved_bytes)
            if pinned is None:
                return
            self.reserved_bytes += pinned
            if self._progress is not None:
                self._progress(self.reserved_bytes, self.total_bytes)


class Growth:
    """Grows and shrinks the pool whose books `ledger` are, within `limit`. Thread-safe."""

    def __init__(self, ledger: Ledger, limit: MemoryLimit) -> None:
        self._ledger = ledger
        self._chunks = ledger.chunks
        self._limit = limit
        self._resizing = threading.Lock()  # taken before `ledger.lock` where both are

    def allocate_or_pin(self, owner: Owner, nbytes: int) -> PinnedBlock:
        """Allocate a block, out of another chunk where need be. Raises `HostMemoryExhausted`, `PoolStateError` if the pool is
        closed."""
        ledger, chunks, limit = self._ledger, self._chunks, self._limit
        while True:
            with self._resizing:
                with ledger.lock:
                    ledger.check_open("allocate")
                    ledger.drain()
                    chunks.admit()
                    block = ledger.allocate(owner, nbytes)
                if block is not None:
                    return block
                if ledger.shrinking:
                    if not self._shrink(wait=True):
                        raise HostMemoryExhausted(
                            f"pinned pool: asked for {nbytes} bytes, but the limit was lowered to {limit.nbytes} bytes and "
                            f"{chunks.reserved_bytes} are still reserved, in chunks with live blocks; release these, or raise "
                            f"limit_bytes"
                        )
                    continue
                limit.grow(chunks.reserved_bytes)
                with ledger.lock:
                    wanted = chunks.make_room(nbytes, limit.nbytes)
                self._pin(wanted)

    def wait_for(self, owner: Owner, nbytes: int, reason: str, most_s: float) -> PinnedBlock:
        """Wait for a block that others' releases make room for; `reason` is why there was none.

        Raises `HostMemoryExhausted` after `most_s` seconds, and at once for what can never fit.
        """
        ledger = self._ledger
        started = now = time.monotonic()
        deadline, pause = started + most_s, _POLL_S
        pin_again = started + pause
        while now < deadline and self._chunks.free_list.round_up(nbytes) <= self._limit.nbytes:
            time.sleep(min(_POLL_S, deadline - now))
            now = time.monotonic()
            with ledger.lock:
                ledger.check_open("allocate")
                ledger.drain()
                block = ledger.allocate(owner, nbytes)
            if block is not None:
                return block
            if now >= pin_again:
                try:
                    return self.allocate_or_pin(owner, nbytes)
                except HostMemoryExhausted as refusal:
                    reason = str(refusal)
                pause = min(2 * pause, _LONGEST_POLL_S)
                pin_again = time.monotonic() + pause
        raise HostMemoryExhausted(
            f"{reason} (waited {now - started:.1f} s for other threads to release blocks, of max_wait_s={most_s})"
        )

    def pin_ahead(self, most: int) -> int | None:
        """Pin one chunk of a reservation, of at most `most` bytes; None if the pool is closed. Raises `HostMemoryExhausted`."""
        ledger, chunks = self._ledger, self._chunks
        with self._resizing:
            with ledger.lock:
                if ledger.closed:
                    return None
                chunks.admit()
            wanted = min(most, chunks.largest_bytes)
            self.check_room(wanted, wanted)
            self._pin(wanted)
            return wanted

    def check_room(self, asked: int, total: int) -> None:
        """Raise `HostMemoryExhausted` if a reservation of `asked` bytes, in units `total`, would pass the limit."""
        chunks, limit = self._chunks, self._limit
        limit.grow(chunks.reserved_bytes)
        room = chunks.room(limit.nbytes)
        if total > room:
            raise HostMemoryExhausted(
                f"reserve: asked for {asked} bytes more, but the limit is {limit.nbytes} bytes and {chunks.reserved_bytes} "
                f"are reserved; reserve at most {room}, or raise limit_bytes"
            )

    def set_limit(self, nbytes: int) -> None:
        """Set the limit, and free unused chunks until no more than that is reserved, if they are enough. The host waits for
        the device where it still uses a chunk that has to go."""
        with self._resizing:
            with self._ledger.lock:
                self._ledger.check_open("limit_bytes")
                self._ledger.shrinking = True  # first: after an interrupt the next allocation finds out what is left to do
            self._limit.set(nbytes)
            self._shrink(wait=True)

    def shrink(self) -> None:
        """Free unused chunks that the device is done with, as far as more is reserved than the limit."""
        with self._resizing:
            self._shrink(wait=False)

    def _shrink(self, *, wait: bool) -> bool:
        """Free unused chunks beyond the limit, under `_resizing`. Returns whether no more than that is reserved now."""
        ledger, chunks = self._ledger, self._chunks
        with ledger.lock:
            ledger.drain()
            chunks.admit()
            enough = chunks.shrink(self._limit.nbytes, wait=wait)
            ledger.shrinking = not enough
        chunks.free()
        return enough

    def free_unused(self, *, wait: bool) -> int:
        """Free the chunks without a block; returns their bytes. `wait`: also those that the device still uses."""
        ledger, chunks = self._ledger, self._chunks
        with self._resizing:
            with ledger.lock:
                ledger.drain()
                chunks.admit()
                leaving = [chunk for chunk in chunks.unused() if wait or chunk.pending.drop_complete()]
                for chunk in leaving:
                    chunks.detach(chunk)
            chunks.free()
        return sum(chunk.nbytes for chunk in leaving)

    def _pin(self, nbytes: int) -> None:
        """Pin another chunk. Under `_resizing`, so that what leaves is gone before the limit is used up again."""
        chunks = self._chunks
        chunks.free()
        try:
            chunks.pin(nbytes)
        except MemoryError as error:
            raise HostMemoryExhausted(
                f"pinned pool: asked the device for a chunk of {nbytes} bytes, got: {error}. {chunks.reserved_bytes} of at "
                f"most {self._limit.nbytes} bytes are reserved"
            ) from error
        with self._ledger.lock:
            chunks.admit()
