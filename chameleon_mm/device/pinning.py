"""Page-locked host memory: the fast way to allocate it, and a fallback if the driver refuses.

    memory = mmap(nbytes); madvise(huge pages, not for children); populate(memory) on threads near the GPU
    register(memory)                                # from here on the copy engines access it directly
    refused -> clear the error -> host_alloc(nbytes) -> refused -> HostMemoryExhausted with both reasons
    memory = pageable_memory(nbytes)                # ordinary memory, for when no more can be pinned

Zeroing the pages is most of the work and runs in parallel. Registering takes the driver's locks and is serial. The
driver's calls are parameters, so this file needs no GPU.

Note [Mapped while registered]: pages are unmapped when the last tensor over them is freed. They stay mapped in three cases:
while the driver holds them (a new mapping there would already be registered); in a forked child (they are absent there, and
other memory may be in their place); at interpreter shutdown (the driver may be gone, and the system frees them anyway).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import resource
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Container
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from chameleon_mm.errors import DeviceUnavailable, HostMemoryExhausted
from chameleon_mm.units import GIB, MIB, format_size, round_up

# --- Host memory near the GPU: fresh pages come from the GPU's NUMA node.
#
# Copies to and from the other socket's memory cross the link between the sockets: a wrong node costs about 30 %. The kernel
# takes a page from the node of the CPU that touches it first, so the threads that populate run on the GPU's CPUs. A full node,
# or a CPU set that excludes those CPUs, gives memory of another node.

_log = logging.getLogger(__name__)


def near_cpus(pci_id: str | None, root: Path = Path("/")) -> set[int]:
    """Return the CPUs next to the device at `pci_id` ("0000:06:00.0"); empty if the kernel reports none. Never raises.

    `root` is the parent directory of `sys`.
    """
    return numbers_in(kernel_text(root / f"sys/bus/pci/devices/{pci_id}/local_cpulist")) if pci_id else set()


def _run_on(cpus: Collection[int]) -> None:
    """Run this thread on `cpus` from now on, as far as the kernel allows."""
    with suppress(OSError):
        if cpus:
            os.sched_setaffinity(0, cpus)


def numbers_in(text: str) -> set[int]:
    """Set of the numbers in a text such as "0-2,8"; empty for any other text."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            return set()
        found |= set(range(int(first), int(last or first) + 1))
    return found


def kernel_text(path: Path) -> str:
    """Stripped text of one of the kernel's files; empty if it is absent or not readable."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # absent or not readable
        return ""


_PAGE_BYTES = 4096

REGISTRATION_LIMIT_BYTES = 512 * GIB
"""Size in bytes at and above which one registration fails in the driver."""

_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it
_HUGE_PAGE_BYTES = 2 * MIB
_MIN_SLICE_BYTES = 32 * MIB  # below this a thread costs more than it saves
_MAX_THREADS = 8  # more do not help: memory bandwidth is saturated

Madvise = Callable[[int, int, int], int]
"""`(address, nbytes, advice) -> errno`, 0 on success. Must release the GIL."""


def pageable_memory(nbytes: int) -> Tensor:
    """Return a flat, page-aligned uint8 tensor of `nbytes` with undefined contents. No torch operator runs.

    Raises `ValueError` for a negative size, `HostMemoryExhausted` if the machine has too little memory.
    """
    if nbytes < 0:
        raise ValueError(f"host memory: expected 0 bytes or more, got {nbytes}")
    try:
        raw = np.empty(nbytes + _PAGE_BYTES, dtype=np.uint8)
    except MemoryError as error:
        raise HostMemoryExhausted(
            f"host memory: asked for {format_size(nbytes)}, which this machine does not give ({error}); ask for less"
        ) from error
    start = -raw.ctypes.data % _PAGE_BYTES
    with torch._C._DisableTorchDispatch():  # else the simulator's active `compute()` counts it as device memory
        return torch.from_numpy(raw[start : start + nbytes])


class PinningCalls(NamedTuple):
    """CUDA runtime calls that pinning needs. Each raises `RuntimeError` with the runtime's message when it is refused."""

    register: Callable[[int, int], None]
    """Page-lock `(address, nbytes)`."""
    unregister: Callable[[int], None]
    host_alloc: Callable[[int], Tensor]
    """Return a flat uint8 tensor of `nbytes` of page-locked memory allocated by the driver, freed with its last reference."""
    clear_error: Callable[[], None]
    """Clear the error that a refused call leaves: else the next kernel launch reports it. Never raises."""


class PageLocker:
    """Pins and unpins host memory. Pinned memory lives until `unpin`, even if the caller drops it: the driver holds its pages.

    Threads populate a large allocation, one per usable CPU and at most 8, on `cpus` if any are given. Driver calls run inside a
    `scope()`. If the locker is dropped, memory that was not unpinned stays pinned until the process ends. Thread-safe. A forked
    child cannot pin or unpin.
    """

    def __init__(
        self,
        calls: PinningCalls,
        *,
        madvise: Madvise | None = None,
        cpus: Collection[int] = frozenset(),
        scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._calls = calls
        self._threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        self._madvise = madvise or _libc_madvise()
        self._cpus = cpus
        self._scope = scope
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a pool collected in here unpins on this same thread
        self._warned = Counter[str]()
        self._live: dict[int, Tensor] = {}  # by address
        self._registered_at: set[int] = set()  # addresses; includes freed ones that the driver refused to unregister

    def pin(self, nbytes: int) -> Tensor:
        """Return a flat, page-aligned uint8 tensor of `nbytes` of page-locked memory with undefined contents.

        It is one registration, and no other memory shares its pages: a copy inside it never spans two registrations.
        Raises `ValueError` for fewer than 1 byte, `HostMemoryExhausted` if neither way of pinning works, and
        `DeviceUnavailable` in a forked child.
        """
        if nbytes < 1:
            raise ValueError(f"pinned memory: expected 1 byte or more, got {nbytes}")
        if os.getpid() != self._pid:
            raise DeviceUnavailable(
                f"pinned memory: expected process {self._pid}, where the device was made, got its forked child {os.getpid()}, "
                f"which cannot use CUDA: start it by the spawn or forkserver method, and make a device there"
            )
        reasons = []
        with self._scope():
            for way in (self._registered, self._calls.host_alloc):
                try:
                    memory = way(nbytes)
                except (RuntimeError, OSError, OverflowError, MemoryError) as error:
                    # Only its text: a log record with the error would keep its frames and their pages alive.
                    reasons.append(str(error))
                    refused = "chameleon_mm: %s of pinned memory refused: %s (%d of its kind)"
                    self._warn(_log, refused, format_size(nbytes), reasons[-1])
                    # Else the next kernel launch of unrelated code would raise it.
                    self._calls.clear_error()
                    continue
                with self._lock:
                    self._live[memory.data_ptr()] = memory
                return memory
        memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        memlock_text = "none" if memlock == resource.RLIM_INFINITY else format_size(memlock)
        raise HostMemoryExhausted(
            f"pinned memory: expected {format_size(nbytes)} ({nbytes} bytes), got: {'; then '.join(reasons)}. Host memory "
            f"available: {_available_text()}; memlock limit: {memlock_text}. Ask for less (host_budget, max_bytes, "
            f"chunk_bytes), free host memory, or raise the container's memory limit or `ulimit -l`."
        )

    def unpin(self, memory: Tensor) -> None:
        """Free a whole tensor that `pin` returned. Device work on it must be complete: this does not wait."""
        if os.getpid() != self._pid:  # before taking the lock: another thread may have held it at the fork
            return
        address = memory.data_ptr()
        with self._lock:
            pinned = self._live.get(address)
            if pinned is None or pinned.numel() != memory.numel():
                raise ValueError(
                    f"free_pinned: expected memory that alloc_pinned returned, whole and not yet freed, got {memory.numel()} "
                    f"bytes at {address:#x}: keep the tensor that alloc_pinned returned and free that, once"
                )
            del self._live[address]
        if address not in self._registered_at:
            return
        with self._scope():
            try:
                self._calls.unregister(address)
                self._registered_at.remove(address)  # not reached if the driver refuses: see Note [Mapped while registered]
            except RuntimeError as error:
                unmapped = "chameleon_mm: %s of pinned memory could not be unpinned and stay mapped: %s (%d of its kind)"
                self._warn(_log, unmapped, format_size(memory.numel()), str(error))
                self._calls.clear_error()

    def _warn(self, log: logging.Logger, message: str, *values: object) -> None:
        """Log a warning if it is the first with this `message`, else at INFO. `message` ends with a count of its kind."""
        self._warned[message] += 1
        log.log(logging.WARNING if self._warned[message] == 1 else logging.INFO, message, *values, self._warned[message])

    def _registered(self, nbytes: int) -> Tensor:
        held = self._registered_at
        memory = populated_pages(nbytes, threads=self._threads, madvise=self._madvise, cpus=self._cpus, held=held)
        address = memory.data_ptr()
        # Before the driver call: else an interrupt right after the call would unmap pages that the driver holds.
        held.add(address)
        try:
            self._calls.register(address, nbytes)
        except RuntimeError:
            held.remove(address)
            raise
        return memory


def populated_pages(
    nbytes: int,
    *,
    threads: int,
    madvise: Madvise,
    cpus: Collection[int] = frozenset(),
    held: Container[int] = frozenset(),
) -> Tensor:
    """Return a flat uint8 tensor over fresh, populated, zeroed pages: huge pages if the kernel has them.

    The tensor and its views keep the mapping. It also stays if the address is in `held` when the last view is freed. Raises
    `OSError` if there is not enough memory.
    """
    memory = _mapped(nbytes, held)
    start = memory.data_ptr()
    # Advice: a kernel without it still gives correct memory. DONTFORK, because fork() copies pinned pages at once: every data-
    # loader worker would cost the whole pool. A child must not touch these pages, nor those that the driver allocates.
    advise = _libc_madvise()
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        advise(start, nbytes, advice)
    slice_bytes = max(_MIN_SLICE_BYTES, round_up(-(-nbytes // threads), _HUGE_PAGE_BYTES))
    offsets = range(0, nbytes, slice_bytes)
    with ThreadPoolExecutor(len(offsets), "chameleon-populate", _run_on, (cpus,)) as pool:
        for done in [pool.submit(_populate, start + at, min(slice_bytes, nbytes - at), madvise) for at in offsets]:
            done.result()
    return memory


def _mapped(nbytes: int, held: Container[int]) -> Tensor:
    """Return a flat uint8 tensor over a new mapping. The mmap module would not do: it unmaps in a forked child too. There the
    range is a hole, in which the child may have mapped other memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.munmap.restype = ctypes.c_void_p, ctypes.c_int
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if address == _MAP_FAILED:
        failure = ctypes.get_errno()
        raise OSError(failure, f"mapping {format_size(nbytes)} of host memory: {os.strerror(failure)}")
    pages = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(pages, _unmap, libc.munmap, address, nbytes, held, os.getpid()).atexit = False
    return torch.frombuffer(pages, dtype=torch.uint8)


def _unmap(munmap: Callable[[int, int], int], address: int, nbytes: int, held: Container[int], pid: int) -> None:
    """Unmap the pages after the last tensor over them is freed. See Note [Mapped while registered]."""
    if os.getpid() == pid and address not in held:
        munmap(address, nbytes)


def _populate(address: int, nbytes: int, madvise: Madvise) -> None:
    """Populate the pages by advice, or by writing them if the kernel lacks that advice. Both release the GIL."""
    failure = madvise(address, nbytes, _MADV_POPULATE_WRITE)
    if failure in {errno.EINVAL, errno.ENOSYS, errno.EAGAIN}:
        ctypes.memset(address, 0, nbytes)
    elif failure:
        raise OSError(failure, f"populating {format_size(nbytes)} of host memory: {os.strerror(failure)}")


def _libc_madvise() -> Madvise:
    """Return madvise through ctypes, which releases the GIL; the mmap module's own does not."""
    call = ctypes.CDLL(None, use_errno=True).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    call.restype = ctypes.c_int

    def madvise(address: int, nbytes: int, advice: int) -> int:
        return ctypes.get_errno() if call(address, nbytes, advice) else 0

    return madvise


def _available_text() -> str:
    """Text of the available bytes, or "unknown" if they cannot be read: building an error message must not raise."""
    import psutil  # here, so that importing the library does not import it

    with suppress(psutil.Error, OSError, RuntimeError):
        return format_size(int(psutil.virtual_memory().available))
    return "unknown"
