"""Swap a model's saved tensors with one line before the training loop, for any training engine.

handle = attach(model, hbm_budget="20GiB")
...                                        # train: steps are found by hooks of the model and of its optimizers
print(handle.report())
handle.detach()                            # remove all hooks and free all memory
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from chameleon_mm.api.model_swap import tensors_of
from chameleon_mm.api.session import STEPS_UNTIL_SAID, SwapSession
from chameleon_mm.device import check_placement, gpu_name
from chameleon_mm.device.uncompiled import uncompiled
from chameleon_mm.errors import check_keywords, check_type
from chameleon_mm.record.dispatch_state import in_backward
from chameleon_mm.record.step_log import fsdp_parameters, gradients_of
from chameleon_mm.report.report import SwapReport
from chameleon_mm.report.step_history import log_values


class _ForwardHook:
    """A model's forward pre-hook that begins steps. An attached model is recognised by the type of this hook.

    A copy or a saved file of the model is not attached. In it, a plain Python function that does nothing replaces the hook, so
    the file can be read without this library.
    """

    def __init__(self, bounds: StepBounds, of_children: list[RemovableHandle] | None = None) -> None:
        """`of_children`: hooks of the model's children, used if the model itself is never called. A call of it removes them."""
        self._bounds, self._of_children = bounds, of_children

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        while self._of_children:
            self._of_children.pop().remove()
        self._bounds.forward_begins(tokens_in(args, kwargs))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # called as __exit__(module, args, kwargs), it changes nothing


def tokens_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Tokens, padding included, in the arguments of a model's forward: the elements of `input_ids`, or of a first argument that
    is a matrix of integers or a mapping with `input_ids`. None: there is no such argument."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    ids = ids.get("input_ids") if isinstance(ids, Mapping) else ids
    if isinstance(ids, Tensor) and ids.ndim == 2 and ids.dtype in (torch.int64, torch.int32):
        return ids.numel()
    return None


class Attachment:
    """Session that is attached to a model, until `detach`. Also a context manager that detaches at its end."""

    def __init__(self, session: SwapSession, model: nn.Module) -> None:
        self.session, self._model = session, model
        self._bounds = StepBounds(session, lambda: (model,))
        self._of_model: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers known to have parameters of the model."""
        self._hooks: list[RemovableHandle] = []
        self._of_children: list[RemovableHandle] = []
        self._counts = session._executor.hook_counts
        self._counts.attached = type(model).__name__
        self._optimizer_steps = self._logged = 0

    def _enter(self) -> None:
        self.session.__enter__()
        self._of_children += (
            child.register_forward_pre_hook(_ForwardHook(self._bounds), prepend=True, with_kwargs=True)
            for child in _called_parts(self._model)
        )
        of_model = _ForwardHook(self._bounds, self._of_children)
        self._hooks = [
            self._model.register_forward_pre_hook(of_model, prepend=True, with_kwargs=True),
            register_optimizer_step_post_hook(self._optimizer_stepped),
        ]

    def report(self) -> SwapReport:
        """Return the report of the session until now; see `SwapSession.report`."""
        return self.session.report()

    def log_values(self) -> dict[str, float]:
        """Return figures of the steps completed since the last call, for a training log; empty without such a step. A timed
        step is complete once the GPU has run it. Never waits.

        Times are microseconds, memory is bytes: "swap_step_us", "swap_tokens_per_s" of this rank, "swap_peak_at_least_bytes",
        "swap_peak_bytes" if that is the peak, "swap_budget_bytes", "swap_bytes_out" and "swap_stall_us", as far as known: a GPU
        times one step in sixteen, and tokens are those of `tokens_in`. For each step alone: `progress` of `SwapSession`.
        """
        steps = self.session._history.figures_since(self._logged)
        self._logged = steps[-1].index + 1 if steps else self._logged
        return log_values(steps)

    def begin_step(self) -> None:
        """Begin a step, for an engine that knows where steps begin. Inside a step, do nothing. Until `end_step`, forwards and
        optimizers neither begin nor end a step."""
        self._bounds.begin()

    def end_step(self) -> None:
        """End the current step as a completed one."""
        self._bounds.end(completed=True)

    def detach(self) -> None:
        """End the session, on the thread that attached it. Removes all hooks, and frees all memory except that of live graphs.
        A second call does nothing."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._hooks:
            return
        if error is None:
            self._bounds.end()
        self.session.__exit__(kind, error, trace)  # raises on another thread, and then changes nothing
        for hook in (*self._hooks, *self._of_children):
            hook.remove()
        self._hooks = []
        self._model = nn.Module()  # users keep an attachment for its report
        self._bounds.models = tuple  # none

    @uncompiled
    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self._of_model:  # checked at every step, because parameters may be added to it
            ours = {id(p) for p in self._model.parameters()}
            if ours and not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
                return
            self._of_model.add(optimizer)
        here = threading.current_thread()
        if here is not self._bounds.thread and not in_backward():  # otherwise autograd's own thread steps it
            self._counts.trained_on = here.name
        self._bounds.optimizer_stepped()
        self._optimizer_steps += 1
        if self._optimizer_steps == STEPS_UNTIL_SAID:
            self.session.say_problem()


def attach(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **session_args: Any) -> Attachment:
    """Swap the tensors that `model` saves for backward, from its next forward on. The training loop stays unchanged.

    Steps are found automatically. A step begins with the model's first forward with gradients enabled. It ends after a step of
    an optimizer of its parameters, called by any code. It may have several micro-batches; evaluation and generation lie between
    steps. Call `attach` on the training thread, with the model on its device and as the engine calls it, for example wrapped in
    DDP or compiled. `optimizer` and `session_args` are those of `SwapSession`; `device` defaults to the model's. The state of a
    given `optimizer` is in host memory between its steps; steps of other optimizers are found as well.

    Raises `TypeError` if `model` is not a module. Raises `ValueError` if any part of it is already attached, or it is neither
    on CUDA nor on the CPU. Raises the errors of `SwapSession`, and then attaches nothing: `InfeasibleBudget` if the budget is
    below the bytes already on the device. If the model is moved to its device later, its first forward raises that error.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module", "pass the model that the training loop calls")
    check_keywords("attach", session_args, SwapSession)
    for name, module in model.named_modules():
        if any(isinstance(hook, _ForwardHook) for hook in module._forward_pre_hooks.values()):
            part = f"whose part {name!r} is" if name else "that is"
            raise ValueError(
                f"attach: expected a model that is not attached, got a {type(model).__name__} {part} attached already; detach "
                f"that first"
            )
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner  # unwrap an engine's wrapper
    check_placement(tensors_of(model))
    session_args.setdefault("device", next(filter(None, map(gpu_name, model.parameters())), None))
    attachment = Attachment(SwapSession(model=model, optimizer=optimizer, **session_args), model)
    attachment._enter()
    return attachment


def _called_parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model's children that a loop may call instead of the model. Containers have no forward: yield their
    children."""
    for child in model.children():
        if type(child).forward is nn.Module.forward:
            yield from _called_parts(child)
        elif not isinstance(child, torch.jit.ScriptModule):  # takes no hooks
            yield child


# --- Find where optimizer steps begin and end in a training loop without calls of a session:
#
# Note [Step bounds]: a step begins at the first forward with gradients enabled, and ends with the optimizer's step. So it has
# all micro-batches, but neither evaluation nor generation. If several optimizers share a model's parameters, the previous step
# tells how many optimizer steps to expect. If no optimizer steps, for example after a gradient scaler finds an infinity, the
# step ends at the next forward that finds all gradients gone. If no optimizer has ever stepped, as in a loop that writes
# parameters directly, it ends at the next forward that finds them written.


class StepBounds:
    """Begins and ends the steps of a session at calls of models and optimizers. Acts on one thread, and ignores calls on other
    threads, where hooks do nothing either."""

    def __init__(self, session: SwapSession, models: Callable[[], Iterable[nn.Module]]) -> None:
        """`models()`: the models whose parameters a step trains."""
        self.session, self.models = session, models
        self.thread = threading.current_thread()
        self._step: AbstractContextManager[SwapSession] | None = None
        self._optimizer_steps = 0
        """Number of optimizer steps since the last forward that began a step."""
        self._ever_stepped = False
        self._writes = 0
        """Number of writes to parameters before the current step. Used while no optimizer has ever stepped."""
        self._expected = 1
        """Expected number of optimizer steps in a step."""
        self._is_checked = False
        """True if the first step has checked the budget against the bytes on the device."""
        self._held = False
        """True if the current step ends only by a call of `end`."""

    @property
    def in_step(self) -> bool:
        return self._step is not None

    def forward_begins(self, tokens: int | None = None) -> None:
        """Begin a step, if this is a forward of training outside a step. Its `tokens` count for the step that it is in."""
        if not torch.is_grad_enabled() or self._is_elsewhere():
            return
        if not self._held:
            self._may_begin_step()
        if tokens is not None and self._step is not None:
            self.session._history.count_tokens(tokens)

    def _may_begin_step(self) -> None:
        """Begin a step at a forward of training, unless the current one goes on."""
        if self._step is not None:
            if not self._is_over():
                return
            self._end_step()
        elif not self._is_checked and any(map(is_lazy, self._parameters(self._sharding()))):
            return  # its first forward makes its lazy parameters
        self._expected = max(1, self._optimizer_steps)
        self._begin_step()

    def optimizer_stepped(self) -> None:
        """Record an optimizer step, and end the session's step after the last expected one."""
        if self._is_elsewhere():
            return
        self._optimizer_steps += 1
        self._ever_stepped = True
        if self._optimizer_steps >= self._expected and not self._held:
            self._end_step()

    def begin(self) -> None:
        """Begin a step that ends only by `end`. A running step becomes such a step."""
        if self._step is None:
            self._begin_step()
        self._held = True

    def end(self, *, completed: bool | None = None) -> None:
        """End the current step, because no training follows. `completed`: True if the step counts; None: it counts if an
        optimizer stepped in it. Does nothing on another thread."""
        if threading.current_thread() is not self.thread:
            return
        self._held = False
        self._end_step(completed=self._is_over() if completed is None else completed)

    def _is_elsewhere(self) -> bool:
        """True on another thread, or inside a backward. There checkpoints run forwards, and some loops step an optimizer per
        parameter as soon as its gradient is made."""
        return threading.current_thread() is not self.thread or in_backward()

    def _is_over(self) -> bool:
        """True if the current step is over as the next forward begins: an optimizer stepped, or the gradients are gone."""
        if self._optimizer_steps:
            return True
        if not self.session.backward_has_run:
            return False
        if not self._ever_stepped and self._count_writes() != self._writes:
            return True
        # Under `set_requires_gradient_sync(False)`, gradients are not reduced yet, and no parameter has them as `grad`.
        sharding = self._sharding()
        unsharded = (one._unsharded_param.grad for one in sharding if hasattr(one, "_unsharded_param"))
        accumulated = (one.unsharded_accumulated_grad for one in sharding)
        return all(gradient is None for gradient in chain(gradients_of(self._parameters(sharding)), unsharded, accumulated))

    def _count_writes(self) -> int:
        return 0 if self._ever_stepped else sum(p._version for p in self._parameters(self._sharding()))

    def _sharding(self) -> list[Any]:
        return list(fsdp_parameters(self.models()))

    def _parameters(self, sharding: Collection[Any]) -> Iterator[Tensor]:
        """Yield the parameters. For those in `sharding`, yield this rank's shard, even if the model now has them whole."""
        whole = {id(getattr(one, "_unsharded_param", None)) for one in sharding}
        found = {id(p): p for model in self.models() for p in model.parameters() if id(p) not in whole}
        yield from (found | {id(one.sharded_param): one.sharded_param for one in sharding}).values()

    def _begin_step(self) -> None:
        if not self._is_checked:  # model or optimizer state may have moved to the device since the session began
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
            step.__exit__(RuntimeError, RuntimeError("no optimizer stepped"), None)  # only the session sees it
