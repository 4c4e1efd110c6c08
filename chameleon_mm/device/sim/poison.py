"""Byte that memory holds that nothing was written to yet: the same everywhere, one that no computation likes."""

from __future__ import annotations

import ctypes

import torch

POISON_BYTE = 0xFB
"""Value of the byte, as float32 and bfloat16 -2.6e36, as int64 a large negative, as bool neither 0 nor 1."""


def poison(storage: torch.UntypedStorage, start: int = 0, nbytes: int | None = None) -> None:
    """Fill bytes of a storage with `POISON_BYTE`, past every dispatcher."""
    size = storage.nbytes() - start if nbytes is None else nbytes
    if size > 0:
        ctypes.memset(storage.data_ptr() + start, POISON_BYTE, size)
