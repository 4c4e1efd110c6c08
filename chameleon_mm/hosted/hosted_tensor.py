"""Tensor of optimizer state, on the device or in pinned host memory: its storage goes, and comes back as another."""

from __future__ import annotations

import torch
from torch import Tensor

from chameleon_mm.device import Stream
from chameleon_mm.executor.budget import Budget
from chameleon_mm.hosted.hosted import Hosted, Where
from chameleon_mm.saved.handles import flat_bytes
from chameleon_mm.saved.state import SwapContext


class HostedTensor(Hosted):
    """A dense tensor that covers its storage and is held by nobody else. Not thread-safe: the executor's lock is held."""

    what = "optimizer state"

    def __init__(self, t: Tensor, alloc_stream: Stream, context: SwapContext, budget: Budget) -> None:
        self._storage: torch.UntypedStorage | None = t.untyped_storage()
        super().__init__(self._storage.nbytes(), alloc_stream, context)
        self._dtype, self._size, self._stride, self._offset = t.dtype, t.size(), t.stride(), t.storage_offset()
        self._device = t.device
        self._budget = budget

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """Its storage; None: it is on the host."""
        return self._storage

    def tensor(self, compute: Stream) -> Tensor:
        """The tensor, which was queued to come back if it was away, ready for `compute`. Raises `TransferFailed`."""
        self.arrive(compute)
        assert self.where is Where.ON_DEVICE and self._storage is not None
        self.host_is_current = False  # whoever has it may write it
        flat = torch.empty(0, dtype=self._dtype, device=self._device)
        return flat.set_(self._storage, self._offset, self._size, self._stride)

    def has(self, t: Tensor) -> bool:
        """Whether `t` is this tensor, on the device, and covers its storage as it did."""
        if self.where is not Where.ON_DEVICE or self._storage is None:
            return False
        same = self._storage._cdata == t.untyped_storage()._cdata and self._storage.nbytes() == self.nbytes
        shape = self._dtype, self._size, self._stride, self._offset
        return same and shape == (t.dtype, t.size(), t.stride(), t.storage_offset())

    @property
    def form(self) -> tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]:
        """Shape, strides, dtype and device of the tensor."""
        return self._size, self._stride, self._dtype, self._device

    @property
    def start_byte(self) -> int:
        """The byte of its storage at which it begins."""
        return int(self._offset) * self._dtype.itemsize

    def on_host(self) -> Tensor:
        """A copy in ordinary host memory of a tensor that is on the host. The host waits for its copy out."""
        memory = self.host_bytes()
        return torch.empty(0, dtype=self._dtype).set_(memory.untyped_storage(), self._offset, self._size, self._stride)

    # --- what swapping asks

    def _storage_on_device(self) -> torch.UntypedStorage:
        assert self._storage is not None
        return self._storage

    def _free(self) -> None:
        assert self._storage is not None
        self._alloc_stream.free(flat_bytes(self._storage))
        self._storage = None

    def _allocate(self, compute: Stream) -> torch.UntypedStorage:
        self._budget.room_was_made(self.nbytes, exclude=())
        whole = self._budget.allocate(self.nbytes, lambda: compute.alloc(self.nbytes))
        self._storage = whole.untyped_storage()
        return self._storage

    def _count(self, *, out: int = 0, back: int = 0) -> None:
        totals = self._context.metrics.totals
        totals.state_bytes_swapped_out += out
        totals.state_bytes_swapped_in += back
