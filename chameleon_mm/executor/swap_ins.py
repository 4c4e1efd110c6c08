"""Saved storages on their way back: at their use, from wherever they are, and ahead of it as far as the budget allows.

storage = ins.bring(saved, compute)          # on the device, its bytes in place, `compute` ordered after them
ins.prefetch_after(saved, compute)           # those that the previous step used next
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

from chameleon_mm.device import Stream
from chameleon_mm.errors import TransferFailed
from chameleon_mm.executor.budget import BudgetGuard
from chameleon_mm.executor.carrier import Carrier
from chameleon_mm.executor.live import LiveStorages
from chameleon_mm.executor.saved_part import SavedPart
from chameleon_mm.executor.staging import Staging
from chameleon_mm.executor.stored import Place, SavedStorage, Tools
from chameleon_mm.policy import UseOrder

PREFETCH_LOOK = 32
"""How many of the coming uses are looked at for a prefetch at each use."""

_Made = TypeVar("_Made")


class SwapIns:
    """Not thread-safe: the executor holds its lock."""

    def __init__(self, tools: Tools, live: LiveStorages, guard: BudgetGuard, staging: Staging, order: UseOrder) -> None:
        self._tools = tools
        self._live = live
        self._guard = guard
        self._staging = staging
        self._order = order

    def bring(self, saved: SavedStorage, compute: Stream) -> torch.UntypedStorage:
        """The storage, on the device, its bytes in place, ready for `compute`. Raises `torch.OutOfMemoryError`."""
        if not isinstance(saved, SavedPart) or not saved.gathered:
            return self._bring_held(saved, compute)
        storage = saved.unpacked_elsewhere(compute)
        if storage is not None:
            self._tools.meter.totals.uses_on_device += 1
            return storage
        packed = self._bring_held(saved, compute)
        return self._allocate(saved.part.end_byte, lambda: saved.unpack(packed, compute), keep=saved)

    def prefetch_after(self, saved: SavedStorage, compute: Stream) -> None:
        """Swap in what is used after `saved`, as far as the budget allows."""
        if saved.epoch != self._live.epoch:
            return
        for index in self._order.upcoming(saved.index, PREFETCH_LOOK):
            coming = self._live.get(index)
            if coming is not None and coming.carrier is not None and coming.place is Place.ON_HOST:
                coming = coming.carrier
                if not self._staging.fits(coming.nbytes):
                    return
            if coming is None or coming.place is not Place.ON_HOST or coming.first() is not None:
                continue
            if self._guard.trusts_plan and coming.role is not None:
                continue  # the plan says when
            if not self._guard.room_for(coming.arrival_bytes):
                return
            try:
                self.prefetch(coming, compute)
            except (torch.OutOfMemoryError, TransferFailed):
                return  # nobody needs it yet

    def prefetch(self, coming: SavedStorage, compute: Stream) -> None:
        """Queue its copy back. Raises `torch.OutOfMemoryError` or `TransferFailed` with nothing changed."""
        coming.swap_in(compute)
        self._guard.took(coming.arrival_bytes)
        if self._guard.surplus is not None:
            self._guard.surplus.ahead(coming)
        self._tools.meter.totals.prefetches += 1

    def _bring_held(self, saved: SavedStorage, compute: Stream) -> torch.UntypedStorage:
        """What is held of it, on the device, ready for `compute`."""
        totals = self._tools.meter.totals
        if saved.place in (Place.ARRIVING, Place.RESTORED) and (saved.lost_on_the_way or not saved.home_is(compute)):
            saved.drop_restored()  # its block belongs to another stream's pool, or never got its bytes: ours gets its own
        if saved.carrier is not None and saved.place is Place.ON_HOST and saved.alive_elsewhere(compute) is None:
            self._unpack(saved.carrier, saved, compute)
        if saved.place is Place.LEAVING and saved.take_back():
            self._guard.stays(saved)
        if saved.place is Place.ON_HOST:
            elsewhere = saved.alive_elsewhere(compute)
            if elsewhere is not None:
                totals.uses_on_device += 1
                return elsewhere
            self._allocate(saved.arrival_bytes, lambda: saved.swap_in(compute), keep=saved)
            self._guard.stays(saved)  # until its other views were used
            totals.swap_ins_on_demand += 1
            return saved.arrive(compute)
        totals.uses_on_device += 1
        if saved.place in (Place.ARRIVING, Place.RESTORED):
            return saved.arrive(compute, prefetched=saved.place is Place.ARRIVING)
        assert saved.device is not None
        return saved.device

    def _allocate(self, nbytes: int, allocate: Callable[[], _Made], *, keep: SavedStorage) -> _Made:
        """What `allocate` takes of the device for a use, room made for it; `keep` is not given back for that."""
        self._guard.make_room(nbytes, keep=keep)
        made = None
        with suppress(torch.OutOfMemoryError):  # retried outside: the exception's traceback would keep tensors alive
            made = allocate()
        if made is None:
            self._tools.meter.totals.oom_retries += 1
            self._guard.give_back_all(keep=keep)
            made = allocate()
        self._guard.took(nbytes)
        return made

    def _unpack(self, carrier: Carrier, wanted: SavedStorage, compute: Stream) -> None:
        """`wanted` and what else waits in the carrier, as far as there is room, by one kernel: what was saved together is used
        together."""
        if carrier.place is Place.ON_HOST:
            self._staging.make_room(carrier.nbytes)  # where copies are refused it comes back all the same: a use needs it
        packed = self._bring_held(carrier, compute)
        waiting = carrier.waiting()
        members, nbytes, room = [], wanted.nbytes, self._guard.spare_until_used_bytes()
        for member, place in sorted(waiting, key=lambda entry: self._order.rank(entry[0].index)):
            if member is wanted or nbytes + member.nbytes <= room:
                members.append((member, place))
                nbytes += 0 if member is wanted else member.nbytes
        self._allocate(nbytes, lambda: carrier.unpack_members(members, packed, compute), keep=carrier)
        for member, _ in members:
            self._guard.stays(member)
        if carrier.place is Place.RESTORED and len(members) == len(waiting):
            carrier.let_go()
