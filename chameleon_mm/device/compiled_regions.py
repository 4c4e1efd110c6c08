"""Compiled regions: graphs that `torch.compile` turned into one autograd function. A dispatch mode sees each as one call.

    find_regions()                              # at the beginning of a step: finds the regions compiled so far

    region's forward or backward is called      # by dynamo's code or by autograd
        each mode of the thread that is a RegionMode, the innermost first:
            mode.run_region(region, run, args)  # calls run(args), whose operators may or may not be visible

AOTAutograd makes a `torch.autograd.Function` of each compiled graph. Autograd calls its `forward`, which calls the attribute
`compiled_fw`, and its `_backward_impl`. Both run only the graph's kernels: no save, no use, no hook. Both attributes are read
at each call, so regions compiled before a session are found too. A mode sees the operators inside with `aot_eager`, some with
Inductor (extern kernels), and none of Inductor's own kernels and allocations.

A region without gradients (an optimizer, an evaluation) has no such class. A mode sees its operators as the backend runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

Run = Callable[[list[Any]], Any]
"""Function that runs a region's graph on a list of arguments, which it may empty, and returns the graph's results."""


@dataclass(frozen=True, slots=True)
class Region:
    """One direction of a compiled region."""

    name: str
    """"compiled::forward" or "compiled::backward"."""
    mutated: tuple[int, ...] = ()
    """Positions of the arguments that the region writes."""
    compiles: Callable[[], bool] = lambda: False
    """Function that returns True if the next call compiles the region first, as the first backward may."""


class RegionMode(TorchDispatchMode):
    """Dispatch mode whose `run_region` is called around each direction of a region."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let dynamo run its compiled code. Under other modes it runs eager code, with other bits, and raises for
        `fullgraph=True`."""
        return True

    def run_region(self, region: Region, run: Run, args: list[Any]) -> Any:
        """Return `run(args)`. It holds no element of `args` meanwhile, so each is freed at its last use."""
        return run(args)


def find_regions() -> None:
    """Call `run_region` from now on for all regions compiled so far. Takes 25 us. Any thread may call it."""
    function: Any
    for function in torch.autograd.Function.__subclasses__():
        if function.__name__ != "CompiledFunction" or "torch._functorch" not in function.__module__:
            continue
        forward, backward = (vars(function).get(name) for name in ("compiled_fw", "_backward_impl"))
        if not getattr(forward, "_boxed_call", False) or not isinstance(backward, staticmethod):
            continue  # found earlier, or a torch with other calls
        mutated = tuple(i for i, info in enumerate(function.metadata.input_info) if info.mutates_data)
        function.compiled_fw = _Forward(forward, mutated)
        function._backward_impl = _Backward(backward.__func__, function)


class _Forward:
    """A region's `compiled_fw`."""

    _boxed_call = True
    """Mark of torch: arguments are passed in a list, which the callee empties, so that none outlives its last use."""

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
    for mode in _get_current_dispatch_mode_stack():  # the outermost first, because it is called last
        if isinstance(mode, RegionMode):
            run = partial(mode.run_region, region, run)
    return run
