"""One block of pinned host memory, from allocation to release.

    block = pool.allocate(nbytes, stream=d2h)       # d2h waits for whoever used these bytes before
    d2h.copy(block.buffer, hbm)
    h2d.wait(d2h.record()); h2d.copy(hbm2, block.buffer)
    block.release(after=h2d.record())               # whoever gets the bytes next waits for that
                                                    # ... or is dropped: then it returns itself

Note [Host block]: the device may still read a block when the host is done with it, so a block hands its last event on, and
whoever uses the bytes next waits for it: a stream on the device, the host only where the host itself touches the memory.
A block knows two kinds of events of earlier owners: `_unmet`, which nobody has waited for, and `_met`, which a stream has
waited for. Released without an event of its own, it hands the second kind on too: the wait ordered that stream, no other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chameleon_mm.device.protocols import Event, Stream
from chameleon_mm.errors import BlockReleasedError

if TYPE_CHECKING:
    from chameleon_mm.pinned.pool import PinnedPool


class Ticket(NamedTuple):
    """A block's right to be returned, once."""

    serial: int
    offset: int | None  # None: a block of zero bytes, which has no address


class PinnedBlock:
    """`nbytes` of pinned host memory of a `PinnedPool`, which alone makes blocks.

    The memory is the block's: hold the block as long as the buffer, a tensor or an array of it is in use. One thread at a time
    uses a block; `release`, and dropping it, may happen on any thread at any point, the garbage collector's included.
    """

    __slots__ = ("__weakref__", "_claim", "_memory", "_met", "_nbytes", "_pool", "_start", "_unmet")

    def __init__(
        self, pool: PinnedPool, ticket: Ticket, memory: Tensor, start: int, nbytes: int, events: tuple[Event, ...]
    ) -> None:
        # A list, because `pop` is one atomic step: of two releases at once, one gets the ticket.
        self._claim = [ticket]
        self._pool = pool
        self._memory = memory
        self._start = start
        self._nbytes = nbytes
        self._unmet = events
        self._met: tuple[Event, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes as asked for."""
        return self._nbytes

    @property
    def released(self) -> bool:
        return not self._claim

    @property
    def pending_events(self) -> tuple[Event, ...]:
        """Events of earlier owners that nobody has waited for yet; device work on the block comes after them."""
        return self._unmet

    @property
    def buffer(self) -> Tensor:
        """The memory as a flat uint8 tensor of exactly `nbytes`, for device copies.

        Raw: this does NOT wait for `pending_events`. A stream that uses it is one that `allocate` or `wait_on` was given; for
        the host there are `tensor` and `numpy`. Raises `BlockReleasedError` after the release.
        """
        return self._bytes(self._nbytes, "buffer")

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The memory as a contiguous CPU tensor, for the host to read and write. No copy; the content is what was there.

        The host waits for what earlier owners left pending. Device work of the caller's own is the caller's to wait for. Raises
        `ValueError` for a shape that needs more than `nbytes`, `BlockReleasedError` after the release.
        """
        nbytes = self._fitting(shape, dtype.itemsize, dtype, "tensor")
        flat = self._bytes(nbytes, "tensor")
        self._host_waits()
        with torch.inference_mode(mode=False):  # or the view could not be written or saved for backward outside of that mode
            return flat.view(dtype).view(tuple(shape))

    def numpy(self, shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """As `tensor`, as an array. Raises `ValueError` for a dtype of Python objects too."""
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise ValueError(f"numpy: expected a dtype of plain bytes, got {kind}; pinned memory cannot hold Python objects")
        nbytes = self._fitting(shape, kind.itemsize, kind, "numpy")
        flat = self._bytes(nbytes, "numpy")
        self._host_waits()
        return np.ndarray(tuple(shape), kind, buffer=flat.numpy())

    def wait_on(self, stream: Stream) -> None:
        """Order `stream`'s later work after every earlier owner's, on the device. The host does not wait.

        Once for each stream that may be the first to touch the block. Raises `BlockReleasedError` after the release.
        """
        self._check_live("wait_on")
        for event in (*self._unmet, *self._met):
            stream.wait(event)  # the earlier owner's last access -> this stream's first
        self._met += self._unmet
        self._unmet = ()

    def release(self, after: Event | None = None) -> None:
        """Give the memory back. A second call does nothing.

        `after` is an event behind the last device work on the block, and so behind the waits of `allocate` and `wait_on` that
        came before that work; None says that there was none, or that all of it is complete. Never waits, never takes a lock,
        calls nothing of the device: safe in finalizers and on any thread.
        """
        try:
            ticket = self._claim.pop()
        except IndexError:
            return
        events = self._unmet + self._met if after is None else (*self._unmet, after)
        self._unmet = self._met = ()
        self._pool.take_back(ticket, events)

    def __del__(self) -> None:
        # Not weakref.finalize: that costs more than the allocation itself, and all this does is append to a deque, which is
        # safe in the middle of any line, in a forked child and while the interpreter shuts down.
        self.release()

    def __repr__(self) -> str:
        state = "released" if self.released else f"{len(self._unmet)} pending events"
        return f"<PinnedBlock {self._nbytes} bytes, {state}>"

    def forget_complete(self) -> None:
        """Drop the pending events that are complete. The host does not wait."""
        if self._unmet:
            self._unmet = tuple(event for event in self._unmet if not event.query())

    def _host_waits(self) -> None:
        for event in (*self._unmet, *self._met):
            event.synchronize()  # the earlier owner's last access -> the host's first
        self._unmet = self._met = ()

    def _bytes(self, nbytes: int, what: str) -> Tensor:
        self._check_live(what)
        return self._memory[self._start : self._start + nbytes]

    def _check_live(self, what: str) -> None:
        if not self._claim:
            raise BlockReleasedError(
                f"{what}: expected a live block, got one of {self._nbytes} bytes that was released; "
                f"release a block after its last use, or allocate another"
            )

    def _fitting(self, shape: Sequence[int], itemsize: int, dtype: object, what: str) -> int:
        """Bytes that `shape` takes. Raises `ValueError` if they are more than the block has."""
        if any(size < 0 for size in shape):
            raise ValueError(f"{what}: expected sizes of 0 or more, got shape {tuple(shape)}")
        nbytes = math.prod(shape) * itemsize
        if nbytes > self._nbytes:
            raise ValueError(
                f"{what}: expected a shape of at most {self._nbytes} bytes, got {tuple(shape)} of {dtype} = {nbytes} bytes; "
                f"allocate a larger block"
            )
        return nbytes
