"""Device memory that may be in pinned host memory instead.

ON_DEVICE --swap_out--> LEAVING --reclaim--> ON_HOST --swap_in--> COMING --arrive--> ON_DEVICE
    \\_________ swap_out, where the host has its bytes already _________^
"""

from __future__ import annotations

import enum
import logging
import sys
from abc import ABC, abstractmethod
from contextlib import suppress

import torch

from chameleon_mm.device import Stream
from chameleon_mm.errors import TransferFailed
from chameleon_mm.pinned import PinnedBlock
from chameleon_mm.saved.calling_thread import annotation
from chameleon_mm.saved.handles import flat_bytes
from chameleon_mm.saved.state import SwapContext
from chameleon_mm.transfer import Move

_log = logging.getLogger(__name__)


class Where(enum.Enum):
    """Place of the bytes of hosted memory: device, host, or on the way."""

    ON_DEVICE = "on_device"
    """Begins when a copy back has arrived; ends when its copy out is queued, or its memory goes as the host has its bytes."""
    LEAVING = "leaving"
    """On the device, with a copy out queued or running. Ends when compute is ordered after that copy and the memory is free."""
    ON_HOST = "on_host"
    """Begins then; ends when its copy back is queued."""
    COMING = "coming"
    """On the host, with a copy back queued or running. Ends at the first use, which orders compute after that copy."""


class Hosted(ABC):
    """Device memory with a place of its own on the host. Not thread-safe: the executor's lock is held."""

    what = "memory"
    """Name of its contents, for messages."""

    def __init__(self, nbytes: int, alloc_stream: Stream, context: SwapContext) -> None:
        self.nbytes = nbytes
        self.where = Where.ON_DEVICE
        self.host_is_current = False
        """Whether the host has the bytes that the device has, or will once a queued copy is done."""
        self._alloc_stream = alloc_stream
        self._context = context
        self._block: PinnedBlock | None = None
        """The host copy: kept for as long as this lives, since the next copy out has its size."""
        self._out: Move | None = None
        self._in: Move | None = None
        self._last: Move | None = None
        """The copy that was queued last, either way."""

    # --- what holds it

    @abstractmethod
    def _storage_on_device(self) -> torch.UntypedStorage:
        """The storage, which has its memory."""

    @abstractmethod
    def _free(self) -> None:
        """Free the device memory, behind all that was given to the stream that allocated it."""

    @abstractmethod
    def _allocate(self, compute: Stream) -> torch.UntypedStorage:
        """Allocate device memory on `compute`. Returns the storage. Raises `torch.OutOfMemoryError`."""

    @abstractmethod
    def _count(self, *, out: int = 0, back: int = 0) -> None:
        """Count bytes that were queued to be copied out and back."""

    # --- out

    def swap_out(self) -> None:
        """Queue the copy out; where the host has the bytes, free the device memory at once. Raises `HostMemoryExhausted` or
        `TransferFailed` with nothing changed."""
        assert self.where is Where.ON_DEVICE
        if self.host_is_current:
            self._drop()
            return
        storage = self._storage_on_device()
        if self._block is None:
            self._block = self._context.pool.allocate(self.nbytes)
        # Note [Swap-out]: compute wrote it. Note [Host block]: the block's last reader, our own copy back, is behind compute's
        # wait for it.
        self._context.streams.join_all(self._alloc_stream)
        after = [self._alloc_stream.record(), *self._block.pending_events]
        with annotation("chameleon::swap_out_state"):
            out = self._context.transfer.swap_out(self._block.buffer, flat_bytes(storage), after)
        if out.failed:
            raise TransferFailed(f"{self.what} of {self.nbytes} bytes could not be swapped out; it stays on the device")
        self._out = self._last = out
        self._count(out=self.nbytes)
        self.host_is_current = True
        self.where = Where.LEAVING

    # --- what a reclaim queue asks

    @property
    def reclaimed(self) -> bool:
        return self.where is not Where.LEAVING

    @property
    def is_copied(self) -> bool:
        """Whether the host sees its copy out complete."""
        return self._out is not None and not self._out.failed and self._out.done is not None and self._out.done.query()

    def reclaim_if_copied(self) -> bool:
        """Reclaim without a wait if the host sees the copy out complete. Returns whether it did."""
        assert self._out is not None
        if self._out.failed:
            self._undo_swap_out()
            return False
        if not self.is_copied:
            return False
        self._drop()
        return True

    def reclaim(self) -> None:
        """Order compute after the copy out, and free the device memory. Where the copy was refused it stays."""
        if self._ordered_after_copy():
            self._drop()

    def _ordered_after_copy(self) -> bool:
        """Order compute after the copy out. Returns False where that was refused: it is on the device, as before."""
        assert self._out is not None
        try:
            done = self._context.transfer.issue_out(self._out)
        except RuntimeError as error:
            _log.warning(
                "chameleon_mm: %d bytes of %s stay on the device, their copy out was refused: %s",
                self.nbytes,
                self.what,
                str(error),
            )
            self._undo_swap_out()
            return False
        # Note [Reclaim]: the memory's next owner, or what compute writes there next, comes after the copy.
        self._context.metrics.wait(self._alloc_stream, done, "out")
        return True

    def _undo_swap_out(self) -> None:
        self._count(out=-self.nbytes)
        self.host_is_current = False
        self.where = Where.ON_DEVICE

    def _drop(self) -> None:
        self._context.streams.join_all(self._alloc_stream)  # Note [Reclaim]: its next owner is whichever stream allocated it
        self._free()
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
        assert self._block is not None
        storage = self._allocate(compute)
        # Note [Swap-in]: an earlier owner of the device memory may still be running; and the host copy must be whole.
        after = [compute.record()]
        if self._out is not None and self._out.done is not None:
            after.append(self._out.done)
        with annotation("chameleon::swap_in_state"):
            back = self._context.transfer.swap_in(flat_bytes(storage), self._block.buffer, after)
        self._alloc_stream = compute
        if back.failed:
            self._free()
            raise TransferFailed(f"{self.what} of {self.nbytes} bytes could not be swapped in; it stays on the host")
        self._in = self._last = back
        self._count(back=self.nbytes)
        self.where = Where.COMING

    def arrive(self, compute: Stream) -> None:
        """Have it on the device, ready for `compute`, where a copy back was queued. Raises `TransferFailed`: what is on the
        host is still good then, and another `swap_in` begins anew."""
        if self.where is Where.COMING:
            assert self._in is not None
            with annotation("chameleon::wait"):  # Note [Swap-in]: use after the bytes are there
                self._context.metrics.wait(compute, self._context.transfer.issue_in(self._in), "in")
            self.where = Where.ON_DEVICE

    def copy_for_host(self, compute: Stream) -> torch.Tensor:
        """Copy of it in ordinary host memory, a flat uint8 tensor. The host waits for `compute`, or for a copy out."""
        if self.where is Where.ON_HOST:
            return self.host_bytes()
        self.swap_in(compute)
        self.arrive(compute)
        memory = self._context.pool.device.alloc_pageable(self.nbytes)
        compute.copy(memory, flat_bytes(self._storage_on_device()))
        compute.record().synchronize()  # orders the host's reads after the copy
        return memory

    def host_bytes(self) -> torch.Tensor:
        """Copy in ordinary host memory of what is on the host, a flat uint8 tensor. The host waits for its copy out."""
        assert self._block is not None
        if self._out is not None:
            self._context.transfer.issue_out(self._out).synchronize()
        return self._context.pool.device.alloc_pageable(self.nbytes).copy_(self._block.buffer)

    # --- snapshots

    def copy_to(self, block: PinnedBlock, start: int, compute: Stream) -> None:
        """Copy `block.nbytes` bytes from byte `start` on to `block`: on `compute` where they are on the device; else the host
        does it, once the copy out is done."""
        if self.where in (Where.ON_DEVICE, Where.LEAVING):
            compute.copy(block.buffer, flat_bytes(self._storage_on_device())[start : start + block.nbytes])
            return
        assert self._block is not None
        if self._out is not None:
            self._context.transfer.issue_out(self._out).synchronize()  # the copy that fills the block -> the host reads it
        block.synchronize()  # Note [Host block]: its earlier owner is done -> the host writes it
        block.buffer.copy_(self._block.buffer[start : start + block.nbytes])

    def copy_from(self, block: PinnedBlock, start: int, compute: Stream) -> None:
        """Write the bytes of `block`, which the host may read, from byte `start` on: wherever they are, they stay there."""
        if self.where is Where.LEAVING:
            self.reclaim()
        if self.where is Where.COMING:
            with suppress(TransferFailed):  # refused: the host copy is what there is
                self.arrive(compute)
            self._drop()
        if self.where is Where.ON_DEVICE:
            compute.copy(flat_bytes(self._storage_on_device())[start : start + block.nbytes], block.buffer)
            self.host_is_current = False
            return
        assert self._block is not None
        for move in (self._out, self._in):
            if move is not None and move.done is not None:
                move.done.synchronize()  # the copies that fill and read the host copy -> the host writes it
        self._block.buffer[start : start + block.nbytes].copy_(block.buffer)

    def __del__(self) -> None:
        # A reclaim queue holds one whose device memory is still read; what comes back is waited for by whoever had it come.
        if self._block is None or sys.is_finalizing():
            return
        self._block.release(after=None if self._last is None else self._last.done)  # Note [Host block]
