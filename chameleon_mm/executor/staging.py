"""Bounds the device memory that packed groups take, on their way out and on their way back.

    for batch in staging.batches(members): ...     # as many as fit one group, in their order
    staging.make_room(nbytes)                      # compute waits for the oldest group's copy, and its memory goes

A ring of fixed buffers would hold its memory for ever. These are the caching allocator's blocks: counted in the budget while
they are there, anybody's afterwards. What a ring bounds is bounded the same: before another group is packed, compute is
ordered after the copies of the oldest ones, and they are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from chameleon_mm.device.packing import PACK_ALIGN_BYTES
from chameleon_mm.saved.claims import StorageRegistry
from chameleon_mm.saved.packed_group import PackedGroup
from chameleon_mm.saved.saved_storage import SavedStorage
from chameleon_mm.saved.state import State
from chameleon_mm.units import round_up


class Staging:
    """Packed groups that are on the device, at most `limit_bytes` of them together. Not thread-safe."""

    def __init__(self, registry: StorageRegistry, *, limit_bytes: int) -> None:
        self._registry = registry
        self._limit_bytes = limit_bytes

    @property
    def used_bytes(self) -> int:
        return sum(group.nbytes for group in self._registry.packed_groups if group.device is not None)

    def batches(self, members: Sequence[SavedStorage], *, at_most: int) -> Iterator[list[SavedStorage]]:
        """Divide `members`, in their order, so that each batch, packed, takes at most `at_most` bytes and the limit."""
        most = min(at_most, self._limit_bytes)
        load: list[SavedStorage] = []
        end = 0
        for member in members:
            end = round_up(end, PACK_ALIGN_BYTES) + member.nbytes
            if load and end > most:
                yield load
                load, end = [], member.nbytes
            load.append(member)
        if load:
            yield load

    def make_room(self, nbytes: int, *, exclude: PackedGroup | None = None) -> bool:
        """Reclaim groups, oldest first and never `exclude`, until `nbytes` more fit. Returns whether they do: not where the
        device refused copies that were to free some."""
        if self.fits(nbytes):
            return True
        for group in sorted(self._registry.packed_groups, key=lambda group: (group.epoch, group.index)):
            if group is not exclude and group.state is State.SWAPPING_OUT:
                group.reclaim()
            elif group is not exclude and group.state in (State.SWAPPING_IN, State.RESTORED):
                group.drop_restored()
            if self.fits(nbytes):
                return True
        return False

    def fits(self, nbytes: int) -> bool:
        """Whether `nbytes` more are within the limit."""
        return self.used_bytes + nbytes <= self._limit_bytes
