"""Pinned host memory in blocks of any size, out of a few large chunks.

    allocate(n, stream): returned blocks back to the free list
                         best fit over all chunks  |  else another chunk, pinned outside of the lock  |  else `on_full`
                         the block takes the events left on its bytes; stream waits for them, the host does not
    release(after):      a ticket onto a deque; nothing else, for it runs in the middle of any line
    reserve(n):          chunks ahead of need, on a thread of its own if asked

Pinning is slow (a few GB/s) and holds locks of the driver, so it happens by the chunk. Rounding every request to a power of
two, or one list per size, can waste as much as it serves on activations of many sizes; best fit with immediate coalescing does
not (Knuth, see `free_list`). One free list spans all chunks: each is a region of its addresses, no block straddles two.
Free bytes carry events as the free blocks of RMM do: see `pending`, and Note [Host block] in `block`.

One thread pins at a time, which `_pinning` says. Whoever finds no free block meanwhile waits for that chunk before asking for
another; whoever finds one goes on.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from heapq import nlargest
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, get_args

import torch
from torch import Tensor

from chameleon_mm.device import resolve_device
from chameleon_mm.device.protocols import Device, Event, Stream
from chameleon_mm.errors import HostMemoryExhausted, PoolStateError
from chameleon_mm.pinned.block import PinnedBlock, Ticket
from chameleon_mm.pinned.chunks import REGISTRATION_LIMIT_BYTES, Chunks
from chameleon_mm.pinned.host_memory import available_host_bytes
from chameleon_mm.pinned.pageable import PageableBlock, PageableLedger, PageableSource
from chameleon_mm.pinned.reservation import Progress, Reservation
from chameleon_mm.pinned.stats import PoolStats
from chameleon_mm.units import format_size, parse_size

if TYPE_CHECKING:
    from chameleon_mm.pinned.cupy_allocator import CupyAllocator
    from chameleon_mm.pinned.plan_offsets import OffsetPlan
    from chameleon_mm.pinned.replay import ReplayPool

_log = logging.getLogger(__name__)

OnFull = Literal["raise", "pageable", "wait"]
"""What `allocate` does where the limit, or the device, gives no more pinned memory."""

_POLL_S = 0.001
"""How often a waiting `allocate` looks whether a block came back. It must look: a release may run in the middle of any line,
also one that holds the lock which a notification would need."""

_LONGEST_POLL_S = 0.25
"""How rarely at last it asks for another chunk, which costs much where the device refuses again."""


class PinnedPool:
    """An allocator of pinned host memory, thread-safe, over chunks that it gets from `device` as it needs them.

    `max_bytes` (int bytes or "8GiB") is what it reserves at most, chunks being pinned included; None takes half of what the
    machine and the process's control groups leave (`available_host_bytes`). `chunk_bytes` is the size of a chunk; None grows
    from 16 MiB to 1 GiB with what is reserved, see `chunks`. A chunk is smaller where the limit leaves less, larger for a
    request that is. `device` is a Device, or what names one; None is CUDA where there is one, else the simulator. Reserves
    nothing before the first block.

    `on_full` says what happens where the limit is reached or pinning fails: "raise" `HostMemoryExhausted`; "pageable" serves
    the block from ordinary memory (`block.pageable`), beside `max_bytes`; "wait" waits at most `max_wait_s` seconds for other
    threads to release blocks, then raises.

    Every block holds its pool. `close`, or leaving `with pool:`, gives the memory back; a pool that is dropped without it does
    so once its blocks are gone, except in a forked child and while the interpreter ends, where no device may be called.
    Raises `ValueError` and `TypeError` for sizes and devices that are none.
    """

    def __init__(
        self,
        max_bytes: int | str | None = "8GiB",
        device: Device | str | None = None,
        chunk_bytes: int | str | None = None,
        *,
        on_full: OnFull = "raise",
        max_wait_s: float = 30.0,
    ) -> None:
        limit = _default_limit() if max_bytes is None else parse_size(max_bytes, what="max_bytes")
        chunk = None if chunk_bytes is None else parse_size(chunk_bytes, what="chunk_bytes")
        if chunk is not None and not 0 < chunk < REGISTRATION_LIMIT_BYTES:
            raise ValueError(
                f"chunk_bytes: expected more than 0 bytes and less than {format_size(REGISTRATION_LIMIT_BYTES)}, the most that "
                f"the driver registers at once, got {chunk}; leave it out for a size that grows with the pool"
            )
        if on_full not in get_args(OnFull):
            raise ValueError(f"on_full: expected one of {', '.join(get_args(OnFull))}, got {on_full!r}")
        if not 0 <= max_wait_s < float("inf"):
            raise ValueError(f"max_wait_s: expected a finite number of seconds, 0 or more, got {max_wait_s}")
        self._limit = limit
        self._limit_grows = max_bytes is None
        self._on_full = on_full
        self._max_wait_s = max_wait_s
        self._device = resolve_device(device)
        self._chunks = Chunks(self._device, chunk)
        self._free_list = self._chunks.free_list
        self._pageable = PageableLedger()
        self._pageable_source = PageableSource(self._device)
        self._lock = threading.Lock()
        self._pinned = threading.Condition(self._lock)  # notified when `_pinning` ends
        self._pinning = False
        self._returned: deque[tuple[Ticket, tuple[Event, ...]]] = deque()
        self._live: dict[int, int] = {}  # serial -> bytes as asked for; of pageable blocks the ledger knows
        self._serial = 0
        self._peak_live_bytes = 0
        self._peak_reserved_bytes = 0
        self._closed = False
        # The finalizer must not hold the pool, only what it needs of it. Never at exit: the driver may be gone by then.
        weakref.finalize(self, _abandon, self._device, self._chunks, self._pageable, os.getpid()).atexit = False

    @property
    def device(self) -> Device:
        return self._device

    @property
    def limit_bytes(self) -> int:
        """What the pool reserves at most."""
        return self._limit

    # --- blocks

    def allocate(self, nbytes: int, stream: Stream | None = None) -> PinnedBlock:
        """A block of `nbytes`. Zero bytes are a block too, which takes nothing.

        `stream`, the one that will touch the block first, waits for the earlier users of its bytes; without one their events
        are left in `block.pending_events`. The host waits for the device in one case only: instead of failing, where the limit
        leaves room only after an unused chunk is given back and the device is not done with it.
        Raises `HostMemoryExhausted` past the limit, or where the device can pin no more, unless `on_full` says otherwise: the
        pool stays usable, and the same request may succeed later.
        """
        if type(nbytes) is not int or nbytes < 0:
            _check_size(nbytes)
        with self._lock:
            if self._closed:
                raise self._closed_error("allocate")
            if self._returned:
                self._drain()
            block = self._carve(nbytes)
        if block is None:
            block = self._grow_for(nbytes)
        # Outside of the lock, and with the block whole: should the device fail here, the block still returns itself.
        if block.pending_events:
            block.forget_complete()
            if stream is not None:
                block.wait_on(stream)
        return block

    def allocate_pageable(self, nbytes: int, stream: Stream | None = None) -> PageableBlock:
        """A block of `nbytes` of ordinary memory, whatever `on_full` says: outside of `max_bytes`, bounded by what the machine
        and the process's control groups leave.

        `stream` is there for the likeness to `allocate`: the memory has no earlier user to wait for. It is kept until the event
        that the block is released with is complete. Raises `HostMemoryExhausted`.
        """
        _check_size(nbytes)
        memory = self._pageable_source.allocate(nbytes)
        with self._lock:
            if self._closed:
                raise self._closed_error("allocate_pageable")
            self._drain()
            self._serial += 1
            self._pageable.add(self._serial, memory)
            return PageableBlock(self, Ticket(self._serial, None), memory, 0, nbytes, ())

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in a block of its own, which returns when the tensor and its views are gone. Raises as `allocate` does."""
        from chameleon_mm.pinned.tensors import empty_tensor

        return empty_tensor(self, shape, dtype)

    def as_cupy_allocator(self) -> CupyAllocator:
        """This pool for `cupy.cuda.set_pinned_memory_allocator`."""
        from chameleon_mm.pinned.cupy_allocator import CupyAllocator

        return CupyAllocator(self)

    def replay(self, plan: OffsetPlan) -> ReplayPool:
        """A pool that serves a step from the offsets of `plan`, out of one block of this one."""
        from chameleon_mm.pinned.replay import ReplayPool

        return ReplayPool(self, plan)

    def take_back(self, ticket: Ticket, events: tuple[Event, ...]) -> None:
        """For blocks alone: note that one was released. An append is atomic, and takes no lock that its own thread may hold."""
        self._returned.append((ticket, events))

    # --- memory

    def reserve(self, nbytes: int | str, *, background: bool = False, progress: Progress | None = None) -> Reservation:
        """Pin `nbytes` more (int bytes or "8GiB") ahead of need, in chunks. Pinning runs at 2 to 11 GB/s.

        With `background` a thread does it, and this returns at once: allocations that fit what is there go on, one that does
        not waits for the chunk under way. Otherwise the reservation that this returns is done. `progress(done_bytes,
        total_bytes)` is called after each chunk, on the thread that pins. Closing the pool ends it, and so does dropping it.
        Raises `HostMemoryExhausted` past the limit, before anything is pinned, and where the device pins no more; in the
        background the latter is raised by `Reservation.wait`. What was pinned stays.
        """
        asked = parse_size(nbytes, what="nbytes")
        total = self._free_list.round_up(asked)
        with self._lock:
            if self._closed:
                raise self._closed_error("reserve")
            self._let_limit_grow()
            self._check_room(asked, total)
        reservation = Reservation(total, progress)
        if background:
            # Weakly: what nobody can allocate from any more need not be pinned. A daemon: nor need it at exit.
            pool = weakref.ref(self)
            threading.Thread(
                target=reservation.carry_out,
                args=(lambda left: None if (held := pool()) is None else held._pin_ahead(left),),
                name="chameleon-reserve",
                daemon=True,
            ).start()
        else:
            reservation.carry_out(self._pin_ahead)
            reservation.wait()
        return reservation

    def trim(self) -> int:
        """Give back the chunks that hold no block and that no device work is left on; returns their bytes. Never waits."""
        with self._lock:
            self._drain()
            self._pageable.sweep()
            unused = [chunk for chunk in self._chunks.unused() if chunk.pending.sweep()]
            return sum(self._chunks.give_back(chunk) for chunk in unused)

    def stats(self) -> PoolStats:
        """What the pool holds now, every release up to here counted. Not for finalizers: it takes the pool's lock."""
        with self._lock:
            self._note_peak()
            self._drain()
            self._pageable.sweep()
            return PoolStats(
                limit_bytes=self._limit,
                reserved_bytes=self._free_list.capacity,
                live_bytes=self._free_list.live_bytes,
                requested_bytes=sum(self._live.values()),
                peak_live_bytes=self._peak_live_bytes,
                peak_reserved_bytes=self._peak_reserved_bytes,
                largest_free_bytes=self._free_list.largest_free,
                num_live=len(self._live) + self._pageable.num_live,
                num_chunks=len(self._chunks),
                pageable_bytes=self._pageable.nbytes,
                peak_pageable_bytes=self._pageable.peak_bytes,
            )

    def close(self) -> None:
        """Give all memory back, once the device is done with it (the host waits). A second call does nothing.

        A reservation ends; the chunk it is pinning is waited for. Raises `PoolStateError`, and changes nothing, while blocks
        are live.
        """
        with self._lock:
            self._drain()
            live = [*self._live.values(), *self._pageable.live_sizes()]
            if live:
                some = ", ".join(format_size(nbytes) for nbytes in nlargest(3, live))
                raise PoolStateError(
                    f"close: expected no live block, got {len(live)} of {format_size(sum(live))} in all "
                    f"(the largest: {some}); release them, or drop what holds them, and close again"
                )
            self._closed = True
            while self._pinning:
                self._pinned.wait()
            for chunk in self._chunks.unused():
                self._chunks.give_back(chunk)
            self._pageable.synchronize()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except PoolStateError as still_live:
            if error is None:
                raise
            # The error's own traceback is likely what holds the blocks. It is what the caller must see; they return later.
            _log.warning("pinned pool left open: %s", still_live)

    def __repr__(self) -> str:
        live = len(self._live) + self._pageable.num_live - len(self._returned)
        return (
            f"<PinnedPool on {self._device.name}: {live} live blocks, "
            f"{format_size(self._free_list.capacity)} of {format_size(self._limit)} reserved>"
        )

    # --- where no free block is large enough

    def _grow_for(self, nbytes: int) -> PinnedBlock:
        try:
            return self._carve_or_pin(nbytes)
        except HostMemoryExhausted as refusal:
            if self._on_full == "raise":
                raise
            reason = str(refusal)  # its text alone: kept, it would keep frames, and the blocks there
        if self._on_full == "wait":
            return self._wait_for(nbytes, reason)
        _log.debug("%d bytes of pageable memory instead: %s", nbytes, reason)
        return self.allocate_pageable(nbytes)

    def _carve_or_pin(self, nbytes: int) -> PinnedBlock:
        """A block, out of another chunk where need be."""
        while True:
            with self._lock:
                while True:
                    if self._closed:
                        raise self._closed_error("allocate")
                    self._drain()
                    block = self._carve(nbytes)
                    if block is not None:
                        return block
                    if not self._pinning:
                        break
                    self._pinned.wait()
                self._let_limit_grow()
                wanted = self._chunks.make_room(nbytes, self._limit)
                self._pinning = True
            self._pin(wanted)

    def _wait_for(self, nbytes: int, reason: str) -> PinnedBlock:
        """A block, as soon as others have released enough. Raises `HostMemoryExhausted` when that takes too long."""
        started = now = time.monotonic()
        deadline, pause = started + self._max_wait_s, _POLL_S
        pin_again = started + pause
        # What can never fit is not worth waiting for.
        while now < deadline and self._free_list.round_up(nbytes) <= self._limit:
            time.sleep(min(_POLL_S, deadline - now))
            now = time.monotonic()
            with self._lock:
                if self._closed:
                    raise self._closed_error("allocate")
                self._drain()
                block = self._carve(nbytes)
            if block is not None:
                return block
            if now >= pin_again:
                try:
                    return self._carve_or_pin(nbytes)
                except HostMemoryExhausted as refusal:
                    reason = str(refusal)
                pause = min(2 * pause, _LONGEST_POLL_S)
                pin_again = time.monotonic() + pause
        raise HostMemoryExhausted(
            f"{reason} (waited {now - started:.1f} s for other threads to release blocks, of max_wait_s={self._max_wait_s})"
        )

    def _pin_ahead(self, most: int) -> int | None:
        """One chunk of a reservation, of at most `most` bytes; None if the pool is closed."""
        with self._lock:
            while self._pinning:
                self._pinned.wait()
            if self._closed:
                return None
            wanted = min(most, self._chunks.largest_bytes)
            self._let_limit_grow()
            self._check_room(wanted, wanted)
            self._pinning = True
        self._pin(wanted)
        return wanted

    def _pin(self, nbytes: int) -> None:
        """Another chunk of `nbytes`, pinned outside of the lock. The caller has set `_pinning`; this ends it, come what may."""
        memory = None
        try:
            # A chunk outlives the mode it is born in, and a tensor born under inference_mode cannot be written outside of it.
            with torch.inference_mode(mode=False):
                memory = self._device.alloc_pinned(nbytes)
        except MemoryError as error:
            raise HostMemoryExhausted(
                f"pinned pool: asked the device for a chunk of {nbytes} bytes, got: {error}. {self._free_list.capacity} of at "
                f"most {self._limit} bytes are reserved"
            ) from error
        finally:
            with self._lock:
                if memory is not None:  # whether or not the pool was closed meanwhile: `close` waits for it, and gives it back
                    self._chunks.add(memory)
                    self._peak_reserved_bytes = max(self._peak_reserved_bytes, self._free_list.capacity)
                self._pinning = False
                self._pinned.notify_all()

    # --- under the lock

    def _drain(self) -> None:
        """Returned blocks back to the free list, their events beside it."""
        returned = self._returned
        if returned:
            self._note_peak()
        while returned:
            (serial, offset), events = returned.popleft()
            if offset is None:
                if serial in self._pageable:
                    self._pageable.take_back(serial, events)
                else:
                    del self._live[serial]
                continue
            del self._live[serial]
            size = self._free_list.free(offset)
            if events:
                self._chunks.of(offset).pending.add(offset, offset + size, events)

    def _note_peak(self) -> None:
        """What is live only falls when blocks are drained: so it is looked at before, and not at each allocation."""
        self._peak_live_bytes = max(self._peak_live_bytes, self._free_list.live_bytes)

    def _carve(self, nbytes: int) -> PinnedBlock | None:
        """A block of what is reserved and free; None where none is large enough."""
        if nbytes:
            offset = self._free_list.allocate(nbytes)
            if offset is None:
                return None
            chunk = self._chunks.of(offset)
            start, memory = offset - chunk.base, chunk.memory
            pending = chunk.pending
            events = pending.take(offset, offset + self._free_list.round_up(nbytes)) if pending else ()
        else:
            offset, start, memory, events = None, 0, torch.empty(0, dtype=torch.uint8), ()
        self._serial = serial = self._serial + 1
        self._live[serial] = nbytes
        return PinnedBlock(self, Ticket(serial, offset), memory, start, nbytes, events)

    def _let_limit_grow(self) -> None:
        """A virtual machine's memory may grow as it is used, so what was available at the start says too little."""
        if self._limit_grows:
            self._limit = max(self._limit, (self._free_list.capacity + available_host_bytes()) // 2)

    def _check_room(self, asked: int, total: int) -> None:
        room = self._chunks.room(self._limit)
        if total > room:
            raise HostMemoryExhausted(
                f"reserve: asked for {asked} bytes more, but the limit is {self._limit} bytes and {self._free_list.capacity} "
                f"are reserved; reserve at most {room}, or make the pool with a larger max_bytes"
            )

    def _closed_error(self, what: str) -> PoolStateError:
        return PoolStateError(f"{what}: expected an open pool, got one that was closed; make another PinnedPool")


def _check_size(nbytes: int) -> None:
    if isinstance(nbytes, bool) or not isinstance(nbytes, int):
        raise TypeError(f"allocate: expected an int of bytes, got {nbytes!r} ({type(nbytes).__name__})")
    if nbytes < 0:
        raise ValueError(f"allocate: expected 0 bytes or more, got {nbytes}")


def _default_limit() -> int:
    """Half of the host memory that is left: the other half is for page cache, data loading and the model's own host side."""
    half = available_host_bytes() // 2
    if half == 0:
        raise ValueError('max_bytes: None is half of the available host memory, which could not be read; give a size, "8GiB"')
    return half


def _abandon(device: Device, chunks: Chunks, pageable: PageableLedger, pid: int) -> None:
    """Give back what a pool still held when the last reference to it, and to its blocks, went."""
    if os.getpid() != pid:  # a forked child: the memory is the parent's, and its device must not be called here
        return
    if chunks or pageable.holds_memory:
        # Not just the events: a pool is abandoned where something went wrong, and a block may have been dropped without one.
        device.synchronize()
        pageable.abandon()
        chunks.abandon()
