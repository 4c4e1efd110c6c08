"""The pool as CuPy's allocator of pinned memory.

    cupy.cuda.set_pinned_memory_allocator(pool.as_cupy_allocator())
    array = cupyx.empty_pinned(shape, dtype)        # in a block of the pool, which returns with the last view
    cupy.asarray(x)                                 # staged through one

CuPy names no event when it drops memory. So the next owner of the bytes waits for all work of the device: Note [Dropped] in
`block`. `array.set(pinned)` and `array.get(out=pinned, blocking=False)` hold nothing while the copy runs. With CuPy's own pool,
memory dropped right after them is given out again at once; here its next owner waits for the copy, on any stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chameleon_mm.device.cuda import CupyPinning
from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.pinned.block import PinnedBlock

if TYPE_CHECKING:
    from chameleon_mm.pinned.pool import PinnedPool


class _Memory:
    """A block as CuPy's pointers take memory: `ptr`, 0 for no bytes, and `size` in bytes, as asked for."""

    __slots__ = ("block", "ptr", "size")

    def __init__(self, block: PinnedBlock) -> None:
        self.block = block
        self.size = block.nbytes
        self.ptr = block.buffer.data_ptr() if block.nbytes else 0


class CupyAllocator:
    """What `cupy.cuda.set_pinned_memory_allocator` takes: bytes -> `cupy.cuda.PinnedMemoryPointer`. Thread-safe; imports CuPy.

    Every pointer holds its block, and so the pool. Raises `DeviceUnavailable` where CuPy is not installed.
    """

    def __init__(self, pool: PinnedPool) -> None:
        self._pool = pool
        self._cupy = CupyPinning()

    def __call__(self, nbytes: int) -> Any:
        """A `PinnedMemoryPointer` to `nbytes`, which the host may write at once. Where memory is exhausted, raises the error
        by which CuPy knows to copy without pinning."""
        try:
            block = self._pool.allocate(nbytes)
        except HostMemoryExhausted as exhausted:
            raise self._cupy.out_of_memory() from exhausted
        block.synchronize()
        return self._cupy.pointer(_Memory(block))
