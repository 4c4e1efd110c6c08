"""Forms in which a saved storage's bytes are kept off the device: whole, in part, or as a recipe.

    form.device_bytes                       # number of first bytes that stay on the device; the others are copied
    form.keep(storage, alloc_stream)        # right before the storage is dropped: copy them to a buffer
    form.put_back(storage, compute)          # the copy back is queued: copy them back
    form.drop()                             # the bytes are no longer needed, or the storage stays

Each form is a subclass: `PartialForm` and `RecomputedForm` here, `PackedForm` in `packed_group`. A form does not decide when
bytes move.
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
    """Form of a storage that moves whole and unchanged; base class of the other forms."""

    __slots__ = ()

    has_copy = True
    """True if the storage has a copy of its own on the host while it is off the device."""
    group: PackedGroup | None = None
    """Packed group that has the bytes while the storage is off the device; None: no group has them."""
    recipe: Recipe | None = None
    """Recipe that recomputes the bytes; None: the bytes are kept."""
    original: Original | None = None
    """Facts about the bytes that the recipe must make; None: the bytes are kept."""
    device_bytes = 0
    """Number of leading bytes that stay in a buffer on the device. The other bytes cross the link."""

    def keep(self, storage: torch.UntypedStorage, alloc_stream: Stream) -> None:
        """Copy the staying bytes out of the storage, whose memory is freed next. May raise `torch.OutOfMemoryError`."""

    def kept(self, slot: Slot) -> bool:
        """Call `keep` for the storage in `slot`. Returns False if there was no memory."""
        try:
            assert slot.storage is not None
            self.keep(slot.storage, slot.alloc_stream)
        except torch.OutOfMemoryError:
            return False
        return True

    def put_back(self, storage: torch.UntypedStorage, compute: Stream) -> None:
        """Copy the bytes that stayed on the device back into the storage, on `compute`."""

    def drop(self) -> None:
        """Free all device memory of the form, because the bytes are no longer needed or the storage stays."""


WHOLE = Form()


# --- `PartialForm`: the first bytes of a storage stay on the device, in a buffer of their own
#
# A partial move fills a budget exactly: the last storage to move leaves the device only by the excess over the budget.


class PartialForm(Form):
    """Form with the first `device_bytes` on the device and all other bytes on the host."""

    __slots__ = ("_alloc_stream", "_buffer", "_streams", "device_bytes")

    def __init__(self, device_bytes: int, streams: ComputeStreams) -> None:
        self.device_bytes = device_bytes
        self._streams = streams
        self._buffer: Tensor | None = None
        self._alloc_stream: Stream | None = None

    def keep(self, storage: torch.UntypedStorage, alloc_stream: Stream) -> None:
        """Copy the first bytes out of `storage`, on `alloc_stream`, after its queued work."""
        if self._buffer is None:
            self._buffer, self._alloc_stream = alloc_stream.alloc(self.device_bytes), alloc_stream
            alloc_stream.copy(self._buffer, flat_bytes(storage)[: self.device_bytes])

    def put_back(self, storage: torch.UntypedStorage, compute: Stream) -> None:
        """Copy the first bytes back into the storage, on `compute`, and free their buffer."""
        if self._buffer is None or self._alloc_stream is None:
            return
        if self._alloc_stream is not compute:
            self._streams.join_all(self._alloc_stream)  # orders `compute` after the copy that filled the buffer
        compute.copy(flat_bytes(storage)[: self.device_bytes], self._buffer)
        if self._alloc_stream is not compute:
            # Note [Reclaim]: the buffer is reused on its own stream only after that read
            self._streams.join_all(self._alloc_stream)
        self.drop()

    def drop(self) -> None:
        if self._buffer is not None and self._alloc_stream is not None:
            self._alloc_stream.free(self._buffer)
        self._buffer = self._alloc_stream = None


# --- `RecomputedForm`: the bytes of a dropped storage are not kept; a recipe recomputes them


class Original(NamedTuple):
    """Facts about a storage that was dropped, or whose recipe needs proof: its checksum, and details for the error."""

    checksum: ChecksumSlot
    nbytes: int
    dtype: str
    module: Callable[[], str]
    """Function that returns the path of the module that saved it, or "" if that is unknown. Called only for an error."""
    operators: list[str]
    """Names of the operators that recompute it, in order."""
    note_proven: Callable[[], None]
    """Function that lets later steps drop the storage."""
    ban: Callable[[], None]
    """Function that makes later steps keep the storage."""

    def __str__(self) -> str:
        where = f" in module {module!r}" if (module := self.module()) else ""
        return f"{self.nbytes} bytes of {self.dtype}, result of {self.operators[-1]}{where}"


class RecomputedForm(Form):
    """Form of a storage whose bytes are not kept. Its recipe has the calls that recompute them."""

    __slots__ = ("original", "recipe")

    has_copy = False

    def __init__(self, recipe: Recipe, original: Original) -> None:
        self.recipe: Recipe | None = recipe
        self.original: Original | None = original

    def drop(self) -> None:
        """Release the recipe with the sources that it holds."""
        self.recipe = self.original = None
