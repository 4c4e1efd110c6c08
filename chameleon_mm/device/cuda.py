"""A real GPU: torch's streams, events and allocator; copies and pinning by CuPy where it is installed, else by torch.

    stream.alloc(n)   = torch.empty on that stream          # the caching allocator: stream-ordered, OOM as torch raises it
    stream.copy(d, s) = cudaMemcpyAsync(d, s, n, default, stream)
    stream.record()   = an untimed event; stream.wait(e) = cudaStreamWaitEvent
    alloc_pinned(n)   = mmap + populate + cudaHostRegister, else cudaHostAlloc        # see pinning.py

The only module that talks to torch.cuda, CuPy or CUDA's own bindings. Importing it starts nothing.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from chameleon_mm.device.numa import PreferredNode, near_node
from chameleon_mm.device.pageable import pageable_memory
from chameleon_mm.device.pinning import PageLocker, PinningCalls
from chameleon_mm.device.protocols import Device, Event, MemoryReading
from chameleon_mm.errors import DeviceUnavailable

_log = logging.getLogger(__name__)

_MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: the direction follows from the addresses
_HOST_PORTABLE = 1  # cudaHostRegisterPortable = cudaHostAllocPortable: page-locked for every device of the process
_ATTR_CAN_USE_HOST_POINTER = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem
_ATTR_HOST_REGISTER_SUPPORTED = 99  # cudaDevAttrHostRegisterSupported
_ERROR_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation
_BLOCKING_HANDLES = (0, 1, 2)  # the null stream, which is cudaStreamLegacy by default, and cudaStreamPerThread
_MAX_KNOWN_STREAMS = 64  # torch itself has 32 per priority; more come only from other libraries


class CudaEvent:
    """A `torch.cuda.Event` that knows whether it is timed."""

    __slots__ = ("raw", "timed")

    def __init__(self, raw: torch.cuda.Event, *, timed: bool) -> None:
        self.raw = raw
        self.timed = timed

    def query(self) -> bool:
        return bool(self.raw.query())

    def synchronize(self) -> None:
        self.raw.synchronize()

    def elapsed_us(self, since: Event) -> float:
        if not isinstance(since, CudaEvent) or not (self.timed and since.timed):
            raise ValueError("elapsed_us: expected two timed CUDA events, got others: record both with timed=True")
        if not (self.query() and since.query()):
            raise ValueError(
                "elapsed_us: expected two complete events, got one still pending: synchronize() the later one first"
            )
        return float(since.raw.elapsed_time(self.raw)) * 1e3


class CudaStream:
    """A `torch.cuda.Stream` of one device. It is never made current for longer than one allocation or copy."""

    __slots__ = ("_device", "_handle", "_name", "raw")

    def __init__(self, device: CudaDevice, raw: torch.cuda.Stream, name: str) -> None:
        self._device = device
        self._name = name
        self._handle = int(raw.cuda_stream)
        self.raw = raw

    @property
    def name(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return f"<CudaStream {self._name} of {self._device.torch_device}, {self._handle:#x}>"

    def alloc(self, nbytes: int) -> Tensor:
        """As `Stream.alloc`. On the current stream, the usual case, without any switch."""
        current = self._device.current_stream()
        scope: AbstractContextManager[Any] = (
            nullcontext() if current.raw.stream_id == self.raw.stream_id else torch.cuda.stream(self.raw)
        )
        with scope:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device.torch_device)

    def free(self, buffer: Tensor) -> None:
        """Nothing to do: when the last reference goes, the block is at once the allocating stream's again, in stream order.

        `record_stream` has no place here: its block would come back only when the host polls an event, and the host runs
        far ahead (Note [Reclaim]). The wait that the protocol asks for does the same on the device, at no such price.
        """

    def copy(self, dst: Tensor, src: Tensor, *, speculative: bool = False) -> None:
        """As `Stream.copy`. A speculative copy is a copy like any other here: only the simulator could mind."""
        nbytes = dst.numel()
        for role, buffer in (("dst", dst), ("src", src)):
            if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
                raise ValueError(
                    f"copy: expected {role} to be a flat contiguous uint8 tensor, got {buffer.dtype} of shape "
                    f"{tuple(buffer.shape)} and strides {buffer.stride()}: view its bytes first"
                )
        if src.numel() != nbytes:
            raise ValueError(
                f"copy: expected two buffers of one size, got dst of {nbytes} and src of {src.numel()} bytes: slice one"
            )
        if nbytes == 0:
            return
        runtime = self._device.cupy_runtime
        if runtime is not None:
            # No dispatcher, no stream switch, no GIL while the driver works.
            runtime.memcpyAsync(dst.data_ptr(), src.data_ptr(), nbytes, _MEMCPY_DEFAULT, self._handle)
        else:
            with torch.cuda.stream(self.raw):
                dst.copy_(src, non_blocking=True)

    def record(self, *, timed: bool = False) -> CudaEvent:
        event = torch.cuda.Event(enable_timing=timed)
        event.record(self.raw)
        return CudaEvent(event, timed=timed)

    def wait(self, event: Event) -> None:
        if not isinstance(event, CudaEvent):
            raise TypeError(f"wait: expected an event of a CUDA stream, got {type(event).__name__}: use one device throughout")
        event.raw.wait(self.raw)


class CudaDevice:
    """One CUDA GPU by its index (None: torch's current one). Thread-safe: backward runs on a thread of autograd's.

    Raises `DeviceUnavailable` (a `RuntimeError`) where torch sees no GPU or runs another allocator than its own,
    `ValueError` for an index that there is not.
    """

    def __init__(self, index: int | None = None) -> None:
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
            # Others count differently: the odometer would stand still, and a budget would not hold.
            raise DeviceUnavailable(
                f"CudaDevice: expected torch's native caching allocator, got {backend!r}: unset the backend option"
            )
        self.index = torch.cuda.current_device() if index is None else index
        self.cupy_runtime = _cupy_runtime(self.index)
        """CuPy's binding of the CUDA runtime, or None where it is not installed or does not work with this driver."""
        self._torch_device = torch.device("cuda", self.index)
        self._known_streams: dict[int, CudaStream] = {}
        node = near_node(_pci_id(torch.cuda.get_device_properties(self.index)))
        self._locker = PageLocker(
            _pinning_calls(self.cupy_runtime, self.index),
            place=None if node is None else PreferredNode(node),
            # Made current so that a process that uses GPU 1 does not start a context on GPU 0.
            scope=partial(torch.cuda.device, self.index),
        )
        self._odometer_lock = threading.Lock()
        self._odometer_base = self._odometer_last = 0

    @property
    def name(self) -> str:
        return str(torch.cuda.get_device_name(self.index))

    @property
    def simulated(self) -> bool:
        return False

    @property
    def torch_device(self) -> torch.device:
        return self._torch_device

    @property
    def capacity(self) -> int:
        """Bytes that the caching allocator may come to hold: what it holds now and what is free, under the process's fraction.

        Memory of other processes and of CUDA's own context is in neither, so it is left out as it should be.
        """
        free, total = torch.cuda.mem_get_info(self.index)
        held = int(self._stat("reserved_bytes", "current"))
        allowed = int(torch.cuda.get_per_process_memory_fraction(self.index) * total)
        return min(allowed, held + free)

    def __repr__(self) -> str:
        return f"<CudaDevice {self.index}, {self.name}>"

    def current_stream(self) -> CudaStream:
        """As `Device.current_stream`. Cheap enough for a hook: no `torch.cuda.Stream` is built for one that was seen before."""
        # What torch.cuda.current_stream itself asks, without the Stream that it builds each time; in torch 2.11 to 2.13.
        stream_id, device_index, device_type = torch._C._cuda_getCurrentStream(self.index)
        known = self._known_streams.get(stream_id)
        if known is None:
            if len(self._known_streams) >= _MAX_KNOWN_STREAMS:
                self._known_streams.clear()
            raw = torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
            known = self._known_streams.setdefault(stream_id, CudaStream(self, raw, "compute"))
        return known

    def new_stream(self, name: str) -> CudaStream:
        return CudaStream(self, torch.cuda.Stream(device=self.index), name)

    def capturing(self) -> bool:
        # Asked of the thread's current device, which during a capture is the one that captures. If that is another GPU than
        # this one, yes is right too: by default a capture forbids its thread the same calls on all of them.
        return bool(torch.cuda.is_current_stream_capturing())

    def alloc_pinned(self, nbytes: int) -> Tensor:
        return self._locker.pin(nbytes)

    def free_pinned(self, memory: Tensor) -> None:
        self._locker.unpin(memory)

    def alloc_pageable(self, nbytes: int) -> Tensor:
        return pageable_memory(nbytes)

    def allocated_bytes(self) -> int:
        return self._stat("allocated_bytes", "current")

    def read_memory(self) -> MemoryReading:
        """As `Device.read_memory`. A user's reset of torch's accumulated statistics loses what was allocated between the
        last reading and the reset, and never turns the odometer back."""
        stats = self._stats()["allocated_bytes"]["all"]
        with self._odometer_lock:
            now = int(stats["allocated"])
            if now < self._odometer_last:
                self._odometer_base += self._odometer_last
            self._odometer_last = now
            return MemoryReading(int(stats["current"]), self._odometer_base + now)

    def peak_allocated_bytes(self) -> int:
        return self._stat("allocated_bytes", "peak")

    def peak_reserved_bytes(self) -> int:
        return self._stat("reserved_bytes", "peak")

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.index)

    def owns(self, tensor: Tensor) -> bool:
        return tensor.is_cuda and tensor.get_device() == self.index

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)

    def compute(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _stats(self) -> Any:
        # The nested form: torch.cuda.memory_allocated and its like flatten and sort a hundred keys to return one of them.
        return torch.cuda.memory_stats_as_nested_dict(self.index)

    def _stat(self, what: str, which: str) -> int:
        return int(self._stats()[what]["all"][which])


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleGpu:
    """One GPU as torch sees it."""

    index: int
    name: str
    total_bytes: int
    capability: str
    pci_id: str | None
    """As sysfs names it, "0000:06:00.0"; None where torch does not tell."""


def cuda_is_available() -> bool:
    """Whether torch can use a CUDA GPU here. Starts no context on any of them."""
    return torch.cuda.is_available()


def visible_gpus() -> list[VisibleGpu]:
    """The GPUs that torch sees, in its order; none where there is no CUDA. Starts CUDA where there is."""
    gpus = []
    for index in range(torch.cuda.device_count() if cuda_is_available() else 0):
        about = torch.cuda.get_device_properties(index)
        gpus.append(
            VisibleGpu(
                index=index,
                name=about.name,
                total_bytes=about.total_memory,
                capability=f"{about.major}.{about.minor}",
                pci_id=_pci_id(about),
            )
        )
    return gpus


def _pci_id(about: Any) -> str | None:
    # Not in torch's type stubs, and not in every build.
    domain, bus, slot = (getattr(about, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    return None if bus is None else f"{domain or 0:04x}:{bus:02x}:{slot or 0:02x}.0"


def _cupy_runtime(index: int) -> Any:
    """CuPy's CUDA runtime if it is installed and answers for this device, else None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its remarks on import are about compilers and libraries that are not used here
            from cupy.cuda import runtime

        runtime.deviceGetAttribute(_ATTR_HOST_REGISTER_SUPPORTED, index)  # refused by a CuPy for another CUDA than the driver's
    except (ImportError, RuntimeError) as error:
        _log.info("copies and pinning go through torch, as CuPy cannot be used: %s", error)
        return None
    return runtime


class CupyPinning:
    """What an allocator of pinned memory for CuPy needs of CuPy. Raises `DeviceUnavailable` where it is not installed."""

    def __init__(self) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # as in _cupy_runtime
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
        """Behind what CuPy's users have queued so far on `device`'s blocking streams, and on this thread's current stream.

        An event on the null stream comes after the work of all blocking streams, and theirs after it. Another device than a
        GPU has no stream of CuPy's: there it is the current one.
        """
        if not isinstance(device, CudaDevice):
            return (device.current_stream().record(),)
        null = CudaStream(device, torch.cuda.default_stream(device.index), "null")
        handle = int(self._cuda.get_current_stream(device.index).ptr)
        if handle in _BLOCKING_HANDLES:
            return (null.record(),)
        current = CudaStream(device, torch.cuda.ExternalStream(handle, device=device.index), "cupy")
        return (null.record(), current.record())


def _pinning_calls(runtime: Any, index: int) -> PinningCalls:
    """The calls of CuPy's runtime, or of torch's where `runtime` is None."""

    def clear_error() -> None:
        # The error is kept per thread and runtime, and torch has no call that reads it: a kernel launch does, and raises it.
        try:
            torch.ones(1, device=torch.device("cuda", index))
        except RuntimeError as error:
            _log.debug("cleared a CUDA error that a refused pinning left behind: %s", error)

    # Without the second, a kernel would need another address for the memory than the one its tensor has.
    wanted = (_ATTR_HOST_REGISTER_SUPPORTED, _ATTR_CAN_USE_HOST_POINTER)
    ask = _driver_attribute if runtime is None else runtime.deviceGetAttribute
    registers = all(ask(attribute, index) for attribute in wanted)
    if runtime is None:
        return PinningCalls(
            register=_torch_register if registers else None,
            unregister=_torch_unregister,
            # torch rounds this up to a power of two and keeps it in a cache of its own: right, if wasteful, as a last resort.
            host_alloc=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True),
            host_free=lambda memory: None,  # goes back to that cache with its last reference
            clear_error=clear_error,
        )

    def host_alloc(nbytes: int) -> Tensor:
        address = runtime.hostAlloc(nbytes, _HOST_PORTABLE)
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)

    return PinningCalls(
        register=(lambda address, nbytes: runtime.hostRegister(address, nbytes, _HOST_PORTABLE)) if registers else None,
        unregister=runtime.hostUnregister,
        host_alloc=host_alloc,
        host_free=lambda memory: runtime.freeHost(memory.data_ptr()),
        clear_error=clear_error,
    )


def _driver_attribute(attribute: int, index: int) -> int:
    """What the driver says of a GPU, 0 where it does not. torch has no call for it; the driver's numbers are the runtime's."""
    driver = ctypes.CDLL("libcuda.so.1")  # torch has loaded it already
    gpu, value = ctypes.c_int(), ctypes.c_int()
    known = driver.cuDeviceGet(ctypes.byref(gpu), index) == 0
    known = known and driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, gpu) == 0
    return value.value if known else 0


def _torch_register(address: int, nbytes: int) -> None:
    _check("cudaHostRegister", torch.cuda.cudart().cudaHostRegister(address, nbytes, _HOST_PORTABLE))


def _torch_unregister(address: int) -> None:
    _check("cudaHostUnregister", torch.cuda.cudart().cudaHostUnregister(address))


def _check(call: str, status: Any) -> None:
    runtime = torch.cuda.cudart()
    if status != runtime.cudaError.success:
        raise RuntimeError(f"{call}: {runtime.cudaGetErrorString(status)} ({int(status)})")
