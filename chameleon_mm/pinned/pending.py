"""Which free bytes the device may still be using, and until which event.

    pending.add(start, end, (event,))       # a block was released: its last device work ends with `event`
    pending.take(start, end) -> (event,)    # the bytes are handed out again: whoever gets them waits

Kept by byte range and not by free block, so that joining and splitting free blocks loses nothing: a range that is taken in
part leaves its rest behind, and two blocks over one range both get its event. The idea that a free block carries its last
event to whoever gets it next is from the stream-ordered free lists of RMM, the RAPIDS memory manager.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from chameleon_mm.device.protocols import Event

_SWEEP_AT = 64
"""Ranges beyond which complete ones are looked for and dropped: a list that is rarely taken from stays short, and the search
costs each range a constant, for it comes again only once the number that were left has doubled."""


class PendingRanges:
    """Disjoint byte ranges of free memory, each with the events that its next use comes after. Not thread-safe."""

    __slots__ = ("_ranges", "_starts", "_sweep_at")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: dict[int, tuple[int, tuple[Event, ...]]] = {}
        self._sweep_at = _SWEEP_AT

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Event]:
        for _, events in self._ranges.values():
            yield from events

    def add(self, start: int, end: int, events: tuple[Event, ...]) -> None:
        """Bytes [start, end), which no other range overlaps, may be in use until `events` are complete."""
        insort(self._starts, start)
        self._ranges[start] = (end, events)
        if len(self._starts) > self._sweep_at:
            self.sweep()
            self._sweep_at = max(_SWEEP_AT, 2 * len(self._starts))

    def take(self, start: int, end: int) -> tuple[Event, ...]:
        """The events that [start, end) waits for, each once; those bytes are pending no longer."""
        starts = self._starts
        if not starts:
            return ()
        last = bisect_left(starts, end)
        if last and starts[last - 1] == start and self._ranges[start][0] == end and len(self._ranges[start][1]) == 1:
            del starts[last - 1]  # what one block left behind, one block of its size takes: the most frequent case by far
            return self._ranges.pop(start)[1]
        first = max(0, bisect_right(starts, start) - 1)
        found: dict[int, Event] = {}
        kept: list[int] = []
        for at in starts[first:last]:
            stop, events = self._ranges[at]
            if stop <= start:
                kept.append(at)
                continue
            del self._ranges[at]
            found.update((id(event), event) for event in events)
            for left, right in ((at, min(stop, start)), (max(at, end), stop)):
                if left < right:
                    self._ranges[left] = (right, events)
                    kept.append(left)
        starts[first:last] = kept
        return tuple(found.values())

    def sweep(self) -> bool:
        """Drop the ranges whose events are all complete. Whether none is left. The host does not wait."""
        for at in list(self._starts):
            if all(event.query() for event in self._ranges[at][1]):
                del self._ranges[at]
        self._starts[:] = sorted(self._ranges)
        return not self._starts

    def synchronize(self) -> None:
        """The host waits until every range's events are complete; then nothing is pending."""
        for event in self:
            event.synchronize()
        self._ranges.clear()
        self._starts.clear()
