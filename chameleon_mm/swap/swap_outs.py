"""Swap out saved storages once the operator that saved them is over: alone or packed, by size.

outs.add(saved)                                  # ON_DEVICE: its operator may still write it
for saved in outs.due(outs.finished()): outs.swap_out(saved)    # at every hook: alone | with others
outs.pack_small()                                # pack the waiting small ones now: the link is idle, or memory is short
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

import torch

from chameleon_mm.device import Stream
from chameleon_mm.errors import HostMemoryExhausted, TransferFailed
from chameleon_mm.swap.budget import Budget
from chameleon_mm.swap.calling_thread import OperatorNumber, sequence_nr, this_thread
from chameleon_mm.swap.claims import StorageRegistry
from chameleon_mm.swap.forms import WHOLE, Form, PartialForm
from chameleon_mm.swap.handles import SavedBytes
from chameleon_mm.swap.host_copy import State, SwapContext
from chameleon_mm.swap.packed_group import PackedGroup, batches
from chameleon_mm.swap.reclaim import Lending
from chameleon_mm.swap.saved_storage import SavedStorage
from chameleon_mm.units import KIB, MIB

_log = logging.getLogger(__name__)

PACK_BELOW_BYTES = 128 * KIB
"""Minimum size of a storage that is copied alone. At this size a copy takes 2.4 us on the link, at the 55 GB/s published for an
H200, and 2.3-7 us for the call of cudaMemcpyAsync."""

GROUP_BYTES = 4 * MIB
"""Bytes of waiting small storages that are packed even while the link is busy. At this size copies reach 96 % of its rate."""

MOST_COPIES = 3
"""Maximum number of copies out of one storage. A copy is repeated if more of the storage is saved after it began. After this
many copies, the storage waits until memory is short: the model still holds it, so that copies free nothing. A loop over slices
would otherwise copy the storage for each slice."""


class SwapOuts:
    """Swap-outs of saved storages. Not thread-safe: the executor holds its lock."""

    def __init__(self, context: SwapContext, registry: StorageRegistry, budget: Budget) -> None:
        self._context, self._registry, self._budget = context, registry, budget
        self._queues = context.out_queue, context.back_queue
        self.pack_below_bytes = PACK_BELOW_BYTES
        self.fresh: list[SavedStorage] = []
        """Storages whose saving operators may still run. `HandOver` adds storages saved in the loop."""
        self.latest_operator: OperatorNumber = (-1, 0)
        """Latest operator that saved. Earlier operators of its thread are over."""
        self.in_part: list[SavedStorage] = []
        """Storages saved in part, whose saving operators are over since the latest hook."""
        self.small: list[SavedStorage] = []
        """Storages too small to move alone, waiting to be packed."""
        self.waiting_bytes = 0
        """Total bytes of `small`. Stored, because every hook reads it."""

    def add(self, saved: SavedStorage) -> None:
        """Add a storage saved by the operator that runs on the calling thread."""
        saved.op_is_over = False
        saved.saved_by = self.latest_operator = this_thread.number, sequence_nr()
        self.fresh.append(saved)

    @property
    def have_work(self) -> bool:
        """True if any copy out or back is running, queued or waiting to be packed."""
        budget, lending = self._budget, self._budget.lending
        waiting = self.fresh, self.in_part, self.small, *(queue.queued for queue in self._queues), budget.reclaim.entries
        return any((*waiting, budget.planned.entries, lending is not None and lending.has_any))

    def finished(self) -> list[SavedStorage]:
        """Return the storages whose saving operators are known to be over. A running operator may still write to its saves.

        Note [Swap-out].
        """
        fresh, self.fresh = dict.fromkeys(self.fresh), []
        over = []
        for saved in fresh:
            if self.is_over(saved):
                over.append(saved)
            elif saved.state is State.ON_DEVICE:
                self.fresh.append(saved)
        return over

    def due(self, finished: Sequence[SavedStorage]) -> list[SavedStorage]:
        """Return the storages to copy at this hook. `finished`: those whose saving operators are over since the latest hook. A
        storage of which only a part was saved waits a hook longer: the running operator may save the rest, as in `gate * up`.
        """
        due, self.in_part = [saved for saved in self.in_part if saved.op_is_over], []
        for saved in finished:
            (self.in_part if saved.slot.has_uncovered() else due).append(saved)
        return due

    def is_over(self, saved: SavedStorage) -> bool:
        """True if the operator that saved the storage last is over. The calling thread knows its own current operator, and the
        latest saving operator of another thread. Note [Swap-out]."""
        if not saved.op_is_over:
            (thread, number), latest = saved.saved_by, self.latest_operator
            now = sequence_nr() if thread == this_thread.number else latest[1] if thread == latest[0] else number
            saved.op_is_over = number < now
        return saved.op_is_over

    def pump(self, lending: Lending | None) -> None:
        """Queue ready copies, lend ready memory to the allocator, and free device memory whose copy out is complete."""
        fills_group = self.waiting_bytes >= GROUP_BYTES
        if self.small and (fills_group or self._budget.growth_is_unknown or self._context.out_queue.is_idle()):
            self.pack_small()
        if lending is not None:
            self._context.out_queue.hand_over_all()  # the allocator reclaims only what is being copied
        for queue in self._queues:
            if queue.queued:
                queue.hand_over()
        if self._budget.reclaim.entries:
            self._budget.reclaim.reclaim_complete()
        if lending is not None:
            lending.lend()

    def begin_again(self, saved: SavedStorage, saved_bytes: SavedBytes, compute: Stream) -> None:
        """Copy the storage out again, because its latest copy lacks `saved_bytes`, saved now on `compute`."""
        saved.copies += 1
        self.call_off(saved, compute)
        slot = saved.slot
        if slot.alloc_stream is not compute:
            compute.wait(slot.alloc_stream.record())  # the copy waits for `compute` alone, and must see these writes
            slot.alloc_stream = compute
        slot.include(saved_bytes)

    def call_off(self, saved: SavedStorage, compute: Stream) -> None:
        """Discard the copies of a storage that is saved now, on `compute`.

        The device has all its bytes, because others refer to it.
        """
        group = saved.form.group
        if saved.state is State.SWAPPING_OUT and not saved.cancel_swap_out() and saved.state is State.SWAPPING_OUT:
            assert saved.copy is not None
            saved.wait_for_copy_out(self._context.out_queue.issue(saved.copy.out))
            saved.stay_on_device()
        if saved.state is State.SWAPPING_IN:
            saved.arrive(compute)
        if saved.state is State.RESTORED:
            saved.stay_on_device()
        assert saved.state is State.ON_DEVICE
        self._registry.release_group(group)

    def let_go_of_held(self) -> None:
        """Free the memory of storages in `held` that no one else refers to now."""
        for saved in tuple(self._context.held):
            if saved.state is not State.RESTORED:
                self._context.held.pop(saved, None)
            elif saved.slot.is_alone() and (not saved.form.device_bytes or saved.form.kept(saved.slot)):
                saved.empty()

    def swap_out(self, saved: SavedStorage, *, alone: bool = False) -> None:
        """Swap out by the default rule: queue the copy, or let a small storage wait to be packed. `alone`: do not wait, because
        there may be no room for packing."""
        if saved.state is not State.ON_DEVICE or not saved.is_copyable or saved.copies > MOST_COPIES:
            return
        if alone or saved.nbytes >= self.pack_below_bytes:
            self.swap_out_alone(saved)
        else:
            self.small.append(saved)
            self.waiting_bytes += saved.nbytes

    def swap_out_planned(self, saved: SavedStorage, last_bytes: int) -> None:
        """Hand the copy of the last `last_bytes` to the device, if the storage may be copied now. The plan decides when its
        memory is reclaimed. The storage stays if the host has no room."""
        if saved.state is not State.ON_DEVICE or not saved.op_is_over or not saved.is_copyable:
            return
        whole = last_bytes >= saved.nbytes
        form = WHOLE if whole else PartialForm(saved.nbytes - last_bytes, self._context.streams)
        if self._began(saved, form, at_once=True):
            self.note_planned(saved)

    def note_planned(self, saved: SavedStorage) -> None:
        """Note that a plan queued the copy out. The plan decides when the memory is freed."""
        self._budget.planned.add(saved)
        if self._budget.lending is not None:
            self._budget.lending.add(saved)

    def forget_small(self) -> None:
        """Remove storages from `small` that left the device in another way. Called at the end of a step."""
        self.in_part = []
        self.small = [saved for saved in self.small if saved.state is State.ON_DEVICE]
        self.waiting_bytes = sum(saved.nbytes for saved in self.small)

    def pack_small(self) -> None:
        """Pack the waiting small storages, each group by one kernel and one copy out. Their own memory is freed at once."""
        waiting, self.small, self.waiting_bytes = self.small, [], 0
        ready = (saved for saved in dict.fromkeys(waiting) if saved.state is State.ON_DEVICE and saved.op_is_over)
        members = [saved for saved in ready if saved.is_copyable]
        # Members keep their memory while their group is packed, so a tight budget allows only small groups.
        at_most = min(2 * GROUP_BYTES, self._budget.spare_bytes())
        for together in batches(members, at_most=at_most):
            if len(together) == 1:  # nothing to pack it with
                self.swap_out_alone(together[0])
            else:
                self._pack(together)  # if this fails they stay; a memory check may swap them out singly

    def swap_out_alone(self, saved: SavedStorage, *, may_be_lent: bool = True) -> None:
        """Queue the copy out of one storage. It stays if the host has no room. `may_be_lent`: lend its memory meanwhile."""
        if not self._began(saved):
            return
        self._budget.reclaim.add(saved)
        if self._budget.lending is not None and may_be_lent:
            self._budget.lending.add(saved)

    def _began(self, saved: SavedStorage, form: Form = WHOLE, *, at_once: bool = False) -> bool:
        """Queue the copy out in `form`. If that is refused, count it and return False; the storage stays."""
        try:
            saved.swap_out(form, at_once=at_once)
        except (HostMemoryExhausted, TransferFailed) as refusal:
            if form is WHOLE and isinstance(refusal, HostMemoryExhausted) and self._budget.must_use_pageable:
                with suppress(HostMemoryExhausted, TransferFailed):
                    saved.swap_out(pageable=True)
                    return True
            _log.info("chameleon_mm: kept on the device: %s", str(refusal))
            self._context.metrics.totals.fallbacks += 1
            return False
        return True

    def _pack(self, members: Sequence[SavedStorage]) -> None:
        with suppress(torch.OutOfMemoryError):  # then they stay
            group = PackedGroup(members, self._context.streams.current(), self._context, epoch=self._registry.epoch)
            self._budget.note_allocated(group.packed.nbytes)
            self._registry.packed_groups.add(group)
            self._context.metrics.totals.packed_groups += 1
            self.swap_out_alone(group.packed, may_be_lent=False)
