"""The walk that pack and unpack share: every program takes items of the table in turn and moves their units.

    for item in p, p+P, p+2P ...:                          P resident programs: how many SMs the launch may take
        row = table of the item                            address, place, units, bytes of a unit, (size, stride) per dim
        unit u of the row:  packed side  place + u * unit            tensor side  address + sum index_d * stride_d

Rows are cut so that units are counted in 32 bits; what they are multiplied to, offsets and addresses, has 64.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from chameleon_mm.kernels.arguments import check_current, check_grid
from chameleon_mm.kernels.pack_table import PackTable

NUM_WARPS = 8

SIZES = ["work", "row_words", "items", "nbytes"]
"""Names of the arguments that are no part of the compiled kernel: batches of every size and layout share one."""


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
