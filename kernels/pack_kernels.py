"""Gather many buffers into one staging buffer in one launch, and scatter them again: one copy over the link, not hundreds.

    pack(staging, buffers, offsets, num_programs=8)        staging[offset:][:nbytes] = the buffer's bytes
    unpack(staging, buffers, offsets, num_programs=8)      the inverse

Both kernels share one loop: each program takes items of a table in turn and moves their bytes.

    row    address | offset in the staging buffer | bytes | first item
    item   row                                             a block of a row's bytes that a program moves at a time

    for item in p, p+P, p+2P ...:                          P resident programs: at most P SMs are in use

Accesses are 16 bytes wide if both ends are 16-byte aligned, except for the last few bytes. Otherwise they are one byte wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_BYTES = 16384
"""Bytes of an item: four 16-byte accesses in flight for each of 256 threads."""

NUM_WARPS = 8
"""256 threads with at most 64 registers each: four programs fit on a multiprocessor (`tests/test_kernels_compiled.py`)."""

SIZES = ["rows", "items", "nbytes"]
"""Names of the arguments that are not specialised, so that batches of all sizes share one compiled kernel."""

__all__ = ["pack", "pack_kernel", "pack_reference", "unpack", "unpack_kernel", "unpack_reference"]


def launch_metadata(grid: Any, metadata: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Metadata for a profiler that hooks Triton's launches: a name with the size, and the bytes read plus written."""
    return {"name": f"{metadata.name}_{args['nbytes']}B", "bytes": 2 * args["nbytes"]}


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _walk(
    table: tl.tensor,  # *int64, (4 * rows + items,): the rows, then the row of each item
    staging: tl.tensor,  # *uint8: the packed bytes; 16-byte aligned
    rows: tl.int64,
    items: tl.int64,
    BLOCK: tl.constexpr,  # bytes of an item, a power of two
    TO_STAGING: tl.constexpr,  # the direction
) -> None:
    item = tl.program_id(0).to(tl.int64)
    # Not `range`: the interpreter of Triton 3.6 converts its bounds to int in a way that newer NumPy rejects.
    while item < items:
        row = table + tl.load(table + rows * 4 + item) * 4
        # Addresses in the table are device addresses (host addresses under the interpreter) and are used untranslated.
        address = tl.load(row)
        place = tl.load(row + 1)
        nbytes = tl.load(row + 2)
        first = (item - tl.load(row + 3)) * BLOCK
        end = tl.minimum(first + BLOCK, nbytes)
        if (address | place) % 16 == 0:
            # A unit is four adjacent words, which the compiler merges into one access. The hints are on the casts, which only
            # this branch uses: a hint on `place` would also apply where it is not a multiple.
            tensor_words = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
            packed_words = tl.multiple_of((staging + place).to(tl.pointer_type(tl.int32)), 16)
            unit = first // 16 + tl.arange(0, BLOCK // 16).to(tl.int64)
            word = unit[:, None] * 4 + tl.arange(0, 4).to(tl.int64)[None, :]
            _move(tensor_words + word, packed_words + word, (unit < nbytes // 16)[:, None] & (word >= 0), TO_STAGING)
            first = tl.maximum(first, nbytes // 16 * 16)
        tensor_bytes = address.to(tl.pointer_type(tl.int8))
        packed_bytes = staging.to(tl.pointer_type(tl.int8)) + place
        while first < end:
            byte = first + tl.arange(0, BLOCK // 16).to(tl.int64)
            _move(tensor_bytes + byte, packed_bytes + byte, byte < end, TO_STAGING)
            first += BLOCK // 16
        item += tl.num_programs(0).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _move(tensor_at: tl.tensor, packed_at: tl.tensor, mask: tl.tensor, TO_STAGING: tl.constexpr) -> None:
    if TO_STAGING:
        tl.store(packed_at, tl.load(tensor_at, mask=mask), mask=mask)
    else:
        tl.store(tensor_at, tl.load(packed_at, mask=mask), mask=mask)


@triton.jit(launch_metadata=launch_metadata, do_not_specialize=SIZES)  # type: ignore[untyped-decorator]  # Triton ships no types
def pack_kernel(
    table: tl.tensor,  # *int64, (4 * rows + items,)
    staging: tl.tensor,  # *uint8: destination of the bytes
    rows: tl.int64,
    items: tl.int64,
    nbytes: tl.int64,  # bytes moved; only for launch metadata
    BLOCK: tl.constexpr,  # bytes of an item
) -> None:
    _walk(table, staging, rows, items, BLOCK, TO_STAGING=True)


@triton.jit(launch_metadata=launch_metadata, do_not_specialize=SIZES)  # type: ignore[untyped-decorator]  # Triton ships no types
def unpack_kernel(
    table: tl.tensor,  # *int64, (4 * rows + items,)
    staging: tl.tensor,  # *uint8: source of the bytes
    rows: tl.int64,
    items: tl.int64,
    nbytes: tl.int64,  # bytes moved; only for launch metadata
    BLOCK: tl.constexpr,  # bytes of an item
) -> None:
    _walk(table, staging, rows, items, BLOCK, TO_STAGING=False)


def pack(
    staging: Tensor, buffers: Sequence[Tensor], offsets: Sequence[int], *, num_programs: int, block_bytes: int = BLOCK_BYTES
) -> None:
    """Enqueue a kernel that copies `buffers` into `staging`, each at its offset. Other bytes of `staging` are not written.

    All are (n,) uint8 and contiguous, on one device. `staging` is 16-byte aligned, and each buffer fits in it at its offset.
    The device layer checks this. Buffers may overlap each other but not `staging`. Runs on torch's current stream of the
    current device, which must be theirs. The caller keeps all alive until the kernel is done. `num_programs` is the maximum
    size of the grid, so the maximum number of SMs in use. Raises `torch.OutOfMemoryError` if there is no memory for the table,
    before anything is enqueued.
    """
    _launch(pack_kernel, staging, buffers, offsets, num_programs, block_bytes)


def unpack(
    staging: Tensor, buffers: Sequence[Tensor], offsets: Sequence[int], *, num_programs: int, block_bytes: int = BLOCK_BYTES
) -> None:
    """Enqueue a kernel that copies `staging` into `buffers`, the inverse of `pack` in all else. Buffers must not overlap."""
    _launch(unpack_kernel, staging, buffers, offsets, num_programs, block_bytes)


def _launch(
    kernel: Any, staging: Tensor, buffers: Sequence[Tensor], offsets: Sequence[int], num_programs: int, block: int
) -> None:
    nbytes = [t.numel() for t in buffers]
    rows = np.array([[t.data_ptr() for t in buffers], offsets, nbytes, nbytes], dtype=np.int64).T
    ends = np.cumsum(-(-rows[:, 2] // block))
    if not len(rows) or ends[-1] == 0:
        return
    rows[:, 3] = np.concatenate(([0], ends[:-1]))
    num_items = int(ends[-1])
    table = torch.from_numpy(np.concatenate((rows.ravel(), np.searchsorted(ends, np.arange(num_items), side="right"))))
    if staging.device.type != "cpu":  # the interpreter reads it in place; torch reuses the pinned memory after the copy
        table = table.pin_memory().to(staging.device, non_blocking=True)
    kernel[(min(num_programs, num_items),)](
        table, staging, len(rows), num_items, sum(nbytes), BLOCK=block, num_warps=NUM_WARPS,
        enable_fp_fusion=False,  # nothing to fuse; Triton warns if this is left to its changing default
    )  # fmt: skip


def pack_reference(staging: Tensor, buffers: Sequence[Tensor], offsets: Sequence[int]) -> None:
    """Reference for `pack` with torch operators: one copy per buffer. Runs on any device."""
    for buffer, offset in zip(buffers, offsets, strict=True):
        staging[offset : offset + buffer.numel()] = buffer


def unpack_reference(staging: Tensor, buffers: Sequence[Tensor], offsets: Sequence[int]) -> None:
    """Reference for `unpack` with torch operators: one copy per buffer. Runs on any device."""
    for buffer, offset in zip(buffers, offsets, strict=True):
        buffer.copy_(staging[offset : offset + buffer.numel()])
