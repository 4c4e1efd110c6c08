"""Gather many tensors into one staging buffer, in one launch, and scatter them again: one copy crosses the link, not hundreds.

    offsets, total_bytes = packed_layout(tensors)          host arithmetic
    pack(tensors, out, num_programs=8)                     out[offset:][:nbytes] = the tensor's bytes, as they lie in memory
    unpack(out, others, num_programs=8)                    others of the same shapes and strides: now the same bytes
    table = PackTable(tensors)                             a batch that comes again: the table is built once,
    pack(tensors, out, num_programs=8, table=table)        and only addresses are renewed

Bytes are packed in the order of memory, not of indices: dimensions by stride, those of stride 0 once. `unpack` into tensors
of the same shapes and strides is the exact inverse. Units of up to 16 bytes move, as wide as address, strides and runs allow.
Two programs write at once, so destinations of `unpack` that share a byte are refused; sources of `pack` that do are not.

Both kernels are one walk: every program takes items of the table in turn and moves their units.

    for item in p, p+P, p+2P ...:                          P resident programs: how many SMs the launch may take
        row = table of the item                            address, place, units, bytes of a unit, (size, stride) per dim
        unit u of the row:  packed side  place + u * unit            tensor side  address + sum index_d * stride_d

Rows are cut so that units are counted in 32 bits; what they are multiplied to, offsets and addresses, has 64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from chameleon_mm.kernels.launch_checks import check_current, check_grid
from chameleon_mm.kernels.memory_layout import memory_order
from chameleon_mm.kernels.pack_table import PackedLayout, PackTable, packed_layout

NUM_WARPS = 8

SIZES = ["work", "row_words", "items", "nbytes"]
"""Names of the arguments that are no part of the compiled kernel: batches of every size and layout share one."""

__all__ = ["PackTable", "PackedLayout", "launch_pack", "memory_words", "pack", "pack_kernel", "pack_reference", "packed_layout"]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def launch_metadata(grid: Any, metadata: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Metadata for a profiler that hooks Triton's launches: a name with the size, and the bytes read plus written."""
    return {"name": f"{metadata.name}_{args['nbytes']}B", "bytes": 2 * args["nbytes"]}


def launch(kernel: Any, what: str, table: PackTable, staging: Tensor, num_programs: int) -> None:
    """Check `staging` against the table, then enqueue `kernel` on the current stream. No launch where nothing moves."""
    check_grid(what, num_programs)
    table.check_staging(what, staging)
    if table.num_items == 0:
        return
    check_current(what, table.device)
    words = table.upload()
    grid = (min(num_programs, table.num_items),)
    kernel[grid](
        words, staging, table.num_rows * table.row_words, table.row_words, table.num_items, table.packed_bytes,
        BLOCK=table.block_bytes, num_warps=NUM_WARPS,
        enable_fp_fusion=False,  # there is no arithmetic to fuse; Triton warns where this is left to its changing default
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def walk(
    table: tl.tensor,  # *int64, (work + items,): rows of row_words, then the row of each item
    staging: tl.tensor,  # *uint8: the packed bytes; 16-byte aligned
    work: tl.int64,  # where in the table the items begin
    row_words: tl.int64,
    items: tl.int64,
    BLOCK: tl.constexpr,  # bytes of an item, a power of two
    TO_STAGING: tl.constexpr,  # the direction
) -> None:
    item = tl.program_id(0).to(tl.int64)
    # Not `range`: the interpreter of Triton 3.6 makes ints of its bounds in a way that newer numpy refuses.
    while item < items:
        row = table + tl.load(table + work + item) * row_words
        unit = tl.load(row + 3)
        begin = (item - tl.load(row + 5)) * BLOCK
        # Uniform branches, so that the compiler knows the width: rows of different widths share a launch.
        if unit == 16:
            _move(row, staging, begin, UNIT=16, BLOCK=BLOCK, TO_STAGING=TO_STAGING)
        elif unit == 8:
            _move(row, staging, begin, UNIT=8, BLOCK=BLOCK, TO_STAGING=TO_STAGING)
        elif unit == 4:
            _move(row, staging, begin, UNIT=4, BLOCK=BLOCK, TO_STAGING=TO_STAGING)
        elif unit == 2:
            _move(row, staging, begin, UNIT=2, BLOCK=BLOCK, TO_STAGING=TO_STAGING)
        else:
            _move(row, staging, begin, UNIT=1, BLOCK=BLOCK, TO_STAGING=TO_STAGING)
        item += tl.num_programs(0).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _move(
    row: tl.tensor,  # *int64, (row_words,)
    staging: tl.tensor,  # *uint8
    begin: tl.int64,  # bytes of the row before this item
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    TO_STAGING: tl.constexpr,
) -> None:
    # As many units at a time as an item has of the widest ones: narrow units take more turns, not more registers.
    STEP: tl.constexpr = BLOCK // 16
    # Table words are addresses of the device (of the host under the interpreter): nothing translates them on the way.
    address = tl.multiple_of(tl.load(row), UNIT)
    place = tl.multiple_of(tl.load(row + 1), UNIT)
    units = tl.load(row + 2).to(tl.int32)
    dims = tl.load(row + 4)
    first = (begin // UNIT).to(tl.int32)
    end = tl.minimum(first + BLOCK // UNIT, units)
    while first < end:
        unit = tl.multiple_of(first, STEP) + tl.arange(0, STEP)
        inside = unit < units
        offset = _offsets(row + 6, dims, unit)
        if UNIT == 16:
            # A unit is four neighbouring words, of which the compiler makes one access.
            word = tl.arange(0, 4).to(tl.int64)
            tensor_words = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
            packed_words = tl.multiple_of((staging + place).to(tl.pointer_type(tl.int32)), 16)
            tensor_at = tensor_words + (offset[:, None] * 4 + word[None, :])
            packed_at = packed_words + (unit.to(tl.int64)[:, None] * 4 + word[None, :])
            mask = inside[:, None] & (word < 4)[None, :]
        else:
            kind: tl.constexpr = tl.int64 if UNIT == 8 else tl.int32 if UNIT == 4 else tl.int16 if UNIT == 2 else tl.int8
            tensor_at = address.to(tl.pointer_type(kind)) + offset
            packed_at = (staging + place).to(tl.pointer_type(kind)) + unit.to(tl.int64)
            mask = inside
        if TO_STAGING:
            tl.store(packed_at, tl.load(tensor_at, mask=mask), mask=mask)
        else:
            tl.store(tensor_at, tl.load(packed_at, mask=mask), mask=mask)
        first += STEP


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _offsets(
    dim: tl.tensor,  # *int64, (dims, 2): size and stride in units, innermost first
    dims: tl.int64,
    unit: tl.tensor,  # int32, (STEP,)
) -> tl.tensor:
    """Offsets of units in the tensor: (STEP,) int64, in units."""
    offset = tl.zeros_like(unit).to(tl.int64)
    rest = unit
    left = dims
    while left > 1:
        size = tl.load(dim).to(tl.int32)
        whole = rest // size
        offset += (rest - whole * size).to(tl.int64) * tl.load(dim + 1)
        rest = whole
        dim += 2
        left -= 1
    return offset + rest.to(tl.int64) * tl.load(dim + 1)


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
    launch_pack(_table_of(tensors, table), out, num_programs=num_programs)


def launch_pack(table: PackTable, out: Tensor, *, num_programs: int) -> None:
    """Launch `pack` for the tensors that `table` was built for or last refreshed with."""
    launch(pack_kernel, "pack", table, out, num_programs)


def pack_reference(tensors: Sequence[Tensor], out: Tensor) -> None:
    """Do what `pack` must do, by torch: one copy per tensor. Runs anywhere."""
    for words, packed in _words_and_packed(tensors, out):
        packed.copy_(words)


def _table_of(tensors: Sequence[Tensor], table: PackTable | None) -> PackTable:
    """A table of `tensors`: `table` with their addresses, or a new one."""
    if table is None:
        return PackTable(tensors)
    table.refresh(tensors)
    return table


def _words_and_packed(tensors: Sequence[Tensor], buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The memory of each tensor as integers, and the part of `buffer` that holds it packed, in the same shape."""
    for t, offset in zip(tensors, packed_layout(tensors).offsets, strict=True):
        words = memory_words(t)
        packed = buffer[offset : offset + words.numel() * words.element_size()]
        yield words, packed.view(words.dtype).view(words.shape)


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
    launch_unpack(buffer, _table_of(tensors, table), num_programs=num_programs)


def launch_unpack(buffer: Tensor, table: PackTable, *, num_programs: int) -> None:
    """Launch `unpack` for the tensors that `table` was built for or last refreshed with."""
    table.check_destinations("unpack")
    launch(unpack_kernel, "unpack", table, buffer, num_programs)


def unpack_reference(buffer: Tensor, tensors: Sequence[Tensor]) -> None:
    """Do what `unpack` must do, by torch: one copy per tensor. Runs anywhere."""
    for words, packed in _words_and_packed(tensors, buffer):
        words.copy_(packed)
