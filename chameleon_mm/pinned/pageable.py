"""Blocks of ordinary memory, for where nothing more can be pinned: slower to copy, never wrong.

    memory = source.allocate(nbytes)            # PageableSource
    ledger.add(serial, memory)                  # PageableLedger: held for the PageableBlock of that serial number
    ledger.note_released(serial, events)        # held until the device is done with it
    ledger.drop_complete()                      # dropped

The device may read and write pageable memory after the host went on, as it does pinned memory: a block's last reference may go
before its last event is complete, so somebody else has to hold the memory until then.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chameleon_mm.device.protocols import Device, Event
from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.pinned.block import PinnedBlock, Ticket
from chameleon_mm.pinned.host_memory import AvailableMemory
from chameleon_mm.units import format_size

_NOTHING = torch.empty(0, dtype=torch.uint8)


class PageableBlock(PinnedBlock):
    """A block of a `PinnedPool` whose memory is not pinned: a copy to or from it may keep the host waiting."""

    __slots__ = ()

    @property
    def pageable(self) -> bool:
        return True

    def _return(self, ticket: Ticket, events: tuple[Event, ...]) -> None:
        super()._return(ticket, events)
        self._memory = _NOTHING  # the ledger's alone now: a released block that somebody still holds must not keep it


class PageableLedger:
    """The pageable memory of one pool. Not thread-safe: the pool's lock guards it."""

    def __init__(self) -> None:
        self._live: dict[int, Tensor] = {}  # serial -> memory
        self._ending: list[tuple[Tensor, tuple[Event, ...]]] = []
        self.nbytes = 0
        """Bytes held now: live blocks, and those whose last event was not complete when the ledger looked last."""
        self.peak_bytes = 0

    def __contains__(self, serial: int) -> bool:
        return serial in self._live

    @property
    def num_live(self) -> int:
        return len(self._live)

    def live_sizes(self) -> list[int]:
        """Bytes of each live block."""
        return [memory.numel() for memory in self._live.values()]

    @property
    def holds_memory(self) -> bool:
        return bool(self._live or self._ending)

    def add(self, serial: int, memory: Tensor) -> None:
        """Hold `memory` for the block of that serial number."""
        self.drop_complete()
        self._live[serial] = memory
        self.nbytes += memory.numel()
        self.peak_bytes = max(self.peak_bytes, self.nbytes)

    def note_released(self, serial: int, events: tuple[Event, ...]) -> None:
        """Note that the block was released: its memory stays until `events` are complete."""
        memory = self._live.pop(serial)
        if events:
            self._ending.append((memory, events))
        else:
            self.nbytes -= memory.numel()

    def drop_complete(self) -> None:
        """Free the memory of released blocks that the device is done with. The host does not wait."""
        kept = [(memory, events) for memory, events in self._ending if not all(event.query() for event in events)]
        self.nbytes += sum(memory.numel() for memory, _ in kept) - sum(memory.numel() for memory, _ in self._ending)
        self._ending = kept

    def ending(self) -> list[Event]:
        """Events that the memory of released blocks is held for. Once they are complete, `drop_complete` frees all of it."""
        return [event for _, events in self._ending for event in events]

    def free_all(self) -> None:
        """Free everything. All device work on it must be complete."""
        self._live.clear()
        self._ending.clear()
        self.nbytes = 0


class PageableSource:
    """Ordinary memory from `device`, no more than the machine and its control groups leave. Thread-safe."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory = AvailableMemory()

    def allocate(self, nbytes: int) -> Tensor:
        """A flat uint8 tensor of `nbytes`. Raises `HostMemoryExhausted`.

        Where nothing says how much is left, the device alone decides.
        """
        available = self._memory.read(taking=nbytes)
        if 0 < available < nbytes:
            raise HostMemoryExhausted(
                f"pageable memory: asked for {nbytes} bytes, but {format_size(available)} of host memory are available; "
                f"release blocks, ask for less, or give the process more memory"
            )
        # It outlives the mode it is born in, and a tensor born under inference_mode cannot be written outside of it.
        with torch.inference_mode(mode=False):
            return self._device.alloc_pageable(nbytes)
