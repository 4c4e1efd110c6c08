"""One block of pinned host memory, from allocation to release.

    block = pool.allocate(nbytes, stream=d2h)       # d2h waits for whoever used these bytes before
    d2h.copy(block.buffer, hbm)
    h2d.wait(d2h.record()); h2d.copy(hbm2, block.buffer)
    block.release(after=h2d.record())               # whoever gets the bytes next waits for that
                                                    # ... or is dropped: then for all that the device was given by then
    t = block.tensor(shape, dtype)                  # holds the block: while t or a view of it lives, release() refuses

Note [Host block]: the device may still read a block when the host is done with it, so a block hands its last event on, and
whoever uses the bytes next waits for it: a stream on the device, the host only where the host itself touches the memory.
A block knows two kinds of events of earlier owners: `pending_events`, which nobody has waited for, and `_met`, which a stream
has waited for. Released without an event of its own, it hands the second kind on too: the wait ordered that stream, no other.

Note [Dropped]: a block that is dropped names no event, and torch does not note which streams used memory that it did not
allocate. So the block hands on a `LateEvent` for all work of all streams. It is recorded when its bytes are handed out again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chameleon_mm.arguments import check_method
from chameleon_mm.device.protocols import Device, Event, Stream
from chameleon_mm.errors import BlockInUseError, BlockReleasedError
from chameleon_mm.pinned.pending import LateEvent, recorded
from chameleon_mm.pinned.tensors import BlockView, as_array, as_tensor, nbytes_of, plain_dtype, plain_shape, tensor_nbytes

_DLPACK_CPU = (1, 0)
"""kDLCPU, its only device. Page-locked memory has a type of its own, kDLCUDAHost, which fewer consumers take: to a reader of
host memory it is ordinary memory, and torch asks the driver, not the capsule, whether it is pinned."""


Ticket = tuple[int, int | None]
"""Right to release a block, once: its serial number, and its offset, None for a block that has no address. Not a NamedTuple,
which takes 0.4 us to make, a tenth of what a block may take in all."""


class Owner(Protocol):
    """Owner of blocks, which makes them and is told of their release."""

    @property
    def device(self) -> Device:
        """Device whose streams use the blocks."""

    def note_released(self, ticket: Ticket, events: tuple[Event, ...]) -> None:
        """Note that a block was released; its bytes may be in use until `events`. Called in finalizers: no lock, no device."""


class PinnedBlock:
    """`nbytes` of pinned host memory, made by an allocator alone.

    What `tensor`, `numpy` and the protocols of NumPy and DLPack give are views: each holds the block. `buffer` is none: hold
    the block as long as that is in use. One thread at a time uses a block; `release`, and dropping it, may happen on any thread
    at any point, the garbage collector's included.

    Dropping a block and its views is safe while the device uses it, on any stream: whoever gets the bytes next waits for all
    work that the process's devices were given by then. That is an event where the driver has one for a whole device (CUDA 12.5
    and newer), else a wait of the host. `release(after=event)` is the cheap way: it waits for that event alone.
    """

    __slots__ = ("__weakref__", "_memory", "_met", "_owner", "_start", "_take_turn", "_views", "nbytes", "pending_events")

    def __init__(
        self, owner: Owner, ticket: Ticket, memory: Tensor, start: int, nbytes: int, events: tuple[Event, ...]
    ) -> None:
        # A list, because `pop` is one atomic step: of two releases at once, one gets the ticket.
        self._take_turn = [ticket]
        self._owner = owner
        self._memory = memory
        self._start = start
        self.nbytes: Final = nbytes
        """Bytes as asked for."""
        self.pending_events = events
        """Events of earlier owners that nobody waited for; device work on the block comes after them. Others only read it."""
        self._met: tuple[Event, ...] = ()
        self._views: list[weakref.ref[BlockView]] | None = None

    @property
    def released(self) -> bool:
        return not self._take_turn

    @property
    def pageable(self) -> bool:
        """Whether this is ordinary memory, given where no more could be pinned."""
        return False

    @property
    def buffer(self) -> Tensor:
        """The memory as a flat uint8 tensor of exactly `nbytes`, for device copies.

        Raw: this does NOT wait for `pending_events`, and does not hold the block. A stream that uses it is one that `allocate`
        or `wait_on` was given; for the host there are `tensor` and `numpy`. Raises `BlockReleasedError` after the release.
        """
        if not self._take_turn:
            self._check_live("buffer")
        return self._memory[self._start : self._start + self.nbytes]

    # --- views

    def tensor(self, shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
        """The memory as a contiguous CPU tensor, for the host to read and write. No copy; the content is what was there.

        The tensor, and all that shares its storage, holds the block. The host waits for what earlier owners left pending.
        Device work of the caller's own is the caller's to name in `release`; where the block is dropped with its last view, the
        next owner waits for all. Raises `ValueError` for a shape that needs more than `nbytes`, `TypeError` for what is no
        shape or no dtype, `BlockReleasedError` after the release.
        """
        sizes = plain_shape("tensor", shape)
        return as_tensor(self._view(tensor_nbytes("tensor", sizes, dtype, self.nbytes), "tensor"), sizes, dtype)

    def numpy(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """The memory as a NumPy array, under the conditions of `tensor`. Raises `ValueError` for a dtype of Python objects
        too."""
        sizes, kind = plain_shape("numpy", shape), plain_dtype(dtype)
        return as_array(self._view(nbytes_of("numpy", sizes, kind, self.nbytes), "numpy"), sizes, kind)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """`np.asarray(block)`: all `nbytes` as uint8."""
        # `data` is an object, which NumPy then holds, and not an address, with which it would hold the block but no view of it.
        data = memoryview(self._bytes("np.asarray"))
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": data}

    def __dlpack__(self, **arguments: Any) -> Any:
        """`torch.from_dlpack(block)`, `np.from_dlpack(block)`: all `nbytes` as uint8, on the CPU. Arguments as NumPy's own."""
        return self._bytes("__dlpack__").__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CPU

    # --- order

    def wait_on(self, stream: Stream) -> None:
        """Order `stream`'s later work after every earlier owner's, on the device. The host does not wait.

        Once for each stream that may be the first to touch the block. Raises `TypeError` for what is no stream,
        `BlockReleasedError` after the release.
        """
        check_method("wait_on", stream, "wait", "a stream of the pool's device", "pass device.current_stream()")
        self._check_live("wait_on")
        unmet = self.pending_events = recorded(self.pending_events)
        for event in unmet:
            stream.wait(event)  # the earlier owner's last access -> this stream's first
        for event in self._met:
            stream.wait(event)  # the same, for one more stream
        self._met += unmet
        self.pending_events = ()

    def synchronize(self) -> None:
        """The host waits for every earlier owner's work. The views do this; `buffer` does not."""
        for event in (*self.pending_events, *self._met):
            event.synchronize()  # the earlier owner's last access -> the host's first
        self.pending_events = self._met = ()

    def forget_complete(self) -> None:
        """Drop the pending events that are complete; of a late one the events that it stands for stay. The host does not
        wait."""
        pending: list[Event] = []
        for event in self.pending_events:
            if type(event) is LateEvent:
                pending += [real for real in event.events if not real.query()]
            elif not event.query():
                pending.append(event)
        self.pending_events = tuple(pending)

    # --- the end

    def release(self, after: Event | None = None) -> None:
        """Give the memory back. A second call does nothing.

        `after` is an event behind the last device work on the block, and so behind the waits of `allocate` and `wait_on` that
        came before that work; None says that there was none, or that all of it is complete. Never waits, never takes a lock,
        calls nothing of the device: safe in finalizers and on any thread. Raises `TypeError` for what is no event, and
        `BlockInUseError` while views of the block live, with nothing changed.
        """
        if after is not None:
            check_method("release", after, "query", "an event, or None", "pass after=stream.record()")
        try:
            ticket = self._take_turn.pop()
        except IndexError:
            return
        # After the pop: a view that is being made on another thread has noted itself before it looks for the ticket, so that of
        # the two at least one sees the other.
        if self._views:
            self._take_turn.append(ticket)
            raise BlockInUseError(
                f"release: expected no view of this block of {self.nbytes} bytes, got {len(self._views)} live; drop the "
                f"tensors, arrays and memoryviews of it first, or drop the block instead: it returns with the last of them"
            )
        self._return(ticket, self.pending_events + self._met if after is None else (*self.pending_events, after))

    def __del__(self) -> None:
        # Not weakref.finalize: that costs more than the allocation itself, and all this does is append to a deque, which is
        # safe in the middle of any line, in a forked child and while the interpreter shuts down. Nobody is asked for views:
        # they hold the block, so there are none, or the collector takes them apart together.
        if self._take_turn:
            with suppress(IndexError):  # another thread's release was faster
                ticket = self._take_turn.pop()
                # Any stream's last use of the block -> the next owner's first. Note [Dropped]
                self._return(ticket, (*self.pending_events, *self._met, LateEvent(self._owner.device.record_all)))

    def __repr__(self) -> str:
        state = "released" if self.released else f"{len(self.pending_events)} pending events"
        return f"<{type(self).__name__} {self.nbytes} bytes, {state}>"

    def _return(self, ticket: Ticket, events: tuple[Event, ...]) -> None:
        self.pending_events = self._met = ()
        self._owner.note_released(ticket, events)

    def _bytes(self, what: str) -> Any:
        """All of the memory as an array, for the protocols. Any: its type declares them only for some versions of Python and
        NumPy."""
        return np.asarray(self._view(self.nbytes, what))

    def _view(self, nbytes: int, what: str) -> BlockView:
        """Array of the first `nbytes`, which a view holds. The host waits, as it is about to look."""
        self._check_live(what)
        self.synchronize()
        views = self._views
        if views is None:
            views = self._views = []
        view = BlockView(self, self._memory.data_ptr() + self._start, nbytes)
        views.append(weakref.ref(view, views.remove))
        self._check_live(what)  # again, now that the view is noted: see release
        return view

    def _check_live(self, what: str) -> None:
        if not self._take_turn:
            raise BlockReleasedError(
                f"{what}: expected a live block, got one of {self.nbytes} bytes that was released; "
                f"release a block after its last use, or allocate another"
            )
