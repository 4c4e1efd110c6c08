"""The form in which a saved storage's bytes are kept off the device. The base class keeps them as they are: one copy each way.

    form.source(storage)                    # what the copy out reads
    form.keep(storage, alloc_stream)        # right before it goes: what of it stays on the device
    form.destination(whole)                 # what the copy back writes
    form.put_back(whole, compute)           # the copy back is queued: what stayed on the device

A new form is a new subclass in a file of its own: `PartialForm`, `PackedForm`, `RecomputedForm`. They say nothing about when
anything moves. A `SavedPart` is none of them: it holds less on the device to begin with, and takes any of these forms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chameleon_mm.device import Stream
from chameleon_mm.saved.handles import flat_bytes

if TYPE_CHECKING:
    from chameleon_mm.saved.packed_group import PackedGroup
    from chameleon_mm.saved.recipe import Recipe
    from chameleon_mm.saved.recomputed_form import Original


class Form:
    """All bytes of a storage, as they are."""

    __slots__ = ()

    has_copy = True
    """Whether the storage has a copy of its own on the host while it is off the device."""
    group: PackedGroup | None = None
    """The group that has the bytes then; None: none has."""
    recipe: Recipe | None = None
    """How to make the bytes again; None: they are kept."""
    original: Original | None = None
    """What is known of the bytes that a recipe stands for; None: they are kept."""
    device_bytes = 0
    """Device memory that it takes while the storage is off the device."""

    def host_bytes(self, nbytes: int) -> int:
        """Bytes that cross the link, and lie on the host, for a storage of `nbytes`."""
        return nbytes

    def source(self, storage: torch.UntypedStorage) -> Tensor:
        """What the copy out reads."""
        return flat_bytes(storage)

    def keep(self, storage: torch.UntypedStorage, alloc_stream: Stream) -> None:
        """Keep on the device what stays of the storage, which is dropped next. May raise `torch.OutOfMemoryError`."""

    def destination(self, whole: Tensor) -> Tensor:
        """What the copy back writes, for a storage whose bytes are to be in `whole`."""
        return whole

    def put_back(self, whole: Tensor, compute: Stream) -> None:
        """Put what stayed on the device where it was, on `compute`."""

    def drop(self) -> None:
        """Drop all device memory of its own: nobody needs the bytes any more, or the storage stays."""


WHOLE = Form()
"""The form of a storage that moves as it is."""
