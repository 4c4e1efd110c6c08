"""The memory of strided tensors: in which order the bytes of one lie, and whether those of two meet.

    layout = MemoryLayout.of(element_bytes, sizes, strides, alignment)
    layout.nbytes                       distinct bytes: a dimension of stride 0 repeats what is there, and counts once
    layout.pieces                       what a kernel moves: each an array of units of 1, 2, 4, 8 or 16 bytes, up to 8 dims
    are_apart(...)                      none begins before the one below it ends: one sort of the addresses
    check_apart(...)                    per cluster of tensors whose ranges meet: every run of bytes against the next one

Dimensions are taken by stride, the smallest innermost, and joined where one continues the other. So a transposed tensor is
one run of bytes like the tensor it was transposed from, and a unit is as wide as its runs, strides and address allow. And two
halves of one fused matrix, interleaved row by row, are told from two that share a column.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chameleon_mm.kernels.launch_checks import UNIT_BYTES

MAX_DIMS = 8

MAX_PIECE_UNITS = 1 << 30
"""Units of a piece at most, so that indices are divided in 32 bits: the 64-bit division of a GPU is a call, with a stack."""

MAX_CHECKED_RUNS = 1 << 24
"""Destinations that interleave in more runs than this are refused unchecked: sorting 16 Mi of them takes seconds."""

_Words = NDArray[np.int64]


class Dim(NamedTuple):
    """One dimension, in bytes or in units."""

    size: int
    stride: int


class Piece(NamedTuple):
    """Units of a tensor at regular places, side by side where they are packed."""

    source_offset: int
    """Bytes from the tensor's first byte to the piece's."""
    packed_offset: int
    """Bytes from where the tensor is packed to where the piece is."""
    unit_bytes: int
    dims: tuple[Dim, ...]
    """Dimensions in units, innermost first; one at least."""

    @property
    def units(self) -> int:
        return prod(dim.size for dim in self.dims)


class MemoryLayout(NamedTuple):
    """Layout of a tensor's bytes in memory, relative to its first one."""

    nbytes: int
    """Packed bytes: as many as the tensor's own, but for dimensions of stride 0."""
    end_byte: int
    """Offset at which the last of them ends."""
    overlaps: bool
    """Whether two elements may share bytes. False is certain; true can be mere interleaving, `starts` tells."""
    dims: tuple[Dim, ...]
    """Dimensions in bytes, innermost first; the first one is the run of adjacent bytes, its stride 1."""
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, element_bytes: int, sizes: tuple[int, ...], strides: tuple[int, ...], alignment: int) -> MemoryLayout:
        """The layout of a tensor of `sizes` and `strides`, in elements, whose address is `alignment` modulo 16.

        Raises `ValueError` for more than 8 dimensions that cannot be joined.
        """
        if 0 in sizes:
            return cls(0, 0, False, (), ())
        dims = _joined_dims(element_bytes, sizes, strides)
        if len(dims) > MAX_DIMS:
            raise ValueError(f"expected at most {MAX_DIMS} dimensions that cannot be joined, got {len(dims)}")
        reach, overlaps = 0, False
        for size, stride in dims:
            overlaps |= stride < reach
            reach = max(reach, 1) + stride * (size - 1)
        return cls(prod(dim.size for dim in dims), reach, overlaps, tuple(dims), tuple(_pieces(dims, alignment)))


def memory_order(sizes: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """The dimensions that hold distinct memory, outermost first: by stride, then by their order in the shape."""
    held = [dim for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True)) if size > 1 and stride > 0]
    return sorted(held, key=lambda dim: -strides[dim])


def _joined_dims(element_bytes: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> list[Dim]:
    dims = [Dim(element_bytes, 1)]
    for dim in reversed(memory_order(sizes, strides)):
        size, stride = sizes[dim], strides[dim] * element_bytes
        inner = dims[-1]
        if stride == inner.size * inner.stride:
            dims[-1] = Dim(inner.size * size, inner.stride)
        else:
            dims.append(Dim(size, stride))
    return dims


def _pieces(dims: list[Dim], alignment: int) -> list[Piece]:
    run = dims[0].size
    outer = dims[1:]
    if not outer and run % UNIT_BYTES:
        # A run of an odd size moves by its address's alignment nonetheless, and its last bytes by themselves.
        body = run - run % UNIT_BYTES
        parts = _cut(_piece(0, [Dim(body, 1)], alignment)) if body else []
        return [*parts, _piece(body, [Dim(run - body, 1)], alignment)]
    return _cut(_piece(0, dims, alignment))


def _cut(piece: Piece) -> list[Piece]:
    """`piece` in parts of at most `MAX_PIECE_UNITS`: itself, unless it is of many GiB, or of one by single bytes."""
    if piece.units <= MAX_PIECE_UNITS:
        return [piece]
    *inner, last = piece.dims
    slab = prod(dim.size for dim in inner)
    step = max(1, MAX_PIECE_UNITS // slab)
    parts = []
    for start in range(0, last.size, step):
        dims = (*inner, Dim(min(step, last.size - start), last.stride))
        part = Piece(
            piece.source_offset + start * last.stride * piece.unit_bytes,
            piece.packed_offset + start * slab * piece.unit_bytes,
            piece.unit_bytes,
            dims if step > 1 or not inner else tuple(inner),
        )
        parts += _cut(part)
    return parts


def _piece(offset: int, dims: list[Dim], alignment: int) -> Piece:
    run, *outer = dims
    unit = UNIT_BYTES
    while run.size % unit or alignment % unit or any(dim.stride % unit for dim in outer):
        unit //= 2
    inner = [Dim(run.size // unit, 1)] if run.size > unit or not outer else []
    return Piece(offset, offset, unit, (*inner, *(Dim(dim.size, dim.stride // unit) for dim in outer)))


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
