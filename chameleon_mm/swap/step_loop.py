"""Run a compiled plan: at each hook of a step, execute the next row's ops.

loop.follow(way, director)             # after a general hook: the loop takes the next ones
handle = loop.save(t)                  # None: the executor must do this hook
t = loop.use(handle)                   # None: the same
loop.leave()                           # the director takes the next hook
loop.advance(way, ops, finished)       # the work of a hook; the executor's hooks do it by this, too

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
from itertools import chain
from threading import get_ident
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chameleon_mm.plan.step_program import DROP, FIRST, KEPT, OUT, RELEASE, USE, Op, Row
from chameleon_mm.swap.calling_thread import sequence_nr
from chameleon_mm.swap.classify import reason_to_stay
from chameleon_mm.swap.director import Director
from chameleon_mm.swap.handles import Handle, KeptTensor, SavedBytes, SwappedView, WrapperHandle
from chameleon_mm.swap.host_copy import State
from chameleon_mm.swap.native_loop import NativeLoop
from chameleon_mm.swap.saved_storage import SavedStorage
from chameleon_mm.swap.way import Way

if TYPE_CHECKING:
    from chameleon_mm.swap.executor import Executor


class StepLoop:
    """Loop over the rows of a program. Not thread-safe: the executor holds its lock."""

    def __init__(self, executor: Executor) -> None:
        parts, context = executor.parts, executor.parts.context
        self._executor = weakref.ref(executor)
        self._device, self._context, self._protected = executor.device, context, executor.protected
        self._claims, self._budget, self._outs, self._ins = parts.claims, parts.budget, parts.outs, parts.ins
        self._recomputing = parts.recomputing
        self._pending = context.held, parts.budget.reclaim.entries, context.out_queue.queued, context.back_queue.queued
        """What may have to be handed over, or let go of, at any hook."""
        self._totals = context.metrics.totals
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
        try:
            agrees = row.kind < USE and row.key == (type(t), t.shape, t.dtype, now - latest.numbers.get(thread, now))
        except RuntimeError:  # a nested tensor has no shape
            agrees = False
        handle: Handle | None = None
        if agrees and row.kind == KEPT:
            reason = reason_to_stay(t, self._device, self._protected, self._min_bytes)
            if reason and reason != "subclass" and self._run(row, hook):
                handle = KeptTensor(t, by_reference=reason == "parameter")
                self._totals.kept_by_reason[reason] += 1
        elif agrees:
            moves = not reason_to_stay(t, self._device, self._protected)
            if moves and t.untyped_storage().nbytes() == self._nbytes[row.number] and self._run(row, hook):
                handle = self.moving(t, row, hook)
        if handle is None:
            self.leave()
            return None
        self.hook, latest.thread, latest.numbers[thread] = hook, thread, now
        way = self._way
        assert way is not None
        if row.ins:  # Note [Swap-in]: after the hook's own storage was used
            self._ins.prefetch_planned(way.coming(row), self._compute)
        handle.saved_at = (self._epoch, hook)
        if self.native is not None:
            self.native.enter(way, self.director, latest, self._compute)
        return handle

    def use(self, handle: Handle) -> Tensor | None:
        """Return the tensor of `handle`, whose version was checked, or None if the executor must do it."""
        if not self.follows:
            return None
        hook, saved_at = self.hook + 1, handle.saved_at
        row = self._rows[hook]
        agrees = row.kind == USE and saved_at == (self._epoch, row.key) and type(handle) is not WrapperHandle
        if not agrees or not self._run(row, hook):
            self.leave()
            return None
        executor, way = self._executor(), self._way
        assert executor is not None and way is not None and not isinstance(handle, WrapperHandle)
        t = handle.tensor if isinstance(handle, KeptTensor) else executor.restored(handle, self._compute)
        self.hook = hook
        self._latest.last_used = saved_at[1]
        if row.ins:
            self._ins.prefetch_planned(way.coming(row), self._compute)
        return t

    def moving(self, t: Tensor, row: Row, hook: int) -> SwappedView | None:
        """Return the handle of a tensor that the plan may move, or None. Note [Identity]."""
        way, executor, compute = self._way, self._executor(), self._compute
        if way is None or executor is None or not compute.is_current():
            return None
        if row.kind == FIRST:
            if id(t.untyped_storage()) in self._claims.by_storage:
                return None  # the storage may have a claim: the executor finds out
            saved_bytes = SavedBytes(t)
            claim = executor.new_claim(t, saved_bytes, compute)
            way.number(claim.saved, row.number)
            way.first_saves[hook] = claim.saved
        else:
            saved_bytes = SavedBytes(t)
            found = self._claims.find_whole(t, saved_bytes, compute)
            if found.claim is None or found.begins_again or found.claim.saved is not way.storages.get(row.number):
                return None
            claim = found.claim
            executor.include(found, saved_bytes, compute)
            claim.saved.add_view(saved_bytes)
        claim.saved.slot.note_save(self._epoch, hook)
        return SwappedView(claim, saved_bytes)

    # --- the work of a hook

    def _run(self, row: Row, hook: int) -> bool:
        """Do what is due before the hook's own storage is used. Return False if the step must leave."""
        way, budget = self._way, self._budget
        assert way is not None
        if not (row.is_checked or row.ops or row.ins or way.late or any(self._pending)):
            return True
        if not self._compute.is_current() or budget.way is not way:
            return False  # another stream, device or a capture; or the step takes more memory than planned
        way.hook, way.growth_bytes = hook, row.growth + way.margin_bytes  # as `Way.at` does, without a call
        self.advance(way, row.ops, ())
        if row.is_checked:
            self.director.note_growth(budget.check_memory(), at_hook=row.number >= 0, hook=hook)
        return budget.way is way  # else the plan is not trusted any more

    def advance(self, way: Way | None, ops: Sequence[Op], finished: Sequence[SavedStorage]) -> None:
        """Do the work of every hook, of the loop or of the executor, before memory is checked and the hook's own storage used.

        `way`: where a step with a plan is; None: it has none. `ops`: those that are due. `finished`: storages whose saving
        operators are over now.
        """
        outs, lending = self._outs, self._budget.lending
        for saved in self._recomputing.drop_all(()) if self._recomputing.waiting else ():
            outs.swap_out(saved, alone=True)  # the plan has no room for packing
        if lending is not None:
            lending.settle()
        if self._context.held:
            outs.let_go_of_held()
        if way is not None and (ops or way.late):
            self.carry_out(way, ops)
        for saved in finished:
            if saved.number is None:
                outs.swap_out(saved)
        if lending is not None or outs.small or any(self._pending):
            outs.pump(lending)

    def carry_out(self, way: Way, ops: Sequence[Op]) -> None:
        """Execute `ops`, behind those that are late. An op waits until the operator that saved its storage is over."""
        late, way.late = way.late, []
        for op in chain(late, ops):
            code, number, nbytes = op
            saved = way.storages.get(number)
            if saved is None:
                continue
            if saved.state is State.ON_DEVICE and not self._outs.is_over(saved):
                way.late.append(op if code == DROP else (OUT, number, nbytes))
            elif code == OUT:
                self._outs.swap_out_planned(saved, nbytes)
            elif code == DROP:
                for refused in self._recomputing.drop_all((saved,)):
                    self._outs.swap_out(refused, alone=True)  # the plan has no room for packing
            else:
                self._reclaim(saved, nbytes, again=code == RELEASE)

    def _reclaim(self, saved: SavedStorage, nbytes: int, *, again: bool) -> None:
        """Order compute after the copy out and free the memory. Note [Reclaim]. `again`: the host may have the bytes."""
        if again and saved.state is State.RESTORED:
            with suppress(torch.OutOfMemoryError):  # no memory for the part that stays
                saved.drop_restored()
        if saved.state is State.ON_DEVICE:
            self._outs.swap_out_planned(saved, nbytes)
        if saved.state is State.SWAPPING_OUT:
            saved.reclaim()
            if saved.form.device_bytes:
                self._budget.note_allocated(saved.form.device_bytes)
