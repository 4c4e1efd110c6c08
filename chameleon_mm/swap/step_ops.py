"""Work of a hook: the ops of a plan's rows on saved storages, and what every hook does beside them.

ops.advance(way, due, finished)     # before memory is checked and the hook's own storage used
ops.carry_out(way, due)             # the ops alone: the loop has those of storages with records done by it
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain

import torch

from chameleon_mm.plan.step_program import DROP, OUT, RELEASE, Op
from chameleon_mm.swap.budget import Budget
from chameleon_mm.swap.host_copy import State, SwapContext
from chameleon_mm.swap.recomputing import Recomputing
from chameleon_mm.swap.saved_storage import SavedStorage
from chameleon_mm.swap.swap_outs import SwapOuts
from chameleon_mm.swap.way import Way


class StepOps:
    """Executes ops on saved storages. Not thread-safe: the executor holds its lock."""

    def __init__(self, context: SwapContext, budget: Budget, outs: SwapOuts, recomputing: Recomputing) -> None:
        self._context, self._budget, self._outs, self._recomputing = context, budget, outs, recomputing
        self._pending = context.held, budget.reclaim.entries, context.out_queue.queued, context.back_queue.queued
        """What may have to be handed over, or let go of, at any hook."""

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
        for saved in outs.due(finished):
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
