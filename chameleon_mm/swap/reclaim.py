"""Reclaim device memory as soon as its copy out is done, without a wait of the host. Note [Reclaim].

    queue.add(entry)                  # a device buffer whose copy to the host is queued or running; the queue holds it
    queue.reclaim_complete()          # drops the buffers whose copies are complete, without a wait
    queue.reclaim_until(enough)       # under pressure, oldest first: compute waits for the copy, then the buffer is dropped
    lending.lend(); lending.settle()  # an allocator with a hook may reclaim lent buffers between these two calls

`record_stream` is not used, because it frees a block only when the host sees an event complete. The host runs far ahead of the
device, so no block would be freed while a step is issued. Instead, the stream that owns the block waits for the copy. That
stream's later work can then reuse the block at once, in stream order, independent of the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from chameleon_mm.device.protocols import AllocatorHook
from chameleon_mm.swap.forms import WHOLE
from chameleon_mm.swap.host_copy import State
from chameleon_mm.swap.saved_storage import SavedStorage


class Reclaimable(Protocol):
    """Device buffer whose copy to the host is queued or running."""

    @property
    def nbytes(self) -> int: ...

    @property
    def reclaimed(self) -> bool:
        """True if the buffer was reclaimed or its copy was cancelled. The queue then removes it."""

    def reclaim_if_copied(self) -> bool:
        """Free the buffer without a wait if the host sees the copy complete. Returns True if it did."""

    def reclaim(self) -> None:
        """Issue the queued part of the copy, order the owner stream after the copy, and free the buffer."""


class Lending:
    """Loans of buffers to the allocator of their device. A buffer is lent once its whole copy out was handed to the device."""

    __slots__ = ("_lent", "_may_lend", "_num_reclaimed", "_waiting", "hook")

    def __init__(self, hook: AllocatorHook, *, may_lend: Callable[[], bool]) -> None:
        """`may_lend()` returns True if only the stream that owns a buffer can have used it, and no recorder counts
        allocations."""
        self.hook = hook
        self._may_lend = may_lend
        self._waiting: deque[SavedStorage] = deque()
        self._lent: deque[SavedStorage] = deque()
        self._num_reclaimed = 0

    @property
    def has_any(self) -> bool:
        return bool(self._waiting or self._lent)

    def add(self, saved: SavedStorage) -> None:
        """Note a storage whose copy out was queued."""
        self._waiting.append(saved)

    def settle(self) -> None:
        """Note which buffers the allocator has reclaimed since the last call. Called at every hook."""
        now = self.hook.reclaimed
        if now == self._num_reclaimed:
            return
        self._num_reclaimed = now
        for saved in self._lent:
            if saved.slot.lent is not None and saved.slot.lent.reclaimed:
                saved.take_back()
        self._lent = deque(saved for saved in self._lent if saved.slot.lent is not None)

    def lend(self) -> None:
        """Lend the buffers whose copies were handed to the device. If none may be lent, take all back. Called at every hook."""
        if not self._may_lend():
            self.take_back()
            return
        while self._lent and self._lent[0].slot.lent is None:
            self._lent.popleft()
        while self._waiting and ((copy := self._waiting[0].copy) is None or copy.out.ended):
            saved = self._waiting.popleft()
            _lend(saved, self.hook)
            if saved.slot.lent is not None:
                self._lent.append(saved)

    def take_back(self) -> None:
        """Take all buffers back, and forget the buffers that wait to be lent."""
        while self._lent:
            self._lent.popleft().take_back()
        self._waiting.clear()


def _lend(saved: SavedStorage, hook: AllocatorHook) -> None:
    """Lend the memory if the storage moves whole. The allocator reclaims it only if nothing else refers to the storage then."""
    copy = saved.copy
    if saved.state is not State.SWAPPING_OUT or saved.form is not WHOLE or copy is None:
        return
    if copy.out.done is not None and not copy.out.failed and copy.block is not None:
        saved.slot.lend(hook, copy.out.done)


class ReclaimQueue:
    """Queue of buffers that are being copied out, oldest first."""

    __slots__ = ("entries", "pending_bytes")

    def __init__(self) -> None:
        self.entries: deque[Reclaimable] = deque()
        """Buffers, oldest first. Other classes only read this."""
        self.pending_bytes = 0
        """Total bytes of the entries. An entry reclaimed in another way counts until it is the oldest."""

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, entry: Reclaimable) -> None:
        self.entries.append(entry)
        self.pending_bytes += entry.nbytes

    def reclaim_complete(self) -> int:
        """Free buffers, oldest first, until one whose copy is not complete. Returns the bytes reclaimed."""
        freed = 0
        while self.entries:
            if not self.entries[0].reclaimed:
                if not self.entries[0].reclaim_if_copied():
                    break
                freed += self.entries[0].nbytes
            self._forget_oldest()
        return freed

    def reclaim_until(self, enough: Callable[[], bool]) -> int:
        """Reclaim entries, oldest first, until `enough()`. Returns the bytes reclaimed."""
        freed = 0
        while self.entries and not enough():
            oldest = self.entries[0]
            if not oldest.reclaimed:
                oldest.reclaim()  # if this raises, the entry stays, to be reclaimed later
                freed += oldest.nbytes
            self._forget_oldest()
        return freed

    def reclaim_some_until(self, enough: Callable[[], bool], some: Callable[[Reclaimable], bool]) -> None:
        """Reclaim the entries for which `some` is true, oldest first, until `enough()`."""
        for entry in filter(some, tuple(self.entries)):
            if enough():
                return
            if not entry.reclaimed:
                entry.reclaim()  # removed from the queue once it is the oldest

    def _forget_oldest(self) -> None:
        self.pending_bytes -= self.entries.popleft().nbytes
