"""fp32 numbers that were bf16 or fp16 before: an autocast region or a norm keeps their upcast. Half of the bytes.

    bf16    the upper half of the word     exact where the lower half is 0
    fp16    sign, exponent - 112, the upper 10 bits of the mantissa     exact where the lower 13 are 0 and the exponent fits;
            a denormal of fp16, k * 2**-24, is a normal number of fp32 with k's bits on top of its mantissa

Bits are compared and shifted, never converted: conversions of the hardware quiet signalling NaNs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chameleon_mm.kernels.codec import EncodeStatus
from chameleon_mm.kernels.codec_narrow import NarrowCodec


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
