"""State of the calling thread: its operator, its compute stream, torch's profiler.

    this_thread.number, sequence_nr()        # in a save hook: equal for all saves of one operator, different for others
    compute = streams.current()              # at every save and use of a tensor that moves: the calling thread's stream
    streams.join_all(alloc_stream)           # before a saved storage is dropped: orders later work after all earlier work
    with annotation("chameleon::swap_out"):  # a range in `torch.profiler`'s trace, if the profiler runs

Autograd's sequence number identifies the operator: Note [Swap-out].

The caching allocator returns a freed block to the stream that allocated it. Another stream may have saved the tensor, and torch
does not tell which stream allocated it. In eager the graph keeps the block until backward. If we free the block in forward, its
stream could overwrite it while a copy or another stream's kernel still reads it. So all streams are joined before that.
"""

from __future__ import annotations

import atexit
import itertools
import threading
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache

import torch
from torch.autograd.profiler import record_function

from chameleon_mm.device import Device, Event, Stream

# --- calling thread

sequence_nr = torch._C._autograd._get_sequence_nr
"""Number of the thread's next differentiable operator. It increases between the saves of one operator and the next."""

OperatorNumber = tuple[int, int]
"""Thread number, and the number of the thread's next differentiable operator while this operator runs."""


class _Numbered(threading.local):
    """Number of the calling thread, never reused. (The system reuses identifiers of ended threads.)"""

    numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(self.numbers)


this_thread = _Numbered()


class ComputeStreams:
    """Compute streams seen so far, on which tensors may have been allocated. Not thread-safe: the executor holds its lock."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._seen: list[Stream] = []

    def current(self) -> Stream:
        """Return the calling thread's compute stream, and remember it."""
        stream = self._device.current_stream()
        if stream not in self._seen:
            self._seen.append(stream)
        return stream

    def is_one(self) -> bool:
        """True if only one stream was seen so far."""
        return len(self._seen) == 1

    def is_only(self, stream: Stream) -> bool:
        """True if `stream` is the only stream seen so far."""
        return len(self._seen) == 1 and self._seen[0] is stream

    def record_each(self) -> list[Event]:
        """Record an event on each stream, after its earlier work."""
        return [stream.record() for stream in tuple(self._seen)]

    def join_all(self, alloc_stream: Stream) -> None:
        """Order all streams after each other's earlier work. Does nothing if `alloc_stream` is the only stream."""
        if len(self._seen) == 1 and self._seen[0] is alloc_stream:
            return
        others = [other for other in self._seen if other is not alloc_stream]
        for other in others:
            alloc_stream.wait(other.record())  # work of other streams with a block -> later work on `alloc_stream`
        if others:
            so_far = alloc_stream.record()
            for other in others:
                other.wait(so_far)  # all work with the block, awaited copies too -> its owner's next use


profiler_is_on = torch._C._autograd._profiler_enabled
"""True while torch's profiler runs on the calling thread."""
_NOTHING: AbstractContextManager[object] = nullcontext()


def annotation(name: str) -> AbstractContextManager[object]:
    """Return a profiler range `name` if torch's profiler runs on the calling thread, else an empty context (0.1 us)."""
    return record_function(name) if profiler_is_on() else _NOTHING


# --- At exit: wait until autograd's device thread has released its Python objects
#
# A backward holds the hooks that were active around it, including ours, and its final callbacks. Autograd's device thread may
# release them last, after `backward` has returned. For that it takes the interpreter's lock. If the interpreter has ended,
# torch 2.11 and 2.13 abort the process: "terminate called without an active exception".


@cache
def let_go_at_exit(device: torch.device) -> None:
    """Let the interpreter wait at exit until autograd's thread of `device` has released earlier backwards."""
    if device.type != "cpu":  # on the CPU a backward runs on the thread that calls it
        atexit.register(_run_a_backward, device)


def _run_a_backward(device: torch.device) -> None:
    """Run a backward over zero bytes. It runs after the thread's earlier work, launches nothing and holds no Python object."""
    with suppress(RuntimeError):  # the device is lost, or this is a forked child
        x = torch.empty(0, device=device, requires_grad=True)
        torch.autograd.backward(x.view(0), torch.empty(0, device=device))
