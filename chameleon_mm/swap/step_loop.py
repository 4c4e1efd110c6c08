"""Run a compiled plan: at each hook of a step, execute the next row's ops.

loop.follow(way, director)             # after a general hook: the loop takes the next ones
handle = loop.save(t)                  # None: the executor must do this hook
t = loop.use(handle)                   # None: the same
loop.leave()                           # the director takes the next hook
loop.carry_out(way, ops)               # the ops of a row; the executor's hooks run them too

    hook += 1; the row's key equals this hook's?  ->  run the row's ops, make or use the handle
                                             no  ->  leave: the director and the executor do this hook, with the same storages

The storages, the host copies, the order of waits and the budget are the executor's own, so leaving converts nothing. The loop
saves the search: the hook's place in the step, the ops due there, and the storage meant are in the row. Each op checks the
state of its storage first, because a memory shortage may have moved it meanwhile.

A key holds less than the step's features: neither the node of a use nor the distance to a storage's last save. A different step
with the same keys still computes eager's bits: a save finds its slot by the storage object, memory is emptied only if nobody
else refers to it, and a tensor stays on the device only for a reason of its own. Note [No plan, no harm].
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from threading import get_ident
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chameleon_mm.device import Event, Stream
from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.plan.step_program import DROP, FIRST, KEPT, OUT, RELEASE, USE, Op, Row
from chameleon_mm.pool.block import PinnedBlock
from chameleon_mm.swap.calling_thread import sequence_nr
from chameleon_mm.swap.classify import reason_to_stay
from chameleon_mm.swap.copy_queue import Move
from chameleon_mm.swap.director import Director
from chameleon_mm.swap.handles import Handle, KeptTensor, SavedBytes, SwappedView
from chameleon_mm.swap.host_copy import HostCopy, State
from chameleon_mm.swap.native_loop import NativeLoop
from chameleon_mm.swap.saved_storage import SavedStorage
from chameleon_mm.swap.way import Way

if TYPE_CHECKING:
    from chameleon_mm.swap.executor import Executor

_ON_DEVICE, _LEAVING = State.ON_DEVICE, State.SWAPPING_OUT  # bound once: an enum member is a slow lookup


class StepLoop:
    """Loop over the rows of a program. Not thread-safe: the executor holds its lock."""

    def __init__(self, executor: Executor) -> None:
        parts, context = executor.parts, executor.parts.context
        self._executor = weakref.ref(executor)
        self._device, self._context, self._protected = executor.device, context, executor.protected
        self._claims, self._budget, self._outs, self._ins = parts.claims, parts.budget, parts.outs, parts.ins
        self._recomputing = parts.recomputing
        self._out, self._back = context.transfer.streams
        self._queued_out, self._queued_in = context.transfer.queued
        self._pending = context.held, parts.budget.reclaim.entries, self._queued_out, self._queued_in
        """What may have to be handed over, or let go of, at any hook."""
        self._held, self._totals = context.held, context.metrics.totals
        self._ready: Event | None = None
        """Event that compute records before each copy, reused."""
        self.follows = False
        """True if the loop takes the next hook."""
        self.hook = -1
        """Number of the latest hook that the loop did."""
        self._way: Way | None = None
        self._rows: tuple[Row, ...] = ()
        """Rows of the latest program."""
        self._min_bytes = executor.rule.min_bytes
        self.native = NativeLoop.of(executor)
        """The same loop in C++, where that is built; it follows only while this one does."""

    # --- a step

    def follow(self, way: Way, director: Director) -> None:
        """Follow `way` from the next hook on, unless work is pending that the loop cannot finish."""
        compute, outs = self._device.current_stream(), self._outs
        assert director.light is not None
        if not self._context.streams.is_only(compute) or self._context.checksums is not None or outs.waiting_bytes:
            return
        if any(saved.number is None or way.storages.get(saved.number) is not saved for saved in outs.fresh):
            return  # the plan does not know it, or it is another step's
        self._way, self.director, self._compute = way, director, compute
        self._rows, self._nbytes = way.program.rows, way.program.nbytes
        self._epoch, self._latest = way.epoch, director.light.latest()
        if self._ready is None:
            self._ready = compute.record()
        self.hook, self.follows = way.hook, True
        if self.native is not None:
            self.native.enter(way, director, self._latest, compute)

    def leave(self) -> None:
        """Hand the next hook to the director."""
        if self.follows:
            self.follows = False
            self.director.rejoin(self.hook, self._latest)

    def forget(self) -> None:
        """Forget the step, and let go of its storages."""
        self.leave()
        self.hook, self._way = -1, None

    # --- the two hooks

    def save(self, t: Tensor) -> Handle | None:
        """Return the handle of the saved tensor `t`, or None if the executor must make it."""
        if not self.follows:  # asked without the lock before
            return None
        hook, now, thread, latest = self.hook + 1, sequence_nr(), get_ident(), self._latest
        row = self._rows[hook]
        kind = row.kind
        try:
            agrees = kind < USE and row.key == (type(t), t.shape, t.dtype, now - latest.numbers.get(thread, now))
            storage = t.untyped_storage() if agrees and kind != KEPT else None
        except RuntimeError:  # a nested tensor has no shape, a sparse one no storage
            agrees = False
        is_due = self._is_due(row)
        reason = reason_to_stay(t, self._protected, self._min_bytes) if agrees and kind == KEPT else None
        if (
            not agrees
            or (reason is None if storage is None else not self._may_move(t, storage, row.number))
            or (is_due and not self._run(row, hook))
        ):
            self.leave()
            return None
        handle: Handle | None
        if storage is None:
            assert reason is not None
            handle = KeptTensor(t, by_reference=reason == "parameter")
            self._totals.kept_by_reason[reason] += 1
        else:
            handle = self.moving(t, storage, row, hook)
        if handle is None:
            self.leave()
            return None
        self.hook, latest.thread, latest.numbers[thread] = hook, thread, now
        if row.ins:
            self.prefetch(row.ins)
        handle.saved_at = (self._epoch, hook)
        if self.native is not None and self._way is not None:
            self.native.enter(self._way, self.director, latest, self._compute)
        return handle

    def use(self, handle: Handle) -> Tensor | None:
        """Return the tensor of `handle`, whose version was checked, or None if the executor must do it."""
        if not self.follows:
            return None
        hook, saved_at = self.hook + 1, handle.saved_at
        row = self._rows[hook]
        is_due = self._is_due(row)
        agrees = row.kind == USE and saved_at == (self._epoch, row.key)
        if not agrees or (is_due and not self._run(row, hook)):
            self.leave()
            return None
        if type(handle) is KeptTensor:
            t = handle.tensor
        elif type(handle) is SwappedView:
            t = self.restored(handle)
        else:
            self.leave()
            return None
        self.hook = hook
        self._latest.last_used = saved_at[1]
        if row.ins:
            self.prefetch(row.ins)
        return t

    # --- saves

    def _may_move(self, t: Tensor, storage: torch.UntypedStorage, number: int) -> bool:
        """True if `t` is an activation in a storage of the row's size. The conditions are those of `facts_of`."""
        base = t._base
        holder = t if base is None else base
        if type(holder) is not Tensor or t.layout is not torch.strided or storage.nbytes() != self._nbytes[number]:
            return False
        if t.requires_grad and not holder.requires_grad:
            return False  # a view made by a custom function: it may be part of a parameter
        if (holder.requires_grad and holder.is_leaf) or t._is_zerotensor() or not storage.resizable():
            return False
        if id(storage) in self._protected.refs and storage in self._protected:
            return False
        return self._device.owns(t)

    def moving(self, t: Tensor, storage: torch.UntypedStorage, row: Row, hook: int) -> SwappedView | None:
        """Return the handle of a tensor that the plan may move, or None. Note [Identity]."""
        way, number, compute = self._way, row.number, self._compute
        assert way is not None
        if not compute.is_current():
            return None
        ref = self._claims.by_storage.get(id(storage))
        if row.kind == FIRST:
            executor = self._executor()
            if ref is not None or executor is None:
                return None  # the storage may have a claim: the executor finds out
            saved_bytes = SavedBytes(t)
            claim = executor.new_claim(t, saved_bytes, compute)
            saved = claim.saved
            saved.number = number
            way.storages[number] = way.first_saves[hook] = saved
        else:
            known, expected = None if ref is None else ref(), way.storages.get(number)
            if known is None or expected is None or known.saved is not expected:
                return None
            claim, saved = known, expected
            saved_bytes = SavedBytes(t)
            if saved.slot.storage is not storage or saved.slot.alloc_stream is not compute:
                return None
            if saved.state is _ON_DEVICE:
                saved.slot.include(saved_bytes)
            elif not saved.slot.includes(saved_bytes):
                return None  # its copy has begun and lacks these bytes
            saved.add_view(saved_bytes)
            if saved.state is _ON_DEVICE:
                self._outs.add(saved)
        saved.slot.note_save(self._epoch, hook)
        return SwappedView(claim, saved_bytes)

    # --- uses

    def restored(self, handle: SwappedView) -> Tensor:
        """Bring the tensor of `handle` to the device."""
        executor, saved = self._executor(), handle.claim.saved
        assert executor is not None
        if saved.state is _ON_DEVICE and saved.gathered is None:
            executor.count_use(handle, saved)
            self._totals.uses_on_device += 1
            return handle.saved.alias.detach()
        storage = self._ins.restore(saved, self._compute)
        executor.count_use(handle, saved)
        if storage is saved.slot.storage and saved.gathered is None:
            return handle.saved.alias.detach()  # a new reference for each user: the use count then shows every holder
        return handle.saved.over(storage)

    # --- the ops

    def _is_due(self, row: Row) -> bool:
        """True if `_run` has work at `row`, or must ask first whether `prefetch` may run."""
        assert self._way is not None
        return bool(row.is_checked or row.ops or row.ins or self._way.late or any(self._pending))

    def _run(self, row: Row, hook: int) -> bool:
        """Do what is due before the hook's own storage is used. Return False if the step must leave."""
        way, lending, pending = self._way, self._budget.lending, any(self._pending)
        assert way is not None
        way.hook = hook
        if not self._compute.is_current() or self._budget.forecast is not way:
            return False  # another stream, device or a capture; or the step takes more memory than planned
        if lending is not None:
            lending.settle()
        if self._held:
            self._outs.let_go_of_held()
        if row.ops or way.late:
            self.carry_out(way, row.ops)
        if pending or lending is not None:
            self._outs.hand_over(lending)
        if not row.is_checked:
            return True
        way.growth_bytes = row.growth + way.margin_bytes  # as `Way.at` does, without a call
        self.director.note_growth(self._budget.check_memory(), at_hook=row.number >= 0, hook=hook)
        return self._budget.forecast is way  # else the plan is not trusted any more

    def carry_out(self, way: Way, ops: Sequence[Op]) -> None:
        """Execute `ops`, behind those that are late. An op waits until the operator that saved its storage is over."""
        late, way.late = way.late, []
        for op in (*late, *ops):
            code, number, nbytes = op
            saved = way.storages.get(number)
            if saved is None:
                continue
            if saved.state is _ON_DEVICE and not self._outs.is_over(saved):
                way.late.append(op if code == DROP else (OUT, number, nbytes))
            elif code == OUT:
                self._copy_out(saved, nbytes)
            elif code == DROP:
                for refused in self._recomputing.drop_all((saved,)):
                    self._outs.swap_out(refused, alone=True)  # the plan has no room for packing
            else:
                self._reclaim(saved, nbytes, again=code == RELEASE)

    def _copy_out(self, saved: SavedStorage, nbytes: int) -> None:
        """Start the copy out of the last bytes. Note [Swap-out]. A refused storage stays on the device."""
        context, out, storage = self._context, self._out, saved.slot.storage
        if not self.follows or nbytes < saved.nbytes:
            self._outs.swap_out_planned(saved, nbytes)
            return
        if saved.state is not _ON_DEVICE or not saved.is_copyable or storage is None:
            return
        if self._queued_out:
            context.transfer.hand_over_all_out()  # queued parts go first: each direction copies in the plan's order
        try:
            block = context.pool.allocate(saved.nbytes, out)  # Note [Host block]: its last use -> this copy
        except HostMemoryExhausted:
            self._outs.swap_out_planned(saved, nbytes)  # to pageable memory, if it must not stay
            return
        move = self._issue(out, storage, block)  # Note [Swap-out]: the operators that wrote it -> its copy
        if move is None:
            block.release()
            return
        saved.leaves_by(HostCopy.issued(block, move, context))
        self._outs.note_planned(saved)

    def _reclaim(self, saved: SavedStorage, nbytes: int, *, again: bool) -> None:
        """Order compute after the copy out and free the memory. Note [Reclaim]. `again`: the host may have the bytes."""
        if again and saved.state is State.RESTORED:
            with suppress(torch.OutOfMemoryError):  # no memory for the part that stays
                saved.drop_restored()
        if saved.state is _ON_DEVICE:
            self._copy_out(saved, nbytes)
        if saved.state is _LEAVING:
            saved.reclaim(in_plan_order=True)
            if saved.form.device_bytes:
                self._budget.note_allocated(saved.form.device_bytes)

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Allocate memory and start the copies back. Note [Swap-in]. A use brings back the storages that find no memory."""
        way, budget = self._way, self._budget
        assert way is not None
        for number in numbers:
            saved = way.storages.get(number)
            if saved is None or not saved.may_be_prefetched:
                continue
            if not budget.has_room_ahead:
                return
            if saved.form.device_bytes or self._queued_in:  # each direction copies in the plan's order
                self._ins.prefetch_planned((saved,), self._compute)
            elif self._copy_back(saved):
                budget.note_allocated(saved.nbytes)
                self._totals.prefetches += 1

    def _copy_back(self, saved: SavedStorage) -> bool:
        """Allocate all of the storage and start its copy back. Return False if there is no memory, or the copy is refused."""
        compute, back, copy, storage = self._compute, self._back, saved.copy, saved.slot.storage
        assert copy is not None and copy.block is not None and copy.out.done is not None and storage is not None
        try:
            compute.resize(storage, saved.nbytes)
        except torch.OutOfMemoryError:
            return False
        # Note [Swap-in]: the memory's earlier owner, and the copy out -> the copy back
        move = self._issue(back, storage, copy.block, copy.out.done)
        if move is None:
            compute.resize(storage, 0)
            return False
        saved.comes_back_by(move, compute)
        return True

    def _issue(self, link: Stream, storage: torch.UntypedStorage, block: PinnedBlock, *after: Event) -> Move | None:
        """Hand the copy between all of `storage` and `block` to the device, on `link`, after compute's work so far and `after`.
        Return None if the device refuses it."""
        timed, ready = self._context.metrics.timed, self._ready
        assert ready is not None
        try:
            self._compute.record_again(ready)
            for event in (ready, *after):
                link.wait(event)  # the caller says what it orders
            start = link.record(timed=True) if timed else None
            link.copy_storage(storage, block.buffer, out=link is self._out)
            return Move.issued(block.nbytes, link.record(timed=timed), start)
        except BaseException as error:
            self._context.transfer.synchronize()  # a part of the copy may run without an event at its end
            if not isinstance(error, RuntimeError):
                raise
            self._outs.note_refusal(error)
            return None
