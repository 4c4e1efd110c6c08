"""A GPU that is not there, strict on purpose: what would be a race once in a thousand runs on a GPU is an error here.

    device = SimDevice("h200", hbm_bytes="2GiB")
    with device.compute():                     # CPU ops are its compute: counted, priced, ordered
        loss = model(x)
    d2h = device.new_stream("d2h"); d2h.wait(ready); d2h.copy(host, hbm)      # see stream.py
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from chameleon_mm.device.sim.compute import SimCompute
from chameleon_mm.device.sim.cost import CostModel
from chameleon_mm.device.sim.link import CopyEngine, Span
from chameleon_mm.device.sim.memory import Buffer, Ledger, poison
from chameleon_mm.device.sim.shadow import Access, Clock, join
from chameleon_mm.device.sim.stream import LateCopy, SimEvent, SimStream, carry_out, poison_unless_pending
from chameleon_mm.device.specs import GpuSpec, spec_by_name
from chameleon_mm.errors import SimRaceError
from chameleon_mm.units import parse_size

_PAGE_BYTES = 4096
_POISON_HOST_BELOW = 256 << 20
"""Larger host allocations stay untouched, so that a simulated 64 GiB pool costs only what is used of it."""


class SimDevice:
    """A simulated GPU: virtual clocks, two copy engines, a capacity, and a race detector.

    `spec` names a GPU (`chameleon_mm.device.SPECS`) or is a `GpuSpec`; `hbm_bytes` overrides its capacity. `check_races`
    off leaves only poison and late copies to show a missing wait (as wrong numbers): for tests of the simulator itself.
    Thread-safe; all threads count as one host. Raises `ValueError` for an unknown spec or size.
    """

    def __init__(
        self,
        spec: str | GpuSpec = "h200",
        hbm_bytes: int | str | None = None,
        *,
        cost: CostModel | None = None,
        check_races: bool = True,
    ) -> None:
        self.spec = spec_by_name(spec) if isinstance(spec, str) else spec
        self._capacity = self.spec.hbm_bytes if hbm_bytes is None else parse_size(hbm_bytes, what="hbm_bytes")
        self.cost = cost or CostModel(spec=self.spec)
        self.check_races = check_races
        self.lock = threading.RLock()
        self.host_us = 0.0
        self._host_clock: Clock = {}
        self._streams: list[SimStream] = []
        self._ledger = Ledger(self._capacity, lambda actor: self._streams[actor].clock)
        self._default = self._make_stream("compute", late=False)
        self._thread = threading.local()
        self._pinned: dict[int, Buffer] = {}
        shared = self.spec.duplex_gbps
        self._engines = {
            "d2h": CopyEngine(self.spec.d2h_gbps, shared - self.spec.h2d_gbps),
            "h2d": CopyEngine(self.spec.h2d_gbps, shared - self.spec.d2h_gbps),
        }

    # --- what the protocol asks of a device

    @property
    def name(self) -> str:
        return f"simulated {self.spec.name}"

    @property
    def simulated(self) -> bool:
        return True

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def capacity(self) -> int:
        return self._capacity

    def __repr__(self) -> str:
        return f"<SimDevice {self.spec.name}, {self._capacity} bytes>"

    def current_stream(self) -> SimStream:
        return getattr(self._thread, "stream", self._default)

    def new_stream(self, name: str) -> SimStream:
        return self._make_stream(name, late=True)

    def allocated_bytes(self) -> int:
        with self.lock:
            self.settle()
            return self._ledger.allocated_bytes

    def peak_allocated_bytes(self) -> int:
        return self._ledger.peak_bytes

    def peak_reserved_bytes(self) -> None:
        return None

    def reset_peaks(self) -> None:
        self._ledger.peak_bytes = self.allocated_bytes()

    def allocation_odometer_bytes(self) -> int:
        return self._ledger.odometer_bytes

    def owns(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.layout is torch.strided and not self.is_host_memory(tensor)

    def is_host_memory(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in memory that `alloc_pinned` gave."""
        if not self._pinned:
            return False
        storage = tensor.untyped_storage()
        buffer = self._pinned.get(id(storage))
        return buffer is not None and buffer.ref() is storage

    def alloc_pinned(self, nbytes: int) -> Tensor:
        raw = np.empty(nbytes + _PAGE_BYTES, dtype=np.uint8)
        start = -raw.ctypes.data % _PAGE_BYTES
        with _disable_current_modes():  # or an active `compute()` would take it for device memory
            memory = torch.from_numpy(raw[start : start + nbytes])
        with self.lock:
            storage = memory.untyped_storage()
            self._pinned[id(storage)] = self._ledger.adopt(storage, 0, host=True, name=f"pinned #{len(self._pinned) + 1}")
            if nbytes < _POISON_HOST_BELOW:
                poison(storage)
        return memory

    def free_pinned(self, memory: Tensor) -> None:
        with self.lock:
            buffer = self._pinned.get(id(memory.untyped_storage()))
            if buffer is None or buffer.ref() is not memory.untyped_storage():
                raise ValueError("free_pinned: expected what alloc_pinned of this device returned, whole")
            if self.check_races:
                end = memory.untyped_storage().nbytes()
                buffer.shadow.check(Access(0, end, True, -1, 0, "the host, which frees the memory"), self._host_clock)
            del self._pinned[id(memory.untyped_storage())]

    def synchronize(self) -> None:
        with self.lock:
            self.settle()
            for stream in self._streams:
                self.host_waits_for(stream)

    @contextmanager
    def compute(self) -> Iterator[SimDevice]:
        depth = getattr(self._thread, "depth", 0)
        self._thread.depth = depth + 1
        try:
            if depth:
                yield self
            else:
                with SimCompute(self):
                    yield self
        finally:
            self._thread.depth = depth
        self.allocated_bytes()  # a race seen when a block was freed surfaces here at the latest

    @contextmanager
    def stream(self, stream: SimStream) -> Iterator[SimStream]:
        """Make `stream` this thread's current compute stream, as `torch.cuda.stream` does."""
        before = self.current_stream()
        carry_out(stream.pending)
        stream.late, stream.pending = False, ()
        self._thread.stream = stream
        try:
            yield stream
        finally:
            self._thread.stream = before

    def new_compute_stream(self, name: str = "compute") -> SimStream:
        """Another stream for `stream(...)`."""
        return self._make_stream(name, late=False)

    def copy_spans(self, direction: str) -> tuple[Span, ...]:
        """The copies of "d2h" or "h2d" that lie latest on their engine, in virtual microseconds."""
        return tuple(self._engines[direction].spans)

    # --- what streams, events and the compute mode ask

    def _make_stream(self, name: str, *, late: bool) -> SimStream:
        with self.lock:
            stream = SimStream(self, name, len(self._streams), late=late)
            self._streams.append(stream)
            return stream

    def settle(self) -> None:
        """Book freed storages. Raises `SimRaceError` for one that was freed under an unordered access."""
        try:
            self._ledger.settle()
        except SimRaceError:
            if self.check_races:
                raise

    def join_host(self, clock: Clock) -> None:
        join(clock, self._host_clock)

    def host_sees(self, event: SimEvent, *, wait: bool) -> bool:
        with self.lock:
            self.host_us += self.cost.event_us
            if wait:
                self.host_us = max(self.host_us, event.time_us)
            if self.host_us < event.time_us:
                return False
            join(self._host_clock, event.clock)
            carry_out(event.copies)
            event.copies = ()
            return True

    def host_waits_for(self, stream: SimStream) -> None:
        self.host_us = max(self.host_us, stream.ready_us)
        join(self._host_clock, stream.clock)
        carry_out(stream.pending)
        stream.pending = ()

    def stream_waits(self, stream: SimStream, event: SimEvent) -> None:
        with self.lock:
            self.host_us += self.cost.event_us
            stream.begin()
            join(stream.clock, event.clock)
            stream.ready_us = max(stream.ready_us, event.time_us)
            stream.order_after(event.copies)

    def allocate(self, stream: SimStream, nbytes: int) -> Tensor:
        with self.lock:
            self.settle()
            self.host_us += self.cost.view_us
            self._ledger.make_room(nbytes)
            buffer = torch.empty(nbytes, dtype=torch.uint8)
            self._ledger.adopt(buffer.untyped_storage(), stream.actor).owner = stream.actor
            poison(buffer.untyped_storage())
            return buffer

    def hand_back(self, stream: SimStream, buffer: Tensor) -> None:
        with self.lock:
            self.settle()
            stream.begin()
            known = self._ledger.find(buffer.untyped_storage())
            if known is None or not self.check_races:
                return
            label = f"{stream.name}, which was handed {known.name} back (the block is reused)"
            end = buffer.untyped_storage().nbytes()
            known.shadow.check(Access(0, end, True, stream.actor, 0, label), stream.clock)

    def copy(self, stream: SimStream, dst: Tensor, src: Tensor) -> None:
        _check_copy(dst, src)
        with self.lock:
            self.settle()
            self.host_us += self.cost.copy_us
            stream.begin()
            direction = self._direction(dst, src)
            label = f"{direction} copy of {src.numel()} bytes on {stream.name}"
            self.access(stream, [src], write=False, label=label)
            self.access(stream, [dst], write=True, label=label)
            self._take_time(stream, direction, src.numel())
            if src.numel() == 0:
                return
            late = LateCopy(dst, src, label, stream.pending)
            poison_unless_pending(dst, self._still_pending())
            if stream.late:
                stream.pending = (late,)
            else:
                carry_out((late,))

    def access(self, stream: SimStream, tensors: list[Tensor], *, write: bool, label: str) -> None:
        """Check and record that `stream` reads or writes each tensor's bytes now."""
        for t in tensors:
            start, end = byte_extent(t)
            if start == end:
                continue
            buffer = self._ledger.adopt(t.untyped_storage(), stream.actor)
            new = stream.tick(start, end, write=write, label=f"{label} [{buffer.name}]")
            if self.check_races:
                buffer.shadow.touch(new, stream.clock)

    def begin_op(self, stream: SimStream, inputs: list[Tensor]) -> None:
        stream.begin()
        for t in inputs:
            self._ledger.adopt(t.untyped_storage(), stream.actor)

    def adopt_results(self, stream: SimStream, results: list[Tensor], mutated: list[Tensor]) -> None:
        for t in results:
            self._ledger.adopt(t.untyped_storage(), stream.actor)
        for t in mutated:
            storage = t.untyped_storage()
            self._ledger.resized(self._ledger.adopt(storage, stream.actor), storage)

    def run_kernel(self, stream: SimStream, price_us: float) -> None:
        self.host_us += self.cost.launch_us
        stream.ready_us = max(stream.ready_us, self.host_us) + price_us

    def _direction(self, dst: Tensor, src: Tensor) -> str:
        to_host, from_host = self.is_host_memory(dst), self.is_host_memory(src)
        return "h2h" if to_host and from_host else "d2h" if to_host else "h2d" if from_host else "d2d"

    def _take_time(self, stream: SimStream, direction: str, nbytes: int) -> None:
        ready = max(stream.ready_us, self.host_us)
        if direction in self._engines:
            other = self._engines["h2d" if direction == "d2h" else "d2h"]
            other.forget_before(self.host_us)
            stream.ready_us = self._engines[direction].schedule(nbytes, ready, other).end_us
        else:
            stream.ready_us = ready + self.cost.device_copy_us(nbytes)

    def _still_pending(self) -> list[LateCopy]:
        """Every copy not carried out: the streams' tails and all that each was ordered after."""
        stack = [copy for stream in self._streams for copy in stream.pending]
        seen: dict[int, LateCopy] = {}
        while stack:
            copy = stack.pop()
            if id(copy) not in seen and not copy.done:
                seen[id(copy)] = copy
                stack.extend(copy.before)
        return list(seen.values())


def byte_extent(t: Tensor) -> tuple[int, int]:
    """First and past-the-last byte of a tensor within its storage."""
    if t.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    start = t.storage_offset() * t.element_size()
    return start, start + (last + 1) * t.element_size()


def _check_copy(dst: Tensor, src: Tensor) -> None:
    for name, t in (("dst", dst), ("src", src)):
        if t.dtype is not torch.uint8 or t.dim() != 1 or not t.is_contiguous():
            raise ValueError(f"copy: expected {name} as a flat, contiguous uint8 tensor, got {t.dtype} of shape {tuple(t.shape)}")
    if dst.numel() != src.numel():
        raise ValueError(f"copy: expected equal sizes, got {src.numel()} bytes into {dst.numel()}")
