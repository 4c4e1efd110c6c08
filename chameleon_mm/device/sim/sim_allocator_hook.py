"""The hook in the simulated allocator: storages that it may reclaim when an allocation does not fit.

    held = machine.held                          # of all sessions, oldest first
    held.reclaim(nbytes)                         # while so many more do not fit: those of the current stream

It does as the C++ helper for CUDA does, and knows what that is not told: how much is wanted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from chameleon_mm.device.holders import held_alone
from chameleon_mm.device.sim.sim_stream import SimEvent, SimStream

if TYPE_CHECKING:
    from chameleon_mm.device.protocols import Event, Stream
    from chameleon_mm.device.sim.machine import Machine


class SimHeldStorage:
    """A storage that the simulated allocator may reclaim."""

    def __init__(
        self, hook: SimAllocatorHook, storage: torch.UntypedStorage, done: SimEvent, owner: SimStream, tensors: int
    ) -> None:
        self.hook = hook
        self._storage = storage
        self.reclaimed = False
        self._withdrawn = False
        self._done = done
        self._tensors = tensors
        self.owner = owner

    def withdraw(self) -> bool:
        machine = self.hook.machine
        with machine.lock:
            if not (self.reclaimed or self._withdrawn):
                machine.held.entries.remove(self)
            self._withdrawn = True
            return not self.reclaimed

    def reclaim(self) -> bool:
        """Reclaim its memory behind its copy, unless somebody else refers to the storage. Returns whether it went."""
        storage = self._storage
        if not (held_alone(storage, self._tensors, attributes=2) and storage.resizable()) or self._withdrawn:
            return False  # a finaliser may have withdrawn it
        self.reclaimed = True
        if not self._done.query():
            self.owner.wait(self._done)  # orders the memory's next owner, on the same stream, after the copy
        self.owner.resize(storage, 0)
        self.hook.reclaimed += 1
        return True


class HeldStorages:
    """Storages that the simulated allocator may reclaim, oldest first. Used under the machine's lock."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.entries: list[SimHeldStorage] = []

    def reclaim(self, nbytes: int) -> None:
        """Reclaim, oldest first, what belongs to the current stream, while `nbytes` more pass the capacity or a limit."""
        ledger, stream = self._machine.ledger, self._machine.current_stream()
        for held in tuple(self.entries):
            fits = ledger.allocated_bytes + nbytes <= min(ledger.capacity, held.hook.limit_bytes)
            if not fits and held.owner is stream and held.reclaim():
                self.entries.remove(held)
                ledger.settle()  # what it freed


class SimAllocatorHook:
    """Hook in the simulated allocator, for one session."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.reclaimed = 0
        self.limit_bytes = machine.ledger.capacity

    def hold(self, storage: torch.UntypedStorage, done: Event, owner: Stream, tensors: int) -> SimHeldStorage:
        """Hold as `AllocatorHook.hold` does."""
        if not isinstance(done, SimEvent) or not isinstance(owner, SimStream):
            raise TypeError(f"hold: expected a simulated event and stream, got {type(done).__name__}, {type(owner).__name__}")
        held = SimHeldStorage(self, storage, done, owner, tensors)
        with self.machine.lock:
            self.machine.held.entries.append(held)
        return held

    def set_limits(self, limit_bytes: int, growth_bytes: int | None) -> None:
        """Set the limit. The growth is of no use here: an allocation says what it wants."""
        self.limit_bytes = limit_bytes
