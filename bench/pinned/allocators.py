"""Allocators of host memory side by side: ours, and what else there is, as plain models of addresses and sizes.

    play(trace, allocator); allocator.reserved_bytes, allocator.locked_bytes

Playing a trace of 30 GiB asks for addresses, not for memory: our pool runs on a device that gives tensors without storage, and
so does CuPy's own pool, with an allocator that counts. The models are those of pools that never split: what was once reserved
for a size serves that size for ever.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from chameleon_mm.device.sim import SimDevice
from chameleon_mm.pinned import PinnedBlock, PinnedPool
from chameleon_mm.pinned.replay import ReplayPool


class AddressesOnly(SimDevice):
    """A device whose pinned memory has sizes and no bytes."""

    def alloc_pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def free_pinned(self, memory: Tensor) -> None:
        """Nothing was taken."""


class OursPlayed:
    """`PinnedPool`, alone or behind a `ReplayPool`, as what a trace is played to."""

    def __init__(self, pool: PinnedPool, replay: ReplayPool | None = None, *, every_step: bool = False) -> None:
        self._pool = pool
        self._replay = replay
        self._source = replay or pool
        self._every_step = every_step

    def begin_step(self) -> None:
        if self._replay is not None and self._every_step:
            self._replay.begin_step()

    def allocate(self, nbytes: int) -> PinnedBlock:
        return self._source.allocate(nbytes)

    def release(self, block: PinnedBlock) -> None:
        block.release()

    @property
    def reserved_bytes(self) -> int:
        return self._pool.stats().reserved_bytes

    @property
    def locked_bytes(self) -> int:
        """Bytes of live blocks, each rounded up as the pool does. The arena itself is a live block of the pool."""
        stats = self._pool.stats()
        if self._replay is None:
            return stats.live_bytes
        replayed = self._replay.stats()
        return stats.live_bytes - replayed.arena_bytes + replayed.live_bytes


class SizeBins:
    """A free list for each size that `round_up` gives; memory once reserved for a size serves that size alone.

    `round_up` of CuPy's and torch's pools is the next power of two; that of shape-keyed pools is the size itself.
    """

    def __init__(self, round_up: Callable[[int], int]) -> None:
        self._round_up = round_up
        self._unused: defaultdict[int, int] = defaultdict(int)
        self.reserved_bytes = 0
        self.locked_bytes = 0

    def begin_step(self) -> None:
        """Steps are nothing to it."""

    def allocate(self, nbytes: int) -> int:
        size = self._round_up(nbytes)
        self.locked_bytes += size
        if self._unused[size]:
            self._unused[size] -= 1
        else:
            self.reserved_bytes += size
        return size

    def release(self, block: int) -> None:
        self.locked_bytes -= block
        self._unused[block] += 1


def power_of_two(nbytes: int) -> int:
    """The least power of two of at least `nbytes`, and at least 512."""
    return max(512, 1 << (nbytes - 1).bit_length())


class ListBestFit:
    """Best fit with coalescing over one sorted Python list of free blocks: what one writes first, and what ours must beat."""

    def __init__(self, capacity: int, alignment: int = 4096) -> None:
        self._alignment = alignment
        self._by_size = [(capacity, 0)]
        self._starts = {0: capacity}
        self._ends = {capacity: 0}

    def allocate(self, nbytes: int) -> tuple[int, int]:
        """`(start, size)` of a block. Raises `MemoryError` where none fits."""
        size = -(-nbytes // self._alignment) * self._alignment
        at = bisect_left(self._by_size, (size, 0))
        if at == len(self._by_size):
            raise MemoryError(f"list best fit: expected a free block of {size} bytes, got none; make it larger")
        found, start = self._by_size.pop(at)
        del self._starts[start], self._ends[start + found]
        if found > size:
            self._enter(start + size, found - size)
        return start, size

    def free(self, block: tuple[int, int]) -> None:
        start, size = block
        after = self._starts.get(start + size)
        if after is not None:
            self._leave(start + size, after)
            size += after
        before = self._ends.get(start)
        if before is not None:
            self._leave(before, start - before)
            start, size = before, size + start - before
        self._enter(start, size)

    def _enter(self, start: int, size: int) -> None:
        self._starts[start], self._ends[start + size] = size, start
        insort(self._by_size, (size, start))

    def _leave(self, start: int, size: int) -> None:
        del self._starts[start], self._ends[start + size]
        del self._by_size[bisect_left(self._by_size, (size, start))]
