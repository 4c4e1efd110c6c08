"""The form in which a saved storage's bytes are kept off the device. The base class keeps them as they are: one copy each way.

    form.device_bytes                       # the first bytes that stay on the device; copies are of the rest
    form.keep(storage, alloc_stream)        # right before the storage goes: they are copied to a buffer
    form.put_back(whole, compute)           # the copy back is queued: they are copied back
    form.drop()                             # nobody needs the bytes any more, or the storage stays

A new form is a new subclass in a file of its own: `PartialForm`, `PackedForm`, `RecomputedForm`. They say nothing about when
anything moves. A `GatheredPart` is none of them: it is less on the device to begin with, and takes any of these forms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chameleon_mm.device import Stream

if TYPE_CHECKING:
    from chameleon_mm.saved.packed_group import PackedGroup
    from chameleon_mm.saved.recipe import Recipe
    from chameleon_mm.saved.recomputed_form import Original
    from chameleon_mm.saved.slot import Slot


class Form:
    """All bytes of a storage, as they are."""

    __slots__ = ()

    has_copy = True
    """Whether the storage has a copy of its own on the host while it is off the device."""
    group: PackedGroup | None = None
    """The group that has the bytes then; None: none has."""
    recipe: Recipe | None = None
    """How to recompute the bytes; None: they are kept."""
    original: Original | None = None
    """What is known of the bytes that a recipe stands for; None: they are kept."""
    device_bytes = 0
    """Bytes of the storage, its first ones, that stay on the device, in memory of their own; the others cross the link."""

    def keep(self, storage: torch.UntypedStorage, alloc_stream: Stream) -> None:
        """Keep on the device what stays of the storage, which is dropped next. May raise `torch.OutOfMemoryError`."""

    def kept(self, slot: Slot) -> bool:
        """Keep as `keep` does, of the storage in `slot`. Returns whether there was memory for it."""
        try:
            assert slot.storage is not None
            self.keep(slot.storage, slot.alloc_stream)
        except torch.OutOfMemoryError:
            return False
        return True

    def put_back(self, whole: Tensor, compute: Stream) -> None:
        """Put what stayed on the device where it was, on `compute`."""

    def drop(self) -> None:
        """Drop all device memory of its own: nobody needs the bytes any more, or the storage stays."""


WHOLE = Form()
