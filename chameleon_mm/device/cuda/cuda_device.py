"""A real GPU: torch's current stream, statistics and allocator, and what its streams share.

current_stream()  = torch's, wrapped once
alloc_pinned(n)   = mmap + populate + cudaHostRegister, else cudaHostAlloc        # see pinning.py
read_memory()     = the caching allocator's own counters
CupyPinning()     = what an allocator of pinned memory for CuPy needs of CuPy
"""

from __future__ import annotations

import ctypes
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from chameleon_mm.device.checksummer import Checksummer
from chameleon_mm.device.cuda.all_work import events_after_all_work
from chameleon_mm.device.cuda.cuda_allocator_hook import CudaAllocatorHook, helper
from chameleon_mm.device.cuda.cuda_stream import CudaEvent, CudaStream
from chameleon_mm.device.cuda.gpus import cuda_is_available, pci_id
from chameleon_mm.device.cuda.memory_reader import reader
from chameleon_mm.device.cuda.pinning_calls import cupy_runtime, pinning_calls
from chameleon_mm.device.numa import PreferredNode, near_node
from chameleon_mm.device.packing import PACK_PROGRAMS, Packer
from chameleon_mm.device.pinning import PageLocker, pageable_memory
from chameleon_mm.device.protocols import MemoryReading
from chameleon_mm.errors import DeviceUnavailable
from chameleon_mm.units import MIB

_MAX_KNOWN_STREAMS = 64  # torch itself has 32 per priority; more come only from other libraries


class CudaDevice:
    """One CUDA GPU by its index (None: torch's current one). Thread-safe: backward runs on a thread of autograd's.

    `pack_programs` is how many programs a kernel that packs may have, so how many SMs it takes from compute at most.

    Raises `DeviceUnavailable` (a `RuntimeError`) where torch sees no GPU or runs another allocator than its own,
    `ValueError` for an index that there is not, and for `pack_programs` below 1.
    """

    simulated = False
    block_slack_bytes = MIB
    """Slack of a block: torch's allocator hands out a cached block whole where cutting it would leave no more (`should_split`
    in c10/cuda/CUDACachingAllocator.cpp), and counts all of it as allocated."""

    def __init__(self, index: int | None = None, *, pack_programs: int = PACK_PROGRAMS) -> None:
        self.packer = Packer(pack_programs)
        self.checksummer = Checksummer()
        if not cuda_is_available():
            build = "is built without CUDA" if torch.version.cuda is None else "finds no driver or no visible GPU"
            raise DeviceUnavailable(
                f"CudaDevice: expected a CUDA GPU, got none: torch {torch.__version__} {build}; device='sim' simulates one"
            )
        torch.cuda.init()
        count = torch.cuda.device_count()
        if index is not None and not 0 <= index < count:
            raise ValueError(f"CudaDevice: expected an index from 0 to {count - 1}, got {index}")
        if (backend := torch.cuda.get_allocator_backend()) != "native":
            # Others count differently: the cumulative count would stand still, and a budget would not hold.
            raise DeviceUnavailable(
                f"CudaDevice: expected torch's native caching allocator, got {backend!r}: unset the backend option"
            )
        self.index = torch.cuda.current_device() if index is None else index
        self.cupy_runtime = cupy_runtime(self.index)
        """CuPy's binding of the CUDA runtime, or None where it is not installed or does not work with this driver."""
        self.torch_device = torch.device("cuda", self.index)
        self._known_streams: dict[int, CudaStream] = {}
        node = near_node(pci_id(torch.cuda.get_device_properties(self.index)))
        self._locker = PageLocker(
            pinning_calls(self.cupy_runtime, self.index),
            prefer_pages=None if node is None else PreferredNode(node),
            # Made current so that a process that uses GPU 1 does not start a context on GPU 0.
            scope=partial(torch.cuda.device, self.index),
        )
        self._read_allocated = reader(self.index)
        self._counted = (0, 0)
        """Bytes allocated in all before the last reset of torch's statistics, and since then until the last reading."""

    @property
    def name(self) -> str:
        return str(torch.cuda.get_device_name(self.index))

    @property
    def driver(self) -> str:
        version = ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))  # torch has loaded it already
        return f"CUDA driver {version.value // 1000}.{version.value % 1000 // 10}, runtime {torch.version.cuda}"

    @property
    def host_us(self) -> float:
        return time.perf_counter() * 1e6

    @property
    def capacity(self) -> int:
        """Bytes that the caching allocator may come to hold: what it holds now and what is free, under the process's fraction.

        Memory of other processes and of CUDA's own context is in neither, so it is left out as it should be.
        """
        free, total = torch.cuda.mem_get_info(self.index)
        held = self._reserved("current")
        allowed = int(torch.cuda.get_per_process_memory_fraction(self.index) * total)
        return min(allowed, held + free)

    def __repr__(self) -> str:
        return f"<CudaDevice {self.index}, {self.name}>"

    def current_stream(self) -> CudaStream:
        """Return the stream as `Device.current_stream` does. Cheap enough for a hook: no `torch.cuda.Stream` is built for one
        that was seen before."""
        # The driver's handle tells streams apart as torch's own number does, and asking for it takes no tuple. In torch 2.11 to
        # 2.13.
        handle = torch._C._cuda_getCurrentRawStream(self.index)
        known = self._known_streams.get(handle)
        if known is None:
            if len(self._known_streams) >= _MAX_KNOWN_STREAMS:
                self._known_streams.clear()
            known = self._known_streams.setdefault(handle, CudaStream(self, torch.cuda.current_stream(self.index), "compute"))
        return known

    def new_stream(self, name: str) -> CudaStream:
        return CudaStream(self, torch.cuda.Stream(device=self.index), name)

    def capturing(self) -> bool:
        # Asked of the thread's current device, which during a capture is the one that captures. If that is another GPU than
        # this one, yes is right too: by default a capture forbids its thread the same calls on all of them.
        return bool(torch._C._cuda_isCurrentStreamCapturing())  # as torch.cuda.is_current_stream_capturing, a call less

    def alloc_pinned(self, nbytes: int) -> Tensor:
        return self._locker.pin(nbytes)

    def free_pinned(self, memory: Tensor) -> None:
        self._locker.unpin(memory)

    def alloc_pageable(self, nbytes: int) -> Tensor:
        return pageable_memory(nbytes)

    def allocated_bytes(self) -> int:
        return self._read_allocated()[0]

    def read_memory(self) -> MemoryReading:
        """Read memory as `Device.read_memory` does. A user's reset of torch's accumulated statistics loses what was allocated
        between the last reading and the reset, and never turns the cumulative count back."""
        # Without a lock: a finaliser that reads may run in the middle of this, on this thread. What was counted is taken before
        # the reading, so that only a reset makes the reading smaller.
        counted = self._counted
        before_resets, last = counted
        now, ever, peak = self._read_allocated()
        if ever < last:
            before_resets += last
        if self._counted is counted:  # else a later reading has been counted meanwhile
            self._counted = before_resets, ever
        return MemoryReading(now, before_resets + ever, peak)

    def peak_allocated_bytes(self) -> int:
        return self._read_allocated()[2]

    def peak_reserved_bytes(self) -> int:
        return self._reserved("peak")

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.index)

    def release_unused(self) -> None:
        with torch.cuda.device(self.index):
            torch.cuda.empty_cache()

    def allocator_hook(self) -> CudaAllocatorHook | None:
        module = helper()
        return None if module is None else CudaAllocatorHook(module, self.index)

    def owns(self, tensor: Tensor) -> bool:
        return tensor.is_cuda and tensor.get_device() == self.index

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)

    def record_all(self) -> tuple[CudaEvent, ...]:
        """Record as `Device.record_all` does. The host waits with a driver older than CUDA 12.5."""
        return events_after_all_work()

    def compute(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def is_current(self) -> bool:
        """Whether this is the calling thread's current device."""
        return torch.cuda.current_device() == self.index

    def _reserved(self, which: str) -> int:
        return int(torch.cuda.memory_stats_as_nested_dict(self.index)["reserved_bytes"]["all"][which])


_ERROR_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation


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
