"""Compiled regions: what `torch.compile` made one function of autograd, told to dispatch modes as one call.

    find_regions()                              # at the beginning of a step: for the regions that are compiled by now

    region's forward or backward is called      # by dynamo's code, or by autograd
        each mode of the thread that is a RegionMode, the innermost first:
            mode.run_region(region, run, args)  # calls run(args), in which operators may be seen, or not

AOTAutograd makes a `torch.autograd.Function` of each graph that it compiles. Autograd calls its `forward`, which calls its
attribute `compiled_fw`, and its `_backward_impl`. In both run the graph's kernels and nothing else: no save, no use, no hook.
Both attributes are read at each call, so that a region compiled before a session is found too. What it runs there, a mode sees
(`aot_eager`), sees in part (Inductor's extern kernels), or does not see (Inductor's own kernels and allocations).

A region without gradients (an optimizer, an evaluation) has no such class: its operators are seen as the backend runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

Run = Callable[[list[Any]], Any]
"""Runs a region's graph on a list of its arguments, which it may empty. Returns what the graph returns."""


@dataclass(frozen=True, slots=True)
class Region:
    """One direction of a compiled region."""

    name: str
    """"compiled::forward" or "compiled::backward"."""
    mutated: tuple[int, ...] = ()
    """Positions of the arguments that it writes to."""
    compiles: Callable[[], bool] = lambda: False
    """True if its next call compiles it first, as the first backward may."""


class RegionMode(TorchDispatchMode):
    """Dispatch mode whose `run_region` is called around each direction of a region."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let dynamo run its compiled code: under any other mode it runs eager code, which computes other bits, and raises for
        `fullgraph=True`."""
        return True

    def run_region(self, region: Region, run: Run, args: list[Any]) -> Any:
        """Return `run(args)`. Holds none of `args` meanwhile: they are freed at their last use."""
        return run(args)


def find_regions() -> None:
    """From now on call `run_region` for each region that is compiled by now. Takes 25 us; any thread may call it."""
    function: Any
    for function in torch.autograd.Function.__subclasses__():
        if function.__name__ != "CompiledFunction" or "torch._functorch" not in function.__module__:
            continue
        forward, backward = (vars(function).get(name) for name in ("compiled_fw", "_backward_impl"))
        if not getattr(forward, "_boxed_call", False) or not isinstance(backward, staticmethod):
            continue  # told of already, or of a torch that calls it in another way
        function.compiled_fw = _Forward(forward, _mutated(function))
        function._backward_impl = _Backward(backward.__func__, function)


def _mutated(function: Any) -> tuple[int, ...]:
    return tuple(i for i, info in enumerate(function.metadata.input_info) if info.mutates_data)


class _Forward:
    """A region's `compiled_fw`."""

    _boxed_call = True
    """Torch's mark: the arguments come in a list, which the callee empties, so that none outlives its last use."""

    def __init__(self, run: Any, mutated: tuple[int, ...]) -> None:
        self._run, self._region = run, Region("compiled::forward", mutated)

    def __call__(self, args: list[Any]) -> Any:
        return _told(self._region, self._run)(args)


class _Backward:
    """A region's `_backward_impl`."""

    def __init__(self, run: Any, function: Any) -> None:
        self._run = run
        self._region = Region("compiled::backward", compiles=lambda: function.compiled_bw is None)

    def __call__(self, context: Any, args: list[Any]) -> Any:
        return _told(self._region, partial(self._run, context))(args)


def _told(region: Region, run: Run) -> Run:
    for mode in _get_current_dispatch_mode_stack():  # the outermost first: it is the last to be asked
        if isinstance(mode, RegionMode):
            run = partial(mode.run_region, region, run)
    return run
