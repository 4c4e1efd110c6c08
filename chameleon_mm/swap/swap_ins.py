"""Swap-ins of saved storages, from any form: on demand at a use, or ahead of it as far as the budget allows.

storage = ins.restore(saved, compute)        # the storage on the device; `compute` waits for its bytes
ins.prefetch_after(saved, compute)           # the storages that the previous step used next
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from typing import TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from chameleon_mm.device import Stream
from chameleon_mm.errors import ChameleonError, HostMemoryExhausted, TransferFailed
from chameleon_mm.plan.rule import UseOrder
from chameleon_mm.record.calls import Relied
from chameleon_mm.record.dispatch_state import tracer_is_on
from chameleon_mm.swap.budget import Budget, swap_out_now
from chameleon_mm.swap.calling_thread import ComputeStreams
from chameleon_mm.swap.claims import StorageRegistry
from chameleon_mm.swap.handles import Handle
from chameleon_mm.swap.host_copy import State, SwapContext
from chameleon_mm.swap.packed_group import PackedGroup
from chameleon_mm.swap.recipe import Reliance, node_is_torchs
from chameleon_mm.swap.recipe_runner import RecipeRunner
from chameleon_mm.swap.saved_storage import SavedStorage
from chameleon_mm.units import allocated_size

PREFETCH_WINDOW = 32
"""Number of uses to come that each use considers for prefetches."""

_Made = TypeVar("_Made")


class SwapIns:
    """Swap-ins, on demand and as prefetches. Not thread-safe: the executor holds its lock."""

    def __init__(
        self,
        context: SwapContext,
        registry: StorageRegistry,
        budget: Budget,
        order: UseOrder,
        recipe_runner: RecipeRunner,
    ) -> None:
        self._context, self._registry, self._budget = context, registry, budget
        self._order, self._recipe_runner = order, recipe_runner

    def restore(self, saved: SavedStorage, compute: Stream) -> torch.UntypedStorage:
        """Bring the storage to the device, with its bytes, ready for `compute`. Raises `torch.OutOfMemoryError`."""
        if saved.swap_in_failed:
            saved.drop_restored()  # the copy back was refused
        elif (
            saved.slot.came_back
            and saved.slot.alloc_stream is not compute
            and saved.state in (State.SWAPPING_IN, State.RESTORED)
            and not saved.drop_restored()
        ):  # its memory is another stream's: copy it to memory of `compute`
            return self._allocate(saved.nbytes, lambda: self._copied_on(saved, compute), exclude=(saved,))
        group = saved.form.group
        if group is not None and saved.state is State.ON_HOST:
            self._unpack(group, saved, compute)
        if saved.form.recipe is not None and saved.state is State.ON_HOST:
            self._recipe_runner.recompute(saved, compute, self.restore)
        if saved.state is State.SWAPPING_OUT:
            saved.cancel_swap_out()
        if saved.state is State.ON_HOST:
            # If the plan swaps the storage in at this hook, the plan's growth until the next check includes these bytes.
            way = self._budget.way
            is_planned = way is not None and (way.hook, saved.number) in way.program.backs
            self._allocate(saved.nbytes, lambda: saved.swap_in(compute), exclude=(saved,), is_planned=is_planned)
            self._context.metrics.totals.swap_ins_on_demand += 1
        if saved.state in (State.SWAPPING_IN, State.RESTORED):
            return saved.arrive(compute)
        storage = saved.device
        assert storage is not None
        return storage

    def prefetch_after(self, saved: SavedStorage, compute: Stream) -> None:
        """Prefetch the storages that are used after `saved`, as far as the budget allows."""
        if saved.epoch != self._registry.epoch:
            return
        for index in self._order.upcoming(saved.index, PREFETCH_WINDOW):
            coming = self._registry.get(index)
            if coming is not None and coming.form.group is not None and coming.state is State.ON_HOST:
                coming = coming.form.group.packed
            if coming is None or not coming.may_be_prefetched:
                continue
            if self._budget.way is not None and coming.number is not None:
                continue  # the plan decides when
            if not self._budget.room_for(coming.nbytes):
                return
            try:
                self.prefetch(coming, compute)
            except (torch.OutOfMemoryError, TransferFailed):
                return  # no use needs it yet

    def prefetch_planned(self, due: Sequence[SavedStorage], compute: Stream) -> None:
        """Hand the planned copies back of `due` to the device. If there is no memory for one, its use swaps it in."""
        follows_plan = self._budget.way is not None
        for saved in due:
            if not saved.may_be_prefetched:
                continue
            if not (self._budget.has_room_ahead if follows_plan else self._budget.room_for(saved.nbytes)):
                return  # its use brings it back
            with suppress(torch.OutOfMemoryError, TransferFailed):  # no use needs it yet
                self.prefetch(saved, compute, at_once=True)

    def prefetch(self, coming: SavedStorage, compute: Stream, *, at_once: bool = False) -> None:
        """Queue the copy back of `coming`. Raises `torch.OutOfMemoryError` or `TransferFailed`, and then changes nothing."""
        coming.swap_in(compute, at_once=at_once)
        self._budget.note_allocated(coming.nbytes)
        self._context.metrics.totals.prefetches += 1

    def _copied_on(self, saved: SavedStorage, compute: Stream) -> torch.UntypedStorage:
        saved.arrive(compute)
        return saved.slot.copied_on(compute, self._context.streams)

    def _allocate(
        self, nbytes: int, allocate: Callable[[], _Made], *, exclude: Collection[SavedStorage], is_planned: bool = False
    ) -> _Made:
        """Make room for a use and call `allocate`. Storages in `exclude` are not reclaimed. `is_planned`: as in
        `Budget.make_room`."""
        self._budget.make_room(nbytes, exclude=exclude, is_planned=is_planned)
        return self._budget.allocate(nbytes, allocate, exclude=exclude)

    def _unpack(self, group: PackedGroup, wanted: SavedStorage, compute: Stream) -> None:
        """Unpack `wanted` and other members of the group. Free the group's memory if no member is left in it."""
        # `_unpack_some` holds the group's storage. After it returns, no other reference is left.
        if self._unpack_some(group, wanted, compute) and group.packed.state is State.RESTORED:
            group.packed.drop_restored()

    def _unpack_some(self, group: PackedGroup, wanted: SavedStorage, compute: Stream) -> bool:
        """Unpack `wanted` and, as far as there is room, the other members of the group by one kernel: storages saved together
        are used together. Returns True if no member is left."""
        packed = self.restore(group.packed, compute)
        waiting = group.packed_members()
        members, nbytes, room = [], allocated_size(wanted.nbytes), self._budget.spare_until_used_bytes()
        for member, place in sorted(waiting, key=lambda entry: self._order.rank(entry[0].index)):
            if member is wanted or nbytes + allocated_size(member.nbytes) <= room:
                members.append((member, place))
                nbytes += 0 if member is wanted else allocated_size(member.nbytes)
        self._allocate(nbytes, lambda: group.unpack(members, packed, compute), exclude=(group.packed,))
        return len(members) == len(waiting)


# --- Rescue: recompute dropped storages before their sources may be overwritten. Note [Relied on]


class Rescue:
    """Recomputation of dropped storages whose source may be overwritten. Not thread-safe: the executor holds its lock."""

    def __init__(self, ins: SwapIns, streams: ComputeStreams) -> None:
        self._ins, self._streams = ins, streams

    def run(self, relied: Relied) -> None:
        """Recompute all dropped storages that depend on `relied`. Each then stays on the device or is swapped out."""
        compute, dependents = self._streams.current(), relied.dependents
        with _disable_current_modes() if tracer_is_on() else nullcontext():
            while dependents:
                saved = dependents[0]()
                if saved is not None and saved.form.recipe is not None and saved.state in (State.ON_HOST, State.RESTORED):
                    self._rescue(saved, compute)
                del dependents[0]  # after an error it is still listed, and the next write tries again

    def let_go(self, reliance: Reliance) -> None:
        """Recompute the storages that depend on a source, once autograd no longer needs the source, if others hold it."""
        relied = reliance.source.relied
        if relied is not None and relied.dependents and not reliance.source.is_alone:
            self.run(relied)

    def hand_out(self, relied: Relied, handle: Handle, saved: SavedStorage | None) -> None:
        """Recompute dependents before a node that may write to the tensor of `handle` gets it, or at autograd's last use if
        others hold the tensor. `saved`: storage of the tensor; None: it stays on the device."""
        relied.note_used(handle)
        if not node_is_torchs() or not (relied.by_autograd or (saved is not None and saved.is_private)):
            self.run(relied)

    def _rescue(self, saved: SavedStorage, compute: Stream) -> None:
        home = saved.slot.alloc_stream
        try:
            self._ins.restore(saved, compute)
        except RuntimeError as error:
            if isinstance(error, (ChameleonError, torch.OutOfMemoryError)):
                raise
            return  # if there is an error, its use raises the same one
        if saved.state is State.RESTORED:
            saved.stay_on_device()
        if home is not compute:  # now memory of `compute`, while its users wait only for `home`
            with suppress(HostMemoryExhausted, TransferFailed):
                swap_out_now(saved)
