"""Pinned host memory in blocks of any size, from a few large chunks.

    allocate(n, stream): released blocks back to the free list                          `ledger`
                         best fit over all chunks  |  else another chunk     `growth`
                         the block takes the events of its bytes; `stream` waits for them, the host does not
    limit_bytes = n:     unused chunks are freed; while live blocks hold more, new blocks are refused  `growth`
    release(after):      appends a ticket to a deque, and nothing else, because it may run at any time

Pinning is slow (a few GB/s) and holds locks of the driver, so whole chunks are pinned. For activations of many sizes, rounding
to powers of two or one list per size can waste as much as is used. Best fit with immediate coalescing does not (Knuth, see
`free_list`). One free list spans all chunks: each chunk is a region of its addresses, and no block is in two. Free bytes carry
events like the free blocks of RMM: see `chunks`, and Note [Host block] in `block`.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from heapq import nlargest
from math import inf, prod
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from chameleon_mm.device import resolve_device, warn_of_newer_torch
from chameleon_mm.device.cuda import cupy_cuda
from chameleon_mm.device.pinning import REGISTRATION_LIMIT_BYTES
from chameleon_mm.device.process import ThisProcess
from chameleon_mm.device.protocols import Device, Event, Stream
from chameleon_mm.errors import HostMemoryExhausted, PoolStateError, check_method, check_type
from chameleon_mm.pool.block import PageableBlock, PinnedBlock, Ticket, Uncopied, check_dtype, check_process, plain_shape
from chameleon_mm.pool.chunks import Chunks
from chameleon_mm.pool.growth import Growth
from chameleon_mm.pool.host_memory import available_host_bytes, pinnable_bytes
from chameleon_mm.pool.ledger import Ledger, PoolStats
from chameleon_mm.units import format_size, is_auto, parse_budget, parse_size

_log = logging.getLogger(__name__)

FRESH_S = 0.01
"""Seconds for which a reading of the available host memory is valid, less what was allocated since. Readings then cost at most
1/20 of a processor. Meanwhile other processes, writing at about 10 GB/s, can take 100 MB unnoticed."""

_ERROR_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation


def close_at_exit(close: Callable[[], None], error: BaseException | None, what: str) -> None:
    """Call `close` at the end of a `with` block. After an `error`, live blocks cause only a warning that begins with `what`:
    the error's traceback probably holds them, and the caller must see the error. They are returned later."""
    try:
        close()
    except PoolStateError as still_live:
        if error is None:
            raise
        _log.warning("chameleon_mm: %s: %s", what, still_live)


class PinnedPool(Uncopied):
    """Thread-safe allocator of pinned host memory. It gets chunks from `device` as needed.

    `max_bytes`: limit of reserved memory, including chunks being pinned; int bytes or "8GiB". "auto" or None: half of the
    memory available to the machine and the process's control groups, divided among the machine's ranks (`pinnable_bytes`).
    `chunk_bytes`: size of a chunk; None: grows from 16 MiB to 1 GiB with the reserved bytes, see `chunks`. A chunk is smaller
    if the limit leaves less, and larger for a larger request. `device`: a Device, or its name; None: CUDA if available, else
    the simulator. Reserves nothing before the first block.

    Every block holds its pool. `close`, or the end of `with pool:`, frees the memory. A pool dropped without `close` frees it
    once its blocks are gone, but not in a forked child or at the interpreter's end, where no device may be called. A forked
    child cannot use the pool: it does not inherit pinned memory, so blocks there have addresses without memory. Methods that
    allocate, free or return views raise `RuntimeError` there. Raises `ValueError` and `TypeError` for invalid sizes and
    devices. A pool cannot be copied or pickled.
    """

    def __init__(
        self, max_bytes: int | str | None = "8GiB", device: Device | str | None = None, chunk_bytes: int | str | None = None
    ) -> None:
        if max_bytes is None or is_auto(max_bytes):
            limit = parse_budget("50%", pinnable_bytes, what="max_bytes")
        else:
            limit = parse_size(max_bytes, what="max_bytes")
        chunk = None if chunk_bytes is None else parse_size(chunk_bytes, what="chunk_bytes")
        if chunk is not None and not 0 < chunk < REGISTRATION_LIMIT_BYTES:
            raise ValueError(
                f"chunk_bytes: expected more than 0 bytes and less than {format_size(REGISTRATION_LIMIT_BYTES)}, where the "
                f"driver refuses to register, got {chunk}; leave it out for a size that grows with the pool"
            )
        warn_of_newer_torch()
        self.device = resolve_device(device)
        self._chunks = Chunks(self.device, chunk)
        self._ledger = Ledger(self._chunks)
        self._returned = self._ledger.returned
        self._growth = Growth(self._ledger, limit)
        self._available_bytes, self._read_at = 0, -inf
        self.pid = ThisProcess.pid
        # The finalizer must not hold the pool, only the parts that it needs. Not at exit, when the driver may be gone.
        weakref.finalize(self, self._ledger.free_all, self.device, self.pid).atexit = False

    @property
    def limit_bytes(self) -> int:
        """Maximum bytes that the pool reserves. Set it, to bytes or text such as "4GiB", to shrink or grow the pool.

        Chunks without blocks are freed at once until the limit is met. The host waits if the device still uses one of them.
        Chunks with live blocks stay. While they exceed the limit, `allocate` refuses. They are freed after their last blocks
        are released, at the next `allocate` or `take_back`. Setting it raises `TypeError` and `ValueError` for an invalid size,
        and `PoolStateError` for a closed pool.
        """
        return self._growth.limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, nbytes: int | str) -> None:
        check_process("limit_bytes", self.pid)
        self._growth.set_limit(parse_size(nbytes, what="limit_bytes"))

    # --- blocks

    def allocate(self, nbytes: int | str, stream: Stream | None = None) -> PinnedBlock:
        """Return a block of `nbytes` (int bytes or "1MiB"). A block of zero bytes is valid and takes no memory.

        `stream`, the first to touch the block, waits for the earlier users of its bytes. Without a stream, their events stay in
        `block.pending_events`. The host waits for the device in one case, instead of failing: the limit leaves room only after
        an unused chunk is freed, and the device still uses that chunk. Raises `TypeError` and `ValueError` for an invalid size
        or stream. Raises `HostMemoryExhausted` above the limit, or if the device can pin no more. The pool stays usable, and
        the same request may succeed later. `allocate_pageable` gives pageable memory.
        """
        if type(nbytes) is not int or nbytes < 0:
            nbytes = parse_size(nbytes, what="allocate")
        if stream is not None and not hasattr(type(stream), "wait"):  # asked before the call: hooks allocate
            check_method("allocate", stream, "wait", "a stream of the pool's device, or None", "pass device.current_stream()")
        if ThisProcess.pid != self.pid:
            check_process("allocate", self.pid)
        ledger = self._ledger
        with ledger.lock:
            if ledger.closed:
                ledger.check_open("allocate")
            if ledger.returned:
                ledger.drain()
            block = ledger.allocate(self, nbytes)
        if block is None:
            block = self._growth.allocate_or_pin(self, nbytes)
        # Outside of the lock, and with a complete block: if the device fails here, the block is still released.
        if block.pending_events:
            block.forget_complete()
            if stream is not None and block.pending_events:
                block.wait_on(stream)
        return block

    def allocate_pageable(self, nbytes: int | str) -> PageableBlock:
        """Return a block of `nbytes` of pageable memory, for when no more can be pinned. It does not count towards `max_bytes`.
        Its limit is the memory available to the machine and the process's control groups.

        There is no earlier user to wait for. The memory is kept until the event of its release is complete. Raises
        `HostMemoryExhausted`.
        """
        nbytes = parse_size(nbytes, what="allocate")
        check_process("allocate_pageable", self.pid)
        if nbytes > self._available_bytes or time.monotonic() - self._read_at > FRESH_S:
            self._available_bytes, self._read_at = available_host_bytes(), time.monotonic()
        available = self._available_bytes
        if 0 < available < nbytes:  # 0: unknown, so only the device decides
            raise HostMemoryExhausted(
                f"pageable memory: asked for {nbytes} bytes, but {format_size(available)} of host memory are available; "
                f"release blocks, ask for less, or give the process more memory"
            )
        self._available_bytes = max(0, available - nbytes)
        # The block outlives the current mode, and a tensor made under inference_mode cannot be written outside of it.
        with torch.inference_mode(mode=False):
            memory = self.device.alloc_pageable(nbytes)
        ledger = self._ledger
        with ledger.lock:
            ledger.check_open("allocate_pageable")
            ledger.drain()
            return PageableBlock(self, (ledger.add_pageable(memory), None), memory, 0, nbytes, ())

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor in its own block, which is released when the tensor and its views are gone.

        The tensor may be dropped during a copy to or from it, on any stream. The next owner of its bytes then waits for all
        work of all streams. If the last use is known, `allocate` with `release(after=event)` waits for less. Raises the errors
        of `allocate`, `ValueError` for sizes below 0, and `TypeError` for an invalid shape or dtype.
        """
        sizes = plain_shape("empty", shape)
        check_dtype("empty", dtype)
        return self.allocate(prod(sizes) * dtype.itemsize).tensor(sizes, dtype)

    def as_cupy_allocator(self) -> Callable[[int], Any]:
        """Return this pool as an allocator for `cupy.cuda.set_pinned_memory_allocator`: bytes -> `PinnedMemoryPointer`. The
        host may write there at once. If memory is exhausted, it raises the error after which CuPy copies without pinning.
        Thread-safe. Each pointer holds its block, and so the pool. Raises `DeviceUnavailable` if CuPy is not installed.

        CuPy passes no event when it drops memory. So the next owner of the bytes waits for all work of the device: Note
        [Dropped] in `block`. `array.set(pinned)` and `array.get(out=pinned, blocking=False)` do not hold the memory during the
        copy. CuPy's own pool reuses memory dropped right after them at once; here its next owner waits.
        """
        cupy = cupy_cuda()

        def allocate(nbytes: int) -> Any:
            try:
                block = self.allocate(nbytes)
            except HostMemoryExhausted as exhausted:
                raise cupy.runtime.CUDARuntimeError(_ERROR_MEMORY_ALLOCATION) from exhausted
            block.synchronize()
            memory = SimpleNamespace(block=block, size=block.nbytes, ptr=block.buffer.data_ptr() if block.nbytes else 0)
            return cupy.PinnedMemoryPointer(memory, 0)  # the pointer keeps the object, and so the block

        return allocate

    def take_back(self) -> None:
        """Return released blocks to the free list, and free chunks above a lowered limit. The next allocation then need not."""
        ledger = self._ledger
        with ledger.lock:
            ledger.drain()
        if ledger.shrinking:
            self._growth.shrink()

    def note_released(self, ticket: Ticket, events: tuple[Event, ...]) -> None:
        """Record the release of a block. Called only by blocks. An append is atomic, and takes no lock."""
        self._returned.append((ticket, events))

    # --- memory

    def stats(self) -> PoolStats:
        """Return present statistics of the pool, including all releases. Not for finalizers: it takes the pool's lock."""
        with self._ledger.lock:
            return self._ledger.stats(self._growth.limit_bytes)

    def recent_peak_bytes(self) -> int:
        """Return the maximum of `PoolStats.live_bytes` since the last call."""
        with self._ledger.lock:
            self._ledger.drain()
            return self._chunks.free_list.recent_peak()

    def close(self) -> None:
        """Free all memory, after the device's work on it (the host waits). A second call does nothing.

        In a forked child it does nothing, because the parent owns the memory. Raises `PoolStateError`, and changes nothing,
        while blocks are live.
        """
        if ThisProcess.pid != self.pid:  # checked first: another thread may have held the lock at the fork
            return
        ledger = self._ledger
        with ledger.lock:
            ledger.drain()
            live = [*ledger.live.values(), *(memory.numel() for memory in ledger.pageable.values())]
            if live:
                some = ", ".join(format_size(nbytes) for nbytes in nlargest(3, live))
                raise PoolStateError(
                    f"close: expected no live block, got {len(live)} of {format_size(sum(live))} in all "
                    f"(the largest: {some}); release them, or drop what holds them, and close again"
                )
            ledger.closed = True
            ending = [event for _, events in ledger.ending for event in events]
        self._growth.close()
        for event in ending:
            event.synchronize()  # the last device access to pageable memory -> its free
        with ledger.lock:
            ledger.drop_ended()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        close_at_exit(self.close, error, "pinned pool left open")


def host_block(pool: PinnedPool, nbytes: int, stream: Stream | None = None) -> PinnedBlock:
    """Return a block as `pool.allocate` does, or a pageable block if no more can be pinned. Raises `HostMemoryExhausted` if the
    host has neither."""
    try:
        return pool.allocate(nbytes, stream)
    except HostMemoryExhausted:
        return pool.allocate_pageable(nbytes)


def pool_for(device: Device | str | None, pool: PinnedPool | None, *, max_bytes: int | None = None) -> PinnedPool:
    """Return `pool`, or a new pool of `max_bytes` on `device`, as in `PinnedPool`. With a pool, device None means the pool's.

    Raises `TypeError` if `pool` is not a pool, `ValueError` if it belongs to another device.
    """
    if pool is None:
        return PinnedPool(max_bytes=max_bytes, device=device)
    check_type("pool", pool, PinnedPool, "a PinnedPool or None", 'pass PinnedPool("8GiB"), or host_budget="8GiB" to a session')
    wanted = pool.device if device is None else resolve_device(device)
    if wanted is not pool.device:
        raise ValueError(f"pool: expected one of {wanted.name}, got one of {pool.device.name}; pass device=pool.device")
    return pool
