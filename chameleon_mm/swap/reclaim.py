"""Reclaims HBM the moment a swap-out is done, without the host ever waiting. Note [Reclaim].

    queue.add(entry)                  # a device buffer whose copy to the host is queued or running; the queue's owner holds it
    queue.reclaim_complete()          # those already complete: dropped, no wait
    queue.reclaim_until(enough)       # under pressure, oldest first: compute waits for the copy, then the buffer is dropped
    lending.lend(); lending.settle()  # where the device has a hook in its allocator, that may reclaim them between two calls

Why not `record_stream`: it returns a block only when the host polls an event, and the host runs far ahead of the device, so
while a step is being issued nothing would come back. A wait on the stream that owns the block makes it reusable for that
stream's later work at once, in stream order, whatever the host does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from chameleon_mm.device.protocols import AllocatorHook
from chameleon_mm.swap.forms import WHOLE
from chameleon_mm.swap.host_copy import State
from chameleon_mm.swap.saved_storage import SavedStorage

SHORT_SHARE = 0.5
"""Share of the limit above which copies out are handed over at once where an allocator may reclaim what they
read: from there on a step of twice what is allocated now would find no memory. Not measured."""


class Reclaimable(Protocol):
    """A device buffer whose copy to the host is queued or running."""

    @property
    def nbytes(self) -> int: ...

    @property
    def reclaimed(self) -> bool:
        """Whether the buffer was reclaimed already, or is not leaving any more: the queue forgets it."""

    def reclaim_if_copied(self) -> bool:
        """Drop the buffer if the host sees the copy complete: no wait is needed. Returns whether it did."""

    def reclaim(self) -> None:
        """Order the owner stream after the copy, issuing what was still queued of it, and drop the buffer."""


class Lendable(Protocol):
    """A device buffer on its way out that may be lent to the device's allocator meanwhile."""

    @property
    def reclaimed(self) -> bool:
        """Whether nothing is left to lend."""

    @property
    def copy_is_handed_over(self) -> bool:
        """Whether no part of the copy waits any more to be handed to the device."""

    @property
    def is_lent(self) -> bool: ...

    def lend(self, hook: AllocatorHook) -> None:
        """Lend the buffer, if it is one that may be lent."""

    def settle(self) -> None:
        """Note it if the allocator has reclaimed the buffer."""

    def take_back(self) -> None:
        """Take the buffer back if the allocator has not reclaimed it, else note that it has."""


class Lending:
    """Lends buffers on their way out to the allocator of their device, once all of their copy was handed over."""

    __slots__ = ("_hook", "_lent", "_may_lend", "_num_reclaimed", "_waiting", "memory_is_short")

    def __init__(self, hook: AllocatorHook, *, may_lend: Callable[[], bool]) -> None:
        """`may_lend()`: whether the stream that owns a buffer is the only one that may have worked with it, and nobody counts
        what is allocated."""
        self._hook = hook
        self._may_lend = may_lend
        self._waiting: deque[Lendable] = deque()
        self._lent: deque[Lendable] = deque()
        self._num_reclaimed = 0
        self.memory_is_short = True
        """Whether as much as possible should be lent: copies are handed over at once, rather than when they can begin."""

    @property
    def has_any(self) -> bool:
        return bool(self._waiting or self._lent)

    def add(self, entry: Lendable) -> None:
        """Note a buffer whose copy was queued."""
        self._waiting.append(entry)

    def settle(self) -> None:
        """Note what the allocator has reclaimed since the last call. Called at every hook."""
        now = self._hook.reclaimed
        if now == self._num_reclaimed:
            return
        self._num_reclaimed = now
        for entry in self._lent:
            entry.settle()
        self._lent = deque(entry for entry in self._lent if entry.is_lent)

    def lend(self) -> None:
        """Lend the buffers whose copies were handed over. Called at every hook."""
        if not self._may_lend():
            while self._lent:
                self._lent.popleft().take_back()
            self._waiting.clear()
            return
        while self._lent and not self._lent[0].is_lent:
            self._lent.popleft()
        while self._waiting and self._waiting[0].copy_is_handed_over:
            entry = self._waiting.popleft()
            if not entry.reclaimed:
                entry.lend(self._hook)
                if entry.is_lent:
                    self._lent.append(entry)

    def set_limits(self, limit_bytes: int, growth_bytes: int | None, *, allocated_bytes: int) -> None:
        """Set limits as `AllocatorHook.set_limits` does. `allocated_bytes`: what is allocated now."""
        self._hook.set_limits(limit_bytes, growth_bytes)
        self.memory_is_short = allocated_bytes > limit_bytes * SHORT_SHARE


class ReclaimQueue:
    """Buffers on their way out, oldest first."""

    __slots__ = ("entries", "pending_bytes")

    def __init__(self) -> None:
        self.entries: deque[Reclaimable] = deque()
        """Buffers on their way out, oldest first. Others only read it."""
        self.pending_bytes = 0
        """Bytes of the entries; one that was reclaimed in another way counts until it is the oldest."""

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, entry: Reclaimable) -> None:
        self.entries.append(entry)
        self.pending_bytes += entry.nbytes

    def reclaim_complete(self) -> int:
        """Drop the buffers whose copies are complete, from the oldest on. Returns the bytes reclaimed."""
        freed = 0
        while self.entries:
            if not self.entries[0].reclaimed:
                if not self.entries[0].reclaim_if_copied():
                    break
                freed += self.entries[0].nbytes
            self._forget_oldest()
        return freed

    def reclaim_until(self, enough: Callable[[], bool]) -> int:
        """Reclaim oldest first until `enough()`. Returns the bytes reclaimed."""
        freed = 0
        while self.entries and not enough():
            oldest = self.entries[0]
            if not oldest.reclaimed:
                oldest.reclaim()  # if this raises, the entry is still here: nobody else would end it
                freed += oldest.nbytes
            self._forget_oldest()
        return freed

    def reclaim_some_until(self, enough: Callable[[], bool], some: Callable[[Reclaimable], bool]) -> None:
        """Reclaim the entries for which `some` is true, oldest first, until `enough()`."""
        for entry in filter(some, tuple(self.entries)):
            if enough():
                return
            if not entry.reclaimed:
                entry.reclaim()  # forgotten once it is the oldest

    def _forget_oldest(self) -> None:
        self.pending_bytes -= self.entries.popleft().nbytes


# --- The memory of a saved storage as a loan to the device's allocator, which may reclaim it once its copy out is handed over


class Loan:
    """A saved storage on its way out, as `reclaim.Lendable` has it."""

    __slots__ = ("_saved",)

    def __init__(self, saved: SavedStorage) -> None:
        self._saved = saved

    @property
    def reclaimed(self) -> bool:
        """Whether nothing is left to lend."""
        return self._saved.reclaimed

    @property
    def copy_is_handed_over(self) -> bool:
        """Whether no part of the copy out waits any more to be handed to the device."""
        copy = self._saved.copy
        return copy is None or copy.out.ended

    @property
    def is_lent(self) -> bool:
        return self._saved.slot.lent is not None

    def lend(self, hook: AllocatorHook) -> None:
        """Lend the memory, if all of it is to go. The allocator takes it where nobody else refers to the storage by then."""
        saved, copy = self._saved, self._saved.copy
        if saved.state is not State.SWAPPING_OUT or saved.form is not WHOLE or copy is None or saved.slot.is_packed:
            return
        if copy.out.done is not None and not copy.out.failed and copy.block is not None:
            saved.slot.lend(hook, copy.out.done)

    def settle(self) -> None:
        """Note it if the allocator has reclaimed the memory."""
        lent = self._saved.slot.lent
        if lent is not None and lent.reclaimed:
            self._saved.take_back()

    def take_back(self) -> None:
        """Take the memory back if the allocator has not reclaimed it, else note that it has."""
        self._saved.take_back()
