"""Light profiler, always on: notes a few numbers at each call of autograd's two hooks, and nothing at operators.

    light.begin_step(); light.follow(record)    # record of the expected cached step, if any
    on_save(t):  light.saved(t, since)          # shape, dtype, operators since the last save, hooks since its storage's last
    on_use(h):   light.used(h.save)             # the node that runs, and the save that it uses
    record = light.end_step()                   # fingerprint, features, phases; the followed record itself if it is equal

    hook       its feature == the followed step's feature here     True, and nothing is stored
               the first difference                                False from here on: each hook's feature is stored

Features are relative: operators since the last save, hooks since the storage's last save, distance from the previously used
save. So one additional operator changes only the features near it, and one feature of each storage saved both before and after
it. Features are compared by value, and hashed once, at the end of a new step. A cached step costs one comparison per hook.
Equal hooks share a feature object.

Hooks see only saves and uses. They see the number of operators between two saves, but not the kind of those that save nothing:
`add` or `sub`, a view or a copy. They do not see operators after the last save, without gradients or in the optimizer. They
also do not see which of the never moving storages are equal. Steps that differ only in these count as the same step.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from chameleon_mm.plan.trace import SAVE_PARTS, StepPhase

# --- Record of one step: a feature for each hook call, the save of each use, and the beginnings of phases

NOT_A_USE = -1
"""Value in `StepRecord.save_of` of a hook that is a save."""
EARLIER_STEP = -2
"""Value in `StepRecord.save_of`, and for `LightProfiler.used`, of a use of a tensor that was saved before this step."""

Feature = tuple[Hashable, ...]
"""Feature of one hook call, relative to earlier calls.

Save: class or class name, sizes, dtype, operators since the last save, hooks since its storage's last save, and the phase if
that is a backward. Use: the operator, and the distance of its save from the previously used save.
"""

_UNSIGNED = (1 << 64) - 1
"""Mask that turns Python's signed hashes into unsigned ones."""


def feature_hash(feature: Feature) -> int:
    """Return the hash of a feature: unsigned 64-bit, comparable within this process."""
    # Even numbers, because -1 and -2 have equal hashes, and neighbouring features may differ only in these.
    return hash(tuple(2 * part if type(part) is int else part for part in feature)) & _UNSIGNED


def sizes_of(feature: Feature) -> tuple[int, ...] | None:
    """Return the sizes of a saved tensor. None: the hook is a use, or a dimension is not a whole number (nested tensor)."""
    if len(feature) < SAVE_PARTS:
        return None
    sizes = feature[1]
    return sizes if isinstance(sizes, tuple) and all(isinstance(size, int) for size in sizes) else None


def resized(save: Feature, sizes: tuple[Hashable, ...], since: Hashable) -> Feature:
    """Return a save's feature with other `sizes` and `since`."""
    kind, _, dtype, operators, _, *phase = save
    return (kind, sizes, dtype, operators, since, *phase)


def outline(feature: Feature) -> Hashable:
    """Return a feature without its sizes and without `since`, which shows if the storage is large enough to move."""
    if len(feature) < SAVE_PARTS:
        return feature
    kind, sizes, dtype, operators, _, *phase = feature
    return (kind, len(sizes) if isinstance(sizes, tuple) else None, operators, dtype, *phase)


class Boundary(NamedTuple):
    hook: int
    """Number of the phase's first hook."""
    phase: StepPhase
    """FORWARD or BACKWARD. Hooks do not see the optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRecord:
    """Record of a step of n hook calls."""

    fingerprint: int
    """Hash of the whole sequence of features. Comparable only within this process, like the features' hashes."""
    features: tuple[Feature, ...]
    """(n,) features, compared by value, so that hash collisions cannot confuse them. Equal features are one object."""
    save_of: array[int]
    """(n,) saves, type code "i". For a use: the hook that saved it, or `EARLIER_STEP`. For a save: `NOT_A_USE`."""
    boundaries: tuple[Boundary, ...] = ()

    @classmethod
    def of(cls, features: Sequence[Feature], save_of: Sequence[int], boundaries: tuple[Boundary, ...]) -> StepRecord:
        """Make the record of a step from its hooks as seen by the light profiler."""
        same: dict[Feature, Feature] = {}  # layers are similar, so a step has few different features
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


# --- light

# Bound once: a lookup through `torch._C` at every hook would cost as much as the call.
_sequence_nr = torch._C._autograd._get_sequence_nr
_current_node: Callable[[], Node | None] = torch._C._current_autograd_node  # returns None outside of a backward
_thread_id = threading.get_ident
_FORWARD, _BACKWARD = StepPhase.FORWARD, StepPhase.BACKWARD

_SaveFeature = tuple[Hashable, Hashable, torch.dtype, int, int]
"""Class or class name, sizes, dtype, operators since the last save, hooks since the storage's last save."""

PLAIN_CLASSES = frozenset[Hashable]((Tensor, Parameter))
"""Classes that features refer to directly, because such a reference keeps nothing else alive."""

_NEVER = -(1 << 62)
"""Impossible number of operators. A difference from it equals no feature."""

HEAP_TYPE = 1 << 9
"""Flag of a class created at run time: CPython's `Py_TPFLAGS_HEAPTYPE`."""


@dataclass(slots=True)
class LatestHook:
    """Counters to which the features of the next hooks are relative."""

    thread: int
    """Identifier of the thread that saved last."""
    numbers: dict[int, int]
    """Autograd's number of operators at the latest save of each thread."""
    last_used: int
    """Save of the tensor used last; -1: none was used."""


class LightProfiler:
    """Profiler that records each step as its hooks see it. Not thread-safe: the caller holds the lock that orders the hooks.

    Autograd calls use hooks on its own threads, and also save hooks if backward runs forward again (checkpointing). So
    operators are counted per thread. The profiler neither touches the device nor keeps a tensor.
    """

    def __init__(self) -> None:
        self._kinds: set[type] = set()
        """Node classes used in place of their operator's name. They live as long as their module anyway."""
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the step so far, and number hooks from 0 again."""
        self.num_hooks = 0
        """Number of hooks so far in this step, which is the number of the next hook. Other classes only read it."""
        self._features: list[Feature | None] = [None]
        """Features of this step's hooks, then of the expected hooks. None at the end: no hook is expected there."""
        self._followed: StepRecord | None = None
        """Record of the step that equals this one so far."""
        self._save_of: list[int] = []
        """Save of each use, as in a record. Stored only while no step is followed, whose record would have it."""
        self._boundaries: list[Boundary] = []
        self._phase: StepPhase | None = None
        self._last_used = -1
        self._thread: int | None = None
        """Thread of the last save while the phase is FORWARD, else None."""
        self._number = _NEVER
        """Autograd's number of operators on that thread, at that save."""
        self._numbers = {_thread_id(): _sequence_nr()}
        """Autograd's number of operators of each other thread, at its last save."""

    def follow(self, record: StepRecord) -> None:
        """Compare hooks from now on with those of `record`, whose first `num_hooks` hooks equal this step's."""
        self._followed = record
        self._features = [*record.features, None]
        self._save_of = []

    def latest(self) -> LatestHook:
        """Return the counters to which the next hooks are relative."""
        numbers = dict(self._numbers)
        if self._thread is not None:
            numbers[self._thread] = self._number
        return LatestHook(_thread_id() if self._thread is None else self._thread, numbers, self._last_used)

    def rejoin(self, hook: int, latest: LatestHook) -> None:
        """Continue after `hook`. All hooks up to it equalled the followed step's, and were not noted here."""
        followed = self._followed
        assert followed is not None
        self.num_hooks = hook + 1
        self._boundaries = [boundary for boundary in followed.boundaries if boundary.hook <= hook]
        self._phase, self._numbers, self._last_used = self._boundaries[-1].phase, latest.numbers, latest.last_used
        forward = self._phase is _FORWARD
        self._thread = latest.thread if forward else None
        self._number = latest.numbers.get(latest.thread, _NEVER) if forward else _NEVER

    def saved(self, t: Tensor, since: int) -> bool:
        """Note that autograd saves `t`, at hook number `num_hooks`. Returns True if the followed step has the same feature
        here.

        `since`: number of hooks since the storage was last saved in this step, or `NEW_STORAGE` or `FIXED_STORAGE`.
        """
        number, hook = _sequence_nr(), self.num_hooks
        feature: _SaveFeature
        try:
            feature = (type(t), t.shape, t.dtype, number - self._number, since)
        except RuntimeError:  # a nested tensor that is not jagged has only a shape per row
            feature = ("nested", t.numel(), t.dtype, number - self._number, since)
        # Outside of a forward `_number` is `_NEVER`, so no feature is equal. On another thread one may be equal by chance.
        if feature == self._features[hook]:
            self._number = number
            self.num_hooks = hook + 1
            return True
        return self._saved_elsewhere(feature, number)

    def used(self, save: int) -> bool:
        """Note that autograd uses the tensor that hook number `save` of this step saved, or `EARLIER_STEP`. Returns as `saved`
        does.

        Call it inside the hook, on autograd's thread, because it reads the running node.
        """
        hook, node = self.num_hooks, _current_node()
        # The first use of a backward counts from the backward's beginning, so it never agrees here.
        if (type(node), self._last_used - save) == self._features[hook]:
            self._last_used = save
            self.num_hooks = hook + 1
            return True
        return self._used_elsewhere(save, node)

    @property
    def feature(self) -> Feature:
        """Return the feature of the last hook. Comparable within this process."""
        return cast("Feature", self._features[self.num_hooks - 1])

    @property
    def beginning(self) -> list[Feature]:
        return cast("list[Feature]", self._features[: self.num_hooks])

    def end_step(self) -> StepRecord:
        """End the step and return its record: the followed record itself if the step equals it. The next step begins with
        `begin_step`."""
        followed, boundaries = self._followed, tuple(self._boundaries)
        if followed is not None and followed.num_hooks == self.num_hooks and followed.boundaries == boundaries:
            return followed
        self._stop_following()
        return StepRecord.of(cast("list[Feature]", self._features[:-1]), self._save_of, boundaries)

    # --- slow path: a few hooks of a step, or all hooks of a new step

    def _saved_elsewhere(self, feature: _SaveFeature, number: int) -> bool:
        """Note a save outside of a forward, on another thread than the last, of a subclass, or missing in the followed step."""
        kind, shape, dtype, operators, since = feature
        thread = _thread_id()
        if thread != self._thread:
            self._leave_forward()
            if torch._C._current_graph_task_id() == -1:
                self._enter(_FORWARD)
                self._thread = thread
                # Operators are numbered per thread. For a new thread in the step, assume that no operator ran before.
                self._number = self._numbers.get(thread, number)
                operators = number - self._number
            else:  # a forward rerun by backward, or a graph of the backward: not a new micro-batch
                operators, self._numbers[thread] = number - self._numbers.get(thread, number), number
                self._enter(_BACKWARD)
            feature = (kind, shape, dtype, operators, since)
        if self._thread is not None:
            self._number = number
        known_by: Feature = feature
        if isinstance(kind, type) and kind not in PLAIN_CLASSES and isinstance(shape, tuple):
            # The name of a subclass keeps no class alive. A jagged dimension's size is "*", because it differs in each batch.
            sizes = tuple(size if type(size) is int else "*" for size in shape)
            known_by = (kind.__qualname__, sizes, dtype, operators, since)
        # Saves in forward and in backward have different features, so steps with equal features have equal phases.
        return self._next(known_by if self._phase is _FORWARD else (*known_by, _BACKWARD), NOT_A_USE)

    def _used_elsewhere(self, save: int, node: Node | None) -> bool:
        """Note an unexpected use, or a use by a node whose class does not determine its name."""
        kind = type(node)
        operator = kind if kind in self._kinds else self._operator_of(node)
        if self._phase is not _BACKWARD and node is not None:  # without a node, user code reads a saved tensor of the graph
            self._leave_forward()
            self._enter(_BACKWARD)
            self._last_used = self.num_hooks
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
        """Return the identity of the operator whose backward is `node`: the node's class if it determines the name, else the
        name."""
        if node is None:
            return "nobody"
        name, kind = node.name(), type(node)
        # C++ nodes may share one class. A class made in a function may hold that function's tensors.
        is_local = kind.__flags__ & HEAP_TYPE and "<locals>" in getattr(kind, "_forward_cls", kind).__qualname__
        if kind.__name__ != name or is_local:
            return name
        self._kinds.add(kind)
        return kind

    def _leave_forward(self) -> None:
        if self._thread is not None:
            self._numbers[self._thread] = self._number
            self._thread, self._number = None, _NEVER

    def _enter(self, phase: StepPhase) -> None:
        if phase is not self._phase:
            self._phase = phase
            self._boundaries.append(Boundary(self.num_hooks, phase))
