"""Retires what autograd has let go of: storages whose last handle is gone, and sources that it does not rely on any more."""

from __future__ import annotations

from collections import deque

from chameleon_mm.executor.hook_lock import Ended
from chameleon_mm.executor.parts import Parts
from chameleon_mm.executor.recording import Recording
from chameleon_mm.saved.classify import ProtectedStorages
from chameleon_mm.saved.saved_storage import SavedStorage
from chameleon_mm.saved.source import Reliance
from chameleon_mm.saved.state import State


class Retiring:
    """Retires for one executor. Not thread-safe: the executor holds its lock."""

    def __init__(self, parts: Parts, recording: Recording, protected: ProtectedStorages) -> None:
        self._registry, self._claims, self._rescue = parts.registry, parts.claims, parts.rescue
        self._recording = recording
        self._protected = protected

    def run(self, ended: deque[Ended]) -> list[BaseException]:
        """Retire all of `ended`. Returns the errors that this met."""
        errors: list[BaseException] = []
        while ended:
            one = ended.popleft()
            try:
                if isinstance(one, Reliance):
                    self._rescue.let_go(one)
                else:
                    self._retire(one)
            except BaseException as error:  # noqa: BLE001 - raised once the others are retired too
                errors.append(error)
        return errors

    def _retire(self, saved: SavedStorage) -> None:
        # Its bytes never left: what outlives its saves is a buffer or an input, which moving frees nothing of.
        storage = saved.slot.first if saved.part is None and not saved.slot.came_back else None
        try:
            self._registry.remove(saved)
            self._claims.forget(saved)
            group = saved.form.group
            saved.retire()
            self._recording.retired(saved.slot.traced)
            self._registry.release_group(group)
        finally:
            still_held = None if storage is None or saved.state is not State.RETIRED else storage()
            if still_held is not None:
                self._protected.add(still_held)
