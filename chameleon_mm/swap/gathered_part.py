"""Gathered parts: if only a small view of a storage was saved, keep its bytes and free the rest after the operator.

ON_DEVICE --gather--> ON_DEVICE, bytes packed --swap_out--> ... --> swapped in, packed --unpack--> in place, for a use

    part = Part.of(t)                        # the bytes of its storage that the view covers; None if elements overlap
    packed = part.pack(storage)              # those bytes, packed: they are kept and moved instead of the storage
    part.unpack(packed, storage)             # copy the bytes back in place; the bytes between them are undefined

The restored storage begins where the saved one began, so the view keeps its offset and strides. This matters because kernels
choose their path, and so their rounding, by strides and alignment. Bytes are copied as integers: a floating-point copy might
quiet a NaN, and a boolean copy might turn a 3 into a 1.

The copy is torch's own for strided tensors, not the pack kernel, although that takes strides too. A view is gathered alone, at
the first hook after its operator: waiting for other views would keep the memory that should be freed. For one view both are one
launch, but the pack kernel also needs an uploaded table of addresses.
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
    """Bytes of a storage that a view covers, as a strided array of words. Equal parts of one storage compare equal."""

    word_bytes: int
    offset: int
    """Offset of the first word, in words. Sizes and strides are in words too."""
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, t: Tensor) -> Part | None:
        """Return the part of its storage that `t` covers; None if `t` is empty or its elements overlap or have an odd size."""
        word_bytes = min(t.element_size(), 8)
        per_element = t.element_size() // word_bytes
        if word_bytes not in _WORDS or t.numel() == 0:
            return None
        # A dimension of stride 0 adds no bytes. Sorted by stride, views that differ only in their order of dimensions are
        # equal.
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
        """Offset in the storage right after the last byte of the part."""
        last = sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        return (self.offset + last + 1) * self.word_bytes

    def pack(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Copy the covered bytes to a new storage, on the current stream. Allocates `nbytes`; may raise
        `torch.OutOfMemoryError`."""
        packed = torch.empty(self.sizes, dtype=_WORDS[self.word_bytes], device=storage.device)
        return packed.copy_(self._over(storage)).untyped_storage()

    def unpack(self, packed: torch.UntypedStorage, into: torch.UntypedStorage) -> None:
        """Copy the packed bytes back in place, on the current stream. `into` has at least `end_byte` bytes."""
        words = torch.empty(0, dtype=_WORDS[self.word_bytes], device=packed.device)
        side_by_side = words.set_(packed, 0, (self.nbytes // self.word_bytes,), (1,)).view(self.sizes)
        self._over(into).copy_(side_by_side)

    def _over(self, storage: torch.UntypedStorage) -> Tensor:
        words = torch.empty(0, dtype=_WORDS[self.word_bytes], device=storage.device)
        return words.set_(storage, self.offset, self.sizes, self.strides)


class GatheredPart:
    """Saved part of a storage, packed. The slot holds the packed bytes instead of the storage."""

    def __init__(self, saved: SavedStorage, current: Stream, streams: ComputeStreams) -> None:
        """Gather the part of `saved`, which is ON_DEVICE, by a kernel on `current`, the current stream.

        The storage is freed at once, in stream order. Raises `torch.OutOfMemoryError` with nothing changed.
        """
        slot, storage, part = saved.slot, saved.device, saved.part
        assert saved.state is State.ON_DEVICE and storage is not None and part is not None and not slot.is_packed
        # Note [Swap-out]: other streams wrote the source, and `current` reads it
        streams.join_all(slot.alloc_stream)
        with annotation("chameleon::gather"):
            packed = part.pack(storage)
        streams.join_all(slot.alloc_stream)  # Note [Reclaim]: the memory is reused only after that read
        slot.keep_instead(packed)
        slot.alloc_stream.free(flat_bytes(storage))
        self._part, self._slot, self._saved_on = part, slot, slot.alloc_stream
        self._unpacked: weakref.ref[torch.UntypedStorage] | None = None
        self._unpacked_on: Stream | None = None
        slot.alloc_stream = current

    @property
    def whole_bytes(self) -> int:
        """Size in bytes of a storage that has the part in place."""
        return self._part.end_byte

    def is_whole(self) -> bool:
        """True if the saved storage is alive and was never emptied, so that its bytes are in place."""
        storage = self._slot.first()
        return storage is not None and storage.nbytes() == self._slot.saved_nbytes and not self._slot.last_save.emptied

    def in_place(self, compute: Stream) -> torch.UntypedStorage | None:
        """Return a live storage with the bytes in place that `compute` may use without a wait, or None.

        This is the saved storage, or, if that was emptied, the storage that another use unpacked. All views of one storage
        share it.
        """
        if self._saved_on is compute and self.is_whole():
            return self._slot.first()
        return self._unpacked() if self._unpacked is not None and self._unpacked_on is compute else None

    def unpack(self, packed: torch.UntypedStorage, compute: Stream) -> torch.UntypedStorage:
        """Allocate a storage with the bytes in place, on `compute`, the current stream. Raises `torch.OutOfMemoryError`."""
        storage = compute.alloc(self.whole_bytes).untyped_storage()
        self._part.unpack(packed, storage)
        self._unpacked, self._unpacked_on = weakref.ref(storage), compute
        return storage
