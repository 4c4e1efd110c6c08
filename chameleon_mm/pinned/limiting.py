"""A limit on the bytes that a user of an allocator may hold.

    cache = LimitedAllocator(pool, "2GiB")        # one of several users of a pool, each with a share
    cache.allocate(nbytes)                        # HostMemoryExhausted where its live blocks would pass 2 GiB

Bytes are as asked for, so that a limit means the same around every allocator. The pool's own `max_bytes` is about what is
pinned, fragmentation included.
"""

from __future__ import annotations

import threading
from collections import deque

from chameleon_mm.device.protocols import Event, Stream
from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.pinned.allocator import Allocator, AllocatorWrapper, block_nbytes
from chameleon_mm.pinned.block import PinnedBlock, Ticket
from chameleon_mm.units import format_size, parse_size


class LimitedAllocator(AllocatorWrapper):
    """An allocator that limits `inner` to `max_bytes` (int bytes or "2GiB") in live blocks. Thread-safe where `inner` is."""

    def __init__(self, inner: Allocator, max_bytes: int | str) -> None:
        super().__init__(inner)
        self._limit = parse_size(max_bytes, what="max_bytes")
        self._lock = threading.Lock()
        self._returned: deque[int] = deque()  # bytes of blocks whose release is not booked yet
        self._live_bytes = 0

    @property
    def limit_bytes(self) -> int:
        return self._limit

    @property
    def live_bytes(self) -> int:
        """Bytes of live blocks, and of those being allocated now. Not for finalizers: it takes a lock."""
        with self._lock:
            self._drain()
            return self._live_bytes

    def allocate(self, nbytes: int | str, stream: Stream | None = None) -> PinnedBlock:
        """Allocate as `Allocator.allocate` does. Raises `HostMemoryExhausted`, and asks `inner` for nothing, past the limit."""
        nbytes = block_nbytes(nbytes)
        with self._lock:
            self._drain()
            if self._live_bytes + nbytes > self._limit:
                raise HostMemoryExhausted(
                    f"limited allocator: expected at most {self._limit} bytes ({format_size(self._limit)}) in live blocks, got "
                    f"a request for {nbytes} beside {self._live_bytes} live; release blocks, or raise max_bytes"
                )
            self._live_bytes += nbytes  # before it is there, or two threads would pass the limit together
        try:
            return super().allocate(nbytes, stream)
        except BaseException:
            with self._lock:
                self._live_bytes -= nbytes
            raise

    def note_released(self, ticket: Ticket, events: tuple[Event, ...]) -> None:
        inner = self._take_inner(ticket, events)
        nbytes = inner.nbytes
        inner.release()
        self._returned.append(nbytes)

    def _drain(self) -> None:
        while self._returned:
            self._live_bytes -= self._returned.popleft()
