"""Lossless codecs: fewer bytes over the link, or the raw ones.

    host = space for codec.encoded_bytes(nbytes)           known without asking the device
    codec.encode(src, dst, status, num_programs=132)       status: one int32 on the device, written in stream order
    ... copy dst and status out; when the copy's event is done:
    status == 0:   codec.decode(dst, back, num_programs=132) gives the bits of src
    else:          src was not of the kind that the codec holds: copy src itself, which no encode ever changes

A codec is exact or says so: nothing is rounded, and neither NaN payloads nor negative zeros nor denormals change.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Protocol

import torch
import triton
from torch import Tensor

from chameleon_mm.kernels.arguments import check_aligned, check_current, check_flat, check_grid

NUM_WARPS = 8


def launch_metadata(grid: Any, metadata: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Metadata for a profiler that hooks Triton's launches: a name with the number of elements, or of blocks."""
    return {"name": f"{metadata.name}_{args['count']}"}


counted_jit = triton.jit(launch_metadata=launch_metadata, do_not_specialize=["count"])
"""Decorator of the codecs' kernels. The count is no part of a compiled one: tensors of every length share it."""


class EncodeStatus(IntEnum):
    """What `encode` writes: whether the bytes it wrote stand for the source, or why not."""

    EXACT = 0
    NOT_BOOL = 1
    """A byte of a boolean tensor is neither 0 nor 1."""
    OUT_OF_RANGE = 2
    """An integer does not fit the narrower type."""
    NOT_AN_UPCAST = 3
    """A number is not one of the narrower type's."""
    TOO_MANY_EXCEPTIONS = 4
    """A block has more exponents far from the others than its record has room for."""


class Codec(Protocol):
    """One way to write the bytes of a tensor shorter.

    `src` and `dst` are (n,) uint8, contiguous, 16-byte aligned, on one device, and do not overlap; `status` is (1,) int32 on
    the same device. Kernels run on torch's current stream of the current device, which must be theirs; the caller keeps all
    buffers alive until the stream has passed. `num_programs` is the size of the persistent grid. Bad arguments raise
    `ValueError` before anything is enqueued.
    """

    @property
    def name(self) -> str:
        """Name in reports."""

    def applies_to(self, dtype: torch.dtype) -> bool:
        """Whether tensors of `dtype` may be of the kind that this codec holds."""

    def encoded_bytes(self, nbytes: int) -> int:
        """Number of bytes that `nbytes` raw ones become. Raises `ValueError` for a part of an element."""

    def encode(self, src: Tensor, dst: Tensor, status: Tensor, *, num_programs: int) -> None:
        """Enqueue a kernel that writes `src`, (n,), as `dst`, (encoded_bytes(n),), and `status`. `dst` means nothing where that
        is not 0."""

    def decode(self, src: Tensor, dst: Tensor, *, num_programs: int) -> None:
        """Enqueue the inverse: `src`, (encoded_bytes(n),), to `dst`, (n,)."""

    def encode_reference(self, src: Tensor, dst: Tensor, status: Tensor) -> None:
        """Do what `encode` must do, by torch; where the status is 0, byte for byte."""

    def decode_reference(self, src: Tensor, dst: Tensor) -> None:
        """Do what `decode` must do, by torch."""


def whole_elements(name: str, nbytes: int, element_bytes: int) -> int:
    """Number of elements in `nbytes`. Raises `ValueError` for a part of one."""
    if nbytes < 0 or nbytes % element_bytes:
        raise ValueError(
            f"{name}: expected a multiple of {element_bytes} bytes, got {nbytes}; give the bytes of whole elements"
        )
    return nbytes // element_bytes


def check_coding(
    codec: Codec, what: str, raw: Tensor, encoded: Tensor, num_programs: int, status: Tensor | None = None
) -> None:
    """Raise `ValueError` unless the buffers are what `Codec` asks for."""
    what = f"{codec.name}.{what}"
    check_grid(what, num_programs)
    for name, buffer in (("the raw buffer", raw), ("the encoded buffer", encoded)):
        check_flat(what, name, buffer)
        check_aligned(what, name, buffer)
    expected = codec.encoded_bytes(raw.numel())
    if encoded.numel() != expected:
        raise ValueError(
            f"{what}: expected {expected} encoded bytes for {raw.numel()} raw ones, got {encoded.numel()}; "
            f"slice the buffer to encoded_bytes({raw.numel()})"
        )
    if encoded.device != raw.device:
        raise ValueError(f"{what}: expected buffers on one device, got {raw.device} and {encoded.device}; move one of them")
    if raw.data_ptr() < encoded.data_ptr() + expected and encoded.data_ptr() < raw.data_ptr() + raw.numel():
        raise ValueError(f"{what}: expected buffers that do not overlap; give one of them other memory")
    if status is not None and (status.dtype is not torch.int32 or status.numel() != 1 or status.device != raw.device):
        raise ValueError(
            f"{what}: expected status as one int32 on {raw.device}, got {status.numel()} {status.dtype} on {status.device}; "
            f"allocate it with torch.zeros(1, dtype=torch.int32, device=...)"
        )
    check_current(what, raw.device)
