"""Registry of the saved storages that some handle still claims, numbered within the step that saved them.

registry.add(saved); registry.get(index); registry.remove(saved)
registry.begin_epoch()            # a new step: saves are numbered from 0 again
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from chameleon_mm.saved.saved_storage import SavedStorage

if TYPE_CHECKING:
    from chameleon_mm.saved.packed_group import PackedGroup

NO_STEP = -1
"""Epoch of storages that belong to no step."""


class StorageRegistry:
    """The saved storages that are claimed, by step and number. Not thread-safe: the executor holds its lock."""

    def __init__(self) -> None:
        self.epoch = 0
        """Number of the current step: that of what is saved from now on."""
        self.next_index = 0
        """Number of the next save in this step."""
        self.of_epoch = 0
        """Number of claimed storages that this step saved."""
        self.packed_groups: set[PackedGroup] = set()
        self._storages: dict[tuple[int, int], SavedStorage] = {}
        self._num_outside = 0

    def __len__(self) -> int:
        return len(self._storages)

    def add(self, saved: SavedStorage) -> None:
        """Add `saved`, which was made with this step's next index."""
        self._storages[saved.epoch, saved.index] = saved
        self.next_index += 1
        self.of_epoch += 1

    def add_outside_steps(self, make: Callable[[int, int], SavedStorage]) -> SavedStorage:
        """Add a storage that `make` makes with an epoch and an index outside of steps: for a save that had none at first."""
        self._num_outside += 1
        saved = make(NO_STEP, self._num_outside)
        self._storages[saved.epoch, saved.index] = saved
        return saved

    def get(self, index: int) -> SavedStorage | None:
        """The storage of that number in this step; None if it is gone."""
        return self._storages.get((self.epoch, index))

    def remove(self, saved: SavedStorage) -> None:
        self._storages.pop((saved.epoch, saved.index), None)
        self.of_epoch -= saved.epoch == self.epoch

    def all(self) -> list[SavedStorage]:
        """All claimed storages, and the packed groups: whatever holds device memory."""
        return [*self._storages.values(), *self.packed_groups]

    def begin_epoch(self) -> None:
        self.epoch += 1
        self.next_index = self.of_epoch = 0
