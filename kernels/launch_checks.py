"""Checks that every launch makes before anything is enqueued.

    check_flat("pack", "out", out)          (n,) uint8, contiguous
    check_aligned("pack", "out", out)       on a 16-byte boundary
    check_grid("pack", num_programs)        at least one program
    check_current("pack", device)           a kernel starts on the current device, whatever its tensors are on

Each raises `ValueError` that says what was expected, what came, and the way out.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNIT_BYTES = 16
"""The widest access of one thread. Both ends of it lie on a boundary of as many bytes."""


def check_flat(what: str, name: str, buffer: Tensor) -> None:
    """Raise `ValueError` unless `buffer` is (n,) uint8 and contiguous."""
    if buffer.dtype is not torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError(
            f"{what}: expected {name} as a flat, contiguous uint8 tensor, got {buffer.dtype} of shape "
            f"{tuple(buffer.shape)}; take .view(torch.uint8) of a flat view"
        )


def check_aligned(what: str, name: str, buffer: Tensor) -> None:
    """Raise `ValueError` unless `buffer` begins on a 16-byte boundary."""
    if buffer.data_ptr() % UNIT_BYTES:
        raise ValueError(
            f"{what}: expected {name} on a {UNIT_BYTES}-byte boundary, got address {buffer.data_ptr():#x}; slice its buffer at "
            f"multiples of {UNIT_BYTES} bytes"
        )


def check_grid(what: str, num_programs: int) -> None:
    """Raise `ValueError` unless `num_programs` is a grid."""
    if num_programs < 1:
        raise ValueError(f"{what}: expected num_programs >= 1, got {num_programs}; one program is the smallest grid")


def check_current(what: str, device: torch.device) -> None:
    """Raise `ValueError` where a kernel on tensors of `device` would start on another one."""
    # There is no current device for CPU tensors, which only the interpreter takes.
    if device.type != "cpu" and device.index != torch.accelerator.current_device_index():
        raise ValueError(
            f"{what}: expected tensors on the current device, {torch.accelerator.current_device_index()}, got {device}; "
            f"make it current around the call"
        )
