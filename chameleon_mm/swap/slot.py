"""Slot of a saved storage: the storage, the saved tensors that view it, and the saves that one copy includes. Note [Identity].

    slot = Slot(storage, saved, alloc_stream)
    slot.is_alone()                     # only the session refers to the storage: its memory may go
    slot.includes(saved)                # a copy that began before has the bytes that are saved now
    slot.move_to(storage)               # all saved tensors lie there from now on

Note [In place]: a saved storage keeps its storage object and its version counters. `Stream.resize` frees only the memory under
it, and allocates that again. Each saved tensor has an alias, `t.detach()`, which a handle holds; a use returns an alias of that
alias. The memory is freed only if the use count shows no other reference to the storage. So a storage that the model, an
optimizer or a user holds is never emptied. Nothing can write to an empty storage.

    y = model(x); y saved, and copied to the host     # the model holds y: its memory stays, and each hook tries again
    del y                                             # the next hook empties the storage
    backward uses it                                  # the same storage has memory again; its alias sees the bytes
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from chameleon_mm.device import Event, Stream
from chameleon_mm.device.holders import held_alone
from chameleon_mm.device.protocols import AllocatorHook, HeldStorage
from chameleon_mm.swap.calling_thread import ComputeStreams
from chameleon_mm.swap.handles import SavedBytes, flat_bytes

if TYPE_CHECKING:
    from chameleon_mm.record.storages import TracedStorage


class Slot:
    """Saved storage, with the saved tensors that view it."""

    __slots__ = (
        "alloc_stream", "came_back", "first", "key", "lent", "saved_at", "saved_in", "saved_nbytes",
        "saves", "storage", "traced", "views",
    )  # fmt: skip

    def __init__(self, storage: torch.UntypedStorage, saved: SavedBytes, alloc_stream: Stream) -> None:
        self.storage: torch.UntypedStorage | None = storage
        """Storage, with or without memory; None once it is no longer needed."""
        self.key = id(storage)
        self.first = weakref.ref(storage)
        self.saved_nbytes = storage.nbytes()
        self.alloc_stream = alloc_stream
        """Stream whose allocator the memory belongs to."""
        self.came_back = False
        """True if only a swap-in wrote the memory, ordered on `alloc_stream`; the model never did."""
        self.lent: HeldStorage | None = None
        """Memory lent to the allocator, which may reclaim it; None: none is lent."""
        self.traced: TracedStorage | None = None
        """Record of the storage in the trace; None unless the step that saved it is recorded."""
        self.saved_in, self.saved_at = -1, -1
        """Step and hook of the latest save, as the profiler numbers them."""
        self.views = [saved]
        """All saved tensors that view the storage, each with an alias of the session."""
        self.saves = [saved]
        """Saves made before the copy out began, which that copy includes. No save is known to be part of another."""

    def note_save(self, epoch: int, hook: int) -> tuple[bool, int | None]:
        """Note a save at `hook` of step `epoch`. Returns True if it is the first in the step. Also returns the number of hooks
        since the latest save in this step; None: there was none."""
        first = self.saved_in != epoch
        hooks_ago = None if first else hook - self.saved_at
        self.saved_in, self.saved_at = epoch, hook
        return first, hooks_ago

    def note_traced(self, traced: TracedStorage) -> None:
        """Note the storage's record in the trace of this step."""
        self.traced = traced
        traced.aliases += len(self.views)

    def add_alias(self, saved: SavedBytes) -> None:
        """Add one more alias of the session over the storage."""
        self.views.append(saved)
        if self.traced is not None:
            self.traced.aliases += 1

    # --- its memory

    def is_alone(self) -> bool:
        """True if only the session's aliases refer to the storage, and it may be resized. It must not be resized if NumPy or
        another process was given its address."""
        if self.storage is None:
            return False
        return held_alone(self, len(self.views)) and self.storage.resizable()

    def lend(self, hook: AllocatorHook, done: Event) -> None:
        """Lend the memory to the allocator. It is read until `done`. The allocator reclaims it only if nothing else refers to
        the storage at that time."""
        storage = self.storage
        if storage is not None and storage.resizable():
            self.lent = hook.hold(storage, done, self.alloc_stream, len(self.views))

    def is_back(self) -> bool:
        """Take lent memory back from the allocator. Returns False if the allocator has reclaimed it."""
        lent, self.lent = self.lent, None
        return lent is None or lent.withdraw()

    def empty(self, streams: ComputeStreams) -> None:
        """Free the device memory, in stream order."""
        assert self.storage is not None
        streams.join_all(self.alloc_stream)  # Note [Reclaim]: the allocating stream owns the memory next
        self.alloc_stream.resize(self.storage, 0)

    def note_emptied(self) -> None:
        """Note that the memory was freed."""
        if self.traced is not None:
            self.traced.emptied(self.traced)

    def free(self) -> None:
        """Tell the stream that owns the memory that its bytes are no longer needed."""
        assert self.storage is not None
        self.alloc_stream.free(flat_bytes(self.storage))

    def copied_on(self, compute: Stream, streams: ComputeStreams) -> torch.UntypedStorage:
        """Return a copy of the bytes in memory of `compute`. The bytes are ready on another stream. Raises
        `torch.OutOfMemoryError`."""
        assert self.storage is not None
        compute.wait(self.alloc_stream.record())
        whole = compute.alloc(self.storage.nbytes())
        compute.copy(whole, flat_bytes(self.storage))
        streams.join_all(self.alloc_stream)  # Note [Reclaim]: the memory is reused only after that read
        return whole.untyped_storage()

    # --- storage that the saved tensors view

    def move_to(self, storage: torch.UntypedStorage) -> None:
        """Make all saved tensors views of `storage`, which has their bytes. The memory of the previous storage is freed."""
        for saved in self.views:
            saved.move_to(storage)
        self.storage, self.first, self.key = storage, weakref.ref(storage), id(storage)

    def clear(self) -> None:
        """Release the storage and the aliases."""
        if self.traced is not None:
            self.traced.aliases -= len(self.views)
        self.storage = None
        self.views.clear()
        self.saves.clear()

    # --- saves that the copy includes

    def is_record_of(self, storage: torch.UntypedStorage) -> bool:
        """True if `storage` is the saved storage and still has its size."""
        return self.first() is storage and self.saved_nbytes == storage.nbytes()

    def includes(self, saved: SavedBytes) -> bool:
        """True if the copy, begun or not, is known to include the bytes of `saved`, which is saved now."""
        return any(earlier.copy_includes(saved) for earlier in self.saves)

    def include(self, saved: SavedBytes) -> None:
        """Add `saved` to the saves of the copy, which has its bytes or will have them."""
        self.saves = [earlier for earlier in self.saves if not earlier.moved]
        self.saves.append(saved)

    def has_uncovered(self) -> bool:
        """True if no save covers the whole storage. Note [Uncovered]."""
        for saved in self.saves:  # noqa: SIM110  # without the frame of a generator
            if saved.is_dense and saved.begin == 0 and saved.end >= self.saved_nbytes:
                return False
        return True

    def was_written(self, times: int) -> bool:
        """True if every save that was not written to since has the version `times`."""
        return all(saved.expected == times for saved in self.saves if not saved.moved)

    def unwritten(self) -> SavedBytes | None:
        """Return a save that was not written to since it was made; None if all were."""
        for saved in self.saves:
            if saved.alias._version == saved.expected:
                return saved
        return None
