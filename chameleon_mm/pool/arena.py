"""A block of host memory whose parts are let go of one by one: it goes back to its pool with the last of them.

arena = Arena(block, latest)                # `latest()` returns events after all that was copied to or from it by then
part = arena.part(offset, nbytes)           # as a block, to whoever copies: `buffer`, `nbytes`, `release(after)`
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from chameleon_mm.device.protocols import Event
from chameleon_mm.pool.block import PinnedBlock, Uncopied
from chameleon_mm.pool.chunks import LateEvent


class Arena(Uncopied):
    """A block and the number of its parts."""

    def __init__(self, block: PinnedBlock, latest: Callable[[], tuple[Event, ...]]) -> None:
        self.block, self._latest, self._parts = block, latest, 0

    def part(self, offset: int, nbytes: int) -> ArenaPart:
        """A part of it that has not been let go of."""
        self._parts += 1
        return ArenaPart(self, offset, nbytes)

    def let_go(self) -> None:
        self._parts -= 1
        self.release_if_empty()

    def release_if_empty(self) -> None:
        """Give the block back, unless parts of it are in use. Note [Host block]: its next owner's copy comes after the latest
        ones of this one, which are not asked for before there is such an owner."""
        if not self._parts:
            self.block.release(after=LateEvent(self._latest))


class ArenaPart(Uncopied):
    """A part of an arena, with what the owner of a host copy asks of a block."""

    __slots__ = ("_arena", "_offset", "nbytes")

    pending_events: tuple[Event, ...] = ()

    def __init__(self, arena: Arena, offset: int, nbytes: int) -> None:
        self._arena: Arena | None = arena
        self._offset, self.nbytes = offset, nbytes

    @property
    def buffer(self) -> Tensor:
        """The memory as a flat uint8 tensor."""
        assert self._arena is not None, "a part of host memory was used after its release"
        return self._arena.block.buffer[self._offset : self._offset + self.nbytes]

    def release(self, after: Event | None = None) -> None:
        """Let go of it. A second call does nothing. `after`: as for a block; the arena's own event covers it."""
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.let_go()
