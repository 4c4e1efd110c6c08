"""Serves the blocks of a step from offsets that were planned, and from the pool whatever the plan does not know.

    replay = ReplayPool(pool, plan)                # one block of plan.arena_bytes from the pool
    for step in steps:
        replay.begin_step()
        block = replay.allocate(n)                 # n is what the plan expects next -> its offset, if nobody lives there
                                                   # n comes a little later in it  -> skip there; the skipped may still come
                                                   # neither, or still occupied    -> pool.allocate(n)

The plan is a guess about the future and decides only where a block lies, never whether it is right: what is handed out is
checked against what is live. Note [No plan, no harm]. Bytes carry the events of their last users as the pool's own do: see
`pending`, and Note [Host block] in `block`.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Final, Self

from chameleon_mm.device.protocols import Device, Event, Stream
from chameleon_mm.errors import HostMemoryExhausted, PoolStateError
from chameleon_mm.pinned.allocator import Allocator, block_nbytes
from chameleon_mm.pinned.block import PinnedBlock, Ticket
from chameleon_mm.pinned.pending import PendingRanges
from chameleon_mm.pinned.plan_offsets import OffsetPlan
from chameleon_mm.units import format_size

RESYNC_WINDOW = 64
"""Planned requests, ahead of the expected one and behind it, among which one of the same size is looked for. A layer saves
about 20 storages, so a layer more or less is bridged. Each request that deviates widens the view ahead by one, for it may stand
in the place of a planned one: a step whose middle changed is found again at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayStats:
    """Statistics of a `ReplayPool`: what it did so far and holds now. All sizes in bytes."""

    arena_bytes: int
    lower_bound_bytes: int
    """Lower bound of an arena for this plan."""
    live_bytes: int
    """Live blocks in the arena, each rounded up to the plan's alignment."""
    num_live: int
    served: int
    """Requests that got their planned offset."""
    deviated: int
    """Requests that the plan did not know: another size, or more of them than planned. The pool served them."""
    occupied: int
    """Requests that the plan knew, but whose bytes a block that lived longer than planned still had. The pool served them."""

    def to_dict(self) -> dict[str, int]:
        """The fields by name, for JSON."""
        return asdict(self)


class ReplayPool:
    """An allocator, usually a `PinnedPool`, with a plan for what comes: same calls, thread-safe. Its blocks hold it.

    Takes `plan.arena_bytes` from `pool` at once, as one block, and gives them back on `close` or leaving `with`; dropped
    without it, once its blocks are gone. Raises `HostMemoryExhausted` where the pool cannot give that much pinned memory.
    """

    def __init__(self, pool: Allocator, plan: OffsetPlan) -> None:
        self._pool = pool
        self.plan: Final = plan
        self._extents = [plan.extent(position) for position in range(len(plan.sizes))]
        self._arena = pool.allocate(plan.arena_bytes)
        if self._arena.pageable:
            self._arena.release()
            raise HostMemoryExhausted(
                f"replay: expected {format_size(plan.arena_bytes)} of pinned memory in one block, got ordinary memory: the "
                f"pool is full or the machine pins no more; use the pool without a plan, or plan a smaller step"
            )
        self._memory = self._arena.buffer
        self._lock = threading.Lock()
        self._returned: deque[tuple[Ticket, tuple[Event, ...]]] = deque()
        self._pending = PendingRanges()
        if self._arena.pending_events:  # the arena's bytes had users before us: whoever gets a part of them waits for those
            self._pending.add(0, plan.arena_bytes, self._arena.pending_events)
        self._starts: list[int] = []  # of live blocks, sorted
        self._ends: dict[int, int] = {}
        self._serial = 0
        self._expected = 0
        self._skipped: list[int] = []
        self._since_match = 0
        self._served = self._deviated = self._occupied = 0
        self._closed = False
        # At exit there is nobody to give it to.
        weakref.finalize(self, _release_arena, self._arena, self._pending, self._returned).atexit = False

    @property
    def device(self) -> Device:
        return self._pool.device

    def begin_step(self) -> None:
        """Expect the plan's first request next. Blocks of earlier steps stay; their bytes are not given twice."""
        with self._lock:
            self._expected = 0
            self._skipped.clear()
            self._since_match = 0

    def allocate(self, nbytes: int | str, stream: Stream | None = None) -> PinnedBlock:
        """Allocate as `PinnedPool.allocate` does, at the planned offset where the plan foresaw this request, else from the
        pool."""
        if type(nbytes) is not int:
            nbytes = block_nbytes(nbytes)
        with self._lock:
            if self._closed:
                raise PoolStateError(
                    "allocate: expected an open replay, got one that was closed; make another with pool.replay"
                )
            self._drain()
            block = self._planned(nbytes)
        if block is None:
            return self._pool.allocate(nbytes, stream)
        # Outside of the lock, and with the block whole: should the device fail here, the block still returns itself.
        if block.pending_events:
            block.forget_complete()
            if stream is not None and block.pending_events:
                block.wait_on(stream)
        return block

    def note_released(self, ticket: Ticket, events: tuple[Event, ...]) -> None:
        """Note that a block was released; called by blocks alone. An append is atomic, and takes no lock that its own thread
        may hold."""
        self._returned.append((ticket, events))

    def stats(self) -> ReplayStats:
        """Statistics of what was served and what is live, every release up to here counted. Not for finalizers: it takes a
        lock."""
        with self._lock:
            self._drain()
            return ReplayStats(
                arena_bytes=self.plan.arena_bytes,
                lower_bound_bytes=self.plan.lower_bound_bytes,
                live_bytes=sum(end - start for start, end in self._ends.items()),
                num_live=len(self._ends),
                served=self._served,
                deviated=self._deviated,
                occupied=self._occupied,
            )

    def close(self) -> None:
        """Release the arena, with the events that are left on it. Never waits. A second call does nothing."""
        with self._lock:
            self._drain()
            if self._ends:
                live = sum(end - start for start, end in self._ends.items())
                raise PoolStateError(
                    f"close: expected no live block in the arena, got {len(self._ends)} of {format_size(live)} in all; release "
                    f"them, or drop what holds them, and close again"
                )
            self._closed = True
            _release_arena(self._arena, self._pending, self._returned)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except PoolStateError:
            # With an error under way, its traceback is likely what holds the blocks, and it is what the caller must see: the
            # arena then goes back with the last of them.
            if error is None:
                raise

    def __repr__(self) -> str:
        return (
            f"<ReplayPool on {self.device.name}: {len(self.plan.sizes)} planned requests, arena of "
            f"{format_size(self.plan.arena_bytes)}>"
        )

    # --- under the lock

    def _drain(self) -> None:
        """Ranges of returned blocks are free again, their events beside them."""
        while self._returned:
            (_, start), events = self._returned.popleft()
            assert start is not None, "blocks of zero bytes are the pool's"
            end = self._ends.pop(start)
            del self._starts[bisect_right(self._starts, start) - 1]
            if events:
                self._pending.add(start, end, events)

    def _planned(self, nbytes: int) -> PinnedBlock | None:
        """The block that the plan has for this request; None where it has none, or its bytes are not free."""
        if type(nbytes) is not int or nbytes <= 0:
            return None  # nothing has no place, and the pool says what is wrong with a size that is none
        position = self._match(nbytes)
        if position is None:
            self._deviated += 1
            return None
        start, end = self._extents[position]
        if not self._is_free(start, end):
            self._occupied += 1
            return None
        self._served += 1
        insort(self._starts, start)
        self._ends[start] = end
        self._serial += 1
        events = self._pending.take(start, end)
        return PinnedBlock(self, (self._serial, start), self._memory, start, nbytes, events)

    def _match(self, nbytes: int) -> int | None:
        """The planned request that this one is: the expected one, else one that was skipped, else the nearest one ahead."""
        sizes, expected = self.plan.sizes, self._expected
        if expected < len(sizes) and sizes[expected] == nbytes:
            self._expected = expected + 1
            self._since_match = 0
            return expected
        for place, position in enumerate(self._skipped):
            if sizes[position] == nbytes:
                del self._skipped[place]
                self._since_match = 0
                return position
        reach = expected + RESYNC_WINDOW + self._since_match
        try:
            position = sizes.index(nbytes, expected, reach)
        except ValueError:
            self._since_match += 1
            return None
        self._skipped = [*self._skipped, *range(expected, position)][-RESYNC_WINDOW:]
        self._expected = position + 1
        self._since_match = 0
        return position

    def _is_free(self, start: int, end: int) -> bool:
        starts = self._starts
        after = bisect_right(starts, start)
        return (after == 0 or self._ends[starts[after - 1]] <= start) and (after == len(starts) or starts[after] >= end)


def _release_arena(arena: PinnedBlock, pending: PendingRanges, returned: deque[tuple[Ticket, tuple[Event, ...]]]) -> None:
    """Release the arena once no block of it lives: whoever gets its bytes next waits for every event left on them."""
    events = [event for _, last in returned for event in last]
    events += pending
    arena.set_pending(tuple({id(event): event for event in events}.values()))
    arena.release()
