"""The profiler that is always on: a few numbers at each of autograd's two hooks, and nothing at an operator.

    light.begin_step()
    on_save(t):  feature = light.saved(t, previous)    # shape, dtype, operators since the last save, whose storage it is
    on_use(h):   feature = light.used(h.save)          # the node that asks, and which save it asks for
    record = light.end_step()                          # fingerprint, features, phases

Features are relative: how many operators since the last save, how many hooks since the storage's last save, how far from the
save that was used before. So one operator more in a step changes the features near it, and those behind stay what they were.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from chameleon_mm.profiler.step_record import NOT_A_USE, Boundary, StepRecord
from chameleon_mm.trace import StepPhase

NEW_STORAGE = -1
"""For `LightProfiler.saved`: the first save of its storage in this step."""
FIXED_STORAGE = -3
"""For `LightProfiler.saved`: a storage that nobody moves, so that nobody looked whether it was saved before. Not -2, because
Python hashes -2 and -1 alike."""

_UNSIGNED = (1 << 64) - 1
"""Python's hashes are signed; a trace's column of features is not."""

# Bound once: a lookup through `torch._C` at every hook would cost as much as what they do.
_sequence_nr = torch._C._autograd._get_sequence_nr
_current_node: Callable[[], Node | None] = torch._C._current_autograd_node  # None outside of a backward
_thread_id = threading.get_ident
_BACKWARD = StepPhase.BACKWARD


@dataclass(slots=True, kw_only=True)
class Lateness:
    """How the prefetches of one tensor of a plan fared."""

    uses: int = 0
    """How often its prefetch was waited for or found there."""
    late: int = 0
    """How often compute had to wait."""
    stall_us: float = 0.0
    """Time that compute waited, in all."""


class LightProfiler:
    """What every step looks like from the hooks. Not thread-safe: whoever calls holds the lock that orders the hooks.

    Autograd calls uses on threads of its own, and saves too where backward runs forward again (checkpointing): each thread's
    operators are counted apart. Nothing here touches the device or keeps a tensor.
    """

    __slots__ = (
        "_boundaries",
        "_features",
        "_forward_thread",
        "_last_used",
        "_lateness",
        "_names",
        "_number",
        "_numbers",
        "_phase",
        "_save_of",
        "_thread",
        "num_hooks",
    )

    def __init__(self) -> None:
        self._lateness: dict[int, Lateness] = {}
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the step so far. Hooks are numbered from 0 again."""
        self.num_hooks = 0
        """So far in this step: the number of the next one. To be read alone."""
        self._features: list[int] = []  # lists take a number faster than arrays do
        self._save_of: list[int] = []
        self._boundaries: list[Boundary] = []
        self._phase: StepPhase | None = None
        self._forward_thread: int | None = None
        """The thread of the last save, as long as the phase is FORWARD: one comparison at each save is for both."""
        self._last_used = 0
        self._thread = _thread_id()
        self._number = _sequence_nr()
        self._numbers: dict[int, int] = {}
        """Of the threads that are not the latest: the sequence number at their last save."""
        self._names: dict[type, str] = {}
        """Of the classes of nodes. Only for a step: a class that is made anew in each must not stay for ever."""

    def saved(self, t: Tensor, previous: int) -> int:
        """Autograd saves `t`, at hook number `num_hooks`. Returns the feature: unsigned 64-bit, comparable in this process.

        `previous` is the number of the hook that last saved the same storage in this step, `NEW_STORAGE` or `FIXED_STORAGE`.
        """
        thread = _thread_id()
        if thread != self._forward_thread:
            self._save_elsewhere(thread)
        number, hook = _sequence_nr(), self.num_hooks
        if previous >= 0:
            previous = hook - previous
        shape = t.shape if type(t) is Tensor else _plain_shape(t)
        feature = hash((shape, t.dtype, number - self._number, previous)) & _UNSIGNED
        self._number = number
        self._features.append(feature)
        self._save_of.append(NOT_A_USE)
        self.num_hooks = hook + 1
        return feature

    def used(self, save: int) -> int:
        """Autograd uses what hook number `save` of this step saved, or `EARLIER_STEP`. Returns the feature, as `saved` does.

        To be called where the hook was called, on autograd's thread: it asks which node is running.
        """
        node = _current_node()
        try:
            name = self._names[type(node)]
        except KeyError:
            name = self._name_of(node)
        if self._phase is not _BACKWARD:
            self._use_outside_backward(node)
        # Even, because -1 and -2 have the same hash.
        feature = hash((name, 2 * (self._last_used - save))) & _UNSIGNED
        self._last_used = save
        self._features.append(feature)
        self._save_of.append(save)
        self.num_hooks += 1
        return feature

    def end_step(self) -> StepRecord:
        """The step that was. Begins the next one, for hooks that are called between steps."""
        features = array("Q", self._features)
        record = StepRecord(
            fingerprint=hash(features.tobytes()),
            features=features,
            save_of=array("i", self._save_of),
            boundaries=tuple(self._boundaries),
        )
        self.begin_step()
        return record

    @property
    def phase(self) -> StepPhase | None:
        """FORWARD or BACKWARD, by the hooks so far; None before the first. A forward that backward runs again is BACKWARD."""
        return self._phase

    # --- lateness

    def prefetched(self, tensor: int, stall_us: float) -> None:
        """A prefetch of tensor number `tensor` of the plan was used; compute waited for it `stall_us`, 0: it was there.

        May come long after the use, once the device's events can be read.
        """
        lateness = self._lateness.get(tensor)
        if lateness is None:
            lateness = self._lateness[tensor] = Lateness()
        lateness.uses += 1
        lateness.late += stall_us > 0
        lateness.stall_us += stall_us

    def take_lateness(self) -> dict[int, Lateness]:
        """By tensor number, since this was last asked."""
        taken, self._lateness = self._lateness, {}
        return taken

    # --- what happens at a few hooks of a step

    def _save_elsewhere(self, thread: int) -> None:
        """A save outside of a forward, or on another thread than the last one."""
        if thread != self._thread:
            # Operators are numbered by thread. Of one that is new in the step nobody knows how many ran before: none, then.
            self._numbers[self._thread] = self._number
            self._number = self._numbers.get(thread, _sequence_nr())
            self._thread = thread
        # In a graph task it is a forward that backward runs again, or a graph of the backward: no new micro-batch.
        if torch._C._current_graph_task_id() == -1:
            self._enter(StepPhase.FORWARD)
            self._forward_thread = thread
        else:
            self._enter(StepPhase.BACKWARD)

    def _use_outside_backward(self, node: Node | None) -> None:
        if node is not None:  # without a node it is somebody who looks at a graph
            self._enter(StepPhase.BACKWARD)
            self._last_used = self.num_hooks

    def _name_of(self, node: Node | None) -> str:
        """The operator's name, as torch has it. Nodes written in C++ may have one class for all: that is never remembered."""
        if node is None:
            return "nobody"
        name, kind = node.name(), type(node)
        if kind.__name__ == name:
            self._names[kind] = name
        return name

    def _enter(self, phase: StepPhase) -> None:
        if phase is not self._phase:
            self._phase = phase
            self._forward_thread = None
            self._boundaries.append(Boundary(self.num_hooks, phase))


def _plain_shape(t: Tensor) -> tuple[object, ...]:
    """A parameter's shape; a subclass's behind its name. A jagged dimension's size is a number that every batch has anew."""
    kind = type(t)
    if kind is Parameter:
        return t.shape
    return (kind.__qualname__, *(size if type(size) is int else "*" for size in t.shape))
