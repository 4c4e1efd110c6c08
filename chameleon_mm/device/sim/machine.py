"""The works of one simulated GPU: clocks, memory and link, and what each call of a stream or of the host does to them.

    launch:  host_us += its cost;  stream.clock joins what the host has seen;  stream.ready_us = max(ready, host_us) + its time
    access:  extent -> the buffer's shadow, at a tick of the stream             # a race raises here
    copy:    access both ends; time from the engine; poison dst; remember a LateCopy
    pack:    access each source and its place; time of one kernel; poison the places; remember LateCopies

Everything here runs under `lock`; all threads count as one host.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from chameleon_mm.device.checksum import add_by_operators
from chameleon_mm.device.sim.allocator_hook import HeldStorages
from chameleon_mm.device.sim.checks import check_batch, check_copy, packed_parts
from chameleon_mm.device.sim.cost import CopyEngine, CostModel, Span
from chameleon_mm.device.sim.late_copy import LateCopy, all_pending, carry_out, poison
from chameleon_mm.device.sim.memory import Buffer, Ledger, held_by_caller_alone, plain_bytes
from chameleon_mm.device.sim.shadow import HOST, Access, Clock, Extent, extent_of, join
from chameleon_mm.device.sim.stream import SimEvent, SimStream
from chameleon_mm.errors import SimLifetimeError


class Machine:
    """State of a simulated GPU. `check_races` off: no vector clocks, only poison and late copies. `moves_bytes` off: memory is
    counted and copies take their time, and nobody writes a byte."""

    def __init__(self, capacity: int, cost: CostModel, *, check_races: bool, moves_bytes: bool = True) -> None:
        self.lock = threading.RLock()
        self.cost = cost
        self.check_races = check_races
        self._moves_bytes = moves_bytes
        self.host_us = 0.0
        self.held = HeldStorages(self)
        self.ledger = Ledger(
            capacity, lambda actor: (dict(self._streams[actor].clock), dict(self._host_clock)), self.held.reclaim
        )
        self._host_clock: Clock = {HOST: 0}
        self._streams: list[SimStream] = []
        spec = cost.spec
        self._d2h = CopyEngine(spec.d2h_gbps, spec.duplex_gbps - spec.h2d_gbps)
        self._h2d = CopyEngine(spec.h2d_gbps, spec.duplex_gbps - spec.d2h_gbps)

        self._thread = threading.local()
        self._default = self.make_stream("compute", late=False)

    def current_stream(self) -> SimStream:
        """The stream on which the calling thread's operators run."""
        stream: SimStream = getattr(self._thread, "stream", self._default)
        return stream

    def make_current(self, stream: SimStream) -> None:
        with self.lock:
            stream.catch_up()
            stream.late = False  # its operators run in program order, so what it waits for is carried out at once
            self._thread.stream = stream

    def make_stream(self, name: str, *, late: bool) -> SimStream:
        with self.lock:
            stream = SimStream(self, name, len(self._streams), late=late)
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
            join(self._host_clock, event.clock)
            copies, event.copies = event.copies, ()
            carry_out(copies)
            return True

    def host_waits_for(self, stream: SimStream) -> None:
        self.host_us = max(self.host_us, stream.ready_us)
        join(self._host_clock, stream.clock)
        stream.catch_up()

    def synchronize(self) -> None:
        with self.lock:
            self.ledger.settle()
            for stream in self._streams:
                self.host_waits_for(stream)

    def host_memory(self, memory: Tensor) -> None:
        """Note pinned memory: `memory` is all of it."""
        with self.lock:
            self.ledger.adopt(memory.untyped_storage(), HOST, host=True)

    def forget_host_memory(self, memory: Tensor) -> None:
        """Free pinned memory. Raises `SimRaceError` while the device may still be at work on it."""
        with self.lock:
            storage = memory.untyped_storage()
            buffer = self.ledger.find(storage)
            whole = memory.numel() * memory.element_size() == storage.nbytes()
            if buffer is None or buffer.ref() is not storage or not buffer.host or buffer.gone or not whole:
                raise ValueError(
                    f"free_pinned: expected what alloc_pinned of this device returned, whole and once, got a tensor of "
                    f"{memory.numel()} elements"
                )
            if self.check_races:
                everything = Access(Extent(0, buffer.nbytes), True, HOST, 0, "the host, which frees it", reuse=True)
                buffer.shadow.check(everything, self._host_clock)
            buffer.gone = "freed by free_pinned"

    # --- streams

    def begin(self, stream: SimStream) -> None:
        """Order what is launched now after all that the host has seen and done."""
        join(stream.clock, self._host_clock)

    def record(self, stream: SimStream, *, timed: bool) -> SimEvent:
        with self.lock:
            self.host_us += self.cost.event_us
            self.begin(stream)
            return SimEvent(self, max(stream.ready_us, self.host_us), dict(stream.clock), stream.pending, timed)

    def record_all(self) -> SimEvent:
        """Record an event that stands for one on every stream."""
        with self.lock:
            self.host_us += self.cost.event_us
            clock = dict(self._host_clock)
            for stream in self._streams:
                join(clock, stream.clock)
            copies = tuple(all_pending(copy for stream in self._streams for copy in stream.pending))
            ready_us = max(stream.ready_us for stream in self._streams)
            return SimEvent(self, max(ready_us, self.host_us), clock, copies, timed=False)

    def stream_waits(self, stream: SimStream, event: SimEvent) -> None:
        with self.lock:
            self.host_us += self.cost.event_us
            self.begin(stream)
            join(stream.clock, event.clock)
            stream.ready_us = max(stream.ready_us, event.time_us)
            stream.order_after(event.copies)

    def allocate(self, stream: SimStream, nbytes: int) -> Tensor:
        with self.lock:
            self.ledger.settle()
            self.host_us += self.cost.view_us
            self.begin(stream)
            self.ledger.make_room(nbytes)
            buffer = plain_bytes(nbytes)
            self.hand_out(stream, buffer)
            return buffer

    def hand_out(self, stream: SimStream, fresh: Tensor) -> None:
        """Note memory that is handed out with nothing in it yet. It may be a block that `stream` still works on: a write at
        this point of it."""
        storage = fresh.untyped_storage()
        buffer = self.ledger.adopt(storage, stream.actor)
        self.poison(storage)
        self._touch(stream, buffer, Extent(0, buffer.nbytes), write=True, label=f"{stream.name}, which allocated it")

    def poison(self, storage: torch.UntypedStorage) -> None:
        """Fill a storage with poison, where bytes are moved at all."""
        if self._moves_bytes:
            poison(storage)

    def free(self, stream: SimStream, tensor: Tensor) -> None:
        with self.lock:
            self.ledger.settle()
            self.begin(stream)
            stream.catch_up()  # the caller drops the memory now, and all work on this stream comes before that
            buffer = self.ledger.find(tensor.untyped_storage())
            # Where somebody else holds it too, nobody is handed it yet: the ledger checks the last holder's end.
            if buffer is None or buffer.host or not held_by_caller_alone(tensor):
                return
            self._check_reuse(stream, buffer)
            buffer.gone = f"handed back to {stream.name}"
            self.poison(tensor.untyped_storage())

    def resize(self, stream: SimStream, storage: torch.UntypedStorage, nbytes: int) -> None:
        with self.lock:
            self.ledger.settle()
            self.host_us += self.cost.view_us
            self.begin(stream)
            stream.catch_up()
            if not nbytes and (buffer := self.ledger.find(storage)) is not None:
                self._check_reuse(stream, buffer)
            self.ledger.resize(storage, nbytes, stream.actor)
            if nbytes:
                self.poison(storage)

    def _check_reuse(self, stream: SimStream, buffer: Buffer) -> None:
        """Raise `SimRaceError` for an access to `buffer` that is not ordered before what `stream` does with its memory next."""
        if self.check_races:
            label = f"{stream.name}, which was handed it back (the block is reused)"
            everything = Access(Extent(0, buffer.nbytes), True, stream.actor, 0, label, reuse=True)
            buffer.shadow.check(everything, stream.clock)

    # --- work on streams

    def copy(self, stream: SimStream, dst: Tensor, src: Tensor, *, speculative: bool = False) -> None:
        check_copy(dst, src)
        with self.lock:
            self.ledger.settle()
            to_host, from_host = self._direction("copy", dst, src)
            self.host_us += self.cost.copy_us
            self.begin(stream)
            self._copy_pairs(stream, [(dst, src)], to_host, from_host, speculative)

    def copy_batch(self, stream: SimStream, pairs: Sequence[tuple[Tensor, Tensor]], *, speculative: bool = False) -> None:
        check_batch(pairs)
        if not pairs:
            return
        with self.lock:
            self.ledger.settle()
            ways = [self._direction(f"copy_batch: pair {i}", dst, src) for i, (dst, src) in enumerate(pairs)]
            if (other := next((i for i, way in enumerate(ways) if way != ways[0]), None)) is not None:
                raise ValueError(
                    f"copy_batch: expected all pairs to go one way, but pair {other} does not go as pair 0 does: "
                    f"make a batch per direction"
                )
            self.host_us += self.cost.copy_us + self.cost.batched_copy_us * len(pairs)
            self.begin(stream)
            self._copy_pairs(stream, pairs, *ways[0], speculative)

    def pack(self, stream: SimStream, dst: Tensor, sources: Sequence[Tensor], offsets: Sequence[int]) -> None:
        parts = packed_parts("pack", sources, dst, offsets)
        self._move_packed(stream, "pack", list(zip(parts, sources, strict=True)))

    def unpack(self, stream: SimStream, destinations: Sequence[Tensor], src: Tensor, offsets: Sequence[int]) -> None:
        parts = packed_parts("unpack", destinations, src, offsets)
        self._move_packed(stream, "unpack", list(zip(destinations, parts, strict=True)))

    def _move_packed(self, stream: SimStream, what: str, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Run one pack or unpack kernel. On a stream of copies it runs late as they do; on a compute stream in program order,
        as operators do."""
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
            self.begin(stream)
            label = f"{what} of {total} bytes on {stream.name}"
            lates = [(LateCopy(dst, src, label, stream.pending, moves_bytes=self._moves_bytes), dst) for dst, src in pairs]
            for dst, src in pairs:
                self.access(stream, [src], write=False, label=label)
                self.access(stream, [dst], write=True, label=label)
            self.run_kernel(stream, self.cost.device_copy_us(total))
            self._defer(stream, lates)

    def add_checksum(self, stream: SimStream, out: Tensor, src: Tensor) -> None:
        """Run one kernel, on a compute stream, in program order."""
        if stream.late:
            raise ValueError(
                f"checksum: expected a compute stream, got {stream.name}, which is for copies: use current_stream()"
            )
        with self.lock:
            self.ledger.settle()
            if self._adopt(src).host or self._adopt(out).host:
                raise ValueError("checksum: expected buffers in device memory, got one of pinned host memory: copy it")
            self.host_us += self.cost.triton_launch_us
            self.begin(stream)
            label = f"checksum on {stream.name}"
            moved = self.access(stream, [src], write=False, label=label) + self.access(stream, [out], write=True, label=label)
            self.run_kernel(stream, self.cost.device_copy_us(moved // 2))
            with torch._C._DisableTorchDispatch(), torch.no_grad():
                add_by_operators(out.view(torch.int64), src)

    def _adopt(self, end: Tensor) -> Buffer:
        # What was never seen is the device's memory, allocated where torch's operators run: not the copy stream's.
        return self.ledger.adopt(end.untyped_storage(), self.current_stream().actor)

    def _owned(self, end: Tensor) -> Tensor:
        """`end`, or of a view of pinned memory with a storage of its own the same bytes in the storage that owns them: dropping
        such a view frees nothing. Who writes the bytes next too early is found by the accesses to them."""
        storage = end.untyped_storage()
        buffer = self._adopt(end)
        owner = buffer.ref()
        if not buffer.host or owner is None or owner is storage:
            return end
        start = storage.data_ptr() + int(end.storage_offset()) - buffer.address
        with torch._C._DisableTorchDispatch():
            return torch.empty(0, dtype=torch.uint8).set_(owner, start, (end.numel(),), (1,))

    def _direction(self, what: str, dst: Tensor, src: Tensor) -> tuple[bool, bool]:
        to_host, from_host = self._adopt(dst).host, self._adopt(src).host
        if to_host and from_host:
            raise ValueError(f"{what}: expected at least one end in device memory, got two of pinned host memory")
        return to_host, from_host

    def _copy_pairs(
        self, stream: SimStream, pairs: Iterable[tuple[Tensor, Tensor]], to_host: bool, from_host: bool, speculative: bool
    ) -> None:
        direction = "d2h" if to_host else "h2d" if from_host else "d2d"
        lates = []
        for dst, src in pairs:
            label = f"{direction} copy of {src.numel()} bytes on {stream.name}"
            ends = self._owned(dst), self._owned(src)
            late = LateCopy(*ends, label, stream.pending, moves_bytes=self._moves_bytes)
            self.access(stream, [src], write=False, label=label, spoils=late if speculative else None)
            self.access(stream, [dst], write=True, label=label)
            self.transfer(stream, src.numel(), to_host=to_host, from_host=from_host)
            lates.append((late, dst))
        self._defer(stream, lates)

    def _defer(self, stream: SimStream, lates: Iterable[tuple[LateCopy, Tensor]]) -> None:
        """Move the bytes of copies later, or now on a compute stream. Each has its destination beside it; their order is
        open."""
        moving = [(late, dst) for late, dst in lates if dst.numel()]
        if not moving:
            return
        if self._moves_bytes:
            pending = all_pending(copy for other in self._streams for copy in other.pending)
            for _, dst in moving:
                _poison_destination(dst, pending)
        if stream.late:
            stream.pending = tuple(late for late, _ in moving)
        else:
            carry_out(late for late, _ in moving)

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

    def access(
        self, stream: SimStream, tensors: Iterable[Tensor], *, write: bool, label: str, spoils: LateCopy | None = None
    ) -> int:
        """Note that `stream` reads or writes these tensors now. Returns their bytes. Raises `SimRaceError`,
        `SimLifetimeError`."""
        total = 0
        for t in tensors:
            storage = t.untyped_storage()
            buffer = self.ledger.adopt(storage, stream.actor)
            extent = buffer.place(storage, extent_of(t))
            self._touch(stream, buffer, extent, write=write, label=label, spoils=spoils)
            total += min(extent.end - extent.start, t.numel() * t.element_size())
        return total

    def host_access(self, tensors: Iterable[Tensor], *, write: bool, label: str) -> None:
        """Note that the host itself reads or writes these tensors of pinned memory: before all that it launches from now on."""
        for t in tensors:
            storage = t.untyped_storage()
            buffer = self.ledger.adopt(storage, HOST, host=True)
            self._host_clock[HOST] += 1
            access = Access(buffer.place(storage, extent_of(t)), write, HOST, self._host_clock[HOST], label)
            self._record(buffer, access, self._host_clock)

    def _touch(
        self,
        stream: SimStream,
        buffer: Buffer,
        extent: Extent,
        *,
        write: bool,
        label: str,
        spoils: LateCopy | None = None,
    ) -> None:
        if extent.start < extent.end:
            if not buffer.nbytes:
                raise SimLifetimeError(f"{buffer.name}: used by {label} while its storage has no memory")
            self._record(buffer, stream.tick(extent, write=write, label=label, spoils=spoils), stream.clock)

    def _record(self, buffer: Buffer, access: Access, clock: Clock) -> None:
        if buffer.gone and (self.check_races or buffer.host):
            raise SimLifetimeError(
                f"{buffer.name}: used by {access.label} after it was {buffer.gone}; "
                f"expected no access once memory is given back"
            )
        if self.check_races:
            buffer.shadow.touch(access, clock)


def _poison_destination(dst: Tensor, pending: Iterable[LateCopy]) -> None:
    """Fill the destination with poison until the copy is done. Not where an earlier copy has yet to read or write there."""
    storage, start = dst.untyped_storage(), int(dst.storage_offset())
    if not any(copy.touches(storage.data_ptr() + start, dst.numel()) for copy in pending):
        poison(storage, start, dst.numel())
