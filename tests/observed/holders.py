"""Who holds the memory of a simulated buffer."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from chameleon_mm.device.sim.machine import plain_bytes


def held_by_caller_alone(buffer: Tensor) -> bool:
    """Whether `buffer`, and at most one reference beside it to its storage, is all that keeps its memory.

    Says no when unsure. The references of this function's own are measured, not assumed: they differ between Pythons.
    """
    tensors, references = _holders(buffer)
    least_tensors, least_references = _holders(plain_bytes(1))
    return tensors == least_tensors and references <= least_references + 1


def _holders(buffer: Tensor) -> tuple[int, int]:
    """Numbers of the tensors (and the Python object) that hold the storage, and of the Python references to that object."""
    storage = buffer.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)
