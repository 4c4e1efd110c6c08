"""Free list over a range of addresses: integers, no memory.

    units = FreeList(1 << 30)
    a = units.allocate(5000)            # 8192 bytes, at the beginning of the smallest free block that is large enough
    units.free(a)                       # joined with its free neighbours at once
    base = units.add_region(1 << 20)    # more addresses, never adjacent to others, so that blocks do not coalesce across
    units.remove_region(base)           # only while no block of it is live

Best fit with immediate coalescing by boundary tags (Knuth, The Art of Computer Programming, vol. 1, section 2.5). A block, live
or free, is a `_Span` with references to its neighbours, so joining two only changes references. Free spans of one size form a
doubly linked list, found by size, and the distinct sizes are sorted. D distinct sizes need at least 1 + 2 + ... + D units of
free memory, so D is below sqrt(2 * units), for any number of blocks: 724 for 1 GiB in units of 4 KiB. So searching and updating
the sorted sizes is cheap. A list sorted by block would move 100,000 entries.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import index

DEFAULT_ALIGNMENT = 4096
"""Alignment in bytes: a page, which two blocks never share. A multiple of element sizes and DMA granularities."""


class _Span:
    """Block, live or free. No `__init__`: setting the fields directly takes a third of the time."""

    __slots__ = ("above", "below", "free", "newer", "older", "start", "units")

    start: int
    """Offset of the block's first byte."""
    units: int
    free: bool
    below: _Span | None
    """Block that ends where this one starts, in the same region."""
    above: _Span | None
    newer: _Span | None
    """Next free span of the same size that was freed later; unused while live."""
    older: _Span | None


class FreeList:
    """Free list over `capacity` bytes of addresses, starting at 0. Each block is a multiple of `alignment` bytes.

    Among free blocks of equal size, the last freed is used. Not thread-safe. Raises `ValueError` if the alignment is not a
    power of two, or if the capacity is negative or not a multiple of the alignment.
    """

    def __init__(self, capacity: int, alignment: int = DEFAULT_ALIGNMENT) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"alignment: expected a power of two of bytes, got {alignment}")
        self.alignment = index(alignment)
        self._shift = self.alignment.bit_length() - 1
        self._regions: dict[int, tuple[_Span, int]] = {}  # base -> lowest span of the region, which never changes; its units
        self._live: dict[int, _Span] = {}
        self._sizes: list[int] = []  # distinct sizes of free spans, in units, sorted
        self._newest: dict[int, _Span] = {}  # size in units -> last freed span of that size
        self._capacity_units = 0
        self._free_units = 0
        # Maximum of live units, of all time and since `recent_peak`. Updated at a free, as live units fall only there.
        self._peak_units = self._recent_units = 0
        self._next_base = 0
        if capacity != 0:
            self.add_region(capacity)

    @property
    def capacity(self) -> int:
        """Bytes of all regions, free and live."""
        return self._capacity_units << self._shift

    @property
    def live_bytes(self) -> int:
        """Bytes of live blocks, each rounded up to the alignment."""
        return (self._capacity_units - self._free_units) << self._shift

    @property
    def peak_live_bytes(self) -> int:
        return max(self._peak_units << self._shift, self.live_bytes)

    def recent_peak(self) -> int:
        """Maximum of `live_bytes` since the last call."""
        live = self._capacity_units - self._free_units
        recent, self._recent_units = max(self._recent_units, live), live
        self._peak_units = max(self._peak_units, recent)  # `free` updates this only together with the recent peak
        return recent << self._shift

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free block, which is the largest request that `allocate` can serve now."""
        return self._sizes[-1] << self._shift if self._sizes else 0

    @property
    def num_live(self) -> int:
        return len(self._live)

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a block of at least `nbytes`, or None if no free block is large enough.

        Raises `ValueError` for less than one byte, because an empty block has no address.
        """
        units = (nbytes + self.alignment - 1) >> self._shift  # a float is a TypeError here
        if units <= 0:
            raise ValueError(f"allocate: expected 1 byte or more, got {nbytes}")
        sizes = self._sizes
        at = bisect_left(sizes, units)
        if at == len(sizes):
            return None
        found = sizes[at]
        span = self._newest[found]
        older = span.older
        if older is None:
            del self._newest[found]
            del sizes[at]
        else:
            self._newest[found] = older
            older.newer = None
        start = span.start
        if found != units:
            rest = _Span()
            rest.start = start + (units << self._shift)
            rest.below = span
            rest.above = above = span.above
            if above is not None:
                above.below = rest
            span.above = rest
            span.units = units
            # `_enter` without the call, because most blocks are cut from a larger one.
            rest.units = left = found - units
            rest.free = True
            rest.newer = None
            rest.older = newest = self._newest.get(left)
            if newest is None:
                insort(sizes, left)
            else:
                newest.newer = rest
            self._newest[left] = rest
        span.free = False
        self._live[start] = span
        self._free_units -= units
        return start

    def free(self, offset: int) -> int:
        """Free the live block at `offset` and return its size in bytes."""
        span = self._live.pop(index(offset), None)
        if span is None:
            raise ValueError(f"free: expected the offset of a live block, got {offset}; free what allocate gave, once")
        live = self._capacity_units - self._free_units
        if live > self._recent_units:
            self._recent_units = live
            if live > self._peak_units:  # noqa: PLR1730 - calling max() takes longer than all of this
                self._peak_units = live
        freed = units = span.units
        self._free_units += freed
        above, below = span.above, span.below
        if above is not None and above.free:
            self._leave(above)
            units += above.units
            above = above.above
            span.above = above
            if above is not None:
                above.below = span
        if below is not None and below.free:
            self._leave(below)
            units += below.units
            below.above = above
            if above is not None:
                above.below = below
            span = below
        self._enter(span, units)
        return freed << self._shift

    def add_region(self, nbytes: int) -> int:
        """Add `nbytes` addresses and return the offset of the first. Offsets of regions increase and are never reused."""
        size = index(nbytes)
        if size <= 0 or size % self.alignment:
            raise ValueError(f"a region: expected a positive multiple of the alignment, {self.alignment} bytes, got {nbytes}")
        base = self._next_base
        # An unused unit separates the end of this region from the start of the next.
        self._next_base = base + size + self.alignment
        units = size >> self._shift
        span = _Span()
        span.start = base
        span.below = span.above = None
        self._regions[base] = (span, units)
        self._capacity_units += units
        self._free_units += units
        self._enter(span, units)
        return base

    def is_region_free(self, base: int) -> bool:
        """True if no block of the region at `base` is live. Raises `ValueError` for an offset at which no region begins."""
        if base not in self._regions:
            raise ValueError(f"expected the offset that add_region gave for a region that still is, got {base}")
        lowest, units = self._regions[base]
        return lowest.free and lowest.units == units

    def remove_region(self, base: int) -> int:
        """Remove the region at `base` and return its bytes."""
        if not self.is_region_free(base):
            raise ValueError(f"remove_region: expected a region without live blocks, got the one at {base}; free them first")
        lowest, units = self._regions.pop(base)
        self._leave(lowest)
        self._capacity_units -= units
        self._free_units -= units
        return units << self._shift

    def _enter(self, span: _Span, units: int) -> None:
        """Make `span` a free block of `units`, as the last freed of its size."""
        span.units = units
        span.free = True
        span.newer = None
        span.older = older = self._newest.get(units)
        if older is None:
            insort(self._sizes, units)
        else:
            older.newer = span
        self._newest[units] = span

    def _leave(self, span: _Span) -> None:
        newer, older, units = span.newer, span.older, span.units
        if older is not None:
            older.newer = newer
        if newer is not None:
            newer.older = older
        elif older is not None:
            self._newest[units] = older
        else:
            del self._newest[units]
            del self._sizes[bisect_left(self._sizes, units)]
