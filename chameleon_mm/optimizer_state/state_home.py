"""Home of the swapped state of one session, and how large a tensor has to be to leave."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from chameleon_mm.executor.executor import Executor
from chameleon_mm.hosted import HostedTensor
from chameleon_mm.hosted.home import Home
from chameleon_mm.optimizer_state.swapped_state import least_holders

if TYPE_CHECKING:
    from chameleon_mm.optimizer_state.swapped_state import SwappedState


class StateHome(Home):
    """The home of an optimizer's state."""

    def __init__(self, executor: Executor, *, min_bytes: int) -> None:
        super().__init__(executor)
        self.min_bytes = min_bytes
        self.least_holders = least_holders()
        self.states: weakref.WeakValueDictionary[int, SwappedState] = weakref.WeakValueDictionary()
        """All swapped state there is, by id: the optimizer's, and what is left of it in a `state_dict` that somebody holds."""
        self._came_back: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        """Storages that state came back into, by id."""

    def is_state(self, storage: torch.UntypedStorage) -> bool:
        """Whether state came back into `storage`, to leave again: it is in no plan."""
        return self._came_back.get(id(storage)) is storage

    def note_on_device(self, hosted: HostedTensor) -> None:
        """Note the memory into which `hosted` comes back, if it does."""
        if (storage := hosted.storage) is not None:
            self._came_back[id(storage)] = storage

    def note_leaving(self, hosted: HostedTensor) -> None:
        """Note that `hosted` leaves: a step that is recorded has it until now, as later ones will."""
        if (storage := hosted.storage) is not None:
            self.recording.hide(storage)

    def bring_back(self, state: SwappedState) -> None:
        """Have all of `state` on the device, as somebody reads it. Raises `torch.OutOfMemoryError`, and as `check_readable`."""
        self.check_readable("optimizer state", state.away_bytes)
        with self.entered() as compute:
            state.arrive(compute)
