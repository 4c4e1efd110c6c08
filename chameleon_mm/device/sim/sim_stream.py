"""Streams and events of the simulated device: the time of all work is fixed when it is issued.

copy(dst, src):  when it runs is known now (engine, ready time); the observer moves the bytes
record():        the stream's time, and the observer's mark
wait(event):     times joined
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chameleon_mm.device.checksummer import check_sum
from chameleon_mm.device.protocols import Event

if TYPE_CHECKING:
    from chameleon_mm.device.sim.machine import Machine


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
