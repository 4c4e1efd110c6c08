"""The device copy of a saved storage, which may be lent to the device's allocator while it is copied out.

saved.device                # the device copy, taken back if it is lent; None when it was dropped
saved.lend(hook)            # from then on the allocator may reclaim it, at any moment, on any thread
saved.settle()              # note it if it has
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from chameleon_mm.device.allocator_hook import AllocatorHook, HeldStorage
from chameleon_mm.pinned import PinnedBlock
from chameleon_mm.saved.form import WHOLE, Form
from chameleon_mm.saved.save_record import SaveRecord
from chameleon_mm.saved.source import held_alone
from chameleon_mm.saved.state import State, SwapContext
from chameleon_mm.saved.version import cover_all
from chameleon_mm.transfer import Move


class DeviceCopy(SaveRecord):
    """A saved storage as far as its device copy goes."""

    __slots__ = ("_block", "_context", "_device", "_lent", "_out", "form", "latest")

    may_be_lent = True

    latest: weakref.ref[torch.UntypedStorage]
    """Weak reference to the newest device copy, which others may hold: the saved storage itself, later what a swap-in made."""
    form: Form
    """The form in which its bytes are off the device, from the copy out on."""
    _lent: HeldStorage | None
    _out: Move | None
    _block: PinnedBlock | None
    """The host copy. None: not yet; a packed group has the bytes; or the last handle is gone before the copy out is over."""
    _device: torch.UntypedStorage | None
    _context: SwapContext

    @property
    def device(self) -> torch.UntypedStorage | None:
        """The device copy, held strongly, and taken back from the allocator. None when it was dropped."""
        if self._lent is not None:
            self.take_back()
        return self._device

    @device.setter
    def device(self, storage: torch.UntypedStorage | None) -> None:
        self._device = storage

    @property
    def is_private(self) -> bool:
        """True if only the session can reach its bytes: no tensor holds the device copy, or they are on the host alone."""
        storage = self._device
        if storage is not None:
            return held_alone(storage)
        return self.first() is None and self.latest() is None

    def _reads_uncovered(self) -> bool:
        """Whether a copy reads bytes of the storage that no save covers. Note [Uncovered]. What was gathered, we alone
        write."""
        return not self.gathered and not cover_all(self._saved_bytes, self.nbytes)

    @property
    def copy_is_handed_over(self) -> bool:
        """Whether no part of the copy out waits any more to be handed to the device."""
        return self._out is None or self._out.ended

    @property
    def is_lent(self) -> bool:
        return self._lent is not None

    def lend(self, hook: AllocatorHook) -> None:
        """Lend the device copy to the allocator, if its copy out is handed over and all of it is to go."""
        storage, out = self._device, self._out
        if self.state is not State.SWAPPING_OUT or self.form is not WHOLE or not self.may_be_lent:
            return
        if storage is None or out is None or out.done is None or out.failed or self.last_save.num_claims > 1:
            return
        self._lent = hook.hold(storage, out.done, self.alloc_stream)
        if self._lent is not None:
            self._device, self.last_save.lent = None, weakref.ref(self)

    def settle(self) -> None:
        """Note it if the allocator has reclaimed the device copy."""
        if self._lent is not None and self._lent.reclaimed:
            self.take_back()

    def take_back(self) -> None:
        """Take the device copy back if the allocator has not reclaimed it, else note that it has."""
        if self._lent is None:
            return
        lent, self._lent, self.last_save.lent = self._lent, None, None
        self._device = lent.withdraw()
        if self._device is None:
            totals = self._context.metrics.totals
            totals.bytes_reclaimed += self.nbytes
            totals.bytes_reclaimed_by_allocator += self.nbytes
            self._to(State.RETIRED if self._block is None else State.ON_HOST)

    def stay_on_device(self) -> None:
        """Note that it is on the device alone: its form lets go of what it needed to put its bytes there."""
        self.form.drop()
        self.form = WHOLE
        self._to(State.ON_DEVICE)

    def drop_used(self) -> None:
        """Drop our reference to the device copy, as all views were used; autograd's tensors may still hold it.

        A partial form keeps it: its first bytes are nowhere else.
        """
        assert self.state is State.RESTORED
        if self.form.device_bytes:
            return
        self._device = None
        self._to(State.ON_HOST)

    if TYPE_CHECKING:

        def _to(self, state: State) -> None: ...
