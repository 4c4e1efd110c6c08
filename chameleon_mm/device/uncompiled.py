"""Hides functions from dynamo, which after a graph break compiles whatever is called next, and knows no streams.

@uncompiled
def __init__(self, ...): ...
save = uncompiled(save)          # the function itself, not another one around it: its calls take no longer

import_dynamo()                  # before a dispatch mode's first operator would import it, in the middle of a hook
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

_DYNAMO = "torch._dynamo"


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


def import_dynamo() -> None:
    """Import dynamo on a thread of its own, unless it is imported. Raises what its import raises.

    torch has every dispatch mode import it at the mode's first operator. That import calls `torch.fx.wrap`, whose frame has
    itself in a variable and so stays, with all frames that it was called from and all their variables, until the garbage
    collector runs: imported in a save hook, the tensor that is saved, its handle and its block. A thread has other frames.
    """
    if _DYNAMO in sys.modules:
        return
    thread = threading.Thread(target=_try_import_dynamo, name="chameleon_mm: import of dynamo")
    with suppress(RuntimeError):  # while the interpreter ends, no thread begins
        thread.start()
        thread.join()
    importlib.import_module(_DYNAMO)  # only where it failed is there anything left to do, which raises


def _try_import_dynamo() -> None:
    with suppress(Exception):  # nobody could be told here
        importlib.import_module(_DYNAMO)
