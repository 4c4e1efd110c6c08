"""Checksum of a buffer: 64 bits that depend on the value and the position of every byte.

    add_checksum(out, src, num_programs=132)        out[0] += checksum of src, modulo 2**64
    checksum_reference(src)                         the same checksum with torch operators

    checksum = sum over words i of  mix(word[i] ^ (i + 1) * STEP)           modulo 2**64

`mix` is the finaliser of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014): a bijection
in which each bit of the word changes each bit of the result with probability 1/2. A sum of weighted words would not do: with
any odd weights, the sign changes of two floats at odd positions add 2**63 each and cancel.

A sum does not depend on the order of its terms, so programs use an atomic add and the result is the same each time.
The last word is padded with zero bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD = 8
"""Bytes of a word."""

BLOCK_WORDS = 4096
"""Words that a program processes at a time: 16 for each of 256 threads."""

NUM_WARPS = 8

STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # splitmix64's constants, as int64
FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
SECOND = 0x94D049BB133111EB - (1 << 64)

_REFERENCE_WORDS = 1 << 20
"""Words that the reference processes at a time. It needs 16 bytes of memory for each."""

__all__ = ["add_checksum", "checksum_kernel", "checksum_reference"]


def _launch_metadata(grid: Any, metadata: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Metadata for a profiler that hooks Triton's launches: a name with the size, and the bytes read."""
    return {"name": f"{metadata.name}_{args['nbytes']}B", "bytes": args["nbytes"]}


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _mixed(
    word: tl.tensor,  # int64, (n,)
    at: tl.tensor,  # int64, (n,): position of each
    STEP: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
) -> tl.tensor:
    # The masks turn arithmetic shifts into logical ones.
    x = word ^ ((at + 1) * STEP)
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * SECOND
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit(launch_metadata=_launch_metadata, do_not_specialize=["nbytes"])  # type: ignore[untyped-decorator]  # Triton ships no types
def checksum_kernel(
    src: tl.tensor,  # *uint8, (nbytes,); 8-byte aligned
    out: tl.tensor,  # *int64, (1,)
    nbytes: tl.int64,
    BLOCK: tl.constexpr,  # words of a step, a power of two
    STEP: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
) -> None:
    words = src.to(tl.pointer_type(tl.int64))
    nbytes = nbytes.to(tl.int64)
    whole = nbytes // 8
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.int64)
    start = program * BLOCK
    # Not `range`: the interpreter of Triton 3.6 converts its bounds to int in a way that newer NumPy rejects.
    while start < whole:
        at = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = at < whole
        mixed = _mixed(tl.load(words + at, mask=inside, other=0), at, STEP, FIRST, SECOND)
        total += tl.where(inside, mixed, 0)
        start += tl.num_programs(0).to(tl.int64) * BLOCK
    if program == 0:
        byte = tl.arange(0, 8).to(tl.int64)
        tail = tl.load(src + whole * 8 + byte, mask=whole * 8 + byte < nbytes, other=0).to(tl.int64)
        last = tl.sum(tail << (byte * 8), axis=0)
        if whole * 8 < nbytes:
            tl.atomic_add(out, _mixed(last, whole, STEP, FIRST, SECOND))
    tl.atomic_add(out, tl.sum(total, axis=0))


def add_checksum(out: Tensor, src: Tensor, *, num_programs: int) -> None:
    """Enqueue a kernel that adds the checksum of `src` to `out`.

    src: (n,) uint8, contiguous, 16-byte aligned. out: (1,) int64 on the same device. The device layer checks this. Runs on
    torch's current stream of the current device, which must be theirs. The caller keeps both alive until the kernel is done.
    `num_programs` is the maximum size of the grid.
    """
    if src.numel():
        grid = (min(num_programs, -(-src.numel() // (WORD * BLOCK_WORDS))),)
        checksum_kernel[grid](
            src, out, src.numel(), BLOCK=BLOCK_WORDS, STEP=STEP, FIRST=FIRST, SECOND=SECOND, num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip


def checksum_reference(src: Tensor) -> Tensor:
    """Return the checksum of `src`, (n,) uint8, as a 0-dimensional int64 tensor. Uses torch operators; runs on any device."""
    total = torch.zeros((), dtype=torch.int64, device=src.device)
    if src.data_ptr() % WORD or src.storage_offset() % WORD:
        src = src.clone()
    whole = src.numel() // WORD
    words = src[: whole * WORD].view(torch.int64)
    for begin in range(0, whole, _REFERENCE_WORDS):
        part = words[begin : begin + _REFERENCE_WORDS]
        total += _mixed_reference(part, torch.arange(begin + 1, begin + 1 + part.numel(), device=src.device))
    if whole * WORD < src.numel():
        last = src.new_zeros(WORD)
        last[: src.numel() - whole * WORD].copy_(src[whole * WORD :])
        total += _mixed_reference(last.view(torch.int64), torch.tensor([whole + 1], device=src.device))
    return total


def _mixed_reference(words: Tensor, number: Tensor) -> Tensor:
    """Return the sum of `mix` over int64 `words`. `number` has their positions, counted from 1, and is overwritten."""
    x = number.mul_(STEP).bitwise_xor_(words)
    shifted = torch.empty_like(x)
    for shift, factor in ((30, FIRST), (27, SECOND), (31, 1)):
        torch.bitwise_right_shift(x, shift, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    return x.sum()
