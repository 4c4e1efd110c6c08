"""Who holds which bytes: every storage the simulated device has seen, by weak reference, with its shadow.

    buffer = ledger.adopt(storage)       # counted as allocated until the storage dies
    ... storage dies -> its weak reference's callback queues the death, with the owner's clock at that moment
    ledger.settle() -> bytes subtracted, and handing the block back checked as a write by its owner

A caching allocator gives a freed block to the next allocation of the stream that owns it, with no wait. So a storage's death
is a write by its owner at that point of its program: any access elsewhere that is not ordered before it is a race.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable

import torch

from chameleon_mm.device.sim.shadow import Access, Clock, Shadow
from chameleon_mm.errors import SimRaceError
from chameleon_mm.units import format_size

POISON_BYTE = 0xFB
"""Fills memory that holds nothing yet: as float32 -2.6e36, as bfloat16 -2.6e36, as int64 a large negative, as bool not 0 or 1."""

ROUND_BYTES = 512
"""The caching allocator's rounding: what `memory_allocated` counts for a block."""


def poison(storage: torch.UntypedStorage, start: int = 0, nbytes: int | None = None) -> None:
    """Fill bytes of a storage with `POISON_BYTE`, past every dispatcher."""
    size = storage.nbytes() - start if nbytes is None else nbytes
    if size > 0:
        ctypes.memset(storage.data_ptr() + start, POISON_BYTE, size)


class Buffer:
    """One storage: device memory (`host` False) or pinned host memory."""

    __slots__ = ("charged_bytes", "host", "name", "owner", "ref", "shadow")

    def __init__(self, ref: weakref.ref[torch.UntypedStorage], owner: int, *, host: bool, name: str) -> None:
        self.ref = ref
        self.owner = owner
        self.host = host
        self.name = name
        self.charged_bytes = 0
        self.shadow = Shadow()


class Ledger:
    """Every storage seen, what is allocated now and at most, and the deaths that are still to be checked."""

    def __init__(self, capacity: int, clock_of: Callable[[int], Clock]) -> None:
        self.capacity = capacity
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self.odometer_bytes = 0
        self._clock_of = clock_of
        self._buffers: dict[int, Buffer] = {}
        self._deaths: deque[tuple[int, Buffer, Clock | None]] = deque()
        self._serial = 0

    def find(self, storage: torch.UntypedStorage) -> Buffer | None:
        buffer = self._buffers.get(id(storage))
        return buffer if buffer is not None and buffer.ref() is storage else None

    def adopt(self, storage: torch.UntypedStorage, owner: int, *, host: bool = False, name: str = "") -> Buffer:
        """The storage's buffer, charged for on first sight. Raises `torch.OutOfMemoryError` when it does not fit."""
        buffer = self.find(storage)
        if buffer is not None:
            return buffer
        nbytes = 0 if host else round_up(storage.nbytes())
        self.make_room(nbytes)
        key = id(storage)
        self._serial += 1

        def died(_: object, key: int = key) -> None:
            dead = self._buffers.get(key)
            if dead is None or dead.ref() is not None:
                return  # the id already belongs to a later storage
            # A callback can run in the middle of any line, so it only notes: the clock is taken now, the rest at settle().
            # Host memory belongs to no stream; a copy that loses it says so itself.
            foreign = not dead.host and dead.shadow.foreign_to(dead.owner)
            self._deaths.append((key, dead, dict(self._clock_of(dead.owner)) if foreign else None))

        buffer = Buffer(weakref.ref(storage, died), owner, host=host, name=name or f"buffer #{self._serial}")
        self._buffers[key] = buffer
        self._charge(buffer, nbytes)
        return buffer

    def make_room(self, nbytes: int) -> None:
        """Raise as the caching allocator does when `nbytes` more do not fit."""
        if nbytes and self.allocated_bytes + nbytes > self.capacity:
            raise torch.OutOfMemoryError(
                f"out of memory on the simulated device. Tried to allocate {format_size(nbytes)}. It has a capacity of "
                f"{format_size(self.capacity)}, of which {format_size(self.capacity - self.allocated_bytes)} is free; "
                f"{format_size(self.allocated_bytes)} is allocated."
            )

    def resized(self, buffer: Buffer, storage: torch.UntypedStorage) -> None:
        """Charge the difference after an operator changed a storage's size (`resize_`)."""
        nbytes = 0 if buffer.host else round_up(storage.nbytes())
        if nbytes > buffer.charged_bytes:
            self.make_room(nbytes - buffer.charged_bytes)
        if nbytes != buffer.charged_bytes:
            self._charge(buffer, nbytes)

    def settle(self) -> None:
        """Book the deaths so far. Raises `SimRaceError` for a block handed back under an access that was not ordered."""
        error: SimRaceError | None = None
        while self._deaths:
            key, buffer, clock = self._deaths.popleft()
            if self._buffers.get(key) is buffer:
                del self._buffers[key]
            nbytes, label = buffer.charged_bytes, f"the owner of {buffer.name}, which was freed (the block is reused)"
            self.allocated_bytes -= nbytes
            if clock is None:
                continue
            everything = Access(0, max((a.end for a in buffer.shadow.accesses), default=0), True, buffer.owner, 0, label)
            try:
                buffer.shadow.check(everything, clock)
            except SimRaceError as race:
                error = error or race
        if error is not None:
            raise error

    def _charge(self, buffer: Buffer, nbytes: int) -> None:
        grown = nbytes - buffer.charged_bytes
        buffer.charged_bytes = nbytes
        self.allocated_bytes += grown
        self.odometer_bytes += max(0, grown)
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)


def round_up(nbytes: int) -> int:
    return (nbytes + ROUND_BYTES - 1) // ROUND_BYTES * ROUND_BYTES
