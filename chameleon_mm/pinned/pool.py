"""Pinned host memory in blocks of any size, out of a few large chunks.

    allocate(n, stream): returned blocks back to the free list
                         best fit over all chunks  |  else another chunk  |  else trim free chunks, then another chunk
                         the block takes the events left on its bytes; stream waits for them, the host does not
    release(after):      a ticket onto a deque; nothing else, for it runs in the middle of any line

Pinning is slow (a few GB/s) and holds locks of the driver, so it happens by the chunk. Rounding every request to a power of
two, or one list per size, can waste as much as it serves on activations of many sizes; best fit with immediate coalescing does
not (Knuth, see `free_list`). One free list spans all chunks: each is a region of its addresses, no block straddles two.
Free bytes carry events as the free blocks of RMM do: see `pending`, and Note [Host block] in `block`.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from heapq import nlargest
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from chameleon_mm.device import resolve_device
from chameleon_mm.device.protocols import Device, Event, Stream
from chameleon_mm.errors import HostMemoryExhausted, PoolStateError
from chameleon_mm.pinned.block import PinnedBlock, Ticket
from chameleon_mm.pinned.free_list import FreeList
from chameleon_mm.pinned.host_memory import available_host_bytes
from chameleon_mm.pinned.pending import PendingRanges
from chameleon_mm.pinned.stats import PoolStats
from chameleon_mm.units import GIB, format_size, parse_size

_log = logging.getLogger(__name__)

DEFAULT_CHUNK_BYTES = GIB
"""Large enough that blocks waste little at a chunk's end, small enough to pin in a fraction of a second and to give back."""


@dataclass(slots=True, eq=False)
class _Chunk:
    """One pinned region from the device."""

    base: int
    memory: Tensor
    pending: PendingRanges = field(default_factory=PendingRanges)

    @property
    def nbytes(self) -> int:
        return self.memory.numel()


class PinnedPool:
    """An allocator of pinned host memory, thread-safe, over chunks that it gets from `device` as it needs them.

    `max_bytes` (int bytes or "8GiB") is what it reserves at most; None takes half of what the machine and the process's control
    groups leave (`available_host_bytes`). `chunk_bytes` is the size of a chunk, None for 1 GiB; a chunk is smaller where the
    limit leaves less, larger for a request that is. `device` is a Device, or what names one; None is CUDA where there is one,
    else the simulator. Reserves nothing before the first block.

    Every block holds its pool. `close`, or leaving `with pool:`, gives the memory back; a pool that is dropped without it does
    so once its blocks are gone, except in a forked child and while the interpreter ends, where no device may be called.
    Raises `ValueError` and `TypeError` for sizes and devices that are none.
    """

    def __init__(
        self,
        max_bytes: int | str | None = "8GiB",
        device: Device | str | None = None,
        chunk_bytes: int | str | None = None,
    ) -> None:
        limit = _default_limit() if max_bytes is None else parse_size(max_bytes, what="max_bytes")
        chunk = DEFAULT_CHUNK_BYTES if chunk_bytes is None else parse_size(chunk_bytes, what="chunk_bytes")
        if chunk == 0:
            raise ValueError("chunk_bytes: expected more than 0 bytes, got 0; leave it out for 1 GiB")
        self._free_list = FreeList(0)
        self._limit = limit
        self._limit_grows = max_bytes is None
        self._chunk_bytes = self._free_list.round_up(chunk)
        self._device = resolve_device(device)
        self._lock = threading.Lock()
        self._chunks: dict[int, _Chunk] = {}  # by base; bases only grow, so the keys stay sorted
        self._bases: list[int] = []
        self._returned: deque[tuple[Ticket, tuple[Event, ...]]] = deque()
        self._live: dict[int, int] = {}  # serial -> bytes as asked for
        self._serial = 0
        self._peak_live_bytes = 0
        self._peak_reserved_bytes = 0
        self._closed = False
        # The finalizer must not hold the pool, only what it needs of it. Never at exit: the driver may be gone by then.
        weakref.finalize(self, _abandon, self._device, self._chunks, os.getpid()).atexit = False

    @property
    def device(self) -> Device:
        return self._device

    @property
    def limit_bytes(self) -> int:
        """What the pool reserves at most."""
        return self._limit

    def allocate(self, nbytes: int, stream: Stream | None = None) -> PinnedBlock:
        """A block of `nbytes`. Zero bytes are a block too, which takes nothing.

        `stream`, the one that will touch the block first, waits for the earlier users of its bytes; without one their events
        are left in `block.pending_events`. The host waits in one case only: instead of failing, where the limit leaves room
        only after an unused chunk is given back and the device is not done with it.
        Raises `HostMemoryExhausted` past the limit, or where the device can pin no more: the pool stays as it was and usable.
        """
        if isinstance(nbytes, bool) or not isinstance(nbytes, int):
            raise TypeError(f"allocate: expected an int of bytes, got {nbytes!r} ({type(nbytes).__name__})")
        if nbytes < 0:
            raise ValueError(f"allocate: expected 0 bytes or more, got {nbytes}")
        with self._lock:
            self._check_open("allocate")
            self._drain()
            block = self._carve(nbytes) if nbytes else self._nothing()
        # Outside of the lock, and with the block whole: should the device fail here, the block still returns itself.
        block.forget_complete()
        if stream is not None:
            block.wait_on(stream)
        return block

    def take_back(self, ticket: Ticket, events: tuple[Event, ...]) -> None:
        """For blocks alone: note that one was released. An append is atomic, and takes no lock that its own thread may hold."""
        self._returned.append((ticket, events))

    def stats(self) -> PoolStats:
        """What the pool holds now, every release up to here counted. Not for finalizers: it takes the pool's lock."""
        with self._lock:
            self._drain()
            return PoolStats(
                limit_bytes=self._limit,
                reserved_bytes=self._free_list.capacity,
                live_bytes=self._free_list.live_bytes,
                requested_bytes=sum(self._live.values()),
                peak_live_bytes=self._peak_live_bytes,
                peak_reserved_bytes=self._peak_reserved_bytes,
                largest_free_bytes=self._free_list.largest_free,
                num_live=len(self._live),
                num_chunks=len(self._chunks),
            )

    def trim(self) -> int:
        """Give back the chunks that hold no block and that no device work is left on; returns their bytes. Never waits."""
        with self._lock:
            self._drain()
            unused = [chunk for chunk in self._unused() if chunk.pending.sweep()]
            return sum(self._give_back(chunk) for chunk in unused)

    def close(self) -> None:
        """Give all memory back, once the device is done with it (the host waits). A second call does nothing.

        Raises `PoolStateError`, and changes nothing, while blocks are live.
        """
        with self._lock:
            self._drain()
            if self._live:
                some = ", ".join(format_size(nbytes) for nbytes in nlargest(3, self._live.values()))
                raise PoolStateError(
                    f"close: expected no live block, got {len(self._live)} of {format_size(sum(self._live.values()))} in all "
                    f"(the largest: {some}); release them, or drop what holds them, and close again"
                )
            for chunk in self._unused():
                self._give_back(chunk)
            self._closed = True

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
        return (
            f"<PinnedPool on {self._device.name}: {len(self._live) - len(self._returned)} live blocks, "
            f"{format_size(self._free_list.capacity)} of {format_size(self._limit)} reserved>"
        )

    # --- under the lock

    def _drain(self) -> None:
        """Returned blocks back to the free list, their events beside it."""
        while self._returned:
            (serial, offset), events = self._returned.popleft()
            del self._live[serial]
            if offset is None:
                continue
            size = self._free_list.free(offset)
            if events:
                self._chunk_of(offset).pending.add(offset, offset + size, events)

    def _carve(self, nbytes: int) -> PinnedBlock:
        offset = self._free_list.allocate(nbytes)
        if offset is None:
            self._reserve(self._free_list.round_up(nbytes), nbytes)
            offset = self._free_list.allocate(nbytes)
            assert offset is not None, "a chunk was reserved for this request"
        self._peak_live_bytes = max(self._peak_live_bytes, self._free_list.live_bytes)
        chunk = self._chunk_of(offset)
        events = chunk.pending.take(offset, offset + self._free_list.round_up(nbytes))
        return PinnedBlock(self, self._ticket(nbytes, offset), chunk.memory, offset - chunk.base, nbytes, events)

    def _nothing(self) -> PinnedBlock:
        return PinnedBlock(self, self._ticket(0, None), torch.empty(0, dtype=torch.uint8), 0, 0, ())

    def _ticket(self, nbytes: int, offset: int | None) -> Ticket:
        self._serial += 1
        self._live[self._serial] = nbytes
        return Ticket(self._serial, offset)

    def _reserve(self, size: int, nbytes: int) -> None:
        """Another chunk that holds `size` bytes, unused ones given up for it where the limit asks for that."""
        if self._limit_grows:
            # A virtual machine's memory may grow as it is used, so what was available at the start says too little.
            self._limit = max(self._limit, (self._free_list.capacity + available_host_bytes()) // 2)
        if self._room() < size:
            self._make_room(size, nbytes)
        wanted = min(max(self._chunk_bytes, size), self._room())
        # A chunk outlives the mode it is born in, and a tensor born under inference_mode cannot be written outside of it.
        with torch.inference_mode(mode=False):
            memory = self._device.alloc_pinned(wanted)
        base = self._free_list.add_region(wanted)
        self._chunks[base] = _Chunk(base, memory)
        self._bases.append(base)
        reserved = self._free_list.capacity
        self._peak_reserved_bytes = max(self._peak_reserved_bytes, reserved)
        _log.debug("pinned pool: reserved a chunk of %s, %s in all", format_size(wanted), format_size(reserved))

    def _make_room(self, size: int, nbytes: int) -> None:
        """Give up unused chunks until `size` bytes may be reserved; none where all of them would not do."""
        unused = self._unused()
        if self._room() + sum(chunk.nbytes for chunk in unused) < size:
            raise HostMemoryExhausted(self._refusal(size, nbytes))
        # Those that the device is done with first, then the large ones: as few as will do.
        unused.sort(key=lambda chunk: (not chunk.pending.sweep(), -chunk.nbytes))
        for chunk in unused:
            if self._room() >= size:
                break
            self._give_back(chunk)

    def _give_back(self, chunk: _Chunk) -> int:
        chunk.pending.synchronize()  # the last device access to the chunk -> its memory goes
        self._device.free_pinned(chunk.memory)
        nbytes = self._free_list.remove_region(chunk.base)
        del self._chunks[chunk.base]
        self._bases.remove(chunk.base)
        _log.debug("pinned pool: gave a chunk of %s back, %s left", format_size(nbytes), format_size(self._free_list.capacity))
        return nbytes

    def _unused(self) -> list[_Chunk]:
        return [chunk for base, chunk in self._chunks.items() if self._free_list.is_region_free(base)]

    def _room(self) -> int:
        """Bytes that may still be reserved: whole units of the free list."""
        left = self._limit - self._free_list.capacity
        return left - left % self._free_list.alignment

    def _chunk_of(self, offset: int) -> _Chunk:
        return self._chunks[self._bases[bisect_right(self._bases, offset) - 1]]

    def _refusal(self, size: int, nbytes: int) -> str:
        rounded = "" if size == nbytes else f" ({size} in units of {self._free_list.alignment})"
        largest = self._free_list.largest_free
        return (
            f"pinned pool: asked for {nbytes} bytes{rounded}, but the limit is {self._limit} bytes: "
            f"{self._free_list.live_bytes} live in {len(self._live)} blocks, largest free block {largest}, {self._room()} not "
            f"reserved yet; release blocks, ask for less at once, or make the pool with a larger max_bytes"
        )

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise PoolStateError(f"{what}: expected an open pool, got one that was closed; make another PinnedPool")


def _default_limit() -> int:
    """Half of the host memory that is left: the other half is for page cache, data loading and the model's own host side."""
    half = available_host_bytes() // 2
    if half == 0:
        raise ValueError('max_bytes: None is half of the available host memory, which could not be read; give a size, "8GiB"')
    return half


def _abandon(device: Device, chunks: dict[int, _Chunk], pid: int) -> None:
    """Give back what a pool still held when the last reference to it, and to its blocks, went."""
    if not chunks or os.getpid() != pid:  # a forked child: the memory is the parent's, and its device must not be called here
        return
    # Not just the events: a pool is abandoned where something went wrong, and a block may have been dropped without its own.
    device.synchronize()
    for chunk in chunks.values():
        device.free_pinned(chunk.memory)
    chunks.clear()
