"""A small view of a large storage, kept without the rest of it.

    part = Part.of(t)                        # which bytes of its storage the view covers; None where they overlap
    packed = part.pack(storage)              # those bytes alone, side by side: what is kept and moved instead of the storage
    storage = part.unpack(packed)            # as large as the view reaches, its bytes where they were; between them, anything

The storage that comes back begins where the first one began, so the view's offset and strides stay what they were: kernels
choose their path, and so their rounding, by strides and alignment. Bytes move as integers: a floating-point copy might quiet
a NaN, a boolean one might make a 1 of a 3.

The copy is torch's own for strided tensors, not the pack kernel, though that takes strides too. A view is gathered at the first
hook after its op, alone, so that the storage around it goes at once: waiting for others, to share a launch, would keep just
what is to go. And for one view both are one launch, the pack kernel's with a table of addresses to renew and upload besides.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

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
        """Bytes that the part covers."""
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
