"""Storages of parameters, gradients and optimizer state, whose bytes may be in pinned host memory instead.

ON_DEVICE --swap_out--> LEAVING --reclaim--> ON_HOST --swap_in--> COMING --arrive--> ON_DEVICE
    \\_________ swap_out, where the host has its bytes already _________^

Only the device memory is freed: the storage object and all tensors over it stay. On the host, it has 0 bytes.
"""

from __future__ import annotations

import enum
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from chameleon_mm.device import Stream
from chameleon_mm.device.process import ThisProcess
from chameleon_mm.errors import TransferFailed
from chameleon_mm.pool.block import PinnedBlock
from chameleon_mm.swap.budget import Budget
from chameleon_mm.swap.calling_thread import annotation
from chameleon_mm.swap.copy_queue import Move
from chameleon_mm.swap.executor import Executor
from chameleon_mm.swap.handles import flat_bytes
from chameleon_mm.swap.host_copy import SwapContext
from chameleon_mm.units import KIB, allocated_size

_log = logging.getLogger(__name__)


MIN_BYTES = 64 * KIB
"""Minimum size of a storage to swap. Derived: at 55 GB/s its copy takes 1.2 us, and the fixed cost of a copy is 3 us."""


class Where(enum.Enum):
    """Place of the bytes: device, host, or being copied."""

    ON_DEVICE = "on_device"
    """On the device. Begins after a copy back. Ends when a copy out is queued, or memory is freed as the host has the bytes."""
    LEAVING = "leaving"
    """On the device, with a copy out queued or running. Ends once compute waits for that copy and the memory is freed."""
    ON_HOST = "on_host"
    """On the host only. Ends when a copy back is queued."""
    COMING = "coming"
    """On the host, with a copy back queued or running. Ends at the first use, which makes compute wait for that copy."""


_WHAT = {"parameter": "parameters", "gradient": "a gradient", "state": "optimizer state"}
"""Names of the contents in messages, by kind."""


def is_alone(t: Tensor) -> bool:
    """True if no other tensor has the storage of `t`. (The Python object of the storage is the second user.)"""
    return torch._C._storage_Use_Count(t.untyped_storage()._cdata) <= 2


def tensor_over(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """Return a tensor over `storage` with the form of `like`, whose bytes may be on the host."""
    empty = torch.empty(0, dtype=like.dtype, device=storage.device)
    return empty.set_(storage, like.storage_offset(), like.size(), like.stride())


class HostedStorage:
    """Resizable storage with its own block of host memory. The storage is held weakly, except while a copy is queued. Not
    thread-safe: hold the executor's lock."""

    def __init__(
        self,
        t: Tensor,
        kind: str,
        alloc_stream: Stream,
        context: SwapContext,
        budget: Budget,
        *,
        note_resident: Callable[[int], None],
        key: int = -1,
        on_death: Callable[[weakref.ref[torch.UntypedStorage]], None] | None = None,
    ) -> None:
        """`t`: tensor over the storage, whose version counter shows writes. `kind`: "parameter", "gradient" or "state".
        `note_resident(nbytes)`: called with bytes allocated (positive) or freed (negative)."""
        storage = t.untyped_storage()
        self.kind, self.what = kind, _WHAT[kind]
        self.nbytes = storage.nbytes()
        self.charged_bytes = allocated_size(self.nbytes)
        """Bytes that the allocator counts for the storage."""
        self.key = key
        """Key of the parameter or gradient in `UseSequence`; -1: optimizer state."""
        self.where = Where.ON_DEVICE
        self.host_is_current = False
        """True if the host has the device's bytes, or will have them after a queued copy."""
        self.is_refused = False
        """True if the storage stays on the device, because the host has no room or other code uses its memory."""
        self.has_hidden_writers = False
        """True if other code may write the storage without increasing its version counter."""
        self.ref = weakref.ref(storage, on_death)
        self._held: torch.UntypedStorage | None = None
        self._tensor, self._version = weakref.ref(t), t._version
        self._alloc_stream, self._context, self._budget = alloc_stream, context, budget
        self._note_resident = note_resident
        self._block: PinnedBlock | None = None
        """Host copy, kept until this object is freed, because the next copy out has the same size."""
        self._out: Move | None = None
        self._in: Move | None = None
        self._last: Move | None = None
        """Latest queued copy, in either direction."""

    def is_of(self, t: object) -> bool:
        """True if `t` is the tensor whose version counter is watched, and still has this storage."""
        return isinstance(t, Tensor) and self._tensor() is t and self.ref() is t.untyped_storage()

    def note_writes(self) -> None:
        """Record whether the storage was written since the copy out. Call it before the storage is swapped out."""
        t = self._tensor()
        if t is None or t.untyped_storage() is not self._storage_on_device():
            self.host_is_current = False  # no known tensor has a counter that shows writes
            return
        if t._version != self._version or self.has_hidden_writers:
            self.host_is_current = False
        self._version = t._version
        self.has_hidden_writers = self.has_hidden_writers and not is_alone(t)

    def follow(self, t: Tensor) -> None:
        """Use the version counter of `t`, a tensor over the storage, to detect writes from now on. Assume an earlier write."""
        if self._tensor() is not t:
            self.host_is_current = False
            self._tensor, self._version = weakref.ref(t), t._version

    # --- device memory

    def _storage_on_device(self) -> torch.UntypedStorage:
        storage = self.ref() if self._held is None else self._held
        assert storage is not None
        return storage

    def _free(self) -> None:
        """Free the device memory, after all work queued on the stream that allocated it."""
        self._alloc_stream.resize(self._storage_on_device(), 0)
        self._note_resident(-self.charged_bytes)
        self._held = None

    def _allocate(self, compute: Stream) -> torch.UntypedStorage:
        """Allocate device memory on `compute`. Returns the storage. Raises `torch.OutOfMemoryError`."""
        storage = self._storage_on_device()

        def resized() -> torch.UntypedStorage:
            compute.resize(storage, self.nbytes)
            return storage

        self._held = self._budget.retry(resized)
        self._note_resident(self.charged_bytes)
        return storage

    def _count(self, *, out: int = 0, back: int = 0) -> None:
        """Count bytes queued to be copied out and back."""
        totals = self._context.metrics.totals
        for name, nbytes in ((f"{self.kind}_bytes_swapped_out", out), (f"{self.kind}_bytes_swapped_in", back)):
            setattr(totals, name, getattr(totals, name) + nbytes)

    # --- out

    def swap_out(self) -> None:
        """Queue the copy out. If the host already has the bytes, free the device memory at once. Raises `HostMemoryExhausted`
        or `TransferFailed`, and then changes nothing."""
        assert self.where is Where.ON_DEVICE
        if self.host_is_current:
            self._drop()
            return
        storage = self._storage_on_device()
        if self._block is None:
            self._block = self._context.pool.allocate(self.nbytes)
        # Note [Swap-out]: compute wrote the source. Note [Host block]: compute has waited for our own copy back, the block's
        # last reader.
        self._context.streams.join_all(self._alloc_stream)
        after = [self._alloc_stream.record(), *self._block.pending_events]
        with annotation("chameleon::swap_out_state"):
            out = self._context.out_queue.submit(Move(storage, self._block.buffer, after))
        if out.failed:
            raise TransferFailed(f"{self.what} of {self.nbytes} bytes could not be swapped out; it stays on the device")
        self._out, self._last, self._held = out, out, storage
        self._count(out=self.nbytes)
        self.host_is_current = True
        self.where = Where.LEAVING

    # --- calls of a reclaim queue

    @property
    def reclaimed(self) -> bool:
        return self.where is not Where.LEAVING

    @property
    def is_copied(self) -> bool:
        """True if the host sees the copy out complete."""
        return self._out is not None and not self._out.failed and self._out.done is not None and self._out.done.query()

    def reclaim_if_copied(self) -> bool:
        """Reclaim without a wait if the host sees the copy out complete. Return True if it did."""
        assert self._out is not None
        if self._out.failed:
            self._undo_swap_out()
            return False
        if not self.is_copied:
            return False
        self._drop()
        return True

    def reclaim(self) -> None:
        """Order compute after the copy out, and free the device memory. If the device refuses the copy, the memory stays."""
        if self._ordered_after_copy():
            self._drop()

    def _ordered_after_copy(self) -> bool:
        """Order compute after the copy out. Returns False if the device refuses the copy; the memory then stays."""
        assert self._out is not None
        try:
            done = self._context.out_queue.issue(self._out)
        except RuntimeError as error:
            self._context.metrics.warn(
                _log,
                "chameleon_mm: %d bytes of %s stay on the device, their copy out was refused: %s",
                self.nbytes,
                self.what,
                str(error),
            )
            self._undo_swap_out()
            return False
        # Note [Reclaim]: the memory's next owner, and compute's next writes, must come after the copy.
        self._context.metrics.wait(self._alloc_stream, done, "out")
        return True

    def _undo_swap_out(self) -> None:
        self._count(out=-self.nbytes)
        self.host_is_current = False
        self._end_copy()

    def _end_copy(self) -> None:
        self.where, self._held = Where.ON_DEVICE, None

    def _drop(self) -> None:
        self._context.streams.join_all(self._alloc_stream)  # Note [Reclaim]: the allocating stream owns the memory next
        self._free()
        self.where = Where.ON_HOST

    # --- back

    def swap_in(self, compute: Stream) -> None:
        """Queue the copy back, unless the bytes are on the device or on their way. Raises `torch.OutOfMemoryError` or
        `TransferFailed`."""
        if self.where is Where.LEAVING and self._ordered_after_copy():
            self._end_copy()  # the bytes are needed again
        if self.where is Where.COMING and self._in is not None and self._in.failed:
            self._drop()  # refused after it was queued
        if self.where is not Where.ON_HOST:
            return
        assert self._block is not None
        storage = self._allocate(compute)
        # Note [Swap-in]: the earlier owner of the device memory may still run, and the host copy must be complete.
        after = [compute.record()]
        if self._out is not None and self._out.done is not None:
            after.append(self._out.done)
        with annotation("chameleon::swap_in_state"):
            back = self._context.back_queue.submit(Move(storage, self._block.buffer, after))
        self._alloc_stream = compute
        if back.failed:
            self._free()
            raise TransferFailed(f"{self.what} of {self.nbytes} bytes could not be swapped in; it stays on the host")
        self._in = self._last = back
        self._count(back=self.nbytes)
        self.where = Where.COMING

    def arrive(self, compute: Stream) -> None:
        """Order `compute` after a queued copy back. Raises `TransferFailed`; then the host copy is still valid, and `swap_in`
        may be called again."""
        if self.where is Where.COMING:
            assert self._in is not None
            with annotation("chameleon::wait"):  # Note [Swap-in]: use only after the copy
                self._context.metrics.wait(compute, self._context.back_queue.issue(self._in), "in")
            self._end_copy()

    def host_bytes(self, compute: Stream) -> Tensor:
        """Return a copy in pageable memory, a flat uint8 tensor. The host waits for `compute`, and for a copy out."""
        memory = self._context.pool.device.alloc_pageable(self.nbytes)
        self._read(memory, 0, compute)
        compute.record().synchronize()  # orders the host's reads after the copy
        return memory

    def _read(self, into: Tensor, start: int, compute: Stream) -> None:
        if self.where in (Where.ON_DEVICE, Where.LEAVING):
            compute.copy(into, flat_bytes(self._storage_on_device())[start : start + into.numel()])
            return
        assert self._block is not None
        if self._out is not None:
            self._context.out_queue.issue(self._out).synchronize()  # the copy that fills the block -> the host's read
        into.copy_(self._block.buffer[start : start + into.numel()])

    # --- snapshots

    def copy_to(self, block: PinnedBlock, start: int, compute: Stream) -> None:
        """Copy `block.nbytes` bytes from byte `start` to `block`: on `compute` if the bytes are on the device, else by the
        host, after the copy out."""
        if self.where in (Where.ON_HOST, Where.COMING):
            block.synchronize()  # Note [Host block]: the earlier owner's copies -> the host's write
        self._read(block.buffer, start, compute)

    def copy_from(self, block: PinnedBlock, start: int, compute: Stream) -> None:
        """Write the bytes of `block`, which the host may read, from byte `start` on, wherever the bytes are: device or host."""
        if self.where is Where.LEAVING:
            self.reclaim()
        if self.where is Where.COMING:
            with suppress(TransferFailed):  # refused: only the host has the bytes
                self.arrive(compute)
            self._drop()
        if self.where is Where.ON_DEVICE:
            compute.copy(flat_bytes(self._storage_on_device())[start : start + block.nbytes], block.buffer)
            self.host_is_current = False
            return
        assert self._block is not None
        for move in (self._out, self._in):
            if move is not None and move.done is not None:
                move.done.synchronize()  # copies that fill or read the host copy -> the host's write
        self._block.buffer[start : start + block.nbytes].copy_(block.buffer)

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        # A reclaim queue holds it while its device memory is read. The requester of a copy back waits for that copy.
        if self._block is None or ends():
            return
        self._block.release(after=None if self._last is None else self._last.done)  # Note [Host block]


# --- Home: link, pool and budget that one session's hosted memory shares with its executor


class Home:
    """Executor whose link, pool and budget hosted memory uses."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._pid = ThisProcess.pid
        self.device, self.budget, self.context = executor.device, executor.budget, executor.context
        self.recording = executor.recording

    @contextmanager
    def entered(self) -> Iterator[Stream]:
        """Context for work on hosted memory: holds the executor's lock, pauses recorders and disables torch function modes.
        Yields the current compute stream."""
        with torch._C.DisableTorchFunction(), self.recording.paused(), self._executor.hook_lock.entered():
            yield self.context.streams.current()

    def check_readable(self, what: str, nbytes: int) -> None:
        """Raise `RuntimeError` in a forked child and during graph capture, where nothing can be copied back."""
        if ThisProcess.pid != self._pid:
            raise RuntimeError(
                f"{what} of {nbytes} bytes: expected to be read in the process of its session ({self._pid}), got a read in a "
                f"forked child ({ThisProcess.pid}), where its device cannot be used; read it in the parent"
            )
        if self.device.capturing():
            raise RuntimeError(
                f"{what} of {nbytes} bytes: expected to be read outside of the capture of a CUDA graph, in which it cannot "
                f"come back from the host; capture the step in a session that does not swap it"
            )
