"""Booleans as bits: dropout and attention masks, an eighth of the bytes.

    bit i of byte j = element 8j + i; the last byte's unused bits are 0
    a byte of a boolean tensor that is neither 0 nor 1 (torch takes any as true) could not be given back: raw

Eight elements are one 64-bit word of bytes 0 or 1. Multiplied by 2**7 + 2**14 + ... + 2**56 it has its eight bits side by
side in its top byte, element 0 lowest: byte i of the word is moved to bit 56 + i by 2**(56 - 7i), every other product of a
bit falls on a place of its own below bit 56 or above bit 63, and so nothing carries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from chameleon_mm.kernels.codec import NUM_WARPS, EncodeStatus, check_coding, counted_jit, whole_elements

BLOCK_WORDS = 2048
"""Words of 8 elements that a program takes at a time: 8 for each of 256 threads."""


@counted_jit  # type: ignore[untyped-decorator]  # Triton ships no types
def bools_to_bits_kernel(
    src: tl.tensor,  # *uint8, (count,): bytes 0 or 1; 16-byte aligned
    dst: tl.tensor,  # *uint8, (ceil(count / 8),); 16-byte aligned
    status: tl.tensor,  # *int32, (1,): 0 before
    count: tl.int64,
    REASON: tl.constexpr,
    BLOCK: tl.constexpr,  # words of a step
) -> None:
    words = src.to(tl.pointer_type(tl.int64))
    # A number of words that the compiler can see is a multiple of 16: then no mask changes inside a 16-byte access.
    body = (count // 128) * 16
    program = tl.program_id(0).to(tl.int64)
    start = program * BLOCK
    # Not `range`: the interpreter of Triton 3.6 makes ints of its bounds in a way that newer numpy refuses.
    while start < body:
        at = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK).to(tl.int64)
        inside = at < body
        word = tl.load(words + at, mask=inside, other=0)
        bits = (word * 0x0102040810204080) >> 56
        tl.store(dst + at, bits.to(tl.uint8), mask=inside)
        bad = (word & ~0x0101010101010101) != 0
        if tl.max(bad.to(tl.int32), axis=0) != 0:
            tl.store(status, REASON)  # every program that writes it writes this
        start += tl.num_programs(0).to(tl.int64) * BLOCK
    if program == 0:
        byte = body + tl.arange(0, 16).to(tl.int64)
        bit = tl.arange(0, 8)
        at = byte[:, None] * 8 + bit[None, :]
        value = tl.load(src + at, mask=at < count, other=0).to(tl.int32)
        tl.store(dst + byte, tl.sum(value << bit[None, :], axis=1).to(tl.uint8), mask=byte * 8 < count)
        if tl.max(tl.max(value, axis=1), axis=0) > 1:
            tl.store(status, REASON)


@counted_jit  # type: ignore[untyped-decorator]  # Triton ships no types
def bits_to_bools_kernel(
    src: tl.tensor,  # *uint8, (ceil(count / 8),); 16-byte aligned
    dst: tl.tensor,  # *uint8, (count,); 16-byte aligned
    count: tl.int64,
    BLOCK: tl.constexpr,
) -> None:
    words = dst.to(tl.pointer_type(tl.int64))
    body = (count // 128) * 16
    program = tl.program_id(0).to(tl.int64)
    start = program * BLOCK
    while start < body:
        at = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK).to(tl.int64)
        inside = at < body
        bits = tl.load(src + at, mask=inside, other=0).to(tl.int64)
        # Bits 0, 2, 4, 6 go up by 0, 14, 28, 42 places, bits 1, 3, 5, 7 by 7 more. Products of 8 bits by places 14 apart do
        # not meet, so nothing carries.
        spread = bits * 0x0000040010004001
        word = (spread & 0x0001000100010001) | ((spread << 7) & 0x0100010001000100)
        tl.store(words + at, word, mask=inside)
        start += tl.num_programs(0).to(tl.int64) * BLOCK
    if program == 0:
        at = body * 8 + tl.arange(0, 128).to(tl.int64)
        inside = at < count
        value = (tl.load(src + at // 8, mask=inside, other=0).to(tl.int32) >> (at % 8).to(tl.int32)) & 1
        tl.store(dst + at, value.to(tl.uint8), mask=inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoolCodec:
    """A `Codec` that writes a boolean as one bit."""

    name: str = "bool_as_bits"
    block_words: int = BLOCK_WORDS

    def applies_to(self, dtype: torch.dtype) -> bool:
        return dtype is torch.bool

    def encoded_bytes(self, nbytes: int) -> int:
        return -(-whole_elements(self.name, nbytes, 1) // 8)

    def encode(self, src: Tensor, dst: Tensor, status: Tensor, *, num_programs: int) -> None:
        check_coding(self, "encode", src, dst, num_programs, status)
        status.zero_()  # before the kernel, in stream order: it writes only where it has a reason
        if src.numel():
            bools_to_bits_kernel[self._grid(src.numel(), num_programs)](
                src, dst, status, src.numel(), REASON=int(EncodeStatus.NOT_BOOL), BLOCK=self.block_words, num_warps=NUM_WARPS,
                enable_fp_fusion=False,  # nothing to fuse; Triton warns where this is left to its changing default
            )  # fmt: skip

    def decode(self, src: Tensor, dst: Tensor, *, num_programs: int) -> None:
        check_coding(self, "decode", dst, src, num_programs)
        if dst.numel():
            bits_to_bools_kernel[self._grid(dst.numel(), num_programs)](
                src, dst, dst.numel(), BLOCK=self.block_words, num_warps=NUM_WARPS, enable_fp_fusion=False
            )

    def encode_reference(self, src: Tensor, dst: Tensor, status: Tensor) -> None:
        bools = torch.zeros(8 * dst.numel(), dtype=torch.uint8, device=src.device)
        bools[: src.numel()] = src
        places = torch.arange(8, dtype=torch.int32, device=src.device)
        dst.copy_(((bools != 0).view(-1, 8).to(torch.int32) << places).sum(1))
        status.copy_((src > 1).any() * int(EncodeStatus.NOT_BOOL))

    def decode_reference(self, src: Tensor, dst: Tensor) -> None:
        places = torch.arange(8, dtype=torch.uint8, device=src.device)
        dst.copy_(((src[:, None] >> places) & 1).view(-1)[: dst.numel()])

    def _grid(self, count: int, num_programs: int) -> tuple[int]:
        return (min(num_programs, triton.cdiv(count, 8 * self.block_words)),)


BOOL_AS_BITS = BoolCodec()
