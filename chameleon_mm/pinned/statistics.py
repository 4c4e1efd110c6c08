"""Counts what goes through an allocator: calls, bytes, peaks, sizes.

    pool = StatisticsAllocator(PinnedPool("8GiB"))
    pool.stats().to_dict() -> {"allocations": 120, "live_bytes": 8192, "peak_live_bytes": ..., "sizes": {4096: 80, 1048576: 40}}

Bytes are as asked for: what the pool makes of them is in `pool.inner.stats()`.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from chameleon_mm.device.protocols import Event, Stream
from chameleon_mm.pinned.allocator import Allocator, AllocatorWrapper
from chameleon_mm.pinned.block import PinnedBlock, Ticket


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


class StatisticsAllocator(AllocatorWrapper):
    """Statistics of `inner`'s use through this wrapper. Thread-safe where `inner` is."""

    def __init__(self, inner: Allocator) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._returned: deque[int] = deque()  # bytes of blocks whose release is not booked yet
        self._allocations = self._releases = self._refusals = 0
        self._live_bytes = self._total_bytes = 0
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

    def note_released(self, ticket: Ticket, events: tuple[Event, ...]) -> None:
        inner = self._take_inner(ticket, events)
        self._returned.append(inner.nbytes)
        inner.release()

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

    def _drain(self) -> None:
        """Book the releases so far. Under the lock."""
        while self._returned:
            self._live_bytes -= self._returned.popleft()
            self._releases += 1
