"""The works of one simulated GPU: clocks, memory and link, and what each call of a stream or of the host does to them.

    launch:  host_us += its cost;  stream.ready_us = max(ready, host_us) + its time
    copy:    time from the engine of its direction
    pack:    time of one kernel
    each:    the observer is told, and moves the bytes

Everything here runs under `lock`; all threads count as one host.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from chameleon_mm.device.packing import add_by_operators, check_ends, check_packed, check_sum
from chameleon_mm.device.protocols import Event
from chameleon_mm.device.sim.cost_model import CopyEngine, CostModel, Span, touched_bytes
from chameleon_mm.units import allocated_size, format_size

# --- Observer of a simulated device: it is told of the work in the order of issue, and may refuse it or move its bytes later
#
# `SimObserver` itself accuses nobody. The tests' observer, which detects races, is no part of the library.


class SimObserver:
    """Observer that finds nothing, and moves the bytes of a copy when it is issued.

    Methods run under the device's lock, `released` alone in any line of any thread. What they raise, the observed call raises.
    """

    machine: Machine
    """The device's machine, from `attach_observer` on."""

    def seen(self, buffer: Buffer) -> None:
        """A storage is seen for the first time."""

    def launch(self, stream: SimStream) -> None:
        """Work follows on `stream`, after all that the host has done and seen complete."""

    def access(self, stream: SimStream, buffer: Buffer, t: Tensor, *, write: bool, label: str) -> None:
        """An operator or a kernel on `stream` reads or writes `t`, which lies in `buffer`."""

    def host_access(self, buffer: Buffer, t: Tensor, *, write: bool, label: str) -> None:
        """The host reads or writes `t`, which lies in `buffer`, pinned memory."""

    def check_move(self, what: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """The pairs `(dst, src)` are to be moved by one call `what`: "copy", "pack" or "unpack"."""

    def move(self, stream: SimStream, what: str, pairs: Sequence[tuple[Tensor, Tensor]], *, speculative: bool) -> None:
        """Move the bytes of the pairs `(dst, src)`, in any order, by the time that the next work after them begins."""
        if self.machine.moves_bytes:
            for dst, src in pairs:
                ctypes.memmove(dst.data_ptr(), src.data_ptr(), src.numel())

    def passed(self, streams: Sequence[SimStream]) -> object:
        """Return a mark of all work so far on `streams`, and of what the host has seen complete."""

    def stream_waits(self, stream: SimStream, mark: object) -> None:
        """`stream` is ordered after `mark`, which `passed` returned."""

    def host_waits(self, mark: object) -> None:
        """The host has seen the work before `mark` complete."""

    def allocated(self, stream: SimStream, storage: torch.UntypedStorage) -> None:
        """`stream` was handed memory with nothing in it yet: a block that it may still work on."""

    def freed(self, stream: SimStream, tensor: Tensor) -> None:
        """`stream` hands back its memory if the caller alone holds it."""

    def emptied(self, stream: SimStream, storage: torch.UntypedStorage) -> None:
        """`stream` hands back the memory of `storage`, which stays."""

    def host_freed(self, buffer: Buffer) -> None:
        """The host is about to free pinned memory."""

    def released(self, buffer: Buffer) -> None:
        """The memory of a storage that died, or was resized by others, goes back to the stream that it belongs to."""

    def settled(self) -> None:
        """All memory released so far is accounted for."""


# --- Every storage that the simulated device has seen, by weak reference


def plain_bytes(nbytes: int) -> Tensor:
    """Memory of the simulator's own making, which no active mode sees, prices or replaces."""
    with torch._C._DisableTorchDispatch():
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


class Buffer:
    """One storage: device memory (`host` False) or pinned host memory."""

    __slots__ = ("address", "charged_bytes", "freed", "host", "nbytes", "note", "ref")

    def __init__(self, ref: weakref.ref[torch.UntypedStorage], nbytes: int, *, host: bool, address: int) -> None:
        self.ref = ref
        self.address = address
        """Address of pinned host memory, 0 for device memory."""
        self.nbytes = nbytes
        self.host = host
        self.charged_bytes = 0
        self.freed = False
        """True of pinned memory that was given back although the storage is still there."""
        self.note: Any = None
        """For the observer."""


def _address(buffer: Buffer) -> int:
    return buffer.address


class Ledger:
    """Every storage seen, what is allocated now and at most, and the deaths that are still to be counted."""

    observer: SimObserver

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self.cumulative_bytes = 0
        self._buffers: dict[int, Buffer] = {}
        self._host: list[Buffer] = []  # by address
        self._deaths: deque[tuple[int, Buffer]] = deque()

    def find(self, storage: torch.UntypedStorage) -> Buffer | None:
        """Find the storage's buffer if it was seen before. Keyed by the object, compared by a weak reference: ids are
        recycled."""
        buffer = self._buffers.get(id(storage))
        if buffer is not None and buffer.ref() is storage:
            return buffer
        if not self._host or storage.device.type != "cpu":  # a fake tensor's is "meta": it has no address to be asked for
            return None
        try:
            address = storage.data_ptr()
        except RuntimeError:  # a functorch wrapper's: no memory of its own
            return None
        at = bisect_right(self._host, address, key=_address) - 1
        if at < 0:
            return None
        buffer = self._host[at]
        return buffer if address < buffer.address + buffer.nbytes and buffer.ref() is not None else None

    def adopt(self, storage: torch.UntypedStorage, *, host: bool = False) -> Buffer:
        """The storage's buffer, charged for on first sight and when it has grown since the last.

        Raises `torch.OutOfMemoryError` when it does not fit, with nothing changed.
        """
        nbytes = storage.nbytes()
        buffer = self.find(storage)
        if buffer is not None:
            if buffer.nbytes != nbytes and buffer.ref() is storage:
                self._resized(buffer, nbytes)
            return buffer
        charge = 0 if host else allocated_size(nbytes)
        self.make_room(charge)
        key = id(storage)
        address = storage.data_ptr() if host else 0
        buffer = Buffer(weakref.ref(storage, self._on_death(key)), nbytes, host=host, address=address)
        self._buffers[key] = buffer
        if host:
            self._host = [known for known in self._host if known.ref() is not None]  # a dead one may lie where this one does
            insort(self._host, buffer, key=_address)
        self._charge(buffer, charge)
        self.observer.seen(buffer)
        return buffer

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give the storage's block back, or give it one. Raises as `adopt` does."""
        self.adopt(storage)
        if nbytes:
            self.make_room(allocated_size(nbytes))
        with torch._C._DisableTorchDispatch():
            storage.resize_(nbytes)
        self.adopt(storage)

    def make_room(self, nbytes: int) -> None:
        """Raise `torch.OutOfMemoryError` as the caching allocator does when `nbytes` more do not fit."""
        if nbytes and self.allocated_bytes + nbytes > self.capacity:
            raise torch.OutOfMemoryError(
                f"out of memory on the simulated device. Tried to allocate {format_size(nbytes)}. It has a capacity of "
                f"{format_size(self.capacity)}, of which {format_size(self.capacity - self.allocated_bytes)} is free; "
                f"{format_size(self.allocated_bytes)} is allocated."
            )

    def lend(self, nbytes: int) -> None:
        """Charge `nbytes` that an operator has for itself and frees again. Raises `torch.OutOfMemoryError` when they do not
        fit."""
        self.make_room(nbytes)
        self.cumulative_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes + nbytes)

    def settle(self) -> None:
        """Count the deaths so far."""
        if not self._deaths:
            return
        while self._deaths:
            key, buffer = self._deaths.popleft()
            if self._buffers.get(key) is buffer:
                del self._buffers[key]
            if buffer in self._host:
                self._host.remove(buffer)
            self.allocated_bytes -= buffer.charged_bytes
        self.observer.settled()

    def _on_death(self, key: int) -> Callable[[object], None]:
        def died(_: object) -> None:
            # Runs in the middle of any line of any thread, so it only notes the death: settle() does the rest.
            dead = self._buffers.get(key)
            if dead is None or dead.ref() is not None:
                return  # that id belongs to another storage by now
            self.observer.released(dead)
            self._deaths.append((key, dead))

        return died

    def _resized(self, buffer: Buffer, nbytes: int) -> None:
        """Note that a storage has another size than when it was last seen: its old block went back to its owner, it has a new
        one."""
        charge = 0 if buffer.host else allocated_size(nbytes)
        self.make_room(max(0, charge - buffer.charged_bytes))
        self.observer.released(buffer)
        buffer.nbytes = nbytes
        self._charge(buffer, charge)
        self.observer.settled()

    def _charge(self, buffer: Buffer, nbytes: int) -> None:
        grown = nbytes - buffer.charged_bytes
        buffer.charged_bytes = nbytes
        self.allocated_bytes += grown
        self.cumulative_bytes += max(0, grown)
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)


# --- Streams and events of the simulated device: the time of all work is fixed when it is issued
#
# copy(dst, src):  when it runs is known now (engine, ready time); the observer moves the bytes record():        the stream's
# time, and the observer's mark wait(event):     times joined


class SimEvent:
    """A point in a simulated stream's work: its virtual time, and the observer's mark of what it is ordered after."""

    __slots__ = ("machine", "mark", "time_us", "timed")

    def __init__(self, machine: Machine, time_us: float, mark: object, timed: bool) -> None:
        self.machine = machine
        self.time_us = time_us
        self.mark = mark
        self.timed = timed

    def query(self) -> bool:
        """Whether the host's clock has passed the event. True orders all that the host does and launches later."""
        return self.machine.host_sees(self, wait=False)

    def synchronize(self) -> None:
        """Move the host's clock to the event, if it is not there yet."""
        self.machine.host_sees(self, wait=True)

    def elapsed_us(self, since: Event) -> float:
        """Virtual microseconds from `since` to this event.

        Raises `ValueError` unless both are timed, complete and of one device.
        """
        if not isinstance(since, SimEvent) or since.machine is not self.machine or not (self.timed and since.timed):
            raise ValueError("elapsed_us: expected two timed events of one simulated device; record them with timed=True")
        if not (self.query() and since.query()):
            raise ValueError("elapsed_us: expected two complete events; call synchronize() on the later one first")
        return self.time_us - since.time_us


class SimStream:
    """A queue of simulated work. `for_copies`: no operators run on it."""

    __slots__ = ("_machine", "for_copies", "name", "ready_us")

    def __init__(self, machine: Machine, name: str, *, for_copies: bool) -> None:
        self._machine = machine
        self.name = name
        self.for_copies = for_copies
        self.ready_us = 0.0

    def __repr__(self) -> str:
        return f"<SimStream {self.name} at {self.ready_us:.1f} us>"

    def alloc(self, nbytes: int) -> Tensor:
        """Allocate as `Stream.alloc` does."""
        return self._machine.allocate(self, nbytes)

    def free(self, buffer: Tensor) -> None:
        """Free as `Stream.free` does: it counts as allocated until the last reference goes."""
        self._machine.free(self, buffer)

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Resize as `Stream.resize` does."""
        self._machine.resize(self, storage, nbytes)

    def copy(self, dst: Tensor, src: Tensor, *, speculative: bool = False) -> None:
        """Copy as `Stream.copy` does. Raises `ValueError` also if both ends lie in host memory."""
        self._machine.copy(self, dst, src, speculative=speculative)

    def copy_storage(self, storage: torch.UntypedStorage, host: Tensor, *, out: bool) -> None:
        """Copy as `Stream.copy_storage` does. Raises `ValueError` as `copy` does."""
        with torch._C._DisableTorchDispatch():  # an active mode would take it for an operator of the model's
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        dst, src = (host, whole) if out else (whole, host)
        self.copy(dst, src, speculative=out)

    def pack(self, dst: Tensor, sources: Sequence[Tensor], offsets: Sequence[int]) -> None:
        """Pack as `Stream.pack` does, for one launch and the bytes' way through device memory. Raises `ValueError` also for
        host memory."""
        self._machine.pack(self, "pack", sources, dst, offsets)

    def unpack(self, destinations: Sequence[Tensor], src: Tensor, offsets: Sequence[int]) -> None:
        """Unpack as `Stream.unpack` does, priced and checked as `pack` is."""
        self._machine.pack(self, "unpack", destinations, src, offsets)

    def add_checksum(self, out: Tensor, src: Tensor) -> None:
        """Add as `Stream.add_checksum` does, for one launch and one reading of the bytes. Raises `ValueError` also for host
        memory and on a stream of copies."""
        check_sum(out, src, torch.device("cpu"))
        self._machine.add_checksum(self, out, src)

    def record(self, *, timed: bool = False) -> SimEvent:
        """Record as `Stream.record` does."""
        return self._machine.record((self,), timed=timed)

    def record_again(self, event: Event) -> None:
        """Record as `Stream.record_again` does. Raises `TypeError` for another kind's event."""
        if not isinstance(event, SimEvent):
            raise TypeError(f"record_again: expected an event of the simulator, got {type(event).__name__}: use one device")
        now = self._machine.record((self,))
        event.time_us, event.mark = now.time_us, now.mark

    def is_current(self) -> bool:
        return self._machine.current_stream() is self

    def wait(self, event: Event) -> None:
        """Wait as `Stream.wait` does. Raises `TypeError` for another kind's event, `ValueError` for another simulated
        device's."""
        if not isinstance(event, SimEvent):
            raise TypeError(f"wait: expected an event of the simulator, got {type(event).__name__}: use one device throughout")
        if event.machine is not self._machine:
            raise ValueError("wait: expected an event of this simulated device, got another one's: use one device throughout")
        self._machine.stream_waits(self, event)


# --- machine

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
