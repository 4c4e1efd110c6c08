"""Other people's pinned memory: CuPy's pool, torch's host allocator, and the driver's own calls, one by one.

    pool = CupyPool()                            # CuPy's pool over an allocator that counts: needs CuPy, no driver
    pool = TorchHostAllocator(scale)             # torch's, with real memory
    host_alloc(n) | torch_pinned(n) | registered(n, threads, small_pages=...)  -> Pinned: seconds by phase, and how to release

Uses torch.cuda and CuPy directly: see __init__.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from chameleon_mm.device.pinning import Madvise, populated_pages

_PORTABLE = 1  # cudaHostAllocPortable = cudaHostRegisterPortable
_PAGE_BYTES = 4096


@dataclass(slots=True, eq=False)
class _Counted:
    """What CuPy's pool keeps of its memory: an address that nobody touches, and a size."""

    ptr: int
    size: int


class CupyPool:
    """`cupy.cuda.PinnedMemoryPool`, with addresses in place of memory. Raises `ImportError` where there is no CuPy."""

    def __init__(self) -> None:
        from cupy.cuda import PinnedMemoryPointer, PinnedMemoryPool

        self._addresses = accumulate(iter(lambda: _PAGE_BYTES, 0))
        self._pointer = PinnedMemoryPointer
        self._pool = PinnedMemoryPool(self._reserve)
        self.malloc: Callable[[int], Any] = self._pool.malloc
        self.reserved_bytes = 0
        self.locked_bytes = 0

    def begin_step(self) -> None:
        """Steps are nothing to it."""

    def allocate(self, nbytes: int) -> Any:
        block = self.malloc(nbytes)
        self.locked_bytes += block.mem.size
        return block

    def release(self, block: Any) -> None:
        self.locked_bytes -= block.mem.size
        self.free(block)

    @staticmethod
    def free(block: Any) -> None:
        """Back to the pool at once: no event is asked for."""
        block.mem.free()

    def _reserve(self, nbytes: int) -> Any:
        self.reserved_bytes += nbytes
        return self._pointer(_Counted(next(self._addresses), nbytes), 0)


class TorchHostAllocator:
    """torch's pinned allocator, at `1 / scale` of every size: rounding up to a power of two is the same at any scale."""

    locked_bytes = None
    """Its statistics count what it keeps for reuse among what is in use."""

    def __init__(self, scale: int) -> None:
        self._scale = scale
        self._before = _torch_host_bytes()

    def begin_step(self) -> None:
        """Steps are nothing to it."""

    def allocate(self, nbytes: int) -> Tensor:
        return torch_empty_pinned(max(1, nbytes // self._scale))

    def release(self, block: Tensor) -> None:
        """The caller's reference was the last."""

    @property
    def reserved_bytes(self) -> int:
        """At full scale. It gives nothing back by itself, so what it holds now is the most that it held."""
        return (_torch_host_bytes() - self._before) * self._scale


def has_cupy() -> bool:
    """Whether CuPy is installed."""
    return find_spec("cupy") is not None


def torch_empty_pinned(nbytes: int) -> Tensor:
    """Memory of torch's own host allocator."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def empty_torch_host_cache() -> None:
    """Give back what torch's host allocator keeps unused."""
    torch._C._host_emptyCache()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """How long pinning took, and how to undo it."""

    populate_s: float
    lock_s: float
    release: Callable[[], object]


def host_alloc(nbytes: int) -> Pinned:
    """cudaHostAlloc: the driver allocates, zeroes and locks."""
    from cupy.cuda import runtime

    start = time.perf_counter()
    address = runtime.hostAlloc(nbytes, _PORTABLE)
    return Pinned(populate_s=0.0, lock_s=time.perf_counter() - start, release=partial(runtime.freeHost, address))


def torch_pinned(nbytes: int) -> Pinned:
    """torch's own way, from an empty cache."""
    empty_torch_host_cache()
    start = time.perf_counter()
    held = [torch_empty_pinned(nbytes)]
    took = time.perf_counter() - start

    def release() -> None:
        held.clear()
        empty_torch_host_cache()

    return Pinned(populate_s=0.0, lock_s=took, release=release)


def registered(nbytes: int, threads: int, madvise: Madvise) -> Pinned:
    """Pages populated by `threads`, then cudaHostRegister."""
    from cupy.cuda import runtime

    start = time.perf_counter()
    memory = populated_pages(nbytes, threads=threads, madvise=madvise)
    populated = time.perf_counter()
    runtime.hostRegister(memory.data_ptr(), nbytes, _PORTABLE)
    locked = time.perf_counter()

    def release(memory: Tensor = memory) -> None:  # holds the pages until the driver has let go of them
        runtime.hostUnregister(memory.data_ptr())

    return Pinned(populate_s=populated - start, lock_s=locked - populated, release=release)


def _torch_host_bytes() -> int:
    stats = torch.cuda.host_memory_stats()
    # Older releases call "reserved" what newer ones call "allocated": all that the allocator owns, in use or kept.
    return int(stats.get("reserved_bytes.current", stats.get("allocated_bytes.current", 0)))
