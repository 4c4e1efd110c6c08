"""A stream of a GPU, and its events: ordered work, handed to the driver.

stream.alloc(n)         = torch.empty on that stream        # the caching allocator: stream-ordered, OOM as torch raises it
stream.copy(d, s)       = cudaMemcpyAsync(d, s, n, default, stream)
stream.copy_batch       = cudaMemcpyBatchAsync by CUDA's bindings, where they and the driver have it, else copies
stream.pack, unpack     = one Triton kernel on that stream, where Triton works, else copies         # see packing.py
stream.record()         = an untimed event; stream.wait(e) = cudaStreamWaitEvent
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from chameleon_mm.device.checksum import check_sum
from chameleon_mm.device.packing import check_ends, check_packed
from chameleon_mm.device.protocols import Event

if TYPE_CHECKING:
    from chameleon_mm.device.cuda.device import CudaDevice


_log = logging.getLogger(__name__)

_MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: the direction follows from the addresses
_LEGACY_HANDLES = (0, 1)  # the null stream: which of the two it is, is settled when the runtime is loaded; and cudaStreamLegacy


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
        _log.info("chameleon_mm: a batch of %d copies is enqueued one by one, as the driver refused it: %s", len(sizes), status)
        return False


def batch_copies() -> BatchCopies | None:
    """The call that takes many copies, if CUDA's bindings are installed and have it, else None."""
    try:
        return BatchCopies(importlib.import_module("cuda.bindings.runtime"))
    except (ImportError, AttributeError, RuntimeError) as error:
        _log.info("chameleon_mm: small copies are enqueued one by one, as CUDA's bindings cannot be used: %s", str(error))
        return None


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

    __slots__ = ("_device", "_handle", "name", "raw")

    def __init__(self, device: CudaDevice, raw: torch.cuda.Stream, name: str) -> None:
        self._device = device
        self.name = name
        self._handle = int(raw.cuda_stream)
        self.raw = raw

    def __repr__(self) -> str:
        return f"<CudaStream {self.name} of {self._device.torch_device}, {self._handle:#x}>"

    def alloc(self, nbytes: int) -> Tensor:
        """Allocate as `Stream.alloc` does. On the current stream, the usual case, without any switch."""
        current = self._device.current_stream()
        scope: AbstractContextManager[Any] = (
            nullcontext() if current.raw.stream_id == self.raw.stream_id else torch.cuda.stream(self.raw)
        )
        with scope:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device.torch_device)

    def free(self, buffer: Tensor) -> None:
        """Does nothing: when the last reference goes, the block is at once the allocating stream's again, in stream order."""

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Resize as `Stream.resize` does: the caching allocator's block, on this stream."""
        with self._as_current():
            storage.resize_(nbytes)

    def copy(self, dst: Tensor, src: Tensor, *, speculative: bool = False) -> None:
        """Copy as `Stream.copy` does. A speculative copy is a copy like any other here: only the simulator could mind."""
        check_ends("copy", dst, src)
        if dst.numel():
            self._copy(dst, src)

    def copy_batch(self, pairs: Sequence[tuple[Tensor, Tensor]], *, speculative: bool = False) -> None:
        """Copy as `Stream.copy_batch` does, `speculative` as in `copy`. Whether ends share bytes only the simulator checks."""
        for i, (dst, src) in enumerate(pairs):
            check_ends(f"copy_batch: pair {i}", dst, src)
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
        """Pack as `Stream.pack` does. Whether ends share bytes only the simulator checks."""
        check_packed("pack", sources, dst, offsets, self._device.torch_device)
        with self._as_current():
            if self._device.packer.pack(dst, sources, offsets):
                return
        for source, offset in zip(sources, offsets, strict=True):
            self.copy(dst[offset : offset + source.numel()], source)

    def unpack(self, destinations: Sequence[Tensor], src: Tensor, offsets: Sequence[int]) -> None:
        """Unpack as `Stream.unpack` does, checked as `pack` is."""
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

    def _copy(self, dst: Tensor, src: Tensor) -> None:
        runtime = self._device.cupy_runtime
        if runtime is not None:
            # No dispatcher, no stream switch, no GIL while the driver works.
            runtime.memcpyAsync(dst.data_ptr(), src.data_ptr(), dst.numel(), _MEMCPY_DEFAULT, self._handle)
        else:
            with torch.cuda.stream(self.raw):
                dst.copy_(src, non_blocking=True)

    def _as_current(self) -> AbstractContextManager[Any]:
        """Context that makes this stream, and with it its device, current: kernels start there. Does nothing where they are."""
        if self._device.current_stream().raw.stream_id == self.raw.stream_id and self._device.is_current():
            return nullcontext()
        return torch.cuda.stream(self.raw)

    def record(self, *, timed: bool = False) -> CudaEvent:
        event = torch.cuda.Event(enable_timing=timed)
        event.record(self.raw)
        return CudaEvent(event, timed=timed)

    def wait(self, event: Event) -> None:
        if not isinstance(event, CudaEvent):
            raise TypeError(f"wait: expected an event of a CUDA stream, got {type(event).__name__}: use one device throughout")
        event.raw.wait(self.raw)
