"""The codecs that write each word narrower: one kernel to encode, one to decode, and the arithmetic of each kind of word.

    encode    word -> (narrow, bad)        dst[i] = narrow; any bad one: status = reason, for nothing is clamped
    decode    narrow -> word               dst[i] = word
    | whole groups of 16 elements: program p takes blocks p, p+P, p+2P ... | fewer than 16 more: program 0 |

Groups of 16 keep every access of the body 16 bytes wide on the wide side, whatever the types are.

    int64 as int32, int16    low bits of the word    token ids, labels, indices: exact where sign extension gives the word back
    fp32 as bf16    the upper half of the word       what autocast or a norm upcast: exact where the lower half is 0
    fp32 as fp16    sign, exponent - 112, the upper 10 bits of the mantissa     exact where the lower 13 are 0 and the exponent
                    fits; a denormal of fp16, k * 2**-24, is a normal number of fp32 with k's bits on top of its mantissa

Bits are compared and shifted, never converted: conversions of the hardware quiet signalling NaNs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from chameleon_mm.kernels.codec import NUM_WARPS, EncodeStatus, check_coding, counted_jit, whole_elements

BLOCK_ELEMENTS = 4096
"""Elements that a program takes at a time: 16 for each of 256 threads, several 16-byte loads in flight."""

_TL_WORDS = {torch.int16: tl.int16, torch.int32: tl.int32, torch.int64: tl.int64}


@counted_jit  # type: ignore[untyped-decorator]  # Triton ships no types
def narrow_kernel(
    src: tl.tensor,  # *uint8, (count * bytes of WIDE,), 16-byte aligned
    dst: tl.tensor,  # *uint8, (count * bytes of NARROW,), 16-byte aligned
    status: tl.tensor,  # *int32, (1,): 0 before
    count: tl.int64,  # elements
    WIDE: tl.constexpr,  # integer type of a raw element
    NARROW: tl.constexpr,  # ... and of an encoded one
    CODE: tl.constexpr,  # jit function: WIDE -> (NARROW, whether it cannot be)
    REASON: tl.constexpr,  # what the status becomes where one cannot be
    BLOCK: tl.constexpr,  # elements of a step
) -> None:
    wide = src.to(tl.pointer_type(WIDE))
    narrow = dst.to(tl.pointer_type(NARROW))
    # A count that the compiler can see is a multiple of 16: then no mask changes inside a 16-byte access.
    body = (count // 16) * 16
    program = tl.program_id(0).to(tl.int64)
    start = program * BLOCK
    # Not `range`: the interpreter of Triton 3.6 makes ints of its bounds in a way that newer numpy refuses.
    while start < body:
        at = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK).to(tl.int64)
        inside = at < body
        code, bad = CODE(tl.load(wide + at, mask=inside, other=0))
        tl.store(narrow + at, code, mask=inside)
        if tl.max(bad.to(tl.int32), axis=0) != 0:
            tl.store(status, REASON)  # every program that writes it writes this
        start += tl.num_programs(0).to(tl.int64) * BLOCK
    if program == 0:
        at = body + tl.arange(0, 16).to(tl.int64)
        inside = at < count
        code, bad = CODE(tl.load(wide + at, mask=inside, other=0))
        tl.store(narrow + at, code, mask=inside)
        if tl.max(bad.to(tl.int32), axis=0) != 0:
            tl.store(status, REASON)


@counted_jit  # type: ignore[untyped-decorator]  # Triton ships no types
def widen_kernel(
    src: tl.tensor,  # *uint8, (count * bytes of NARROW,), 16-byte aligned
    dst: tl.tensor,  # *uint8, (count * bytes of WIDE,), 16-byte aligned
    count: tl.int64,  # elements
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
    DECODE: tl.constexpr,  # jit function: NARROW -> WIDE
    BLOCK: tl.constexpr,
) -> None:
    narrow = src.to(tl.pointer_type(NARROW))
    wide = dst.to(tl.pointer_type(WIDE))
    body = (count // 16) * 16
    program = tl.program_id(0).to(tl.int64)
    start = program * BLOCK
    while start < body:
        at = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK).to(tl.int64)
        inside = at < body
        tl.store(wide + at, DECODE(tl.load(narrow + at, mask=inside, other=0)), mask=inside)
        start += tl.num_programs(0).to(tl.int64) * BLOCK
    if program == 0:
        at = body + tl.arange(0, 16).to(tl.int64)
        inside = at < count
        tl.store(wide + at, DECODE(tl.load(narrow + at, mask=inside, other=0)), mask=inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowCodec:
    """A `Codec` that writes every element as a narrower integer word."""

    name: str
    dtype: torch.dtype
    """dtype of the tensors that it is for."""
    wide: torch.dtype
    """Integer type of a raw element."""
    narrow: torch.dtype
    """Integer type of an encoded element."""
    reason: EncodeStatus
    code: Any
    """Triton function: wide words -> narrow words, and whether a word has none. 0 must have one: it stands for no element."""
    expand: Any
    """Triton function, the inverse of `code`."""
    code_reference: Callable[[Tensor], tuple[Tensor, Tensor]]
    expand_reference: Callable[[Tensor], Tensor]
    block_elements: int = BLOCK_ELEMENTS

    def applies_to(self, dtype: torch.dtype) -> bool:
        return dtype is self.dtype

    def encoded_bytes(self, nbytes: int) -> int:
        return whole_elements(self.name, nbytes, self.wide.itemsize) * self.narrow.itemsize

    def encode(self, src: Tensor, dst: Tensor, status: Tensor, *, num_programs: int) -> None:
        check_coding(self, "encode", src, dst, num_programs, status)
        status.zero_()  # before the kernel, in stream order: it writes only where it has a reason
        count = src.numel() // self.wide.itemsize
        if count:
            narrow_kernel[self._grid(count, num_programs)](
                src, dst, status, count, **self.words(), CODE=self.code, REASON=int(self.reason), BLOCK=self.block_elements,
                num_warps=NUM_WARPS,
                enable_fp_fusion=False,  # nothing to fuse; Triton warns where this is left to its changing default
            )  # fmt: skip

    def decode(self, src: Tensor, dst: Tensor, *, num_programs: int) -> None:
        check_coding(self, "decode", dst, src, num_programs)
        count = dst.numel() // self.wide.itemsize
        if count:
            widen_kernel[self._grid(count, num_programs)](
                src, dst, count, **self.words(), DECODE=self.expand, BLOCK=self.block_elements, num_warps=NUM_WARPS,
                enable_fp_fusion=False,
            )  # fmt: skip

    def encode_reference(self, src: Tensor, dst: Tensor, status: Tensor) -> None:
        narrow, bad = self.code_reference(src.view(self.wide))
        dst.view(self.narrow).copy_(narrow)
        status.copy_(bad.any() * int(self.reason))

    def decode_reference(self, src: Tensor, dst: Tensor) -> None:
        dst.view(self.wide).copy_(self.expand_reference(src.view(self.narrow)))

    def words(self) -> dict[str, Any]:
        """The kernels' constants WIDE and NARROW: Triton's types of a raw element and of an encoded one."""
        return {"WIDE": _TL_WORDS[self.wide], "NARROW": _TL_WORDS[self.narrow]}

    def _grid(self, count: int, num_programs: int) -> tuple[int]:
        return (min(num_programs, triton.cdiv(count, self.block_elements)),)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def to_bf16(word: tl.tensor) -> tuple[tl.tensor, tl.tensor]:  # int32 -> int16, bool
    return (word >> 16).to(tl.int16), (word & 0xFFFF) != 0


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def from_bf16(narrow: tl.tensor) -> tl.tensor:  # int16 -> int32
    return narrow.to(tl.int32) << 16


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def to_fp16(word: tl.tensor) -> tuple[tl.tensor, tl.tensor]:  # int32 -> int16, bool
    sign = (word >> 16) & 0x8000
    exponent = (word >> 23) & 0xFF
    mantissa = word & 0x7FFFFF
    normal = (exponent >= 113) & (exponent <= 142)
    special = exponent == 255
    denormal = (exponent >= 103) & (exponent <= 112)
    zero = (word & 0x7FFFFFFF) == 0
    # A denormal k * 2**-24: the mantissa with its leading one, shifted so far that 2**-24 is the unit.
    shift = tl.where(denormal, 126 - exponent, 13)
    significand = mantissa | tl.where(denormal, 0x800000, 0)
    rebias = tl.where(normal, exponent - 112, tl.where(special, 31, 0))
    narrow = sign | (rebias << 10) | (significand >> shift)
    lost = (significand & ((1 << shift) - 1)) != 0
    bad = lost | ((normal | special | denormal | zero) == 0)
    return narrow.to(tl.int16), bad


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def from_fp16(narrow: tl.tensor) -> tl.tensor:  # int16 -> int32
    half = narrow.to(tl.int32)
    sign = (half & 0x8000) << 16
    exponent = (half >> 10) & 0x1F
    mantissa = half & 0x3FF
    # The place of a denormal's leading one, by halving.
    top = mantissa
    place = tl.zeros_like(mantissa)
    for step in tl.static_range(4):
        above = top >= (1 << (8 >> step))
        place += tl.where(above, 8 >> step, 0)
        top = tl.where(above, top >> (8 >> step), top)
    denormal = ((place + 103) << 23) | ((mantissa << (23 - place)) & 0x7FFFFF)
    rebias = tl.where(exponent == 31, 255, exponent + 112)
    number = tl.where(exponent != 0, (rebias << 23) | (mantissa << 13), tl.where(mantissa != 0, denormal, 0))
    return sign | number


def _to_bf16_reference(word: Tensor) -> tuple[Tensor, Tensor]:
    return (word >> 16).to(torch.int16), (word & 0xFFFF) != 0


def _from_bf16_reference(narrow: Tensor) -> Tensor:
    return narrow.to(torch.int32) << 16


def _fp32_of_every_fp16() -> Tensor:
    """(65536,) int32: the exact fp32 word of each fp16 word. Numbers by their value; infinities and NaNs by their bits."""
    words = torch.arange(1 << 16, dtype=torch.int32)
    sign, exponent, mantissa = (words & 0x8000) << 16, (words >> 10) & 0x1F, words & 0x3FF
    scale = torch.where(exponent > 0, exponent, 1).to(torch.float64) - 25
    value = (mantissa + torch.where(exponent > 0, 1024, 0)).to(torch.float64) * torch.exp2(scale)
    bits = value.to(torch.float32).view(torch.int32)
    return sign | torch.where(exponent == 31, (255 << 23) | (mantissa << 13), bits)


def _to_fp16_reference(word: Tensor) -> tuple[Tensor, Tensor]:
    table, narrow = _fp32_of_every_fp16().to(word.device).sort()
    at = torch.searchsorted(table, word).clamp(max=len(table) - 1)
    return narrow[at].to(torch.int16), table[at] != word


def _from_fp16_reference(narrow: Tensor) -> Tensor:
    return _fp32_of_every_fp16().to(narrow.device)[narrow.to(torch.int64) & 0xFFFF]


FP32_AS_BF16 = NarrowCodec(
    name="fp32_as_bf16", dtype=torch.float32, wide=torch.int32, narrow=torch.int16, reason=EncodeStatus.NOT_AN_UPCAST,
    code=to_bf16, expand=from_bf16, code_reference=_to_bf16_reference, expand_reference=_from_bf16_reference,
)  # fmt: skip

FP32_AS_FP16 = NarrowCodec(
    name="fp32_as_fp16", dtype=torch.float32, wide=torch.int32, narrow=torch.int16, reason=EncodeStatus.NOT_AN_UPCAST,
    code=to_fp16, expand=from_fp16, code_reference=_to_fp16_reference, expand_reference=_from_fp16_reference,
)  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def to_int32(word: tl.tensor) -> tuple[tl.tensor, tl.tensor]:  # int64 -> int32, bool
    narrow = word.to(tl.int32)
    return narrow, narrow.to(tl.int64) != word


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def to_int16(word: tl.tensor) -> tuple[tl.tensor, tl.tensor]:  # int64 -> int16, bool
    narrow = word.to(tl.int16)
    return narrow, narrow.to(tl.int64) != word


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def to_int64(narrow: tl.tensor) -> tl.tensor:
    return narrow.to(tl.int64)


def _to_int32_reference(word: Tensor) -> tuple[Tensor, Tensor]:
    return word.to(torch.int32), (word < -(1 << 31)) | (word >= 1 << 31)


def _to_int16_reference(word: Tensor) -> tuple[Tensor, Tensor]:
    return word.to(torch.int16), (word < -(1 << 15)) | (word >= 1 << 15)


def _to_int64_reference(narrow: Tensor) -> Tensor:
    return narrow.to(torch.int64)


INT64_AS_INT32 = NarrowCodec(
    name="int64_as_int32", dtype=torch.int64, wide=torch.int64, narrow=torch.int32, reason=EncodeStatus.OUT_OF_RANGE,
    code=to_int32, expand=to_int64, code_reference=_to_int32_reference, expand_reference=_to_int64_reference,
)  # fmt: skip

INT64_AS_INT16 = NarrowCodec(
    name="int64_as_int16", dtype=torch.int64, wide=torch.int64, narrow=torch.int16, reason=EncodeStatus.OUT_OF_RANGE,
    code=to_int16, expand=to_int64, code_reference=_to_int16_reference, expand_reference=_to_int64_reference,
)  # fmt: skip
