"""Tensors that are nothing but their bytes: each element once, without gaps.

flat = dense_bytes(t)                      # (n,) uint8 over the same memory; None: there is more to `t`, or less
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
    if type(t) is not Tensor or t.layout is not torch.strided or t.is_nested or t.is_quantized or t.is_mkldnn:
        return None
    if t.is_conj() or t.is_neg() or not (t.numel() == 0 or _is_dense(t.shape, t.stride())):
        return None
    size = t.element_size()
    with torch.no_grad():
        flat = torch.empty(0, dtype=torch.uint8, device=t.device)
        return flat.set_(t.untyped_storage(), t.storage_offset() * size, (t.numel() * size,), (1,))


def _is_dense(shape: Iterable[int], strides: Iterable[int]) -> bool:
    """Whether each element has memory of its own, without gaps."""
    expected = 1
    for stride, length in sorted((stride, length) for length, stride in zip(shape, strides, strict=True) if length != 1):
        if stride != expected:
            return False
        expected *= length
    return True
