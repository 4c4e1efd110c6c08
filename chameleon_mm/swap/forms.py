"""Forms in which a saved storage's bytes are kept off the device: whole, in part, or as a recipe.

    form.device_bytes                       # the first bytes that stay on the device; copies are of the rest
    form.keep(storage, alloc_stream)        # right before the storage goes: they are copied to a buffer
    form.put_back(whole, compute)           # the copy back is queued: they are copied back
    form.drop()                             # nobody needs the bytes any more, or the storage stays

A new form is a new subclass in a file of its own: `PartialForm`, `PackedForm`, `RecomputedForm`. They say nothing about when
anything moves. A `GatheredPart` is none of them: it is less on the device to begin with, and takes any of these forms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from chameleon_mm.device import Stream
from chameleon_mm.swap.calling_thread import ComputeStreams
from chameleon_mm.swap.handles import flat_bytes

if TYPE_CHECKING:
    from chameleon_mm.swap.checksums import ChecksumSlot
    from chameleon_mm.swap.packed_group import PackedGroup
    from chameleon_mm.swap.recipe import Recipe
    from chameleon_mm.swap.slot import Slot


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


# --- The form of a storage that moves in part: its first bytes stay on the device, in a buffer of their own
#
# Moving in part fills a budget exactly: the rest of the last storage that has to move stays where it is.


class PartialForm(Form):
    """All bytes but the first `device_bytes` on the host."""

    __slots__ = ("_alloc_stream", "_buffer", "_streams", "device_bytes")

    def __init__(self, device_bytes: int, streams: ComputeStreams) -> None:
        self.device_bytes = device_bytes
        self._streams = streams
        self._buffer: Tensor | None = None
        self._alloc_stream: Stream | None = None

    def keep(self, storage: torch.UntypedStorage, alloc_stream: Stream) -> None:
        """Copy the first bytes out of `storage`, on `alloc_stream`, whose work on it is queued."""
        if self._buffer is None:
            self._buffer, self._alloc_stream = alloc_stream.alloc(self.device_bytes), alloc_stream
            alloc_stream.copy(self._buffer, flat_bytes(storage)[: self.device_bytes])

    def put_back(self, whole: Tensor, compute: Stream) -> None:
        """Copy the first bytes back to where they were, on `compute`, and free their buffer."""
        if self._buffer is None or self._alloc_stream is None:
            return
        if self._alloc_stream is not compute:
            self._streams.join_all(self._alloc_stream)  # orders `compute` after the copy that filled the buffer
        compute.copy(whole[: self.device_bytes], self._buffer)
        if self._alloc_stream is not compute:
            # Note [Reclaim]: the buffer's next owner on its own stream comes after that read
            self._streams.join_all(self._alloc_stream)
        self.drop()

    def drop(self) -> None:
        if self._buffer is not None and self._alloc_stream is not None:
            self._alloc_stream.free(self._buffer)
        self._buffer = self._alloc_stream = None


# --- `RecomputedForm`: a recipe stands for the bytes of a dropped storage, which are nowhere


class Original(NamedTuple):
    """What is known of a storage that was dropped, or whose recipe is to be proved: its checksum, and what an error names."""

    checksum: ChecksumSlot
    nbytes: int
    dtype: str
    module: str
    """Path of the module that saved it; "": not known."""
    operators: list[str]
    """Names of the operators that run again for it, in order."""
    note_proven: Callable[[], None]
    """Has later steps drop it."""
    ban: Callable[[], None]
    """Has later steps keep it."""

    def __str__(self) -> str:
        where = f" in module {self.module!r}" if self.module else ""
        return f"{self.nbytes} bytes of {self.dtype}, result of {self.operators[-1]}{where}"


class RecomputedForm(Form):
    """The form of a storage whose bytes are not kept: its recipe has the calls that make them."""

    __slots__ = ("original", "recipe")

    has_copy = False

    def __init__(self, recipe: Recipe, original: Original) -> None:
        self.recipe: Recipe | None = recipe
        self.original: Original | None = original

    def drop(self) -> None:
        """Let go of what the recipe needs."""
        self.recipe = self.original = None
