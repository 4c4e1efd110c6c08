"""A real GPU: torch's streams, events and allocator; copies and pinning by CuPy where it is installed, else by torch.

    stream.alloc(n)   = torch.empty on that stream          # the caching allocator: stream-ordered, OOM as torch raises it
    stream.copy(d, s) = cudaMemcpyAsync(d, s, n, default, stream)
    stream.copy_batch = cudaMemcpyBatchAsync by CUDA's bindings, where they and the driver have it, else copies
    stream.pack, unpack = one Triton kernel on that stream, where Triton works, else copies         # see packing.py
    stream.record()   = an untimed event; stream.wait(e) = cudaStreamWaitEvent
    alloc_pinned(n)   = mmap + populate + cudaHostRegister, else cudaHostAlloc        # see pinning.py

The only module that talks to torch.cuda, CuPy or CUDA's own bindings. Importing it starts nothing.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from chameleon_mm.device.numa import PreferredNode, near_node
from chameleon_mm.device.packing import PACK_PROGRAMS, Packer, PackTables
from chameleon_mm.device.pageable import pageable_memory
from chameleon_mm.device.pinning import PageLocker, PinningCalls
from chameleon_mm.device.protocols import Device, Event, MemoryReading
from chameleon_mm.errors import DeviceUnavailable

if TYPE_CHECKING:
    from chameleon_mm.kernels.codec import Codec

_log = logging.getLogger(__name__)

CODEC_PROGRAMS = 132
"""Programs of a codec's kernel: as many as an H200 has SMs, for the kernel stands in compute's own way. Not measured."""

_MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: the direction follows from the addresses
_HOST_PORTABLE = 1  # cudaHostRegisterPortable = cudaHostAllocPortable: page-locked for every device of the process
_ATTR_CAN_USE_HOST_POINTER = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem
_ATTR_HOST_REGISTER_SUPPORTED = 99  # cudaDevAttrHostRegisterSupported
_ERROR_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation
_LEGACY_HANDLES = (0, 1)  # the null stream: which of the two it is, is settled when the runtime is loaded; and cudaStreamLegacy
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

    __slots__ = ("_device", "_handle", "_name", "_tables", "raw")

    def __init__(self, device: CudaDevice, raw: torch.cuda.Stream, name: str) -> None:
        self._device = device
        self._name = name
        self._handle = int(raw.cuda_stream)
        self._tables = PackTables()
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
        _check_ends("copy", dst, src)
        if dst.numel():
            self._copy(dst, src)

    def copy_batch(self, pairs: Sequence[tuple[Tensor, Tensor]], *, speculative: bool = False) -> None:
        """As `Stream.copy_batch`, `speculative` as in `copy`. Whether ends share bytes only the simulator checks."""
        for i, (dst, src) in enumerate(pairs):
            _check_ends(f"copy_batch: pair {i}", dst, src)
        ways = [(dst.is_cuda, src.is_cuda) for dst, src in pairs]
        if ways.count(ways[0] if ways else (True, True)) != len(ways):
            other = next(i for i, way in enumerate(ways) if way != ways[0])
            raise ValueError(
                f"copy_batch: expected all pairs to go one way, but pair {other} does not go as pair 0 does: "
                f"make a batch per direction"
            )
        moved = [(dst, src) for dst, src in pairs if dst.numel()]  # the driver takes no copy of nothing
        batch = self._device.batch_copies
        if len(moved) > 1 and batch is not None and self._handle not in _LEGACY_HANDLES:
            dsts, srcs = [dst.data_ptr() for dst, _ in moved], [src.data_ptr() for _, src in moved]
            with self._device.as_current():
                if batch.enqueue(dsts, srcs, [dst.numel() for dst, _ in moved], self._handle):
                    return
        for dst, src in moved:
            self._copy(dst, src)

    def pack(self, dst: Tensor, sources: Sequence[Tensor], offsets: Sequence[int]) -> None:
        """As `Stream.pack`. Whether places share bytes, or sources the staging buffer's, is checked where a kernel runs."""
        self._check_packed("pack", sources, dst, offsets)
        if not sources:
            return
        with self._as_current():
            if self._device.packer.pack(self._tables, dst, sources, offsets):
                return
        for source, offset in zip(sources, offsets, strict=True):
            self.copy(dst[offset : offset + source.numel()], source)

    def unpack(self, destinations: Sequence[Tensor], src: Tensor, offsets: Sequence[int]) -> None:
        """As `Stream.unpack`, checked as `pack` is."""
        self._check_packed("unpack", destinations, src, offsets)
        if not destinations:
            return
        with self._as_current():
            if self._device.packer.unpack(self._tables, destinations, src, offsets):
                return
        for destination, offset in zip(destinations, offsets, strict=True):
            self.copy(destination, src[offset : offset + destination.numel()])

    def encode(self, codec: Codec, src: Tensor, dst: Tensor, status: Tensor) -> None:
        with self._as_current():
            codec.encode(src, dst, status, num_programs=CODEC_PROGRAMS)

    def decode(self, codec: Codec, src: Tensor, dst: Tensor) -> None:
        with self._as_current():
            codec.decode(src, dst, num_programs=CODEC_PROGRAMS)

    def _copy(self, dst: Tensor, src: Tensor) -> None:
        runtime = self._device.cupy_runtime
        if runtime is not None:
            # No dispatcher, no stream switch, no GIL while the driver works.
            runtime.memcpyAsync(dst.data_ptr(), src.data_ptr(), dst.numel(), _MEMCPY_DEFAULT, self._handle)
        else:
            with torch.cuda.stream(self.raw):
                dst.copy_(src, non_blocking=True)

    def _as_current(self) -> AbstractContextManager[Any]:
        """Makes this stream, and with it its device, current: kernels start there. Nothing to do where they are."""
        current = self._device.current_stream().raw.stream_id == self.raw.stream_id
        if current and torch.cuda.current_device() == self._device.index:
            return nullcontext()
        return torch.cuda.stream(self.raw)

    def _check_packed(self, what: str, buffers: Sequence[Tensor], staging: Tensor, offsets: Sequence[int]) -> None:
        if len(offsets) != len(buffers):
            raise ValueError(f"{what}: expected an offset for each of {len(buffers)} buffers, got {len(offsets)}")
        owns = self._device.owns
        if not all(_is_flat(buffer) and owns(buffer) for buffer in (staging, *buffers)):
            i, buffer = next((i, t) for i, t in enumerate((staging, *buffers)) if not (_is_flat(t) and owns(t)))
            name = f"buffer {i - 1}" if i else "the staging buffer"
            raise ValueError(
                f"{what}: expected {name} as a flat contiguous uint8 tensor on {self._device.torch_device}, got "
                f"{buffer.dtype} of shape {tuple(buffer.shape)} and strides {buffer.stride()} on {buffer.device}: "
                f"view its bytes first"
            )
        room = staging.numel()
        for i, (buffer, offset) in enumerate(zip(buffers, offsets, strict=True)):
            if offset < 0 or offset + buffer.numel() > room:
                raise ValueError(
                    f"{what}: expected buffer {i} within the staging buffer's {room} bytes, got [{offset}, "
                    f"{offset + buffer.numel()}): pack fewer buffers at once, or give packed_offsets(sizes).total_bytes"
                )

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

    `pack_programs` is how many programs a kernel that packs may have, so how many SMs it takes from compute at most.

    Raises `DeviceUnavailable` (a `RuntimeError`) where torch sees no GPU or runs another allocator than its own,
    `ValueError` for an index that there is not, and for `pack_programs` below 1.
    """

    def __init__(self, index: int | None = None, *, pack_programs: int = PACK_PROGRAMS) -> None:
        self.packer = Packer(pack_programs)
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
        self.batch_copies = _batch_copies()
        """Many copies in one call, or None where CUDA's own bindings are not installed or do not have it."""
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
    def driver(self) -> str:
        version = ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))  # torch has loaded it already
        return f"CUDA driver {version.value // 1000}.{version.value % 1000 // 10}, runtime {torch.version.cuda}"

    @property
    def host_us(self) -> float:
        return time.perf_counter() * 1e6

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

    def as_current(self) -> AbstractContextManager[Any]:
        """Makes this the calling thread's current device, for calls that act on that one. Nothing to do where it is."""
        return nullcontext() if torch.cuda.current_device() == self.index else torch.cuda.device(self.index)

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


class BatchCopies:
    """cudaMemcpyBatchAsync of CUDA's bindings, of version 12.9 (which returns a failed copy's index, too) or 13.

    Thread-safe. Where a driver turns out not to have it, it is not asked again.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._supported = True
        self._attributes = runtime.cudaMemcpyAttributes()
        self._attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        # A hint to use the copy engines, not kernels of the driver's own.
        self._attributes.flags = int(runtime.cudaMemcpyFlags.cudaMemcpyFlagPreferOverlapWithCompute)

    def enqueue(self, dsts: list[int], srcs: list[int], sizes: list[int], handle: int) -> bool:
        """Enqueue copies between addresses on a stream that is not the null stream, of the current device.

        Returns whether they were. If not they may all be enqueued again: the same bytes to the same places.
        """
        if not self._supported:
            return False
        runtime = self._runtime
        status = runtime.cudaMemcpyBatchAsync(dsts, srcs, sizes, len(sizes), [self._attributes], [0], 1, handle)[0]
        if status == runtime.cudaError_t.cudaSuccess:
            return True
        runtime.cudaGetLastError()  # or the bindings' next caller gets it
        errors = runtime.cudaError_t
        lacking = (errors.cudaErrorNotSupported, errors.cudaErrorCallRequiresNewerDriver, errors.cudaErrorInsufficientDriver)
        self._supported = status not in lacking
        _log.info("a batch of %d copies is enqueued one by one, as the driver refused it: %s", len(sizes), status)
        return False


def _batch_copies() -> BatchCopies | None:
    """The call that takes many copies, if CUDA's bindings are installed and have it, else None."""
    try:
        return BatchCopies(importlib.import_module("cuda.bindings.runtime"))
    except (ImportError, AttributeError, RuntimeError) as error:
        _log.info("small copies are enqueued one by one, as CUDA's bindings cannot be used: %s", str(error))
        return None


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


def _is_flat(buffer: Tensor) -> bool:
    return buffer.dtype is torch.uint8 and buffer.dim() == 1 and buffer.is_contiguous()


def _check_ends(what: str, dst: Tensor, src: Tensor) -> None:
    """Raise `ValueError` unless both are flat buffers of one size."""
    for role, buffer in (("dst", dst), ("src", src)):
        if not _is_flat(buffer):
            raise ValueError(
                f"{what}: expected {role} to be a flat contiguous uint8 tensor, got {buffer.dtype} of shape "
                f"{tuple(buffer.shape)} and strides {buffer.stride()}: view its bytes first"
            )
    if src.numel() != dst.numel():
        raise ValueError(
            f"{what}: expected two buffers of one size, got dst of {dst.numel()} and src of {src.numel()} bytes: slice one"
        )


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
