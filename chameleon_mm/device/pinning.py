"""Page-locked host memory, made the fast way, with a way out when the driver refuses.

    memory = mmap(nbytes); madvise(huge pages, not for children); populate(memory) on several threads
    register(memory)                                # from here on the copy engines read and write it directly
    refused -> clear the error it left behind -> host_alloc(nbytes) -> refused -> HostMemoryExhausted with both reasons

Zeroing the pages is most of the work and parallel; registering takes the driver's locks and is not. The driver's calls come
in as functions: this file needs no GPU.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import resource
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.units import MIB, format_size

_log = logging.getLogger(__name__)

_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it
_HUGE_PAGE_BYTES = 2 * MIB
_MIN_SLICE_BYTES = 32 * MIB  # below this a thread costs more than it saves
_MAX_THREADS = 8  # memory bandwidth is used up by then

Madvise = Callable[[int, int, int], int]
"""`(address, nbytes, advice) -> errno`, 0 for done. Must let go of the GIL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinningCalls:
    """What pinning asks of a CUDA runtime. Each raises `RuntimeError` in the runtime's own words when it is refused."""

    register: Callable[[int, int], None] | None
    """Page-lock `(address, nbytes)`; None where registered memory is unsupported or has another address on the device."""

    unregister: Callable[[int], None]

    host_alloc: Callable[[int], Tensor]
    """A flat uint8 tensor of `nbytes` that the driver allocated page-locked."""

    host_free: Callable[[Tensor], None]

    clear_error: Callable[[], None]
    """Take back the error that a refused call leaves for whoever launches the next kernel. Never raises."""


class PageLocker:
    """Pins and unpins. What is pinned stays alive until `unpin`, even if the caller drops it: the driver holds its pages.

    `threads` populate a large allocation (None: one per usable CPU, at most 8). Thread-safe.
    """

    def __init__(self, calls: PinningCalls, *, threads: int | None = None, madvise: Madvise | None = None) -> None:
        self._calls = calls
        self._threads = threads or min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        self._madvise = madvise or _libc_madvise()
        self._lock = threading.RLock()  # a pool that the collector ends in here unpins on this very thread
        self._live: dict[int, tuple[Tensor, Callable[[], None]]] = {}
        self._stranded: list[Tensor] = []

    def pin(self, nbytes: int) -> Tensor:
        """A flat, page-aligned uint8 tensor of `nbytes` of page-locked memory. Its contents are not defined.

        Raises `ValueError` for fewer than 1 byte, `HostMemoryExhausted` when neither way of pinning works.
        """
        if nbytes < 1:
            raise ValueError(f"pinned memory: expected 1 byte or more, got {nbytes}")
        reasons = []
        for way in (self._registered, self._driver_allocated):
            try:
                memory, release = way(nbytes)
            except (RuntimeError, OSError, OverflowError, MemoryError) as error:
                # Its text alone: a log record that kept the error would keep its frames, and the pages that they hold.
                reasons.append(str(error))
                _log.warning("%s of pinned memory refused: %s", format_size(nbytes), reasons[-1])
                # Left behind, it would be raised by the next kernel launch of somebody who pinned nothing.
                self._calls.clear_error()
                continue
            with self._lock:
                self._live[memory.data_ptr()] = (memory, release)
            return memory
        raise HostMemoryExhausted(
            f"pinned memory: expected {format_size(nbytes)} ({nbytes} bytes), got: {'; then '.join(reasons)}. Host memory "
            f"available: {_available_text()}; memlock limit: {_memlock_text()}. Ask for less (host_budget, max_bytes, "
            f"chunk_bytes), free host memory, or raise the container's memory limit or `ulimit -l`."
        )

    def unpin(self, memory: Tensor) -> None:
        """Give back what `pin` returned, whole. Device work on it must be complete: nothing here waits.

        Raises `ValueError` for anything else, a part of it or a second time.
        """
        with self._lock:
            entry = self._live.get(memory.data_ptr())
            if entry is None or entry[0].numel() != memory.numel():
                raise ValueError(
                    f"free_pinned: expected memory that alloc_pinned returned, whole and not yet freed, got {memory.numel()} "
                    f"bytes at {memory.data_ptr():#x}: keep the tensor that alloc_pinned returned and free that, once"
                )
            del self._live[memory.data_ptr()]
        try:
            entry[1]()
        except RuntimeError as error:
            # Unmapping pages that the driver still holds would let their addresses come back registered: keep them instead.
            _log.warning(
                "%s of pinned memory could not be unpinned and stay mapped: %s", format_size(memory.numel()), str(error)
            )
            with self._lock:
                self._stranded.append(entry[0])
            self._calls.clear_error()

    def _registered(self, nbytes: int) -> tuple[Tensor, Callable[[], None]]:
        register, unregister = self._calls.register, self._calls.unregister
        if register is None:
            raise RuntimeError("registering host memory: not usable on this device")
        memory = populated_pages(nbytes, threads=self._threads, madvise=self._madvise)
        address = memory.data_ptr()
        register(address, nbytes)
        return memory, lambda: unregister(address)

    def _driver_allocated(self, nbytes: int) -> tuple[Tensor, Callable[[], None]]:
        memory, host_free = self._calls.host_alloc(nbytes), self._calls.host_free
        return memory, lambda: host_free(memory)


def populated_pages(nbytes: int, *, threads: int, madvise: Madvise) -> Tensor:
    """A flat uint8 tensor over fresh anonymous pages that are all there (zero), in huge pages where the kernel has them.

    The tensor and its views keep the mapping. Raises `OSError` when there is no such memory.
    """
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Advice only: a kernel without either still gives correct memory. DONTFORK because fork() copies pinned pages at once, so
    # that every data-loader worker would cost the whole pool; as with the driver's own, a child must not touch them.
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        with suppress(OSError):
            pages.madvise(advice)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    start = memory.data_ptr()
    slice_bytes = max(_MIN_SLICE_BYTES, -(-nbytes // (threads * _HUGE_PAGE_BYTES)) * _HUGE_PAGE_BYTES)
    slices = [(start + offset, min(slice_bytes, nbytes - offset)) for offset in range(0, nbytes, slice_bytes)]
    if len(slices) == 1:
        _populate(*slices[0], madvise)
    else:
        with ThreadPoolExecutor(len(slices), thread_name_prefix="chameleon-populate") as pool:
            for done in [pool.submit(_populate, address, size, madvise) for address, size in slices]:
                done.result()
    return memory


def _populate(address: int, nbytes: int, madvise: Madvise) -> None:
    """Make the pages exist: by advice, or, where the kernel knows no such advice, by writing them. Both let go of the GIL."""
    failure = madvise(address, nbytes, _MADV_POPULATE_WRITE)
    if failure in {errno.EINVAL, errno.ENOSYS, errno.EAGAIN}:
        ctypes.memset(address, 0, nbytes)
    elif failure:
        raise OSError(failure, f"populating {format_size(nbytes)} of host memory: {os.strerror(failure)}")


def _libc_madvise() -> Madvise:
    """madvise through ctypes, which lets go of the GIL; the mmap module's own does not."""
    call = ctypes.CDLL(None, use_errno=True).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    call.restype = ctypes.c_int

    def madvise(address: int, nbytes: int, advice: int) -> int:
        return ctypes.get_errno() if call(address, nbytes, advice) else 0

    return madvise


def _available_text() -> str:
    """What the kernel says is available; "unknown" where it does not say: an error message must not raise its own error."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return format_size(int(line.split()[1]) * 1024)
    return "unknown"


def _memlock_text() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "none" if soft == resource.RLIM_INFINITY else format_size(soft)
