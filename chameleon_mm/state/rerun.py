"""Run a step again from its beginning after it ran out of memory or recomputed other bits.

    start = state at the step's beginning              # random states, buffers, gradients that exist
    run it -> OutOfMemoryError | RecomputeMismatch -> exit the except block, which frees every frame of the step
        an optimizer stepped, or a parameter changed?  -> raise, and say that the step did not run again; or use a `Repair`
        start.restore(); after OutOfMemoryError: a smaller budget and no plan; run the step again
    MAX_RETRIES times, then raise, and name the attempts

The block is exited first, because an exception's traceback holds the tensors of its frames.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import TensorWeakRef

from chameleon_mm.device import Device
from chameleon_mm.errors import RecomputeMismatch
from chameleon_mm.record.retry import RandomState, is_alone, tried_bytes
from chameleon_mm.state.tensor_copy import Copier, TensorCopy, dense_bytes
from chameleon_mm.state.training_copy import restore_gradient
from chameleon_mm.swap.executor import Executor
from chameleon_mm.units import format_size

# --- Copies of the state that a step changes before it fails: gradients on the host, buffers on the device
#
# All buffers are copied for every step: batch norm writes its running statistics without increasing version counters, so
# changes cannot be detected.
#
# Gradients are copied to the host, because device memory is short. Keeping a gradient apart and adding it later would change
# the sum: (g + a) + b is not g + (a + b). A step that clips or zeroes `.grad` must also find the original value.


class StepStart:
    """State that is needed to run the step again that begins now, on the calling thread.

    Raises `HostMemoryExhausted` or `torch.OutOfMemoryError`, and changes nothing, if there is no memory for the copies.
    """

    def __init__(self, model: nn.Module, device: Device, copier: Copier) -> None:
        self._stepped: list[Optimizer] = []
        self._device, self._copier = device, copier
        self._random = RandomState(device)
        self._model = model
        self._parameters = [(parameter, _mark(parameter)) for parameter in model.parameters()]
        self._tables = [(module._buffers, dict(module._buffers)) for module in model.modules()]
        """Tables of buffers, one pair per module: the live table, and its state at the step's beginning."""
        with torch.no_grad():
            self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        self._copies: list[TensorCopy] = []
        self._gradients: list[tuple[nn.Parameter, Any, TensorWeakRef | None]] = []
        """Parameters, each with a copy of its gradient, for `restore_gradient`, and a weak reference to the gradient, whose
        memory is free once a step drops it. None: there is no gradient."""
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                for parameter, _ in self._parameters:
                    g = parameter.grad
                    copied = None if g is None else copier.copy_value(g, self._copies)
                    self._gradients.append((parameter, copied, None if g is None else TensorWeakRef(g)))
        except BaseException:
            self.release()
            raise

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context that records optimizer steps on the model. Fused ones do not increase the parameters' version counters."""
        ids = {id(parameter) for parameter, _ in self._parameters}

        def note(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if any(id(parameter) in ids for group in optimizer.param_groups for parameter in group["params"]):
                self._stepped.append(optimizer)

        hook = register_optimizer_step_pre_hook(note)
        try:
            yield
        finally:
            hook.remove()

    def obstacle(self, restored: Optimizer | None = None) -> str | None:
        """Return the reason why the step may not run again, or None. `restored`: optimizer that a `Repair` restores first, with
        all parameters; None: no repair."""
        now, before = list(map(id, self._model.parameters())), [id(parameter) for parameter, _ in self._parameters]
        if restored is not None:
            if any(optimizer is not restored for optimizer in self._stepped):
                return "an optimizer of the model's had begun to step that the session does not know"
            return None if now == before else "a parameter of the model had been replaced by another"
        if self._stepped:
            return "its optimizer had begun to step, and a second step would add to the first"
        if now != before or any(_mark(parameter) != mark for parameter, mark in self._parameters):
            return "a parameter of the model had changed, and would be changed twice"
        return None

    def restore(self) -> None:
        """Restore random states, buffers and gradients. Raises `torch.OutOfMemoryError` if a gradient finds no room."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for parameter, _, of in self._gradients:
                if of is None:  # first: freeing the step's gradients makes room for the others
                    parameter.grad = None
            for parameter, copied, of in self._gradients:
                if of is not None:
                    restore_gradient(self._copier, parameter, copied, of(), self._copier.fill)
            for table, as_it_was in self._tables:
                table.clear()
                table.update(as_it_was)
            for buffer, copy in self._buffers:
                _put_back(buffer, copy)
        self._random.restore()

    def release(self) -> None:
        """Release the copies, because the step will not run again."""
        copies, self._copies, self._gradients = self._copies, [], []
        if copies:
            last = self._device.current_stream().record()
            for copy in copies:
                copy.block.release(after=last)  # Note [Host block]


def _put_back(buffer: Tensor, copy: Tensor) -> None:
    into, of = dense_bytes(buffer), dense_bytes(copy)
    is_as_it_was = copy.layout is torch.strided is buffer.layout and (
        (copy.shape, copy.dtype, copy.device) == (buffer.shape, buffer.dtype, buffer.device)
        and (copy.stride() == buffer.stride() or into is None)
    )
    if not is_as_it_was:
        buffer.data = copy.clone()  # resized, or converted
    elif into is not None and of is not None:
        into.copy_(of)  # keeps its version counter: an earlier graph may have saved it
    elif 0 not in buffer.stride():  # a tensor with repeated elements cannot be written
        buffer.copy_(copy)


def _mark(parameter: nn.Parameter) -> tuple[int, int]:
    """Return a value that changes if the parameter is written to or its data replaced. A write through `.data` cannot be
    detected."""
    with torch._C.DisableTorchFunction():  # must not bring a swapped-out parameter to the device
        plain = type(parameter) is nn.Parameter and parameter.layout is torch.strided
        version = -1 if parameter.is_inference() else parameter._version
        return version, parameter.untyped_storage()._cdata if plain else 0


_log = logging.getLogger(__name__)

MAX_RETRIES = 3
"""Maximum number of runs of one step after the first."""

LEAST_CUT = 0.05
"""Minimum share by which the budget is lowered."""

_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class _Failure:
    """Run that found no memory or recomputed other bits. The exception itself is not kept, because its frames hold tensors."""

    message: str
    is_mismatch: bool
    """True if it recomputed other bits. These storages are no longer recomputed, and the budget stays."""
    asked_bytes: int
    allocated_bytes: int
    """Bytes of device memory allocated when the run failed."""
    where: str
    """Traceback as text."""


class Repair(NamedTuple):
    """Saved state that a step changes besides gradients, buffers and random states, and the way to restore it."""

    optimizer: torch.optim.Optimizer
    """Optimizer whose state and settings are restored, together with all parameters."""
    restore: Callable[[], None]
    """Function that restores the state; may be called several times. Raises `torch.OutOfMemoryError`."""


class StepRunner:
    """Runs the steps of one session over `model`, and repeats steps that run out of memory. Not thread-safe."""

    def __init__(self, executor: Executor, copier: Copier, model: nn.Module, *, hbm_budget_bytes: int) -> None:
        self.hbm_budget_bytes = self._given_bytes = hbm_budget_bytes
        """Current budget. Each step that runs again lowers it."""
        self._executor = executor
        self._device = executor.device
        self._copier = copier
        self._model = model

    @property
    def lowered_budget_bytes(self) -> int | None:
        """Return the current budget if a step had to run again; else None."""
        return self.hbm_budget_bytes if self.hbm_budget_bytes < self._given_bytes else None

    def run(self, step: Callable[[], AbstractContextManager[object]], fn: Callable[[], _R], repair: Repair | None = None) -> _R:
        """Run `fn()` inside `step()`. Raises the errors of `fn`, but `torch.OutOfMemoryError` and `RecomputeMismatch` only
        after `MAX_RETRIES` more runs."""
        obstacle = "a graph was captured" if self._device.capturing() else None
        if obstacle is None and not is_alone():
            obstacle = "the other ranks would not, and its collectives would wait for them"
        if obstacle is not None:
            try:
                with step():
                    return fn()
            except (torch.OutOfMemoryError, RecomputeMismatch) as error:
                raise _not_retried(error, obstacle) from error
        start = StepStart(self._model, self._device, self._copier)
        try:
            return self._run(start, step, fn, repair)
        finally:
            start.release()

    def _run(
        self, start: StepStart, step: Callable[[], AbstractContextManager[object]], fn: Callable[[], _R], repair: Repair | None
    ) -> _R:
        budgets = [self.hbm_budget_bytes]
        while True:
            outcome = self._attempt(start, step, fn, None if repair is None else repair.optimizer)
            if isinstance(outcome, tuple):
                return outcome[0]
            gc.collect()  # a reference cycle may hold tensors of the step
            if repair is not None:
                repair.restore()
            start.restore()
            if len(budgets) > MAX_RETRIES:
                raise _gave_up(outcome, budgets)
            if outcome.is_mismatch:
                self._executor.metrics.totals.steps_run_again += 1
                self._executor.metrics.warn(_log, "chameleon_mm: a step runs again: %s", outcome.message)
            else:
                self._tighten(outcome)
            budgets.append(self.hbm_budget_bytes)

    def _attempt(
        self,
        start: StepStart,
        step: Callable[[], AbstractContextManager[object]],
        fn: Callable[[], _R],
        restored: torch.optim.Optimizer | None,
    ) -> tuple[_R] | _Failure:
        """Run the step once. Returns its result, or a failure after which it may run again. Raises all other errors."""
        allocated_bytes = 0
        try:
            with start.watching(), step():
                try:
                    return (fn(),)
                except torch.OutOfMemoryError:
                    allocated_bytes = self._device.allocated_bytes()  # before the failed step's memory is freed
                    raise
        except (torch.OutOfMemoryError, RecomputeMismatch) as error:
            obstacle = start.obstacle(restored)
            if obstacle is not None:
                raise _not_retried(error, obstacle) from error
            is_mismatch = isinstance(error, RecomputeMismatch)
            asked_bytes = 0 if isinstance(error, RecomputeMismatch) else tried_bytes(error)
            return _Failure(str(error), is_mismatch, asked_bytes, allocated_bytes, traceback.format_exc())

    def _tighten(self, failure: _Failure) -> None:
        before = self.hbm_budget_bytes
        self.hbm_budget_bytes = tighter(
            before, allocated=failure.allocated_bytes, asked=failure.asked_bytes, resting=self._device.allocated_bytes()
        )
        self._executor.change_budget(self.hbm_budget_bytes)
        self._executor.metrics.totals.steps_run_again += 1
        now, given = format_size(self.hbm_budget_bytes), format_size(before)
        self._executor.metrics.warn(
            _log,
            "chameleon_mm: a step runs again, within %s instead of %s, and so do those after it: %s",
            now,
            given,
            failure.message,
        )


def tighter(budget: int, *, allocated: int, asked: int, resting: int) -> int:
    """Return the budget after a step that failed within `budget`, all in bytes.

    A request of `asked` was refused while `allocated` was allocated, so at most their sum is available, even if the budget is
    larger. The new budget leaves room below that sum for another such request, and at least for `LEAST_CUT`. It keeps half of
    the bytes above `resting`, the bytes allocated between steps, so that a request that never fits cannot shrink it to nothing.
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
