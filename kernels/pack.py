"""Gather many tensors into one staging buffer, in one launch, and scatter them again: one copy crosses the link, not hundreds.

    offsets, total_bytes = packed_layout(tensors)          host arithmetic
    pack(tensors, out, num_programs=8)                     out[offset:][:nbytes] = the tensor's bytes, as they lie in memory
    unpack(out, others, num_programs=8)                    others of the same shapes and strides: now the same bytes
    table = PackTable(tensors)                             a batch that comes again: the table is built once,
    pack(tensors, out, num_programs=8, table=table)        and only addresses are renewed

Bytes are packed in the order of memory, not of indices: dimensions by stride, those of stride 0 once. `unpack` into tensors
of the same shapes and strides is the exact inverse. Units of up to 16 bytes move, as wide as address, strides and runs allow.
Two programs write at once, so destinations of `unpack` that share a byte are refused; sources of `pack` that do are not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from chameleon_mm.kernels.memory_layout import memory_order
from chameleon_mm.kernels.pack_table import PackedLayout, PackTable, packed_layout
from chameleon_mm.kernels.pack_walk import SIZES, launch, launch_metadata, walk

__all__ = ["PackTable", "PackedLayout", "launch_pack", "memory_words", "pack", "pack_kernel", "pack_reference", "packed_layout"]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit(launch_metadata=launch_metadata, do_not_specialize=SIZES)  # type: ignore[untyped-decorator]  # Triton ships no types
def pack_kernel(
    table: tl.tensor,  # *int64, (work + items,): see pack_table
    staging: tl.tensor,  # *uint8, (total_bytes,): where the bytes go
    work: tl.int64,  # rows * row_words
    row_words: tl.int64,
    items: tl.int64,
    nbytes: tl.int64,  # what moves; for launch metadata alone
    BLOCK: tl.constexpr,  # bytes of an item
) -> None:
    walk(table, staging, work, row_words, items, BLOCK, TO_STAGING=True)


def pack(tensors: Sequence[Tensor], out: Tensor, *, num_programs: int, table: PackTable | None = None) -> None:
    """Enqueue the gathering of `tensors` into `out`, (n,) uint8, n >= packed_layout(tensors).total_bytes.

    The tensors are strided, of any dtype, shape and strides, on one device; they may overlap each other. `out` is contiguous,
    16-byte aligned, on their device or pinned, and overlaps none of them. What lies between packed tensors is not written.
    Runs on torch's current stream of the current device, which must be theirs. The caller keeps tensors and `out` alive until
    the stream has passed. `num_programs` is the size of the persistent grid: how many SMs it may take at a time.

    `table` saves building one: it is refreshed with the addresses of `tensors`, and uploaded where they changed. A caller that
    has only addresses uses `PackTable.move` and `launch_pack`.

    Raises `ValueError`, naming the tensor by its index, before anything is enqueued: for mixed devices, layouts or dtypes that
    are not plain memory, more than 8 dimensions that cannot be joined, another batch than the table's, a buffer that is too
    small, and a bad grid.
    """
    if table is None:
        table = PackTable(tensors)
    else:
        table.refresh(tensors)
    launch_pack(table, out, num_programs=num_programs)


def launch_pack(table: PackTable, out: Tensor, *, num_programs: int) -> None:
    """Launch `pack` for the tensors that `table` was built for or last refreshed with."""
    launch(pack_kernel, "pack", table, out, num_programs)


def pack_reference(tensors: Sequence[Tensor], out: Tensor) -> None:
    """Do what `pack` must do, by torch: one copy per tensor. Runs anywhere."""
    for t, offset in zip(tensors, packed_layout(tensors).offsets, strict=True):
        words = memory_words(t)
        packed = out[offset : offset + words.numel() * words.element_size()]
        packed.view(words.dtype).view(words.shape).copy_(words)


def memory_words(t: Tensor) -> Tensor:
    """The memory of `t` as integers, its dimensions by descending stride and without those that repeat: a view of its storage.

    Integers, because a copy of floating-point numbers might quiet a NaN, and one of booleans might make a 1 of a 3.
    """
    word_bytes = min(t.element_size(), 8)
    per_element = t.element_size() // word_bytes
    order = memory_order(t.shape, t.stride()) if t.numel() else []
    sizes = [t.shape[dim] for dim in order] if t.numel() else [0]
    strides = [t.stride(dim) * per_element for dim in order] if t.numel() else [1]
    if per_element > 1:
        sizes, strides = [*sizes, per_element], [*strides, 1]
    words = torch.empty(0, dtype=_WORDS[word_bytes], device=t.device)
    return words.set_(t.untyped_storage(), t.storage_offset() * per_element, sizes, strides)


@triton.jit(launch_metadata=launch_metadata, do_not_specialize=SIZES)  # type: ignore[untyped-decorator]  # Triton ships no types
def unpack_kernel(
    table: tl.tensor,  # *int64, (work + items,): see pack_table
    staging: tl.tensor,  # *uint8, (total_bytes,): where the bytes come from
    work: tl.int64,  # rows * row_words
    row_words: tl.int64,
    items: tl.int64,
    nbytes: tl.int64,  # what moves; for launch metadata alone
    BLOCK: tl.constexpr,  # bytes of an item
) -> None:
    walk(table, staging, work, row_words, items, BLOCK, TO_STAGING=False)


def unpack(buffer: Tensor, tensors: Sequence[Tensor], *, num_programs: int, table: PackTable | None = None) -> None:
    """Enqueue the scattering of `buffer`, (n,) uint8, into `tensors`, each from its offset in `packed_layout(tensors)`.

    The tensors have the shapes and strides of those that were packed, and nothing of their memory in common; elements that a
    dimension of stride 0 repeats are one. Stream, lifetimes, grid and `table` are as in `pack`. Autograd and version counters
    are not told.

    Raises `ValueError` before anything is enqueued, as `pack` does, and for destinations that overlap.
    """
    if table is None:
        table = PackTable(tensors)
    else:
        table.refresh(tensors)
    launch_unpack(buffer, table, num_programs=num_programs)


def launch_unpack(buffer: Tensor, table: PackTable, *, num_programs: int) -> None:
    """Launch `unpack` for the tensors that `table` was built for or last refreshed with."""
    table.check_destinations("unpack")
    launch(unpack_kernel, "unpack", table, buffer, num_programs)


def unpack_reference(buffer: Tensor, tensors: Sequence[Tensor]) -> None:
    """Do what `unpack` must do, by torch: one copy per tensor. Runs anywhere."""
    for t, offset in zip(tensors, packed_layout(tensors).offsets, strict=True):
        words = memory_words(t)
        packed = buffer[offset : offset + words.numel() * words.element_size()]
        words.copy_(packed.view(words.dtype).view(words.shape))
