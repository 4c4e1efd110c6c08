"""Tensor of optimizer state, on the device or in pinned host memory.

ON_DEVICE --swap_out--> LEAVING --reclaim--> ON_HOST --swap_in--> COMING --arrive--> ON_DEVICE
"""

from __future__ import annotations

import enum
import logging
import sys

import torch
from torch import Tensor

from chameleon_mm.device import Stream
from chameleon_mm.errors import SimError, TransferFailed
from chameleon_mm.executor.budget import Budget
from chameleon_mm.pinned import PinnedBlock
from chameleon_mm.saved.calling_thread import annotation
from chameleon_mm.saved.handles import flat_bytes
from chameleon_mm.saved.state import SwapContext
from chameleon_mm.transfer import Move

_log = logging.getLogger(__name__)


class Where(enum.Enum):
    """Where the bytes of a tensor of optimizer state are."""

    ON_DEVICE = "on the device"
    """Begins when a copy back has arrived; ends when its copy out is queued."""
    LEAVING = "leaving"
    """On the device, with a copy out queued or running. Ends when compute is ordered after that copy and the memory is free."""
    ON_HOST = "on the host"
    """Begins then; ends when its copy back is queued."""
    COMING = "coming back"
    """On the host, with a copy back queued or running. Ends at the first use, which orders compute after that copy."""


class HostedTensor:
    """A dense tensor that covers its storage and is held by nobody else. Not thread-safe: the executor's lock is held."""

    def __init__(self, t: Tensor, alloc_stream: Stream, context: SwapContext, budget: Budget) -> None:
        self._storage: torch.UntypedStorage | None = t.untyped_storage()
        self._dtype, self._size, self._stride, self._offset = t.dtype, t.size(), t.stride(), t.storage_offset()
        self._device = t.device
        self.nbytes = self._storage.nbytes()
        self.where = Where.ON_DEVICE
        self._alloc_stream = alloc_stream
        self._context = context
        self._budget = budget
        self._block: PinnedBlock | None = None
        """The host copy: kept for as long as this lives, since the next copy out has its size."""
        self._out: Move | None = None
        self._in: Move | None = None

    def tensor(self) -> Tensor:
        """The tensor, which is on the device."""
        assert self.where is Where.ON_DEVICE and self._storage is not None
        flat = torch.empty(0, dtype=self._dtype, device=self._device)
        return flat.set_(self._storage, self._offset, self._size, self._stride)

    def has(self, t: Tensor) -> bool:
        """Whether `t` is this tensor, on the device, and covers its storage as it did."""
        if self.where is not Where.ON_DEVICE or self._storage is None:
            return False
        same = self._storage._cdata == t.untyped_storage()._cdata and self._storage.nbytes() == self.nbytes
        shape = self._dtype, self._size, self._stride, self._offset
        return same and shape == (t.dtype, t.size(), t.stride(), t.storage_offset())

    def swap_out(self) -> None:
        """Queue the copy out. Raises `HostMemoryExhausted` or `TransferFailed` with nothing changed."""
        assert self.where is Where.ON_DEVICE and self._storage is not None
        if self._block is None:
            self._block = self._context.pool.allocate(self.nbytes)
        # Note [Swap-out]: the optimizer wrote it on compute. Note [Host block]: the block's last reader, our own copy back, is
        # behind compute's wait for it.
        self._context.streams.join_all(self._alloc_stream)
        after = [self._alloc_stream.record(), *self._block.pending_events]
        with annotation("chameleon::swap_out_state"):
            out = self._context.transfer.swap_out(self._block.buffer, flat_bytes(self._storage), after)
        if out.failed:
            raise TransferFailed(f"optimizer state of {self.nbytes} bytes could not be swapped out; it stays on the device")
        self._out = out
        self._context.metrics.totals.state_bytes_swapped_out += self.nbytes
        self.where = Where.LEAVING

    # --- what a reclaim queue asks

    @property
    def reclaimed(self) -> bool:
        return self.where is not Where.LEAVING

    def reclaim_if_copied(self) -> bool:
        """Reclaim without a wait if the host sees the copy out complete. Returns whether it did."""
        assert self._out is not None
        if self._out.failed:
            self._undo_swap_out()
            return False
        if self._out.done is None or not self._out.done.query():
            return False
        self._drop()
        return True

    def reclaim(self) -> None:
        """Order compute after the copy out, and free the device memory. Where the copy was refused it stays."""
        if self._ordered_after_copy():
            self._drop()

    def _ordered_after_copy(self) -> bool:
        """Order compute after the copy out. Returns False where that was refused: the tensor is on the device, as before."""
        assert self._out is not None
        try:
            done = self._context.transfer.issue_out(self._out)
        except SimError:
            raise
        except RuntimeError as error:
            _log.warning(
                "chameleon_mm: %d bytes of optimizer state stay on the device, their copy out was refused: %s",
                self.nbytes,
                str(error),
            )
            self._undo_swap_out()
            return False
        # Note [Reclaim]: the memory's next owner, or what compute writes there next, comes after the copy.
        self._context.metrics.wait(self._alloc_stream, done, "out")
        return True

    def _undo_swap_out(self) -> None:
        self._context.metrics.totals.state_bytes_swapped_out -= self.nbytes
        self.where = Where.ON_DEVICE

    def _drop(self) -> None:
        assert self._storage is not None
        self._context.streams.join_all(self._alloc_stream)  # Note [Reclaim]: its next owner is whichever stream allocated it
        self._alloc_stream.free(flat_bytes(self._storage))
        self._storage = None
        self.where = Where.ON_HOST

    # --- back

    def swap_in(self, compute: Stream) -> None:
        """Queue the copy back, unless it is there or on its way. Raises `torch.OutOfMemoryError` or `TransferFailed`."""
        if self.where is Where.LEAVING and self._ordered_after_copy():
            self.where = Where.ON_DEVICE  # it is needed again
        if self.where is Where.COMING and self._in is not None and self._in.failed:
            self._drop()  # refused after it was queued
        if self.where is not Where.ON_HOST:
            return
        assert self._block is not None and self._out is not None and self._out.done is not None
        self._budget.room_was_made(self.nbytes, exclude=())
        whole = self._budget.allocate(self.nbytes, lambda: compute.alloc(self.nbytes))
        # Note [Swap-in]: an earlier owner of the device memory may still be running; and the host copy must be whole.
        after = [compute.record(), self._out.done]
        with annotation("chameleon::swap_in_state"):
            back = self._context.transfer.swap_in(whole, self._block.buffer, after)
        if back.failed:
            raise TransferFailed(f"optimizer state of {self.nbytes} bytes could not be swapped in; it stays on the host")
        self._in = back
        self._storage, self._alloc_stream = whole.untyped_storage(), compute
        self._context.metrics.totals.state_bytes_swapped_in += self.nbytes
        self.where = Where.COMING

    def arrive(self, compute: Stream) -> Tensor:
        """The tensor, which is on the device or coming back, ready for `compute`. Raises `TransferFailed`: what is on the host
        is still good then, and another `swap_in` begins anew."""
        if self.where is Where.COMING:
            assert self._in is not None
            with annotation("chameleon::wait"):  # Note [Swap-in]: use after the bytes are there
                self._context.metrics.wait(compute, self._context.transfer.issue_in(self._in), "in")
            self.where = Where.ON_DEVICE
        return self.tensor()

    def on_host(self) -> Tensor:
        """A copy in ordinary host memory of a tensor that is on the host. The host waits for its copy out."""
        assert self._block is not None and self._out is not None
        self._context.transfer.issue_out(self._out).synchronize()
        memory = self._context.pool.device.alloc_pageable(self.nbytes).copy_(self._block.buffer)
        return torch.empty(0, dtype=self._dtype).set_(memory.untyped_storage(), self._offset, self._size, self._stride)

    def __del__(self) -> None:
        # Its state was replaced or dropped. A reclaim queue holds one whose device memory is still read; what comes back is
        # waited for by whoever had it come.
        if self._block is None or sys.is_finalizing():
            return
        last = self._in if self._in is not None and self._in.done is not None else self._out
        self._block.release(after=None if last is None else last.done)  # Note [Host block]
