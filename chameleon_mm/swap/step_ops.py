"""Work of a hook: the ops of a plan's rows on saved storages, and what every hook does beside them.

ops.advance(way, due, finished)     # before memory is checked and the hook's own storage used
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain

import torch

from chameleon_mm.plan.step_program import DROP, OUT, RELEASE, Op
from chameleon_mm.swap.budget import Budget
from chameleon_mm.swap.host_copy import State, SwapContext
from chameleon_mm.swap.reclaim import Lending
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

    def __bool__(self) -> bool:
        """True if any hook has work, even without an op of its own."""
        return bool(self._recomputing.waiting) or any(self._pending)

    def advance(
        self, way: Way | None, ops: Sequence[Op], finished: Sequence[SavedStorage], lending: Lending | None = None
    ) -> None:
        """Do the work of every hook, of the loop or of the executor, before memory is checked and the hook's own storage used.

        `way`: where a step with a plan is; None: it has none. `ops`: those that are due. `finished`: storages whose saving
        operators are over now. `lending`: to which memory is lent; None: no memory is.
        """
        outs = self._outs
        if self._recomputing.waiting:
            self._drop(())
        if lending is not None:
            lending.settle()
        if self._context.held:
            outs.let_go_of_held()
        if way is not None and (ops or way.late):
            self._carry_out(way, ops)
        for saved in outs.due(finished) if finished or outs.in_part else ():
            if saved.number is None:
                outs.swap_out(saved)
        if lending is not None or outs.small or any(self._pending):
            outs.pump(lending)

    def _carry_out(self, way: Way, ops: Sequence[Op]) -> None:
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
                if number in way.dropped:
                    continue
                way.dropped.add(number)
                self._drop((saved,))
            else:
                self._reclaim(saved, nbytes, again=code == RELEASE)

    def _drop(self, due: Sequence[SavedStorage]) -> None:
        for refused in self._recomputing.drop_all(due):
            self._outs.swap_out(refused, alone=True)  # the plan has no room for packing

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
