"""The pool as CuPy's allocator of pinned memory.

    cupy.cuda.set_pinned_memory_allocator(pool.as_cupy_allocator())
    array = cupyx.empty_pinned(shape, dtype)        # in a block of the pool, which returns with the last view
    cupy.asarray(x)                                 # staged through one

CuPy frees with no event. For its own transfers it holds the memory until they are complete. `array.set(pinned)` and
`array.get(out=pinned, blocking=False)` hold nothing: with CuPy's own pool, memory dropped right after them is given out again
while the copy runs. Here whoever gets it next waits for everything that was queued by then

    - on the device's blocking streams, which are the null stream and every `cupy.cuda.Stream()` (an event on the null stream
      comes after all of them), and
    - on CuPy's current stream of the thread that allocates.

What remains is a copy on a `Stream(non_blocking=True)` that is not current when the bytes are used again: as with CuPy's own
pool, keep the array until such a copy is done.
"""

from __future__ import annotations

from typing import Any

from chameleon_mm.device.cuda import CupyPinning
from chameleon_mm.device.protocols import Event
from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.pinned.malloc import MallocMemory, PinnedMalloc
from chameleon_mm.pinned.pool import PinnedPool


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
