"""Keeps the device within its budget by giving back what the host already has, or soon will.

look()                 # before the model goes on: allocated + what it will allocate until the next look <= budget ?
    no -> 1. wait for copies on their way out, oldest first          (no new bytes cross)
          2. drop what was swapped in and is used last               (its host copy is still good)
          3. swap out again what was taken back for a use
room_for(nbytes)       # may a prefetch take this much now?
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from chameleon_mm.device import Device
from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.executor.meter import Meter
from chameleon_mm.executor.stored import Place, SavedStorage
from chameleon_mm.policy import Headroom, Limits, UseOrder
from chameleon_mm.reclaim import ReclaimQueue

PREFETCH_HORIZON = 8
"""Looks ahead whose growth a prefetch leaves free: it stays on the device at least until the next uses."""


class BudgetGuard:
    """One device's budget, and the means to stay within it."""

    def __init__(
        self, device: Device, limits: Limits, order: UseOrder, meter: Meter, live: Callable[[], Iterable[SavedStorage]]
    ) -> None:
        self.reclaim = ReclaimQueue()
        self.headroom = Headroom()
        self._device = device
        self._limits = limits
        self._order = order
        self._meter = meter
        self._live = live
        self._odometer: int | None = None
        self.peak_seen_bytes = 0
        """The most that was allocated at any look: a lower bound of the peak, for where the device's own says nothing."""

    def look(self) -> None:
        """Note how far allocation climbed since the last look; make room for the next climb."""
        if self._odometer is not None:
            self.headroom.record(self._device.allocation_odometer_bytes() - self._odometer)
        if self._limits.leaving_bytes is not None:
            allowed = self._limits.leaving_bytes
            self.reclaim.flush(lambda: self.reclaim.pending_bytes <= allowed)
        self.peak_seen_bytes = max(self.peak_seen_bytes, self._device.allocated_bytes())
        self.make_room(0, keep=None)

    def looked(self) -> None:
        """The hook is over: what it allocated itself is not the model's growth."""
        self._odometer = self._device.allocation_odometer_bytes()

    def make_room(self, nbytes: int, *, keep: SavedStorage | None) -> None:
        """Give back until `nbytes` and the next climb fit, or nothing is left to give; never gives back `keep`."""
        budget = self._limits.hbm_budget_bytes
        if budget is None:
            return
        need = self.headroom.need()
        if need is None:  # nothing learned yet: the least possible stays
            self.reclaim.flush(lambda: False)
            need = 0
        limit = budget - nbytes - need

        def enough() -> bool:
            return self._device.allocated_bytes() <= limit

        self._give_back(enough, keep)
        if self._device.allocated_bytes() > budget - nbytes:
            self._meter.totals.budget_misses += 1

    def give_back_all(self, keep: SavedStorage | None) -> None:
        """After a failed allocation: everything that can be given back."""
        self._give_back(lambda: False, keep)

    def room_for(self, nbytes: int) -> bool:
        """Whether a prefetch of `nbytes` leaves the model what it needs."""
        if self._limits.ahead_bytes is not None:
            ahead = sum(saved.nbytes for saved in self._live() if saved.place is Place.ARRIVING)
            if ahead + nbytes > self._limits.ahead_bytes:
                return False
        budget = self._limits.hbm_budget_bytes
        if budget is None:
            return True
        need = self.headroom.need(ahead=PREFETCH_HORIZON)
        return need is not None and self._device.allocated_bytes() + nbytes + need <= budget

    def end_step(self, *, completed: bool) -> None:
        if self._odometer is not None:
            self.headroom.record(self._device.allocation_odometer_bytes() - self._odometer)
            self._odometer = None
        if completed:
            self.headroom.end_step()
        else:
            self.headroom.forget()

    def _give_back(self, enough: Callable[[], bool], keep: SavedStorage | None) -> None:
        self.reclaim.flush(enough)
        if enough():
            return
        restored = [s for s in self._live() if s.place in (Place.ARRIVING, Place.RESTORED) and s is not keep]
        for saved in sorted(restored, key=lambda s: self._order.rank(s.index), reverse=True):
            if enough():
                return
            saved.drop_restored()
        taken_back = [s for s in self._live() if s.place is Place.RESIDENT and s.op_is_over and s is not keep]
        for saved in taken_back:
            if enough():
                return
            try:
                saved.swap_out()
            except HostMemoryExhausted:
                return
            saved.reclaim()
