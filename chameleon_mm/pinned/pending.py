"""Free ranges that the device may still be using, and the events until which it may.

    pending.add(start, end, (event,))       # a block was released: its last device work ends with `event`
    pending.take(start, end) -> (event,)    # the bytes are handed out again: whoever gets them waits

    block.release(after=LateEvent(record))  # in a finalizer: nothing of the device is called
    recorded(events)                        # at the next allocation, an ordinary call: now `record()` runs

Kept by byte range and not by free block, so that joining and splitting free blocks loses nothing: a range that is taken in
part leaves its rest behind, and two blocks over one range both get its event. The idea that a free block carries its last
event to whoever gets it next is from the stream-ordered free lists of RMM, the RAPIDS memory manager.

What is recorded late covers more, never less. So a finalizer, which runs in the middle of any line, in a forked child and
while the interpreter ends, can promise an event without touching the device.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator

from chameleon_mm.device.protocols import Event

_SWEEP_AT = 64
"""Ranges beyond which complete ones are dropped, then twice what is left: so the search costs each range a constant."""


class LateEvent:
    """An event that stands for others: complete when everything is that `record` gives an event for, called once somebody asks.
    Thread-safe."""

    __slots__ = ("_events", "_record")

    def __init__(self, record: Callable[[], tuple[Event, ...]]) -> None:
        self._record = record
        self._events: tuple[Event, ...] | None = None

    @property
    def events(self) -> tuple[Event, ...]:
        """The real events, for a stream to wait on."""
        if self._events is None:
            self._events = self._record()  # by two threads at once: either's will do
        return self._events

    def query(self) -> bool:
        return all(event.query() for event in self.events)

    def synchronize(self) -> None:
        for event in self.events:
            event.synchronize()

    def elapsed_us(self, since: Event) -> float:
        raise ValueError("elapsed_us: expected a timed event, got one that only orders; record one with timed=True")


def recorded(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """Replace the late events in `events` by those that they stand for: what a stream of the device can wait on."""
    for event in events:  # not `any`, whose generator takes longer than all of the rest
        if type(event) is LateEvent:
            break
    else:
        return events
    found: list[Event] = []
    for event in events:
        found.extend(event.events if isinstance(event, LateEvent) else (event,))
    return tuple(found)


class PendingRanges:
    """Disjoint byte ranges of free memory, each with the events that its next use comes after. Not thread-safe.

    `starts`, sorted and not to be changed, is empty where nothing is pending: what a hot path can see without a call.
    """

    __slots__ = ("_ends", "_events", "_sweep_at", "starts")

    def __init__(self) -> None:
        # Three lists side by side, by address: most ranges are cut at one end, which is then one assignment.
        self.starts: list[int] = []
        self._ends: list[int] = []
        self._events: list[tuple[Event, ...]] = []
        self._sweep_at = _SWEEP_AT

    def __iter__(self) -> Iterator[Event]:
        for events in self._events:
            yield from events

    def add(self, start: int, end: int, events: tuple[Event, ...]) -> None:
        """Add a range, [start, end), which no other range overlaps: it may be in use until `events` are complete."""
        starts = self.starts
        at = bisect_left(starts, start)
        starts.insert(at, start)
        self._ends.insert(at, end)
        self._events.insert(at, events)
        if len(starts) > self._sweep_at:
            self.drop_complete()
            self._sweep_at = max(_SWEEP_AT, 2 * len(starts))

    def take(self, start: int, end: int) -> tuple[Event, ...]:
        """The events that [start, end) waits for, each once; those bytes are pending no longer."""
        starts, ends = self.starts, self._ends
        first = bisect_right(starts, start)
        if first and ends[first - 1] > start:
            first -= 1
        last = bisect_left(starts, end, first)
        if first == last:
            return ()
        held = self._events
        if last - first == 1:
            found = held[first]
            stop = ends[first]
            if starts[first] < start:
                ends[first] = start
                if stop > end:
                    starts.insert(last, end)
                    ends.insert(last, stop)
                    held.insert(last, found)
            elif stop > end:
                starts[first] = end
            else:
                del starts[first], ends[first], held[first]
            if len(found) == 1:
                return found
            taken = [found]
        else:
            taken = held[first:last]
            if starts[first] < start:
                ends[first] = start
                first += 1
            if ends[last - 1] > end:
                last -= 1
                starts[last] = end
            del starts[first:last], ends[first:last], held[first:last]
        by_id: dict[int, Event] = {}  # an event need not be hashable
        for events in taken:
            for event in events:
                by_id[id(event)] = event
        return tuple(by_id.values())

    def drop_complete(self) -> bool:
        """Drop the ranges whose events are all complete. Returns whether none is left. The host does not wait."""
        kept = [at for at, events in enumerate(self._events) if not all(event.query() for event in events)]
        self.starts[:] = [self.starts[at] for at in kept]
        self._ends[:] = [self._ends[at] for at in kept]
        self._events[:] = [self._events[at] for at in kept]
        return not kept

    def synchronize(self) -> None:
        """Make the host wait until every range's events are complete; then nothing is pending."""
        for event in self:
            event.synchronize()
        self.starts.clear()
        self._ends.clear()
        self._events.clear()
