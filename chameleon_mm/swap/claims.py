"""Claims on saved storages, and their registry. Saves of the same bytes share one record and one copy. Note [Identity].

    claim = claims.find(t)                        # the live claim on the storage of `t`
    claims.add(claim); claims.forget(saved)
    registry.add(saved); registry.get(index); registry.remove(saved)      # numbers count within the step that saved

Claims are stored by the id of the storage object. Ids are reused, so a weak reference confirms the object.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chameleon_mm.swap.saved_storage import SavedStorage

if TYPE_CHECKING:
    from chameleon_mm.swap.packed_group import PackedGroup


class Claim:
    """Object that all handles of one saved storage share. When it is freed, the storage is retired. Note [Life].

    The claim has no `__del__` of its own. While `__del__` runs, a weak reference can still revive the object. Another thread
    that saves the same storage would then share a claim that is being retired. So the member `_end` has the `__del__`. It runs
    only after the claim is unreachable.
    """

    __slots__ = ("__weakref__", "_end", "saved")

    def __init__(self, saved: SavedStorage, retire: Callable[[SavedStorage], None]) -> None:
        self.saved = saved
        end = self._end = _End()
        end.saved, end.retire = saved, retire


class _End:
    """Retires a storage when its claim is gone.

    It has `__del__` rather than `weakref.finalize`, because a claim is made per saved storage in the hot path. `finalize` keeps
    a registry for interpreter exit, which is not needed here. There is no `__init__`, because it would cost one more call. It
    may run twice, because `SavedStorage.retire` is idempotent.
    """

    __slots__ = ("retire", "saved")

    saved: SavedStorage
    retire: Callable[[SavedStorage], None]

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ends():
            self.retire(self.saved)


class Claims:
    """Live claims, by storage. Not thread-safe: the executor holds its lock."""

    def __init__(self) -> None:
        self.by_storage: dict[int, weakref.ref[Claim]] = {}
        """Claims by the storage's id. Other classes only read it."""

    def find(self, t: Tensor) -> Claim | None:
        """Find the live claim on the storage of `t`."""
        storage = t.untyped_storage()
        ref = self.by_storage.get(id(storage))
        claim = None if ref is None else ref()
        return claim if claim is not None and claim.saved.slot.is_record_of(storage) else None

    def add(self, claim: Claim) -> None:
        """Add a new claim."""
        self.by_storage[claim.saved.slot.key] = weakref.ref(claim)

    def move(self, saved: SavedStorage, storage: torch.UntypedStorage) -> None:
        """Make the saved tensors of `saved` views of `storage`, which has their bytes. Their own storage is empty."""
        self.forget(saved)
        ref = self.by_storage.get(saved.slot.key)
        claim = None if ref is None else ref()
        if claim is None or claim.saved is not saved:
            saved.slot.move_to(storage)
            return
        del self.by_storage[saved.slot.key]
        saved.slot.move_to(storage)
        self.add(claim)

    def forget(self, saved: SavedStorage) -> None:
        """Remove a claim whose last handle is gone."""
        claim = self.by_storage.get(saved.slot.key)
        if claim is not None and claim() is None:
            del self.by_storage[saved.slot.key]


class StorageRegistry:
    """Claimed storages, by step and by number in the step. Not thread-safe: the executor holds its lock."""

    def __init__(self) -> None:
        self.epoch = 0
        """Number of the current step."""
        self.next_index, self.held_indexes = 0, itertools.count(-1, -1)
        """Of saved storages, and of those held for recipes: autograd uses none of these, so no order of uses has them."""
        self.of_epoch = 0
        """Count of the claimed storages that this step saved."""
        self.packed_groups: set[PackedGroup] = set()
        self._storages: dict[tuple[int, int], SavedStorage] = {}

    def add(self, saved: SavedStorage) -> None:
        """Add `saved`, whose index is unique in this step."""
        self._storages[saved.epoch, saved.index] = saved
        self.of_epoch += 1

    def get(self, index: int) -> SavedStorage | None:
        """Storage with that number in this step; None if it is gone."""
        return self._storages.get((self.epoch, index))

    def remove(self, saved: SavedStorage) -> None:
        self._storages.pop((saved.epoch, saved.index), None)
        self.of_epoch -= saved.epoch == self.epoch

    def all(self) -> list[SavedStorage]:
        """Return all claimed storages and packed groups: all objects that may hold device memory."""
        return [*self._storages.values(), *(group.packed for group in self.packed_groups)]

    def release_group(self, group: PackedGroup | None) -> None:
        """Retire a packed group if no member needs it."""
        if group is not None and not group.members_left:
            self.packed_groups.discard(group)
            group.packed.retire()

    def begin_epoch(self) -> None:
        self.epoch += 1
        self.next_index = self.of_epoch = 0
