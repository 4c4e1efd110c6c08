"""Record of one step as the light profiler sees it: a feature for every hook call, the save of each use, where phases begin.

hook      0      1      2      3      4      5      6   ...
          save   save   save   use    use    use    save          a save after a backward: the next micro-batch
save_of   -1     -1     -1     2      1      0      -1
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np

from chameleon_mm.trace import StepPhase

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
