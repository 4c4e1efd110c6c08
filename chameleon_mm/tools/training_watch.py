"""Detect the beginning of a program's training, swap it in a session, and detect its steps.

watch = TrainingWatch(make_session)
watch.begin()                                # a global forward pre-hook, and torch's global hook after optimizer steps
...                                          # the program: its first training forward makes and enters the session
report = watch.finish(error)

Note [Watch]: hooks on single modules would be saved by `torch.save(model)` and copied by `copy.deepcopy(model)`. Instead, every
module calls one global pre-hook. It is removed during the outermost module's call, so that inner modules run, and are compiled,
as without a hook. A step begins with the first module that is called with gradients on and has parameters that require them. If
all modules are called in compiled code, steps follow each other without a gap; the last step ends with the program.
Saved-tensor hooks and modes are stacks. The session is entered, and steps begin, only while no other hooks or modes are on:
otherwise their owner would pop ours.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.hooks import RemovableHandle

from chameleon_mm.api.attach import StepBounds
from chameleon_mm.api.session import SwapSession
from chameleon_mm.device import gpu_name
from chameleon_mm.device.uncompiled import uncompiled
from chameleon_mm.record.dispatch_state import in_backward, saved_tensor_hooks_on_top
from chameleon_mm.report.report import SwapReport

UNSEEN_STEPS = 2
"""Number of optimizer steps without a preceding module call after which each step begins at the end of the previous one. The
first such optimizer step may only make the optimizer's state."""


class Stopped(SystemExit):
    """Raised to stop the program before its first step, because no session could be made. It acts like `sys.exit(1)`."""


class TrainingWatch:
    """Watch over one program's training. `finish` ends it."""

    def __init__(self, make_session: Callable[[nn.Module | None, str | None], SwapSession]) -> None:
        """`make_session(module, gpu)` makes the session. `module`: the first one called, or None. `gpu`: the GPU of its
        parameters, or None."""
        self._make_session = make_session
        self._session: SwapSession | None = None
        self._bounds: StepBounds | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._roots: dict[int, weakref.ref[nn.Module]] = {}
        """Modules that were called as outermost modules, by id."""
        self._module_hook: RemovableHandle | None = None
        self._optimizer_hook: RemovableHandle | None = None
        self._returning: RemovableHandle | None = None
        """Hook that restores the global hook when the outermost module returns."""
        self._own_hook: object = None
        """Pack hook of the session, as `_top_hook` returns it."""
        self._own_modes = 0
        self._disable_hooks: Any = torch.autograd.graph.disable_saved_tensors_hooks
        self._unseen = 0
        """Number of optimizer steps without a preceding module call that began a step."""
        self.stood_aside: str | None = None
        """Reason why the program's training is not swapped; None: no such reason."""
        self.postponed: str | None = None
        """Reason why the latest forward was not swapped; None: no such reason."""
        self.failure: str | None = None
        """Reason why no session could be made; None: no such reason."""

    def begin(self) -> None:
        # Before dynamo is loaded, which keeps a list of such functions by name.
        torch.autograd.graph.disable_saved_tensors_hooks = self._without_own_hooks  # type: ignore[assignment]  # a bound method
        self._module_hook = register_module_forward_pre_hook(self._called)
        self._optimizer_hook = register_optimizer_step_post_hook(self._optimizer_stepped)

    @property
    def in_forked_child(self) -> bool:
        """True if this process is a forked child of the watched one."""
        return self._pid != os.getpid()

    @property
    def may_finish(self) -> bool:
        """True if this thread may exit the session: it entered the session, or the thread that did has ended."""
        here = threading.current_thread()
        if self._thread is not None:
            return self._thread is here or not self._thread.is_alive()
        others = (thread for thread in threading.enumerate() if thread is not here and not thread.daemon)
        return not any(others)  # other threads may still train

    def finish(self, error: BaseException | None) -> SwapReport | None:
        """Exit the session, with the exception that ended the program, and return its report; None: there was no session.

        Raises the errors of the session's end.
        """
        self._module_returned()
        torch.autograd.graph.disable_saved_tensors_hooks = self._disable_hooks
        for handle in (self._module_hook, self._optimizer_hook):
            if handle is not None:
                handle.remove()
        session = self._session
        if session is None or self.in_forked_child:
            return None
        if self._bounds is not None and error is None and self._thread is threading.current_thread():
            self._bounds.end()
        self._session = None
        if self.may_finish:
            session.__exit__(None if error is None else type(error), error, None)
        return session.report()

    # --- hooks

    @uncompiled
    def _called(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or self._elsewhere() or in_backward():
            return  # being compiled; on another thread or in a forked child; forward repeated by a checkpoint
        if not any(True for _ in module.parameters()):
            return
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        if trains and any(is_lazy(p) for p in module.parameters()):
            return
        if trains and self._may_begin() and self.stood_aside is None:
            if self._bounds is None:
                self._enter(module, next(module.parameters(), None))
            self._roots[id(module)] = weakref.ref(module)
            if self._bounds is not None:
                self._bounds.forward_begins()
        self._hide_hook_until_return(module)

    @uncompiled
    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._elsewhere() or in_backward():  # an optimizer that steps in backward leaves no gradient: see StepBounds
            return
        if self.stood_aside is not None:
            if self._bounds is not None:
                self._bounds.end()
            return
        self._module_returned()  # in case the program caught an interrupt before the module returned
        bounds, session = self._bounds, self._session
        self._unseen += bounds is None or session is None or (not bounds.in_step and session.backward_has_run)
        if bounds is not None:
            bounds.optimizer_stepped()
        if self._unseen >= UNSEEN_STEPS and self._may_begin() and self.stood_aside is None:
            self._step_without_gap(optimizer)

    def _step_without_gap(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin the next step now, because no module call will announce it."""
        if self._module_hook is not None:
            self._module_hook.remove()
        if self._bounds is None:
            self._enter(None, next((p for group in optimizer.param_groups for p in group["params"]), None))
        if self._bounds is not None and not self._bounds.in_step:
            self._bounds.forward_begins()

    @contextmanager
    def _without_own_hooks(self, message: str) -> Iterator[None]:
        """Context that disables saved-tensor hooks, for `torch.func`'s transforms, which refuse hooks. Ours are off meanwhile,
        so tensors saved by a transform stay on the device."""
        hooks = saved_tensor_hooks_on_top()
        own = hooks if hooks is not None and hooks[0] is self._own_hook else None
        if own is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            with self._disable_hooks(message):
                yield
        finally:
            if own is not None:
                torch._C._autograd._push_saved_tensors_default_hooks(*own)

    # --- the session

    def _enter(self, module: nn.Module | None, parameter: Tensor | None) -> None:
        try:
            session = self._make_session(module, None if parameter is None else gpu_name(parameter))
            session.__enter__()
        except (ValueError, TypeError, MemoryError, RuntimeError, OSError) as error:
            self.failure = str(error)
            raise Stopped(1) from None
        self._session, self._thread = session, threading.current_thread()
        self._bounds = StepBounds(session, self._models)
        self._own_hook = _top_hook()
        self._own_modes = len(_get_current_dispatch_mode_stack())

    def _models(self) -> list[nn.Module]:
        return [model for root in self._roots.values() if (model := root()) is not None]

    def _elsewhere(self) -> bool:
        return self.in_forked_child or self._thread not in (None, threading.current_thread())

    def _may_begin(self) -> bool:
        """True if only our hooks and modes are on. Otherwise the owner of others would pop ours."""
        top = _top_hook()
        if top is not self._own_hook:
            if type(top).__module__.startswith("chameleon_mm") or getattr(top, "__module__", "").startswith("chameleon_mm"):
                self.stood_aside = "the program swaps by itself, by hooks of chameleon_mm of its own"
            self.postponed = "under saved-tensor hooks of the program's own"
            return False
        if self._bounds is not None and self._bounds.in_step:
            return True
        if len(_get_current_dispatch_mode_stack()) != self._own_modes:
            self.postponed = "under a dispatch mode of the program's own"
            return False
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self.postponed = "inside of torch.func"
            return False
        self.postponed = None
        return True

    # --- the global hook

    def _hide_hook_until_return(self, module: nn.Module) -> None:
        if self._module_hook is not None and not isinstance(module, torch.jit.ScriptModule):  # a ScriptModule takes no hooks
            self._module_hook.remove()
            self._returning = module.register_forward_hook(lambda *_: self._module_returned(), always_call=True)

    def _module_returned(self) -> None:
        """Restore the global hook if a module's call removed it."""
        returning, self._returning = self._returning, None
        if returning is None or self._module_hook is None:
            return
        returning.remove()
        hooks = self._module_hook.hooks_dict_ref()
        if hooks is not None and self._unseen < UNSEEN_STEPS:
            hooks[self._module_hook.id] = self._called  # under its old number, to which compiled code is bound


def _top_hook() -> object:
    """Return the pack hook that autograd calls on this thread; None: there is none."""
    hooks = saved_tensor_hooks_on_top()
    return None if hooks is None else hooks[0]
