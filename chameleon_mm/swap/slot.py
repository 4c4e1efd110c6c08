"""The slot of a saved storage: the storage itself, the saved tensors over it, and which of them one copy has. Note [Identity].

    slot = Slot(storage, saved)
    slot.is_alone()                     # nobody but us refers to the storage: its memory may go
    slot.includes(saved)                # a copy that began before has the bytes that are saved now
    slot.move_to(storage)               # all saved tensors lie there from now on

Note [In place]: a saved storage keeps its storage object and its version counters; its memory alone goes and comes back, by
`Stream.resize`. Each saved tensor has an alias, `t.detach()`, which a handle holds, and a use returns an alias of that. Memory
goes only where the use count says that nobody else refers to the storage: what the model, an optimizer or a user holds is never
emptied, and nobody can write to what is away.

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
    """What all records of one storage share: the step and hook in which it was saved last, and whether it was ever emptied. No
    `__init__`: one is made at every save."""

    __slots__ = ("emptied", "epoch", "hook", "num_claims", "storage")

    storage: weakref.ref[torch.UntypedStorage]
    epoch: int
    hook: int
    num_claims: int
    emptied: bool
    """Whether its memory went and came back: with the bytes of one copy, which lacks what others save of it on their own."""


class Slot:
    """A saved storage, and the saved tensors over it."""

    __slots__ = (
        "alloc_stream", "began_in", "came_back", "first", "is_packed", "key", "last_save", "lent", "noted_in", "saved_nbytes",
        "saves", "storage", "traced", "views",
    )  # fmt: skip

    def __init__(self, storage: torch.UntypedStorage, saved: SavedBytes, alloc_stream: Stream) -> None:
        self.storage: torch.UntypedStorage | None = storage
        """The storage, with memory or without; None: nobody needs it any more."""
        self.is_packed = False
        """Whether the storage has the bytes of the saved tensors side by side, so that none of them lies in it."""
        self.key = id(storage)
        """Id of the storage that was saved."""
        self.first = weakref.ref(storage)
        self.saved_nbytes = storage.nbytes()
        self.alloc_stream = alloc_stream
        """The stream whose allocator the memory belongs to."""
        self.came_back = False
        """Whether what is in memory was put there by swapping, ordered on `alloc_stream`, and never by the model."""
        self.lent: HeldStorage | None = None
        """The memory, while the allocator may reclaim it."""
        self.traced: TracedStorage | None = None
        """Its record in the trace, where the step that saved it is recorded."""
        self.noted_in = -1
        """The last step in which the profiler saw a save of it."""
        self.began_in: tuple[OperatorNumber, CallSite | None] | None = None
        """The operator at one of whose hooks the copy out was begun."""
        self.views = [saved]
        """All saved tensors over it, each with an alias of ours."""
        self.saves = [saved]
        """Saves from before the copy out began, none known to be included in another: what that copy has."""
        last = self.last_save = LastSave()
        last.storage, last.epoch, last.hook, last.num_claims, last.emptied = self.first, -1, 0, 0, False

    def note_save(self, epoch: int, hook: int) -> tuple[bool, int | None]:
        """It is saved at that hook of a step. Returns whether that is the first time in the step for this record, and how many
        hooks ago its storage was saved last in it, under any record; None: it was not."""
        first, self.noted_in = self.noted_in != epoch, epoch
        last = self.last_save
        hooks_ago = hook - last.hook if last.epoch == epoch else None
        last.epoch, last.hook = epoch, hook
        return first, hooks_ago

    def note_traced(self, traced: TracedStorage) -> None:
        """Note its record in the trace of this step."""
        self.traced = traced
        traced.aliases += len(self.views)

    def add_alias(self, saved: SavedBytes) -> None:
        """Note one more alias of ours over the storage."""
        if self.is_packed:
            saved.move_to(None)
        self.views.append(saved)
        if self.traced is not None:
            self.traced.aliases += 1

    # --- its memory

    def is_alone(self) -> bool:
        """Whether nobody but us refers to the storage, no tensor but the aliases and nobody in Python, and it may be resized:
        not where NumPy or another process was given its address."""
        if self.storage is None:
            return False
        return held_alone(self, 0 if self.is_packed else len(self.views)) and self.storage.resizable()

    def lend(self, hook: AllocatorHook, done: Event) -> None:
        """Lend the memory, which is read until `done`, to the allocator. That takes it where nobody else refers to the storage
        by then."""
        storage = self.storage
        if storage is not None and storage.resizable():
            self.lent = hook.hold(storage, done, self.alloc_stream, len(self.views))

    def is_back(self) -> bool:
        """Take the memory back, if it is lent. Returns False where the allocator has reclaimed it."""
        lent, self.lent = self.lent, None
        return lent is None or lent.withdraw()

    def empty(self, streams: ComputeStreams) -> None:
        """Let the memory go, in stream order."""
        assert self.storage is not None
        streams.join_all(self.alloc_stream)  # Note [Reclaim]: its next owner is whichever stream allocated it
        self.alloc_stream.resize(self.storage, 0)

    def note_emptied(self) -> None:
        """Note that the memory has gone."""
        if not self.is_packed:
            self.last_save.emptied = True
        if self.traced is not None:
            self.traced.emptied(self.traced)

    def free(self) -> None:
        """Note on the stream that owns the memory that nobody needs what is in it."""
        assert self.storage is not None
        self.alloc_stream.free(flat_bytes(self.storage))

    def copied_on(self, compute: Stream, streams: ComputeStreams) -> torch.UntypedStorage:
        """A copy of the bytes, which are there on another stream, in memory of `compute`'s own. Raises
        `torch.OutOfMemoryError`."""
        assert self.storage is not None
        compute.wait(self.alloc_stream.record())
        whole = compute.alloc(self.storage.nbytes())
        compute.copy(whole, flat_bytes(self.storage))
        streams.join_all(self.alloc_stream)  # Note [Reclaim]: its next owner comes after that read
        return whole.untyped_storage()

    # --- where its saved tensors lie

    def move_to(self, storage: torch.UntypedStorage) -> None:
        """Have all saved tensors lie in `storage`, which has their bytes, from now on. The memory of the one before goes."""
        for saved in self.views:
            saved.move_to(storage)
        self.storage, self.first, self.key = storage, weakref.ref(storage), id(storage)

    def keep_instead(self, packed: torch.UntypedStorage) -> None:
        """Hold `packed` from now on, in which no saved tensor lies: their aliases lie nowhere."""
        for saved in self.views:
            saved.move_to(None)
        self.storage, self.is_packed = packed, True

    def clear(self) -> None:
        """Let go of the storage and of the aliases."""
        if self.traced is not None:
            self.traced.aliases -= len(self.views)
        self.storage = None
        self.views.clear()
        self.saves.clear()

    # --- which saves its copy has

    def is_record_of(self, storage: torch.UntypedStorage) -> bool:
        """Whether `storage` is the one that was saved, and still has its size."""
        return self.first() is storage and self.saved_nbytes == storage.nbytes()

    def includes(self, saved: SavedBytes, *, same_bytes: bool = False) -> bool:
        """Whether its copy, begun or not, is known to have these bytes of its storage, which are saved now. `same_bytes`: it
        has no others."""
        return any(earlier.copy_includes(saved, same_bytes=same_bytes) for earlier in self.saves)

    def include(self, saved: SavedBytes) -> None:
        """Include these bytes in a copy that has them, or will have them."""
        self.saves = [earlier for earlier in self.saves if not earlier.moved]
        self.saves.append(saved)

    def has_unwritten(self) -> bool:
        """Whether at least one of the saves has not been written to since."""
        for saved in self.saves:  # noqa: SIM110 - a generator is one more call at every hook, and so would `moved` be
            if saved.alias._version == saved.expected:
                return True
        return False

    def has_uncovered(self) -> bool:
        """Whether it has bytes that no save covers. Note [Uncovered]. What was gathered, we alone write."""
        first, nbytes = self.saves[0], self.saved_nbytes
        if first.is_dense and first.begin == 0 and first.end >= nbytes:  # as a rule
            return False
        return not self.is_packed and not cover_all(self.saves, nbytes)

    def note_begun(self) -> None:
        """Note that the copy out begins, at a hook of this operator."""
        self.began_in = (this_thread.number, sequence_nr()), call_site()  # as `current_operator` has it

    def was_given(self, saved: SavedBytes, t: Tensor) -> bool:
        """Whether the operator that saves `t` was given it, and began the copy out.

        Who made `t` does not tell: operators that write in place save what they were given (`a.hypot_(b)`), and a function of
        one's own writes between operators that it calls. So a counter that has not moved since before the copy must say so.
        """
        if self.began_in is None:
            return False
        operator, site = self.began_in
        if operator != current_operator() or not self.includes(saved, same_bytes=True) or not made_before(t, operator):
            return False
        return site == call_site()

    def was_written(self, times: int) -> bool:
        """Whether every counter under which it was saved, and that has not moved since, tells of so many writes."""
        return all(saved.expected == times for saved in self.saves if not saved.moved)

    def unwritten(self) -> SavedBytes | None:
        """A save that was not written to since; None: all were."""
        for saved in self.saves:
            if saved.alias._version == saved.expected:
                return saved
        return None
