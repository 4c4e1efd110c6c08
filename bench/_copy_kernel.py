"""Copy bytes by the SMs instead of a copy engine: 16 bytes an access where both ends allow it, single bytes elsewhere.

    head | body                               | tail        head, tail < 16 bytes: masked byte accesses of program 0
         | program p: blocks p, p+P, p+2P ... |             body: whole 16-byte units from an aligned address

P programs stay resident and walk the body together, so their number says how many SMs a copy may take from the model's own
kernels. Either end may be device memory or pinned host memory: Triton translates the address of a pinned CPU tensor.
The library copies by its copy engines alone: this is what they are timed against.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from chameleon_mm.kernels.arguments import UNIT_BYTES, check_flat, check_grid

BLOCK_BYTES = 16384
"""Bytes that one program moves between two steps of its loop: four 16-byte accesses in flight for each of 256 threads."""

NUM_WARPS = 8


def _launch_metadata(grid: Any, metadata: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Metadata for a profiler that hooks Triton's launches: a name with the size, and the bytes read plus written."""
    nbytes = args["head"] + args["nbytes"]
    return {"name": f"{metadata.name}_{nbytes}B", "bytes": 2 * nbytes}


# Sizes are no part of the compiled kernel: copies of every length share one.
@triton.jit(  # type: ignore[untyped-decorator]  # Triton ships no types
    launch_metadata=_launch_metadata, do_not_specialize=["head", "nbytes"]
)
def copy_kernel(
    dst: tl.tensor,  # *uint8, (nbytes,): where the body goes; 16-byte aligned if WIDE
    src: tl.tensor,  # *uint8, (nbytes,): where it comes from; aligned alike
    head: tl.int32,  # bytes directly before both pointers that are copied too, fewer than 16
    nbytes: tl.int64,  # bytes from the pointers on, body and tail
    WIDE: tl.constexpr,  # whether 16-byte accesses are legal
    BLOCK: tl.constexpr,  # bytes a program copies in one step, a power of two
) -> None:
    program = tl.program_id(0).to(tl.int64)
    stride = tl.num_programs(0).to(tl.int64)
    if WIDE:
        # Words of 4 bytes, and a count that the compiler can see is a multiple of 4: then neither an address nor the mask can
        # change inside a 16-byte unit, and four neighbouring words become one access.
        words = (nbytes // 16) * 4
        dst_words = dst.to(tl.pointer_type(tl.int32))
        src_words = src.to(tl.pointer_type(tl.int32))
        # Not `range`: the interpreter of Triton 3.6 makes ints of its bounds in a way that newer numpy refuses.
        start = program * (BLOCK // 4)
        while start < words:
            at = tl.multiple_of(start, BLOCK // 4) + tl.arange(0, BLOCK // 4).to(tl.int64)
            inside = at < words
            tl.store(dst_words + at, tl.load(src_words + at, mask=inside), mask=inside)
            start += stride * (BLOCK // 4)
        if program == 0:
            edge = tl.arange(0, 16).to(tl.int64)
            before = edge < head
            tl.store(dst - head + edge, tl.load(src - head + edge, mask=before), mask=before)
            tail = words * 4 + edge
            behind = tail < nbytes
            tl.store(dst + tail, tl.load(src + tail, mask=behind), mask=behind)
    else:
        start = program * BLOCK
        while start < nbytes:
            at = start + tl.arange(0, BLOCK).to(tl.int64)
            inside = at < nbytes
            tl.store(dst + at, tl.load(src + at, mask=inside), mask=inside)
            start += stride * BLOCK


def copy_bytes_reference(dst: Tensor, src: Tensor) -> None:
    """Do what `copy_bytes` must do, by torch: (n,) uint8 to (n,) uint8, bit for bit."""
    dst.copy_(src)


def copy_bytes(dst: Tensor, src: Tensor, *, num_programs: int, block_bytes: int = BLOCK_BYTES) -> None:
    """Enqueue a copy by kernel of `src` to `dst`, both (n,) uint8, contiguous, not overlapping.

    Runs on torch's current CUDA stream of the current device, which the caller chooses and which must be able to access both
    ends. The caller keeps both alive until the stream has passed. Single bytes move where the two ends are aligned
    differently: correct, and slow. No launch for n = 0.

    `num_programs` is the size of the persistent grid; no more programs start than there are blocks of `block_bytes` (a power
    of two, 64 or more). Raises `ValueError` for unequal sizes, other dtypes or layouts, and a bad grid or block.
    """
    _check(dst, src, num_programs, block_bytes)
    total = dst.numel()
    if total == 0:
        return
    wide = (dst.data_ptr() - src.data_ptr()) % UNIT_BYTES == 0
    head = -dst.data_ptr() % UNIT_BYTES if wide else 0
    if head >= total:  # nothing but an edge: an empty body would have no address to start from
        wide, head = False, 0
    body = total - head
    grid = (min(num_programs, triton.cdiv(body, block_bytes)),)
    copy_kernel[grid](
        dst[head:], src[head:], head, body, WIDE=wide, BLOCK=block_bytes, num_warps=NUM_WARPS,
        enable_fp_fusion=False,  # there is no arithmetic to fuse; Triton warns where this is left to its changing default
    )  # fmt: skip


def _check(dst: Tensor, src: Tensor, num_programs: int, block_bytes: int) -> None:
    check_flat("copy_bytes", "dst", dst)
    check_flat("copy_bytes", "src", src)
    if dst.numel() != src.numel():
        raise ValueError(f"copy_bytes: expected equal sizes, got {src.numel()} bytes into {dst.numel()}; slice the larger one")
    check_grid("copy_bytes", num_programs)
    if block_bytes < 64 or block_bytes & (block_bytes - 1):
        raise ValueError(f"copy_bytes: expected block_bytes as a power of two >= 64, got {block_bytes}; try {BLOCK_BYTES}")
