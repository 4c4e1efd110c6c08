"""Page-locked host memory, made the fast way, with a way out when the driver refuses.

    memory = mmap(nbytes); madvise(huge pages, not for children); place(memory); populate(memory) on several threads
    register(memory)                                # from here on the copy engines read and write it directly
    refused -> clear the error it left behind -> host_alloc(nbytes) -> refused -> HostMemoryExhausted with both reasons
    memory = pageable_memory(nbytes)                # ordinary memory: what is left where nothing more can be pinned

Zeroing the pages is most of the work and parallel; registering takes the driver's locks and is not. The driver's calls come
in as functions: this file needs no GPU.

Note [Mapped while registered]: pages are unmapped when the last tensor over them goes, but never while the driver holds them
(their addresses would come back registered), never in a forked child (they are not there, and something else may be), never
while the interpreter ends (the driver may be gone; the system takes them anyway).
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

# --- Host memory near the GPU: fresh pages come from the NUMA node that the GPU hangs on
#
# Copies to and from the other socket's memory cross the link between the sockets and run slower. Why mbind rather than
# set_mempolicy: it belongs to the range and not to a thread, so it holds for whichever threads populate the pages, and there
# is no policy of the caller's to put back; and the kernel's NUMA balancing does not move pages of a range with a policy of its
# own.

_log = logging.getLogger(__name__)

_MPOL_PREFERRED = 1
"""Policy by which a node is preferred. Not MPOL_BIND: where the node is full, that ends a process out of memory while other
nodes have some. This one is slower."""

_MBIND_NUMBERS = {"x86_64": 237, "aarch64": 235}
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)

Mbind = Callable[[int, int, int, "ctypes.Array[ctypes.c_ulong]", int, int], int]
"""The system call: `(address, nbytes, mode, node mask, bits of the mask + 1, flags) -> errno`, 0 for done."""


class PreferredNode:
    """Asks the kernel to take the pages of a range, none of which has been touched, from `node`. Thread-safe.

    Advice: it never raises, and a refusal leaves correct memory from whatever node the touching thread runs on. The first one
    is logged. `mbind` is the system call.
    """

    def __init__(self, node: int, mbind: Mbind | None = None) -> None:
        self.node = node
        self._mask = (ctypes.c_ulong * (node // _WORD_BITS + 1))()
        self._mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
        self._mbind = mbind or _linux_mbind()
        self._refused = False

    def __call__(self, address: int, nbytes: int) -> None:
        """Note the preference for `nbytes` at `address`, which is a page's."""
        # One bit more than the mask has: the kernel takes one off.
        failure = self._mbind(address, nbytes, _MPOL_PREFERRED, self._mask, len(self._mask) * _WORD_BITS + 1, 0)
        if failure and not self._refused:
            self._refused = True  # the next refusal would say the same
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
    """The NUMA node of the device at `pci_id` ("0000:06:00.0"), if its memory is one of several that this process may use.

    None where the kernel ties the device to no node (-1, as in many virtual machines), where there is one node, and where the
    node has no memory or is outside of the process's cpuset, which is logged: the process was kept off it on purpose. `root` is
    where `proc` and `sys` lie. Never raises.
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
    """Nodes that have memory, as far as the process's cpuset allows them; none where the kernel tells of none."""
    nodes = root / "sys/devices/system/node"
    present = numbers_in(kernel_text(nodes / "has_memory")) or numbers_in(kernel_text(nodes / "online"))
    for line in kernel_text(root / "proc/self/status").splitlines():
        name, _, listed = line.partition(":")
        if name == "Mems_allowed_list":
            return present & numbers_in(listed.strip())
    return present


def numbers_in(text: str) -> set[int]:
    """Set of the numbers in a text such as "0-2,8"; what is no such list is none."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            return set()
        found |= set(range(int(first), int(last or first) + 1))
    return found


def kernel_text(path: Path) -> str:
    """Text of one of the kernel's files, without blanks around it; empty where it is absent or not ours to read."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # absent, or not ours to read
        return ""


def _linux_mbind(machine: str | None = None) -> Mbind:
    """The system call by its number: libc has no function for it, and libnuma is one more library to be there."""
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
"""Size from which on one registration fails in the driver."""

_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it
_HUGE_PAGE_BYTES = 2 * MIB
_MIN_SLICE_BYTES = 32 * MIB  # below this a thread costs more than it saves
_MAX_THREADS = 8  # memory bandwidth is used up by then

Madvise = Callable[[int, int, int], int]
"""`(address, nbytes, advice) -> errno`, 0 for done. Must let go of the GIL."""

PreferPages = Callable[[int, int], None]
"""Called with `(address, nbytes)` of untouched pages: says which memory they should come from. Advice: never raises."""

_Pinned = tuple[Tensor, Callable[[], None]]  # the memory, and what gives it back


def pageable_memory(nbytes: int) -> Tensor:
    """A flat, page-aligned uint8 tensor of `nbytes`; its contents are not defined. No torch operator makes it.

    Raises `ValueError` for a negative size, `HostMemoryExhausted` where the machine does not give that much.
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
    with torch._C._DisableTorchDispatch():  # or the simulator's active `compute()` would take it for device memory
        return torch.from_numpy(raw[start : start + nbytes])


@dataclass(frozen=True, slots=True, kw_only=True)
class PinningCalls:
    """Calls of a CUDA runtime that pinning needs. Each raises `RuntimeError` in the runtime's own words when it is refused."""

    register: Callable[[int, int], None] | None
    """Page-lock `(address, nbytes)`; None where registered memory is unsupported or has another address on the device."""

    unregister: Callable[[int], None]

    host_alloc: Callable[[int], Tensor]
    """A flat uint8 tensor of `nbytes` that the driver allocated page-locked."""

    host_free: Callable[[Tensor], None]

    clear_error: Callable[[], None]
    """Clear the error that a refused call leaves for whoever launches the next kernel. Never raises."""


class PageLocker:
    """Pins and unpins. What is pinned stays alive until `unpin`, even if the caller drops it: the driver holds its pages.

    `threads` populate a large allocation (None: one per usable CPU, at most 8). `place` says where pages come from, before the
    first touch; what the driver allocates itself comes from where the driver takes it. The driver is called inside a `scope()`.
    Of a locker that is dropped, what was not unpinned stays pinned for the life of the process. Thread-safe. A forked child can
    neither pin nor unpin.
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
        self._lock = threading.RLock()  # a pool that the collector ends in here unpins on this very thread
        self._live: dict[int, _Pinned] = {}
        self._registered_at: set[int] = set()  # addresses; more than live ones, where the driver would not let go

    def pin(self, nbytes: int) -> Tensor:
        """A flat, page-aligned uint8 tensor of `nbytes` of page-locked memory. Its contents are not defined.

        It is one registration, and no other memory shares its pages: a copy inside of it never straddles two.
        Raises `ValueError` for fewer than 1 byte; `HostMemoryExhausted` when neither way of pinning works; `DeviceUnavailable`
        in a forked child.
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
                    # Its text alone: a log record that kept the error would keep its frames, and the pages that they hold.
                    reasons.append(str(error))
                    _log.warning("chameleon_mm: %s of pinned memory refused: %s", format_size(nbytes), reasons[-1])
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
        """Free what `pin` returned, whole. Device work on it must be complete: nothing here waits."""
        if os.getpid() != self._pid:  # asked first: another thread may have held the lock when the process forked
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
                _log.warning(
                    "chameleon_mm: %s of pinned memory could not be unpinned and stay mapped: %s",
                    format_size(memory.numel()),
                    str(error),
                )
                self._calls.clear_error()

    def _registered(self, register: Callable[[int, int], None], nbytes: int) -> _Pinned:
        unregister, held = self._calls.unregister, self._registered_at
        memory = populated_pages(
            nbytes, threads=self._threads, madvise=self._madvise, prefer_pages=self._prefer_pages, held=held
        )
        address = memory.data_ptr()
        # Before the driver is asked: an interrupt right after it would otherwise unmap pages that it holds.
        held.add(address)
        try:
            register(address, nbytes)
        except RuntimeError:
            held.remove(address)
            raise

        def release() -> None:
            unregister(address)
            held.remove(address)  # not where the driver refused: see Note [Mapped while registered]

        return memory, release

    def _driver_allocated(self, nbytes: int) -> _Pinned:
        memory, host_free = self._calls.host_alloc(nbytes), self._calls.host_free
        return memory, lambda: host_free(memory)


def populated_pages(
    nbytes: int, *, threads: int, madvise: Madvise, prefer_pages: PreferPages | None = None, held: Container[int] = frozenset()
) -> Tensor:
    """A flat uint8 tensor over fresh anonymous pages that are all there (zero), in huge pages where the kernel has them.

    `prefer_pages` is told of them before the first touch. The tensor and its views keep the mapping, and so does `held` if the
    address is in it when the last of them goes. Raises `OSError` when there is no such memory.
    """
    memory = _mapped(nbytes, held)
    start = memory.data_ptr()
    # Advice only: a kernel without either still gives correct memory. DONTFORK because fork() copies pinned pages at once, so
    # that every data-loader worker would cost the whole pool; as with the driver's own, a child must not touch them.
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
    """A flat uint8 tensor over a mapping of its own. Not the mmap module's: that unmaps in a forked child too, where the range
    is a hole that the child may have mapped something else into."""
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
    """Unmap the pages, as the last tensor over them is gone. See Note [Mapped while registered]."""
    if os.getpid() == pid and address not in held:
        munmap(address, nbytes)


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
    """Text of the bytes that are available; "unknown" where nothing says: an error message must not raise its own error."""
    import psutil  # here: not every import of the library pays for it

    with suppress(psutil.Error, OSError, RuntimeError):
        return format_size(int(psutil.virtual_memory().available))
    return "unknown"


def _memlock_text() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "none" if soft == resource.RLIM_INFINITY else format_size(soft)
