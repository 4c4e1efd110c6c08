from .cuda import CudaDevice, cuda_is_available
from .protocols import Device, Event, MemoryReading, Stream
from .resolve import TESTED_TORCH, check_placement, gpu_name, present_device, resolve_device, warn_of_newer_torch
from .sim import SimDevice
from .specs import SPECS, GpuSpec, spec_by_name

__all__ = [
    "SPECS", "TESTED_TORCH", "CudaDevice", "Device", "Event", "GpuSpec", "MemoryReading", "SimDevice", "Stream",
    "check_placement", "cuda_is_available", "gpu_name", "present_device", "resolve_device", "spec_by_name",
    "warn_of_newer_torch",
]  # fmt: skip
