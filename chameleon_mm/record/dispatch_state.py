"""State of torch's dispatch around a recorder: whether the recorder may record, and whether it sees the whole step.

forked     -> in a forked child: locks may be held forever, and the device belongs to the parent
capturing  -> a graph is captured: the device must not be queried
tracing    -> a tracer runs: tensors are fake, or operators go into the tracer's graph
compiled   -> dynamo compiled: the step includes compile time, and later steps run other kernels
tracer_is_on()               -> as `tracing`, without comparison to the step's beginning
in_backward()                -> True if autograd runs a backward on this thread
is_on(mode), leave(mode), remove(mode)  -> a mode on this thread's stack, found by identity, also below other modes
StepMode                     -> base of the modes that are on for a part of a step
has_other_formula(call)      -> True: the mode must be exited before the backward of this call begins

While any dispatch mode is on, torch computes the gradient of some operators by another formula, which rounds differently. That
formula avoids in-place writes and data-dependent shapes (`isTensorSubclassLike` in torch's FunctionsManual.cpp).
`tests/test_op_db.py` finds these operators: it runs all of torch's operator samples under a mode that does nothing.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from chameleon_mm.device import Device
from chameleon_mm.device.compiled_regions import RegionMode
from chameleon_mm.device.operators import OpCall, OpFacts

_Key = torch._C._TorchDispatchModeKey

SavedTensorHooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""Pair of functions that autograd calls at the save and at the use of a tensor."""

PLAIN_DISPATCH = Tensor.__torch_dispatch__
"""`__torch_dispatch__` of classes that do not change operators."""

_OF_ANY_INPUT = frozenset({"prod", "cumprod", "ormqr", "linalg_matrix_exp", "linalg_eig", "_linalg_eigh"})
"""Operators with another formula for the gradient of any input; for the last three: for the second gradient."""

_OF_ONE_INPUT = {"masked_fill": 2}
"""Index of the only argument whose gradient has another formula, by operator."""


class DispatchState:
    """Process, capture and dispatch modes, compared with their state at construction. Takes no lock. Of `device`, it calls only
    `capturing`."""

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
        """True if a tracer runs on this thread that did not run at construction."""
        return tracer_is_on(besides=self._fake_mode)

    @property
    def fake(self) -> bool:
        return self._fake_mode is not None

    @property
    def compiled(self) -> bool:
        """True if dynamo has compiled since construction, on any thread."""
        return frames_compiled() != self._frames


num_modes = torch._C._len_torch_dispatch_stack
"""Function that returns the number of active dispatch modes on this thread, tracers included."""


def tracer_is_on(besides: TorchDispatchMode | None = None) -> bool:
    """True if a tracer other than the `FakeTensorMode` `besides` runs on this thread. Tensors made under it are fake, or part
    of its graph."""
    if num_modes() == 0:
        return False
    mode = torch._C._get_dispatch_mode
    return mode(_Key.FAKE) is not besides or mode(_Key.PROXY) is not None or mode(_Key.FUNCTIONAL) is not None


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def saved_tensor_hooks_on_top() -> SavedTensorHooks | None:
    """Return the innermost saved-tensor hooks of this thread, which autograd calls; None: there are none."""
    hooks: SavedTensorHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def is_on(mode: TorchDispatchMode) -> bool:
    return any(torch._C._get_dispatch_stack_at(i) is mode for i in range(torch._C._len_torch_dispatch_stack()))


def leave(mode: TorchDispatchMode) -> None:
    """Exit only `mode`, which is on this thread's stack. Torch itself would remove the innermost mode."""
    _with_innermost(mode, lambda: TorchDispatchMode.__exit__(mode, None, None, None))


def remove(mode: TorchDispatchMode) -> None:
    """Remove `mode`, which was exited earlier, from this thread's stack."""
    _with_innermost(mode, _pop_mode)


def _with_innermost(mode: TorchDispatchMode, act: Callable[[], object]) -> None:
    """Call `act` while `mode`, which is on this thread's stack, is the innermost entered mode."""
    above: list[tuple[TorchDispatchMode, bool]] = []
    # A tracer's mode has its own place in the stack, above all entered modes. It does not count as innermost.
    entered = [one for one in _get_current_dispatch_mode_stack() if not hasattr(one, "_mode_key")]
    while (one := entered.pop()) is not mode:
        # Exit and enter: each mode stores whether one was on before it. If that is wrong, dynamo compiles in each step.
        remembers = bool(getattr(one, "old_dispatch_mode_flags", ()))  # not if autograd restored it after its exit
        TorchDispatchMode.__exit__(one, None, None, None) if remembers else _pop_mode()
        above.append((one, remembers))
    act()
    for one, remembers in reversed(above):
        TorchDispatchMode.__enter__(one) if remembers else _push_mode(one)


def frames_compiled() -> int:
    """Return the number of frames passed to dynamo in this process; 0 if dynamo was not imported."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["frames"]["total"])


_compiled = threading.local()


@contextmanager
def compiled_region() -> Iterator[None]:
    """Context for operators of a compiled region on this thread. None of them may run again by itself."""
    before = in_compiled_region()
    _compiled.region = True
    try:
        yield
    finally:
        _compiled.region = before


def in_compiled_region() -> bool:
    """True if this thread runs operators of a compiled region now."""
    return bool(getattr(_compiled, "region", False))


class StepMode(RegionMode):
    """Dispatch mode that is on for a part of a step. Hooks pause it on their own thread."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates no argument of it
        self._thread = threading.local()

    @property
    def is_paused(self) -> bool:
        """True if this thread runs operators now that are not the model's."""
        return bool(getattr(self._thread, "paused", 0))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context for operators on this thread that are not part of the step. May be nested."""
        depth = getattr(self._thread, "paused", 0)
        try:
            self._thread.paused = depth + 1
            yield
        finally:
            self._thread.paused = depth

    def leave_if_on(self) -> None:
        """Remove the mode from this thread's stack, if autograd restored it after its exit."""
        if is_on(self):
            remove(self)


def may_have_other_formula(facts: OpFacts) -> bool:
    """True if a dispatch mode changes the gradient formula of some calls of the operator."""
    name = facts.name.removesuffix("_")
    return name in _OF_ANY_INPUT or name in _OF_ONE_INPUT


def has_other_formula(call: OpCall) -> bool:
    """True if a dispatch mode changes a gradient formula of this call."""
    name = call.facts.name.removesuffix("_")
    if name in _OF_ANY_INPUT:
        return any(t.requires_grad for t in call.inputs.values())
    if name in _OF_ONE_INPUT:
        argument = _OF_ONE_INPUT[name]
        value = call.args[argument] if argument < len(call.args) else call.kwargs.get("value")
        return isinstance(value, Tensor) and value.requires_grad
    return False
