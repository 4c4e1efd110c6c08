"""The light profiler, which is always on: takes a few numbers at each of autograd's two hooks, and nothing at an operator.

    light.begin_step(); light.follow(record)    # of the cached step that is expected, if any
    on_save(t):  light.saved(t, since)          # shape, dtype, operators since the last save, whose storage it is
    on_use(h):   light.used(h.save)             # the node that asks, and which save it asks for
    record = light.end_step()                   # fingerprint, features, phases: the followed one, if it was that

    hook       what is seen == what the followed step had here     True, and nothing is kept
               the first time that it is not                       False from here on: each hook's feature is kept

Features are relative: how many operators since the last save, how many hooks since the storage's last save, how far from the
save that was used before. So one operator more in a step changes the features near it, and those of storages that were saved
before it and are saved again behind it, once each: it lies in between. The others stay what they were.
They are compared as they are, and hashed once, at the end of a step that is new: a step that is cached costs a comparison per
hook, with a feature that all hooks alike share.

Hooks see what autograd saves and uses. Of operators that save nothing they see how many ran before the next save, not which
they were: `add` or `sub`, a view or a copy. Of what runs behind the last save, without gradients or in the optimizer they see
nothing, nor which of the storages that nobody moves are the same. Steps that differ in nothing else are one.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from chameleon_mm.plan.trace import StepPhase

# --- Record of one step as the light profiler sees it: a feature for every hook call, the save of each use, where phases
# begin

NOT_A_USE = -1
"""Value in `StepRecord.save_of` of a hook that is a save."""
EARLIER_STEP = -2
"""Value in `StepRecord.save_of`, and for `LightProfiler.used`, of a use of what was saved before this step began."""

Feature = tuple[Hashable, ...]
"""Feature of one hook call, relative to those before it.

A save: its class or that class's name, sizes, dtype, operators since the last save, hooks since its storage's last save, and
behind them the phase if that is a backward. A use: the operator that asks, and how far its save is from the one used before.
"""

_SAVE_PARTS = 5
"""Parts of a save's feature, at least; a use has two."""

_UNSIGNED = (1 << 64) - 1
"""Mask that makes Python's signed hashes the unsigned ones of a trace's column."""


def feature_hash(feature: Feature) -> int:
    """Hash of a feature as a trace has it: unsigned 64-bit, comparable within this process."""
    # Even numbers, because -1 and -2 have the same hash, and features that differ in nothing else are neighbours.
    return hash(tuple(2 * part if type(part) is int else part for part in feature)) & _UNSIGNED


class SaveParts(NamedTuple):
    """Parts of a save's feature."""

    signature: Feature
    """The part that does not depend on other saves."""
    operators: int
    """Number of operators since the last save."""
    since: int
    """Hooks since the storage's last save, or `NEW_STORAGE`, `FIXED_STORAGE` of `LightProfiler`."""


def save_parts(feature: Feature) -> SaveParts:
    """Parts of a save's feature."""
    kind, sizes, dtype, operators, since, *phase = feature
    return SaveParts((kind, sizes, dtype, *phase), cast("int", operators), cast("int", since))


def sizes_of(feature: Feature) -> tuple[int, ...] | None:
    """Sizes of what a save saves; None: it is a use, or has no whole number for some dimension, as a nested tensor has."""
    if len(feature) < _SAVE_PARTS:
        return None
    sizes = feature[1]
    return sizes if isinstance(sizes, tuple) and all(isinstance(size, int) for size in sizes) else None


def resized(save: Feature, sizes: tuple[Hashable, ...], since: Hashable) -> Feature:
    """The feature of a save with other sizes and another distance to its storage's last save."""
    kind, _, dtype, operators, _, *phase = save
    return (kind, sizes, dtype, operators, since, *phase)


def outline(feature: Feature) -> Hashable:
    """A feature without its sizes, and without whether its storage is large enough to move."""
    if len(feature) < _SAVE_PARTS:
        return feature
    (kind, sizes, *rest), operators, _ = save_parts(feature)
    return (kind, len(sizes) if isinstance(sizes, tuple) else None, operators, *rest)


class Boundary(NamedTuple):
    """The beginning of a phase."""

    hook: int
    """Number of its first hook."""
    phase: StepPhase
    """FORWARD or BACKWARD: the hooks see no optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRecord:
    """One step of n hook calls, as the hooks saw it. Raises `ValueError` for columns of different length, and a use without its
    save."""

    fingerprint: int
    """Hash of the whole sequence of features. Comparable within this process alone, as the features' hashes are."""
    features: tuple[Feature, ...]
    """(n,) features, compared as they are, so that no collision of hashes takes one for another. Equal ones are one object."""
    save_of: array[int]
    """(n,) saves, type code "i": for a use the hook that saved it, or `EARLIER_STEP`; for a save `NOT_A_USE`."""
    boundaries: tuple[Boundary, ...] = ()
    """Boundaries of the phases, in the order of their hooks."""

    def __post_init__(self) -> None:
        if len(self.features) != len(self.save_of):
            raise ValueError(
                f"step record: expected a feature and a save_of for every hook, got {len(self.features)} features and "
                f"{len(self.save_of)} save_of; take both from one step"
            )
        saves = np.frombuffer(self.save_of, np.int32)
        used = saves[saves >= 0]
        known = (saves >= EARLIER_STEP).all() and (saves < np.arange(len(saves))).all() and (saves[used] == NOT_A_USE).all()
        if not known:
            raise ValueError(
                "step record: expected every use to name an earlier save of the step, got one that does not; number hooks from "
                "the step's first"
            )

    @classmethod
    def of(cls, features: Sequence[Feature], save_of: Sequence[int], boundaries: tuple[Boundary, ...]) -> StepRecord:
        """Record of a step of these hooks, which are as the light profiler saw them."""
        same: dict[Feature, Feature] = {}  # layers are alike: a step has few features that differ
        shared = tuple(map(same.setdefault, features, features))
        hashes = {id(feature): feature_hash(feature) for feature in same}
        return cls(
            fingerprint=hash(array("Q", map(hashes.__getitem__, map(id, shared))).tobytes()),
            features=shared,
            save_of=array("i", save_of),
            boundaries=boundaries,
        )

    @property
    def num_hooks(self) -> int:
        return len(self.features)

    @property
    def num_saves(self) -> int:
        return self.save_of.count(NOT_A_USE)


# --- light

NEW_STORAGE = 0
"""`since` of the first save of a storage in this step."""
FIXED_STORAGE = -1
"""`since` of a storage that never moves, so that nobody looked whether it was saved before."""

# Bound once: a lookup through `torch._C` at every hook would cost as much as what they do.
_sequence_nr = torch._C._autograd._get_sequence_nr
_current_node: Callable[[], Node | None] = torch._C._current_autograd_node  # None outside of a backward
_thread_id = threading.get_ident
_FORWARD, _BACKWARD = StepPhase.FORWARD, StepPhase.BACKWARD

_SaveFeature = tuple[Hashable, Hashable, torch.dtype, int, int]
"""Class or its name, sizes, dtype, operators since the last save, hooks since the storage's last save."""

PLAIN_CLASSES = frozenset[Hashable]((Tensor, Parameter))
"""Classes that stand for themselves: whoever keeps them keeps nothing else alive."""

_NEVER = -(1 << 62)
"""A number that no count of operators is: whatever is counted from here agrees with nothing."""

HEAP_TYPE = 1 << 9
"""Flag of a class that was made while Python ran: CPython's `Py_TPFLAGS_HEAPTYPE`."""


@dataclass(slots=True)
class LatestHook:
    """What the features of the next hooks count from."""

    thread: int
    """The thread that saved last, by its identifier."""
    numbers: dict[int, int]
    """Autograd's number of operators at the latest save of each thread."""
    last_used: int
    """The save of what was used last; -1: nothing was."""


class LightProfiler:
    """Records what every step looks like from the hooks. Not thread-safe: whoever calls holds the lock that orders the hooks.

    Autograd calls uses on threads of its own, and saves too where backward runs forward again (checkpointing): each thread's
    operators are counted apart. Nothing here touches the device or keeps a tensor.
    """

    def __init__(self) -> None:
        self._kinds: set[type] = set()
        """Classes of nodes that stand for their operator's name. None that would not live as long anyway."""
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the step so far, and number hooks from 0 again."""
        self.num_hooks = 0
        """Number of hooks so far in this step, which is the number of the next one. Others only read it."""
        self._features: list[Feature | None] = [None]
        """Features of this step's hooks, then of the expected ones; None after the last: what comes there is not known."""
        self._followed: StepRecord | None = None
        """The step that this one has been so far, hook for hook."""
        self._save_of: list[int] = []
        """Save of each use, as a record has it. Only while no step is followed, which would have it all."""
        self._boundaries: list[Boundary] = []
        self._phase: StepPhase | None = None
        self._last_used = -1
        self._thread: int | None = None
        """Thread of the last save, as long as the phase is FORWARD."""
        self._number = _NEVER
        """Autograd's number of operators on that thread, at that save."""
        self._numbers = {_thread_id(): _sequence_nr()}
        """Autograd's number of operators of each other thread, at its last save."""

    def follow(self, record: StepRecord) -> None:
        """Compare hooks from now on with those of `record`, whose first `num_hooks` are those of this step."""
        self._followed = record
        self._features = [*record.features, None]
        self._save_of = []

    def latest(self) -> LatestHook:
        """What the next hooks count from."""
        numbers = dict(self._numbers)
        if self._thread is not None:
            numbers[self._thread] = self._number
        return LatestHook(_thread_id() if self._thread is None else self._thread, numbers, self._last_used)

    def rejoin(self, hook: int, latest: LatestHook) -> None:
        """Go on behind `hook`: all so far were those of the step that is followed, and nobody told."""
        followed = self._followed
        assert followed is not None
        self.num_hooks = hook + 1
        self._boundaries = [boundary for boundary in followed.boundaries if boundary.hook <= hook]
        self._phase, self._numbers, self._last_used = self._boundaries[-1].phase, latest.numbers, latest.last_used
        forward = self._phase is _FORWARD
        self._thread = latest.thread if forward else None
        self._number = latest.numbers.get(latest.thread, _NEVER) if forward else _NEVER

    def saved(self, t: Tensor, since: int) -> bool:
        """Note that autograd saves `t`, at hook number `num_hooks`. Returns whether the step that is followed has the same
        here.

        `since` is how many hooks ago the same storage was last saved in this step, `NEW_STORAGE` or `FIXED_STORAGE`.
        """
        number, hook = _sequence_nr(), self.num_hooks
        feature: _SaveFeature
        try:
            feature = (type(t), t.shape, t.dtype, number - self._number, since)
        except RuntimeError:  # a nested tensor that is not jagged has a shape for each of its rows, and none of its own
            feature = ("nested", t.numel(), t.dtype, number - self._number, since)
        # Outside of a forward, and but for luck on another thread, the number of operators is none that a step can have.
        if feature == self._features[hook]:
            self._number = number
            self.num_hooks = hook + 1
            return True
        return self._saved_elsewhere(feature, number)

    def used(self, save: int) -> bool:
        """Note that autograd uses what hook number `save` of this step saved, or `EARLIER_STEP`. Returns as `saved` does.

        To be called where the hook was called, on autograd's thread: it asks which node is running.
        """
        hook, node = self.num_hooks, _current_node()
        # The first use of a backward counts from where that began, behind whatever was used before: it never agrees here.
        if (type(node), self._last_used - save) == self._features[hook]:
            self._last_used = save
            self.num_hooks = hook + 1
            return True
        return self._used_elsewhere(save, node)

    def _enter_forward(self) -> None:
        """Note that a forward saves on this thread, and that the last hook was none of a forward's saves."""
        self._enter(_FORWARD)
        self._thread = thread = _thread_id()
        # Operators are numbered by thread. Of one that is new in the step nobody knows how many ran before: none, then.
        self._number = self._numbers.get(thread, _sequence_nr())

    def enter_backward(self) -> None:
        """Note that a node runs, and the last hook was none of a backward."""
        self._leave_forward()
        self._enter(_BACKWARD)
        self._last_used = self.num_hooks

    @property
    def feature(self) -> Feature:
        """Feature of the last hook. Comparable within this process. Raises `IndexError` before the first."""
        feature = self._features[self.num_hooks - 1] if self.num_hooks else None
        if feature is None:
            raise IndexError("light profiler: expected a hook in this step before its feature is asked for, got none")
        return feature

    @property
    def beginning(self) -> list[Feature]:
        """Features of the hooks so far."""
        return cast("list[Feature]", self._features[: self.num_hooks])

    def end_step(self) -> StepRecord:
        """End the step and return its record: the very record that was followed, if it was that one. The next begins with
        `begin_step`."""
        followed, boundaries = self._followed, tuple(self._boundaries)
        if followed is not None and followed.num_hooks == self.num_hooks and followed.boundaries == boundaries:
            record = followed
        else:
            self._stop_following()
            record = StepRecord.of(cast("list[Feature]", self._features[:-1]), self._save_of, boundaries)
        return record

    # --- what happens at a few hooks of a step, or in a new one

    def _saved_elsewhere(self, feature: _SaveFeature, number: int) -> bool:
        """Note a save outside of a forward, on another thread than the last one, of a subclass, or of no step that is
        followed."""
        kind, shape, dtype, operators, since = feature
        thread = _thread_id()
        if thread != self._thread:
            self._leave_forward()
            if torch._C._current_graph_task_id() == -1:
                self._enter_forward()
                operators = number - self._number
            else:  # a forward that backward runs again, or a graph of the backward: no new micro-batch
                operators, self._numbers[thread] = number - self._numbers.get(thread, number), number
                self._enter(_BACKWARD)
            feature = (kind, shape, dtype, operators, since)
        if self._thread is not None:
            self._number = number
        known_by: Feature = feature if kind in PLAIN_CLASSES else (*_described(kind, shape), dtype, operators, since)
        # A forward's save is none of a backward: so steps whose hooks have the same features have the same phases.
        return self._next(known_by if self._phase is _FORWARD else (*known_by, _BACKWARD), NOT_A_USE)

    def _used_elsewhere(self, save: int, node: Node | None) -> bool:
        """Note a use by another node than was expected, or by one that no class stands for."""
        kind = type(node)
        operator = kind if kind in self._kinds else self._operator_of(node)
        if self._phase is not _BACKWARD and node is not None:  # without a node it is somebody who looks at a graph
            self.enter_backward()
        feature = (operator, self._last_used - save)
        self._last_used = save
        return self._next(feature, save)

    def _next(self, feature: Feature, save: int) -> bool:
        hook = self.num_hooks
        if self._followed is not None:
            if feature == self._features[hook]:
                self.num_hooks = hook + 1
                return True
            self._stop_following()
        self._features[hook] = feature
        self._features.append(None)
        self._save_of.append(save)
        self.num_hooks = hook + 1
        return False

    def _stop_following(self) -> None:
        if self._followed is not None:
            self._features[self.num_hooks :] = [None]
            self._save_of = self._followed.save_of[: self.num_hooks].tolist()
            self._followed = None

    def _operator_of(self, node: Node | None) -> type | str:
        """Identity of the operator whose backward `node` is: the node's class where that says as much as its name."""
        if node is None:
            return "nobody"
        name, kind = node.name(), type(node)
        if kind.__name__ == name and _outlives_steps(kind):  # nodes written in C++ may have one class for all
            self._kinds.add(kind)
            return kind
        return name

    def _leave_forward(self) -> None:
        if self._thread is not None:
            self._numbers[self._thread] = self._number
            self._thread, self._number = None, _NEVER

    def _enter(self, phase: StepPhase) -> None:
        if phase is not self._phase:
            self._phase = phase
            self._boundaries.append(Boundary(self.num_hooks, phase))


def _outlives_steps(kind: type) -> bool:
    """Whether a class of nodes is there as long as its module. What a function made may hold that function's tensors."""
    if not kind.__flags__ & HEAP_TYPE:
        return True
    function: type = getattr(kind, "_forward_cls", kind)
    return "<locals>" not in function.__qualname__


def _described(kind: Hashable, shape: Hashable) -> tuple[Hashable, Hashable]:
    """Name of a subclass, which keeps no class alive, and its sizes. A jagged dimension's size is a number that every batch has
    anew."""
    if isinstance(kind, type) and isinstance(shape, tuple):
        return kind.__qualname__, tuple(size if type(size) is int else "*" for size in shape)
    return kind, shape
