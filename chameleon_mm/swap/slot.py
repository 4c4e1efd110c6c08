"""Slot of a saved storage: the storage itself, the saved tensors over it, and those that one copy has. Note [Identity].

    slot = Slot(storage, saved, alloc_stream)
    slot.is_alone()                     # only the session refers to the storage: its memory may go
    slot.includes(saved)                # a copy that began before has the bytes that are saved now
    slot.move_to(storage)               # all saved tensors lie there from now on

Note [In place]: a saved storage keeps its storage object and its version counters. Only its memory goes and comes back, by
`Stream.resize`. Each saved tensor has an alias, `t.detach()`, which a handle holds; a use returns an alias of that. Memory goes
only if the use count says that nothing else refers to the storage. So a storage that the model, an optimizer or a user holds is
never emptied, and nothing can write to an empty one.

    y = model(x); y saved, and copied to the host     # the model holds y: its memory stays, and each hook tries again
    del y                                             # the next hook empties the storage
    backward uses it                                  # the same storage has memory again; its alias sees the bytes
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chameleon_mm.device import Event, Stream
from chameleon_mm.device.holders import held_alone
from chameleon_mm.device.protocols import AllocatorHook, HeldStorage
from chameleon_mm.swap.calling_thread import (
    CallSite,
    ComputeStreams,
    OperatorNumber,
    call_site,
    current_operator,
    made_before,
    sequence_nr,
    this_thread,
)
from chameleon_mm.swap.handles import SavedBytes, cover_all, flat_bytes

if TYPE_CHECKING:
    from chameleon_mm.record.storages import TracedStorage


class LastSave:
    """Record shared by all slots of one storage: step and hook of its latest save, and whether it was ever emptied. No
    `__init__`: one is made at every save."""

    __slots__ = ("emptied", "epoch", "hook", "num_claims", "storage")

    storage: weakref.ref[torch.UntypedStorage]
    epoch: int
    hook: int
    num_claims: int
    emptied: bool
    """True if its memory went and came back with the bytes of one copy, which lacks bytes that other claims save."""


class Slot:
    """Saved storage and the saved tensors over it."""

    __slots__ = (
        "alloc_stream", "began_in", "came_back", "first", "is_packed", "key", "last_save", "lent", "noted_in", "saved_nbytes",
        "saves", "storage", "traced", "views",
    )  # fmt: skip

    def __init__(self, storage: torch.UntypedStorage, saved: SavedBytes, alloc_stream: Stream) -> None:
        self.storage: torch.UntypedStorage | None = storage
        """Storage, with or without memory; None: it is not needed any more."""
        self.is_packed = False
        """True if the storage has the bytes of the saved tensors side by side, so that none of them lies in it."""
        self.key = id(storage)
        """Id of the storage that was saved."""
        self.first = weakref.ref(storage)
        self.saved_nbytes = storage.nbytes()
        self.alloc_stream = alloc_stream
        """Stream whose allocator the memory belongs to."""
        self.came_back = False
        """True if swapping wrote the memory, ordered on `alloc_stream`, and the model never did."""
        self.lent: HeldStorage | None = None
        """Lent memory, while the allocator may reclaim it."""
        self.traced: TracedStorage | None = None
        """Record in the trace, if the step that saved it is recorded."""
        self.noted_in = -1
        """Latest step in which the profiler saw a save of it."""
        self.began_in: tuple[OperatorNumber, CallSite | None] | None = None
        """Operator and call site at whose hook the copy out began."""
        self.views = [saved]
        """All saved tensors over it, each with an alias of the session."""
        self.saves = [saved]
        """Saves from before the copy out began, which that copy has. None is known to be included in another."""
        last = self.last_save = LastSave()
        last.storage, last.epoch, last.hook, last.num_claims, last.emptied = self.first, -1, 0, 0, False

    def note_save(self, epoch: int, hook: int) -> tuple[bool, int | None]:
        """Note a save at that hook of a step. Returns True if it is this record's first in the step, and how many hooks ago any
        record of its storage was last saved in the step (None: it was not)."""
        first, self.noted_in = self.noted_in != epoch, epoch
        last = self.last_save
        hooks_ago = hook - last.hook if last.epoch == epoch else None
        last.epoch, last.hook = epoch, hook
        return first, hooks_ago

    def note_traced(self, traced: TracedStorage) -> None:
        """Note its record in this step's trace."""
        self.traced = traced
        traced.aliases += len(self.views)

    def add_alias(self, saved: SavedBytes) -> None:
        """Add one more alias of the session over the storage."""
        if self.is_packed:
            saved.move_to(None)
        self.views.append(saved)
        if self.traced is not None:
            self.traced.aliases += 1

    # --- its memory

    def is_alone(self) -> bool:
        """True if only the session's aliases and no other Python object refer to the storage, and it may be resized. It may not
        if NumPy or another process was given its address."""
        if self.storage is None:
            return False
        return held_alone(self, 0 if self.is_packed else len(self.views)) and self.storage.resizable()

    def lend(self, hook: AllocatorHook, done: Event) -> None:
        """Lend the memory, which is read until `done`, to the allocator. That takes it only if nothing else refers to the
        storage by then."""
        storage = self.storage
        if storage is not None and storage.resizable():
            self.lent = hook.hold(storage, done, self.alloc_stream, len(self.views))

    def is_back(self) -> bool:
        """Take the memory back, if it is lent. Returns False if the allocator has reclaimed it."""
        lent, self.lent = self.lent, None
        return lent is None or lent.withdraw()

    def empty(self, streams: ComputeStreams) -> None:
        """Let the memory go, in stream order."""
        assert self.storage is not None
        streams.join_all(self.alloc_stream)  # Note [Reclaim]: its next owner is on the stream that allocated it
        self.alloc_stream.resize(self.storage, 0)

    def note_emptied(self) -> None:
        """Note that the memory is gone."""
        if not self.is_packed:
            self.last_save.emptied = True
        if self.traced is not None:
            self.traced.emptied(self.traced)

    def free(self) -> None:
        """Mark the bytes in memory as no longer needed, on the stream that owns the memory."""
        assert self.storage is not None
        self.alloc_stream.free(flat_bytes(self.storage))

    def copied_on(self, compute: Stream, streams: ComputeStreams) -> torch.UntypedStorage:
        """Return a copy of the bytes, which are ready on another stream, in memory of `compute`. Raises
        `torch.OutOfMemoryError`."""
        assert self.storage is not None
        compute.wait(self.alloc_stream.record())
        whole = compute.alloc(self.storage.nbytes())
        compute.copy(whole, flat_bytes(self.storage))
        streams.join_all(self.alloc_stream)  # Note [Reclaim]: its next owner comes after that read
        return whole.untyped_storage()

    # --- place of its saved tensors

    def move_to(self, storage: torch.UntypedStorage) -> None:
        """Move all saved tensors to `storage`, which has their bytes. The memory of the previous storage goes."""
        for saved in self.views:
            saved.move_to(storage)
        self.storage, self.first, self.key = storage, weakref.ref(storage), id(storage)

    def keep_instead(self, packed: torch.UntypedStorage) -> None:
        """Hold `packed` from now on. No saved tensor lies in it: their aliases lie in no storage."""
        for saved in self.views:
            saved.move_to(None)
        self.storage, self.is_packed = packed, True

    def clear(self) -> None:
        """Release the storage and the aliases."""
        if self.traced is not None:
            self.traced.aliases -= len(self.views)
        self.storage = None
        self.views.clear()
        self.saves.clear()

    # --- saves that its copy has

    def is_record_of(self, storage: torch.UntypedStorage) -> bool:
        """True if `storage` is the saved storage and still has its size."""
        return self.first() is storage and self.saved_nbytes == storage.nbytes()

    def includes(self, saved: SavedBytes, *, same_bytes: bool = False) -> bool:
        """True if its copy, begun or not, is known to have these bytes of its storage, which are saved now. `same_bytes`: all
        saves cover the same bytes."""
        return any(earlier.copy_includes(saved, same_bytes=same_bytes) for earlier in self.saves)

    def include(self, saved: SavedBytes) -> None:
        """Include these bytes in a copy that has them or will have them."""
        self.saves = [earlier for earlier in self.saves if not earlier.moved]
        self.saves.append(saved)

    def has_uncovered(self) -> bool:
        """True if it has bytes that no save covers. Note [Uncovered]. Only the session writes gathered bytes."""
        first, nbytes = self.saves[0], self.saved_nbytes
        if first.is_dense and first.begin == 0 and first.end >= nbytes:  # the usual case
            return False
        return not self.is_packed and not cover_all(self.saves, nbytes)

    def note_begun(self) -> None:
        """Note that the copy out begins at a hook of the current operator."""
        self.began_in = (this_thread.number, sequence_nr()), call_site()  # as `current_operator` does, without a call

    def was_given(self, saved: SavedBytes, t: Tensor) -> bool:
        """True if the operator that saves `t` was given it, and began the copy out.

        The maker of `t` does not decide that. In-place operators save what they were given (`a.hypot_(b)`), and a function of
        the user writes between operators that it calls. So a counter that has not moved since before the copy must confirm it.
        """
        if self.began_in is None:
            return False
        operator, site = self.began_in
        if operator != current_operator() or not self.includes(saved, same_bytes=True) or not made_before(t, operator):
            return False
        return site == call_site()

    def was_written(self, times: int) -> bool:
        """True if each counter of its saves that has not moved since shows exactly `times` writes."""
        return all(saved.expected == times for saved in self.saves if not saved.moved)

    def unwritten(self) -> SavedBytes | None:
        """Return a save that was not written to since, or None if all were."""
        for saved in self.saves:
            if saved.alias._version == saved.expected:
                return saved
        return None
