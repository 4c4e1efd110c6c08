"""Checks of the ends of a copy or a pack that the simulator makes beyond those of every device: they share no bytes.

    check_copy(dst, src)                                    one copy
    check_batch(pairs)                                      no destination shares bytes with another end
    parts = packed_parts("pack", buffers, staging, offsets) -> the part of the staging buffer that each buffer goes to

All by address, not by storage: two storages may share memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from chameleon_mm.device.packing import check_ends, check_packed

_MEMORY = torch.device("cpu")  # where simulated memory lies


class _Range(NamedTuple):
    """Bytes of memory, [begin, end), that are read or written, and whose they are."""

    begin: int
    end: int
    write: bool
    name: str


def check_copy(dst: Tensor, src: Tensor, what: str = "copy") -> None:
    """Raise `ValueError` unless `src` can be copied to `dst`."""
    check_ends(what, dst, src, _MEMORY)
    apart = abs(dst.data_ptr() - src.data_ptr())
    if apart < src.numel():
        raise ValueError(f"{what}: expected two buffers that do not overlap, got {src.numel()} bytes {apart} bytes apart")


def check_batch(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Raise `ValueError` unless all pairs can be copied in any order, with the same result."""
    for i, (dst, src) in enumerate(pairs):
        check_copy(dst, src, f"copy_batch: pair {i}")
    ends = [_range(dst, True, f"dst of pair {i}") for i, (dst, _) in enumerate(pairs)]
    _check_apart("copy_batch", ends + [_range(src, False, f"src of pair {i}") for i, (_, src) in enumerate(pairs)])


def packed_parts(what: str, buffers: Sequence[Tensor], staging: Tensor, offsets: Sequence[int]) -> list[Tensor]:
    """The parts of `staging` that belong to `buffers`. Raises `ValueError` unless `what`, pack or unpack, can be done."""
    check_packed(what, buffers, staging, offsets, _MEMORY)
    into_staging = what == "pack"
    parts, ranges = [], []
    for i, (buffer, offset) in enumerate(zip(buffers, offsets, strict=True)):
        with torch._C._DisableTorchDispatch():  # an active mode would take it for an operator of the model's
            part = staging.narrow(0, offset, buffer.numel())
        parts.append(part)
        ranges.append(_range(buffer, not into_staging, f"buffer {i}"))
        # As a write in both directions: what several buffers are unpacked from was overwritten when it was packed.
        ranges.append(_range(part, True, f"the place of buffer {i}"))
    _check_apart(what, ranges)
    return parts


def _range(t: Tensor, write: bool, name: str) -> _Range:
    begin = t.data_ptr()
    return _Range(begin, begin + t.numel(), write, name)


def _check_apart(what: str, ranges: list[_Range]) -> None:
    """Raise `ValueError` where a range that is written shares bytes with another one."""
    furthest: dict[bool, _Range] = {}  # of those begun so far, read and written, the one that ends last
    for new in sorted(r for r in ranges if r.begin < r.end):
        for old in furthest.values():
            if (old.write or new.write) and new.begin < old.end:
                raise ValueError(
                    f"{what}: expected ends that share no bytes, but {old.name} and {new.name} share "
                    f"{min(old.end, new.end) - new.begin}: give each its own, or make two calls"
                )
        if new.write not in furthest or new.end > furthest[new.write].end:
            furthest[new.write] = new
