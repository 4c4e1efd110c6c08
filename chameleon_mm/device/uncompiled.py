"""Hide functions from dynamo. After a graph break, dynamo compiles the next function called, and it does not model streams.

@uncompiled
def __init__(self, ...): ...
save = uncompiled(save)          # the same function, without a wrapper: calls take no longer

import_dynamo()                  # call early: otherwise a dispatch mode's first operator imports it inside a hook
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
    """Make dynamo skip `function`, a Python function or method, and everything that it calls. Returns `function`.

    `torch.compiler.disable` does the same with a wrapper, which takes a large part of a short hook's time. It also imports
    dynamo.
    """
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))  # this frame, and those below
    return function


def import_dynamo() -> None:
    """Import dynamo on a new thread, unless it is imported already. Raises the import's error.

    Every dispatch mode imports it at the mode's first operator. The import calls `torch.fx.wrap`, whose frame refers to itself.
    That frame, all its callers and their variables live until the garbage collector runs. In a save hook these are the saved
    tensor, its handle and its block. On another thread they are not among the callers.
    """
    if _DYNAMO in sys.modules:
        return

    def tried() -> None:
        with suppress(Exception):  # no caller here to raise to
            importlib.import_module(_DYNAMO)

    thread = threading.Thread(target=tried, name="chameleon_mm: import of dynamo")
    with suppress(RuntimeError):  # no thread can start during interpreter shutdown
        thread.start()
        thread.join()
    importlib.import_module(_DYNAMO)  # does nothing unless the import failed: then it raises
