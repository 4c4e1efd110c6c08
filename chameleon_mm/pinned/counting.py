"""Allocator wrappers that count what goes through them, and limit what the user of one may hold.

    pool = StatisticsAllocator(PinnedPool("8GiB"))
    pool.stats().to_dict() -> {"allocations": 120, "live_bytes": 8192, "peak_live_bytes": ..., "sizes": {4096: 80, 1048576: 40}}

    cache = LimitedAllocator(pool, "2GiB")        # one of several users of a pool, each with a share
    cache.allocate(nbytes)                        # HostMemoryExhausted where its live blocks would pass 2 GiB

Bytes are as asked for, so that they mean the same around every allocator: what the pool makes of them is in
`pool.inner.stats()`, and the pool's own `max_bytes` is about what is pinned, fragmentation included.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any, Final

from chameleon_mm.device.protocols import Event, Stream
from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.pinned.allocator import Allocator, AllocatorWrapper, block_nbytes
from chameleon_mm.pinned.block import PinnedBlock, Ticket
from chameleon_mm.units import format_size, parse_size


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationStats:
    """Counts of what went through an allocator so far, and what is live. Sizes in bytes, as asked for."""

    allocations: int
    releases: int
    refusals: int
    """Requests that ended in an error."""
    num_live: int
    live_bytes: int
    total_bytes: int
    """Bytes of all blocks ever given."""
    peak_num_live: int
    peak_live_bytes: int
    sizes: dict[int, int]
    """Blocks ever given, by size rounded up to a power of two: `{4096: 3}` says that 3 had 2049 to 4096 bytes."""

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)


class _Counting(AllocatorWrapper):
    """Counts live bytes and releases. A release, which may happen in a finaliser, takes no lock: it is queued, and
    counted by the next call."""

    def __init__(self, inner: Allocator) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._returned: deque[int] = deque()  # bytes of blocks whose release is not booked yet
        self._live_bytes = self._releases = 0

    def note_released(self, ticket: Ticket, events: tuple[Event, ...]) -> None:
        inner = self._take_inner(ticket, events)
        nbytes = inner.nbytes
        inner.release()
        self._returned.append(nbytes)

    def _drain(self) -> None:
        """Book the releases so far. Under the lock."""
        while self._returned:
            self._live_bytes -= self._returned.popleft()
            self._releases += 1


class StatisticsAllocator(_Counting):
    """Statistics of `inner`'s use through this wrapper. Thread-safe where `inner` is."""

    def __init__(self, inner: Allocator) -> None:
        super().__init__(inner)
        self._allocations = self._refusals = self._total_bytes = 0
        self._peak_num_live = self._peak_live_bytes = 0
        self._sizes: dict[int, int] = {}

    def allocate(self, nbytes: int | str, stream: Stream | None = None) -> PinnedBlock:
        try:
            block = super().allocate(nbytes, stream)
        except Exception:
            with self._lock:
                self._refusals += 1
            raise
        nbytes = block.nbytes
        with self._lock:
            self._drain()
            self._allocations += 1
            self._live_bytes += nbytes
            self._total_bytes += nbytes
            self._peak_num_live = max(self._peak_num_live, self._allocations - self._releases)
            self._peak_live_bytes = max(self._peak_live_bytes, self._live_bytes)
            size = 1 << (nbytes - 1).bit_length() if nbytes else 0
            self._sizes[size] = self._sizes.get(size, 0) + 1
        return block

    def stats(self) -> AllocationStats:
        """Statistics of what went through, every release up to here counted. Not for finalizers: it takes a lock."""
        with self._lock:
            self._drain()
            return AllocationStats(
                allocations=self._allocations,
                releases=self._releases,
                refusals=self._refusals,
                num_live=self._allocations - self._releases,
                live_bytes=self._live_bytes,
                total_bytes=self._total_bytes,
                peak_num_live=self._peak_num_live,
                peak_live_bytes=self._peak_live_bytes,
                sizes=dict(sorted(self._sizes.items())),
            )


class LimitedAllocator(_Counting):
    """An allocator that limits the live blocks that it hands out of `inner` to `max_bytes` (int bytes or "2GiB").
    Thread-safe where `inner` is."""

    def __init__(self, inner: Allocator, max_bytes: int | str) -> None:
        super().__init__(inner)
        self.limit_bytes: Final = parse_size(max_bytes, what="max_bytes")

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
            if self._live_bytes + nbytes > self.limit_bytes:
                raise HostMemoryExhausted(
                    f"limited allocator: expected at most {self.limit_bytes} bytes ({format_size(self.limit_bytes)}) in live "
                    f"blocks, got a request for {nbytes} beside {self._live_bytes} live; release blocks, or raise max_bytes"
                )
            self._live_bytes += nbytes  # before it is there, or two threads would pass the limit together
        try:
            return super().allocate(nbytes, stream)
        except BaseException:
            with self._lock:
                self._live_bytes -= nbytes
            raise
