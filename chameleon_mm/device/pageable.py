"""Ordinary host memory: what is left where nothing more can be pinned.

memory = pageable_memory(nbytes)        # page-aligned; dropped with its last reference
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.units import format_size

_PAGE_BYTES = 4096


def pageable_memory(nbytes: int) -> Tensor:
    """A flat, page-aligned uint8 tensor of `nbytes`; its contents are not defined. No torch operator makes it.

    Raises `ValueError` for a negative size, `HostMemoryExhausted` where the machine does not give that much.
    """
    if nbytes < 0:
        raise ValueError(f"host memory: expected 0 bytes or more, got {nbytes}")
    try:
        raw = np.empty(nbytes + _PAGE_BYTES, dtype=np.uint8)
    except MemoryError as error:
        raise HostMemoryExhausted(
            f"host memory: asked for {format_size(nbytes)}, which this machine does not give ({error}); ask for less"
        ) from error
    start = -raw.ctypes.data % _PAGE_BYTES
    with torch._C._DisableTorchDispatch():  # or the simulator's active `compute()` would take it for device memory
        return torch.from_numpy(raw[start : start + nbytes])
