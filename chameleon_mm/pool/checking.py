"""Finds writes outside a block, uses after its release, second releases and missing ones. For tests and debugging: it is slow.

    | red zone, a page | the block, poisoned | red zone, a page |

    checked = CheckingAllocator(PinnedPool("1GiB"))
    block = checked.allocate(nbytes)
    block.tensor(...)[...]            # NaN, or -1, until it is written
    block.release(after=event)        # recorded; the device may still write
    checked.allocate(...)             # checks released blocks that are complete: BlockCorruptedError if a zone was written
    checked.check()                   # waits for the device, and checks all released blocks
    block.release()                   # BlockReleasedError, with the places of its allocation and of its release
    checked.close()                   # PoolStateError: the blocks that are still live, and the stack of each allocation

A finalizer cannot check a block: the device may still use it, and querying an event is a device call. So the allocator keeps a
released block until an ordinary call finds its last event complete.
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
"""Size of the zone on each side: a page, so that blocks are page-aligned as the pool's are."""

_ZONE_BYTE = 0xA5
POISON_BYTE = 0xFF
"""Byte that fills unwritten memory: NaN of every float type, -1 of every integer type, so that reads of it are conspicuous."""

_FRAMES = 8
"""Number of stack frames to keep: enough to reach beyond a framework's own, few enough to read."""


@dataclass(slots=True, eq=False)
class _Guarded:
    """A block of the pool that contains the zones and the user's bytes."""

    inner: PinnedBlock
    nbytes: int
    allocated_at: str
    events: tuple[Event, ...] = ()
    """Events until which the device may use it, once it was released."""

    def poison(self) -> None:
        self._bytes()[ZONE_BYTES : ZONE_BYTES + self.nbytes] = POISON_BYTE

    def damage(self) -> str:
        """Text that names the written bytes of the zones; "" for none."""
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
    """A block between zones within a pool's block; raises when it is released twice."""

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
    """An allocator of `pool`'s blocks that adds red zones and poison to each, and checks releases. Thread-safe.

    Each block takes `2 * ZONE_BYTES` more. `allocate` makes the host wait for the bytes' earlier users, because it writes them;
    `stream` has nothing to wait for then. The next call of the allocator, on any thread, raises errors that were found.
    `close`, or leaving `with`, ends only the checks: the pool's maker closes the pool.
    """

    def __init__(self, pool: PinnedPool) -> None:
        self.pool: Final = pool
        self._lock = threading.Lock()
        self._serials = count(1)  # `next` is one atomic step, and so is `pop` of a dictionary
        self._live: dict[int, _Guarded] = {}
        self._returned: deque[_Guarded] = deque()
        self._waiting: list[_Guarded] = []

    @property
    def device(self) -> Device:
        return self.pool.device

    def allocate(self, nbytes: int | str, stream: Stream | None = None) -> PinnedBlock:
        """Allocate as `PinnedPool.allocate` does. Raises `BlockCorruptedError`, once, for errors found since the last call."""
        nbytes = parse_size(nbytes, what="allocate")
        self._settle(wait=False)
        padded = nbytes + 2 * ZONE_BYTES
        try:
            inner = self.pool.allocate(padded, stream)
        except HostMemoryExhausted:
            if not self._waiting:
                raise
            inner = None  # retried outside of the except block, whose traceback would hold its frames' objects
        if inner is None:
            self._settle(wait=True)
            inner = self.pool.allocate(padded, stream)
        guarded = _Guarded(inner, nbytes, _where())
        guarded._bytes()[:] = _ZONE_BYTE
        guarded.poison()
        serial = next(self._serials)
        self._live[serial] = guarded
        return _CheckedBlock(self, serial, guarded)

    def note_released(self, ticket: Ticket, events: tuple[Event, ...]) -> None:
        """Record the release of a block; only blocks call it. Raises `BlockReleasedError` unless the ticket is of a live block
        of this allocator."""
        guarded = self._live.pop(ticket[0], None)
        if guarded is None:
            raise BlockReleasedError(
                f"note_released: expected the ticket of a live block of this allocator, got {ticket}: another allocator's, or "
                f"one given back before; give a block back to who made it, once"
            )
        guarded.events = events
        self._returned.append(guarded)

    def check(self) -> None:
        """Check every released block. The host waits for the device. Raises `BlockCorruptedError`."""
        self._settle(wait=True)

    def stats(self) -> PoolStats:
        """Statistics of the pool, zones included. Raises `BlockCorruptedError`."""
        self._settle(wait=False)
        return self.pool.stats()

    def close(self) -> None:
        """Check all blocks as `check` does: afterwards the pool has back every block that was released.

        Raises `PoolStateError` while blocks are live, with a list of them and the stack of each allocation.
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
                if not wait and not all(event.query() for event in guarded.events):
                    self._waiting.append(guarded)
                    continue
                for event in guarded.events:
                    event.synchronize()  # the last device access to the block -> the host checks it
                if damage := guarded.damage():
                    found.append(damage)
                guarded.poison()
                guarded.inner.release()
        if found:
            raise BlockCorruptedError("; ".join(found))


def _where() -> str:
    """Text of the frames outside of this module, innermost first. Text, because a kept frame would keep its objects."""
    frame: FrameType | None = sys._getframe(1)
    places: list[str] = []
    while frame is not None and len(places) < _FRAMES:
        code = frame.f_code
        if code.co_filename != __file__:
            places.append(f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return " < ".join(places)
