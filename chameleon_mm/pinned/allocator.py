"""The interface of an allocator of pinned blocks, and the base class of wrappers around one.

    class Counting(AllocatorWrapper):
        def allocate(self, nbytes, stream=None):               # bytes, or text: `block_nbytes(nbytes)` is a number
            block = super().allocate(nbytes, stream)       # a block of ours over a block of the inner one's
            self.count += 1
            return block
        def note_released(self, ticket, events):           # in a finalizer perhaps: no lock, no device
            self.count -= 1
            super().note_released(ticket, events)          # the inner block goes back, with its events

    pool = CheckingAllocator(LimitedAllocator(PinnedPool("8GiB"), "1GiB"))      # they nest in any order

A wrapper is an allocator, holds one, and knows nothing else of it: features are composed, not switched on. Modelled on the
resource adaptors of RMM, the RAPIDS memory manager. A wrapper sees releases because the blocks it hands out are its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from types import TracebackType
from typing import Any, Final, Protocol, Self

from chameleon_mm.device.protocols import Device, Event, Stream
from chameleon_mm.pinned.block import PinnedBlock, Ticket
from chameleon_mm.units import parse_size


class Stats(Protocol):
    """Numbers of one moment."""

    def to_dict(self) -> Mapping[str, Any]:
        """The fields by name, for JSON."""


class Allocator(Protocol):
    """Gives blocks of pinned memory: `PinnedPool`, `ReplayPool`, and every wrapper around one."""

    @property
    def device(self) -> Device: ...

    def allocate(self, nbytes: int | str, stream: Stream | None = None) -> PinnedBlock:
        """A block of `nbytes` (an int, or text such as "1MiB"). `stream` waits for the bytes' earlier users; the host does not.

        Raises `HostMemoryExhausted` (a `MemoryError`) where that much cannot be had.
        """

    def stats(self) -> Stats:
        """Statistics of what it holds now."""


def block_nbytes(nbytes: int | str) -> int:
    """Bytes of a request, which may be text. Raises `TypeError` or `ValueError` for one that is no number of bytes."""
    return parse_size(nbytes, what="allocate")


class AllocatorWrapper:
    """An allocator around `inner` that changes nothing. Its blocks hold it; thread-safe where `inner` is.

    `stats` is the inner allocator's. `close`, or leaving `with`, ends the wrapper alone: `inner` is whoever made it's to close.
    """

    def __init__(self, inner: Allocator) -> None:
        self.inner: Final = inner
        """The allocator that this one is around."""
        self._serials = count(1)  # `next` of it is one atomic step, and so are `pop` and the like of a dictionary
        self._lent: dict[int, PinnedBlock] = {}

    @property
    def device(self) -> Device:
        return self.inner.device

    def allocate(self, nbytes: int | str, stream: Stream | None = None) -> PinnedBlock:
        """Allocate as `Allocator.allocate` does."""
        return self._lend(self.inner.allocate(nbytes, stream))

    def note_released(self, ticket: Ticket, events: tuple[Event, ...]) -> None:
        """Release the inner block with the outer one's events; called by blocks alone. Takes no lock, calls no device."""
        self._take_inner(ticket, events).release()

    def stats(self) -> Stats:
        return self.inner.stats()

    def close(self) -> None:
        """End what the wrapper itself holds. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} around {self.inner!r}>"

    def _take_inner(self, ticket: Ticket, events: tuple[Event, ...]) -> PinnedBlock:
        """Return the inner block of one that was released: with its events, still to be released."""
        inner = self._lent.pop(ticket[0])
        inner.set_pending(events)
        return inner

    def _lend(self, inner: PinnedBlock) -> PinnedBlock:
        serial = next(self._serials)
        self._lent[serial] = inner
        return inner.lend(self, serial)
