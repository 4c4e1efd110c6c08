"""Keep the allocated device memory within a budget, by reclaiming storages whose bytes the host has or will have soon.

    check_memory()         # before the model goes on: allocated + growth until the next check <= budget ?
        no -> 1. reclaim storages that are being copied out, oldest first   (compute waits for the copies; no new bytes cross)
              2. drop storages that were swapped in, latest next use first (their host copies are still valid)
              3. pack the small storages that wait for other small ones
              4. swap out storages that stayed, or whose swap-out was cancelled; to pageable memory if none can be pinned
    room_for(nbytes)       # may a prefetch take this much now?
    note_allocated(nbytes) # count a swap-in, which is not growth of the model

A check reads the allocator once, and again only after reclaiming: one reading costs more than the rest of a hook. A `Forecast`
gives the growth of the model's allocation until the next check. The budget leaves that much free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from chameleon_mm.device import Device
from chameleon_mm.device.peak_watch import PeakWatch
from chameleon_mm.errors import HostMemoryExhausted, InfeasibleBudget, TransferFailed
from chameleon_mm.plan.rule import DEFAULT_BUDGET_SHARE, Headroom, Limits, UseOrder
from chameleon_mm.swap.host_copy import State
from chameleon_mm.swap.metrics import Metrics
from chameleon_mm.swap.reclaim import Lending, Reclaimable, ReclaimQueue
from chameleon_mm.swap.saved_storage import SavedStorage
from chameleon_mm.swap.way import Way
from chameleon_mm.units import allocated_size, format_size, is_auto, parse_budget, share_of

if TYPE_CHECKING:
    from chameleon_mm.swap.swap_outs import SwapOuts

# --- Budget of a session, as the user writes it


class BudgetTaken(NamedTuple):
    """Budget of device memory, in bytes, with its origin."""

    nbytes: int
    how: str = ""
    """Sentence that names the memory of which the budget is a share; empty if it was given in bytes."""


def take_budget(budget: float | str, device: Device) -> BudgetTaken:
    """Convert `budget` to bytes on `device`. A share is a share of the memory that is free now or held by this process there.
    "auto" is nine tenths of it. Raises as `parse_budget` does."""
    given = DEFAULT_BUDGET_SHARE if is_auto(budget) else budget
    share = share_of(given, "hbm_budget")
    if share is None:
        return BudgetTaken(parse_budget(given, what="hbm_budget"))
    capacity = device.capacity
    nbytes = parse_budget(given, lambda: capacity, what="hbm_budget")
    rest = "the rest is for fragmentation and memory outside of torch's allocator"
    return BudgetTaken(
        nbytes,
        f"{format_size(nbytes)}, {f'{float(share):.1%}'.replace('.0%', '%')} of the {format_size(capacity)} that {device.name} "
        f"has free or this process holds there{f' (auto: {rest})' if is_auto(budget) else ''}",
    )


# --- Check of a session's budget against the memory in use, before the session starts


def check_budget(
    device: Device,
    hbm_budget_bytes: int,
    *,
    tensors: Iterable[Tensor],
    movable_bytes: int,
    window_bytes: int,
) -> None:
    """Raise `InfeasibleBudget` if tensors that never move fill the budget.

    `tensors`: parameters and buffers. `movable_bytes`: allocated bytes that will leave the device. `window_bytes`: memory
    reserved for swapped parameters and gradients.
    """
    named = sum({id(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}.values())
    held = max(named, device.allocated_bytes() - movable_bytes) + window_bytes
    if hbm_budget_bytes > held:
        return
    raise InfeasibleBudget(
        f"hbm_budget: expected more than the {format_size(held)} of parameters, optimizer state and other tensors that are on "
        f"{device.name} already and never move, got {format_size(hbm_budget_bytes)}; raise the budget or make "
        f"the model smaller"
    )


# --- budget

UNKNOWN_SHARE = 0.5
"""Share of the budget above which unpinnable saved tensors go to slow pageable memory while the growth is unknown. The other
half is for the growth until the next check: an operator's result and its temporaries."""

PREFETCH_HORIZON = 8
"""Number of coming checks whose growth a prefetch leaves free. A prefetched storage stays on the device until its use."""

Forecast = Callable[[int], "int | None"]
"""Function of a number n: maximum bytes by which the model's allocation grows until any of the n checks after the next one;
None: unknown."""

_Made = TypeVar("_Made")

_NO_BOUND = 1 << 62


def swap_out_now(saved: SavedStorage) -> None:
    """Swap a storage out to pinned memory, or to pageable memory if none can be pinned. Reclaim its device memory at once.
    Raises `TransferFailed`, or `HostMemoryExhausted` if the host has no memory of either kind."""
    with suppress(HostMemoryExhausted):
        saved.swap_out()
    if saved.state is State.ON_DEVICE:
        saved.swap_out(pageable=True)
    saved.reclaim()


class Budget:
    """Memory budget of one device: checks allocation, reclaims memory, and limits prefetches."""

    def __init__(
        self,
        device: Device,
        limits: Limits,
        order: UseOrder,
        metrics: Metrics,
        *,
        storages: Callable[[], Iterable[SavedStorage]],
        swap_outs: Callable[[], SwapOuts | None],
    ) -> None:
        """`storages()`: all claimed storages. `swap_outs()`: the object that swaps storages out, or None once it is freed."""
        self.reclaim = ReclaimQueue()
        """Storages swapped out by the default rule, to be reclaimed once their copies are complete."""
        self.planned = ReclaimQueue()
        """Storages swapped out by a plan, to be reclaimed at the plan's hook or under pressure."""
        self.lending: Lending | None = None
        """Loans of storages to the device's allocator while they are copied out; None if the allocator has no hook."""
        self.headroom = Headroom()
        self.way: Way | None = None
        """Compiled plan that the step follows, with room for the model's growth; None if `expect` set a forecast since."""
        self._forecast: Forecast = self.headroom.need
        self.has_room_ahead = True
        """True if the growth until the next check fits, including a plan's copies back. Unknown growth counts as 0."""
        self.wanted_bytes = 0
        """Bytes allocated at the last check before it made room, plus the forecast growth, if the sum exceeds the budget; else
        0. The reader sets it to 0."""
        self.peak_watch = PeakWatch(0)
        """Watch of the memory peak since the step began, or since another moment that its owner chose."""
        self._device, self._limits, self._order, self._metrics = device, limits, order, metrics
        self._storages, self._swap_outs = storages, swap_outs
        self._cumulative: int | None = None
        """Cumulative bytes at the last check of this step."""
        self._cumulative_at_begin: int | None = None
        self._allocated = self._unused = self._taken = 0

    @property
    def hbm_budget_bytes(self) -> int:
        """Budget in bytes; without a budget, a number larger than any device memory."""
        return _NO_BOUND if self._limits.hbm_budget_bytes is None else self._limits.hbm_budget_bytes

    def change_budget(self, hbm_budget_bytes: int) -> None:
        """Set another budget, from the next check on."""
        self._limits = replace(self._limits, hbm_budget_bytes=hbm_budget_bytes)

    def begin_step(self) -> None:
        """Start counting the bytes that the step allocates."""
        if self._limits.hbm_budget_bytes is not None:
            now = self._device.read_memory()
            self._cumulative_at_begin, self._taken = now.cumulative_bytes, 0
            self.peak_watch.note(now.peak_bytes, now.allocated_bytes - now.unused_bytes)

    def check_memory(self) -> int:
        """Record the growth since the last check, and make room for the growth until the next one. Returns the bytes that the
        model allocated since the last check, freed ones included; 0 without a budget."""
        allowed = self._limits.leaving_bytes
        if allowed is not None:
            self.reclaim.reclaim_until(lambda: self.reclaim.pending_bytes <= allowed)
        if (budget := self._limits.hbm_budget_bytes) is None:
            if self.lending is not None:
                self.lending.hook.set_limits(_NO_BOUND, None)
            return 0
        growth = self._note_growth()
        seen_bytes = self._allocated - self._unused
        if self._metrics.timed:
            self._metrics.memory.append((self._device.host_us, seen_bytes))
        # A planned step must keep the budget too: memory that hooks do not see, such as a kept input, may use its room. A
        # plan's growth includes its own reclaims and prefetches at that hook.
        ahead = self._forecast(0) if (way := self.way) is None else way.growth_bytes
        if self.lending is not None:
            self.lending.hook.set_limits(budget, ahead)
        if ahead is None or self._allocated + ahead > budget:
            self.wanted_bytes = self._allocated + (ahead or 0)
            self._make_room(0, ahead, exclude=())
        self.has_room_ahead = self._allocated + (ahead or 0) <= budget
        return growth

    def allocated_bytes(self) -> int:
        """Bytes allocated on the device now."""
        self._allocated = self._device.allocated_bytes()
        return self._allocated

    def peak_allocated_bytes(self) -> int:
        """Maximum bytes allocated on the device since its peak was last reset."""
        return self._device.peak_allocated_bytes()

    def fits_now(self, nbytes: int) -> bool:
        """True if `nbytes` may be allocated for a moment within this hook."""
        return self._limits.hbm_budget_bytes is None or self.allocated_bytes() + allocated_size(nbytes) <= self.hbm_budget_bytes

    def spare_bytes(self) -> int:
        """Bytes that may be allocated for a moment, besides the model's growth. Reads the allocator if there is a budget,
        because operators may have allocated since the last check."""
        budget = self._limits.hbm_budget_bytes
        if budget is None:
            return _NO_BOUND
        return max(0, budget - self.allocated_bytes() - (self.growth() or 0))

    def spare_until_used_bytes(self) -> int:
        """Bytes that may be allocated now and held for `PREFETCH_HORIZON` checks; 0 if the growth until then is unknown."""
        budget, growth_bytes = self._limits.hbm_budget_bytes, self.growth(PREFETCH_HORIZON)
        if budget is None:
            return _NO_BOUND
        return 0 if growth_bytes is None else max(0, budget - self._allocated - growth_bytes)

    # --- forecast

    def expect(self, forecast: Forecast) -> None:
        """Note that the step follows no plan from now on, and use `forecast` for the growth of the model's allocation."""
        self.way, self._forecast = None, forecast

    def growth(self, checks: int = 0) -> int | None:
        """Maximum bytes by which the model's allocation grows until the next check of memory, or until any of `checks` more
        checks. Growth that a plan includes is not counted. None: unknown."""
        return self._forecast(checks) if self.way is None else 0

    # --- checks made by the loop

    @property
    def cumulative_bytes(self) -> int | None:
        """Cumulative bytes at the last check of this step, or at its beginning; None if they were not read."""
        return self._cumulative_at_begin if self._cumulative is None else self._cumulative

    @property
    def last_allocated_bytes(self) -> int:
        """Bytes allocated at the last reading, and by swap-ins since."""
        return self._allocated

    @property
    def taken_bytes(self) -> int:
        """Bytes that swap-ins took since the last check."""
        return self._taken

    def note_checks(self, growths: Sequence[int], *, allocated: int, cumulative: int, taken: int, peak: int, seen: int) -> None:
        """Record checks of memory made by the loop: the growth at each, and the readings of the last. `peak`: last reading of
        the device's peak. `seen`: maximum of the bytes allocated at these checks."""
        for growth in growths if self._cumulative is not None else growths[1:]:
            self.headroom.record(growth)
        if growths:
            self._cumulative, self._unused = cumulative, 0
            self.peak_watch.note(peak, seen)
        self._allocated, self._taken = allocated, taken

    def note_allocated(self, nbytes: int) -> None:
        """Count `nbytes` as allocated by a swap-in, not as growth of the model."""
        rounded = allocated_size(nbytes)
        self._taken += rounded
        self._allocated += rounded

    def allocate(self, nbytes: int, allocate: Callable[[], _Made], *, exclude: Collection[SavedStorage] = ()) -> _Made:
        """Call `allocate` as `retry` does, and count the `nbytes` as a swap-in."""
        made = self.retry(allocate, exclude=exclude)
        self.note_allocated(nbytes)
        return made

    def retry(self, allocate: Callable[[], _Made], *, exclude: Collection[SavedStorage] = ()) -> _Made:
        """Call `allocate`. If there is no memory, reclaim all but `exclude` and call it again. Raises OutOfMemoryError."""
        with suppress(torch.OutOfMemoryError):  # retry after this block: the traceback would keep tensors alive
            return allocate()
        self._metrics.totals.oom_retries += 1
        self._reclaim_until(lambda: False, exclude)
        return allocate()

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Context for a replay. Memory allocated inside does not count as growth of the model."""
        if self._limits.hbm_budget_bytes is None:
            yield
            return
        before = self._device.read_memory().cumulative_bytes
        try:
            yield
        finally:
            now = self._device.read_memory()
            self._taken += now.cumulative_bytes - before
            self._allocated = now.allocated_bytes

    def make_room(self, nbytes: int, *, exclude: Collection[SavedStorage], is_planned: bool = False) -> None:
        """Reclaim until `nbytes` plus the growth until the next check fit, or nothing is left to reclaim. Never reclaim
        `exclude`. `is_planned`: the growth of the plan that the step follows already includes these bytes.

        Raises `HostMemoryExhausted` if allocation exceeds the budget because the host has no memory, pinned or pageable.
        """
        nbytes = allocated_size(nbytes)
        ahead = self.growth() if is_planned or self.way is None else self.way.growth_bytes
        self._make_room(nbytes, ahead, exclude)
        if not is_planned:
            self.has_room_ahead = self._allocated + nbytes + (ahead or 0) <= self.hbm_budget_bytes

    def room_was_made(self, nbytes: int, *, exclude: Collection[SavedStorage]) -> bool:
        """Reclaim as `make_room` does, for an optional allocation. Returns True if `nbytes` fit now."""
        self._reclaim_for(allocated_size(nbytes), self.growth(), exclude)
        return self._allocated + allocated_size(nbytes) <= self.hbm_budget_bytes

    def _make_room(self, nbytes: int, growth_bytes: int | None, exclude: Collection[SavedStorage]) -> None:
        """Make room as `make_room` does. `growth_bytes`: growth of the model until the next check; None: unknown."""
        refused = self._reclaim_for(nbytes, growth_bytes, exclude)
        budget = self.hbm_budget_bytes
        if self._allocated + nbytes > budget:
            self._metrics.totals.budget_misses += 1
            if refused is not None:
                raise HostMemoryExhausted(
                    f"saved tensors: expected {self._allocated} bytes of device memory, and {nbytes} more for the next use, to "
                    f"come down to the budget of {budget}, but the host takes no more of them: {refused}; raise hbm_budget, "
                    f"free host memory, or make the batch smaller"
                )

    def _reclaim_for(self, nbytes: int, growth_bytes: int | None, exclude: Collection[SavedStorage]) -> str | None:
        """Reclaim until `nbytes` and the growth fit. Returns the host's refusal if the host took no more, else None."""
        budget = self._limits.hbm_budget_bytes
        if budget is None:
            return None
        if growth_bytes is None and len(self.reclaim):  # growth unknown: reclaim all that is being copied out
            self.reclaim.reclaim_until(lambda: False)
            self._allocated = self._device.allocated_bytes()
        limit = budget - nbytes - (growth_bytes or 0)
        if self._allocated <= limit:
            return None

        def enough() -> bool:
            self._allocated = self._device.allocated_bytes()
            return self._allocated <= limit

        refused = self._reclaim_until(enough, exclude)
        enough()  # read the allocator again, to include the last reclaim
        return refused

    @property
    def growth_is_unknown(self) -> bool:
        """True if there is a budget, and no forecast of the growth until the next check."""
        return self._limits.hbm_budget_bytes is not None and self.growth() is None

    @property
    def must_use_pageable(self) -> bool:
        """True if unpinnable tensors must go to pageable memory: growth is unknown, and over `UNKNOWN_SHARE` is allocated."""
        return self.growth_is_unknown and self._allocated > (self._limits.hbm_budget_bytes or 0) * UNKNOWN_SHARE

    def reclaim_some(self, nbytes: int, busy: Sequence[torch.UntypedStorage]) -> bool:
        """Reclaim memory after a failed allocation of about `nbytes`: the storages being copied out, or if there are none, one
        storage that is not in `busy`. Returns True if anything was reclaimed."""
        if len(self.reclaim) or len(self.planned):
            self.reclaim_pending()
            return True
        taken = {id(storage) for storage in busy}
        for saved in self._restored():
            if id(saved.device) not in taken:
                with suppress(torch.OutOfMemoryError):
                    if saved.drop_restored():
                        return True
        choices = [saved for saved in self._resident() if id(saved.device) not in taken]
        # Best fit: the smallest that is large enough, else the largest.
        for saved in sorted(choices, key=lambda saved: (saved.nbytes < nbytes, abs(saved.nbytes - nbytes))):
            with suppress(TransferFailed, HostMemoryExhausted):
                swap_out_now(saved)
                return True
        return False

    def _restored(self) -> list[SavedStorage]:
        """Return the storages that both host and device hold, latest next use first."""
        both = [saved for saved in self._storages() if saved.state in (State.SWAPPING_IN, State.RESTORED)]
        return sorted(both, key=lambda saved: self._order.rank(saved.index), reverse=True)

    def _resident(self) -> list[SavedStorage]:
        """Return the storages that are only on the device and may be copied."""
        outs = self._swap_outs()
        return [
            saved
            for saved in self._storages()
            if saved.state is State.ON_DEVICE and (outs is None or outs.is_over(saved)) and saved.is_copyable
        ]

    def room_for(self, nbytes: int) -> bool:
        """True if a prefetch of `nbytes` leaves enough room for the model's growth."""
        if self._limits.ahead_bytes is not None:
            ahead = sum(allocated_size(saved.nbytes) for saved in self._storages() if saved.state is State.SWAPPING_IN)
            if ahead + allocated_size(nbytes) > self._limits.ahead_bytes:
                return False
        return allocated_size(nbytes) <= self.spare_until_used_bytes()

    def end_step(self, *, completed: bool) -> int:
        """End the step, and learn its growth if it `completed`. Returns the same bytes as `check_memory`."""
        growth = self._note_growth() if self._cumulative is not None else 0
        self._cumulative = self._cumulative_at_begin = None
        self.headroom.end_step(completed=completed)
        return growth

    def _note_growth(self) -> int:
        now = self._device.read_memory()
        since = self._cumulative_at_begin if self._cumulative is None else self._cumulative
        growth = 0 if since is None else max(0, now.cumulative_bytes - since - self._taken)
        if self._cumulative is not None:
            self.headroom.record(growth)
        (self._allocated, self._cumulative, peak_bytes, self._unused), self._taken = now, 0
        self.peak_watch.note(peak_bytes, self._allocated - self._unused)
        return growth

    def reclaim_pending(self) -> None:
        """Reclaim all storages that are being copied out."""
        self.reclaim.reclaim_until(lambda: False)
        self.planned.reclaim_until(lambda: False)

    def _reclaim_until(self, enough: Callable[[], bool], exclude: Collection[SavedStorage]) -> str | None:
        """Reclaim until `enough()`. Returns the host's refusal if the host took no more, else None.

        A storage that moves in part is reclaimed only if its staying bytes have room, or if the budget is exceeded now.
        """
        self.reclaim.reclaim_until(enough)
        # Storages that move whole come first: the others need memory for their staying bytes before they are freed.
        self.planned.reclaim_some_until(enough, _is_whole)
        self.planned.reclaim_some_until(enough, self._can_go)
        if enough():
            return None
        self._drop_restored_until(enough, exclude, self._can_go)
        if enough():
            return None
        if (swap_outs := self._swap_outs()) is not None:
            swap_outs.pack_small()
        self.reclaim.reclaim_until(enough)
        try:
            for saved in self._resident():
                if saved in exclude:
                    continue
                if enough():
                    return None
                swap_out_now(saved)
            self.planned.reclaim_some_until(enough, self._can_go)
            if self._allocated > self.hbm_budget_bytes:
                self.planned.reclaim_until(enough)
                self._drop_restored_until(enough, exclude, lambda saved: True)
        except TransferFailed:
            return None
        except HostMemoryExhausted as refusal:
            return str(refusal)
        return None

    def _drop_restored_until(
        self, enough: Callable[[], bool], exclude: Collection[SavedStorage], some: Callable[[SavedStorage], bool]
    ) -> None:
        """Drop restored storages for which `some` is true, until `enough()`. Never drop `exclude`."""
        for saved in self._restored():
            if enough():
                return
            if saved in exclude or not some(saved):
                continue
            with suppress(torch.OutOfMemoryError):  # no memory for the staying bytes of a partial move
                saved.drop_restored()

    def _can_go(self, entry: Reclaimable) -> bool:
        """True if no bytes of the storage stay on the device, or there is room for them now."""
        return _is_whole(entry) or self.fits_now(allocated_size(_staying_bytes(entry)))


def _is_whole(entry: Reclaimable) -> bool:
    return not _staying_bytes(entry)


def _staying_bytes(entry: Reclaimable) -> int:
    """Return the number of bytes that stay in a buffer on the device when the storage is reclaimed."""
    return entry.form.device_bytes if isinstance(entry, SavedStorage) else 0
