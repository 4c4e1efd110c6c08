"""A real GPU: torch's streams, events and allocator; copies by CuPy if installed, else by torch.

    device = CudaDevice(); h2d = device.new_stream("h2d")

The only package that calls torch.cuda, CuPy or CUDA's own bindings. Importing it does not initialise CUDA.
"""

from __future__ import annotations

from chameleon_mm.device.cuda.cuda_device import (
    CudaDevice,
    cuda_is_available,
    cupy_cuda,
    expandable_segments,
    visible_gpus,
)
from chameleon_mm.device.cuda.cuda_stream import CudaEvent, CudaStream

__all__ = [
    "CudaDevice", "CudaEvent", "CudaStream", "cuda_is_available", "cupy_cuda", "expandable_segments",
    "visible_gpus",
]  # fmt: skip
