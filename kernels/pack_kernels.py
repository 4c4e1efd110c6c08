"""Gather many buffers into one staging buffer, in one launch, and scatter them again: one copy crosses the link, not hundreds.

    pack(staging, buffers, offsets, num_programs=8)        staging[offset:][:nbytes] = the buffer's bytes
    unpack(staging, buffers, offsets, num_programs=8)      the inverse

Both kernels are one walk: every program takes items of a table in turn and moves their bytes.

    row    address | place in the staging buffer | bytes | first item
    item   row                                             a block of a row's bytes: what a program moves in one go

    for item in p, p+P, p+2P ...:                          P resident programs: how many SMs the launch may take

Accesses are 16 bytes wide where both ends lie on a boundary of as many, all but the last few bytes then; else one byte.
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
"""256 threads, with 64 registers each at most: four programs fit a multiprocessor (`tests/test_kernels_compiled.py`)."""

SIZES = ["rows", "items", "nbytes"]
"""Names of the arguments that are no part of the compiled kernel: batches of every size share one."""

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
    # Not `range`: the interpreter of Triton 3.6 makes ints of its bounds in a way that newer numpy refuses.
    while item < items:
        row = table + tl.load(table + rows * 4 + item) * 4
        # Table words are addresses of the device (of the host under the interpreter): nothing translates them on the way.
        address = tl.load(row)
        place = tl.load(row + 1)
        nbytes = tl.load(row + 2)
        first = (item - tl.load(row + 3)) * BLOCK
        end = tl.minimum(first + BLOCK, nbytes)
        if (address | place) % 16 == 0:
            # A unit is four neighbouring words, of which the compiler makes one access. Hints stand at the casts, which nothing
            # else shares: a hint at `place` would hold where it is no multiple, too.
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
    staging: tl.tensor,  # *uint8: where the bytes go
    rows: tl.int64,
    items: tl.int64,
    nbytes: tl.int64,  # what moves; for launch metadata alone
    BLOCK: tl.constexpr,  # bytes of an item
) -> None:
    _walk(table, staging, rows, items, BLOCK, TO_STAGING=True)


@triton.jit(launch_metadata=launch_metadata, do_not_specialize=SIZES)  # type: ignore[untyped-decorator]  # Triton ships no types
def unpack_kernel(
    table: tl.tensor,  # *int64, (4 * rows + items,)
    staging: tl.tensor,  # *uint8: where the bytes come from
    rows: tl.int64,
    items: tl.int64,
    nbytes: tl.int64,  # what moves; for launch metadata alone
    BLOCK: tl.constexpr,  # bytes of an item
) -> None:
    _walk(table, staging, rows, items, BLOCK, TO_STAGING=False)


def pack(
    staging: Tensor, buffers: Sequence[Tensor], offsets: Sequence[int], *, num_programs: int, block_bytes: int = BLOCK_BYTES
) -> None:
    """Enqueue the gathering of `buffers` into `staging`, each from its offset on. Other bytes of `staging` are not written.

    All are (n,) uint8 and contiguous, on one device, and each has its place within `staging`, which is 16-byte aligned: the
    device layer looks at that. Buffers may overlap each other, and do not overlap `staging`. Runs on torch's current stream of
    the current device, which must be theirs; the caller keeps all alive until the stream has passed. `num_programs` is the size
    of the grid: how many SMs it may take at a time. Raises `torch.OutOfMemoryError` where the table has no memory, before
    anything is enqueued.
    """
    _launch(pack_kernel, staging, buffers, offsets, num_programs, block_bytes)


def unpack(
    staging: Tensor, buffers: Sequence[Tensor], offsets: Sequence[int], *, num_programs: int, block_bytes: int = BLOCK_BYTES
) -> None:
    """Enqueue the scattering of `staging` into `buffers`, which share no bytes; otherwise as `pack`, whose inverse it is."""
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
    if staging.device.type != "cpu":  # under the interpreter it is there; torch reuses its pinned memory only after the copy
        table = table.pin_memory().to(staging.device, non_blocking=True)
    kernel[(min(num_programs, num_items),)](
        table, staging, len(rows), num_items, sum(nbytes), BLOCK=block, num_warps=NUM_WARPS,
        enable_fp_fusion=False,  # there is no arithmetic to fuse; Triton warns where this is left to its changing default
    )  # fmt: skip


def pack_reference(staging: Tensor, buffers: Sequence[Tensor], offsets: Sequence[int]) -> None:
    """Do what `pack` must do, by torch: one copy per buffer. Runs anywhere."""
    for buffer, offset in zip(buffers, offsets, strict=True):
        staging[offset : offset + buffer.numel()] = buffer


def unpack_reference(staging: Tensor, buffers: Sequence[Tensor], offsets: Sequence[int]) -> None:
    """Do what `unpack` must do, by torch: one copy per buffer. Runs anywhere."""
    for buffer, offset in zip(buffers, offsets, strict=True):
        buffer.copy_(staging[offset : offset + buffer.numel()])
