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

import torch

from chameleon_mm.device.holders import held_alone
from chameleon_mm.saved.version import SavedBytes


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

    __slots__ = ("first", "is_packed", "key", "last_save", "saved_nbytes", "saves", "storage", "views")

    def __init__(self, storage: torch.UntypedStorage, saved: SavedBytes) -> None:
        self.storage: torch.UntypedStorage | None = storage
        """The storage, with memory or without; None: nobody needs it any more."""
        self.is_packed = False
        """Whether the storage has the bytes of the saved tensors side by side, so that none of them lies in it."""
        self.key = id(storage)
        """Id of the storage that was saved."""
        self.first = weakref.ref(storage)
        self.saved_nbytes = storage.nbytes()
        self.views = [saved]
        """All saved tensors over it, each with an alias of ours."""
        self.saves = [saved]
        """Saves from before the copy out began, none known to be included in another: what that copy has."""
        last = self.last_save = LastSave()
        last.storage, last.epoch, last.hook, last.num_claims, last.emptied = self.first, -1, 0, 0, False

    def is_alone(self) -> bool:
        """Whether nobody but us refers to the storage, no tensor but the aliases and nobody in Python, and it may be resized:
        not where NumPy or another process was given its address."""
        storage = self.storage
        return storage is not None and held_alone(storage, 0 if self.is_packed else len(self.views)) and storage.resizable()

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

    def was_written(self, times: int) -> bool:
        """Whether every counter under which it was saved, and that has not moved since, tells of so many writes."""
        return all(saved.expected == times for saved in self.saves if not saved.moved)

    def unwritten(self) -> SavedBytes | None:
        """A save that was not written to since; None: all were."""
        for saved in self.saves:
            if saved.alias._version == saved.expected:
                return saved
        return None
