"""Storage of parameters or of a gradient, on the device or in pinned host memory: only its memory goes.

The storage stays, and with it every tensor over it: parameters, views, what autograd saved. While it is away it has no bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from chameleon_mm.device import Stream
from chameleon_mm.executor.budget import Budget
from chameleon_mm.hosted.hosted import Hosted, Where
from chameleon_mm.saved.state import SwapContext
from chameleon_mm.units import allocated_size


def is_alone(t: Tensor) -> bool:
    """Whether no other tensor lies in the storage of `t`."""
    return torch._C._storage_Use_Count(t.untyped_storage()._cdata) <= _LEAST_USES


def _least_uses() -> int:
    """Uses of a storage that one tensor alone lies in, whose storage Python knows. Measured: torch versions differ."""
    with torch._C._DisableTorchDispatch():
        alone = torch.empty(1)
    return torch._C._storage_Use_Count(alone.untyped_storage()._cdata)


_LEAST_USES = _least_uses()


class HostedStorage(Hosted):
    """A resizable storage, held weakly but while a copy is queued. Not thread-safe: the executor's lock is held."""

    def __init__(
        self,
        t: Tensor,
        key: int,
        alloc_stream: Stream,
        context: SwapContext,
        budget: Budget,
        *,
        is_gradient: bool,
        note_resident: Callable[[int], None],
        on_death: Callable[[weakref.ref[torch.UntypedStorage]], None],
    ) -> None:
        """`t`: a tensor over it, whose version counter tells of writes. `note_resident(nbytes)` is told of memory that it is
        given (more than 0) and gives back."""
        storage = t.untyped_storage()
        super().__init__(storage.nbytes(), alloc_stream, context)
        self.what = "a gradient" if is_gradient else "parameters"
        self.key = key
        """Number of what it holds, in the order of uses."""
        self.is_refused = False
        """Whether it stays on the device: the host took no copy of it, or somebody else has its memory."""
        self.has_hidden_writers = False
        """Whether somebody may have been given a way to write it that its version counter does not tell of."""
        self.ref = weakref.ref(storage, on_death)
        self._held: torch.UntypedStorage | None = None
        self._tensor, self._version = weakref.ref(t), t._version
        self.is_gradient = is_gradient
        self._budget = budget
        self._note_resident = note_resident

    @property
    def charged_bytes(self) -> int:
        """Bytes that the allocator counts for it."""
        return allocated_size(self.nbytes)

    @property
    def is_resizable(self) -> bool:
        """Whether its memory may be freed under whoever has it."""
        return self._storage_on_device().resizable()

    def note_writes(self) -> None:
        """Note whether it was written since the host got its bytes. Called before it leaves."""
        t = self._tensor()
        if t is None or t.untyped_storage() is not self._storage_on_device():
            self.host_is_current = False  # nobody is known whose counter tells
            return
        if t._version != self._version or self.has_hidden_writers:
            self.host_is_current = False
        self._version = t._version
        self.has_hidden_writers = self.has_hidden_writers and not is_alone(t)

    def follow(self, t: Tensor) -> None:
        """Have `t`, which lies in it now, tell of writes from now on. Those until now are taken to be some."""
        if self._tensor() is not t:
            self.host_is_current = False
            self._tensor, self._version = weakref.ref(t), t._version

    # --- what swapping asks

    def swap_out(self) -> None:
        self._held = self.ref()
        try:
            super().swap_out()
        finally:
            if self.where is not Where.LEAVING:
                self._held = None

    def arrive(self, compute: Stream) -> None:
        super().arrive(compute)
        if self.where is Where.ON_DEVICE:
            self._held = None

    def _undo_swap_out(self) -> None:
        super()._undo_swap_out()
        self._held = None

    def _storage_on_device(self) -> torch.UntypedStorage:
        storage = self.ref() if self._held is None else self._held
        assert storage is not None
        return storage

    def _free(self) -> None:
        self._alloc_stream.resize(self._storage_on_device(), 0)
        self._note_resident(-self.charged_bytes)
        self._held = None

    def _allocate(self, compute: Stream) -> torch.UntypedStorage:
        storage = self._storage_on_device()

        def resized() -> torch.UntypedStorage:
            compute.resize(storage, self.nbytes)
            return storage

        self._held = self._budget.retry(resized)
        self._note_resident(self.charged_bytes)
        return storage

    def _count(self, *, out: int = 0, back: int = 0) -> None:
        totals = self._context.metrics.totals
        if self.is_gradient:
            totals.gradient_bytes_swapped_out += out
            totals.gradient_bytes_swapped_in += back
        else:
            totals.parameter_bytes_swapped_out += out
            totals.parameter_bytes_swapped_in += back
