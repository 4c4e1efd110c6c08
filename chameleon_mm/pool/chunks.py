"""Chunks of one pool: regions of one free list, each with its memory.

    wanted = chunks.make_room(size, limit)      # size of the next chunk; detaches unused chunks for it
    chunks.free()                               # frees detached chunks on the device; may have to wait for it
    chunks.pin(wanted); chunks.admit()          # adds another chunk
    chunk = chunks.of(offset)

Size of a chunk: a multiple of the request, at least 1/16 of the reserved bytes, between 16 MiB and the chunk size.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from chameleon_mm.device.pinning import REGISTRATION_LIMIT_BYTES
from chameleon_mm.device.protocols import Device, Event
from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.pool.free_list import FreeList
from chameleon_mm.units import GIB, MIB, format_size, round_up

# --- Free ranges that the device may still use, and the events until which it may:
#
# They are stored by byte range, not by free block, so that joining and splitting free blocks loses no event. If part of a range
# is allocated, the rest stays, and two blocks over one range both get its event. A free block passes its last event to its next
# owner, an idea from the stream-ordered free lists of RMM, the RAPIDS memory manager.
#
# An event recorded late covers more work, never less. So a finalizer can pass a late event without calling the device. A
# finalizer may run at any time, in a forked child and at the interpreter's end.

_SWEEP_AT = 64
"""Number of ranges at which complete ranges are dropped; later twice the remaining number. The cost per range is constant."""


class LateEvent:
    """Event that stands for others. It calls `record` at its first use, and is complete when all returned events are complete.
    Thread-safe."""

    __slots__ = ("_events", "_record")

    def __init__(self, record: Callable[[], tuple[Event, ...]]) -> None:
        self._record = record
        self._events: tuple[Event, ...] | None = None

    @property
    def events(self) -> tuple[Event, ...]:
        """Return the real events, for a stream to wait on."""
        if self._events is None:
            self._events = self._record()  # if two threads do this at once, either result is correct
        return self._events

    def query(self) -> bool:
        return all(event.query() for event in self.events)

    def synchronize(self) -> None:
        for event in self.events:
            event.synchronize()

    def elapsed_us(self, since: Event) -> float:
        raise ValueError("elapsed_us: expected a timed event, got one that only orders; record one with timed=True")


def recorded(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """Return `events` with each late event replaced by its real events, on which a stream of the device can wait."""
    for event in events:  # not `any`, whose generator takes longer than the rest
        if type(event) is LateEvent:
            break
    else:
        return events
    found: list[Event] = []
    for event in events:
        found.extend(event.events if isinstance(event, LateEvent) else (event,))
    return tuple(found)


class PendingRanges:
    """Disjoint byte ranges of free memory, each with the events after which it may be used again. Not thread-safe.

    `starts` is sorted; callers only read it. It is empty if no range is pending, so a hot path needs no call.
    """

    def __init__(self) -> None:
        # Three parallel lists, by address: most ranges are cut at one end, by one assignment.
        self.starts: list[int] = []
        self._ends: list[int] = []
        self._events: list[tuple[Event, ...]] = []
        self._sweep_at = _SWEEP_AT

    def __iter__(self) -> Iterator[Event]:
        for events in self._events:
            yield from events

    def add(self, start: int, end: int, events: tuple[Event, ...]) -> None:
        """Add the range [start, end), which overlaps no other range. It may be in use until `events` are complete."""
        starts = self.starts
        at = bisect_left(starts, start)
        starts.insert(at, start)
        self._ends.insert(at, end)
        self._events.insert(at, events)
        if len(starts) > self._sweep_at:
            self.drop_complete()
            self._sweep_at = max(_SWEEP_AT, 2 * len(starts))

    def take(self, start: int, end: int) -> tuple[Event, ...]:
        """Return the events for which [start, end) must wait, each once, and remove these bytes from the pending ranges."""
        starts, ends = self.starts, self._ends
        first = bisect_right(starts, start)
        if first and ends[first - 1] > start:
            first -= 1
        last = bisect_left(starts, end, first)
        if first == last:
            return ()
        held = self._events
        taken = held[first:last]
        if starts[first] < start:
            if last - first == 1 and ends[first] > end:  # the rest above becomes a separate range
                starts.insert(last, end)
                ends.insert(last, ends[first])
                held.insert(last, held[first])
            ends[first] = start
            first += 1
        if first < last and ends[last - 1] > end:
            last -= 1
            starts[last] = end
        if first < last:
            del starts[first:last], ends[first:last], held[first:last]
        if len(taken) == len(taken[0]) == 1:
            return taken[0]
        by_id: dict[int, Event] = {}  # an event need not be hashable
        for events in taken:
            for event in events:
                by_id[id(event)] = event
        return tuple(by_id.values())

    def drop_complete(self) -> bool:
        """Drop the ranges whose events are all complete. Returns True if no range is left. The host does not wait."""
        kept = [at for at, events in enumerate(self._events) if not all(event.query() for event in events)]
        self.starts[:] = [self.starts[at] for at in kept]
        self._ends[:] = [self._ends[at] for at in kept]
        self._events[:] = [self._events[at] for at in kept]
        return not kept

    def synchronize(self) -> None:
        """Let the host wait until all events are complete, and drop all ranges."""
        for event in self:
            event.synchronize()
        self.starts.clear()
        self._ends.clear()
        self._events.clear()


DEFAULT_CHUNK_BYTES = GIB
"""Maximum size of a chunk: large, so that little is wasted at its end, but small enough to pin within a second."""

SMALLEST_CHUNK_BYTES = 16 * MIB
"""Initial size of chunks. At this size the driver's time per registration, and its limit of 65,000, do not matter."""

GROWTH_SHARE = 16
"""Inverse of the size of a new chunk as a share of the reserved bytes, if no chunk size was requested. Only the last chunk is
partly unused, so this bounds the waste, and tens of GiB are reached in about 80 chunks. Replay of recorded activation traces
(Llama, GPT-2 with varying lengths, mixture of experts, ResNet-50; 10 to 28 GiB): reserved / peak live is 1.03 to 1.04. Chunks
of 1 GiB throughout give 1.03 to 1.05, and seven times the memory that a pool of 130 MiB needs."""


@dataclass(slots=True, eq=False)
class Chunk:
    base: int
    memory: Tensor
    pending: PendingRanges = field(default_factory=PendingRanges)

    @property
    def nbytes(self) -> int:
        return self.memory.numel()


class Chunks:
    """Pinned regions of one pool, allocated and freed on `device`. Not thread-safe: the caller holds the pool's lock, except
    for `pin` and `free`, which one thread at a time calls without it.

    `chunk_bytes` is the size of a chunk; None: it grows with the reserved bytes up to 1 GiB.
    """

    def __init__(self, device: Device, chunk_bytes: int | None) -> None:
        self.device = device
        self.free_list = FreeList(0)
        self._chunk_bytes = None if chunk_bytes is None else round_up(chunk_bytes, self.free_list.alignment)
        self._chunks: list[Chunk] = []  # by base: bases only increase
        self._bases: list[int] = []
        self._arrived: deque[Tensor] = deque()  # pinned, but not admitted yet
        self._leaving: deque[Chunk] = deque()  # detached, but not freed yet
        self.peak_reserved_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        return self.free_list.capacity

    @property
    def hold_memory(self) -> bool:
        return bool(self._chunks or self._arrived or self._leaving)

    def of(self, offset: int) -> Chunk:
        """Return the chunk of the block at `offset`."""
        return self._chunks[bisect_right(self._bases, offset) - 1]

    def room(self, limit: int) -> int:
        """Return the bytes that may still be reserved below `limit`, in whole units of the free list."""
        left = limit - self.free_list.capacity
        return max(0, left - left % self.free_list.alignment)

    def pin(self, nbytes: int) -> None:
        """Pin the memory of another chunk, for `admit`. Slow. Raises the device's errors."""
        # A chunk outlives the current mode, and a tensor made under inference_mode cannot be written outside of it.
        with torch.inference_mode(mode=False):
            # A single call, not an assignment: an interrupt between pinning and storing would lose the pinned memory.
            self._arrived.extend(map(self.device.alloc_pinned, (nbytes,)))

    def admit(self) -> None:
        """Add the chunks that were pinned."""
        while self._arrived:
            memory = self._arrived.popleft()
            base = self.free_list.add_region(memory.numel())
            self._chunks.append(Chunk(base, memory))
            self._bases.append(base)
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def make_room(self, nbytes: int, limit: int) -> int:
        """Return the size of the next chunk, for a request of `nbytes` that no free block holds."""
        size = round_up(nbytes, self.free_list.alignment)
        if size >= REGISTRATION_LIMIT_BYTES:
            raise HostMemoryExhausted(
                f"pinned pool: asked for one block of {nbytes} bytes, but one registration of "
                f"{format_size(REGISTRATION_LIMIT_BYTES)} or more fails in the driver; allocate several smaller blocks"
            )
        unused = self.unused()
        if self.room(limit) + sum(chunk.nbytes for chunk in unused) < size:
            raise HostMemoryExhausted(self._refusal(nbytes, size, limit))
        given = 0
        for chunk, idle in self._in_order_of_leaving(unused):
            if given >= size or (not idle and self.room(limit) >= size):
                break
            self.detach(chunk)
            given += chunk.nbytes
        wanted = given if given >= size else self._next_bytes(size)
        return min(wanted, self.room(limit), REGISTRATION_LIMIT_BYTES - self.free_list.alignment)

    def unused(self) -> list[Chunk]:
        return [chunk for chunk in self._chunks if self.free_list.is_region_free(chunk.base)]

    def shrink(self, limit: int, *, wait: bool) -> bool:
        """Detach unused chunks until at most `limit` bytes are reserved. `wait`: also chunks that the device still uses.
        Returns True if the limit is met."""
        for chunk, idle in self._in_order_of_leaving(self.unused()):
            if self.reserved_bytes <= limit or not (idle or wait):
                break
            self.detach(chunk)
        return self.reserved_bytes <= limit

    def _in_order_of_leaving(self, unused: list[Chunk]) -> list[tuple[Chunk, bool]]:
        """Return `unused` chunks, each with True if the device no longer uses it. Those come first, larger ones before smaller,
        so that few chunks are freed."""
        idle = [(chunk, chunk.pending.drop_complete()) for chunk in unused]
        return sorted(idle, key=lambda item: (not item[1], -item[0].nbytes))

    def detach(self, chunk: Chunk) -> None:
        """Remove an unused chunk from the pool. `free` then frees its memory."""
        self.free_list.remove_region(chunk.base)
        self._chunks.remove(chunk)
        self._bases.remove(chunk.base)
        self._leaving.append(chunk)

    def free(self) -> None:
        """Free the detached chunks, after the device's work on them (the host waits)."""
        while self._leaving:
            self._leaving[0].pending.synchronize()  # the last device access to the chunk -> its free
            chunk = self._leaving.popleft()  # first: after an interrupt, a leak is better than a double free
            try:
                self.device.free_pinned(chunk.memory)
            except Exception:
                self._leaving.appendleft(chunk)
                raise

    def free_all(self) -> None:
        """Free every chunk, even with live blocks. All device work on them must be complete."""
        self.admit()
        while self._chunks or self._leaving:
            self.device.free_pinned((self._chunks or self._leaving).pop().memory)

    def _next_bytes(self, size: int) -> int:
        """Return the size of a chunk for requests of `size`, without limits."""
        if self._chunk_bytes is not None:
            return max(self._chunk_bytes, size)
        target = min(max(self.reserved_bytes // GROWTH_SHARE, SMALLEST_CHUNK_BYTES), DEFAULT_CHUNK_BYTES)
        # A multiple of the request, because the next requests probably have this size (layers repeat).
        return round_up(target, size)

    def _refusal(self, nbytes: int, size: int, limit: int) -> str:
        units = self.free_list
        rounded = "" if size == nbytes else f" ({size} in units of {units.alignment})"
        return (
            f"pinned pool: asked for {nbytes} bytes{rounded}, but the limit is {limit} bytes: "
            f"{units.live_bytes} live in {units.num_live} blocks, largest free block {units.largest_free}, "
            f"{self.room(limit)} not reserved yet; release blocks, ask for less at once, or raise limit_bytes"
        )
