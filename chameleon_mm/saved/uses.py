"""The uses of a saved storage that are to come: one for each of its handles, and again after each time it came back."""

from __future__ import annotations


class Uses:
    """Counts uses. A handle that is used again before the storage has left once more counts no second time."""

    # No `__init__`: one is made at every save.
    handles = 1
    """Handles made for the storage, the first for the save that it is made at."""
    left = 1
    """Handles among them that were not used since the latest swap-in, which is number `swap_in_number`."""
    swap_in_number = 0

    def add_handle(self) -> None:
        """Note one more handle."""
        self.handles += 1
        self.left += 1

    def count(self, last_swap_in: int) -> int:
        """Note a use by a handle that was used last after that swap-in. Returns the number of the latest swap-in."""
        if last_swap_in != self.swap_in_number:
            self.left -= 1
        return self.swap_in_number

    def note_swap_in(self) -> None:
        """Note that the storage is on the device again: all of its handles have a use left."""
        self.swap_in_number += 1
        self.left = self.handles

    def forget_handle(self) -> None:
        """Note that the handle that it was made for is none: autograd saved nothing of it."""
        self.handles = self.left = 0
