"""Host memory that may still be taken: the least of what the kernel and every control group around the process leave.

    available = min(MemAvailable, *(limit - usage + reclaimable page cache, for each cgroup v1 or v2 from ours up to the root))
    "auto"    = half of (what this process holds already + available), divided among the ranks on this machine

    memory = AvailableMemory();  memory.read(taking=nbytes)     # reads again after 10 ms, or once 1/16 of it has been taken
    limit = MemoryLimit("auto");  limit.grow(held)              # the most that `auto_limit_bytes` has said so far

Libraries that only read /proc/meminfo report the host's memory inside a container, and pinning past the container's limit
ends the process instead of raising an error. Swap is counted nowhere: what is pinned cannot go there.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from chameleon_mm.device.pinning import kernel_text
from chameleon_mm.units import parse_size

_RANKS = "LOCAL_WORLD_SIZE"
_MAX_RANKS_DIGITS = 6

FRESH_S = 0.01
"""Seconds for which an answer of `AvailableMemory` is good. Reading then costs a twentieth of one processor at most, and other
processes, writing memory at some 10 GB/s, have taken 100 MB that this does not know of: well below what a machine keeps as a
reserve."""

TRUSTED_SHARE = 16
"""Share of an answer that may be taken before it is asked for again: what the asker itself takes is known at once only so."""


class _Version(NamedTuple):
    """Names of the files of one version of control groups."""

    limits: tuple[str, ...]
    usage: str
    cache: str
    """The line of memory.stat that says how much of the usage, with all groups below, is page cache that nothing has touched
    lately. The kernel gives that up before it refuses anything, so it counts as available, as it does in MemAvailable: else a
    job that has read its data set would find nothing left."""
    inherited: str
    """The line of memory.stat that tells the narrowest limit on the group, also of groups that cannot be seen from here."""
    conventional: tuple[str, ...]
    """Path at which the hierarchy is mounted, if /proc does not tell."""


# memory.high refuses nothing: above it a process is held up until enough is reclaimed, and of pinned memory nothing ever is. So
# a process that goes there is as good as stuck.
_V2 = _Version(("memory.max", "memory.high"), "memory.current", "inactive_file", "", ("sys/fs/cgroup", "sys/fs/cgroup/unified"))
_V1 = _Version(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    "total_inactive_file",
    "hierarchical_memory_limit",
    ("sys/fs/cgroup/memory",),
)


def available_host_bytes(root: Path = Path("/")) -> int:
    """Bytes of host memory that this process may still take; 0 where nothing says so. Never raises.

    `root` is where `proc` and `sys` lie. Without /proc/meminfo (not Linux) psutil is asked instead. Read it again whenever more
    is to be taken: other processes come and go, and a virtual machine may be given memory only as it uses what it has.
    """
    limits = [*of_machine(root), *_of_cgroups(root)]
    return max(0, min(limits, default=0))


def auto_limit_bytes(
    environ: Mapping[str, str] = os.environ,  # noqa: TID251  # the one variable that launchers say the number of ranks in
    *,
    available_bytes: int | None = None,
    held_bytes: int = 0,
) -> int:
    """Half of this process's share of the host memory that may be pinned, in bytes: what a limit of "auto" stands for.

    The other half is for page cache, data loading and the model's own host side. `available_bytes` (None:
    `available_host_bytes()`) is what is left for all processes together. It is divided among the LOCAL_WORLD_SIZE ones that
    torchrun and its like start on a machine, 1 where it is not set. `held_bytes` is what this process has pinned already. Asked
    again later, the answer is never more than a rank's part of the whole, whichever ranks pinned first; with what the others
    pinned it falls. So an owner keeps the largest so far, and has grown with a machine whose memory did. 0 where nothing says
    what is available.

    Raises `ValueError` where LOCAL_WORLD_SIZE is no number of processes.
    """
    left = available_host_bytes() if available_bytes is None else available_bytes
    return (held_bytes + left) // local_ranks(environ) // 2


def local_ranks(
    environ: Mapping[str, str] = os.environ,  # noqa: TID251  # as above
) -> int:
    """Number of processes that torchrun and its like started on this machine: LOCAL_WORLD_SIZE, 1 where it is not set. Raises
    `ValueError` where that is no number of processes."""
    text = environ.get(_RANKS, "1")
    ranks = int(text) if text.isascii() and text.isdecimal() and len(text) <= _MAX_RANKS_DIGITS else 0
    if ranks < 1:
        raise ValueError(
            f"{_RANKS}: expected the number of processes on this machine, 1 or more, got {text!r}: correct the environment "
            f"variable or unset it, or give the limit in bytes"
        )
    return ranks


def of_machine(root: Path) -> Iterator[int]:
    """The bytes that the machine has available, whatever control groups leave of them; nothing where it does not say."""
    for line in kernel_text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if name == "MemAvailable" and words and words[0].isdecimal():
            yield int(words[0]) * 1024  # the file says kB and means KiB
            return
    import psutil  # here, for the systems that need it: not every import of the library pays for it

    try:
        yield int(psutil.virtual_memory().available)
    except (psutil.Error, OSError, RuntimeError):  # what it raises where the system does not tell
        return


def _of_cgroups(root: Path) -> Iterator[int]:
    for line in kernel_text(root / "proc/self/cgroup").splitlines():
        fields = line.split(":", 2)
        if len(fields) != 3:
            continue
        hierarchy, controllers, path = fields
        if hierarchy == "0" and not controllers:
            version = _V2
        elif "memory" in controllers.split(","):
            version = _V1
        else:
            continue
        for mount, mounted in _mounts(root, version):
            yield from _up_from(mount, _below(path, mounted), version)


def _mounts(root: Path, version: _Version) -> list[tuple[Path, str]]:
    """`(mount point, the group that is mounted there)` of each mount of the hierarchy that accounts for memory.

    In a container that is often the container's own group, not the root; beside version 1, version 2 is somewhere below.
    """
    found = []
    for line in kernel_text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        where, what = before.split(), after.split()
        if len(where) < 5 or len(what) < 3:
            continue
        if what[0] == "cgroup2" if version is _V2 else what[0] == "cgroup" and "memory" in what[2].split(","):
            found.append((root / _unescape(where[4]).lstrip("/"), _unescape(where[3])))
    return found or [(root / place, "/") for place in version.conventional]


def _below(path: str, mounted: str) -> list[str]:
    """Groups on the way from the one that is `mounted` down to the one at `path`; none where `path` is somewhere else."""
    parts, top = _parts(path), _parts(mounted)
    way = parts[len(top) :] if parts[: len(top)] == top else []
    return [] if ".." in way else way  # a group outside of the namespace: it has no path here


def _up_from(mount: Path, way: list[str], version: _Version) -> Iterator[int]:
    """Bytes that each group leaves, from the end of the way up to the mount; groups that cannot be seen are skipped."""
    for depth in range(len(way), -1, -1):
        group = mount.joinpath(*way[:depth])
        stat = _stat(group)
        limits = [limit for name in version.limits if (limit := _number(group / name)) is not None]
        limits += [stat[version.inherited]] if version.inherited in stat else []
        usage = _number(group / version.usage)
        if limits and usage is not None:
            yield min(limits) - usage + min(usage, stat.get(version.cache, 0))


def _stat(group: Path) -> dict[str, int]:
    pairs = (line.partition(" ") for line in kernel_text(group / "memory.stat").splitlines())
    return {name: int(value) for name, _, value in pairs if value.isdecimal()}


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _unescape(path: str) -> str:
    """Replace \040 by a space, and likewise what else the kernel escapes because it would end a field."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _number(path: Path) -> int | None:
    text = kernel_text(path)
    return int(text) if text.isdecimal() else None  # "max": no limit


class AvailableMemory:
    """`available_host_bytes`, read again when it may have changed. Threads may share it: the worst is one reading more."""

    def __init__(self) -> None:
        self._available_bytes = 0
        self._trusted_bytes = 0
        self._good_until = 0.0

    def read(self, taking: int = 0) -> int:
        """Bytes that this process may still take, 0 where nothing says so. The caller is about to take `taking` of them."""
        now = time.monotonic()
        if taking > self._trusted_bytes or now >= self._good_until:
            self._available_bytes = available_host_bytes()
            self._trusted_bytes = self._available_bytes // TRUSTED_SHARE
            self._good_until = now + FRESH_S
        self._trusted_bytes -= taking
        return self._available_bytes


class MemoryLimit:
    """`max_bytes` as `PinnedPool` takes it. Raises `ValueError` and `TypeError` for what is no size, and where "auto" finds
    nothing that says how much memory there is."""

    def __init__(self, max_bytes: int | str | None) -> None:
        self._memory = AvailableMemory()
        self._auto = max_bytes is None or max_bytes == "auto"
        self.nbytes = 0 if max_bytes is None or max_bytes == "auto" else parse_size(max_bytes, what="max_bytes")
        self.grow(0)
        if self._auto and not self.nbytes:
            raise ValueError(
                'max_bytes: expected the available host memory, which "auto" takes a share of, got nothing that says how much '
                'that is; give a size, such as "8GiB"'
            )

    def set(self, nbytes: int) -> None:
        """Make it `nbytes`, whatever the machine has from then on."""
        self._auto, self.nbytes = False, nbytes

    def grow(self, held_bytes: int) -> None:
        """Look again, where the limit follows the machine: a virtual one's memory may grow as it is used, so what was available
        at the start says too little. `held_bytes` is what the pool has reserved. Never shrinks: see `auto_limit_bytes`."""
        if self._auto:
            found = auto_limit_bytes(available_bytes=self._memory.read(), held_bytes=held_bytes)
            self.nbytes = max(self.nbytes, found)
