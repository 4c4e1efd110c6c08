"""Limits the device memory that swapping holds, and hooks that copy at save and back at use do not, to a share of what is free.

    held = leaving + back before its use, or after it + waiting to be swapped out + small ones that stay
    check_memory()       # held <= a share of what the rest leaves free?
        no -> 1. wait for copies on their way out, oldest first          (no new bytes cross)
              2. drop what is back and is used last                      (its host copy is still good)
              3. swap out what waits for more of its kind, and the small ones that stay, oldest first
              4. swap out what had to stay, or was not copied for a use: to ordinary memory where no more can be pinned
    room_for(nbytes)     # may a prefetch take this much now?

The model's own operators allocate where no hook of ours runs. So the rule asks nothing of them: whatever they take, as long as
the rest alone fits, the rest and this share of what it left free fit a device that is larger by that share. More than the share
is held only where steps so far have shown how far allocation grows at most until the next check, and this one saves no more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Protocol

import torch

from chameleon_mm.device import Device
from chameleon_mm.errors import HostMemoryExhausted, TransferFailed
from chameleon_mm.executor.small_tensors import SmallTensors
from chameleon_mm.policy import LargestGrowth, UseOrder
from chameleon_mm.reclaim import ReclaimQueue
from chameleon_mm.saved.saved_storage import SavedStorage
from chameleon_mm.saved.state import State
from chameleon_mm.units import allocated_size

FORECAST_SHARE = 0.9
"""Share of the device's capacity that may be allocated where the growth to come is known. The rest is for fragmentation."""

UNREAD_SHARE = 1 / 256
"""Share of the device's capacity up to which memory is not read: on a GPU a reading costs a hook most."""

CAPACITY_EVERY = 64
"""Checks of memory between two readings of the capacity: other processes change it, and on a GPU asking calls the driver."""


class PendingSwapOuts(Protocol):
    """Interface of what swaps saved storages out."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the small storages that wait for more of their kind."""

    @property
    def fresh_bytes(self) -> int:
        """Bytes saved by operators that are not known to be over."""

    def pack_small(self) -> None:
        """Swaps out the small storages that wait."""


def swap_out_now(saved: SavedStorage) -> None:
    """Swap a storage out to pinned memory, else to ordinary, and reclaim its device memory at once. Raises `TransferFailed`,
    and `HostMemoryExhausted` where the host has neither."""
    with suppress(HostMemoryExhausted):
        saved.swap_out()
    if saved.state is State.ON_DEVICE:
        saved.swap_out(pageable=True)
    saved.reclaim()


class SwapMemoryLimit:
    """Keeps what swapping holds of the device within a share of what is free. Not thread-safe: the executor holds its lock."""

    def __init__(
        self,
        device: Device,
        share: float,
        *,
        reclaim: ReclaimQueue,
        order: UseOrder,
        small: SmallTensors,
        swap_outs: Callable[[], PendingSwapOuts | None],
    ) -> None:
        """`reclaim` holds what is being swapped out; `swap_outs` returns what swaps storages out, or None once that is gone."""
        self._tight = False
        """Whether memory is to be checked at every hook."""
        self._small_limit = -1
        """Bytes of small tensors kept on the device above which memory is to be checked again."""
        self._device = device
        self._share = share
        self._reclaim = reclaim
        self._order = order
        self._small = small
        self._swap_outs = swap_outs
        self._largest_growth = LargestGrowth()
        self._resident: dict[int, SavedStorage] = {}
        """Storages that are on the device and could be on the host, by id; the state of some may have changed since."""
        self._rest_bytes = 0
        """Bytes allocated beside what swapping holds, as of the last check, with what uses took since then."""
        self._cumulative: int | None = None
        self._taken_bytes = 0
        """Bytes that we allocated ourselves since then."""
        self._capacity = 0
        self._checks = 0

    # --- what is told

    def note_saved(self, nbytes: int) -> None:
        """Note the save of a storage of so many bytes that was not saved before."""
        self._largest_growth.saved(nbytes)

    def note_on_device(self, saved: SavedStorage) -> None:
        """Note that `saved` stays on the device, or came back: it could be on the host."""
        self._resident[id(saved)] = saved

    def note_prefetched(self, saved: SavedStorage) -> None:
        """Note that `saved` comes back before its use; its allocation was noted already."""
        self.note_on_device(saved)
        self._rest_bytes -= allocated_size(saved.nbytes)

    def note_allocated(self, rounded_bytes: int) -> None:
        """Note that so much was allocated by ourselves, for a use."""
        self._taken_bytes += rounded_bytes
        self._rest_bytes += rounded_bytes

    # --- what is asked

    @property
    def wants_check(self) -> bool:
        """Whether memory is to be checked now, though nothing that moves is saved or used: it is short, or much was added."""
        return self._tight or self._small.nbytes > self._small_limit

    def check_memory(self) -> None:
        """Read memory; reclaim what exceeds the limit. Where little is held nothing is read."""
        swap_outs = self._swap_outs()
        fresh = 0 if swap_outs is None else swap_outs.fresh_bytes
        if self._checks % CAPACITY_EVERY == 0:
            self._capacity = self._device.capacity
            self._checks += 1
        else:
            self._checks += 1
            spare = int(self._capacity * min(self._share, UNREAD_SHARE)) - self._held_bytes() - fresh
            if spare >= 0:
                self._tight, self._small_limit = False, self._small.nbytes + spare
                return
        now = self._device.read_memory()
        if self._cumulative is not None:
            self._largest_growth.record(max(0, now.cumulative_bytes - self._cumulative - self._taken_bytes))
        self._cumulative, self._taken_bytes = now.cumulative_bytes, 0
        held = self._held_bytes()
        self._rest_bytes = now.allocated_bytes - held
        if held > self._allowed_bytes():
            self._small.forget_dead()
            held = self._held_bytes()
            self._rest_bytes = now.allocated_bytes - held
            if held > self._allowed_bytes():
                self._reclaim_until(self._allowed_bytes(), ())
        spare = self._allowed_bytes() - self._held_bytes() - fresh
        self._tight = 2 * spare < self._allowed_bytes()
        self._small_limit = self._small.nbytes + spare

    def make_room(self, nbytes: int, exclude: Collection[SavedStorage]) -> None:
        """Reclaim what exceeds the limit once a use has taken `nbytes`; never `exclude`."""
        allowed = self._allowed_bytes(nbytes)
        if self._held_bytes() > allowed:
            self._reclaim_until(allowed, exclude)

    def spare_bytes(self) -> int:
        """Bytes that may be allocated beside what is held."""
        return max(0, self._allowed_bytes() - self._held_bytes())

    def reclaim_all(self, exclude: Collection[SavedStorage]) -> None:
        """Reclaim everything that can be reclaimed, after a failed allocation."""
        self._reclaim_until(0, exclude)

    def end_step(self, *, completed: bool) -> None:
        """End the step; learn from it if it `completed`."""
        if self._cumulative is not None:
            self._largest_growth.record(
                max(0, self._device.read_memory().cumulative_bytes - self._cumulative - self._taken_bytes)
            )
        self._cumulative, self._checks, self._small_limit = None, 0, -1
        self._largest_growth.end_step(completed=completed)
        self._small.forget_dead()
        self._held_bytes()  # forgets what went another way

    # --- arithmetic

    def _allowed_bytes(self, more: int = 0) -> int:
        """Bytes that may be held, once the rest has taken `more`."""
        rest = self._rest_bytes + allocated_size(more)
        allowed = int((self._capacity - rest) * self._share)
        growth = self._largest_growth.nbytes
        if growth is not None:
            allowed = max(allowed, int(self._capacity * FORECAST_SHARE) - rest - growth)
        return max(0, allowed)

    def _held_bytes(self) -> int:
        swap_outs = self._swap_outs()
        waiting = 0 if swap_outs is None else swap_outs.waiting_bytes
        return self._reclaim.pending_bytes + waiting + self._small.nbytes + self._resident_bytes()

    def _resident_bytes(self) -> int:
        for key in [key for key, saved in self._resident.items() if saved.state not in _OCCUPYING]:
            del self._resident[key]
        return sum(saved.nbytes for saved in self._resident.values())

    def _reclaim_until(self, allowed: int, exclude: Collection[SavedStorage]) -> None:
        others = self._held_bytes() - self._reclaim.pending_bytes
        self._reclaim.reclaim_until(lambda: self._reclaim.pending_bytes + others <= allowed)
        excess = self._held_bytes() - allowed
        back = [saved for saved in self._resident.values() if saved.state is not State.ON_DEVICE and saved not in exclude]
        for saved in sorted(back, key=lambda saved: self._order.rank(saved.index), reverse=True):
            if excess <= 0:
                return
            with suppress(torch.OutOfMemoryError):  # of one that moves in part: for what of it stays
                saved.drop_restored()
                excess -= saved.nbytes
        if excess <= 0:
            return
        if (swap_outs := self._swap_outs()) is not None:
            swap_outs.pack_small()
        others = self._held_bytes() - self._reclaim.pending_bytes
        self._reclaim.reclaim_until(lambda: self._reclaim.pending_bytes + others <= allowed)
        try:
            # Down to half: every hook adds some, and what is there is gone through each time.
            self._small.swap_out_oldest(max(0, allowed // 2 - self._resident_bytes()), swap_out_now)
            excess = self._held_bytes() - allowed
            stay = [saved for saved in self._resident.values() if saved.state is State.ON_DEVICE and saved not in exclude]
            for saved in stay:
                if excess <= 0:
                    return
                if saved.op_is_over and saved.is_copyable:
                    swap_out_now(saved)
                    excess -= saved.nbytes
        except (TransferFailed, HostMemoryExhausted):
            return  # the host takes no more: synchronous hooks would have failed here


_OCCUPYING = (State.ON_DEVICE, State.SWAPPING_IN, State.RESTORED)
