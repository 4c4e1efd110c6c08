"""Streams of a GPU and their events.

stream.alloc(n)         = torch.empty on that stream        # the caching allocator: stream-ordered, raises torch's OOM error
stream.copy(d, s)       = cudaMemcpyAsync(d, s, n, default, stream)
stream.pack, unpack     = one Triton kernel on that stream if Triton works, else copies             # see packing.py
stream.record()         = an untimed event; stream.wait(e) = cudaStreamWaitEvent
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from chameleon_mm.device.packing import check_ends, check_host, check_packed, check_storage, check_sum
from chameleon_mm.device.protocols import Event, Stream

if TYPE_CHECKING:
    from chameleon_mm.device.cuda.cuda_device import CudaDevice

_NOTHING = nullcontext()
_MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: the direction follows from the addresses


class CudaEvent(torch._C._CudaEventBase):
    """An event that knows whether it is timed. Not a `torch.cuda.Event`, which takes twice as long to make and record."""

    __slots__ = ("timed",)

    timed: bool

    @classmethod
    def new(cls, *, timed: bool = False) -> CudaEvent:
        """Return an event that no stream has recorded yet. `timed`: it stores the time at which its stream reaches it."""
        event = cls(timed, False, False)
        event.timed = timed
        return event

    def elapsed_us(self, since: Event) -> float:
        if not isinstance(since, CudaEvent) or not (self.timed and since.timed):
            raise ValueError("elapsed_us: expected two timed CUDA events, got others: record both with timed=True")
        if not (self.query() and since.query()):
            raise ValueError(
                "elapsed_us: expected two complete events, got one still pending: synchronize() the later one first"
            )
        return float(since.elapsed_time(self)) * 1e3


class CudaStream:
    """Wrapper of a `torch.cuda.Stream`, which is made current only during a single allocation, copy or kernel."""

    def __init__(self, device: CudaDevice, raw: torch.cuda.Stream, name: str) -> None:
        self._device, self._index = device, device.index
        self.name = name
        self.handle = int(raw.cuda_stream)
        self.raw = raw

    def alloc(self, nbytes: int) -> Tensor:
        """Allocate as `Stream.alloc` does, with a block of the caching allocator on this stream."""
        with self._for_allocation():
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device.torch_device)

    def free(self, buffer: Tensor) -> None:
        """Do nothing: once the last reference is dropped, the allocating stream may reuse the block, in stream order."""

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Resize as `Stream.resize` does, with a block of the caching allocator on this stream."""
        if nbytes == 0:
            storage.resize_(0)  # the memory goes to the stream that it came from
            return
        with self._for_allocation():
            storage.resize_(nbytes)

    def copy(self, dst: Tensor, src: Tensor, *, speculative: bool = False) -> None:
        """Copy as `Stream.copy` does. `speculative` has no effect here; only observers of the simulator use it."""
        check_ends("copy", dst, src)
        if dst.numel():
            self._copy(dst, src)

    def copy_storage(
        self, storage: torch.UntypedStorage, host: Tensor, *, start: int = 0, part: slice | None = None, out: bool
    ) -> None:
        begin, end, _ = (0, host.numel(), 1) if part is None else part.indices(host.numel())
        check_storage(storage, start + end - begin)
        self._cross(storage, start, host, begin, end - begin, out=out)

    def copy_behind(
        self, owner: Stream, storage: torch.UntypedStorage, host: Tensor, offset: int, *, out: bool, again: Event | None = None
    ) -> CudaEvent:
        assert isinstance(owner, CudaStream)
        event, nbytes = again, storage.nbytes()
        check_host(host, offset + nbytes)
        if type(event) is not CudaEvent:
            event = CudaEvent.new()
        event.record(owner.raw)
        event.wait(self.raw)  # all work of `owner` so far -> the copy
        self._cross(storage, 0, host, offset, nbytes, out=out)
        event.record(self.raw)
        return event

    def pack(self, dst: Tensor, sources: Sequence[Tensor], offsets: Sequence[int]) -> None:
        """Pack as `Stream.pack` does. Overlap of buffers is checked only on the simulator."""
        check_packed("pack", sources, dst, offsets, self._device.torch_device)
        with self._as_current():
            if self._device.packer.pack(dst, sources, offsets):
                return
        for source, offset in zip(sources, offsets, strict=True):
            self.copy(dst[offset : offset + source.numel()], source)

    def unpack(self, destinations: Sequence[Tensor], src: Tensor, offsets: Sequence[int]) -> None:
        check_packed("unpack", destinations, src, offsets, self._device.torch_device)
        with self._as_current():
            if self._device.packer.unpack(src, destinations, offsets):
                return
        for destination, offset in zip(destinations, offsets, strict=True):
            self.copy(destination, src[offset : offset + destination.numel()])

    def add_checksum(self, out: Tensor, src: Tensor) -> None:
        check_sum(out, src, self._device.torch_device)
        with self._as_current():
            self._device.checksummer.add(out, src)

    def _cross(self, storage: torch.UntypedStorage, start: int, host: Tensor, begin: int, nbytes: int, *, out: bool) -> None:
        """Enqueue a copy of `nbytes` of a storage, from byte `start` on, to byte `begin` of `host` (`out`), or back."""
        runtime = self._device.cupy_runtime
        if runtime is None:
            on_host = host[begin : begin + nbytes]
            on_device = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[start : start + nbytes]
            self._copy(*((on_host, on_device) if out else (on_device, on_host)))
            return
        host_address, address = host.data_ptr() + begin, storage.data_ptr() + start
        dst, src = (host_address, address) if out else (address, host_address)
        runtime.memcpyAsync(dst, src, nbytes, _MEMCPY_DEFAULT, self.handle)

    def _copy(self, dst: Tensor, src: Tensor) -> None:
        runtime = self._device.cupy_runtime
        if runtime is not None:
            # No dispatcher, no stream switch, and the GIL is released during the driver call.
            runtime.memcpyAsync(dst.data_ptr(), src.data_ptr(), dst.numel(), _MEMCPY_DEFAULT, self.handle)
        else:
            with torch.cuda.stream(self.raw):
                dst.copy_(src, non_blocking=True)

    def _for_allocation(self) -> AbstractContextManager[Any]:
        """Context in which torch allocates on this stream. Torch makes the device current itself."""
        is_current = torch._C._cuda_getCurrentRawStream(self._index) == self.handle
        return _NOTHING if is_current else torch.cuda.stream(self.raw)

    def _as_current(self) -> AbstractContextManager[Any]:
        """Context that makes this stream and its device current, so that kernels start there. Does nothing if they are."""
        index = self._index
        is_current = torch._C._cuda_getCurrentRawStream(index) == self.handle and torch._C._cuda_getDevice() == index
        return _NOTHING if is_current else torch.cuda.stream(self.raw)

    def record(self, *, timed: bool = False) -> CudaEvent:
        event = CudaEvent.new(timed=timed)
        event.record(self.raw)
        return event

    def is_current(self) -> bool:
        current = torch._C._cuda_getCurrentRawStream(self._index)
        return current == self.handle and not torch._C._cuda_isCurrentStreamCapturing()  # of the current device, if another's

    def wait(self, event: Event) -> None:
        if type(event) is not CudaEvent:
            raise TypeError(f"wait: expected an event of a CUDA stream, got {type(event).__name__}: use one device throughout")
        event.wait(self.raw)


# --- Events after all work of all streams: the driver records one per context; if it cannot, the host waits.
#
# Events on torch's streams are not enough: other libraries have streams that torch does not know. Torch's streams are non-
# blocking, so an event on the null stream does not come after them.

_log = logging.getLogger(__name__)


def events_after_all_work() -> tuple[CudaEvent, ...]:
    """Record events after all work of this process so far, on every device. A device without such events: the host waits.

    Devices without a context of this process have no work. All devices count, because all of them can access pinned memory.
    """
    events: list[CudaEvent] = []
    for index in range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ():
        if not torch._C._cuda_hasPrimaryContext(index):  # type: ignore[attr-defined]  # torch declares it in no stub
            continue
        with torch.cuda.device(index):
            event = CudaEvent.new()
            event.record(torch.cuda.current_stream())
            if _record_context(event):
                events.append(event)
            else:
                torch.cuda.synchronize(index)
    return tuple(events)


def _record_context(event: CudaEvent) -> bool:
    """Record all work of the current context in `event`, which was recorded there before. Return True if the driver did."""
    driver = ctypes.CDLL("libcuda.so.1")  # torch has loaded it already
    try:
        record = driver.cuCtxRecordEvent
    except AttributeError:  # an older driver
        return False
    context = ctypes.c_void_p()
    status = driver.cuCtxGetCurrent(ctypes.byref(context)) or record(context, ctypes.c_void_p(event.cuda_event))
    if status:
        _log.info("chameleon_mm: the host waits for the device, as the driver records no event of a context: error %d", status)
    return not status
