"""Finds who writes beside a block, uses it after its release, releases it twice or never. For tests and for hunting: it costs.

    | red zone, a page | the block, poisoned | red zone, a page |

    checked = CheckingAllocator(PinnedPool("1GiB"))
    block = checked.allocate(nbytes)
    block.tensor(...)[...]            # NaN, or -1, until it is written
    block.release(after=event)        # noted; the device may still write
    checked.allocate(...)             # looks at what was released and is complete: BlockCorruptedError if a zone was written
    checked.check()                   # waits for the device, and looks at all of it
    block.release()                   # BlockReleasedError: where it was allocated, and where it was released
    checked.close()                   # PoolStateError: the blocks that are still out, and the stack that took each

A finalizer may not look: device work may be under way on the block, and asking an event is a call of the device. So a released
block stays the allocator's until an ordinary call finds its last event complete.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, deque
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from chameleon_mm.device.protocols import Device, Event, Stream
from chameleon_mm.errors import BlockCorruptedError, BlockReleasedError, HostMemoryExhausted, PoolStateError
from chameleon_mm.pool.block import PinnedBlock, Ticket
from chameleon_mm.pool.free_list import DEFAULT_ALIGNMENT
from chameleon_mm.pool.ledger import PoolStats
from chameleon_mm.pool.pool import PinnedPool, close_at_exit
from chameleon_mm.units import format_size, parse_size

ZONE_BYTES = DEFAULT_ALIGNMENT
"""Size of the zone on each side: a page, so that blocks lie on pages as the pool's do."""

_ZONE_BYTE = 0xA5
POISON_BYTE = 0xFF
"""Byte that fills unwritten memory, every float type's NaN, every integer type's -1: what shows most when it is read."""

_FRAMES = 8
"""Frames of a stack that are kept: enough to leave a framework's own, few enough to read."""


@dataclass(slots=True, eq=False)
class _Guarded:
    """A block of the pool, and where the zones and the user's bytes lie in it."""

    inner: PinnedBlock
    nbytes: int
    allocated_at: str
    events: tuple[Event, ...] = ()
    """Events until which the device may use it, once it was released."""

    @property
    def is_complete(self) -> bool:
        return all(event.query() for event in self.events)

    def poison(self) -> None:
        self._bytes()[ZONE_BYTES : ZONE_BYTES + self.nbytes] = POISON_BYTE

    def draw_zones(self) -> None:
        held = self._bytes()
        held[:ZONE_BYTES] = _ZONE_BYTE
        held[ZONE_BYTES + self.nbytes :] = _ZONE_BYTE

    def damage(self) -> str:
        """Text that tells which bytes of the zones were written; "" for none."""
        held = self._bytes()
        held = np.concatenate((held[:ZONE_BYTES], held[ZONE_BYTES + self.nbytes :]))
        written = np.flatnonzero(held != _ZONE_BYTE)
        if not written.size:
            return ""
        first = int(written[0])
        where = (
            f"{ZONE_BYTES - first} bytes before its start" if first < ZONE_BYTES else f"{first - ZONE_BYTES} bytes past its end"
        )
        return (
            f"a block of {self.nbytes} bytes, allocated at {self.allocated_at}: expected nothing written beside it, got "
            f"{written.size} bytes, the first {where} ({int(held[first]):#04x})"
        )

    def _bytes(self) -> npt.NDArray[np.uint8]:
        return self.inner.numpy((self.inner.nbytes,), np.uint8)


class _CheckedBlock(PinnedBlock):
    """A block between the zones of a pool's, which raises when it is released twice."""

    __slots__ = ("_allocated_at", "_released_at")

    def __init__(self, owner: CheckingAllocator, serial: int, guarded: _Guarded) -> None:
        inner = guarded.inner
        super().__init__(owner, (serial, ZONE_BYTES), inner.buffer, ZONE_BYTES, guarded.nbytes, ())
        self._allocated_at = guarded.allocated_at
        self._released_at = "a place unknown"

    def release(self, after: Event | None = None) -> None:
        """Release as `PinnedBlock.release` does, but raise `BlockReleasedError` at a second call."""
        if self.released:
            raise BlockReleasedError(
                f"release: expected a live block, got one of {self.nbytes} bytes, allocated at {self._allocated_at}, that was "
                f"released before at {self._released_at}; release it once"
            )
        super().release(after)
        self._released_at = _where()


class CheckingAllocator:
    """An allocator of `pool`'s blocks with red zones around each and poison in it, whose releases are checked. Thread-safe.

    Each block takes `2 * ZONE_BYTES` more. `allocate` makes the host wait for the bytes' earlier users, because it writes them;
    `stream` has nothing to wait for then. What was found is raised by the next call of the allocator, on whatever thread.
    `close`, or leaving `with`, ends the checks alone: the pool is closed by whoever made it.
    """

    def __init__(self, pool: PinnedPool) -> None:
        self.pool: Final = pool
        self._lock = threading.Lock()
        self._serials = count(1)  # `next` of it is one atomic step, and so is `pop` of a dictionary
        self._live: dict[int, _Guarded] = {}
        self._returned: deque[_Guarded] = deque()
        self._waiting: list[_Guarded] = []

    @property
    def device(self) -> Device:
        return self.pool.device

    def allocate(self, nbytes: int | str, stream: Stream | None = None) -> PinnedBlock:
        """Allocate as `PinnedPool.allocate` does. Raises `BlockCorruptedError`, once, for what was found since the last
        call."""
        nbytes = parse_size(nbytes, what="allocate")
        self._settle(wait=False)
        padded = nbytes + 2 * ZONE_BYTES
        try:
            inner = self.pool.allocate(padded, stream)
        except HostMemoryExhausted:
            if not self._waiting:
                raise
            inner = None  # retried outside of the except block, whose traceback would hold what it mentions
        if inner is None:
            self._settle(wait=True)
            inner = self.pool.allocate(padded, stream)
        guarded = _Guarded(inner, nbytes, _where())
        guarded.draw_zones()
        guarded.poison()
        serial = next(self._serials)
        self._live[serial] = guarded
        return _CheckedBlock(self, serial, guarded)

    def note_released(self, ticket: Ticket, events: tuple[Event, ...]) -> None:
        """Note the release of a block; called by blocks alone. Raises `BlockReleasedError` for a ticket that is not a live
        block's of this allocator."""
        guarded = self._live.pop(ticket[0], None)
        if guarded is None:
            raise BlockReleasedError(
                f"note_released: expected the ticket of a live block of this allocator, got {ticket}: another allocator's, or "
                f"one given back before; give a block back to who made it, once"
            )
        guarded.events = events
        self._returned.append(guarded)

    def check(self) -> None:
        """Look at every block that was released. The host waits for the device. Raises `BlockCorruptedError`."""
        self._settle(wait=True)

    def stats(self) -> PoolStats:
        """Statistics of the pool, zones included. Raises `BlockCorruptedError`."""
        self._settle(wait=False)
        return self.pool.stats()

    def close(self) -> None:
        """Check all blocks as `check` does: afterwards the pool has back every block that was released.

        Raises `PoolStateError`, which lists them with the stack that took each, while blocks are live.
        """
        self.check()
        live = list(self._live.values())
        if not live:
            return
        blocks, nbytes = Counter(held.allocated_at for held in live), Counter[str]()
        for held in live:
            nbytes[held.allocated_at] += held.nbytes
        where = "; ".join(f"{blocks[place]} of {total} bytes allocated at {place}" for place, total in nbytes.most_common())
        raise PoolStateError(
            f"close: expected no live block, got {len(live)} of {format_size(nbytes.total())} in all; release them, or drop "
            f"what holds them, and close again: {where}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        close_at_exit(self.close, error, "checking allocator")

    def __repr__(self) -> str:
        return f"<CheckingAllocator over {self.pool!r}: {len(self._live)} live blocks>"

    def _settle(self, *, wait: bool) -> None:
        """Check, poison and release the blocks whose last device work is complete."""
        found = []
        with self._lock:
            while self._returned:
                self._waiting.append(self._returned.popleft())
            waiting, self._waiting = self._waiting, []
            for guarded in waiting:
                if not (wait or guarded.is_complete):
                    self._waiting.append(guarded)
                    continue
                for event in guarded.events:
                    event.synchronize()  # the last device access to the block -> the host looks at it
                if damage := guarded.damage():
                    found.append(damage)
                guarded.poison()
                guarded.inner.release()
        if found:
            raise BlockCorruptedError("; ".join(found))


def _where() -> str:
    """Text of the frames outside of this module, innermost first: a frame kept would keep what it holds."""
    frame: FrameType | None = sys._getframe(1)
    places: list[str] = []
    while frame is not None and len(places) < _FRAMES:
        code = frame.f_code
        if code.co_filename != __file__:
            places.append(f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return " < ".join(places)
