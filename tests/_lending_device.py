"""Simulated GPU whose allocator reclaims storages that sessions lend to it, as a GPU's does with the C++ helper.

    device = LendingDevice(...)                  # a SimDevice with an allocator hook
    device.held                                  # of all sessions, oldest first
    device.held.reclaim(nbytes)                  # while so many more do not fit: those of the current stream

It does as the C++ helper for CUDA does, and knows what that is not told: how much is wanted.
"""

from __future__ import annotations

from typing import Any

import torch

from chameleon_mm.device.holders import held_alone
from chameleon_mm.device.protocols import Event, Stream
from chameleon_mm.device.sim import SimDevice, SimEvent, SimStream
from chameleon_mm.device.sim.machine import Machine


class SimHeldStorage:
    """A storage that the simulated allocator may reclaim."""

    def __init__(
        self, hook: SimAllocatorHook, storage: torch.UntypedStorage, done: SimEvent, owner: SimStream, tensors: int
    ) -> None:
        self.hook = hook
        self.storage = storage
        self.reclaimed = False
        self._withdrawn = False
        self._done = done
        self._tensors = tensors
        self.owner = owner

    def withdraw(self) -> bool:
        machine = self.hook.machine
        with machine.lock:
            if not (self.reclaimed or self._withdrawn):
                self.hook.held.entries.remove(self)
            self._withdrawn = True
            return not self.reclaimed

    def reclaim(self) -> bool:
        """Reclaim the memory after its copy, unless another object refers to the storage. Return True if it was reclaimed."""
        if not (held_alone(self, self._tensors, more_attributes=1) and self.storage.resizable()) or self._withdrawn:
            return False  # a finaliser may have withdrawn it
        self.reclaimed = True
        if not self._done.query():
            self.owner.wait(self._done)  # orders the memory's next owner, on the same stream, after the copy
        self.owner.resize(self.storage, 0)
        self.hook.reclaimed += 1
        return True


class HeldStorages:
    """Storages that the simulated allocator may reclaim, oldest first. Used under the machine's lock."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.entries: list[SimHeldStorage] = []

    def reclaim(self, nbytes: int) -> None:
        """Reclaim loans of the current stream, oldest first, while `nbytes` more exceed the capacity or a limit."""
        ledger, stream = self._machine.ledger, self._machine.current_stream()
        for held in tuple(self.entries):
            fits = ledger.allocated_bytes + nbytes <= min(ledger.capacity, held.hook.limit_bytes)
            if not fits and held.owner is stream and held.reclaim():
                self.entries.remove(held)
                ledger.settle()  # what it freed


class SimAllocatorHook:
    """Hook in the simulated allocator, for one session."""

    def __init__(self, machine: Machine, held: HeldStorages) -> None:
        self.machine = machine
        self.held = held
        self.reclaimed = 0
        self.limit_bytes = machine.ledger.capacity

    def hold(self, storage: torch.UntypedStorage, done: Event, owner: Stream, tensors: int) -> SimHeldStorage:
        """Hold as `AllocatorHook.hold` does."""
        assert isinstance(done, SimEvent)
        assert isinstance(owner, SimStream)
        held = SimHeldStorage(self, storage, done, owner, tensors)
        with self.machine.lock:
            self.held.entries.append(held)
        return held

    def set_limits(self, limit_bytes: int, growth_bytes: int | None) -> None:
        """Set the limit. The growth is not needed here: an allocation states its bytes."""
        self.limit_bytes = limit_bytes


class GreedyHook(SimAllocatorHook):
    """Reclaim all loans at the next allocation."""

    def __init__(self, machine: Machine, held: HeldStorages) -> None:
        super().__init__(machine, held)
        self.limit_bytes = 0

    def set_limits(self, limit_bytes: int, growth_bytes: int | None) -> None:
        pass


class LendingDevice(SimDevice):
    """A simulated GPU to whose allocator storages may be lent, as `SimDevice` takes its arguments."""

    hook = SimAllocatorHook

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held = HeldStorages(self._machine)
        ledger = self._machine.ledger
        make_room = ledger.make_room

        def reclaiming(nbytes: int) -> None:
            if nbytes:
                self.held.reclaim(nbytes)
            make_room(nbytes)

        ledger.make_room = reclaiming  # type: ignore[method-assign]  # of this ledger alone

    def allocator_hook(self) -> SimAllocatorHook:
        return self.hook(self._machine, self.held)


class GreedyDevice(LendingDevice):
    """A simulated GPU whose allocator reclaims all that it may, whether memory is short or not."""

    hook = GreedyHook
