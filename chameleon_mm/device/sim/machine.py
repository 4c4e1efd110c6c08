"""State of a simulated GPU: its clocks, memory and link, and how stream and host calls change them.

    launch:  host_us += its cost;  stream.ready_us = max(ready, host_us) + its time
    copy:    time from the copy engine of its direction
    pack:    time of one kernel
    each:    the observer sees the work and moves the bytes

Everything here runs under `lock`. All threads count as one host.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from chameleon_mm.device.operators import touched_bytes
from chameleon_mm.device.packing import add_by_operators, check_ends, check_host, check_packed, check_storage, check_sum
from chameleon_mm.device.protocols import Event, Stream
from chameleon_mm.device.sim.cost_model import CopyEngine, CostModel
from chameleon_mm.units import allocated_size, format_size

# --- Observer of a simulated device: it sees the work in the order of issue. It may refuse work or move bytes later.
#
# `SimObserver` itself checks nothing. The tests' observer, which detects races, is not part of the library.


class SimObserver:
    """Observer that checks nothing and moves the bytes of a copy when it is issued.

    Methods run under the device's lock, except `released`, which may run at any line of any thread. The observed call raises
    what they raise.
    """

    machine: Machine
    """The device's machine, set by `attach_observer`."""

    def seen(self, buffer: Buffer) -> None:
        """Called when a storage is seen for the first time."""

    def launch(self, stream: SimStream) -> None:
        """Called before work on `stream`. The work comes after all that the host has done and seen complete."""

    def access(self, stream: SimStream, buffer: Buffer, t: Tensor, *, write: bool, label: str) -> None:
        """Called when an operator or a kernel on `stream` reads or writes `t`, which lies in `buffer`."""

    def host_access(self, buffer: Buffer, t: Tensor, *, write: bool, label: str) -> None:
        """Called when the host reads or writes `t`, which lies in the pinned memory `buffer`."""

    def check_move(self, what: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Check the pairs `(dst, src)` before the call `what` ("copy", "pack" or "unpack") moves them."""

    def move(self, stream: SimStream, what: str, pairs: Sequence[tuple[Tensor, Tensor]], *, speculative: bool) -> None:
        """Move the bytes of the pairs `(dst, src)`, in any order, before the next work after them begins."""
        if self.machine.moves_bytes:
            for dst, src in pairs:
                ctypes.memmove(dst.data_ptr(), src.data_ptr(), src.numel())

    def passed(self, streams: Sequence[SimStream]) -> object:
        """Return a mark of all work so far on `streams`, and of all work that the host has seen complete."""

    def stream_waits(self, stream: SimStream, mark: object) -> None:
        """Called when `stream` is ordered after `mark`, a result of `passed`."""

    def host_waits(self, mark: object) -> None:
        """Called when the host has seen the work before `mark` complete."""

    def allocated(self, stream: SimStream, storage: torch.UntypedStorage) -> None:
        """Called when `stream` gets uninitialised memory. Earlier work of the stream may still use the block."""

    def freed(self, stream: SimStream, tensor: Tensor) -> None:
        """Called when `stream` hands back the tensor's memory, provided that only the caller refers to it."""

    def emptied(self, stream: SimStream, storage: torch.UntypedStorage) -> None:
        """Called when `stream` hands back the memory of `storage`. The storage itself stays."""

    def host_freed(self, buffer: Buffer) -> None:
        """Called before the host frees pinned memory."""

    def released(self, buffer: Buffer) -> None:
        """Called when the memory of a storage goes back to its stream, because it died or other code resized it."""

    def settled(self) -> None:
        """Called when all memory released so far is counted."""


# --- Every storage that the simulated device has seen, by weak reference


def plain_bytes(nbytes: int) -> Tensor:
    """Return memory for the simulator itself, which no active dispatch mode sees, prices or replaces."""
    with torch._C._DisableTorchDispatch():
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


@dataclass(slots=True, eq=False)
class Buffer:
    """Record of a storage, in device memory (`host` False) or pinned host memory."""

    ref: weakref.ref[torch.UntypedStorage]
    nbytes: int
    host: bool
    address: int
    """Address of pinned host memory, 0 for device memory."""
    charged_bytes: int = 0
    freed: bool = False
    """True if pinned memory was freed while its storage still exists."""
    note: Any = None
    """For the observer."""


_address = attrgetter("address")


class Ledger:
    """Every storage seen, current and peak bytes allocated, and storages that died but are not counted yet."""

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
        """Find the storage's buffer by the object's id, or by an address in pinned memory; None if it is unknown. A weak
        reference confirms an id, because ids are reused."""
        buffer = self._buffers.get(id(storage))
        if buffer is not None and buffer.ref() is storage:
            return buffer
        if not self._host or storage.device.type != "cpu":  # a fake tensor's storage is "meta" and has no address
            return None
        try:
            address = storage.data_ptr()
        except RuntimeError:  # a functorch wrapper's storage has no memory
            return None
        at = bisect_right(self._host, address, key=_address) - 1
        if at < 0:
            return None
        buffer = self._host[at]
        return buffer if address < buffer.address + buffer.nbytes and buffer.ref() is not None else None

    def adopt(self, storage: torch.UntypedStorage, *, host: bool = False) -> Buffer:
        """Return the storage's buffer. Count its bytes when it is first seen, and again if its size has changed since.

        Raises `torch.OutOfMemoryError` with nothing changed if it does not fit.
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
            self._host = [known for known in self._host if known.ref() is not None]  # a dead one may have this address
            insort(self._host, buffer, key=_address)
        self._charge(buffer, charge)
        self.observer.seen(buffer)
        return buffer

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Free the storage's block, or allocate one. Raises as `adopt` does."""
        self.adopt(storage)
        if nbytes:
            self.make_room(allocated_size(nbytes))
        with torch._C._DisableTorchDispatch():
            storage.resize_(nbytes)
        self.adopt(storage)

    def make_room(self, nbytes: int) -> None:
        """Raise `torch.OutOfMemoryError`, as the caching allocator does, if `nbytes` more do not fit."""
        if nbytes and self.allocated_bytes + nbytes > self.capacity:
            raise torch.OutOfMemoryError(
                f"out of memory on the simulated device. Tried to allocate {format_size(nbytes)}. It has a capacity of "
                f"{format_size(self.capacity)}, of which {format_size(self.capacity - self.allocated_bytes)} is free; "
                f"{format_size(self.allocated_bytes)} is allocated."
            )

    def lend(self, nbytes: int) -> None:
        """Count `nbytes` of scratch memory that an operator allocates and frees. Raises `torch.OutOfMemoryError` without
        room."""
        self.make_room(nbytes)
        self.cumulative_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes + nbytes)

    def settle(self) -> None:
        """Subtract the bytes of the storages that died so far."""
        if not self._deaths:
            return
        while self._deaths:
            key, buffer = self._deaths.popleft()
            if self._buffers.get(key) is buffer:
                del self._buffers[key]
            if buffer.host and buffer in self._host:
                self._host.remove(buffer)
            self.allocated_bytes -= buffer.charged_bytes
        self.observer.settled()

    def _on_death(self, key: int) -> Callable[[object], None]:
        def died(_: object) -> None:
            # Runs at any line of any thread, so it only notes the death: settle() does the rest.
            dead = self._buffers.get(key)
            if dead is None or dead.ref() is not None:
                return  # another storage has that id now
            self.observer.released(dead)
            self._deaths.append((key, dead))

        return died

    def _resized(self, buffer: Buffer, nbytes: int) -> None:
        """Count a storage whose size has changed since it was last seen. Its old block was freed, and it has a new one."""
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
# copy(dst, src):  start and end are fixed now (engine, ready time); the observer moves the bytes
# record():        the stream's time and the observer's mark; wait(event): the later of both times


_MEMORY = torch.device("cpu")  # device of simulated memory


@dataclass(slots=True, eq=False)
class SimEvent:
    """A point in a simulated stream's work: its virtual time, and the observer's mark of the work before it."""

    machine: Machine
    time_us: float
    mark: object
    timed: bool

    def query(self) -> bool:
        """True if the host's clock has passed the event. True orders all later host work and launches after it."""
        return self.machine.host_sees(self, wait=False)

    def synchronize(self) -> None:
        """Advance the host's clock to the event's time, if it is earlier."""
        self.machine.host_sees(self, wait=True)

    def elapsed_us(self, since: Event) -> float:
        """Virtual microseconds from `since` to this event.

        Raises `ValueError` unless both are timed, complete and from the same device.
        """
        if not isinstance(since, SimEvent) or since.machine is not self.machine or not (self.timed and since.timed):
            raise ValueError("elapsed_us: expected two timed events of one simulated device; record them with timed=True")
        if not (self.query() and since.query()):
            raise ValueError("elapsed_us: expected two complete events; call synchronize() on the later one first")
        return self.time_us - since.time_us


class SimStream:
    """A queue of simulated work. `for_copies`: True if no operators run on it."""

    def __init__(self, machine: Machine, name: str, *, for_copies: bool) -> None:
        self._machine = machine
        self.name = name
        self.for_copies = for_copies
        self.ready_us = 0.0
        self.kernel_ends = deque[float](maxlen=machine.host_lead)
        """Ends of its latest kernels, in virtual microseconds."""

    @contextmanager
    def _launching(self, host_us: float) -> Iterator[Machine]:
        """Context for one call on this stream, which takes the host `host_us`. Holds the lock."""
        machine = self._machine
        with machine.lock:
            machine.ledger.settle()
            machine.host_us += host_us
            machine.observer.launch(self)
            yield machine

    def alloc(self, nbytes: int) -> Tensor:
        with self._launching(self._machine.cost.view_us) as machine:
            machine.ledger.make_room(nbytes)
            buffer = plain_bytes(nbytes)
            machine.ledger.adopt(buffer.untyped_storage())
            machine.observer.allocated(self, buffer.untyped_storage())
            return buffer

    def free(self, buffer: Tensor) -> None:
        """Free as `Stream.free` does. The buffer counts as allocated until its last reference is dropped."""
        with self._launching(0.0) as machine:
            machine.observer.freed(self, buffer)

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        with self._launching(self._machine.cost.view_us) as machine:
            if not nbytes:
                machine.observer.emptied(self, storage)
            machine.ledger.resize(storage, nbytes)
            if nbytes:
                machine.observer.allocated(self, storage)

    def copy(self, dst: Tensor, src: Tensor, *, speculative: bool = False) -> None:
        """Copy as `Stream.copy` does. Raises `ValueError` also if both ends lie in host memory."""
        machine = self._machine
        check_ends("copy", dst, src, _MEMORY)
        machine.observer.check_move("copy", [(dst, src)])
        with machine.lock:
            machine.ledger.settle()
            to_host, from_host = machine.is_host(dst), machine.is_host(src)
            if to_host and from_host:
                raise ValueError("copy: expected at least one end in device memory, got two of pinned host memory")
            machine.host_us += machine.cost.copy_us
            machine.observer.launch(self)
            direction = "d2h" if to_host else "h2d" if from_host else "d2d"
            machine.observer.move(self, f"{direction} copy", [(dst, src)], speculative=speculative)
            machine.transfer(self, src.numel(), to_host=to_host, from_host=from_host)

    def copy_storage(
        self, storage: torch.UntypedStorage, host: Tensor, *, start: int = 0, part: slice | None = None, out: bool
    ) -> None:
        with torch._C._DisableTorchDispatch():  # an active mode would count them as operators of the model
            if part is not None:
                host = host[part]
                self._machine.host_us += self._machine.cost.view_us
            check_storage(storage, start + host.numel())
            on_device = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (host.numel(),), (1,))
        dst, src = (host, on_device) if out else (on_device, host)
        self.copy(dst, src, speculative=out)

    def copy_behind(
        self, owner: Stream, storage: torch.UntypedStorage, host: Tensor, offset: int, *, out: bool, again: Event | None = None
    ) -> SimEvent:
        check_host(host, offset + storage.nbytes())
        self.wait(owner.record())  # all work of `owner` so far -> the copy
        self.copy_storage(storage, host, part=slice(offset, offset + storage.nbytes()), out=out)
        return self.record()

    def pack(self, dst: Tensor, sources: Sequence[Tensor], offsets: Sequence[int]) -> None:
        """Pack as `Stream.pack` does. It costs one launch, and the time to read and write the bytes in device memory. Raises
        `ValueError` also for host memory."""
        self._run_packing("pack", sources, dst, offsets)

    def unpack(self, destinations: Sequence[Tensor], src: Tensor, offsets: Sequence[int]) -> None:
        self._run_packing("unpack", destinations, src, offsets)

    def _run_packing(self, what: str, buffers: Sequence[Tensor], staging: Tensor, offsets: Sequence[int]) -> None:
        machine = self._machine
        check_packed(what, buffers, staging, offsets, _MEMORY)
        with torch._C._DisableTorchDispatch():  # an active mode would count it as an operator of the model
            parts = [staging.narrow(0, at, buffer.numel()) for buffer, at in zip(buffers, offsets, strict=True)]
        pairs = list(zip(parts, buffers, strict=True) if what == "pack" else zip(buffers, parts, strict=True))
        machine.observer.check_move(what, pairs)
        total = sum(src.numel() for _, src in pairs)
        if total == 0:
            return
        with machine.lock:
            machine.ledger.settle()
            for i, pair in enumerate(pairs):
                if any(machine.is_host(t) for t in pair):
                    raise ValueError(
                        f"{what}: expected buffers in device memory, but of buffer {i} and the staging buffer one is pinned "
                        f"host memory: copy it, or give memory from Stream.alloc"
                    )
            with self._launching(machine.cost.triton_launch_us + machine.cost.packed_tensor_us * len(pairs)):
                machine.observer.move(self, what, pairs, speculative=False)
                machine.run_kernel(self, machine.cost.device_copy_us(total))

    def add_checksum(self, out: Tensor, src: Tensor) -> None:
        """Add as `Stream.add_checksum` does. It costs one launch and the time to read the bytes. Raises `ValueError` also for
        host memory, and on a stream for copies."""
        machine = self._machine
        check_sum(out, src, _MEMORY)
        if self.for_copies:
            raise ValueError(f"checksum: expected a compute stream, got {self.name}, which is for copies: use current_stream()")
        with machine.lock:
            machine.ledger.settle()
            if machine.is_host(src) or machine.is_host(out):
                raise ValueError("checksum: expected buffers in device memory, got one of pinned host memory: copy it")
            with self._launching(machine.cost.triton_launch_us):
                label = f"checksum on {self.name}"
                moved = machine.access(self, [src], write=False, label=label)
                moved += machine.access(self, [out], write=True, label=label)
                machine.run_kernel(self, machine.cost.device_copy_us(moved // 2))
                with torch._C._DisableTorchDispatch(), torch.no_grad():
                    add_by_operators(out.view(torch.int64), src)

    def record(self, *, timed: bool = False) -> SimEvent:
        return self._machine.record((self,), timed=timed)

    def is_current(self) -> bool:
        return self._machine.current_stream() is self

    def wait(self, event: Event) -> None:
        """Wait as `Stream.wait` does. Raises `TypeError` for an event of another kind of device, `ValueError` for one of
        another simulated device."""
        if not isinstance(event, SimEvent):
            raise TypeError(f"wait: expected an event of the simulator, got {type(event).__name__}: use one device throughout")
        if event.machine is not self._machine:
            raise ValueError("wait: expected an event of this simulated device, got another one's: use one device throughout")
        with self._launching(self._machine.cost.event_us) as machine:
            self.ready_us = max(self.ready_us, event.time_us)
            machine.observer.stream_waits(self, event.mark)


HOST_LEAD = 1000
"""Number of kernels that the host may be ahead of a stream: about the 1,024 entries of the queue of a GPU's channel."""


class Machine:
    """State of a simulated GPU. `moves_bytes` False: memory is counted and copies take time, but no bytes are written."""

    def __init__(self, capacity: int, cost: CostModel, *, moves_bytes: bool = True, host_lead: int = HOST_LEAD) -> None:
        self.lock = threading.RLock()
        self.cost = cost
        self.moves_bytes = moves_bytes
        self.host_lead = host_lead
        self.host_us = 0.0
        self.ledger = Ledger(capacity)
        self.observe(SimObserver())
        self._streams: list[SimStream] = []
        spec = cost.spec
        self.engines = {
            "d2h": CopyEngine(spec.d2h_gbps, spec.duplex_gbps - spec.h2d_gbps),
            "h2d": CopyEngine(spec.h2d_gbps, spec.duplex_gbps - spec.d2h_gbps),
        }
        self._thread = threading.local()
        self._default = self.make_stream("compute", for_copies=False)

    def observe(self, observer: SimObserver) -> None:
        self.observer = self.ledger.observer = observer
        observer.machine = self

    def current_stream(self) -> SimStream:
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

    def forget_host_memory(self, memory: Tensor) -> None:
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
        """Record an event after all work on `streams`, or on every stream if None."""
        with self.lock:
            self.host_us += self.cost.event_us
            streams = streams or self._streams
            ready_us = max(stream.ready_us for stream in streams)
            return SimEvent(self, max(ready_us, self.host_us), self.observer.passed(streams), timed)

    # --- work on streams, under the lock

    def is_host(self, end: Tensor) -> bool:
        return self.ledger.adopt(end.untyped_storage()).host

    def transfer(self, stream: SimStream, nbytes: int, *, to_host: bool, from_host: bool) -> None:
        """Add the time of a copy to the stream: on a copy engine of the link, or inside device memory."""
        ready = max(stream.ready_us, self.host_us)
        if to_host == from_host:
            stream.ready_us = ready + self.cost.device_copy_us(nbytes)
            return
        engine, other = map(self.engines.__getitem__, ("d2h", "h2d") if to_host else ("h2d", "d2h"))
        engine.forget_before(self.host_us)
        other.forget_before(self.host_us)
        stream.ready_us = engine.schedule(nbytes, ready, other).end_us

    def run_kernel(self, stream: SimStream, price_us: float) -> None:
        """Add a kernel to the stream. The host waits first while the stream has `host_lead` unfinished ones."""
        if len(stream.kernel_ends) == stream.kernel_ends.maxlen:
            self.host_us = max(self.host_us, stream.kernel_ends[0])
        stream.ready_us = max(stream.ready_us, self.host_us) + price_us
        stream.kernel_ends.append(stream.ready_us)

    def access(self, stream: SimStream, tensors: Iterable[Tensor], *, write: bool, label: str) -> int:
        """Report to the observer that `stream` reads or writes these tensors now. Returns the bytes touched."""
        total = 0
        for t in tensors:
            self.observer.access(stream, self.ledger.adopt(t.untyped_storage()), t, write=write, label=label)
            total += touched_bytes(t)
        return total

    def host_access(self, tensors: Iterable[Tensor], *, write: bool, label: str) -> None:
        """Report to the observer that the host accesses these tensors in pinned memory, before all its later launches."""
        for t in tensors:
            self.observer.host_access(self.ledger.adopt(t.untyped_storage()), t, write=write, label=label)
