"""Groups of small saved storages that are swapped together: one kernel packs them, and one copy each way moves them.

    group = PackedGroup(members, compute, context, epoch=...)    # packed on compute; the members' memory is freed at once
    group.packed.swap_out() ...                                  # a saved storage like any other
    group.unpack(members, packed, compute)                       # unpack the members still needed, by one kernel
    member retires -> its PackedForm is dropped                  # the group retires with its last member

A copy of 16 KiB takes 0.3 us on the link and ten times that on the host. Packing takes one launch on the host for all members.
Their memory is free in stream order as soon as the kernel is queued. Members were saved within a few operators, so backward
uses them within a few operators too. The first use of a member unpacks the others as well, if there is room.

A ring of fixed buffers would hold its memory forever. So groups use blocks of the caching allocator, which count in the budget
while in use. The budget reclaims them like other saved storages.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch

from chameleon_mm.device import Stream
from chameleon_mm.device.packing import PACK_ALIGN_BYTES, packed_offsets
from chameleon_mm.swap.calling_thread import annotation
from chameleon_mm.swap.forms import Form
from chameleon_mm.swap.handles import SavedBytes, flat_bytes
from chameleon_mm.swap.host_copy import State, SwapContext
from chameleon_mm.swap.saved_storage import SavedStorage
from chameleon_mm.units import round_up


class PackedGroup:
    """Several small storages whose bytes are packed in one storage. The group retires with its last member."""

    def __init__(self, members: Sequence[SavedStorage], compute: Stream, context: SwapContext, *, epoch: int) -> None:
        """Pack `members`, all of them ON_DEVICE, on `compute`, the current stream.

        Raises `torch.OutOfMemoryError`, and then changes nothing.
        """
        places, total = packed_offsets([member.nbytes for member in members])
        buffer = compute.alloc(total)
        alloc_streams = list(dict.fromkeys(member.slot.alloc_stream for member in members))
        for alloc_stream in alloc_streams:
            # Note [Swap-out]: other streams may have written the sources, and `compute` reads them
            context.streams.join_all(alloc_stream)
        # Each flat tensor is made once: making it costs the host several times as much as packing it.
        sources = [flat_bytes(member.device) for member in members if member.device is not None]
        with annotation("chameleon::pack"):
            compute.pack(buffer, sources, places)
        for alloc_stream in alloc_streams:
            context.streams.join_all(alloc_stream)  # Note [Reclaim]: the memory is reused only after that read
        index = max(member.index for member in members)
        self.packed = SavedStorage(buffer, SavedBytes(buffer), compute, context, epoch=epoch, index=index)
        self.packed.op_is_over = True
        # Weak references: members hold their group, and a cycle would need the garbage collector.
        self._members = [(weakref.ref(member), place) for member, place in zip(members, places, strict=True)]
        self.members_left = 0
        del sources, buffer
        for member in members:
            member.leave_in(PackedForm(self))
            self.members_left += 1

    def unpack(self, members: Sequence[tuple[SavedStorage, int]], packed: torch.UntypedStorage, compute: Stream) -> int:
        """Allocate memory for `members`, and fill it by one kernel on `compute`, the current stream. Returns their number.

        Raises `torch.OutOfMemoryError`, and then changes nothing.
        """
        storages = [member.slot.storage for member, _ in members if member.slot.storage is not None]
        given: list[torch.UntypedStorage] = []
        try:
            for storage, (member, _) in zip(storages, members, strict=True):
                compute.resize(storage, member.nbytes)
                given.append(storage)
        except torch.OutOfMemoryError:
            for storage in given:
                compute.resize(storage, 0)
            raise
        with annotation("chameleon::unpack"):
            compute.unpack([flat_bytes(storage) for storage in storages], flat_bytes(packed), [place for _, place in members])
        for member, _ in members:
            member.restored(compute)
        return len(members)

    def packed_members(self) -> list[tuple[SavedStorage, int]]:
        """Return the members whose bytes are only in the group, each with its offset."""
        members = [(ref(), place) for ref, place in self._members]
        return [(m, place) for m, place in members if m is not None and m.form.group is self and m.state is State.ON_HOST]


class PackedForm(Form):
    """Form of a member, whose bytes are in its group."""

    __slots__ = ("group",)

    has_copy = False

    def __init__(self, group: PackedGroup) -> None:
        self.group: PackedGroup | None = group

    def drop(self) -> None:
        """Note that this member no longer needs the group."""
        if self.group is not None:
            self.group.members_left -= 1
        self.group = None


def batches(members: Sequence[SavedStorage], *, at_most: int) -> Iterator[list[SavedStorage]]:
    """Divide `members`, in order, into batches within `at_most` bytes. A larger member has a batch of its own."""
    load: list[SavedStorage] = []
    end = 0
    for member in members:
        end = round_up(end, PACK_ALIGN_BYTES) + member.nbytes
        if load and end > at_most:
            yield load
            load, end = [], member.nbytes
        load.append(member)
    if load:
        yield load
