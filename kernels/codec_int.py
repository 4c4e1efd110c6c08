"""Integers that fit a narrower type: token ids, labels, indices. int64 -> int32 or int16, half or a quarter of the bytes.

    narrow = low bits of the word          exact where sign-extending them gives the word back

Nothing is clamped: one word that does not fit makes the whole tensor raw.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chameleon_mm.kernels.codec import EncodeStatus
from chameleon_mm.kernels.codec_narrow import NarrowCodec


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
