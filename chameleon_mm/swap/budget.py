"""Keeps the device's allocated memory within its budget by reclaiming what the host already has, or soon will.

    check_memory()         # before the model goes on: allocated + what it will allocate until the next check <= budget ?
        no -> 1. wait for copies on their way out, oldest first          (no new bytes cross)
              2. drop what was swapped in and is used last               (its host copy is still good)
              3. pack the small ones that wait for more of their kind
              4. swap out what stayed, or whose swap-out was cancelled by a use: to ordinary memory where no more can be pinned
    room_for(nbytes)       # may a prefetch take this much now?
    note_allocated(nbytes) # the swap-in was allocated: ours, not the model's growth

One reading of the allocator per check, unless something is reclaimed: a reading costs more than all else in a hook.
A `Forecast` says how far the model's own allocation will grow until memory is checked again: what the budget leaves free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from chameleon_mm.device import Device
from chameleon_mm.errors import HostMemoryExhausted, InfeasibleBudget, TransferFailed
from chameleon_mm.plan.rule import Headroom, Limits, UseOrder
from chameleon_mm.swap.host_copy import State
from chameleon_mm.swap.metrics import Metrics
from chameleon_mm.swap.reclaim import Lending, Reclaimable, ReclaimQueue
from chameleon_mm.swap.saved_storage import SavedStorage
from chameleon_mm.swap.way import PREFETCH_HORIZON, Forecast, HighestForecast, LearnedForecast, Way
from chameleon_mm.units import allocated_size, format_size

# --- Checks a session's budget against what lies on the device already, before anything is started


def check_budget(
    device: Device,
    hbm_budget_bytes: int,
    *,
    tensors: Iterable[Tensor],
    movable_bytes: int,
    window_bytes: int,
    checksum_bytes: int,
) -> None:
    """Raise `InfeasibleBudget` for a budget that what never moves takes already.

    `tensors`: parameters and buffers. `movable_bytes`: what of the allocated bytes will leave. `window_bytes`: what is
    set aside for parameters and gradients that come and go. `checksum_bytes`: what `verify=True` takes.
    """
    named = sum({id(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}.values())
    held = max(named, device.allocated_bytes() - movable_bytes) + window_bytes + checksum_bytes
    if hbm_budget_bytes > held:
        return
    and_checksums = f" ({format_size(checksum_bytes)} of it for verify=True)" if checksum_bytes else ""
    raise InfeasibleBudget(
        f"hbm_budget: expected more than the {format_size(held)} of parameters, optimizer state and other tensors that are on "
        f"{device.name} already and never move{and_checksums}, got {format_size(hbm_budget_bytes)}; raise the budget or make "
        f"the model smaller"
    )


# --- budget

UNKNOWN_SHARE = 0.5
"""Share of the budget that may be allocated before saved tensors go to pageable memory, which is slow, while no step is known:
the other half is for the climb until the next check, an operator's result and its temporaries."""

_Made = TypeVar("_Made")

_NO_BOUND = 1 << 62


class PendingSwapOuts(Protocol):
    """Interface of what swaps saved storages out."""

    def pack_small(self) -> None:
        """Swaps out the small storages that wait for more of their kind."""


def swap_out_now(saved: SavedStorage) -> None:
    """Swap a storage out to pinned memory, else to ordinary, and reclaim its device memory at once. Raises `TransferFailed`,
    and `HostMemoryExhausted` where the host has neither."""
    with suppress(HostMemoryExhausted):
        saved.swap_out()
    if saved.state is State.ON_DEVICE:
        saved.swap_out(pageable=True)
    saved.reclaim()


class Budget:
    """Keeps one device's memory within its budget: checks it, reclaims, and says how much prefetches may take."""

    def __init__(
        self,
        device: Device,
        limits: Limits,
        order: UseOrder,
        metrics: Metrics,
        *,
        storages: Callable[[], Iterable[SavedStorage]],
        swap_outs: Callable[[], PendingSwapOuts | None],
    ) -> None:
        """`swap_outs` returns what swaps storages out, or None once that is gone."""
        self.reclaim = ReclaimQueue()
        """Swap-outs by the default rule: reclaimed once their copies are complete."""
        self.planned = ReclaimQueue()
        """Swap-outs by a plan: reclaimed when it says so, or under pressure."""
        self.lending: Lending | None = None
        """Lends what is on its way out to the device's allocator, where that has a hook."""
        self.headroom = Headroom()
        self.learned_forecast = LearnedForecast(self.headroom)
        self.highest_forecast = HighestForecast(self.headroom)
        self.forecast: Forecast = self.learned_forecast
        self.has_room_ahead = True
        """Whether what is allocated until the next check is known to fit, a plan's copies back included."""
        """How far the model's allocation will grow; another one for as long as a step follows a plan, or may be a new one."""
        self.peak_seen_bytes = 0
        """The most that was allocated at any check: a lower bound of the peak, for where the device's own says nothing."""
        self.peak_at_begin_bytes: int | None = None  # the device's own, as it was read when the step began
        self._device = device
        self._limits = limits
        self._order = order
        self._metrics = metrics
        self._storages = storages
        self._swap_outs = swap_outs
        self._cumulative: int | None = None
        """Cumulative bytes at the last check of this step."""
        self._cumulative_at_begin: int | None = None
        self._allocated = self._unused = self._taken = 0

    @property
    def hbm_budget_bytes(self) -> int:
        """The budget in bytes; more than any device has where there is none."""
        return _NO_BOUND if self._limits.hbm_budget_bytes is None else self._limits.hbm_budget_bytes

    def change_budget(self, hbm_budget_bytes: int) -> None:
        """Set another budget, from the next check on."""
        self._limits = replace(self._limits, hbm_budget_bytes=hbm_budget_bytes)

    def begin_step(self) -> None:
        """Begin to count what the step allocates."""
        if self._limits.hbm_budget_bytes is not None:
            now = self._device.read_memory()
            self._cumulative_at_begin, self.peak_at_begin_bytes, self._taken = now.cumulative_bytes, now.peak_bytes, 0

    def check_memory(self) -> int:
        """Record how far allocation grew since the last check, and make room for the growth until the next. Returns the bytes
        that the model allocated since then, freed ones included; 0 without a budget."""
        allowed = self._limits.leaving_bytes
        if allowed is not None:
            self.reclaim.reclaim_until(lambda: self.reclaim.pending_bytes <= allowed)
        if (budget := self._limits.hbm_budget_bytes) is None:
            if self.lending is not None:
                self.lending.set_limits(_NO_BOUND, None, allocated_bytes=_NO_BOUND)  # not read: taken to be short
            return 0
        growth = self._note_growth()
        seen_bytes = self._allocated - self._unused
        if (metrics := self._metrics).timed:
            metrics.memory.append((self._device.host_us, seen_bytes, metrics.pinned_units()))
        self.peak_seen_bytes = max(self.peak_seen_bytes, seen_bytes)
        # Never more than the budget as planned; what hooks do not see, as an input that is kept, may take what plans count on.
        # A plan counts on what it reclaims and prefetches at that hook. As `until_next_check`, without the call.
        ahead = self.forecast.growth_bytes if isinstance(self.forecast, Way) else self.forecast.growth()
        if self.lending is not None:
            self.lending.set_limits(budget, ahead, allocated_bytes=self._allocated)
        if ahead is None or self._allocated + ahead > budget:
            self._make_room(0, ahead, exclude=())
        self.has_room_ahead = self._allocated + (ahead or 0) <= budget
        return growth

    def allocated_bytes(self) -> int:
        """Bytes allocated on the device now."""
        self._allocated = self._device.allocated_bytes()
        return self._allocated

    def peak_allocated_bytes(self) -> int:
        """The most bytes allocated on the device, as far back as it knows."""
        return self._device.peak_allocated_bytes()

    def fits_now(self, nbytes: int) -> bool:
        """Whether `nbytes` may be allocated for a moment within this hook."""
        return self._limits.hbm_budget_bytes is None or self.allocated_bytes() + nbytes <= self.hbm_budget_bytes

    def spare_bytes(self) -> int:
        """Bytes that may be allocated for a moment, beside what the model will allocate. Reads memory where there is a budget:
        operators may have allocated since it was checked."""
        budget = self._limits.hbm_budget_bytes
        if budget is None:
            return _NO_BOUND
        return max(0, budget - self.allocated_bytes() - (self.forecast.growth() or 0))

    def spare_until_used_bytes(self) -> int:
        """Bytes that may be allocated now and held for a while, as far as the model's growth meanwhile is known."""
        budget, growth_bytes = self._limits.hbm_budget_bytes, self.forecast.growth(PREFETCH_HORIZON)
        if budget is None:
            return _NO_BOUND
        return 0 if growth_bytes is None else max(0, budget - self._allocated - growth_bytes)

    def note_allocated(self, nbytes: int) -> None:
        """Note that a swap-in was allocated."""
        rounded = allocated_size(nbytes)
        self._taken += rounded
        self._allocated += rounded

    def allocate(self, nbytes: int, allocate: Callable[[], _Made], *, exclude: Collection[SavedStorage] = ()) -> _Made:
        """Allocate `nbytes` for a use by `allocate`, as `retry` does."""
        made = self.retry(allocate, exclude=exclude)
        self.note_allocated(nbytes)
        return made

    def retry(self, allocate: Callable[[], _Made], *, exclude: Collection[SavedStorage] = ()) -> _Made:
        """Allocate; where there is no memory, once more after all but `exclude` was reclaimed. Raises OutOfMemoryError."""
        made = None
        with suppress(torch.OutOfMemoryError):  # retried outside: the exception's traceback would keep tensors alive
            made = allocate()
        if made is None:
            self._metrics.totals.oom_retries += 1
            self.reclaim_all(exclude)
            made = allocate()
        return made

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Context in which all that is allocated, and freed again or not, is a replay's: no growth of the model."""
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
        """Reclaim until `nbytes` and the growth until the next check fit, or nothing is left to reclaim; never `exclude`.
        `is_planned`: a plan that the step follows has these bytes in its own growth.

        Raises `HostMemoryExhausted` where the budget is passed because the host takes no more, pinned or not.
        """
        ahead = self.forecast.growth() if is_planned else self.forecast.until_next_check()
        self._make_room(nbytes, ahead, exclude)
        if not is_planned:
            self.has_room_ahead = self._allocated + nbytes + (ahead or 0) <= self.hbm_budget_bytes

    def room_was_made(self, nbytes: int, *, exclude: Collection[SavedStorage]) -> bool:
        """Reclaim as `make_room` does, for something that need not be done. Returns whether `nbytes` fit now."""
        self._reclaim_for(nbytes, self.forecast.growth(), exclude)
        return self._allocated + nbytes <= self.hbm_budget_bytes

    def _make_room(self, nbytes: int, growth_bytes: int | None, exclude: Collection[SavedStorage]) -> None:
        """`growth_bytes`: growth of the model until the next check; None: not known."""
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
        """Reclaim until `nbytes` and the growth fit. Returns why the host took no more, if that is what ended it."""
        budget = self._limits.hbm_budget_bytes
        if budget is None:
            return None
        if growth_bytes is None and len(self.reclaim):  # nothing learned yet: the least possible stays
            self.reclaim.reclaim_until(lambda: False)
            self._allocated = self._device.allocated_bytes()
        limit = budget - nbytes - (growth_bytes or 0)
        if self._allocated <= limit:
            return None

        def enough() -> bool:
            self._allocated = self._device.allocated_bytes()
            return self._allocated <= limit

        refused = self._reclaim_until(enough, exclude)
        enough()  # the last that was reclaimed counts as well
        return refused

    @property
    def growth_is_unknown(self) -> bool:
        """Whether there is a budget, and no forecast of the growth until the next check."""
        return self._limits.hbm_budget_bytes is not None and self.forecast.growth() is None

    @property
    def must_use_pageable(self) -> bool:
        """Whether what could not be pinned must not stay: much is allocated, and its growth is not known yet."""
        return self.growth_is_unknown and self._allocated > (self._limits.hbm_budget_bytes or 0) * UNKNOWN_SHARE

    def reclaim_all(self, exclude: Collection[SavedStorage]) -> None:
        """Reclaim everything that can be reclaimed, after a failed allocation."""
        self._reclaim_until(lambda: False, exclude)

    def reclaim_some(self, nbytes: int, busy: Sequence[torch.UntypedStorage]) -> bool:
        """Reclaim what is on its way out, else one more storage, after a failed allocation of about `nbytes`. Returns whether
        anything was reclaimed; never what lies in the storages `busy`."""
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
        """Storages that both host and device hold, the one that is used last first."""
        both = [saved for saved in self._storages() if saved.state in (State.SWAPPING_IN, State.RESTORED)]
        return sorted(both, key=lambda saved: self._order.rank(saved.index), reverse=True)

    def _resident(self) -> list[SavedStorage]:
        """Storages that are on the device alone, and may be copied."""
        return [
            saved for saved in self._storages() if saved.state is State.ON_DEVICE and saved.op_is_over and saved.is_copyable
        ]

    def room_for(self, nbytes: int) -> bool:
        """Whether a prefetch of `nbytes` leaves room for the model's growth."""
        if self._limits.ahead_bytes is not None:
            ahead = sum(saved.nbytes for saved in self._storages() if saved.state is State.SWAPPING_IN)
            if ahead + nbytes > self._limits.ahead_bytes:
                return False
        return nbytes <= self.spare_until_used_bytes()

    def end_step(self, *, completed: bool) -> int:
        """End the step; learn from it if it `completed`. Returns as `check_memory` does."""
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
        (self._allocated, self._cumulative, _, self._unused), self._taken = now, 0
        return growth

    def reclaim_pending(self) -> None:
        """Reclaim all that is on its way out."""
        self.reclaim.reclaim_until(lambda: False)
        self.planned.reclaim_until(lambda: False)

    def _reclaim_until(self, enough: Callable[[], bool], exclude: Collection[SavedStorage]) -> str | None:
        """Reclaim until `enough()`. Returns why the host took no more, if that is what ended it.

        What moves in part goes where there is room for what stays of it; if the budget is passed anyway, without.
        """
        self.reclaim.reclaim_until(enough)
        # Whole ones first: what stays of the others takes memory of its own before they go.
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
        """Drop the restored storages for which `some` is true, until `enough()`; never `exclude`."""
        for saved in self._restored():
            if enough():
                return
            if saved in exclude or not some(saved):
                continue
            with suppress(torch.OutOfMemoryError):  # of one that moves in part: for what of it stays
                saved.drop_restored()

    def _can_go(self, entry: Reclaimable) -> bool:
        """Whether nothing of it stays on the device, or there is room for that now."""
        return _is_whole(entry) or self.fits_now(allocated_size(_staying_bytes(entry)))


def _is_whole(entry: Reclaimable) -> bool:
    return not _staying_bytes(entry)


def _staying_bytes(entry: Reclaimable) -> int:
    """Bytes of a storage that stay on the device, in memory of their own, when it is reclaimed."""
    return entry.form.device_bytes if isinstance(entry, SavedStorage) else 0
