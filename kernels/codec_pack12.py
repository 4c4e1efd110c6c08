"""pack12: bf16 numbers with exponents near each other in 12.25 bits instead of 16, or 1.306 times fewer bytes.

    block of 1024 numbers -> record of 1568 bytes; what is left over at the end -> as it is

    bytes 0         base: the exponent that code 1 stands for
          1         how many exceptions there are, 30 at most; one more and the tensor is raw
          2..31     exponents of the exceptions, in the order of their numbers; the rest 0
          32..543   codes of 4 bits; byte j holds that of number j below, that of number 512 + j above
          544..1567 sign and mantissa, 8 bits each

    code 0: exponent 0 (zeros and denormals)    codes 1..14: exponent base + code - 1    code 15: an exception

Rate: 8 bits of sign and mantissa, 4 of code, and 32 bytes per 1024 numbers for the rest, 0.25 bits each. It is fixed, so
that the host knows the size; every record stands for itself, so that blocks are coded in any order, in parallel.

Which exponents are common: of a smooth density the share below 2**-k halves with each k, and the share above falls faster.
So the window of 14 lies around the mean exponent, from 7 below to 6 above it: on 4 Mi normal numbers 0.16 % of all are
exceptions, of a product of SwiGLU (normal gate and value) 0.52 %, against the 2.9 % that there is room for; at most 15 in any
block. The mean, and not the largest: one number 2**14 times the others, or one infinity, would make exceptions of all others,
and is one exception this way. Exponent 0 has its own code because ReLU, dropout and causal masks make many exact zeros, and
it does not count for the mean. Exponents that are spread evenly over more than 14 octaves, as those of a sharp softmax, are
beyond this format: raw. The idea of a shared exponent with small differences is that of block floating point (J. H.
Wilkinson, Rounding Errors in Algebraic Processes, 1963), made exact by exceptions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from chameleon_mm.kernels.codec import NUM_WARPS, EncodeStatus, check_coding, counted_jit, whole_elements

BLOCK_ELEMENTS = 1024
RECORD_BYTES = 1568
MAX_EXCEPTIONS = 30

_HALF = BLOCK_ELEMENTS // 2
_CODES = 32  # where they begin in a record
_BYTES = _CODES + _HALF  # where signs and mantissas begin
_EXCEPTION = 15
_WINDOW = 14
_BELOW_MEAN = 7

BLOCKS_AT_ONCE = 4
"""Blocks that a program takes at a time: 16 numbers for each of 256 threads, in two 16-byte loads."""

MAX_REGISTERS = 128
"""Registers of a thread at most: two programs of 256 threads fit a multiprocessor. A bound, because some compilers take more
without need."""


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _code_of(exponent: tl.tensor, base: tl.tensor) -> tl.tensor:
    above = exponent - base
    return tl.where(exponent == 0, 0, tl.where((above >= 0) & (above < 14), above + 1, 15))


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _byte_of(word: tl.tensor) -> tl.tensor:
    return (((word >> 8) & 0x80) | (word & 0x7F)).to(tl.uint8)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _word_of(exponent: tl.tensor, byte: tl.tensor) -> tl.tensor:
    return (((byte & 0x80) << 8) | (exponent << 7) | (byte & 0x7F)).to(tl.int16)


@counted_jit  # type: ignore[untyped-decorator]  # Triton ships no types
def pack12_encode_kernel(
    src: tl.tensor,  # *uint8, (2 * count,): bf16 words, 16-byte aligned
    dst: tl.tensor,  # *uint8, (encoded_bytes,), 16-byte aligned
    status: tl.tensor,  # *int32, (1,): 0 before
    count: tl.int64,  # numbers
    REASON: tl.constexpr,
    BLOCKS: tl.constexpr,  # blocks of a step
) -> None:
    words = src.to(tl.pointer_type(tl.int16))
    blocks = count // 1024
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, 512)
    slot = tl.arange(0, 32)
    start = program * BLOCKS
    # Not `range`: the interpreter of Triton 3.6 makes ints of its bounds in a way that newer numpy refuses.
    while start < blocks:
        block = start + tl.arange(0, BLOCKS).to(tl.int64)
        inside = (block < blocks)[:, None]
        numbers = words + (block * 1024)[:, None] + lane[None, :]
        low = tl.load(numbers, mask=inside, other=0).to(tl.int32)
        high = tl.load(numbers + 512, mask=inside, other=0).to(tl.int32)
        low_exponent, high_exponent = (low >> 7) & 0xFF, (high >> 7) & 0xFF

        total = tl.sum(low_exponent + high_exponent, axis=1)
        nonzero = tl.sum((low_exponent != 0).to(tl.int32) + (high_exponent != 0).to(tl.int32), axis=1)
        base = tl.maximum(total // tl.maximum(nonzero, 1) - 7, 1)
        low_code, high_code = _code_of(low_exponent, base[:, None]), _code_of(high_exponent, base[:, None])
        low_odd, high_odd = (low_code == 15).to(tl.int32), (high_code == 15).to(tl.int32)
        low_odds = tl.sum(low_odd, axis=1)
        odds = low_odds + tl.sum(high_odd, axis=1)
        most = tl.max(odds, axis=0)
        if most > 30:
            tl.store(status, REASON)  # every program that writes it writes this

        record = (dst + block * 1568)[:, None]
        tl.store(record + 32 + lane[None, :], (low_code | (high_code << 4)).to(tl.uint8), mask=inside)
        tl.store(record + 544 + lane[None, :], _byte_of(low), mask=inside)
        tl.store(record + 1056 + lane[None, :], _byte_of(high), mask=inside)
        # No two threads write one byte: here are the slots that hold no exception, below those that hold one.
        head = tl.where(slot[None, :] == 0, base[:, None], tl.where(slot[None, :] == 1, odds[:, None], 0))
        is_free = (slot[None, :] < 2) | (slot[None, :] >= odds[:, None] + 2)
        tl.store(record + slot[None, :], head.to(tl.uint8), mask=inside & is_free)
        if most > 0:
            low_rank = tl.cumsum(low_odd, axis=1) - 1
            high_rank = tl.cumsum(high_odd, axis=1) - 1 + low_odds[:, None]
            # More than 30 run on into the codes, and stay in the record: it means nothing then.
            tl.store(record + 2 + low_rank, low_exponent.to(tl.uint8), mask=inside & (low_odd != 0))
            tl.store(record + 2 + high_rank, high_exponent.to(tl.uint8), mask=inside & (high_odd != 0))
        start += tl.num_programs(0).to(tl.int64) * BLOCKS
    if program == 0:
        rest = tl.arange(0, 1024)
        kept = blocks * 1024 + rest < count
        left = tl.load(words + blocks * 1024 + rest, mask=kept)
        tl.store((dst + blocks * 1568).to(tl.pointer_type(tl.int16)) + rest, left, mask=kept)


@counted_jit  # type: ignore[untyped-decorator]  # Triton ships no types
def pack12_decode_kernel(
    src: tl.tensor,  # *uint8, (encoded_bytes,), 16-byte aligned
    dst: tl.tensor,  # *uint8, (2 * count,): bf16 words, 16-byte aligned
    count: tl.int64,  # numbers
    BLOCKS: tl.constexpr,  # blocks of a step
) -> None:
    words = dst.to(tl.pointer_type(tl.int16))
    blocks = count // 1024
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, 512)
    start = program * BLOCKS
    while start < blocks:
        block = start + tl.arange(0, BLOCKS).to(tl.int64)
        inside = (block < blocks)[:, None]
        record = (src + block * 1568)[:, None]
        base = tl.load(record, mask=inside, other=0).to(tl.int32)
        codes = tl.load(record + 32 + lane[None, :], mask=inside, other=0).to(tl.int32)
        low_byte = tl.load(record + 544 + lane[None, :], mask=inside, other=0).to(tl.int32)
        high_byte = tl.load(record + 1056 + lane[None, :], mask=inside, other=0).to(tl.int32)
        low_code, high_code = codes & 15, codes >> 4
        low_exponent = tl.where(low_code == 0, 0, base + low_code - 1)
        high_exponent = tl.where(high_code == 0, 0, base + high_code - 1)

        low_odd, high_odd = (low_code == 15).to(tl.int32), (high_code == 15).to(tl.int32)
        low_odds = tl.sum(low_odd, axis=1)
        if tl.max(low_odds + tl.sum(high_odd, axis=1), axis=0) > 0:
            low_rank = tl.cumsum(low_odd, axis=1) - 1
            high_rank = tl.cumsum(high_odd, axis=1) - 1 + low_odds[:, None]
            # Whatever the codes are, also where no encode wrote them, a rank is below 1024 and its byte in the record.
            low_other = tl.load(record + 2 + low_rank, mask=low_odd != 0, other=0).to(tl.int32)
            high_other = tl.load(record + 2 + high_rank, mask=high_odd != 0, other=0).to(tl.int32)
            low_exponent = tl.where(low_odd != 0, low_other, low_exponent)
            high_exponent = tl.where(high_odd != 0, high_other, high_exponent)

        numbers = words + (block * 1024)[:, None] + lane[None, :]
        tl.store(numbers, _word_of(low_exponent, low_byte), mask=inside)
        tl.store(numbers + 512, _word_of(high_exponent, high_byte), mask=inside)
        start += tl.num_programs(0).to(tl.int64) * BLOCKS
    if program == 0:
        rest = tl.arange(0, 1024)
        kept = blocks * 1024 + rest < count
        left = tl.load((src + blocks * 1568).to(tl.pointer_type(tl.int16)) + rest, mask=kept)
        tl.store(words + blocks * 1024 + rest, left, mask=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack12Codec:
    """A `Codec` for bf16: the exponents of 1024 numbers as differences of 4 bits, with up to 30 exceptions."""

    name: str = "pack12"
    blocks_at_once: int = BLOCKS_AT_ONCE

    def applies_to(self, dtype: torch.dtype) -> bool:
        return dtype is torch.bfloat16

    def encoded_bytes(self, nbytes: int) -> int:
        blocks, rest = divmod(whole_elements(self.name, nbytes, 2), BLOCK_ELEMENTS)
        return blocks * RECORD_BYTES + 2 * rest

    def encode(self, src: Tensor, dst: Tensor, status: Tensor, *, num_programs: int) -> None:
        check_coding(self, "encode", src, dst, num_programs, status)
        status.zero_()  # before the kernel, in stream order: it writes only where it has a reason
        if src.numel():
            pack12_encode_kernel[self._grid(src.numel(), num_programs)](
                src, dst, status, src.numel() // 2, REASON=int(EncodeStatus.TOO_MANY_EXCEPTIONS), BLOCKS=self.blocks_at_once,
                num_warps=NUM_WARPS, maxnreg=MAX_REGISTERS,
                enable_fp_fusion=False,  # nothing to fuse; Triton warns where this is left to its changing default
            )  # fmt: skip

    def decode(self, src: Tensor, dst: Tensor, *, num_programs: int) -> None:
        check_coding(self, "decode", dst, src, num_programs)
        if dst.numel():
            pack12_decode_kernel[self._grid(dst.numel(), num_programs)](
                src, dst, dst.numel() // 2, BLOCKS=self.blocks_at_once, num_warps=NUM_WARPS, maxnreg=MAX_REGISTERS,
                enable_fp_fusion=False,
            )  # fmt: skip

    def encode_reference(self, src: Tensor, dst: Tensor, status: Tensor) -> None:
        blocks = src.numel() // (2 * BLOCK_ELEMENTS)
        words = src[: 2 * BLOCK_ELEMENTS * blocks].view(torch.int16).view(blocks, BLOCK_ELEMENTS).to(torch.int32)
        exponent = (words >> 7) & 0xFF
        mean = exponent.sum(1, keepdim=True) // (exponent != 0).sum(1, keepdim=True).clamp(min=1)
        base = (mean - _BELOW_MEAN).clamp(min=1)
        in_window = (exponent >= base) & (exponent < base + _WINDOW)
        code = torch.where(exponent == 0, 0, torch.where(in_window, exponent - base + 1, _EXCEPTION))
        is_odd = code == _EXCEPTION
        odds = is_odd.sum(1, keepdim=True)
        # The first exceptions of each block, in order: those that are none sort behind them, and count as 0.
        order = is_odd.to(torch.int32).sort(dim=1, descending=True, stable=True).indices[:, :MAX_EXCEPTIONS]
        others = torch.where(is_odd, exponent, 0).gather(1, order)
        codes = code[:, :_HALF] | (code[:, _HALF:] << 4)
        signs_and_mantissas = ((words >> 8) & 0x80) | (words & 0x7F)
        records = torch.cat([base, odds, others, codes, signs_and_mantissas], dim=1)
        dst[: blocks * RECORD_BYTES].view(blocks, RECORD_BYTES).copy_(records)
        dst[blocks * RECORD_BYTES :].copy_(src[2 * BLOCK_ELEMENTS * blocks :])
        status.copy_((odds > MAX_EXCEPTIONS).any() * int(EncodeStatus.TOO_MANY_EXCEPTIONS))

    def decode_reference(self, src: Tensor, dst: Tensor) -> None:
        blocks = dst.numel() // (2 * BLOCK_ELEMENTS)
        records = src[: blocks * RECORD_BYTES].view(blocks, RECORD_BYTES).to(torch.int32)
        base, others, codes, bytes_ = records[:, :1], records[:, 2:_CODES], records[:, _CODES:_BYTES], records[:, _BYTES:]
        code = torch.cat([codes & 15, codes >> 4], dim=1)
        is_odd = code == _EXCEPTION
        rank = (is_odd.cumsum(1) - 1).clamp(min=0, max=MAX_EXCEPTIONS - 1)
        exponent = torch.where(is_odd, others.gather(1, rank), torch.where(code == 0, 0, base + code - 1))
        words = ((bytes_ & 0x80) << 8) | (exponent << 7) | (bytes_ & 0x7F)
        dst[: 2 * BLOCK_ELEMENTS * blocks].view(torch.int16).view(blocks, BLOCK_ELEMENTS).copy_(words)
        dst[2 * BLOCK_ELEMENTS * blocks :].copy_(src[blocks * RECORD_BYTES :])

    def _grid(self, nbytes: int, num_programs: int) -> tuple[int]:
        return (min(num_programs, max(1, nbytes // (2 * BLOCK_ELEMENTS * self.blocks_at_once))),)


PACK12 = Pack12Codec()
