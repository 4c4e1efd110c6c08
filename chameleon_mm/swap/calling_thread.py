"""What runs on the calling thread: its operator, its compute stream, torch's profiler.

now = current_operator()     # in a save hook: equal for all saves of one operator, and for no two operators of a thread
call_site()                  # the Python frame that runs it
made_before(t, now)          # whether an earlier operator made `t`, so that this one was given it
compute = streams.current()              # at every save and use of what moves: the calling thread's
streams.join_all(alloc_stream)           # before a saved storage is dropped: everybody's work so far, then anybody's next
with annotation("chameleon::swap_out"):  # a range in `torch.profiler`'s trace, where that runs

The operator is told by autograd's sequence number: Note [Swap-out].

A caching allocator gives a dropped block to the stream that allocated it, which need not be the one that saved it, and torch
does not tell whose it is. In eager the graph keeps the block until backward; dropped in forward, it could be overwritten by its
owner under a copy, or under a kernel of another stream that still reads it. So all streams are joined before it goes.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from chameleon_mm.device import Device, Event, Stream

# --- The number of the process that runs, without a call to the system: hooks compare it, as a forked child has another one
#
# if ThisProcess.pid != made_in: ...           # a forked child


class ThisProcess:
    """The process that runs."""

    pid = os.getpid()
    """Its number. Others only read it."""


def _forked() -> None:
    ThisProcess.pid = os.getpid()


os.register_at_fork(after_in_child=_forked)


# --- calling thread

sequence_nr = torch._C._autograd._get_sequence_nr
"""Number of the thread's next differentiable op: it moves between one op's saves and the next op's. Note [Swap-out]."""

_PACKAGE = Path(__file__).parents[1]
_OF_HOOKS = (str(_PACKAGE / "swap"), str(Path(torch.__file__).parent / "_dynamo"))
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


this_thread = _Numbered()
"""The calling thread: its `number`."""


def current_operator() -> OperatorNumber:
    """Number of the operator in whose save hook the calling thread is."""
    return this_thread.number, sequence_nr()


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


class ComputeStreams:
    """The streams on which tensors may have been allocated. Not thread-safe: the executor holds its lock."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._seen: list[Stream] = []

    def current(self) -> Stream:
        """The calling thread's compute stream, which is remembered."""
        stream = self._device.current_stream()
        if stream not in self._seen:
            self._seen.append(stream)
        return stream

    def is_one(self) -> bool:
        """Whether one stream has been seen, and no other."""
        return len(self._seen) == 1

    def is_only(self, stream: Stream) -> bool:
        """Whether no other stream has been seen."""
        return len(self._seen) == 1 and self._seen[0] is stream

    def record_each(self) -> list[Event]:
        """Events after what every one of them has been given so far."""
        return [stream.record() for stream in tuple(self._seen)]

    def join_all(self, alloc_stream: Stream) -> None:
        """Order all streams after what each has been given so far. Costs nothing while `alloc_stream` is the only one."""
        if len(self._seen) == 1 and self._seen[0] is alloc_stream:
            return
        others = [other for other in self._seen if other is not alloc_stream]
        for other in others:
            alloc_stream.wait(other.record())  # what they did with a block -> what follows on `alloc_stream`
        if others:
            so_far = alloc_stream.record()
            for other in others:
                other.wait(so_far)  # what anybody did with it, copies that were waited for too -> its owner's next use of it


_profiler_is_on = torch._C._autograd._profiler_enabled
_NOTHING: AbstractContextManager[object] = nullcontext()


def annotation(name: str) -> AbstractContextManager[object]:
    """A range of that name where torch's profiler runs on the calling thread; else nothing, for a tenth of a microsecond."""
    return record_function(name) if _profiler_is_on() else _NOTHING


# --- What an executor has to do before the interpreter ends: have autograd's thread let go of Python objects
#
# A backward holds what was on around it, our hooks among it, and what is to be called at its end. The device's thread may be
# the last to let go of these, after `backward` has returned. It takes the interpreter's lock for that, and where the
# interpreter has ended torch 2.11 and 2.13 abort the process: "terminate called without an active exception".


@cache
def let_go_at_exit(device: torch.device) -> None:
    """Before the interpreter ends, wait until autograd's thread of `device` has let go of the backwards before."""
    if device.type != "cpu":  # whose backwards run on the thread that calls them
        atexit.register(_run_a_backward, device)


def _run_a_backward(device: torch.device) -> None:
    """Run a backward of no bytes, which comes behind what the thread has to do, launches nothing and holds no Python object."""
    with suppress(RuntimeError):  # the device is lost, or this is a forked child
        x = torch.empty(0, device=device, requires_grad=True)
        torch.autograd.backward(x.view(0), torch.empty(0, device=device))
