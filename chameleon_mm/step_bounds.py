"""Finds where optimizer steps begin and end in a training loop that knows nothing of sessions.

bounds = StepBounds(session)
bounds.forward_begins()            # at a model's forward: a step begins, unless one runs
bounds.optimizer_stepped()         # after a step of an optimizer of the model's: the step ends
bounds.end()                       # nothing runs any more
bounds.begin(); bounds.end()       # an engine that knows its steps: nothing else begins or ends one between the two

Note [Step bounds]: a step begins at the first forward with gradients on, and ends with the optimizer's step, so that all
micro-batches are in it, and neither evaluation nor generation. Where several optimizers share a model's parameters, a step ends
with the last of as many optimizer steps as came before the last forward. Where no optimizer steps, as when a gradient
scaler finds an infinity, or within backward, it ends at the next forward that finds all gradients gone. Where none has ever
stepped, as in a loop that writes to parameters by itself, it ends at the next forward that finds them written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from chameleon_mm.profiler.dispatch_state import in_backward
from chameleon_mm.profiler.step_log import gradients_of
from chameleon_mm.session import SwapSession


class StepBounds:
    """Begins and ends the steps of a session at the calls of models and optimizers. Everything happens on one thread; calls on
    others are ignored, as are hooks there."""

    def __init__(self, session: SwapSession, parameters: Callable[[], Iterable[Tensor]]) -> None:
        """`parameters`: those whose gradients a step accumulates."""
        self.session = session
        self._parameters = parameters
        self._thread = threading.current_thread()
        self._step: AbstractContextManager[SwapSession] | None = None
        self._optimizer_steps = 0
        """Optimizer steps since the last forward that began a step."""
        self._ever_stepped = False
        self._writes = 0
        """Writes to parameters before the step that runs, while no optimizer has stepped."""
        self._expected = 1
        """Optimizer steps that a step has."""
        self._is_checked = False
        """Whether the budget was checked against what is on the device as the first step begins."""
        self._held = False
        """Whether the step that runs ends by `end` alone."""

    @property
    def in_step(self) -> bool:
        return self._step is not None

    def forward_begins(self) -> None:
        """Begin a step, where a forward of training begins and none runs."""
        if not torch.is_grad_enabled() or self._is_elsewhere():
            return
        if self._held:
            return
        if self._step is not None:
            if not self._is_over():
                return
            self._end_step()
        elif not self._is_checked and any(map(is_lazy, self._parameters())):
            return  # its first forward makes what there will be to train
        self._expected = max(1, self._optimizer_steps)
        self._begin_step()

    def optimizer_stepped(self) -> None:
        """Note that an optimizer has stepped, and end the step where it was the last."""
        if self._is_elsewhere():
            return
        self._optimizer_steps += 1
        self._ever_stepped = True
        if self._optimizer_steps >= self._expected and not self._held:
            self._end_step()

    def begin(self) -> None:
        """Begin a step, which `end` alone ends; where one runs, it is that from now on."""
        if self._step is None:
            self._begin_step()
        self._held = True

    def end(self, *, completed: bool | None = None) -> None:
        """End the step that runs, as what follows is no training. `completed`: whether the step counts; None: if an optimizer
        stepped in it. Does nothing on another thread."""
        if threading.current_thread() is not self._thread:
            return
        self._held = False
        self._end_step(completed=self._is_over() if completed is None else completed)

    def _is_elsewhere(self) -> bool:
        """Whether this is another thread, or inside of a backward: checkpoints run forwards there, and some loops an optimizer
        for each parameter as its gradient is made."""
        return threading.current_thread() is not self._thread or in_backward()

    def _is_over(self) -> bool:
        """Whether the step that runs is over, as the next forward begins: an optimizer stepped, or its gradients are gone."""
        if self._optimizer_steps:
            return True
        if not self.session.backward_has_run:
            return False
        if not self._ever_stepped and self._count_writes() != self._writes:
            return True
        return all(gradient is None for gradient in gradients_of(self._parameters()))

    def _count_writes(self) -> int:
        return 0 if self._ever_stepped else sum(p._version for p in self._parameters())

    def _begin_step(self) -> None:
        if (
            not self._is_checked
        ):  # the model, or the state of its optimizer, may have come to the device since the session began
            self.session.hbm_budget = self.session.hbm_budget
            self._is_checked = True
        self._optimizer_steps = 0
        self._writes = self._count_writes()
        step = self.session.step()
        step.__enter__()
        self._step = step

    def _end_step(self, *, completed: bool = True) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        if completed:
            step.__exit__(None, None, None)
        else:
            step.__exit__(RuntimeError, RuntimeError("no optimizer stepped"), None)  # it goes no further than the session
