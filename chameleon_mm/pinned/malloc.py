"""A pool in the shape of CuPy's: pointers, and memory that is freed with the last of them.

    memory = PinnedMalloc(pool)
    pointer = memory.malloc(nbytes)             # .ptr, .mem, .size(), int(pointer), pointer + 8
    pointer.mem.free()                          # ... or drop the pointers
    memory.free_all_blocks()                    # chunks that nobody uses go back to the system

    cupy.cuda.set_pinned_memory_allocator(pool.as_cupy_allocator())
    array = cupyx.empty_pinned(shape, dtype)        # in a block of the pool, which returns with the last view
    cupy.asarray(x)                                 # staged through one

What is freed here is freed with no event, as the shape has none. So whoever gets the bytes next waits for all that the
current stream has been given by then: see `LateEvent`. `malloc` itself makes the host wait, for its callers write at once.

For its own transfers CuPy holds the memory until they are complete. `array.set(pinned)` and
`array.get(out=pinned, blocking=False)` hold nothing: with CuPy's own pool, memory dropped right after them is given out again
while the copy runs. Here whoever gets it next waits for everything that was queued by then

    - on the device's blocking streams, which are the null stream and every `cupy.cuda.Stream()` (an event on the null stream
      comes after all of them), and
    - on CuPy's current stream of the thread that allocates.

What remains is a copy on a `Stream(non_blocking=True)` that is not current when the bytes are used again: as with CuPy's own
pool, keep the array until such a copy is done.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import deque
from typing import Any

from chameleon_mm.device.cuda import CupyPinning
from chameleon_mm.device.protocols import Event
from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.pinned.allocator import AllocatorWrapper
from chameleon_mm.pinned.block import PinnedBlock, Ticket
from chameleon_mm.pinned.pending import LateEvent
from chameleon_mm.pinned.pool import PinnedPool


class MallocMemory:
    """A block behind pointers. `ptr` and `size` (bytes, as asked for) are 0 for no bytes, and once freed."""

    __slots__ = ("__weakref__", "block", "ptr", "size")

    def __init__(self, block: PinnedBlock) -> None:
        self.block = block
        self.size = block.nbytes
        self.ptr = block.buffer.data_ptr() if block.nbytes else 0

    def free(self) -> None:
        """Free the memory. A second call does nothing. Raises `BlockInUseError` while views of the block live."""
        self.block.release()
        self.ptr = self.size = 0

    def __int__(self) -> int:
        return self.ptr


class MallocPointer:
    """An address `offset` bytes into `mem`, which it holds."""

    __slots__ = ("mem", "ptr")

    def __init__(self, mem: MallocMemory, offset: int) -> None:
        self.mem = mem
        self.ptr = mem.ptr + offset

    def size(self) -> int:
        """Bytes from here to the end."""
        return self.mem.size - (self.ptr - self.mem.ptr)

    def as_memoryview(self) -> memoryview:
        """The bytes from here to the end, writable. Holds the block."""
        return self.mem.block.as_memoryview()[self.ptr - self.mem.ptr :]

    def __int__(self) -> int:
        return self.ptr

    def __add__(self, offset: int) -> MallocPointer:
        return MallocPointer(self.mem, self.ptr - self.mem.ptr + offset)

    __radd__ = __add__

    def __sub__(self, offset: int) -> MallocPointer:
        return self + -offset


class PinnedMalloc(AllocatorWrapper):
    """`malloc` over a pool. Thread-safe."""

    def __init__(self, pool: PinnedPool) -> None:
        super().__init__(pool)
        self._pool = pool
        self._lock = threading.Lock()
        self._freed: deque[tuple[int, int]] = deque()  # byte ranges, not booked yet
        self._starts: list[int] = []  # of free blocks, sorted
        self._ends: dict[int, int] = {}

    def malloc(self, nbytes: int) -> Any:
        """A pointer to `nbytes`, which the host may write at once. Raises `HostMemoryExhausted`."""
        block = self.allocate(nbytes)
        block.synchronize()
        memory = MallocMemory(block)
        with self._lock:
            self._drain()
            self._forget(memory.ptr, memory.ptr + memory.size)
        return self._pointer(memory)

    def note_released(self, ticket: Ticket, events: tuple[Event, ...]) -> None:
        inner = self._take_inner(ticket, (*events, LateEvent(self._last_use)))
        if inner.nbytes:
            start = inner.buffer.data_ptr()
            self._freed.append((start, start + inner.nbytes))
        inner.release()

    def free_all_blocks(self) -> None:
        """Free the pool's unused chunks; those that the device is still at work on stay, as the host does not wait."""
        self._pool.trim()
        with self._lock:
            self._freed.clear()
            self._starts.clear()
            self._ends.clear()

    def n_free_blocks(self) -> int:
        """Number of blocks freed since the last `free_all_blocks` of whose bytes none was given out by `malloc` again."""
        with self._lock:
            self._drain()
            return len(self._starts)

    def _last_use(self) -> tuple[Event, ...]:
        """Events behind what may be at work on memory that was freed before now."""
        return (self.device.current_stream().record(),)

    def _pointer(self, memory: MallocMemory) -> Any:
        return MallocPointer(memory, 0)

    def _drain(self) -> None:
        while self._freed:
            start, end = self._freed.popleft()
            self._forget(start, end)
            insort(self._starts, start)
            self._ends[start] = end

    def _forget(self, start: int, end: int) -> None:
        """Forget the free blocks with a byte in [start, end): they are free no longer."""
        starts = self._starts
        first = bisect_left(starts, start)
        if first and self._ends[starts[first - 1]] > start:
            first -= 1
        last = bisect_left(starts, end, first)
        for gone in starts[first:last]:
            del self._ends[gone]
        del starts[first:last]


class CupyAllocator(PinnedMalloc):
    """What `cupy.cuda.set_pinned_memory_allocator` takes: bytes -> `cupy.cuda.PinnedMemoryPointer`. Imports CuPy.

    `free_all_blocks` and `n_free_blocks` are those of CuPy's pool. Every pointer holds the pool. Raises `DeviceUnavailable`
    where CuPy is not installed.
    """

    def __init__(self, pool: PinnedPool) -> None:
        super().__init__(pool)
        self._cupy = CupyPinning()

    def __call__(self, nbytes: int) -> Any:
        """A `PinnedMemoryPointer`. Where memory is exhausted, raises the error by which CuPy knows to copy without pinning."""
        try:
            return self.malloc(nbytes)
        except HostMemoryExhausted as exhausted:
            raise self._cupy.out_of_memory() from exhausted

    def _last_use(self) -> tuple[Event, ...]:
        return self._cupy.events(self.device)

    def _pointer(self, memory: MallocMemory) -> Any:
        return self._cupy.pointer(memory)
