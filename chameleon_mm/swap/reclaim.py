"""Reclaiming of HBM as soon as a swap-out is done, without a wait of the host. Note [Reclaim].

    queue.add(entry)                  # a device buffer whose copy to the host is queued or running; the queue holds it
    queue.reclaim_complete()          # drops the buffers whose copies are complete, without a wait
    queue.reclaim_until(enough)       # under pressure, oldest first: compute waits for the copy, then the buffer is dropped
    lending.lend(); lending.settle()  # if the device has a hook in its allocator, that may reclaim them between two calls

`record_stream` is not used: it returns a block only when the host polls an event. The host runs far ahead of the device, so
nothing would come back while a step is issued. Instead, the stream that owns the block waits for the copy. The block is then
reusable for that stream's later work at once, in stream order, independent of the host.
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
"""Share of the limit above which copies out are handed over at once, if an allocator may reclaim their sources. Above it, a
step of twice what is allocated now would find no memory. Not measured."""


class Reclaimable(Protocol):
    """Device buffer whose copy to the host is queued or running."""

    @property
    def nbytes(self) -> int: ...

    @property
    def reclaimed(self) -> bool:
        """True if the buffer was reclaimed or no longer leaves: the queue forgets it."""

    def reclaim_if_copied(self) -> bool:
        """Drop the buffer if the host sees the copy complete: no wait is needed. Returns True if it did."""

    def reclaim(self) -> None:
        """Order the owner stream after the copy, issuing the part that was still queued, and drop the buffer."""


class Lending:
    """Loans of buffers on their way out to the allocator of their device, once all of their copy was handed over."""

    __slots__ = ("_hook", "_lent", "_may_lend", "_num_reclaimed", "_waiting", "memory_is_short")

    def __init__(self, hook: AllocatorHook, *, may_lend: Callable[[], bool]) -> None:
        """`may_lend()`: True if the stream that owns a buffer is the only one that may have used it, and no recorder counts
        allocations."""
        self._hook = hook
        self._may_lend = may_lend
        self._waiting: deque[SavedStorage] = deque()
        self._lent: deque[SavedStorage] = deque()
        self._num_reclaimed = 0
        self.memory_is_short = True
        """True if as much as possible should be lent: copies are handed over at once, rather than when they can begin."""

    @property
    def has_any(self) -> bool:
        return bool(self._waiting or self._lent)

    def add(self, saved: SavedStorage) -> None:
        """Note a storage whose copy out was queued."""
        self._waiting.append(saved)

    def settle(self) -> None:
        """Note which buffers the allocator has reclaimed since the last call. Called at every hook."""
        now = self._hook.reclaimed
        if now == self._num_reclaimed:
            return
        self._num_reclaimed = now
        for saved in self._lent:
            if saved.slot.lent is not None and saved.slot.lent.reclaimed:
                saved.take_back()
        self._lent = deque(saved for saved in self._lent if saved.slot.lent is not None)

    def lend(self) -> None:
        """Lend the buffers whose copies were handed over, or take all back if none may be lent. Called at every hook."""
        if not self._may_lend():
            self.take_back()
            return
        while self._lent and self._lent[0].slot.lent is None:
            self._lent.popleft()
        while self._waiting and ((copy := self._waiting[0].copy) is None or copy.out.ended):
            saved = self._waiting.popleft()
            _lend(saved, self._hook)
            if saved.slot.lent is not None:
                self._lent.append(saved)

    def take_back(self) -> None:
        """Take all buffers back, and lend none of those that were to be lent."""
        while self._lent:
            self._lent.popleft().take_back()
        self._waiting.clear()

    def set_limits(self, limit_bytes: int, growth_bytes: int | None, *, allocated_bytes: int) -> None:
        """Set limits as `AllocatorHook.set_limits` does. `allocated_bytes`: bytes allocated now."""
        self._hook.set_limits(limit_bytes, growth_bytes)
        self.memory_is_short = allocated_bytes > limit_bytes * SHORT_SHARE


def _lend(saved: SavedStorage, hook: AllocatorHook) -> None:
    """Lend the memory if all of it will go. The allocator takes it only if nothing else refers to the storage by then."""
    copy = saved.copy
    if saved.state is not State.SWAPPING_OUT or saved.form is not WHOLE or copy is None or saved.slot.is_packed:
        return
    if copy.out.done is not None and not copy.out.failed and copy.block is not None:
        saved.slot.lend(hook, copy.out.done)


class ReclaimQueue:
    """Queue of buffers on their way out, oldest first."""

    __slots__ = ("entries", "pending_bytes")

    def __init__(self) -> None:
        self.entries: deque[Reclaimable] = deque()
        """Oldest first. Other classes only read it."""
        self.pending_bytes = 0
        """Bytes of the entries. An entry that was reclaimed in another way counts until it is the oldest."""

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, entry: Reclaimable) -> None:
        self.entries.append(entry)
        self.pending_bytes += entry.nbytes

    def reclaim_complete(self) -> int:
        """Drop buffers, oldest first, up to one whose copy is not complete. Returns the bytes reclaimed."""
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
                oldest.reclaim()  # if this raises, the entry is still here: nothing else would end it
                freed += oldest.nbytes
            self._forget_oldest()
        return freed

    def reclaim_some_until(self, enough: Callable[[], bool], some: Callable[[Reclaimable], bool]) -> None:
        """Reclaim the entries for which `some` is true, oldest first, until `enough()`."""
        for entry in filter(some, tuple(self.entries)):
            if enough():
                return
            if not entry.reclaimed:
                entry.reclaim()  # it leaves the queue once it is the oldest

    def _forget_oldest(self) -> None:
        self.pending_bytes -= self.entries.popleft().nbytes
