"""Page-locked host memory: the fast way to allocate it, and a fallback if the driver refuses.

    memory = mmap(nbytes); madvise(huge pages, not for children); prefer_pages(memory); populate(memory) on several threads
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
import platform
import resource
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chameleon_mm.errors import DeviceUnavailable, HostMemoryExhausted
from chameleon_mm.units import GIB, MIB, format_size

# --- Host memory near the GPU: fresh pages come from the GPU's NUMA node.
#
# Copies to and from the other socket's memory cross the link between the sockets and run slower. mbind has three advantages
# over set_mempolicy. Its policy belongs to the range, not to a thread, so all populating threads obey it. There is no policy of
# the caller to restore. The kernel's NUMA balancing does not move pages of a range that has a policy.

_log = logging.getLogger(__name__)

_MPOL_PREFERRED = 1
"""Policy that prefers a node. If the node is full, slower memory of other nodes is used. MPOL_BIND would instead end the
process as out of memory."""

_MBIND_NUMBERS = {"x86_64": 237, "aarch64": 235}
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)

Mbind = Callable[[int, int, int, "ctypes.Array[ctypes.c_ulong]", int, int], int]
"""The system call: `(address, nbytes, mode, node mask, bits of the mask + 1, flags) -> errno`, 0 on success."""


class PreferredNode:
    """Asks the kernel to take the pages of an untouched range from `node`. Thread-safe.

    It never raises. After a refusal the memory is still correct, but from the node of the thread that touches it first. The
    first refusal is logged. `mbind` is the system call.
    """

    def __init__(self, node: int, mbind: Mbind | None = None) -> None:
        self.node = node
        self._mask = (ctypes.c_ulong * (node // _WORD_BITS + 1))()
        self._mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
        self._mbind = mbind or _linux_mbind()
        self._refused = False

    def __call__(self, address: int, nbytes: int) -> None:
        """Set the preference for `nbytes` at the page-aligned `address`."""
        # Pass the bits of the mask plus 1: the kernel subtracts 1.
        failure = self._mbind(address, nbytes, _MPOL_PREFERRED, self._mask, len(self._mask) * _WORD_BITS + 1, 0)
        if failure and not self._refused:
            self._refused = True  # later refusals would repeat the message
            _log.warning(
                "chameleon_mm: %s of pinned memory: expected pages of NUMA node %d, near the GPU, got %s from mbind. The "
                "memory is good, copies may be slower: give the container CAP_SYS_NICE, or start the process by "
                "`numactl --cpunodebind=%d`",
                format_size(nbytes),
                self.node,
                os.strerror(failure),
                self.node,
            )


def near_node(pci_id: str | None, root: Path = Path("/")) -> int | None:
    """Return the NUMA node of the device at `pci_id` ("0000:06:00.0"), or None if there is no use in preferring it.

    None if the kernel reports no node for the device (-1, as in many virtual machines), or if the process may use only one
    node. Also None, with a line in the log, if the node has no memory or is outside the process's cpuset: this was set on
    purpose. `root` is the parent directory of `proc` and `sys`. Never raises.
    """
    text = kernel_text(root / f"sys/bus/pci/devices/{pci_id}/numa_node") if pci_id else ""
    if not text.isdecimal():  # "-1", or no such file
        return None
    node, usable = int(text), _usable_nodes(root)
    if node not in usable:
        if usable:
            _log.info(
                "chameleon_mm: host memory is not placed near the GPU at %s: it hangs on NUMA node %d, the process may "
                "use memory of %s only",
                pci_id,
                node,
                sorted(usable),
            )
        return None
    return node if len(usable) > 1 else None


def _usable_nodes(root: Path) -> set[int]:
    """Nodes that have memory and that the process's cpuset allows; empty if the kernel lists none."""
    nodes = root / "sys/devices/system/node"
    present = numbers_in(kernel_text(nodes / "has_memory")) or numbers_in(kernel_text(nodes / "online"))
    for line in kernel_text(root / "proc/self/status").splitlines():
        name, _, listed = line.partition(":")
        if name == "Mems_allowed_list":
            return present & numbers_in(listed.strip())
    return present


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


def _linux_mbind(machine: str | None = None) -> Mbind:
    """Return the system call by its number: libc has no function for it, and libnuma would be one more dependency."""
    number = _MBIND_NUMBERS.get(machine or platform.machine())
    if number is None:
        return lambda address, nbytes, mode, mask, max_node, flags: errno.ENOSYS
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long

    def mbind(address: int, nbytes: int, mode: int, mask: ctypes.Array[ctypes.c_ulong], max_node: int, flags: int) -> int:
        failed = call(
            ctypes.c_long(number),
            ctypes.c_void_p(address),
            ctypes.c_ulong(nbytes),
            ctypes.c_long(mode),
            mask,
            ctypes.c_ulong(max_node),
            ctypes.c_ulong(flags),
        )
        return ctypes.get_errno() if failed else 0

    return mbind


# --- pinning

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

PreferPages = Callable[[int, int], None]
"""Called with `(address, nbytes)` of untouched pages, to set the memory that they should come from. Never raises."""

_Pinned = tuple[Tensor, Callable[[], None]]  # the memory, and the function that frees it


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PinningCalls:
    """CUDA runtime calls that pinning needs. Each raises `RuntimeError` with the runtime's message when it is refused."""

    register: Callable[[int, int], None] | None
    """Page-lock `(address, nbytes)`. None if registered memory is unsupported or has another address on the device."""

    unregister: Callable[[int], None]

    host_alloc: Callable[[int], Tensor]
    """Return a flat uint8 tensor of `nbytes` of page-locked memory allocated by the driver."""

    host_free: Callable[[Tensor], None]

    clear_error: Callable[[], None]
    """Clear the error that a refused call leaves: else the next kernel launch reports it. Never raises."""


class PageLocker:
    """Pins and unpins host memory. Pinned memory lives until `unpin`, even if the caller drops it: the driver holds its pages.

    `threads` populate a large allocation (None: one per usable CPU, at most 8). `prefer_pages` sets the node of pages before
    their first touch, but not of memory that the driver allocates. Driver calls run inside a `scope()`. If the locker is
    dropped, memory that was not unpinned stays pinned until the process ends. Thread-safe. A forked child cannot pin or unpin.
    """

    def __init__(
        self,
        calls: PinningCalls,
        *,
        threads: int | None = None,
        madvise: Madvise | None = None,
        prefer_pages: PreferPages | None = None,
        scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._calls = calls
        self._threads = threads or min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        self._madvise = madvise or _libc_madvise()
        self._prefer_pages = prefer_pages
        self._scope = scope
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a pool collected in here unpins on this same thread
        self._warned = Counter[str]()
        self._live: dict[int, _Pinned] = {}
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
        ways: list[Callable[[int], _Pinned]] = [self._driver_allocated]
        if self._calls.register is not None:
            ways.insert(0, partial(self._registered, self._calls.register))
        reasons = []
        with self._scope():
            for way in ways:
                try:
                    memory, release = way(nbytes)
                except (RuntimeError, OSError, OverflowError, MemoryError) as error:
                    # Only its text: a log record with the error would keep its frames and their pages alive.
                    reasons.append(str(error))
                    self._warn(
                        _log, "chameleon_mm: %s of pinned memory refused: %s (%d of its kind)", format_size(nbytes), reasons[-1]
                    )
                    # Else the next kernel launch of unrelated code would raise it.
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
        """Free a whole tensor that `pin` returned. Device work on it must be complete: this does not wait."""
        if os.getpid() != self._pid:  # before taking the lock: another thread may have held it at the fork
            return
        with self._lock:
            entry = self._live.get(memory.data_ptr())
            if entry is None or entry[0].numel() != memory.numel():
                raise ValueError(
                    f"free_pinned: expected memory that alloc_pinned returned, whole and not yet freed, got {memory.numel()} "
                    f"bytes at {memory.data_ptr():#x}: keep the tensor that alloc_pinned returned and free that, once"
                )
            del self._live[memory.data_ptr()]
        with self._scope():
            try:
                entry[1]()
            except RuntimeError as error:
                unmapped = "chameleon_mm: %s of pinned memory could not be unpinned and stay mapped: %s (%d of its kind)"
                self._warn(_log, unmapped, format_size(memory.numel()), str(error))
                self._calls.clear_error()

    def _warn(self, log: logging.Logger, message: str, *values: object) -> None:
        """Log a warning if it is the first of its `message`, else information. `message` ends with the number of its kind."""
        self._warned[message] += 1
        log.log(logging.WARNING if self._warned[message] == 1 else logging.INFO, message, *values, self._warned[message])

    def _registered(self, register: Callable[[int, int], None], nbytes: int) -> _Pinned:
        unregister, held = self._calls.unregister, self._registered_at
        memory = populated_pages(
            nbytes, threads=self._threads, madvise=self._madvise, prefer_pages=self._prefer_pages, held=held
        )
        address = memory.data_ptr()
        # Before the driver call: else an interrupt right after the call would unmap pages that the driver holds.
        held.add(address)
        try:
            register(address, nbytes)
        except RuntimeError:
            held.remove(address)
            raise

        def release() -> None:
            unregister(address)
            held.remove(address)  # not reached if the driver refuses: see Note [Mapped while registered]

        return memory, release

    def _driver_allocated(self, nbytes: int) -> _Pinned:
        memory, host_free = self._calls.host_alloc(nbytes), self._calls.host_free
        return memory, lambda: host_free(memory)


def populated_pages(
    nbytes: int, *, threads: int, madvise: Madvise, prefer_pages: PreferPages | None = None, held: Container[int] = frozenset()
) -> Tensor:
    """Return a flat uint8 tensor over fresh, populated, zeroed pages: huge pages if the kernel has them.

    `prefer_pages` is called before the first touch. The tensor and its views keep the mapping. It also stays if the address is
    in `held` when the last view is freed. Raises `OSError` if there is not enough memory.
    """
    memory = _mapped(nbytes, held)
    start = memory.data_ptr()
    # Advice: a kernel without it still gives correct memory. DONTFORK, because fork() copies pinned pages at once: every data-
    # loader worker would cost the whole pool. A child must not touch these pages, nor those that the driver allocates.
    advise = _libc_madvise()
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        advise(start, nbytes, advice)
    if prefer_pages is not None:
        prefer_pages(start, nbytes)
    slice_bytes = max(_MIN_SLICE_BYTES, -(-nbytes // (threads * _HUGE_PAGE_BYTES)) * _HUGE_PAGE_BYTES)
    slices = [(start + offset, min(slice_bytes, nbytes - offset)) for offset in range(0, nbytes, slice_bytes)]
    if len(slices) == 1:
        _populate(*slices[0], madvise)
    else:
        with ThreadPoolExecutor(len(slices), thread_name_prefix="chameleon-populate") as pool:
            for done in [pool.submit(_populate, address, size, madvise) for address, size in slices]:
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


def _memlock_text() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "none" if soft == resource.RLIM_INFINITY else format_size(soft)
