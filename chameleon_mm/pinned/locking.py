"""A lock around an allocator that has none.

    pool = LockedAllocator(SingleThreaded(...))
    allocate, stats:  lock; give back what was released meanwhile; call inner
    release:          onto a deque; nothing else, for it runs in the middle of any line, perhaps of one that holds the lock

`PinnedPool` is thread-safe by itself, and so is every wrapper here: this is for an allocator of one's own.
"""

from __future__ import annotations

import threading
from collections import deque

from chameleon_mm.device.protocols import Event, Stream
from chameleon_mm.pinned.allocator import Allocator, AllocatorWrapper, Stats
from chameleon_mm.pinned.block import PinnedBlock, Ticket


class LockedAllocator(AllocatorWrapper):
    """An allocator that lets one thread at a time call `inner`. Releases reach it with the next call: `close` is one, for the
    last of them."""

    def __init__(self, inner: Allocator) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._returned: deque[PinnedBlock] = deque()

    def allocate(self, nbytes: int | str, stream: Stream | None = None) -> PinnedBlock:
        with self._lock:
            self._drain()
            return super().allocate(nbytes, stream)

    def note_released(self, ticket: Ticket, events: tuple[Event, ...]) -> None:
        self._returned.append(self._take_inner(ticket, events))

    def stats(self) -> Stats:
        with self._lock:
            self._drain()
            return self._inner.stats()

    def close(self) -> None:
        """Pass on the releases up to here."""
        with self._lock:
            self._drain()

    def _drain(self) -> None:
        while self._returned:
            self._returned.popleft().release()
