"""Streams and events of the simulated device: times fixed at once, bytes moved as late as the ordering allows.

copy(dst, src):  when it runs is known now (engine, ready time); the bytes move when something ordered after must see them
record():        the stream's time, its vector clock, and which copies are still to be carried out
wait(event):     time and clock joined; a compute stream carries the copies out, a copy stream only remembers them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chameleon_mm.device.checksum import check_sum
from chameleon_mm.device.protocols import Event
from chameleon_mm.device.sim.late_copy import LateCopy, carry_out
from chameleon_mm.device.sim.shadow import Access, Clock, Extent

if TYPE_CHECKING:
    from chameleon_mm.device.sim.machine import Machine


class SimEvent:
    """A point in a simulated stream's work: its virtual time, what it is ordered after, which copies that includes."""

    __slots__ = ("clock", "copies", "machine", "time_us", "timed")

    def __init__(self, machine: Machine, time_us: float, clock: Clock, copies: tuple[LateCopy, ...], timed: bool) -> None:
        self.machine = machine
        self.time_us = time_us
        self.clock = clock
        self.copies = copies
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
    """A queue of simulated work. `late` streams carry copies out as late as legal; compute streams work in program order."""

    __slots__ = ("_machine", "actor", "clock", "late", "name", "pending", "ready_us")

    def __init__(self, machine: Machine, name: str, actor: int, *, late: bool) -> None:
        self._machine = machine
        self.name = name
        self.actor = actor
        self.late = late
        self.clock: Clock = {actor: 0}
        self.ready_us = 0.0
        self.pending: tuple[LateCopy, ...] = ()
        """Copies that this stream's next work is ordered after and that may not have been carried out."""

    def __repr__(self) -> str:
        return f"<SimStream {self.name} at {self.ready_us:.1f} us>"

    def alloc(self, nbytes: int) -> Tensor:
        """Allocate as `Stream.alloc` does, filled with poison; other streams must be ordered after this point before they touch
        it."""
        return self._machine.allocate(self, nbytes)

    def free(self, buffer: Tensor) -> None:
        """Free as `Stream.free` does. Where nobody else holds the memory, raises `SimRaceError` for an access that is not
        ordered before; whoever uses it in spite of this gets poison, or `SimLifetimeError`. Else the last holder's end is what
        is checked."""
        self._machine.free(self, buffer)

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Resize as `Stream.resize` does; what is allocated is filled with poison. Raises `SimRaceError` for an access that is
        not ordered before."""
        self._machine.resize(self, storage, nbytes)

    def copy(self, dst: Tensor, src: Tensor, *, speculative: bool = False) -> None:
        """Copy as `Stream.copy` does. Raises `ValueError` also for ends that overlap or both lie in host memory,
        `SimRaceError`. A speculative copy whose source an operator writes meanwhile delivers poison where it was written."""
        self._machine.copy(self, dst, src, speculative=speculative)

    def copy_batch(self, pairs: Sequence[tuple[Tensor, Tensor]], *, speculative: bool = False) -> None:
        """Copy as `Stream.copy_batch` does. The host pays for one call and a little for each copy; on the engine each copy
        takes what it takes alone, which is conservative. Raises as `copy` does, and `ValueError` for pairs that share bytes."""
        self._machine.copy_batch(self, pairs, speculative=speculative)

    def pack(self, dst: Tensor, sources: Sequence[Tensor], offsets: Sequence[int]) -> None:
        """Pack as `Stream.pack` does, for one launch and the bytes' way through device memory. Raises `ValueError` also for
        host memory and for places that share bytes, `SimRaceError`."""
        self._machine.pack(self, dst, sources, offsets)

    def unpack(self, destinations: Sequence[Tensor], src: Tensor, offsets: Sequence[int]) -> None:
        """Unpack as `Stream.unpack` does, priced and checked as `pack` is."""
        self._machine.unpack(self, destinations, src, offsets)

    def add_checksum(self, out: Tensor, src: Tensor) -> None:
        """Add as `Stream.add_checksum` does, for one launch and one reading of the bytes. Raises `ValueError` also for host
        memory and on a stream of copies, `SimRaceError`."""
        check_sum(out, src, torch.device("cpu"))
        self._machine.add_checksum(self, out, src)

    def record(self, *, timed: bool = False) -> SimEvent:
        """Record as `Stream.record` does."""
        return self._machine.record(self, timed=timed)

    def wait(self, event: Event) -> None:
        """Wait as `Stream.wait` does. Raises `TypeError` for another kind's event, `ValueError` for another simulated
        device's."""
        if not isinstance(event, SimEvent):
            raise TypeError(f"wait: expected an event of the simulator, got {type(event).__name__}: use one device throughout")
        if event.machine is not self._machine:
            raise ValueError("wait: expected an event of this simulated device, got another one's: use one device throughout")
        self._machine.stream_waits(self, event)

    # --- what the machine asks

    def tick(self, extent: Extent, *, write: bool, label: str, spoils: LateCopy | None = None) -> Access:
        """Number of this stream's next access."""
        self.clock[self.actor] += 1
        return Access(extent, write, self.actor, self.clock[self.actor], label, spoils=spoils)

    def order_after(self, copies: tuple[LateCopy, ...]) -> None:
        """Order what this stream does next after the moves of `copies`."""
        if self.late:
            live = {id(copy): copy for copy in (*self.pending, *copies) if not copy.done}
            self.pending = tuple(live.values())
        else:
            carry_out(copies)

    def catch_up(self) -> None:
        """Carry out all that was issued on this stream or that it waited for."""
        pending, self.pending = self.pending, ()
        carry_out(pending)
