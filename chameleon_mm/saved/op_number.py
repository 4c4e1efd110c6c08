"""Tells by autograd's sequence number which operator is running. Note [Swap-out].

now = current_operator()     # in a save hook: equal for all saves of one operator, and for no two operators of a thread
call_site()                  # the Python frame that runs it
made_before(t, now)          # whether an earlier operator made `t`, so that this one was given it
"""

from __future__ import annotations

import itertools
import sys
import threading
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

sequence_nr = torch._C._autograd._get_sequence_nr
"""Returns the number of the thread's next differentiable op. It moves between one op's saves and the next op's: Note
[Swap-out]."""

_PACKAGE = Path(__file__).parents[1]
_OF_HOOKS = (str(_PACKAGE / "executor"), str(_PACKAGE / "saved"), str(Path(torch.__file__).parent / "_dynamo"))
"""Files whose code runs between the operator and here: this package's, and what keeps dynamo from compiling the hooks."""

CallSite = tuple[int, int]
"""A Python frame that runs, and its latest instruction."""

OperatorNumber = tuple[int, int]
"""A thread, and the number of its next differentiable operator while the operator that is meant runs."""


class _Numbered(threading.local):
    """The calling thread's own number: the system gives a thread that ended its identifier to the next one."""

    numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(self.numbers)


_thread = _Numbered()


def current_operator() -> OperatorNumber:
    """Number of the operator in whose save hook the calling thread is."""
    return _thread.number, sequence_nr()


def call_site() -> CallSite | None:
    """State in Python from which the operator was called whose hook this is; None where C++ called it.

    A function of one's own may run operators, write what it saves, and save it: autograd's number is then still that of the
    last operator that it ran, but it was called from elsewhere.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OF_HOOKS):
        frame = frame.f_back
    return None if frame is None else (id(frame), frame.f_lasti)


def made_before(t: Tensor, operator: OperatorNumber) -> bool:
    """Whether `t` is what an earlier differentiable operator returned. What no operator made counts as made just now."""
    node = t.grad_fn
    return node is not None and node._sequence_nr() < operator[1] - 1
