"""A saved storage of which only a small view was saved: once its operator is over, the rest of the storage goes.

ON_DEVICE --gather--> ON_DEVICE, its bytes side by side --swap_out--> ... --> back as they are --unpack--> in place, for a use

    part = Part.of(t)                        # which bytes of its storage the view covers; None where they overlap
    packed = part.pack(storage)              # those bytes alone, side by side: what is kept and moved instead of the storage
    part.unpack(packed, storage)             # its bytes where they were; between them, anything

The storage that comes back begins where the first one began, so the view's offset and strides stay what they were: kernels
choose their path, and so their rounding, by strides and alignment. Bytes move as integers: a floating-point copy might quiet
a NaN, a boolean one might make a 1 of a 3.

The copy is torch's own for strided tensors, not the pack kernel, though that takes strides too. A view is gathered at the first
hook after its op, alone, so that the storage around it goes at once: waiting for others, to share a launch, would keep just
what is to go. And for one view both are one launch, the pack kernel's with a table of addresses to renew and upload besides.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from chameleon_mm.device import Stream
from chameleon_mm.swap.calling_thread import ComputeStreams, annotation
from chameleon_mm.swap.handles import flat_bytes
from chameleon_mm.swap.host_copy import State

if TYPE_CHECKING:
    from chameleon_mm.swap.saved_storage import SavedStorage

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Part(NamedTuple):
    """The bytes of a storage that a view covers, as a strided array of words. Equal parts of one storage are one."""

    word_bytes: int
    offset: int
    """Offset of the first word, in words, as the sizes and strides are."""
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, t: Tensor) -> Part | None:
        """The part of its storage that `t` covers; None for no element, elements that overlap, and elements of an odd size."""
        word_bytes = min(t.element_size(), 8)
        per_element = t.element_size() // word_bytes
        if word_bytes not in _WORDS or t.numel() == 0:
            return None
        # A dimension of stride 0 repeats what is there. Sorted by stride, so that views that differ in order alone are one.
        dims_by_stride = sorted(
            (stride, size) for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1 and stride > 0
        )
        reach = 1
        for stride, size in dims_by_stride:
            if stride < reach:
                return None
            reach += stride * (size - 1)
        dims = [(1, per_element)] if per_element > 1 else []
        dims += [(stride * per_element, size) for stride, size in dims_by_stride]
        sizes, strides = tuple(size for _, size in reversed(dims)), tuple(stride for stride, _ in reversed(dims))
        return cls(word_bytes, int(t.storage_offset()) * per_element, sizes, strides)

    @property
    def nbytes(self) -> int:
        words = 1
        for size in self.sizes:
            words *= size
        return words * self.word_bytes

    @property
    def end_byte(self) -> int:
        """Offset in the storage at which the last of its bytes ends."""
        last = sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        return (self.offset + last + 1) * self.word_bytes

    def pack(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Copy the covered bytes to a new storage, on the current stream. Allocates `nbytes`; may raise
        `torch.OutOfMemoryError`."""
        packed = torch.empty(self.sizes, dtype=_WORDS[self.word_bytes], device=storage.device)
        return packed.copy_(self._over(storage)).untyped_storage()

    def unpack(self, packed: torch.UntypedStorage, into: torch.UntypedStorage) -> None:
        """Put the packed bytes where they were, on the current stream. `into` has `end_byte` bytes or more."""
        words = torch.empty(0, dtype=_WORDS[self.word_bytes], device=packed.device)
        side_by_side = words.set_(packed, 0, (self.nbytes // self.word_bytes,), (1,)).view(self.sizes)
        self._over(into).copy_(side_by_side)

    def _over(self, storage: torch.UntypedStorage) -> Tensor:
        words = torch.empty(0, dtype=_WORDS[self.word_bytes], device=storage.device)
        return words.set_(storage, self.offset, self.sizes, self.strides)


class GatheredPart:
    """The bytes of the part of a saved storage that was saved, side by side: what its slot holds instead of the storage, on the
    device and on the host."""

    def __init__(self, saved: SavedStorage, current: Stream, streams: ComputeStreams) -> None:
        """Gather the part of `saved`, which is ON_DEVICE, by a kernel on `current`, which is the current stream.

        The storage goes at once, in stream order. Raises `torch.OutOfMemoryError` with nothing changed.
        """
        slot, storage, part = saved.slot, saved.device, saved.part
        assert saved.state is State.ON_DEVICE and storage is not None and part is not None and not slot.is_packed
        # Note [Swap-out]: the source was written by others, and `current` reads it
        streams.join_all(slot.alloc_stream)
        with annotation("chameleon::gather"):
            packed = part.pack(storage)
        streams.join_all(slot.alloc_stream)  # Note [Reclaim]: its next owner comes after that read
        slot.keep_instead(packed)
        slot.alloc_stream.free(flat_bytes(storage))
        self._part, self._slot, self._saved_on = part, slot, slot.alloc_stream
        self._unpacked: weakref.ref[torch.UntypedStorage] | None = None
        self._unpacked_on: Stream | None = None
        slot.alloc_stream = current

    @property
    def whole_bytes(self) -> int:
        """Bytes of a storage with the part in its place."""
        return self._part.end_byte

    def is_whole(self) -> bool:
        """Whether somebody holds the saved storage, which was never empty: a use finds the bytes where they were."""
        storage = self._slot.first()
        return storage is not None and storage.nbytes() == self._slot.saved_nbytes and not self._slot.last_save.emptied

    def in_place(self, compute: Stream) -> torch.UntypedStorage | None:
        """Returns a storage with its bytes in place that somebody holds and `compute` may use without a wait.

        That is the saved storage itself, unless it was empty for a while, or what another use of it unpacked: views of one
        storage share one.
        """
        if self._saved_on is compute and self.is_whole():
            return self._slot.first()
        return self._unpacked() if self._unpacked is not None and self._unpacked_on is compute else None

    def unpack(self, packed: torch.UntypedStorage, compute: Stream) -> torch.UntypedStorage:
        """Allocate a storage with its bytes in place, on `compute`, the current stream. Raises `torch.OutOfMemoryError`."""
        storage = compute.alloc(self.whole_bytes).untyped_storage()
        self._part.unpack(packed, storage)
        self._unpacked, self._unpacked_on = weakref.ref(storage), compute
        return storage
