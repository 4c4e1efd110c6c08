"""Blocks of host memory, from allocation to release: pinned, or pageable if no more can be pinned.

    block = pool.allocate(nbytes, stream=d2h)       # d2h waits for the earlier users of these bytes
    d2h.copy(block.buffer, hbm)
    h2d.wait(d2h.record()); h2d.copy(hbm2, block.buffer)
    block.release(after=h2d.record())               # the next owner of the bytes waits for that event
                                                    # ... or drop the block: the next owner waits for all device work until then
    t = block.tensor(shape, dtype)                  # holds the block: while t or a view of it is alive, release() refuses

Note [Host block]: the device may still read a block when the host releases it. So a block passes its last event on, and the
next user of the bytes waits for it: a stream waits on the device, and the host waits only if it touches the memory itself. A
block has two kinds of events of earlier owners: `pending_events`, without a wait yet, and `_met`, for which a stream has
waited. A block released without its own event passes `_met` on too, because that wait ordered only one stream.

Note [Dropped]: a dropped block has no event, and torch does not record which streams used memory that it did not allocate. So
the block passes on a `LateEvent` for all work of all streams. It is recorded when the bytes are allocated again.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, Final, NoReturn, Protocol, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chameleon_mm.device.process import ThisProcess
from chameleon_mm.device.protocols import Device, Event, Stream
from chameleon_mm.errors import BlockInUseError, BlockReleasedError, check_method, describe
from chameleon_mm.pool.chunks import LateEvent, recorded

# --- Base of objects that hold memory of a pool: one object in one process


class Uncopied:
    """Base of objects that release memory at their end. A copy would release the same bytes again, while they are in use."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raise `TypeError` in `copy.copy`, `copy.deepcopy` and `pickle`."""
        raise TypeError(
            f"{type(self).__name__}: expected one object in one process, got a copy by copy.copy, copy.deepcopy or pickle, "
            f"which would give its memory back twice; use the object itself, or make another and copy the bytes"
        )


def check_process(what: str, pid: int) -> None:
    """Raise `RuntimeError` in a forked child of process `pid`, which made the pool. `what`: name of the function."""
    if ThisProcess.pid != pid:
        raise RuntimeError(
            f"{what}: expected a use in the process that made the pool ({pid}), got one in a forked child "
            f"({ThisProcess.pid}), where its device cannot be used; use it in the parent, or start the child by the spawn or "
            f"forkserver method and make a PinnedPool there"
        )


# --- Views of a block that keep it alive, and tensors over a whole block:
#
# NumPy keeps the object from which an array's memory came, and torch the array from which a tensor's storage came. So the
# object at the bottom lives exactly as long as the bytes are reachable through any derived object: slices, `detach()`, DLPack
# capsules. The block holds it only weakly.


class BlockView(Uncopied):
    """View below all other views of a block: `nbytes` at `address`, and the block to which they belong."""

    __slots__ = ("__array_interface__", "__weakref__", "block")

    def __init__(self, block: PinnedBlock, address: int, nbytes: int) -> None:
        self.block = block
        # Strides: without them NumPy gives an empty view a stride of 0, and torch refuses other dtypes of that.
        self.__array_interface__ = {
            "version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": (1,),
        }  # fmt: skip


def as_tensor(view: BlockView, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return `view` as a contiguous tensor, which holds `view`."""
    flat = np.asarray(view)
    with torch.inference_mode(mode=False):  # else it could not be written or saved for backward outside of that mode
        return torch.from_numpy(flat).view(dtype).view(shape)


def plain_shape(what: str, shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of `shape`; a number is a shape of one dimension. `what` names the function in the error.

    Raises `TypeError` if it is not a shape, `ValueError` for sizes below 0.
    """
    given: Any = shape  # arrays are shapes, too
    try:
        sizes = tuple(map(index, given)) if hasattr(given, "__iter__") else (index(given),)
    except TypeError:
        raise TypeError(f"{what}: expected a shape, an int or several such as (3, 4), got {describe(shape)}") from None
    if any(size < 0 for size in sizes):
        raise ValueError(f"{what}: expected sizes of 0 or more, got shape {sizes}")
    return sizes


def check_dtype(what: str, dtype: torch.dtype) -> None:
    """Raise `TypeError` if `dtype` is not a dtype of torch."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(
            f"{what}: expected a torch.dtype such as torch.float32, got {describe(dtype)}; for a NumPy dtype "
            f"use allocate(nbytes).numpy(shape, dtype)"
        )


def plain_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Return NumPy's dtype for `dtype`. Raises `TypeError` if there is none, `ValueError` for a dtype of Python objects."""
    try:
        kind = np.dtype(dtype)
    except (TypeError, ValueError):
        raise TypeError(
            f"numpy: expected a dtype of NumPy's such as np.float32, got {describe(dtype)}; with torch's use "
            f"tensor(shape, dtype)"
        ) from None
    if kind.hasobject:
        raise ValueError(f"numpy: expected a dtype of plain bytes, got {kind}; pinned memory cannot hold Python objects")
    return kind


_DLPACK_CPU = (1, 0)
"""kDLCPU, the only DLPack device of a block. Fewer consumers accept kDLCUDAHost, the type of pinned memory. For host readers it
is ordinary memory, and torch asks the driver, not the capsule, whether it is pinned."""

Ticket = tuple[int, int | None]
"""Right to release a block once: the block's serial number, and its offset, or None for a block without an address. Not a
NamedTuple, which takes 0.4 us to make, a tenth of the time for a whole block."""


class Owner(Protocol):
    """Interface of the owner of blocks, which makes them and records their releases."""

    pid: int
    """Process that made the owner. Only there do blocks have memory."""

    @property
    def device(self) -> Device:
        """Device whose streams use the blocks."""

    def note_released(self, ticket: Ticket, events: tuple[Event, ...]) -> None:
        """Record a release. The block's bytes may be in use until `events`. Called in finalizers: no lock, no device call."""


class PinnedBlock(Uncopied):
    """Block of `nbytes` of pinned host memory, made only by an allocator.

    The results of `tensor`, `numpy` and the protocols of NumPy and DLPack are views that hold the block. `buffer` does not:
    hold the block while using it. One thread at a time may use a block. `release`, or dropping it, may happen on any thread at
    any time, also in the garbage collector. A block cannot be copied or pickled. In a forked child `wait_on`, `buffer` and all
    views raise `RuntimeError`, and releases do nothing.

    It is safe to drop a block and its views while the device uses it, on any stream. The next owner of the bytes then waits for
    all earlier work of the process's devices: by an event if the driver has one for a whole device (CUDA 12.5 and newer), else
    on the host. `release(after=event)` is cheaper, because the next owner waits only for that event.
    """

    __slots__ = ("__weakref__", "_memory", "_met", "_owner", "_start", "_take_turn", "_views", "nbytes", "pending_events")

    def __init__(
        self, owner: Owner, ticket: Ticket, memory: Tensor, start: int, nbytes: int, events: tuple[Event, ...]
    ) -> None:
        # A list, because `pop` is atomic: only one of two concurrent releases gets the ticket.
        self._take_turn = [ticket]
        self._owner, self._memory, self._start = owner, memory, start
        self.nbytes: Final = nbytes
        """Requested bytes."""
        self.pending_events = events
        """Events of earlier owners without a wait yet. Device work on the block must come after them. Others only read it."""
        self._met: tuple[Event, ...] = ()
        self._views: list[weakref.ref[BlockView]] | None = None

    @property
    def released(self) -> bool:
        return not self._take_turn

    @property
    def buffer(self) -> Tensor:
        """Memory as a flat uint8 tensor of exactly `nbytes`, for device copies.

        It does NOT wait for `pending_events`, and does not hold the block. Use it on a stream passed to `allocate` or
        `wait_on`. On the host, use `tensor` or `numpy`. Raises `BlockReleasedError` after the release.
        """
        if not self._take_turn or ThisProcess.pid != self._owner.pid:
            self._check_live("buffer")
        return self._memory[self._start : self._start + self.nbytes]

    # --- views

    def tensor(self, shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the memory as a contiguous CPU tensor, for the host to read and write. It is not copied; its content stays.

        The tensor, and all tensors over its storage, hold the block. The host waits for pending events of earlier owners. The
        caller passes an event after its own device work to `release`. If the block is dropped with its last view, the next
        owner waits for all work. Raises `ValueError` for a shape that needs more than `nbytes`, `TypeError` for an invalid
        shape or dtype, `BlockReleasedError` after the release.
        """
        sizes = plain_shape("tensor", shape)
        check_dtype("tensor", dtype)
        return as_tensor(self._view("tensor", sizes, dtype), sizes, dtype)

    def numpy(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return the memory as a NumPy array, with the conditions of `tensor`. Also raises `ValueError` for a dtype of Python
        objects."""
        sizes, kind = plain_shape("numpy", shape), plain_dtype(dtype)
        return np.ndarray(sizes, kind, buffer=np.asarray(self._view("numpy", sizes, kind)))

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """`np.asarray(block)`: all `nbytes` as uint8."""
        # `data` is an object, which NumPy then holds. With an address, NumPy would hold the block, but no view of it.
        data = memoryview(self._bytes("np.asarray"))
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": data}

    def __dlpack__(self, **arguments: Any) -> Any:
        """`torch.from_dlpack(block)`, `np.from_dlpack(block)`: all `nbytes` as uint8, on the CPU. Arguments as NumPy's."""
        return self._bytes("__dlpack__").__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CPU

    # --- order

    def wait_on(self, stream: Stream) -> None:
        """Order later work of `stream` after the work of all earlier owners, on the device. The host does not wait.

        Call it once for each stream that may be the first to touch the block. Raises `TypeError` if it is not a stream,
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
        """Let the host wait for the work of all earlier owners. Views do this; `buffer` does not."""
        for event in (*self.pending_events, *self._met):
            event.synchronize()  # the earlier owner's last access -> the host's first
        self.pending_events = self._met = ()

    def forget_complete(self) -> None:
        """Drop complete pending events. A late event is replaced by its incomplete real events. The host does not wait."""
        pending: list[Event] = []
        for event in self.pending_events:
            if type(event) is LateEvent:
                pending += [real for real in event.events if not real.query()]
            elif not event.query():
                pending.append(event)
        self.pending_events = tuple(pending)

    # --- the end

    def release(self, after: Event | None = None) -> None:
        """Return the memory to its owner. A second call does nothing.

        `after`: an event after the last device work on the block, and so after the waits of `allocate` and `wait_on` before
        that work. None: there was no device work, or all of it is complete. `release` never waits, takes no lock and calls no
        device, so it is safe in finalizers and on any thread. Raises `TypeError` if `after` is not an event, and
        `BlockInUseError`, which changes nothing, while views of the block are alive.
        """
        if after is not None:
            check_method("release", after, "query", "an event, or None", "pass after=stream.record()")
        try:
            ticket = self._take_turn.pop()
        except IndexError:
            return
        # Check after the pop: a view made on another thread records itself before it reads the ticket, so at least one of the
        # two threads sees the other.
        if self._views:
            self._take_turn.append(ticket)
            raise BlockInUseError(
                f"release: expected no view of this block of {self.nbytes} bytes, got {len(self._views)} live; drop the "
                f"tensors, arrays and memoryviews of it first, or drop the block instead: it returns with the last of them"
            )
        self._return(ticket, self.pending_events + self._met if after is None else (*self.pending_events, after))

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        # Not weakref.finalize, which costs more than the allocation itself. This only appends to a deque, which is safe at any
        # time and in a forked child. It does not check views: they hold the block, so there are none, or the collector frees
        # both together. `ends` is bound here, as in each `__del__`, because the interpreter's end clears modules first.
        if self._take_turn and not ends():
            try:
                ticket = self._take_turn.pop()
            except IndexError:  # another thread's release was faster
                return
            # Any stream's last use of the block -> the next owner's first. Note [Dropped]
            self._return(ticket, (*self.pending_events, *self._met, LateEvent(self._owner.device.record_all)))

    def _return(self, ticket: Ticket, events: tuple[Event, ...]) -> None:
        self.pending_events = self._met = ()
        self._owner.note_released(ticket, events)

    def _bytes(self, what: str) -> Any:
        """Return the whole memory as an array, for the buffer and DLPack protocols. Typed as Any: NumPy's stubs declare them
        only for some versions of Python and NumPy."""
        return np.asarray(self._view(what, (self.nbytes,), np.dtype(np.uint8)))

    def _view(self, what: str, shape: tuple[int, ...], dtype: torch.dtype | np.dtype[Any]) -> BlockView:
        """Return a recorded view of the first bytes. The host waits, because it may access them next. Raises `ValueError` for a
        shape that is larger than the block."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > self.nbytes:
            raise ValueError(
                f"{what}: expected a shape of at most {self.nbytes} bytes, got {shape} of {dtype} = {nbytes} bytes; "
                f"allocate a larger block"
            )
        self._check_live(what)
        self.synchronize()
        views = self._views
        if views is None:
            views = self._views = []
        view = BlockView(self, self._memory.data_ptr() + self._start, nbytes)
        views.append(weakref.ref(view, views.remove))
        self._check_live(what)  # again, after recording the view: see release
        return view

    def _check_live(self, what: str) -> None:
        check_process(what, self._owner.pid)
        if not self._take_turn:
            raise BlockReleasedError(
                f"{what}: expected a live block, got one of {self.nbytes} bytes that was released; "
                f"release a block after its last use, or allocate another"
            )


# --- Blocks of pageable memory, for when no more can be pinned: slower to copy, but correct
#
# Like pinned memory, pageable memory may be read and written by the device while the host continues. A block's last reference
# may be dropped before its last event is complete, so the ledger holds the memory until then.

_NOTHING = torch.empty(0, dtype=torch.uint8)


class PageableBlock(PinnedBlock):
    """Block of a `PinnedPool` whose memory is not pinned. The host may have to wait for copies to and from it."""

    __slots__ = ()

    def _return(self, ticket: Ticket, events: tuple[Event, ...]) -> None:
        super()._return(ticket, events)
        self._memory = _NOTHING  # now only the ledger holds it: a released block must not keep the memory
