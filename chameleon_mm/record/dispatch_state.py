"""Tells what else runs where a recorder is active: whether it may record what comes, and whether it sees all that there is.

forked     -> another process: its locks may be held for ever, and the device is not its own
capturing  -> a graph is captured: nothing may be asked of the device
tracing    -> a tracer runs: what comes is fake, or goes on for its graph
compiled   -> dynamo compiled: the step took the time that compiling takes, and runs other kernels the next time
tracer_is_on()               -> the same for whoever has no step of its own to compare with
in_backward()                -> whether autograd runs a backward on this thread
is_on(mode), leave(mode), remove(mode)  -> a mode on this thread's stack, known by identity, whoever is above it
StepMode                     -> the base of the modes that are on for a part of a step
has_other_formula(call)      -> the mode has to be gone before the backward of this call begins

While any dispatch mode is on, torch computes the gradient of some operators by another formula, one that rounds otherwise:
autograd then does without writes in place and without shapes that hang on data (`isTensorSubclassLike` in torch's
FunctionsManual.cpp). `tests/test_op_db.py` finds them: all of torch's operator samples, under a mode that does nothing.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from chameleon_mm.device import Device
from chameleon_mm.device.operators import OpCall, OpFacts

_Key = torch._C._TorchDispatchModeKey

SavedTensorHooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""Function that autograd calls for what it saves, and the one that it calls for a use of that."""

PLAIN_DISPATCH = Tensor.__torch_dispatch__
"""`__torch_dispatch__` of classes that leave operators as they are."""

_OF_ANY_INPUT = frozenset({"prod", "cumprod", "ormqr", "linalg_matrix_exp", "linalg_eig", "_linalg_eigh"})
"""Operators whose gradient with respect to anything is another; of the last three the gradient's own gradient."""

_OF_ONE_INPUT = {"masked_fill": 2}
"""Index of the only argument whose gradient is another, by operator."""


class DispatchState:
    """Process, capture and dispatch modes as they are where it is made and later. Takes no lock, and asks `device` for nothing
    but `capturing`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pid = os.getpid()
        self._fake_mode = torch._C._get_dispatch_mode(_Key.FAKE)
        self._frames = frames_compiled()

    @property
    def forked(self) -> bool:
        return os.getpid() != self._pid

    @property
    def capturing(self) -> bool:
        return self._device.capturing()

    @property
    def tracing(self) -> bool:
        """Whether a tracer that was not there from the beginning runs on this thread."""
        return tracer_is_on(besides=self._fake_mode)

    @property
    def fake(self) -> bool:
        """Whether it is a step of fake tensors that is recorded."""
        return self._fake_mode is not None

    @property
    def compiled(self) -> bool:
        """Whether dynamo has compiled anything since, on any thread."""
        return frames_compiled() != self._frames


num_modes = torch._C._len_torch_dispatch_stack
"""Function that returns the number of dispatch modes that are on, on this thread. A tracer is one of them."""


def tracer_is_on(besides: TorchDispatchMode | None = None) -> bool:
    """Whether a tracer runs on this thread, other than the `FakeTensorMode` `besides`: what is made under it is fake, or part
    of its graph."""
    if num_modes() == 0:
        return False
    mode = torch._C._get_dispatch_mode
    return mode(_Key.FAKE) is not besides or mode(_Key.PROXY) is not None or mode(_Key.FUNCTIONAL) is not None


def in_backward() -> bool:
    """Whether a backward runs on this thread."""
    return torch._C._current_graph_task_id() != -1


def saved_tensor_hooks_on_top() -> SavedTensorHooks | None:
    """The innermost saved-tensor hooks of this thread, which are those that autograd calls; None: there are none."""
    hooks: SavedTensorHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def is_on(mode: TorchDispatchMode) -> bool:
    """Whether `mode` is active on this thread."""
    return any(torch._C._get_dispatch_stack_at(i) is mode for i in range(torch._C._len_torch_dispatch_stack()))


def leave(
    mode: TorchDispatchMode, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    """Leave `mode`, which is on this thread's stack, and nothing else: torch itself takes away whichever is the innermost."""
    _with_innermost(mode, lambda: TorchDispatchMode.__exit__(mode, kind, error, trace))


def remove(mode: TorchDispatchMode) -> None:
    """Take `mode`, which was left before, off this thread's stack."""
    _with_innermost(mode, _pop_mode)


def _with_innermost(mode: TorchDispatchMode, act: Callable[[], object]) -> None:
    """Call `act` while `mode`, which is on this thread's stack, is the innermost that was entered."""
    above: list[TorchDispatchMode] = []
    # A tracer's mode has a place of its own in the stack, above all that were entered: it is no innermost one.
    entered = [one for one in _get_current_dispatch_mode_stack() if not hasattr(one, "_mode_key")]
    while entered.pop() is not mode:
        above.append(_pop_mode())
    act()
    for one in reversed(above):
        _push_mode(one)


def frames_compiled() -> int:
    """Number of frames that dynamo was given to compile in this process; 0 where nobody imported it."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["frames"]["total"])


class StepMode(TorchDispatchMode):
    """A dispatch mode that is on for a part of a step, and that hooks pause on their own thread."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep what dynamo had compiled: under any other mode it leaves that to eager, whose bits are others."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates no argument of it
        self._thread = threading.local()

    @property
    def is_paused(self) -> bool:
        """Whether the operators of this thread are somebody else's than the model's."""
        return bool(getattr(self._thread, "paused", 0))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which the operators of this thread are no part of the step. May be nested."""
        depth = getattr(self._thread, "paused", 0)
        try:
            self._thread.paused = depth + 1
            yield
        finally:
            self._thread.paused = depth

    def leave_if_on(self) -> None:
        """Take the mode off this thread's stack, where autograd may have put it back after it was left."""
        if is_on(self):
            remove(self)


def may_have_other_formula(facts: OpFacts) -> bool:
    """Whether a gradient of some call of the operator is computed otherwise under a dispatch mode."""
    name = facts.name.removesuffix("_")
    return name in _OF_ANY_INPUT or name in _OF_ONE_INPUT


def has_other_formula(call: OpCall) -> bool:
    """Whether a gradient of the call's is computed otherwise under a dispatch mode."""
    name = call.facts.name.removesuffix("_")
    if name in _OF_ANY_INPUT:
        return any(t.requires_grad for t in call.inputs.values())
    if name in _OF_ONE_INPUT:
        argument = _OF_ONE_INPUT[name]
        value = call.args[argument] if argument < len(call.args) else call.kwargs.get("value")
        return isinstance(value, Tensor) and value.requires_grad
    return False
