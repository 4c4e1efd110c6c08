"""Swaps what a model keeps for backward, in one line before the training loop, whatever engine runs that.

handle = attach(model, hbm_budget="20GiB")
...                                        # train: steps are found by hooks of the model and of its optimizers
print(handle.report())
handle.detach()                            # no hook and no memory is left
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from chameleon_mm.api.session import SwapSession
from chameleon_mm.device import gpu_name
from chameleon_mm.device.uncompiled import uncompiled
from chameleon_mm.errors import check_type
from chameleon_mm.record.dispatch_state import in_backward
from chameleon_mm.record.step_log import gradients_of
from chameleon_mm.report.report import SwapReport


class _ForwardHook:
    """A model's forward pre-hook that begins steps. Its type tells that a model is attached.

    A copy of the model, or a file of it, is not attached: what stands in for the hook there does nothing, and is Python's own,
    so that the file can be read where this library is not installed.
    """

    def __init__(self, bounds: StepBounds) -> None:
        self._bounds = bounds

    @uncompiled
    def __call__(self, module: nn.Module, args: Any) -> None:
        self._bounds.forward_begins()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, ({}, "get")  # called as {}.get(module, args), it returns the arguments as they are


class Attachment:
    """A session that is attached to a model, until `detach`. A context manager, too, which detaches at its end."""

    def __init__(self, session: SwapSession, model: nn.Module) -> None:
        self.session = session
        self._model = model
        self._bounds = StepBounds(session, model.parameters)
        self._of_model: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that are known to have parameters of the model's."""
        self._hooks: list[RemovableHandle] = []

    def _enter(self) -> None:
        self.session.__enter__()
        self._hooks = [
            self._model.register_forward_pre_hook(_ForwardHook(self._bounds), prepend=True),
            register_optimizer_step_post_hook(self._optimizer_stepped),
        ]

    def report(self) -> SwapReport:
        """Report of what the session has done so far; see `SwapSession.report`."""
        return self.session.report()

    def begin_step(self) -> None:
        """Begin a step where the engine knows that one begins; does nothing where one runs. Forwards and optimizers bound no
        step until `end_step`."""
        self._bounds.begin()

    def end_step(self) -> None:
        """End the step that runs, as one that was completed."""
        self._bounds.end(completed=True)

    def detach(self) -> None:
        """End the session, on the thread that attached it: no hook is left, and no memory but what graphs that are still alive
        need. Does nothing the second time."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._hooks:
            return
        if error is None:
            self._bounds.end()
        self.session.__exit__(kind, error, trace)  # raises on another thread, with everything as it was
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @uncompiled
    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self._of_model:  # yet: it may be given more parameters
            ours = {id(p) for p in self._model.parameters()}
            if not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
                return
            self._of_model.add(optimizer)
        self._bounds.optimizer_stepped()


def attach(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **session_args: Any) -> Attachment:
    """Swap what training of `model` keeps for backward, from the next forward on, without touching the training loop.

    Steps are found by themselves: each begins with the model's first forward with gradients on and ends as an optimizer of its
    parameters has stepped, whoever calls it, with as many micro-batches as there are; evaluation and generation lie between.
    Call it on the thread that trains, with the model on its device and as the engine calls it: wrapped in DDP or compiled,
    where it is. `optimizer` and `session_args` are those of `SwapSession`: an optimizer that is given has its state in host
    memory between its steps; steps of others are found as well. `device` is the model's unless given.

    Raises `TypeError` for no module, `ValueError` for a model that is attached already, in whole or in part, and what
    `SwapSession` raises, with nothing attached: `InfeasibleBudget` where the budget is below what lies on the device. Where the
    model comes to its device only later, its first forward raises that.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module", "pass the model that the training loop calls")
    for name, module in model.named_modules():
        if any(isinstance(hook, _ForwardHook) for hook in module._forward_pre_hooks.values()):
            part = f"whose part {name!r} is" if name else "that is"
            raise ValueError(
                f"attach: expected a model that is not attached, got a {type(model).__name__} {part} attached already; detach "
                f"that first"
            )
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner  # an engine's wrapper around it
    session_args.setdefault("device", _device_of(model))
    attachment = Attachment(SwapSession(model=model, optimizer=optimizer, **session_args), model)
    attachment._enter()
    return attachment


def _device_of(model: nn.Module) -> str | None:
    """Name of the GPU that the model lies on; None where it lies on none."""
    return next((name for name in map(gpu_name, model.parameters()) if name is not None), None)


# --- Finds where optimizer steps begin and end in a training loop that knows nothing of sessions
#
# bounds = StepBounds(session)
# bounds.forward_begins()            # at a model's forward: a step begins, unless one runs
# bounds.optimizer_stepped()         # after a step of an optimizer of the model's: the step ends
# bounds.end()                       # nothing runs any more
# bounds.begin(); bounds.end()       # an engine that knows its steps: nothing else begins or ends one between the two
#
# Note [Step bounds]: a step begins at the first forward with gradients on, and ends with the optimizer's step, so that all
# micro-batches are in it, and neither evaluation nor generation. Where several optimizers share a model's parameters, a step
# ends with the last of as many optimizer steps as came before the last forward. Where no optimizer steps, as when a gradient
# scaler finds an infinity, or within backward, it ends at the next forward that finds all gradients gone. Where none has ever
# stepped, as in a loop that writes to parameters by itself, it ends at the next forward that finds them written.


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
