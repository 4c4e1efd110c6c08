"""Which bytes are free: integers alone, no memory behind them.

    units = FreeList(1 << 30)
    a = units.allocate(5000)            # 8192 bytes at the lowest part of the smallest free block that holds them
    units.free(a)                       # joined with its free neighbours at once
    base = units.add_region(1 << 20)    # more addresses, never adjacent to the others: nothing coalesces across
    units.remove_region(base)           # only while no block of it is live

Best fit with immediate coalescing by boundary tags (Knuth, The Art of Computer Programming, vol. 1, section 2.5), the tags
being two dictionaries: start -> size and end -> start. Free blocks of one size share a bin, and the distinct sizes are kept
sorted. D distinct sizes need at least 1 + 2 + ... + D units of free memory, so D is below sqrt(2 * units), whatever the number
of blocks: 724 for 1 GiB in units of 4 KiB. Searching and updating the sorted sizes is therefore cheap where a list sorted by
block would move 100,000 entries.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import index

DEFAULT_ALIGNMENT = 4096
"""Bytes: a page, so that two blocks never share one, and a multiple of every element size and of every DMA granularity."""


class FreeList:
    """A free list over `capacity` bytes of addresses, starting at 0. Every block is a multiple of `alignment` bytes.

    Among free blocks of one size the last one freed is taken. Not thread-safe. Raises `ValueError` for an alignment below 1
    and for a capacity that is negative or no multiple of the alignment.
    """

    __slots__ = (
        "_alignment", "_bins", "_capacity", "_ends", "_free_bytes", "_live", "_next_base", "_regions", "_sizes", "_starts",
    )  # fmt: skip

    def __init__(self, capacity: int, alignment: int = DEFAULT_ALIGNMENT) -> None:
        if alignment < 1:
            raise ValueError(f"alignment: expected 1 byte or more, got {alignment}")
        self._alignment = index(alignment)
        self._regions: dict[int, int] = {}
        self._live: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._sizes: list[int] = []
        self._bins: dict[int, dict[int, None]] = {}
        self._capacity = 0
        self._free_bytes = 0
        self._next_base = 0
        if capacity != 0:
            self.add_region(capacity)

    @property
    def alignment(self) -> int:
        """Bytes that every offset and every block's size is a multiple of."""
        return self._alignment

    @property
    def capacity(self) -> int:
        """Bytes of all regions, free and live."""
        return self._capacity

    @property
    def free_bytes(self) -> int:
        return self._free_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes of live blocks, each rounded up to the alignment."""
        return self._capacity - self._free_bytes

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free block: the largest request that `allocate` can serve now."""
        return self._sizes[-1] if self._sizes else 0

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def is_empty(self) -> bool:
        """Whether no block is live."""
        return not self._live

    def round_up(self, nbytes: int) -> int:
        """Bytes that a block of `nbytes` takes."""
        return -(-nbytes // self._alignment) * self._alignment

    def allocate(self, nbytes: int) -> int | None:
        """The offset of a block of at least `nbytes`, or None where no free block holds that much.

        Raises `ValueError` for less than one byte: nothing has no address.
        """
        size = -(-index(nbytes) // self._alignment) * self._alignment
        if size <= 0:
            raise ValueError(f"allocate: expected 1 byte or more, got {nbytes}")
        sizes = self._sizes
        at = bisect_left(sizes, size)
        if at == len(sizes):
            return None
        found = sizes[at]
        same = self._bins[found]
        start = same.popitem()[0]
        if not same:
            del self._bins[found]
            del sizes[at]
        del self._starts[start]
        if found == size:
            del self._ends[start + size]
        else:
            self._enter(start + size, found - size)
        self._live[start] = size
        self._free_bytes -= size
        return start

    def free(self, offset: int) -> int:
        """Take the live block at `offset` back; returns its size in bytes.

        Raises `ValueError`, and changes nothing, where no live block starts there: a second free, or a foreign offset.
        """
        start = index(offset)
        size = self._live.pop(start, None)
        if size is None:
            raise ValueError(f"free: expected the offset of a live block, got {offset}; free what allocate gave, once")
        self._free_bytes += size
        freed, end = size, start + size
        after = self._starts.get(end)
        if after is not None:
            self._leave(end, after)
            size += after
        before = self._ends.get(start)
        if before is not None:
            between = start - before
            self._leave(before, between)
            start = before
            size += between
        self._enter(start, size)
        return freed

    def add_region(self, nbytes: int) -> int:
        """Take `nbytes` more addresses in; returns the offset of the first. Offsets of regions only grow and never recur."""
        size = index(nbytes)
        if size <= 0 or size % self._alignment:
            raise ValueError(f"a region: expected a positive multiple of the alignment, {self._alignment} bytes, got {nbytes}")
        base = self._next_base
        # One unit that belongs to nobody keeps the end of this region apart from the start of the next.
        self._next_base = base + size + self._alignment
        self._regions[base] = size
        self._capacity += size
        self._free_bytes += size
        self._enter(base, size)
        return base

    def is_region_free(self, base: int) -> bool:
        """Whether no block of the region at `base` is live. Raises `ValueError` for an offset that starts no region."""
        return self._starts.get(base) == self._region_bytes(base)

    def remove_region(self, base: int) -> int:
        """Give up the region at `base`; returns its bytes.

        Raises `ValueError`, and changes nothing, for an offset that starts no region and for a region with a live block.
        """
        size = self._region_bytes(base)
        if self._starts.get(base) != size:
            raise ValueError(f"remove_region: expected a region without live blocks, got the one at {base}; free them first")
        self._leave(base, size)
        del self._regions[base]
        self._capacity -= size
        self._free_bytes -= size
        return size

    def _region_bytes(self, base: int) -> int:
        size = self._regions.get(base)
        if size is None:
            raise ValueError(f"expected the offset that add_region gave for a region that still is, got {base}")
        return size

    def _enter(self, start: int, size: int) -> None:
        """Make [start, start + size) one free block."""
        self._starts[start] = size
        self._ends[start + size] = start
        same = self._bins.get(size)
        if same is None:
            self._bins[size] = {start: None}
            insort(self._sizes, size)
        else:
            same[start] = None

    def _leave(self, start: int, size: int) -> None:
        """Take the free block [start, start + size) out."""
        del self._starts[start]
        del self._ends[start + size]
        same = self._bins[size]
        if len(same) > 1:
            del same[start]
        else:
            del self._bins[size]
            del self._sizes[bisect_left(self._sizes, size)]
