"""The memory of a saved storage as a loan to the device's allocator, which may reclaim it once its copy out is handed over.

lending.add(Loan(saved))          # the copy out was queued; `reclaim.Lending` calls the rest
loan.lend(hook)
loan.settle(); loan.take_back()
"""

from __future__ import annotations

from chameleon_mm.device.allocator_hook import AllocatorHook
from chameleon_mm.saved.form import WHOLE
from chameleon_mm.saved.saved_storage import SavedStorage
from chameleon_mm.saved.state import State


class Loan:
    """A saved storage on its way out, as `reclaim.Lendable` has it."""

    __slots__ = ("_saved",)

    def __init__(self, saved: SavedStorage) -> None:
        self._saved = saved

    @property
    def reclaimed(self) -> bool:
        """Whether nothing is left to lend."""
        return self._saved.reclaimed

    @property
    def copy_is_handed_over(self) -> bool:
        """Whether no part of the copy out waits any more to be handed to the device."""
        copy = self._saved.copy
        return copy is None or copy.out.ended

    @property
    def is_lent(self) -> bool:
        return self._saved.slot.lent is not None

    def lend(self, hook: AllocatorHook) -> None:
        """Lend the memory, if all of it is to go. The allocator takes it where nobody else refers to the storage by then."""
        saved, copy = self._saved, self._saved.copy
        if saved.state is not State.SWAPPING_OUT or saved.form is not WHOLE or copy is None or saved.slot.is_packed:
            return
        if copy.out.done is not None and not copy.out.failed and copy.block is not None:
            saved.slot.lend(hook, copy.out.done)

    def settle(self) -> None:
        """Note it if the allocator has reclaimed the memory."""
        lent = self._saved.slot.lent
        if lent is not None and lent.reclaimed:
            self._saved.take_back()

    def take_back(self) -> None:
        """Take the memory back if the allocator has not reclaimed it, else note that it has."""
        self._saved.take_back()
