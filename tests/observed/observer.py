"""Observer that keeps vector clocks, moves the bytes of copies as late as legal, and fills what holds nothing with poison.

launch:  the stream's clock joins what the host has seen
access:  extent -> the buffer's shadow, at a tick of the stream             # a race raises here
move:    access both ends; poison the destinations; remember LateCopies
mark:    clock and pending copies; a compute stream that waits carries them out, a stream of copies only remembers them
death:   the clocks of that moment; settled() checks it as a write by its owner
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from chameleon_mm.device.sim import SimObserver, SimStream
from chameleon_mm.device.sim.machine import Buffer, plain_bytes
from tests.observed.apart import check_apart
from tests.observed.errors import SimLifetimeError, SimRaceError
from tests.observed.late_copy import LateCopy, all_pending, carry_out, poison
from tests.observed.shadow import HOST, Access, Clock, Extent, Shadow, extent_of, join

_POISON_HOST_BELOW = 256 << 20
"""Size below which host allocations are filled with poison. Larger ones stay untouched, so that a simulated 64 GiB pool costs
only its used part."""


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _unseen(method: Callable[Concatenate[StrictObserver, _P], _R]) -> Callable[Concatenate[StrictObserver, _P], _R]:
    """Wrap `method` to run without torch function modes: one of the library's would take its calls for uses by the model."""

    @functools.wraps(method)
    def run(self: StrictObserver, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch._C.DisableTorchFunction():
            return method(self, *args, **kwargs)

    return run


class _Queue:
    """State of a stream: what its next work is ordered after, and which of these copies may still be pending."""

    __slots__ = ("clock", "pending")

    def __init__(self, stream: SimStream) -> None:
        self.clock: Clock = {stream: 0}
        self.pending: tuple[LateCopy, ...] = ()

    def catch_up(self) -> None:
        """Carry out all that was issued on this stream or that it waited for."""
        pending, self.pending = self.pending, ()
        carry_out(pending)


class _Mark:
    """A point in the work of some streams."""

    __slots__ = ("clock", "copies")

    def __init__(self, clock: Clock, copies: tuple[LateCopy, ...]) -> None:
        self.clock = clock
        self.copies = copies


class StrictObserver(SimObserver):
    """Observer that accuses. `check_races` off: no vector clocks, only poison and late copies, so that a missing wait shows as
    wrong bytes."""

    def __init__(self, *, check_races: bool = True) -> None:
        self._check_races = check_races
        self._host_clock: Clock = {HOST: 0}
        self._queues: dict[SimStream, _Queue] = {}
        self._released: deque[tuple[Shadow, list[Access], Clock, Clock]] = deque()
        self._serial = 0

    # --- streams and the host

    def queue(self, stream: SimStream) -> _Queue:
        """Queue of the stream."""
        found = self._queues.get(stream)
        if found is None:
            found = self._queues[stream] = _Queue(stream)
        return found

    def launch(self, stream: SimStream) -> None:
        queue = self.queue(stream)
        join(queue.clock, self._host_clock)
        if queue.pending and not stream.for_copies:  # it was made a stream of operators, which run in program order
            queue.catch_up()

    def passed(self, streams: Sequence[SimStream]) -> _Mark:
        clock = dict(self._host_clock)
        for stream in streams:
            join(clock, self.queue(stream).clock)
        if len(streams) == 1:
            return _Mark(clock, self.queue(streams[0]).pending)
        return _Mark(clock, tuple(all_pending(copy for stream in streams for copy in self.queue(stream).pending)))

    def stream_waits(self, stream: SimStream, mark: object) -> None:
        assert isinstance(mark, _Mark)
        queue = self.queue(stream)
        join(queue.clock, mark.clock)
        if stream.for_copies:
            live = {id(copy): copy for copy in (*queue.pending, *mark.copies) if not copy.done}
            queue.pending = tuple(live.values())
        else:
            carry_out(mark.copies)

    def host_waits(self, mark: object) -> None:
        assert isinstance(mark, _Mark)
        join(self._host_clock, mark.clock)
        copies, mark.copies = mark.copies, ()
        carry_out(copies)

    # --- memory

    def seen(self, buffer: Buffer) -> None:
        self._serial += 1
        owner = HOST if buffer.host else self.machine.current_stream()  # where torch's operators run: not the copy stream's
        buffer.note = Shadow(f"{'pinned memory' if buffer.host else 'buffer'} #{self._serial}", owner)
        if buffer.host and buffer.nbytes < _POISON_HOST_BELOW and (storage := buffer.ref()) is not None:
            self._poison(storage)

    def allocated(self, stream: SimStream, storage: torch.UntypedStorage) -> None:
        buffer = self.machine.ledger.adopt(storage)
        shadow = self._shadow(buffer)
        if not shadow.accesses:
            shadow.owner = stream
        self._poison(storage)
        self._touch(stream, buffer, Extent(0, buffer.nbytes), write=True, label=f"{stream.name}, which allocated it")

    @_unseen
    def freed(self, stream: SimStream, tensor: Tensor) -> None:
        self.queue(stream).catch_up()  # the caller drops the memory now, and all work on this stream comes before that
        buffer = self.machine.ledger.find(tensor.untyped_storage())
        # If another object holds the memory, it has no new owner yet: only the last holder's end is checked.
        if buffer is None or buffer.host or not held_by_caller_alone(tensor):
            return
        self._check_reuse(stream, buffer)
        self._shadow(buffer).gone = f"handed back to {stream.name}"
        self._poison(tensor.untyped_storage())

    def emptied(self, stream: SimStream, storage: torch.UntypedStorage) -> None:
        self.queue(stream).catch_up()
        if (buffer := self.machine.ledger.find(storage)) is not None:
            self._check_reuse(stream, buffer)

    def host_freed(self, buffer: Buffer) -> None:
        if self._check_races:
            everything = Access(Extent(0, buffer.nbytes), True, HOST, 0, "the host, which frees it", reuse=True)
            self._shadow(buffer).check(everything, self._host_clock)
        self._shadow(buffer).gone = "freed by free_pinned"

    def released(self, buffer: Buffer) -> None:
        shadow: Shadow | None = buffer.note
        if shadow is None:
            return
        accesses, shadow.accesses = shadow.accesses, []
        # Host memory is no stream's; a copy that loses it says so itself.
        if self._check_races and not buffer.host and any(access.actor != shadow.owner for access in accesses):
            clock = dict(self._queues[shadow.owner].clock) if shadow.owner in self._queues else {}
            self._released.append((shadow, accesses, clock, dict(self._host_clock)))

    def settled(self) -> None:
        error: SimRaceError | None = None
        while self._released:
            shadow, accesses, clock, host = self._released.popleft()
            join(clock, host)  # work that the host had seen complete precedes all that it launches from then on
            end = max(access.extent.end for access in accesses)
            label = "its owner, as it was freed (the block is reused)"
            before = Shadow(shadow.name, shadow.owner)
            before.accesses = accesses
            try:
                before.check(Access(Extent(0, end), True, shadow.owner, 0, label, reuse=True), clock)
            except SimRaceError as race:
                error = error or race
        if error is not None:
            raise error

    def _check_reuse(self, stream: SimStream, buffer: Buffer) -> None:
        """Raise `SimRaceError` for an access to `buffer` that is not ordered before the next use of its memory by `stream`."""
        if self._check_races:
            label = f"{stream.name}, which was handed it back (the block is reused)"
            everything = Access(Extent(0, buffer.nbytes), True, stream, 0, label, reuse=True)
            self._shadow(buffer).check(everything, self.queue(stream).clock)

    def _shadow(self, buffer: Buffer) -> Shadow:
        if buffer.note is None:
            self.seen(buffer)
        shadow: Shadow = buffer.note
        return shadow

    def _poison(self, storage: torch.UntypedStorage) -> None:
        if self.machine.moves_bytes:
            poison(storage)

    # --- accesses

    @_unseen
    def access(self, stream: SimStream, buffer: Buffer, t: Tensor, *, write: bool, label: str) -> None:
        self._touch(stream, buffer, _place(buffer, t), write=write, label=label)

    @_unseen
    def host_access(self, buffer: Buffer, t: Tensor, *, write: bool, label: str) -> None:
        self._host_clock[HOST] += 1
        access = Access(_place(buffer, t), write, HOST, self._host_clock[HOST], label)
        self._record(buffer, access, self._host_clock)

    def _touch(
        self, stream: SimStream, buffer: Buffer, extent: Extent, *, write: bool, label: str, spoils: LateCopy | None = None
    ) -> None:
        if extent.start < extent.end:
            if not buffer.nbytes:
                raise SimLifetimeError(f"{self._shadow(buffer).name}: used by {label} while its storage has no memory")
            clock = self.queue(stream).clock
            clock[stream] += 1
            self._record(buffer, Access(extent, write, stream, clock[stream], label, spoils=spoils), clock)

    def _record(self, buffer: Buffer, access: Access, clock: Clock) -> None:
        shadow = self._shadow(buffer)
        if shadow.gone and (self._check_races or buffer.host):
            raise SimLifetimeError(
                f"{shadow.name}: used by {access.label} after it was {shadow.gone}; "
                f"expected no access once memory is given back"
            )
        if self._check_races:
            shadow.touch(access, clock)

    # --- moves

    @_unseen
    def check_move(self, what: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        check_apart(what, pairs)

    @_unseen
    def move(self, stream: SimStream, what: str, pairs: Sequence[tuple[Tensor, Tensor]], *, speculative: bool) -> None:
        queue, moves_bytes = self.queue(stream), self.machine.moves_bytes
        moving = []
        for dst, src in pairs:
            label = f"{what} of {src.numel()} bytes on {stream.name}"
            late = LateCopy(self._owned(dst), self._owned(src), label, queue.pending, moves_bytes=moves_bytes)
            for t, write in ((src, False), (dst, True)):
                buffer = self.machine.ledger.adopt(t.untyped_storage())
                spoils = late if speculative and not write else None
                self._touch(stream, buffer, _place(buffer, t), write=write, label=label, spoils=spoils)
            if dst.numel():
                moving.append((late, dst))
        if not moving:
            return
        if moves_bytes:
            pending = all_pending(copy for other in self._queues.values() for copy in other.pending)
            for _, dst in moving:
                _poison_destination(dst, pending)
        if stream.for_copies:
            queue.pending = tuple(late for late, _ in moving)
        else:
            carry_out(late for late, _ in moving)

    def _owned(self, end: Tensor) -> Tensor:
        """`end`, or of a view of pinned memory with a storage of its own the same bytes in the storage that owns them: dropping
        such a view frees nothing. A write of the bytes that comes too early is found by the accesses to them."""
        storage = end.untyped_storage()
        buffer = self.machine.ledger.adopt(storage)
        owner = buffer.ref()
        if not buffer.host or owner is None or owner is storage:
            return end
        start = storage.data_ptr() + int(end.storage_offset()) - buffer.address
        with torch._C._DisableTorchDispatch():
            return torch.empty(0, dtype=torch.uint8).set_(owner, start, (end.numel(),), (1,))


def _place(buffer: Buffer, t: Tensor) -> Extent:
    """The bytes of the buffer that `t`, whose storage is the buffer's or lies within it, covers."""
    extent, storage = extent_of(t), t.untyped_storage()
    shift = storage.data_ptr() - buffer.address if buffer.host and buffer.ref() is not storage else 0
    return extent._replace(start=extent.start + shift, end=extent.end + shift) if shift else extent


def _poison_destination(dst: Tensor, pending: Iterable[LateCopy]) -> None:
    """Fill the destination with poison until the copy is done. Not where an earlier copy has yet to read or write there."""
    storage, start = dst.untyped_storage(), int(dst.storage_offset())
    if not any(copy.touches(storage.data_ptr() + start, dst.numel()) for copy in pending):
        poison(storage, start, dst.numel())


def held_by_caller_alone(buffer: Tensor) -> bool:
    """True if only `buffer`, and at most one more reference to its storage, keeps its memory.

    Return False when unsure. The function's own references are measured, not assumed: they differ between Python versions.
    """
    tensors, references = _holders(buffer)
    least_tensors, least_references = _holders(plain_bytes(1))
    return tensors == least_tensors and references <= least_references + 1


def _holders(buffer: Tensor) -> tuple[int, int]:
    """Numbers of the tensors (and the Python object) that hold the storage, and of the Python references to that object."""
    storage = buffer.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)
