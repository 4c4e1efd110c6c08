"""A real GPU: torch's current stream, statistics and allocator, and objects shared by the streams of a device.

current_stream()  = torch's current stream, wrapped once
alloc_pinned(n)   = mmap + populate + cudaHostRegister, else cudaHostAlloc        # see pinning.py
read_memory()     = counters of the caching allocator
"""

from __future__ import annotations

import ctypes
import logging
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from types import ModuleType, NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from chameleon_mm.device import native
from chameleon_mm.device.cuda.cuda_stream import CudaEvent, CudaStream, events_after_all_work
from chameleon_mm.device.holders import REFERENCES_AT_REST
from chameleon_mm.device.packing import Checksummer, Packer
from chameleon_mm.device.pinning import PageLocker, PinningCalls, near_cpus, pageable_memory
from chameleon_mm.device.protocols import Event, MemoryReading, Stream
from chameleon_mm.errors import DeviceUnavailable, check_type
from chameleon_mm.units import MIB, format_size

if TYPE_CHECKING:
    from chameleon_mm.device.protocols import HeldStorage

# --- GPUs that torch sees, found without a context on any of them if possible


def cuda_is_available() -> bool:
    """True if torch can use a CUDA GPU here. Starts no context on any GPU."""
    return torch.cuda.is_available()


def visible_gpus() -> list[str]:
    """Return a line for each GPU that torch sees: index, name, memory, capability. Empty without CUDA. May initialise CUDA."""
    found = range(torch.cuda.device_count() if cuda_is_available() else 0)
    gpus = [(index, torch.cuda.get_device_properties(index)) for index in found]
    return [f"{i}: {gpu.name}, {format_size(gpu.total_memory)}, capability {gpu.major}.{gpu.minor}" for i, gpu in gpus]


def expandable_segments() -> bool:
    """True if torch's caching allocator grows its segments. Else plans leave gaps, and more is reserved than allocated."""
    return bool(torch.cuda.memory._snapshot()["allocator_settings"].get("expandable_segments"))


def pci_id(about: Any) -> str | None:
    """PCI address of a GPU from its properties, in the form of sysfs; None if torch does not report it."""
    # These attributes are missing in torch's type stubs and in some builds.
    domain, bus, slot = (getattr(about, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    return None if bus is None else f"{domain or 0:04x}:{bus:02x}:{slot or 0:02x}.0"


# --- Bytes allocated by torch's caching allocator on a GPU: read by the C++ helper `memory` if it is built, else by torch

Reading = tuple[int, int, int, int]
"""Fields of a `MemoryReading`. Total and peak count since the process began or since a reset in torch."""


def reader(index: int) -> Callable[[], Reading]:
    """Return a function that reads the memory of GPU `index`. CUDA must be initialised."""
    of_torch = partial(torch_reader, index)
    module = native.load("memory")
    if module is None:
        return of_torch
    helper: Callable[[], Reading] = partial(module.read, index)
    # An allocator that replaces torch's may use counters that the helper does not read, so compare both. Try up to five times:
    # another thread may allocate between the readings.
    with suppress(RuntimeError):
        if any(helper() == of_torch() for _ in range(5)):
            return helper
    return of_torch


def torch_reader(index: int) -> Reading:
    """Read with torch alone, which builds dictionaries of all the allocator's counters."""
    # The nested form: torch.cuda.memory_allocated and similar calls flatten and sort a hundred keys to return one of them.
    found = torch.cuda.memory_stats_as_nested_dict(index)["allocated_bytes"]["all"]
    return int(found["current"]), int(found["allocated"]), int(found["peak"]), 0


# --- CuPy's binding of the CUDA runtime, if usable, and the calls that page-lock host memory

_log = logging.getLogger(__name__)

_HOST_PORTABLE = 1  # cudaHostRegisterPortable = cudaHostAllocPortable: page-locked for every device of the process
_ATTR_HOST_REGISTER_SUPPORTED = 99  # cudaDevAttrHostRegisterSupported


def cupy_runtime(index: int) -> Any:
    """Return CuPy's CUDA runtime if CuPy is installed and works with this device, else None."""
    try:
        runtime = cupy_cuda().runtime
        runtime.deviceGetAttribute(_ATTR_HOST_REGISTER_SUPPORTED, index)  # fails if CuPy's CUDA does not suit the driver
    except RuntimeError as error:
        _log.info("chameleon_mm: copies go through torch, as CuPy cannot be used: %s", error)
        return None
    return runtime


def pinning_calls(index: int) -> PinningCalls:
    """Return the calls that page-lock host memory. torch's release the GIL."""

    def clear_error() -> None:
        # The runtime keeps the error per thread, and torch has no call that reads it. A kernel launch reads and raises it.
        try:
            torch.ones(1, device=torch.device("cuda", index))
        except RuntimeError as error:
            _log.debug("chameleon_mm: cleared a CUDA error that a refused pinning left behind: %s", error)

    def register(address: int, nbytes: int) -> None:
        _runtime("cudaHostRegister", address, nbytes, _HOST_PORTABLE)

    return PinningCalls(
        register=register,
        unregister=partial(_runtime, "cudaHostUnregister"),
        # torch rounds this up to a power of two, and caches it once it is freed: wasteful, but correct as a last resort.
        host_alloc=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True),
        clear_error=clear_error,
    )


def _runtime(call: str, *arguments: int) -> None:
    """Make a call of CUDA's runtime. Raises `RuntimeError` with the runtime's message."""
    runtime = torch.cuda.cudart()
    status = getattr(runtime, call)(*arguments)
    if status != runtime.cudaError.success:
        raise RuntimeError(f"{call}: {runtime.cudaGetErrorString(status)} ({int(status)})")


# --- The hook in torch's caching allocator on a GPU: the C++ helper `reclaim`, if it is built.
#
# The allocator calls it inside malloc on every miss of its pools, before it asks the driver for memory: `device/reclaim.cpp`.

SEGMENT_BYTES = 20 * MIB
"""Bytes by which torch's allocator grows for a small request (`kLargeBuffer` in c10/core/AllocatorConfig.h)."""


class CudaAllocatorHook:
    """Hook in the caching allocator of one GPU, for one session."""

    def __init__(self, module: ModuleType, index: int) -> None:
        self._hook: Any = module.Hook(index)
        self._index = index
        self._total_bytes = int(torch.cuda.get_device_properties(index).total_memory)
        self._asked: tuple[int, int | None] | None = None
        self._set = (1 << 62, 0)
        self._history = False

    @property
    def reclaimed(self) -> int:
        return int(self._hook.reclaimed)

    @property
    def waits(self) -> int:
        """Number of reclaimed storages whose copies were not complete, so that their streams had to wait."""
        return int(self._hook.waits)

    def hold(self, storage: torch.UntypedStorage, done: Event, owner: Stream, tensors: int) -> HeldStorage | None:
        """Hold as `AllocatorHook.hold` does. Return None for memory that torch's own allocator did not allocate."""
        if not isinstance(done, CudaEvent) or not isinstance(owner, CudaStream):
            raise TypeError(f"hold: expected an event and a stream of CUDA, got {type(done).__name__}, {type(owner).__name__}")
        self._note_history()
        stream = owner.raw
        held: HeldStorage | None = self._hook.hold(
            storage, done, done.cuda_event, stream.cuda_stream, stream.stream_id, tensors, REFERENCES_AT_REST
        )
        return held

    def set_limits(self, limit_bytes: int, growth_bytes: int | None) -> None:
        """Set limits as `AllocatorHook.set_limits` does, within the process's share of the device. Unknown growth counts as
        half of the limit."""
        self._note_history()
        if (limit_bytes, growth_bytes) == self._asked:
            return
        self._asked = limit_bytes, growth_bytes
        share = torch.cuda.get_per_process_memory_fraction(self._index)
        limit = min(limit_bytes, int(share * self._total_bytes))
        growth = max(SEGMENT_BYTES, limit // 2 if growth_bytes is None else growth_bytes)
        self._set = limit, growth
        self._hook.set_limits(limit, growth, self._history)

    def _note_history(self) -> None:
        """Note whether torch records memory history. If so, only threads that hold the GIL reclaim. Reason: each free may need
        the GIL for a Python stack, while a thread that waits for the allocator may hold it."""
        history = bool(torch._C._cuda_isHistoryEnabled())
        if history != self._history:
            self._history = history
            self._hook.set_limits(*self._set, history)


_MAX_KNOWN_STREAMS = 64  # torch has 32 per priority; other libraries may add some


class CudaDevice:
    """A CUDA GPU, by its index (None: torch's current one). Thread-safe: backward runs on a thread of autograd.

    Raises `DeviceUnavailable` (a `RuntimeError`) if torch sees no GPU or does not use its native allocator.
    Raises `ValueError` for an invalid index.
    """

    simulated = False
    block_slack_bytes = MIB
    """Maximum slack of a block. torch's allocator does not split a cached block if the rest is at most this. It counts the
    whole block as allocated. See `should_split` in c10/cuda/CUDACachingAllocator.cpp."""

    def __init__(self, index: int | None = None) -> None:
        self.packer = Packer()
        self.checksummer = Checksummer()
        if not cuda_is_available():
            build = "is built without CUDA" if torch.version.cuda is None else "finds no driver or no visible GPU"
            raise DeviceUnavailable(
                f"CudaDevice: expected a CUDA GPU, got none: torch {torch.__version__} {build}; device='sim' simulates one"
            )
        torch.cuda.init()
        count = torch.cuda.device_count()
        check_type("index", index, (int, NoneType), "the number of a GPU or None", "leave it out for the current one")
        if index is not None and not 0 <= index < count:
            raise ValueError(f"CudaDevice: expected an index from 0 to {count - 1}, got {index}")
        if (backend := torch.cuda.get_allocator_backend()) != "native":
            # Other allocators count differently: the cumulative count would not grow, and a budget would be exceeded.
            raise DeviceUnavailable(
                f"CudaDevice: expected torch's native caching allocator, got {backend!r}: unset the backend option"
            )
        self.index = torch.cuda.current_device() if index is None else index
        self.cupy_runtime = cupy_runtime(self.index)
        """CuPy's binding of the CUDA runtime, or None if it is not installed or does not work with this driver."""
        self.torch_device = torch.device("cuda", self.index)
        self._known_streams: dict[int, CudaStream] = {}
        self._locker = PageLocker(
            pinning_calls(self.index),
            cpus=near_cpus(pci_id(torch.cuda.get_device_properties(self.index))),
            # Make the device current, so that a process that uses GPU 1 starts no context on GPU 0.
            scope=partial(torch.cuda.device, self.index),
        )
        self._read_allocated = reader(self.index)
        self._counted = (0, 0)
        """Total bytes allocated before the last reset of torch's statistics, and from then until the last reading."""

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
        """Maximum bytes that the caching allocator can reserve: reserved plus free bytes, at most the process's fraction.

        This leaves out memory of other processes and of CUDA's own context, as intended.
        """
        free, total = torch.cuda.mem_get_info(self.index)
        held = self._reserved("current")
        allowed = int(torch.cuda.get_per_process_memory_fraction(self.index) * total)
        return min(allowed, held + free)

    def current_stream(self) -> CudaStream:
        """Return the stream as `Device.current_stream` does. Cheap enough for a hook: builds a `torch.cuda.Stream` only
        once."""
        # The driver's handle identifies a stream as torch's number does, and reading it builds no tuple. True in torch
        # 2.11-2.13.
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
        # This asks the thread's current device, which is the capturing one during a capture. True is also right if that is
        # another GPU: by default a capture forbids its thread the same calls on all GPUs.
        return bool(torch._C._cuda_isCurrentStreamCapturing())  # torch.cuda.is_current_stream_capturing with one call less

    def alloc_pinned(self, nbytes: int) -> Tensor:
        return self._locker.pin(nbytes)

    def free_pinned(self, memory: Tensor) -> None:
        self._locker.unpin(memory)

    def alloc_pageable(self, nbytes: int) -> Tensor:
        return pageable_memory(nbytes)

    def allocated_bytes(self) -> int:
        return self._read_allocated()[0]

    def read_memory(self) -> MemoryReading:
        """Read memory as `Device.read_memory` does. If the user resets torch's accumulated statistics, bytes allocated between
        the last reading and the reset are lost. The cumulative count never decreases."""
        # No lock: a finaliser that reads may interrupt this on the same thread. `_counted` is loaded before the reading, so
        # that only a reset makes the reading smaller.
        counted = self._counted
        before_resets, last = counted
        now, ever, peak, _ = self._read_allocated()
        if ever < last:
            before_resets += last
        if self._counted is counted:  # else a later reading was counted meanwhile
            self._counted = before_resets, ever
        return MemoryReading(now, before_resets + ever, peak)

    def memory_reader(self) -> Callable[[], Reading]:
        return self._read_allocated

    def peak_allocated_bytes(self) -> int:
        return self._read_allocated()[2]

    def peak_reserved_bytes(self) -> int:
        return self._reserved("peak")

    def cache_flushes(self) -> int:
        return int(torch._C._cuda_memoryStats(self.index)["num_alloc_retries"])

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.index)

    def release_unused(self) -> None:
        with torch.cuda.device(self.index):
            torch.cuda.empty_cache()

    def allocator_hook(self) -> CudaAllocatorHook | None:
        module = native.load("reclaim")
        return None if module is None else CudaAllocatorHook(module, self.index)

    def native_loop(self, streams: tuple[Stream, Stream]) -> tuple[ModuleType, int, tuple[int, int]] | None:
        module, (out, back) = native.load("loop"), streams
        if module is None or not (isinstance(out, CudaStream) and isinstance(back, CudaStream)):
            return None
        return module, self.index, (out.handle, back.handle)

    def cumulative_offset(self) -> int:
        return self._counted[0]

    def owns(self, tensor: Tensor) -> bool:
        return tensor.is_cuda and tensor.get_device() == self.index

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)

    def record_all(self) -> tuple[CudaEvent, ...]:
        """Record as `Device.record_all` does. With a driver older than CUDA 12.5, the host waits."""
        return events_after_all_work()

    def compute(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _reserved(self, which: str) -> int:
        return int(torch.cuda.memory_stats_as_nested_dict(self.index)["reserved_bytes"]["all"][which])


def cupy_cuda() -> Any:
    """Return the module `cupy.cuda`, for an allocator of pinned memory. Raises `DeviceUnavailable` if CuPy is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its warnings on import concern compilers and libraries not used here
            from cupy import cuda
    except ImportError as error:
        raise DeviceUnavailable(
            f"cupy: expected CuPy, got none ({error}): install cupy-cuda13x, or the build for your CUDA"
        ) from error
    return cuda
