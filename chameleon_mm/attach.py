"""Swaps what a model keeps for backward, in one line before the training loop, whatever engine runs that.

handle = attach(model, hbm_budget="20GiB")
...                                        # train: steps are found by hooks of the model and of its optimizers
print(handle.report())
handle.detach()                            # no hook and no memory is left
"""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from chameleon_mm.arguments import check_type
from chameleon_mm.device import gpu_name
from chameleon_mm.report import SwapReport
from chameleon_mm.session import SwapSession
from chameleon_mm.step_bounds import StepBounds
from chameleon_mm.uncompiled import uncompiled


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
