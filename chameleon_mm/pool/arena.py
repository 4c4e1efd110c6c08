"""Block of host memory in parts. It is released to its pool after its last part is released.

arena = Arena(block, latest)                # `latest()` returns events after all copies to or from it so far
part = arena.part(offset, nbytes)           # used like a block: `buffer`, `nbytes`, `release(after)`
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from chameleon_mm.device.protocols import Event
from chameleon_mm.pool.block import PinnedBlock, Uncopied
from chameleon_mm.pool.chunks import LateEvent


class Arena(Uncopied):
    """Block, with the number of its live parts."""

    def __init__(self, block: PinnedBlock, latest: Callable[[], tuple[Event, ...]]) -> None:
        self.block, self._latest, self._parts = block, latest, 0

    def part(self, offset: int, nbytes: int) -> ArenaPart:
        """Return a new part of the block."""
        self._parts += 1
        return ArenaPart(self, offset, nbytes)

    def let_go(self) -> None:
        self._parts -= 1
        self.release_if_empty()

    def release_if_empty(self) -> None:
        """Release the block, unless parts are in use. Note [Host block]: the next owner's copy comes after the latest copies of
        this arena. `latest` is called only when there is a next owner."""
        if not self._parts:
            self.block.release(after=LateEvent(self._latest))


class ArenaPart(Uncopied):
    """Part of an arena, with the methods of a block that a host copy needs."""

    __slots__ = ("_arena", "_offset", "nbytes")

    pending_events: tuple[Event, ...] = ()

    def __init__(self, arena: Arena, offset: int, nbytes: int) -> None:
        self._arena: Arena | None = arena
        self._offset, self.nbytes = offset, nbytes

    @property
    def buffer(self) -> Tensor:
        """Memory of the part as a flat uint8 tensor."""
        assert self._arena is not None, "a part of host memory was used after its release"
        return self._arena.block.buffer[self._offset : self._offset + self.nbytes]

    def release(self, after: Event | None = None) -> None:
        """Release the part. A second call does nothing. `after`: as for a block; the arena's own event covers it."""
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.let_go()
