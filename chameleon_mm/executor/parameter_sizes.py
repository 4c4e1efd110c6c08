"""Which parameters keep their sizes over a step: what shards a model frees them, and fetches them again."""

from __future__ import annotations

import weakref

import torch

from chameleon_mm.profiler.calls import Value


class ParameterSizes:
    """Parameters whose storages are as large when a step ends as they were in its forward.

    What shards a model frees its parameters after their forward and fetches them again on a stream of its own, which no counter
    tells of: such a parameter is empty at a later hook, or at the end, and no recipe may need it.
    """

    def __init__(self) -> None:
        self._met: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        """Storages that this step's recipes would need, and that no earlier step has settled, by id, with their sizes."""
        self._stay: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._change: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def keeps_its_size(self, value: Value) -> bool:
        """Whether an earlier step has seen the storage of `value`, a parameter's, keep its size."""
        storage = value.storage()
        if storage is None:
            return False
        return self.note(storage)

    def note(self, storage: torch.UntypedStorage) -> bool:
        """Note a parameter's storage in a step that is watched or recorded. Returns whether an earlier one has seen it keep its
        size."""
        stays = self._stay.get(id(storage))
        if stays is not None and stays() is storage:
            return True
        if id(storage) not in self._met:
            self._met[id(storage)] = weakref.ref(storage), storage.nbytes()
        return False

    def look(self) -> None:
        """Look at what this step has met and no other has: it must keep its size all the time."""
        for key, (ref, nbytes) in self._met.items():
            storage = ref()
            if storage is not None and storage.nbytes() != nbytes:
                self._change[key] = ref

    def end_step(self) -> None:
        """What has kept its size up to now is taken to do so in later steps."""
        self.look()
        for key, (ref, _) in self._met.items():
            storage, changes = ref(), self._change.get(key)
            if storage is not None and (changes is None or changes() is not storage):
                self._stay[key] = ref
        self._met.clear()
