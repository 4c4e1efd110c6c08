"""Bytes of a tensor, side by side, as they are to be copied and compared.

flat = dense_bytes(t)        # None: there is more to it than bytes in a row
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def dense_bytes(t: Tensor) -> Tensor | None:
    """A flat uint8 tensor over the bytes of `t`, with a version counter of its own.

    None where they are not all there is to it: it has gaps or overlaps, wraps others, is lazily conjugated, is no strided one.
    """
    # A parameter's `.grad` and what `register_buffer` takes are plain, or of a subclass that may be anything.
    if type(t) is not Tensor or not is_plain(t) or not is_dense(t.shape, t.stride()):
        return None
    size = t.element_size()
    with torch.no_grad():
        flat = torch.empty(0, dtype=torch.uint8, device=t.device)
        return flat.set_(t.untyped_storage(), t.storage_offset() * size, (t.numel() * size,), (1,))


def is_plain(t: Tensor) -> bool:
    """Whether the elements of `t` are what lies in its storage, by its strides."""
    if t.layout is not torch.strided or t.is_nested or t.is_quantized or t.is_mkldnn:
        return False
    return not (t.is_conj() or t.is_neg())


def is_dense(shape: Iterable[int], strides: Iterable[int]) -> bool:
    """Whether each element has memory of its own, without gaps. So it is where there is none."""
    shape = tuple(shape)
    if 0 in shape:
        return True
    expected = 1
    for stride, length in sorted((stride, length) for length, stride in zip(shape, strides, strict=True) if length != 1):
        if stride != expected:
            return False
        expected *= length
    return True
