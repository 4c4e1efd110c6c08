"""The bytes of its storage that a tensor covers, exactly: two columns of one matrix share none, though their spans overlap.

extent_of(t)        -> Extent(start, end, pattern)      # pattern None: every byte of [start, end)
share_bytes(a, b)   -> by their spans where both are dense, else byte by byte
overlap(a, b)       -> where the bytes that lie in both begin, and a flag for each from there on
covers(a, b)        -> whether a holds every byte of b; may say no where it does
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor


class Extent(NamedTuple):
    """Bytes of a storage: all of [start, end), or, with a pattern of (count, stride in bytes), those it reaches from start."""

    start: int
    end: int
    pattern: tuple[tuple[int, int], ...] | None = None


def extent_of(t: Tensor) -> Extent:
    """The bytes of a strided tensor within its storage; an empty one covers [0, 0)."""
    count, item = t.numel(), t.element_size()
    if count == 0:
        return Extent(0, 0)
    start = int(t.storage_offset()) * item
    if t.is_contiguous():
        return Extent(start, start + count * item)
    steps = sorted((int(step), int(size)) for size, step in zip(t.shape, t.stride(), strict=True) if size > 1 and step > 0)
    reach, dense = 1, True  # elements from the first to behind the last; without a gap as long as no step leaps over the end
    for stride, size in steps:
        dense = dense and stride <= reach
        reach += stride * (size - 1)
    pattern = None if dense else ((item, 1), *((size, stride * item) for stride, size in steps))
    return Extent(start, start + reach * item, pattern)


def share_bytes(a: Extent, b: Extent) -> bool:
    """Whether any byte lies in both. Takes time and memory in proportion to the tensors only where spans overlap and one has
    gaps, so ask last."""
    if max(a.start, b.start) >= min(a.end, b.end):
        return False
    if a.pattern is None and b.pattern is None:
        return True
    return bool(np.any(overlap(a, b)[1]))


def overlap(a: Extent, b: Extent) -> tuple[int, npt.NDArray[np.bool_]]:
    """First byte that may lie in both, and a flag for each byte from there on: whether it lies in both."""
    start, end = max(a.start, b.start), min(a.end, b.end)
    return start, _mask(a, start, end) & _mask(b, start, end)


def covers(a: Extent, b: Extent) -> bool:
    """Whether `a` certainly holds every byte of `b`: it is dense, or the same."""
    return a == b or (a.pattern is None and a.start <= b.start and b.end <= a.end)


def _mask(extent: Extent, start: int, end: int) -> npt.NDArray[np.bool_]:
    """One flag for each byte of [start, end)."""
    if extent.pattern is None:
        return np.ones(end - start, dtype=np.bool_)
    offsets = np.full(1, extent.start - start, dtype=np.int64)
    for count, stride in extent.pattern:
        offsets = (offsets[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
    mask = np.zeros(end - start, dtype=np.bool_)
    mask[offsets[(offsets >= 0) & (offsets < end - start)]] = True
    return mask
