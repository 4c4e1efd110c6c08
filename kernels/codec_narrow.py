"""The codecs that write each word narrower: one kernel to encode, one to decode, the words' arithmetic given from outside.

    encode    word -> (narrow, bad)        dst[i] = narrow; any bad one: status = reason
    decode    narrow -> word               dst[i] = word

    | whole groups of 16 elements: program p takes blocks p, p+P, p+2P ... | fewer than 16 more: program 0 |

Groups of 16 keep every access of the body 16 bytes wide on the wide side, whatever the types are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from chameleon_mm.kernels.codec import LENGTHS, NUM_WARPS, EncodeStatus, check_coding, launch_metadata, whole_elements

BLOCK_ELEMENTS = 4096
"""Elements that a program takes at a time: 16 for each of 256 threads, several 16-byte loads in flight."""

_TL_WORDS = {torch.int16: tl.int16, torch.int32: tl.int32, torch.int64: tl.int64}


@triton.jit(  # type: ignore[untyped-decorator]  # Triton ships no types
    launch_metadata=launch_metadata, do_not_specialize=LENGTHS
)
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


@triton.jit(  # type: ignore[untyped-decorator]  # Triton ships no types
    launch_metadata=launch_metadata, do_not_specialize=LENGTHS
)
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
