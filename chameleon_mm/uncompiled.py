"""Hides functions from dynamo, which after a graph break compiles whatever is called next, and knows no streams.

@uncompiled
def __init__(self, ...): ...
save = uncompiled(save)          # the function itself, not another one around it: its calls take no longer
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncompiled(function: _Function) -> _Function:
    """Have dynamo leave `function`, one written in Python or a method of such, as it is, with all that it calls.

    `torch.compiler.disable` does the same by a function around it, whose time would be a good part of a short hook's, and
    imports dynamo.
    """
    dynamo = torch._C._dynamo.eval_frame
    try:
        skip = dynamo._FrameAction.SKIP
        dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))  # this frame, and those below
    except AttributeError:  # a torch that has it no more
        hidden: _Function = torch.compiler.disable(function)
        return hidden
    return function
