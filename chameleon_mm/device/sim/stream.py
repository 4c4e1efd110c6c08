"""Streams and events of the simulated device: times fixed at once, bytes moved as late as the ordering allows.

    copy(dst, src):  when it runs is known now (engine, ready time); the bytes move when something ordered after must see them
    record():        the stream's time, its vector clock, and which copies are still to be carried out
    wait(event):     time and clock joined; a compute stream carries the copies out, a copy stream only remembers them
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chameleon_mm.device.protocols import Event
from chameleon_mm.device.sim.memory import poison
from chameleon_mm.device.sim.shadow import Access, Clock
from chameleon_mm.errors import SimLifetimeError

if TYPE_CHECKING:
    from chameleon_mm.device.sim.device import SimDevice


class LateCopy:
    """A copy that was issued and not yet carried out. Holds both ends weakly: dropping one too early is an error, not luck."""

    __slots__ = ("before", "done", "dst", "dst_start", "label", "nbytes", "src", "src_start")

    def __init__(self, dst: Tensor, src: Tensor, label: str, before: tuple[LateCopy, ...]) -> None:
        self.dst = weakref.ref(dst.untyped_storage())
        self.src = weakref.ref(src.untyped_storage())
        self.dst_start = dst.storage_offset()
        self.src_start = src.storage_offset()
        self.nbytes = src.numel()
        self.label = label
        self.before = before
        self.done = False

    def reads_or_writes(self, storage: torch.UntypedStorage, start: int, end: int) -> bool:
        for ref, own_start in ((self.dst, self.dst_start), (self.src, self.src_start)):
            if ref() is storage and own_start < end and start < own_start + self.nbytes:
                return True
        return False

    def move(self) -> None:
        dst, src = self.dst(), self.src()
        self.done, self.before = True, ()
        if dst is None or src is None:
            end = "source" if src is None else "destination"
            raise SimLifetimeError(
                f"{self.label}: its {end} was dropped while the copy was pending; expected a reference held until an event "
                f"after the copy is waited on or complete"
            )
        ctypes.memmove(dst.data_ptr() + self.dst_start, src.data_ptr() + self.src_start, self.nbytes)


def carry_out(copies: Iterable[LateCopy]) -> None:
    """Move the bytes of `copies`, and first of everything each was ordered after."""
    stack = [copy for copy in copies if not copy.done]
    while stack:
        copy = stack[-1]
        missing = [earlier for earlier in copy.before if not earlier.done]
        if missing:
            stack.extend(missing)
            continue
        stack.pop()
        if not copy.done:
            copy.move()


class SimEvent:
    """A point in a simulated stream's work."""

    __slots__ = ("_device", "clock", "copies", "time_us", "timed")

    def __init__(self, device: SimDevice, time_us: float, clock: Clock, copies: tuple[LateCopy, ...], timed: bool) -> None:
        self._device = device
        self.time_us = time_us
        self.clock = clock
        self.copies = copies
        self.timed = timed

    def query(self) -> bool:
        return self._device.host_sees(self, wait=False)

    def synchronize(self) -> None:
        self._device.host_sees(self, wait=True)

    def elapsed_us(self, since: Event) -> float:
        if not isinstance(since, SimEvent) or not (self.timed and since.timed):
            raise ValueError("elapsed_us: expected two timed events of the simulator; record them with timed=True")
        if not (self.query() and since.query()):
            raise ValueError("elapsed_us: expected two complete events; call synchronize() on the later one first")
        return self.time_us - since.time_us


class SimStream:
    """A queue of simulated work. `late` streams carry copies out as late as legal; compute streams work in program order."""

    def __init__(self, device: SimDevice, name: str, actor: int, *, late: bool) -> None:
        self._device = device
        self._name = name
        self.actor = actor
        self.late = late
        self.clock: Clock = {actor: 0}
        self.ready_us = 0.0
        self.pending: tuple[LateCopy, ...] = ()
        """Copies that this stream's next work is ordered after and that may not have been carried out."""

    @property
    def name(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return f"<SimStream {self._name} at {self.ready_us:.1f} us>"

    def alloc(self, nbytes: int) -> Tensor:
        return self._device.allocate(self, nbytes)

    def free(self, buffer: Tensor) -> None:
        self._device.hand_back(self, buffer)

    def copy(self, dst: Tensor, src: Tensor) -> None:
        self._device.copy(self, dst, src)

    def record(self, *, timed: bool = False) -> SimEvent:
        with self._device.lock:
            self._device.host_us += self._device.cost.event_us
            self.begin()
            return SimEvent(self._device, max(self.ready_us, self._device.host_us), dict(self.clock), self.pending, timed)

    def wait(self, event: Event) -> None:
        if not isinstance(event, SimEvent):
            raise ValueError(f"wait: expected an event of the simulator, got {type(event).__name__}")
        self._device.stream_waits(self, event)

    def begin(self) -> None:
        """Work issued now comes after all that the host has seen."""
        self._device.join_host(self.clock)

    def tick(self, start: int, end: int, *, write: bool, label: str) -> Access:
        """This stream's next access."""
        self.clock[self.actor] += 1
        return Access(start, end, write, self.actor, self.clock[self.actor], label)

    def order_after(self, copies: tuple[LateCopy, ...]) -> None:
        if self.late:
            live = {id(copy): copy for copy in (*self.pending, *copies) if not copy.done}
            self.pending = tuple(live.values())
        else:
            carry_out(copies)


def poison_unless_pending(tensor: Tensor, pending: Iterable[LateCopy]) -> None:
    """Fill the destination of a copy that was just issued: its content is undefined until the copy is done.

    Not where an earlier copy, ordered before this one, has yet to read or write the same bytes.
    """
    storage, start = tensor.untyped_storage(), tensor.storage_offset()
    if not any(not copy.done and copy.reads_or_writes(storage, start, start + tensor.numel()) for copy in pending):
        poison(storage, start, tensor.numel())
