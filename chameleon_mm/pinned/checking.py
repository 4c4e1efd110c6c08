"""Finds who writes beside a block, uses it after its release, or releases it twice. For tests and for hunting: it costs.

    | red zone, a page | the block, poisoned | red zone, a page |

    pool = CheckingAllocator(PinnedPool("1GiB"))
    block.tensor(...)[...]            # NaN, or -1, until it is written
    block.release(after=event)        # noted; the device may still write
    pool.allocate(...)                # looks at what was released and is complete: BlockCorruptedError if a zone was written
    pool.check()                      # waits for the device, and looks at all of it
    block.release()                   # BlockReleasedError: where it was allocated, and where it was released

A finalizer may not look: device work may be under way on the block, and asking an event is a call of the device. So a released
block stays the wrapper's until an ordinary call finds its last event complete.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import numpy as np
import numpy.typing as npt

from chameleon_mm.device.protocols import Event, Stream
from chameleon_mm.errors import BlockCorruptedError, BlockReleasedError, HostMemoryExhausted
from chameleon_mm.pinned.allocator import Allocator, AllocatorWrapper, Stats, block_nbytes
from chameleon_mm.pinned.block import LentBlock, PinnedBlock, Ticket

ZONE_BYTES = 4096
"""Size of the zone on each side: a page, so that blocks lie on pages as they do without the wrapper."""

_ZONE_BYTE = 0xA5
POISON_BYTE = 0xFF
"""Byte that fills unwritten memory, every float type's NaN, every integer type's -1: what shows most when it is read."""

_FRAMES = 4


@dataclass(slots=True, eq=False)
class _Guarded:
    """An inner block, and where the zones and the user's bytes lie in it."""

    inner: PinnedBlock
    nbytes: int
    allocated_at: str

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


class _CheckedBlock(LentBlock):
    """A block that minds being released twice."""

    __slots__ = ("_allocated_at", "_released_at")

    def __init__(self, inner: PinnedBlock, owner: CheckingAllocator, serial: int, nbytes: int, allocated_at: str) -> None:
        super().__init__(inner, owner, serial, ZONE_BYTES, nbytes)
        self._allocated_at = allocated_at
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


class CheckingAllocator(AllocatorWrapper):
    """`inner`, with red zones around every block, poison in it, and its releases checked. Thread-safe where `inner` is.

    Each block takes `2 * ZONE_BYTES` more. `allocate` makes the host wait for the bytes' earlier users, because it writes them;
    `stream` has nothing to wait for then. What was found is raised by the next call of the wrapper, on whatever thread.
    """

    def __init__(self, inner: Allocator) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._guarded: dict[int, _Guarded] = {}
        self._returned: deque[_Guarded] = deque()
        self._waiting: list[_Guarded] = []

    def allocate(self, nbytes: int | str, stream: Stream | None = None) -> PinnedBlock:
        """Allocate as `Allocator.allocate` does. Raises `BlockCorruptedError`, once, for what was found since the last call."""
        nbytes = block_nbytes(nbytes)
        self._settle(wait=False)
        padded = nbytes + 2 * ZONE_BYTES
        try:
            inner = self.inner.allocate(padded, stream)
        except HostMemoryExhausted:
            if not self._waiting:
                raise
            inner = None  # retried outside of the except block, whose traceback would hold what it mentions
        if inner is None:
            self._settle(wait=True)
            inner = self.inner.allocate(padded, stream)
        guarded = _Guarded(inner, nbytes, _where())
        guarded.draw_zones()
        guarded.poison()
        serial = next(self._serials)
        self._guarded[serial] = guarded
        return _CheckedBlock(inner, self, serial, nbytes, guarded.allocated_at)

    def note_released(self, ticket: Ticket, events: tuple[Event, ...]) -> None:
        """Note the release of a block; called by blocks alone. Raises `BlockReleasedError` for a ticket that is not a live
        block's of this allocator."""
        guarded = self._guarded.pop(ticket[0], None)
        if guarded is None:
            raise BlockReleasedError(
                f"take_back: expected the ticket of a live block of this allocator, got {ticket}: another allocator's, or one "
                f"given back before; give a block back to who made it, once"
            )
        guarded.inner.set_pending(events)
        self._returned.append(guarded)

    def check(self) -> None:
        """Look at every block that was released. The host waits for the device. Raises `BlockCorruptedError`."""
        self._settle(wait=True)

    def stats(self) -> Stats:
        """Statistics of the inner allocator, zones included. Raises `BlockCorruptedError`."""
        self._settle(wait=False)
        return self.inner.stats()

    def close(self) -> None:
        """Check all blocks as `check` does: afterwards the inner allocator has back every block that was released."""
        self.check()

    def _settle(self, *, wait: bool) -> None:
        """Check, poison and release the blocks whose last device work is complete."""
        found = []
        with self._lock:
            while self._returned:
                self._waiting.append(self._returned.popleft())
            waiting, self._waiting = self._waiting, []
            for guarded in waiting:
                if not wait:
                    guarded.inner.forget_complete()
                    if guarded.inner.pending_events:
                        self._waiting.append(guarded)
                        continue
                if damage := guarded.damage():  # the host waits here, where it was told to
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
