"""Runs a step again that ran out of memory, or recomputed other bits, from its beginning.

    start = what the step begins with                  # random states, buffers, gradients that exist
    run it -> OutOfMemoryError | RecomputeMismatch -> out of the except block, every frame of the step gone
        an optimizer stepped, or a parameter changed?  -> raise, and say that it was not run again; with a `Repair`, restore it
        start.restore(); out of memory: a tighter budget, no plan; run it again
    MAX_RETRIES times, then raise, and say what was tried

Out of the block first, because an exception's traceback holds the tensors of the frames it passed.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import nn

from chameleon_mm.errors import RecomputeMismatch
from chameleon_mm.executor.executor import Executor
from chameleon_mm.pinned import PinnedPool
from chameleon_mm.profiler.retry import tried_bytes
from chameleon_mm.rerun.step_start import BufferCopies, StepStart
from chameleon_mm.units import format_size

_log = logging.getLogger(__name__)

MAX_RETRIES = 3
"""Times that one step is run again after its first run."""

LEAST_CUT = 0.05
"""Share of the budget by which it is lowered at least."""

_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class _Result(Generic[_R]):
    """Return value of a step."""

    value: _R


@dataclass(frozen=True, slots=True)
class _Failure:
    """A run that found no memory, or recomputed other bits, without the exception itself: its frames hold tensors."""

    message: str
    is_mismatch: bool
    """True for other bits: what was recomputed wrongly is not recomputed any more, and the budget stays."""
    asked_bytes: int
    allocated_bytes: int
    """Device memory allocated when it failed."""
    where: str
    """The traceback, as text."""


class Repair(NamedTuple):
    """Way to put back what a step changes beyond gradients, buffers and random states, taken before it."""

    optimizer: torch.optim.Optimizer
    """The optimizer whose state and settings are put back, as all parameters are."""
    restore: Callable[[], None]
    """Puts it back, as often as it takes. Raises `torch.OutOfMemoryError`."""


class StepRunner:
    """Runs the steps of one session over `model`, and repeats those that run out of memory. Not thread-safe."""

    def __init__(self, executor: Executor, pool: PinnedPool, model: nn.Module, *, hbm_budget_bytes: int) -> None:
        self.hbm_budget_bytes = self._given_bytes = hbm_budget_bytes
        """The budget now: lowered by each step that had to run again."""
        self._executor = executor
        self._device = executor.device
        self._pool = pool
        self._model = model
        self._buffers = BufferCopies(model)

    @property
    def lowered_budget_bytes(self) -> int | None:
        """The budget now, where a step had to run again; else None."""
        return self.hbm_budget_bytes if self.hbm_budget_bytes < self._given_bytes else None

    def run(self, step: Callable[[], AbstractContextManager[object]], fn: Callable[[], _R], repair: Repair | None = None) -> _R:
        """Run `fn()` inside `step()`. Raises what `fn` does; `torch.OutOfMemoryError` or `RecomputeMismatch` after
        `MAX_RETRIES` more runs."""
        obstacle = self._obstacle()
        if obstacle is not None:
            try:
                with step():
                    return fn()
            except (torch.OutOfMemoryError, RecomputeMismatch) as error:
                raise _not_retried(error, obstacle) from error
        start = StepStart(self._model, self._device, self._pool, self._buffers)
        try:
            return self._run(start, step, fn, repair)
        finally:
            start.release()

    def _run(
        self,
        start: StepStart,
        step: Callable[[], AbstractContextManager[object]],
        fn: Callable[[], _R],
        repair: Repair | None,
    ) -> _R:
        budgets = [self.hbm_budget_bytes]
        while True:
            outcome = self._attempt(start, step, fn, None if repair is None else repair.optimizer)
            if isinstance(outcome, _Result):
                return outcome.value
            gc.collect()  # a cycle may hold what the step had made
            if repair is not None:
                repair.restore()
            start.restore()
            if len(budgets) > MAX_RETRIES:
                raise _gave_up(outcome, budgets)
            if outcome.is_mismatch:
                self._executor.metrics.totals.steps_run_again += 1
                _log.warning("chameleon_mm: a step runs again: %s", outcome.message)
            else:
                self._tighten(outcome)
            budgets.append(self.hbm_budget_bytes)

    def _attempt(
        self,
        start: StepStart,
        step: Callable[[], AbstractContextManager[object]],
        fn: Callable[[], _R],
        restored: torch.optim.Optimizer | None,
    ) -> _Result[_R] | _Failure:
        """Run the step once. Returns its result, or a failure after which it may run again; raises any other."""
        allocated_bytes = 0
        try:
            with start.watching(), step():
                try:
                    return _Result(fn())
                except torch.OutOfMemoryError:
                    allocated_bytes = self._device.allocated_bytes()  # before any of it goes
                    raise
        except (torch.OutOfMemoryError, RecomputeMismatch) as error:
            obstacle = start.obstacle(restored)
            if obstacle is not None:
                raise _not_retried(error, obstacle) from error
            is_mismatch = isinstance(error, RecomputeMismatch)
            asked_bytes = 0 if isinstance(error, RecomputeMismatch) else tried_bytes(error)
            return _Failure(str(error), is_mismatch, asked_bytes, allocated_bytes, traceback.format_exc())

    def _obstacle(self) -> str | None:
        """Reason why no step may run again here; None: there is none."""
        if self._device.capturing():
            return "a graph was captured"
        if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            return "the other ranks would not, and its collectives would wait for them"
        return None

    def _tighten(self, failure: _Failure) -> None:
        before = self.hbm_budget_bytes
        self.hbm_budget_bytes = tighter(
            before,
            allocated=failure.allocated_bytes,
            asked=failure.asked_bytes,
            resting=self._device.allocated_bytes(),
        )
        self._executor.change_budget(self.hbm_budget_bytes)
        self._executor.metrics.totals.steps_run_again += 1
        now, given = format_size(self.hbm_budget_bytes), format_size(before)
        _log.warning(
            "chameleon_mm: a step runs again, within %s instead of %s, and so do those after it: %s",
            now,
            given,
            failure.message,
        )


def tighter(budget: int, *, allocated: int, asked: int, resting: int) -> int:
    """Budget after a step that failed within `budget`, all in bytes.

    `asked` was refused while `allocated` was allocated, so no more than both together can be had, whatever the budget says:
    from there, room is made for another such request, `LEAST_CUT` at least. Half of what lies above `resting`, which is
    allocated between steps, stays: a request that never fits must not leave nothing.
    """
    reach = min(budget, allocated + asked)
    return min(budget, max(reach - max(asked, int(LEAST_CUT * reach)), (reach + resting) // 2))


def _not_retried(error: torch.OutOfMemoryError | RecomputeMismatch, obstacle: str) -> RuntimeError:
    return type(error)(f"{error} run_step: the step was not run again, because {obstacle}.")


def _gave_up(failure: _Failure, budgets: Sequence[int]) -> RuntimeError:
    kind = RecomputeMismatch if failure.is_mismatch else torch.OutOfMemoryError
    error = kind(
        f"{failure.message} run_step: expected the step to fit, it was run {len(budgets)} times, within budgets of "
        f"{', '.join(map(format_size, budgets))}; gradients, buffers and random states are as before it; make the batch smaller"
    )
    error.add_note(f"Its last run:\n{failure.where}")
    return error
