"""Scatter one staging buffer into many tensors, in one launch: the inverse of pack.

    pack(tensors, staging, num_programs=8)
    unpack(staging, others, num_programs=8)                others of the same shapes and strides: now the same bytes

Two programs write at once, so destinations that share a byte are refused; sources that do are not.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from chameleon_mm.kernels.pack import memory_words
from chameleon_mm.kernels.pack_table import PackTable, packed_layout
from chameleon_mm.kernels.pack_walk import SIZES, launch, launch_metadata, walk


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
