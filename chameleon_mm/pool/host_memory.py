"""Host memory that may still be taken: the minimum of what the kernel and each of the process's control groups leave.

    available = min(MemAvailable - that of NUMA nodes without CPUs,
                    *(limit - usage + reclaimable page cache, for each cgroup v1 or v2 from ours up to the root))
    "auto"    = half of (memory this process already holds + available), divided among the ranks on this machine

    memory = AvailableMemory();  memory.read(taking=nbytes)     # reads again after 10 ms, or once 1/16 of it has been taken
    limit = MemoryLimit("auto");  limit.grow(held)              # maximum of all results of `auto_limit_bytes` so far

Libraries that only read /proc/meminfo report the host's memory inside a container, and pinning past the container's limit ends
the process instead of raising an error. Swap space is never counted: pinned memory cannot go there.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from chameleon_mm.device.pinning import bare_bytes, kernel_text
from chameleon_mm.units import parse_size

_RANKS = "LOCAL_WORLD_SIZE"
_MAX_RANKS_DIGITS = 6

FRESH_S = 0.01
"""Seconds for which a result of `AvailableMemory` is valid. Reading then costs at most a twentieth of one processor. Meanwhile
other processes, writing memory at some 10 GB/s, can take 100 MB unnoticed: well below the reserve that a machine keeps."""

TRUSTED_SHARE = 16
"""Inverse of the share of a result that may be taken before the next reading: only a reading shows the asker's own use."""


_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
"""Files with a group's limits, of control groups of versions 2 and 1. memory.high refuses nothing: above it a process is
delayed until enough is reclaimed, and pinned memory never is. So such a process is as good as stuck."""

_USAGES = ("memory.current", "memory.usage_in_bytes")

_CACHES = ("total_inactive_file", "inactive_file")
"""Lines of memory.stat with the part of the usage, in all groups below too, that is inactive page cache: of version 1, of 2.
The kernel frees that before it refuses memory, so it counts as available, as in MemAvailable. Otherwise a job that has read its
data set would find no memory left."""

_INHERITED = "hierarchical_memory_limit"
"""Line of version 1 with the narrowest limit on the group, also of groups that cannot be seen from here."""

_USUAL_MOUNTS = {True: ("sys/fs/cgroup", "sys/fs/cgroup/unified"), False: ("sys/fs/cgroup/memory",)}
"""Usual mount paths of version 2 and of version 1, if /proc does not tell."""


def available_host_bytes(root: Path = Path("/")) -> int:
    """Bytes of host memory that this process may still take; 0 if unknown. Never raises.

    `root`: parent of `proc` and `sys`. Without /proc/meminfo (not Linux) psutil is asked instead. Read it again before taking
    more: other processes come and go, and a virtual machine may be given memory only as it uses what it has.
    """
    limits = [*of_machine(root), *_of_cgroups(root)]
    return max(0, min(limits, default=0))


def auto_limit_bytes(*, available_bytes: int | None = None, held_bytes: int = 0) -> int:
    """Limit that "auto" stands for: half of this process's share of the host memory that may be pinned, in bytes; 0 if unknown.

    The other half is for page cache, data loading and the model's own host side. `available_bytes` is the memory left for all
    processes together (None: `available_host_bytes()`). It is divided by LOCAL_WORLD_SIZE, the number of processes that
    torchrun and similar launchers start on a machine (1 if not set). `held_bytes`: bytes that this process has already pinned.
    The result never exceeds a rank's part of the whole, in any order of pinning, and falls as other ranks pin. So an owner
    keeps the maximum of the results, which also grows with the machine's memory.

    Raises `ValueError` if LOCAL_WORLD_SIZE is no number of processes.
    """
    return pinnable_bytes(available_bytes=available_bytes, held_bytes=held_bytes) // 2


def pinnable_bytes(*, available_bytes: int | None = None, held_bytes: int = 0) -> int:
    """This process's share of the host memory that may be pinned, in bytes, as for `auto_limit_bytes`; 0 if unknown."""
    left = available_host_bytes() if available_bytes is None else available_bytes
    return (held_bytes + left) // local_ranks()


def local_ranks() -> int:
    """Number of processes that torchrun and similar launchers started on this machine: LOCAL_WORLD_SIZE, 1 if it is not set.
    Raises `ValueError` if that is no number of processes."""
    text = os.environ.get(_RANKS, "1")  # noqa: TID251  # the one variable that launchers say the number of ranks in
    ranks = int(text) if text.isascii() and text.isdecimal() and len(text) <= _MAX_RANKS_DIGITS else 0
    if ranks < 1:
        raise ValueError(
            f"{_RANKS}: expected the number of processes on this machine, 1 or more, got {text!r}: correct the environment "
            f"variable or unset it, or give the limit in bytes"
        )
    return ranks


def of_machine(root: Path) -> Iterator[int]:
    """Yield the bytes that the machine has available, without regard to control groups; nothing if it does not say. Memory of
    nodes without CPUs, such as a GPU's own on a GH200, does not count."""
    for line in kernel_text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if name == "MemAvailable" and words and words[0].isdecimal():
            yield int(words[0]) * 1024 - bare_bytes(root)  # the file says kB and means KiB
            return
    import psutil  # imported here, so that only systems that need it pay for it

    try:
        yield int(psutil.virtual_memory().available)
    except (psutil.Error, OSError, RuntimeError):  # its errors if the system does not tell
        return


def _of_cgroups(root: Path) -> Iterator[int]:
    for line in kernel_text(root / "proc/self/cgroup").splitlines():
        fields = line.split(":", 2)
        if len(fields) != 3:
            continue
        hierarchy, controllers, path = fields
        is_v2 = hierarchy == "0" and not controllers
        if is_v2 or "memory" in controllers.split(","):
            for mount, mounted in _mounts(root, is_v2=is_v2):
                yield from _up_from(mount, _below(path, mounted))


def _mounts(root: Path, *, is_v2: bool) -> list[tuple[Path, str]]:
    """Return `(mount point, the group that is mounted there)` of each mount of the hierarchy that accounts for memory.

    In a container that is often the container's own group, not the root; next to version 1, version 2 is in a subfolder.
    """
    found = []
    for line in kernel_text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        where, what = before.split(), after.split()
        if len(where) < 5 or len(what) < 3:
            continue
        if what[0] == "cgroup2" if is_v2 else what[0] == "cgroup" and "memory" in what[2].split(","):
            found.append((root / _unescape(where[4]).lstrip("/"), _unescape(where[3])))
    return found or [(root / place, "/") for place in _USUAL_MOUNTS[is_v2]]


def _below(path: str, mounted: str) -> list[str]:
    """Groups from the one that is `mounted` down to the one at `path`; empty if `path` is not below."""
    parts, top = _parts(path), _parts(mounted)
    way = parts[len(top) :] if parts[: len(top)] == top else []
    return [] if ".." in way else way  # a group outside of the namespace: it has no path here


def _up_from(mount: Path, way: list[str]) -> Iterator[int]:
    """Yield the bytes that each group leaves, from the end of the way up to the mount, without groups that cannot be seen."""
    for depth in range(len(way), -1, -1):
        group = mount.joinpath(*way[:depth])
        stat = dict(line.partition(" ")[::2] for line in kernel_text(group / "memory.stat").splitlines())
        limits = _numbers([*(kernel_text(group / name) for name in _LIMITS), stat.get(_INHERITED, "")])
        usage = _numbers(kernel_text(group / name) for name in _USAGES)
        cache = _numbers(stat.get(name, "") for name in _CACHES)
        if limits and usage:
            yield min(limits) - usage[0] + min(usage[0], (*cache, 0)[0])


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _unescape(path: str) -> str:
    r"""Replace `\040` by a space, and the kernel's other escapes of characters that would end a field."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _numbers(texts: Iterable[str]) -> list[int]:
    return [int(text) for text in texts if text.isdecimal()]  # not "max": no limit


class AvailableMemory:
    """`available_host_bytes`, read again when it may have changed. Threads may share it: at worst there is one reading more."""

    def __init__(self) -> None:
        self._available_bytes = 0
        self._trusted_bytes = 0
        self._good_until = 0.0

    def read(self, taking: int = 0) -> int:
        """Return the bytes that this process may still take, or 0 if unknown. The caller is about to take `taking` of them."""
        now = time.monotonic()
        if taking > self._trusted_bytes or now >= self._good_until:
            self._available_bytes = available_host_bytes()
            self._trusted_bytes = self._available_bytes // TRUSTED_SHARE
            self._good_until = now + FRESH_S
        self._trusted_bytes -= taking
        return self._available_bytes


class MemoryLimit:
    """`max_bytes` as `PinnedPool` takes it. Raises `ValueError` and `TypeError` for an invalid size, and if "auto" cannot find
    out how much memory there is."""

    def __init__(self, max_bytes: int | str | None) -> None:
        self._memory = AvailableMemory()
        self._auto = max_bytes is None or (isinstance(max_bytes, str) and max_bytes == "auto")
        self.nbytes = 0 if max_bytes is None or self._auto else parse_size(max_bytes, what="max_bytes")
        self.grow(0)
        if self._auto and not self.nbytes:
            raise ValueError(
                'max_bytes: expected the available host memory, which "auto" takes a share of, got nothing that says how much '
                'that is; give a size, such as "8GiB"'
            )

    def set(self, nbytes: int) -> None:
        """Make it `nbytes`, independent of the machine's memory from then on."""
        self._auto, self.nbytes = False, nbytes

    def grow(self, held_bytes: int) -> None:
        """Read again if the limit follows the machine: a virtual machine's memory may grow as it is used, so the first reading
        is too small. `held_bytes`: bytes that the pool has reserved. Never shrinks: see `auto_limit_bytes`."""
        if self._auto:
            found = auto_limit_bytes(available_bytes=self._memory.read(), held_bytes=held_bytes)
            self.nbytes = max(self.nbytes, found)
