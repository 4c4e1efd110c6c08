"""Pinned memory of ours for CuPy: what an allocator of it needs of CuPy, and the events it has to wait for.

pinning = CupyPinning(); pointer = pinning.pointer(memory); events = pinning.events(device)
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from chameleon_mm.device.cuda.device import CudaDevice
from chameleon_mm.device.cuda.stream import CudaStream
from chameleon_mm.device.protocols import Device, Event
from chameleon_mm.errors import DeviceUnavailable

_ERROR_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation
_BLOCKING_HANDLES = (0, 1, 2)  # the null stream, which is cudaStreamLegacy by default, and cudaStreamPerThread


class CupyPinning:
    """What an allocator of pinned memory for CuPy needs of CuPy. Raises `DeviceUnavailable` where it is not installed."""

    def __init__(self) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # as in pinning_calls.py
                from cupy import cuda
        except ImportError as error:
            raise DeviceUnavailable(
                f"as_cupy_allocator: expected CuPy, got none ({error}): install cupy-cuda13x, or the build for your CUDA"
            ) from error
        self._cuda = cuda

    def pointer(self, memory: Any) -> Any:
        """A `PinnedMemoryPointer` to the start of `memory`, which it holds: an object with `ptr` and `size`."""
        return self._cuda.PinnedMemoryPointer(memory, 0)

    def out_of_memory(self) -> Exception:
        """The error at which CuPy, with a warning, copies from ordinary memory: no more can be pinned."""
        error: Exception = self._cuda.runtime.CUDARuntimeError(_ERROR_MEMORY_ALLOCATION)
        return error

    def events(self, device: Device) -> tuple[Event, ...]:
        """Events behind what CuPy's users have queued so far on `device`'s blocking streams, and on this thread's current
        stream."""
        if not isinstance(device, CudaDevice):
            return (device.current_stream().record(),)
        null = CudaStream(device, torch.cuda.default_stream(device.index), "null")
        handle = int(self._cuda.get_current_stream(device.index).ptr)
        if handle in _BLOCKING_HANDLES:
            return (null.record(),)
        current = CudaStream(device, torch.cuda.ExternalStream(handle, device=device.index), "cupy")
        return (null.record(), current.record())
