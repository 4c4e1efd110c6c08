"""The works of one simulated GPU: clocks, memory and link, and what each call of a stream or of the host does to them.

    launch:  host_us += its cost;  stream.ready_us = max(ready, host_us) + its time
    copy:    time from the engine of its direction
    pack:    time of one kernel
    each:    the observer is told, and moves the bytes

Everything here runs under `lock`; all threads count as one host.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from chameleon_mm.device.checksummer import add_by_operators
from chameleon_mm.device.packing import check_ends, check_packed
from chameleon_mm.device.sim.cost_model import CopyEngine, CostModel, Span, touched_bytes
from chameleon_mm.device.sim.observer import SimObserver
from chameleon_mm.device.sim.sim_memory import Buffer, Ledger, plain_bytes
from chameleon_mm.device.sim.sim_stream import SimEvent, SimStream

_MEMORY = torch.device("cpu")  # where simulated memory lies


class Machine:
    """State of a simulated GPU. `moves_bytes` off: memory is counted and copies take their time, and nobody writes a byte."""

    def __init__(self, capacity: int, cost: CostModel, *, moves_bytes: bool = True) -> None:
        self.lock = threading.RLock()
        self.cost = cost
        self.moves_bytes = moves_bytes
        self.host_us = 0.0
        self.ledger = Ledger(capacity)
        self.observe(SimObserver())
        self._streams: list[SimStream] = []
        spec = cost.spec
        self._d2h = CopyEngine(spec.d2h_gbps, spec.duplex_gbps - spec.h2d_gbps)
        self._h2d = CopyEngine(spec.h2d_gbps, spec.duplex_gbps - spec.d2h_gbps)

        self._thread = threading.local()
        self._default = self.make_stream("compute", for_copies=False)

    def observe(self, observer: SimObserver) -> None:
        self.observer = self.ledger.observer = observer
        observer.machine = self

    def current_stream(self) -> SimStream:
        """The stream on which the calling thread's operators run."""
        stream: SimStream = getattr(self._thread, "stream", self._default)
        return stream

    def make_current(self, stream: SimStream) -> None:
        with self.lock:
            stream.for_copies = False
            self._thread.stream = stream

    def make_stream(self, name: str, *, for_copies: bool) -> SimStream:
        with self.lock:
            stream = SimStream(self, name, for_copies=for_copies)
            self._streams.append(stream)
            return stream

    # --- the host

    def host_sees(self, event: SimEvent, *, wait: bool) -> bool:
        with self.lock:
            self.host_us += self.cost.event_us
            if wait:
                self.host_us = max(self.host_us, event.time_us)
            if self.host_us < event.time_us:
                return False
            self.observer.host_waits(event.mark)
            return True

    def host_waits_for(self, stream: SimStream) -> None:
        self.host_us = max(self.host_us, stream.ready_us)
        self.observer.host_waits(self.observer.passed((stream,)))

    def synchronize(self) -> None:
        with self.lock:
            self.ledger.settle()
            for stream in self._streams:
                self.host_waits_for(stream)

    def host_memory(self, memory: Tensor) -> None:
        """Note pinned memory: `memory` is all of it."""
        with self.lock:
            self.ledger.adopt(memory.untyped_storage(), host=True)

    def forget_host_memory(self, memory: Tensor) -> None:
        """Free pinned memory."""
        with self.lock:
            storage = memory.untyped_storage()
            buffer = self.ledger.find(storage)
            whole = memory.numel() * memory.element_size() == storage.nbytes()
            if buffer is None or buffer.ref() is not storage or not buffer.host or buffer.freed or not whole:
                raise ValueError(
                    f"free_pinned: expected what alloc_pinned of this device returned, whole and once, got a tensor of "
                    f"{memory.numel()} elements"
                )
            self.observer.host_freed(buffer)
            buffer.freed = True

    # --- streams

    def record(self, streams: Sequence[SimStream] | None = None, *, timed: bool = False) -> SimEvent:
        """Record an event after all work on `streams`; None: on every stream."""
        with self.lock:
            self.host_us += self.cost.event_us
            streams = streams or self._streams
            ready_us = max(stream.ready_us for stream in streams)
            return SimEvent(self, max(ready_us, self.host_us), self.observer.passed(streams), timed)

    def stream_waits(self, stream: SimStream, event: SimEvent) -> None:
        with self.lock:
            self.host_us += self.cost.event_us
            self.observer.launch(stream)
            stream.ready_us = max(stream.ready_us, event.time_us)
            self.observer.stream_waits(stream, event.mark)

    def allocate(self, stream: SimStream, nbytes: int) -> Tensor:
        with self.lock:
            self.ledger.settle()
            self.host_us += self.cost.view_us
            self.observer.launch(stream)
            self.ledger.make_room(nbytes)
            buffer = plain_bytes(nbytes)
            self.ledger.adopt(buffer.untyped_storage())
            self.observer.allocated(stream, buffer.untyped_storage())
            return buffer

    def free(self, stream: SimStream, tensor: Tensor) -> None:
        with self.lock:
            self.ledger.settle()
            self.observer.launch(stream)
            self.observer.freed(stream, tensor)

    def resize(self, stream: SimStream, storage: torch.UntypedStorage, nbytes: int) -> None:
        with self.lock:
            self.ledger.settle()
            self.host_us += self.cost.view_us
            self.observer.launch(stream)
            if not nbytes:
                self.observer.emptied(stream, storage)
            self.ledger.resize(storage, nbytes)
            if nbytes:
                self.observer.allocated(stream, storage)

    # --- work on streams

    def copy(self, stream: SimStream, dst: Tensor, src: Tensor, *, speculative: bool = False) -> None:
        check_ends("copy", dst, src, _MEMORY)
        self.observer.check_move("copy", [(dst, src)])
        with self.lock:
            self.ledger.settle()
            to_host, from_host = self._adopt(dst).host, self._adopt(src).host
            if to_host and from_host:
                raise ValueError("copy: expected at least one end in device memory, got two of pinned host memory")
            self.host_us += self.cost.copy_us
            self.observer.launch(stream)
            direction = "d2h" if to_host else "h2d" if from_host else "d2d"
            self.observer.move(stream, f"{direction} copy", [(dst, src)], speculative=speculative)
            self.transfer(stream, src.numel(), to_host=to_host, from_host=from_host)

    def pack(self, stream: SimStream, what: str, buffers: Sequence[Tensor], staging: Tensor, offsets: Sequence[int]) -> None:
        """Run one pack or unpack kernel, as `what` says."""
        check_packed(what, buffers, staging, offsets, _MEMORY)
        with torch._C._DisableTorchDispatch():  # an active mode would take it for an operator of the model's
            parts = [staging.narrow(0, at, buffer.numel()) for buffer, at in zip(buffers, offsets, strict=True)]
        pairs = list(zip(parts, buffers, strict=True) if what == "pack" else zip(buffers, parts, strict=True))
        self.observer.check_move(what, pairs)
        total = sum(src.numel() for _, src in pairs)
        if total == 0:
            return
        with self.lock:
            self.ledger.settle()
            for i, pair in enumerate(pairs):
                if any(self._adopt(t).host for t in pair):
                    raise ValueError(
                        f"{what}: expected buffers in device memory, but of buffer {i} and the staging buffer one is pinned "
                        f"host memory: copy it, or give memory from Stream.alloc"
                    )
            self.host_us += self.cost.triton_launch_us + self.cost.packed_tensor_us * len(pairs)
            self.observer.launch(stream)
            self.observer.move(stream, what, pairs, speculative=False)
            self.run_kernel(stream, self.cost.device_copy_us(total))

    def add_checksum(self, stream: SimStream, out: Tensor, src: Tensor) -> None:
        """Run one kernel, on a compute stream, in program order."""
        if stream.for_copies:
            raise ValueError(
                f"checksum: expected a compute stream, got {stream.name}, which is for copies: use current_stream()"
            )
        with self.lock:
            self.ledger.settle()
            if self._adopt(src).host or self._adopt(out).host:
                raise ValueError("checksum: expected buffers in device memory, got one of pinned host memory: copy it")
            self.host_us += self.cost.triton_launch_us
            self.observer.launch(stream)
            label = f"checksum on {stream.name}"
            moved = self.access(stream, [src], write=False, label=label) + self.access(stream, [out], write=True, label=label)
            self.run_kernel(stream, self.cost.device_copy_us(moved // 2))
            with torch._C._DisableTorchDispatch(), torch.no_grad():
                add_by_operators(out.view(torch.int64), src)

    def _adopt(self, end: Tensor) -> Buffer:
        return self.ledger.adopt(end.untyped_storage())

    def transfer(self, stream: SimStream, nbytes: int, *, to_host: bool, from_host: bool) -> None:
        """Take the time of a copy: on the link's engine, or inside device memory."""
        ready = max(stream.ready_us, self.host_us)
        if to_host == from_host:
            stream.ready_us = ready + self.cost.device_copy_us(nbytes)
            return
        engine, other = (self._d2h, self._h2d) if to_host else (self._h2d, self._d2h)
        engine.forget_before(self.host_us)
        other.forget_before(self.host_us)
        stream.ready_us = engine.schedule(nbytes, ready, other).end_us

    def copy_spans(self, direction: str) -> tuple[Span, ...]:
        with self.lock:
            return tuple({"d2h": self._d2h, "h2d": self._h2d}[direction].spans)

    def run_kernel(self, stream: SimStream, price_us: float) -> None:
        stream.ready_us = max(stream.ready_us, self.host_us) + price_us

    def access(self, stream: SimStream, tensors: Iterable[Tensor], *, write: bool, label: str) -> int:
        """Note that `stream` reads or writes these tensors now. Returns their bytes."""
        total = 0
        for t in tensors:
            self.observer.access(stream, self._adopt(t), t, write=write, label=label)
            total += touched_bytes(t)
        return total

    def host_access(self, tensors: Iterable[Tensor], *, write: bool, label: str) -> None:
        """Note that the host itself reads or writes these tensors of pinned memory: before all that it launches from now on."""
        for t in tensors:
            self.observer.host_access(self._adopt(t), t, write=write, label=label)
