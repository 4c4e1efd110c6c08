"""Checks of the ends of a copy and of the buffers of a pack, made by every device before anything is enqueued.

    check_ends("copy", dst, src)                            # two flat buffers of one size
    check_packed("pack", buffers, staging, offsets, on)     # flat buffers on that device, each within the staging buffer

Each raises `ValueError` that says what was expected, what came, and the way out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_flat(t: Tensor) -> bool:
    """Whether `t` is a buffer: (n,) uint8, contiguous."""
    return t.dtype is torch.uint8 and t.dim() == 1 and t.is_contiguous()


def check_flat(what: str, name: str, t: Tensor, on: torch.device | None = None) -> None:
    """Raise `ValueError` unless `t` is a flat buffer, on the device `on` where one is given."""
    if not is_flat(t) or (on is not None and t.device != on):
        where = "" if on is None else f" on {on}"
        how = f"strides {t.stride()}" if t.layout is torch.strided else f"layout {t.layout}"
        raise ValueError(
            f"{what}: expected {name} as a flat, contiguous uint8 tensor{where}, got {t.dtype} of shape {tuple(t.shape)} and "
            f"{how} on {t.device}: view its bytes first"
        )


def check_ends(what: str, dst: Tensor, src: Tensor, on: torch.device | None = None) -> None:
    """Raise `ValueError` unless both are flat buffers of one size, on the device `on` where one is given."""
    check_flat(what, "dst", dst, on)
    check_flat(what, "src", src, on)
    if dst.numel() != src.numel():
        raise ValueError(f"{what}: expected equal sizes, got {src.numel()} bytes into {dst.numel()}: slice one")


def check_packed(what: str, buffers: Sequence[Tensor], staging: Tensor, offsets: Sequence[int], on: torch.device) -> None:
    """Raise `ValueError`, naming the buffer by its index, unless all are flat buffers on the device `on` and each has its
    place, from its offset on, within `staging`."""
    if len(offsets) != len(buffers):
        raise ValueError(f"{what}: expected an offset for each of {len(buffers)} buffers, got {len(offsets)}")
    check_flat(what, "the staging buffer", staging, on)
    room = staging.numel()
    for i, (buffer, offset) in enumerate(zip(buffers, offsets, strict=True)):
        check_flat(what, f"buffer {i}", buffer, on)
        if offset < 0 or offset + buffer.numel() > room:
            raise ValueError(
                f"{what}: expected buffer {i} within the staging buffer's {room} bytes, got [{offset}, "
                f"{offset + buffer.numel()}): pack fewer buffers at once, or give packed_offsets(sizes).total_bytes"
            )
