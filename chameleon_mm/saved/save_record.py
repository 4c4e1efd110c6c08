"""The record of a storage's saves: its number within the step, which bytes were saved when, and how many uses are left.

The base of `SavedStorage`, which has the buffers and the copies. Everything that others note about a saved storage is a method
here; its fields are read only for them.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chameleon_mm.device import Stream
from chameleon_mm.policy import StorageAction
from chameleon_mm.saved.calling_thread import CallSite, OperatorNumber, call_site, current_operator, made_before
from chameleon_mm.saved.state import State
from chameleon_mm.saved.version import SavedBytes, VersionProbe

if TYPE_CHECKING:
    from chameleon_mm.profiler.calls import Relied
    from chameleon_mm.profiler.storages import TracedStorage
    from chameleon_mm.saved.device_copy import DeviceCopy
    from chameleon_mm.saved.recipe import Proof
    from chameleon_mm.saved.saved_part import Part


class LastSave:
    """The step and hook in which a storage was saved last, shared by all records of the storage. No `__init__`: one is made at
    every save."""

    __slots__ = ("epoch", "hook", "lent", "num_claims", "storage")

    storage: weakref.ref[torch.UntypedStorage]
    epoch: int
    hook: int
    num_claims: int
    lent: weakref.ref[DeviceCopy] | None
    """Its record that lent it to the allocator, while the only one: the allocator knows of no other's weak references."""


class SaveRecord:
    """The saves of one storage that share one copy of its bytes."""

    __slots__ = (
        "__weakref__", "_began_in", "_noted_in", "_saved_bytes", "_saved_nbytes", "alloc_stream", "copies", "epoch",
        "first", "index", "is_held_for_recipes", "last_save", "nbytes", "op_is_over", "planned", "proof", "relied", "state",
        "storage_id", "swap_in_number", "traced", "uses_left", "views",
    )  # fmt: skip

    part: Part | None = None
    """Bytes of the storage that were saved; None: all of them."""
    gathered = False
    """Whether only the bytes of `part` are held, side by side: on the device as on the host."""

    def __init__(self, storage: torch.UntypedStorage, saved: SavedBytes, alloc_stream: Stream, epoch: int, index: int) -> None:
        self.state = State.ON_DEVICE
        self.epoch = epoch
        """The step in which it was saved, and the `index` of the save within it."""
        self.index = index
        self.storage_id = id(storage)
        self.first = weakref.ref(storage)
        """The storage that was saved, as long as anybody holds it."""
        self.alloc_stream = alloc_stream
        """The stream whose allocator the device copy belongs to."""
        self.nbytes = self._saved_nbytes = storage.nbytes()
        """Bytes that are held and moved: those of the saved storage, until it is gathered."""
        self._saved_bytes = [saved]
        """Saves from before the copy out began, none known to be included in another: what that copy has."""
        self._began_in: tuple[OperatorNumber, CallSite | None] | None = None
        """The operator at one of whose hooks the copy out was begun."""
        self.copies = 1
        """Number of copies of all of the storage so far, each by a record of its own, this one's included."""
        self.op_is_over = False
        """Whether the ops that saved it have ended, so that it may be copied."""
        self.views = 1
        """Handles made for it, the first for the save that it is made at; `uses_left` of them were not used since the latest
        swap-in, which is number `swap_in_number`."""
        self.uses_left = 1
        self.swap_in_number = 0
        self.traced: TracedStorage | None = None
        """Its record in the trace, where the step that saved it is recorded."""
        self.planned: StorageAction | None = None
        """Its action in the plan; None: no plan knows it."""
        last = self.last_save = LastSave()
        """The latest save of the storage, shared with its other records."""
        last.storage, last.epoch, last.hook, last.num_claims, last.lent = self.first, -1, 0, 0, None
        self._noted_in = -1
        """The last step in which the profiler saw a save of it."""
        self.relied: Relied | None = None
        """What rests on its bytes, in a step that recomputes."""
        self.proof: Proof | None = None
        """The recipe that is to be compared with it at its first use."""
        self.is_held_for_recipes = False
        """Whether autograd saved none of it: it is there for what is recomputed from it."""

    # --- what others note

    def op_began(self) -> None:
        """Note that an operator that has not ended saves it."""
        self.op_is_over = False

    def op_ended(self) -> None:
        """Note that every operator that has saved it is over."""
        self.op_is_over = True

    def add_view(self) -> None:
        """Note one more handle."""
        self.views += 1
        self.uses_left += 1

    def count_use(self, last_swap_in: int) -> int:
        """Note a use of a view that was used last after that swap-in. Returns the number of the latest swap-in."""
        if last_swap_in != self.swap_in_number:
            self.uses_left -= 1
        return self.swap_in_number

    def note_swap_in(self) -> None:
        """Note that it is on the device again: all of its views have a use left."""
        self.swap_in_number += 1
        self.uses_left = self.views

    def note_traced(self, traced: TracedStorage) -> None:
        """Note its record in the trace of this step."""
        self.traced = traced

    def hold_for_recipes(self) -> None:
        """Note that autograd saved none of it: there is no handle."""
        self.is_held_for_recipes = True
        self.views = self.uses_left = 0

    def assign(self, action: StorageAction | None) -> None:
        """Note its action in the plan that the step follows now; None: that has none for it."""
        self.planned = action

    def share_last_save(self, last: LastSave) -> None:
        """Share what is known of the storage's latest save with its other records."""
        self.last_save = last

    def note_save(self, epoch: int, hook: int) -> tuple[bool, int | None]:
        """It is saved at that hook of a step. Returns whether that is the first time in the step for this record, and how many
        hooks ago its storage was saved last in it, under any record; None: it was not."""
        first, self._noted_in = self._noted_in != epoch, epoch
        last = self.last_save
        hooks_ago = hook - last.hook if last.epoch == epoch else None
        last.epoch, last.hook = epoch, hook
        return first, hooks_ago

    # --- which saves its copy has

    def is_record_of(self, storage: torch.UntypedStorage) -> bool:
        """Whether `storage` is the one that was saved, and still has its size."""
        return self.first() is storage and self._saved_nbytes == storage.nbytes()

    def is_allocated_on(self, compute: Stream) -> bool:
        return self.alloc_stream is compute

    def includes(self, saved: SavedBytes, *, same_bytes: bool = False) -> bool:
        """Whether its copy, begun or not, is known to have these bytes of its storage, which are saved now.

        `same_bytes`: they are those of its `part`.
        """
        return any(earlier.copy_includes(saved, same_bytes=same_bytes) for earlier in self._saved_bytes)

    def was_written(self, times: int) -> bool:
        """Whether every counter under which it was saved, and that has not moved since, tells of so many writes."""
        return all(saved.probe.expected == times for saved in self._saved_bytes if not saved.probe.moved)

    def whole_probe(self) -> VersionProbe | None:
        """A probe that has not moved since the storage was saved; None: all have."""
        return next((saved.probe for saved in self._saved_bytes if not saved.probe.moved), None)

    def supersedes(self, before: SaveRecord) -> None:
        """Note that this record replaces `before`, one of the same storage whose copy came too early for what is saved now.

        It waits for the stream that saves now: what was written on another one it has only by luck.
        """
        self.copies = before.copies + 1
        if before.part is None and self.part is None and before.is_allocated_on(self.alloc_stream):
            self._saved_bytes += [earlier for earlier in before._saved_bytes if not earlier.probe.moved]

    def try_include(self, saved: SavedBytes, t: Tensor, compute: Stream) -> bool:
        """Include these bytes, written on `compute`, in its copy out, if that begins later than now. Returns whether it does.

        A copy that began at another hook of the operator that saves `t` is not too early for what that operator was given.
        """
        if not self.is_allocated_on(compute) or self.gathered:
            return False
        if self.state is not State.ON_DEVICE and not self._was_given(saved, t):
            return False
        self._saved_bytes = [earlier for earlier in self._saved_bytes if not earlier.probe.moved]
        self._saved_bytes.append(saved)
        return True

    def _was_given(self, saved: SavedBytes, t: Tensor) -> bool:
        """Whether the operator that saves `t` was given it, and began the copy out.

        Who made `t` does not tell: operators that write in place save what they were given (`a.hypot_(b)`), and a function of
        one's own writes between operators that it calls. So a counter that has not moved since before the copy must say so.
        """
        if self._began_in is None:
            return False
        operator, site = self._began_in
        if operator != current_operator() or not self.includes(saved, same_bytes=True) or not made_before(t, operator):
            return False
        return site == call_site()
