"""Checks whether tensors that are written at once share a byte.

    are_apart(...)      none begins before the one below it ends: one sort of the addresses, for tensors without overlaps
    check_apart(...)    per cluster of tensors whose ranges of memory meet: every run of bytes against the next one

So two halves of one fused matrix, interleaved row by row, are told from two that share a column.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from chameleon_mm.kernels.memory_layout import MemoryLayout

MAX_CHECKED_RUNS = 1 << 24
"""Destinations that interleave in more runs than this are refused unchecked: sorting 16 Mi of them takes seconds."""

_Words = NDArray[np.int64]


def are_apart(addresses: _Words, end_bytes: _Words) -> bool:
    """Whether ranges of `end_bytes` from `addresses` on surely share no byte. An empty one inside another is not told apart."""
    if len(addresses) < 2:
        return True
    order = addresses.argsort()
    begins = addresses[order]
    gaps = begins[1:] - begins[:-1] - end_bytes[order[:-1]]
    return bool(gaps[gaps.argmin()] >= 0)


def check_apart(what: str, addresses: _Words, layouts: Sequence[MemoryLayout]) -> None:
    """Raise `ValueError`, naming the tensors by their index, where two elements share a byte."""
    order = np.argsort(addresses, kind="stable")
    order = order[[layouts[i].nbytes > 0 for i in order]]
    if not len(order):
        return
    begins = addresses[order]
    ends = begins + [layouts[i].end_byte for i in order]
    # A cluster goes up to where a tensor begins that none before it reaches.
    is_first = begins[1:] >= np.maximum.accumulate(ends)[:-1]
    cluster = np.concatenate(([0], np.cumsum(is_first)))
    suspect = np.bincount(cluster)[cluster] > 1
    suspect |= [layouts[i].overlaps for i in order]
    for group in dict.fromkeys(cluster[suspect].tolist()):
        _check_runs(what, order[cluster == group], addresses, layouts)


def _check_runs(what: str, indices: _Words, addresses: _Words, layouts: Sequence[MemoryLayout]) -> None:
    """Raise `ValueError` where two runs of bytes of the tensors `indices` overlap."""
    sizes = [layouts[i].dims[0].size for i in indices]
    counts = [layouts[i].nbytes // size for i, size in zip(indices, sizes, strict=True)]
    if sum(counts) > MAX_CHECKED_RUNS:
        raise ValueError(
            f"{what}: expected destinations that are plainly apart, but tensor {indices[0]} is interleaved with itself or with "
            f"tensors {indices[1:].tolist()} in {sum(counts)} runs of bytes; write to their common storage instead"
        )
    begins = np.concatenate([addresses[i] + _run_offsets(layouts[i]) for i in indices])
    ends = begins + np.repeat(sizes, counts)
    owners = np.repeat(indices, counts)
    order = np.argsort(begins, kind="stable")
    clash = np.flatnonzero(begins[order][1:] < ends[order][:-1])
    if len(clash):
        first, second = sorted(owners[order[clash[0] : clash[0] + 2]].tolist())
        who = f"tensors {first} and {second}" if first != second else f"elements of tensor {first}"
        raise ValueError(
            f"{what}: expected destinations that share no byte, but {who} overlap; unpack into a contiguous tensor and copy "
            f"from there"
        )


def _run_offsets(layout: MemoryLayout) -> _Words:
    """Offsets at which each run of bytes begins in the tensor."""
    offsets = np.zeros(1, dtype=np.int64)
    for size, stride in layout.dims[1:]:
        offsets = (np.arange(size)[:, None] * stride + offsets).reshape(-1)
    return offsets
