"""Index of a cached step's saves, to match a running step's with them: signatures, how rare these are, and storages.

    index = SaveIndex(record, hooks of its saves)
    storages, pairs = index.as_running(aligned)      # of a step whose first hooks are the same
    index.positions_like(save, pairs)                # candidates, by position: how many saves of the cached step come before
    index.weight(position, operators, same_storage)  # how much it says that so much agrees
    index.storage_cost(position, save, pairs)        # and how much what does not
    pairs = pairs.with_pair(save.storage, index.storages[position])    # if that is it

A feature names a storage by how many hooks ago it was saved last, which is another number wherever something was edited in
between. Resolved to the storage itself it is the same again, and the best evidence there is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from itertools import count
from math import log
from typing import NamedTuple, Self

from chameleon_mm.profiler.light import FIXED_STORAGE, NEW_STORAGE
from chameleon_mm.profiler.step_record import Feature, StepRecord, save_parts

_NEIGHBOURS = 2
"""Number of saves of one signature on each side of a position whose distance says how rare they are there."""

_OTHER_STORAGE_COST = 0.4
"""Cost of another storage than the cached save's: what made the tensor was edited ..."""
_OTHER_HISTORY_COST = 7.0
"""... which does not make it a storage's first save if it was none, or none if it was."""
_UNSEEN_HISTORY_COST = 4.0
"""Cost of that alone, where the storage is none that is known to be another: its earlier save was edited."""

FIXED = -1
"""Number in place of a storage's: the storage never moves, so nobody looked which one it is."""


class RunningSave(NamedTuple):
    """One save of the running step."""

    signature: Hashable
    operators: int
    storage: int
    """Number of the storage in this step, which no storage of the cached step has; or `FIXED`."""
    is_first: bool


class Pairs:
    """Pairs of a storage of the running step and one of the cached step, at most one for each, as one explanation has them.

    Explanations share what was settled before they parted; what each has of its own is copied when it is to change.
    """

    __slots__ = ("_own", "_settled")

    def __init__(self, settled: dict[int, int | None], own: dict[int, int | None]) -> None:
        self._settled = settled
        """Partner of each storage, in both directions. None: it no longer has one."""
        self._own = own

    def __len__(self) -> int:
        """Number of pairs that are this explanation's own: what a copy costs."""
        return len(self._own)

    def get(self, storage: int) -> int | None:
        """Partner of a storage: of a cached one the running step's, and the reverse; None: not known."""
        return self._own[storage] if storage in self._own else self._settled.get(storage)

    def add(self, storage: int, known: int) -> None:
        """Pair the two, which no longer have other partners. Does nothing for what is fixed."""
        if storage != FIXED and self.get(storage) != known:
            self._unpair(storage)
            self._unpair(known)
            self._own[storage], self._own[known] = known, storage

    def with_pair(self, storage: int, known: int) -> Self:
        """Pairs as they are after `add`; itself if that changes nothing."""
        if storage == FIXED or self.get(storage) == known:
            return self
        pairs = type(self)(self._settled, self._own.copy())
        pairs.add(storage, known)
        return pairs

    def without(self, storage: int) -> Self:
        """Pairs without that of `storage`."""
        pairs = type(self)(self._settled, self._own.copy())
        pairs._unpair(storage)
        return pairs

    def settle(self) -> Self:
        """Make these pairs the shared ones, as no other explanation is left."""
        self._settled.update(self._own)
        return type(self)(self._settled, {})

    def _unpair(self, storage: int) -> None:
        other = self.get(storage)
        if other is not None:
            self._own[storage] = self._own[other] = None


class SaveIndex:
    """Index of a cached step's saves by position: the number of its saves that come before."""

    def __init__(self, record: StepRecord, hooks: Sequence[int]) -> None:
        """`hooks`: numbers of the hooks that are saves."""
        saves = [split_feature(record.features[hook]) for hook in hooks]
        self.signatures = [*(signature for signature, _, _ in saves), None]
        """Signatures of the saves: what no match differs in. After the last position: the signature of no save."""
        self.operators = [*(operators for _, operators, _ in saves), 0]
        self.is_first = [since == NEW_STORAGE for _, _, since in saves]
        self._first_hooks = [hook for hook, is_first in zip(hooks, self.is_first, strict=True) if is_first]
        """Hook of the first save by storage. Storages are numbered in the order of their first saves."""
        self._storage_at = [FIXED] * record.num_hooks
        numbers = count()
        for hook, (_, _, since) in zip(hooks, saves, strict=True):
            if since == NEW_STORAGE:
                self._storage_at[hook] = next(numbers)
            elif since != FIXED_STORAGE:
                self._storage_at[hook] = self._storage_at[hook - since]
        self.storages = [self._storage_at[hook] for hook in hooks]
        self._positions: dict[Hashable, list[int]] = {}
        """Positions of saves by what they have in common."""
        self._positions_of: dict[Hashable, list[int]] = {}
        """Positions of saves by signature and storage."""
        for position, (signature, operators, since) in enumerate(saves):
            for alike in _in_common(signature, operators, since):
                self._positions.setdefault(alike, []).append(position)
            self._positions_of.setdefault((signature, self.storages[position]), []).append(position)
        rarities = {alike: iter(_rarities(positions, len(saves))) for alike, positions in self._positions.items()}
        self._weights = [tuple(next(rarities[alike]) for alike in _in_common(*save)) for save in saves]

    @property
    def num_storages(self) -> int:
        return len(self._first_hooks)

    def as_running(self, aligned: int) -> tuple[list[int], Pairs]:
        """Storages and pairs of a step whose first `aligned` hooks are the same: by hook its save's storage, numbered from
        `num_storages` on."""
        behind = self.num_storages
        storages = [FIXED if storage == FIXED else behind + storage for storage in self._storage_at[:aligned]]
        same = range(bisect_left(self._first_hooks, aligned))
        settled: dict[int, int | None] = {storage: behind + storage for storage in same}
        settled.update((behind + storage, storage) for storage in same)
        return storages, Pairs(settled, {})

    def positions_like(self, save: RunningSave, pairs: Pairs) -> list[Sequence[int]]:
        """Positions of saves with its signature; of these the ones with as many operators; and those of its storage, if that is
        known."""
        signature, operators, first, _ = _in_common(save.signature, save.operators, NEW_STORAGE)
        positions: list[Sequence[int]] = [self._positions.get(signature, ()), self._positions.get(operators, ())]
        if save.is_first:
            positions.append(self._positions.get(first, ()))
        elif save.storage != FIXED:
            positions.append(self._positions_of.get((save.signature, pairs.get(save.storage)), ()))
        return positions

    def weight(self, position: int, operators: int, *, same_storage: bool) -> float:
        """Weight of what agrees: the log of how many saves there are for one that is alike in that."""
        return self._weights[position][(operators == self.operators[position]) + 2 * same_storage]

    def most_weight(self, position: int) -> float:
        """The most weight that a save can have at that position."""
        return max(self._weights[position])

    def storage_cost(self, position: int, save: RunningSave, pairs: Pairs) -> float:
        """Cost of a storage that is not the one of that position. 0: it is, or may be."""
        if save.storage == FIXED:  # then the place's is, too: that shows in how they look
            return 0.0
        known = self.storages[position]
        same = pairs.get(save.storage)
        if same == known:
            return 0.0
        same_history = save.is_first == self.is_first[position]
        if same is None and pairs.get(known) is None:
            return 0.0 if same_history else _UNSEEN_HISTORY_COST
        return _OTHER_STORAGE_COST if same_history else _OTHER_HISTORY_COST


def split_feature(feature: Feature) -> tuple[Hashable, int, int]:
    """Signature, operators since the last save, and hooks since the storage's last save."""
    signature, operators, since = save_parts(feature)
    return (signature, since == FIXED_STORAGE), operators, since


def _in_common(signature: Hashable, operators: int, since: int) -> tuple[Hashable, Hashable, Hashable, Hashable]:
    """Keys that saves may have in common: the signature; operators, too; the storage's last save instead; all of it."""
    return (signature, None, None), (signature, operators, None), (signature, None, since), (signature, operators, since)


def _rarities(positions: Sequence[int], num_saves: int) -> list[float]:
    """Rarity of alike saves by position: the log of how many saves there are around it for one of them."""
    rarities = []
    for at, position in enumerate(positions):
        reaches = []
        if at >= _NEIGHBOURS:
            reaches.append(position - positions[at - _NEIGHBOURS])
        if at + _NEIGHBOURS < len(positions):
            reaches.append(positions[at + _NEIGHBOURS] - position)
        spacing = sum(reaches) / (len(reaches) * _NEIGHBOURS) if reaches else num_saves / len(positions)
        rarities.append(log(1 + spacing))
    return rarities
