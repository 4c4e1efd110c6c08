"""Swap-outs of saved storages, after the operator that saved them is over, each by the way that suits its size.

outs.add(saved)                                  # ON_DEVICE: its operator may still write it
for saved in outs.finished(): outs.swap_out(saved)   # at every hook: gather a small view; alone | with others
outs.pack_small()                                # the small ones that wait, at once: the link is idle, or memory is short
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

import torch

from chameleon_mm.device import Stream
from chameleon_mm.device.packing import packed_offsets
from chameleon_mm.errors import HostMemoryExhausted, TransferFailed
from chameleon_mm.plan.rule import DefaultRule
from chameleon_mm.swap.budget import Budget
from chameleon_mm.swap.calling_thread import OperatorNumber, sequence_nr, this_thread
from chameleon_mm.swap.claims import StorageRegistry
from chameleon_mm.swap.copy_queue import Thresholds
from chameleon_mm.swap.forms import WHOLE, Form, PartialForm
from chameleon_mm.swap.gathered_part import GatheredPart
from chameleon_mm.swap.handles import SavedBytes
from chameleon_mm.swap.host_copy import State, SwapContext
from chameleon_mm.swap.packed_group import PackedGroup, Staging
from chameleon_mm.swap.reclaim import Lending
from chameleon_mm.swap.saved_storage import SavedStorage
from chameleon_mm.units import MIB

_log = logging.getLogger(__name__)

GROUP_BYTES = 4 * MIB
"""Bytes of waiting small storages that are packed even while the link is busy: it reaches 96 % of its rate from there on."""

MOST_COPIES = 3
"""Most copies of one storage. A copy is repeated when more of the storage was saved after it began. From then on the storage
waits until memory is short. The model holds a storage that is saved again and again, so that copying it frees nothing. A loop
over its slices would copy it for each."""


class SwapOuts:
    """Swap-outs of saved storages. Not thread-safe: the executor holds its lock."""

    def __init__(
        self,
        context: SwapContext,
        registry: StorageRegistry,
        budget: Budget,
        staging: Staging,
        *,
        rule: DefaultRule,
        thresholds: Thresholds,
    ) -> None:
        self._context = context
        self._queues = context.out_queue, context.back_queue
        self._registry = registry
        self._budget = budget
        self._rule = rule
        self._thresholds = thresholds
        self._staging = staging
        self.fresh: list[SavedStorage] = []
        """Storages saved by operators that are not known to be over. The hand-over adds those of the loop."""
        self.latest_operator: OperatorNumber = (-1, 0)
        """Operator that saved last: those before it on its thread are over."""
        self.small: list[SavedStorage] = []
        """Storages too small to move alone, which wait for other small ones."""
        self.waiting_bytes = 0
        """Bytes of the small storages that wait: stored, because every hook reads it."""

    def add(self, saved: SavedStorage) -> None:
        """Add a storage that the calling thread is saving, in an operator that has not ended."""
        saved.op_is_over = False
        saved.saved_by = self.latest_operator = this_thread.number, sequence_nr()  # as `current_operator` does, without a call
        self.fresh.append(saved)

    @property
    def have_work(self) -> bool:
        """True if any saved storage is on its way out or back, or waits to be."""
        budget, lending = self._budget, self._budget.lending
        return bool(
            self.fresh
            or self.small
            or any(queue.queued for queue in self._queues)
            or budget.reclaim.entries
            or budget.planned.entries
            or (lending is not None and lending.has_any)
        )

    def finished(self) -> list[SavedStorage]:
        """Return the storages whose operators are known to be over. Until its end, an operator may write what it saved.

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

    def is_over(self, saved: SavedStorage) -> bool:
        """True if the operator that saved it last is over. The calling thread knows its own operator, and the latest save of
        another thread. Note [Swap-out]."""
        if not saved.op_is_over:
            (thread, number), latest = saved.saved_by, self.latest_operator
            now = sequence_nr() if thread == this_thread.number else latest[1] if thread == latest[0] else number
            saved.op_is_over = number < now
        return saved.op_is_over

    def pump(self, lending: Lending | None) -> None:
        """Give the link and the allocator what is ready for them, and drop storages whose copies are complete."""
        if self.small:
            self._pack_waiting()
        if lending is not None and lending.memory_is_short:
            self._context.out_queue.hand_over_all()
        for queue in self._queues:
            if queue.queued:
                queue.hand_over()
        if self._budget.reclaim.entries:
            self._budget.reclaim.reclaim_complete()
        if lending is not None:
            lending.lend()

    def begin_again(self, saved: SavedStorage, saved_bytes: SavedBytes, compute: Stream) -> None:
        """Begin its copy again, as its latest copy, running or not, lacks these bytes, which are saved now on `compute`."""
        saved.copies += 1
        self.call_off(saved, compute)
        slot = saved.slot
        if slot.alloc_stream is not compute:
            compute.wait(slot.alloc_stream.record())  # the copy, ordered after `compute`, must see the writes there
            slot.alloc_stream = compute
        slot.include(saved_bytes)

    def call_off(self, saved: SavedStorage, compute: Stream) -> None:
        """Have a storage that is saved now, on `compute`, on the device alone, without a copy.

        It has all bytes there, as others refer to it.
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
        """Let the memory of held storages go once others hold them no more."""
        for saved in tuple(self._context.held):
            if saved.state is not State.RESTORED:
                self._context.held.pop(saved, None)
            elif saved.slot.is_alone() and (not saved.form.device_bytes or saved.form.kept(saved.slot)):
                saved.empty()

    def swap_out(self, saved: SavedStorage, *, alone: bool = False) -> None:
        """Swap out by the default rule: gather a small view; queue its copy, or let it wait for other small ones. `alone`: it
        does not wait, as no room for packing is known."""
        if saved.state is not State.ON_DEVICE or not saved.is_copyable:
            return
        if saved.part is not None:
            self._gather(saved)
        elif saved.copies > MOST_COPIES:
            return
        if saved.nbytes < self._rule.min_bytes:
            return
        if alone or not self._thresholds.packs(saved.nbytes):
            self.swap_out_alone(saved)
        else:
            self.small.append(saved)
            self.waiting_bytes += saved.nbytes

    def swap_out_planned(self, saved: SavedStorage, last_bytes: int) -> None:
        """Hand over the copy of its last bytes, if it may be copied now. The plan says when its memory is reclaimed. It stays
        if the host takes no more."""
        if saved.state is not State.ON_DEVICE or not saved.op_is_over or not saved.is_copyable:
            return
        whole = last_bytes >= saved.nbytes
        form = WHOLE if whole else PartialForm(saved.nbytes - last_bytes, self._context.streams)
        if self._began(saved, form, at_once=True):
            self.note_planned(saved)

    def note_planned(self, saved: SavedStorage) -> None:
        """Note that a plan queued its copy out. The plan says when its memory goes."""
        self._budget.planned.add(saved)
        if self._budget.lending is not None:
            self._budget.lending.add(saved)

    def _pack_waiting(self) -> None:
        """Pack the waiting small storages once they fill a group, the link is idle, or the coming growth is unknown."""
        if self.waiting_bytes >= GROUP_BYTES or self._budget.growth_is_unknown or self._context.out_queue.is_idle():
            self.pack_small()

    def forget_small(self) -> None:
        """Forget the waiting storages that left the device in another way. Called at the end of a step."""
        self.small = [saved for saved in self.small if saved.state is State.ON_DEVICE]
        self.waiting_bytes = sum(saved.nbytes for saved in self.small)

    def pack_small(self) -> None:
        """Pack the waiting small storages, each group by one kernel. Their memory goes at once; one copy takes a group out."""
        waiting, self.small, self.waiting_bytes = self.small, [], 0
        ready = (saved for saved in dict.fromkeys(waiting) if saved.state is State.ON_DEVICE and saved.op_is_over)
        members = [saved for saved in ready if saved.is_copyable]
        # Members keep their memory while their group is packed: a tight budget has room for small groups only.
        at_most = min(2 * GROUP_BYTES, self._budget.spare_bytes())
        for together in self._staging.batches(members, at_most=at_most):
            if len(together) == 1:  # no other to share a launch with
                self.swap_out_alone(together[0])
            elif self._staging.make_room(packed_offsets([member.nbytes for member in together]).total_bytes):
                self._pack(together)  # else they stay; a memory check may still swap them out one by one

    def swap_out_alone(self, saved: SavedStorage, *, may_be_lent: bool = True) -> None:
        """Queue its copy out alone. It stays if the host takes no more. `may_be_lent`: to the allocator meanwhile."""
        if not self._began(saved):
            return
        self._budget.reclaim.add(saved)
        if self._budget.lending is not None and may_be_lent:
            self._budget.lending.add(saved)

    def _began(self, saved: SavedStorage, form: Form = WHOLE, *, at_once: bool = False) -> bool:
        """Queue the copy out in `form`. Returns False, and counts the refusal, if the storage stays."""
        try:
            saved.swap_out(form, at_once=at_once)
        except (HostMemoryExhausted, TransferFailed) as refusal:
            if form is not WHOLE or not self._went_to_pageable(saved, refusal):
                _log.info("chameleon_mm: kept on the device: %s", str(refusal))
                self._context.metrics.totals.fallbacks += 1
                return False
        return True

    def _went_to_pageable(self, saved: SavedStorage, refusal: Exception) -> bool:
        """Queue the copy out to pageable memory, if none could be pinned and the storage must not stay. Returns True if that
        was done."""
        if not isinstance(refusal, HostMemoryExhausted) or not self._budget.must_use_pageable:
            return False
        with suppress(HostMemoryExhausted, TransferFailed):
            saved.swap_out(pageable=True)
            return True
        return False

    def _pack(self, members: Sequence[SavedStorage]) -> None:
        with suppress(torch.OutOfMemoryError):  # then they stay
            group = PackedGroup(members, self._context.streams.current(), self._context, epoch=self._registry.epoch)
            self._budget.note_allocated(group.packed.nbytes)
            self._registry.packed_groups.add(group)
            self._context.metrics.totals.packed_groups += 1
            self.swap_out_alone(group.packed, may_be_lent=False)  # `Staging` looks at groups at every hook

    def _gather(self, saved: SavedStorage) -> None:
        """Gather the view and free the rest of its storage. If there is no memory for that, all of it moves."""
        with suppress(torch.OutOfMemoryError):
            saved.hold_gathered(GatheredPart(saved, self._context.streams.current(), self._context.streams))
            self._context.metrics.totals.gathers += 1
            self._budget.note_allocated(saved.nbytes)
