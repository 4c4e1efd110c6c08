"""Every storage that the simulated device has seen, by weak reference.

buffer = ledger.adopt(storage)             # counted as allocated until the storage dies
... storage dies -> its weak reference's callback queues the death
ledger.settle() -> bytes subtracted
"""

from __future__ import annotations

import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from chameleon_mm.device.sim.observer import SimObserver
from chameleon_mm.units import allocated_size, format_size


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
