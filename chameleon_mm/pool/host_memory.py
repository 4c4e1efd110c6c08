"""Available host memory: the minimum of the memory that the kernel and each of the process's control groups leave.

    available = min(MemAvailable, *(limit - usage + reclaimable page cache, for each cgroup v1 or v2 from ours up to the root))
    "auto"    = half of (memory this process already holds + available), divided among the ranks on this machine

Inside a container, libraries that only read /proc/meminfo report the host's memory. Pinning above the container's limit ends
the process instead of raising an error. Swap space is never counted, because pinned memory cannot be swapped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from chameleon_mm.device.pinning import kernel_text

_RANKS = "LOCAL_WORLD_SIZE"
_MAX_RANKS_DIGITS = 6

_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
"""Files with the limits of a control group, of versions 2 and 1. Above memory.high a process is delayed until enough is
reclaimed. Pinned memory is never reclaimed, so the process would practically stop."""

_USAGES = ("memory.current", "memory.usage_in_bytes")

_CACHES = ("total_inactive_file", "inactive_file")
"""Lines of memory.stat with the inactive page cache of the group and all groups below: of version 1, of version 2. The kernel
frees it before it refuses memory, so it counts as available, as in MemAvailable. Otherwise a job that has read its data set
would find no memory left."""

_INHERITED = "hierarchical_memory_limit"
"""Line of version 1 with the lowest limit on the group, including limits of groups that are invisible here."""

_USUAL_MOUNTS = {True: ("sys/fs/cgroup", "sys/fs/cgroup/unified"), False: ("sys/fs/cgroup/memory",)}
"""Usual mount paths of versions 2 and 1, if /proc does not show them."""


def available_host_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of host memory that this process may still take; 0 if unknown. Never raises.

    `root`: parent of `proc` and `sys`. Without /proc/meminfo (not Linux), psutil is used. Read again before taking more: other
    processes change, and a virtual machine may get more memory only while it uses its present memory.
    """
    return max(0, min([*of_machine(root), *_of_cgroups(root)], default=0))


def pinnable_bytes(*, available_bytes: int | None = None, held_bytes: int = 0) -> int:
    """Return this process's share of the pinnable host memory, in bytes; 0 if unknown. "auto" is half of it: the other half is
    for page cache, data loading and the model's own host side.

    `available_bytes`: memory left for all processes together (None: `available_host_bytes()`). It is divided by
    LOCAL_WORLD_SIZE, the number of processes that torchrun and similar launchers start on a machine (1 if not set).
    `held_bytes`: bytes that this process has already pinned. The result never exceeds a rank's part of the whole, for any order
    of pinning, and decreases as other ranks pin.

    Raises `ValueError` if LOCAL_WORLD_SIZE is not a number of processes.
    """
    left = available_host_bytes() if available_bytes is None else available_bytes
    return (held_bytes + left) // local_ranks()


def local_ranks() -> int:
    """Return the number of processes that torchrun and similar launchers started on this machine: LOCAL_WORLD_SIZE, or 1 if not
    set. Raises `ValueError` if it is not a number of processes."""
    text = os.environ.get(_RANKS, "1")  # noqa: TID251  # launchers pass the number of ranks only in this variable
    ranks = int(text) if text.isascii() and text.isdecimal() and len(text) <= _MAX_RANKS_DIGITS else 0
    if ranks < 1:
        raise ValueError(
            f"{_RANKS}: expected the number of processes on this machine, 1 or more, got {text!r}: correct the environment "
            f"variable or unset it, or give the limit in bytes"
        )
    return ranks


def of_machine(root: Path) -> Iterator[int]:
    """Yield the machine's available bytes, without control groups; nothing if unknown."""
    for line in kernel_text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if name == "MemAvailable" and words and words[0].isdecimal():
            yield int(words[0]) * 1024  # the file says kB and means KiB
            return
    import psutil  # imported only on systems that need it

    try:
        yield int(psutil.virtual_memory().available)
    except (psutil.Error, OSError, RuntimeError):  # psutil's errors if the value is unknown
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
    """Return `(mount point, group mounted there)` of each mount of the hierarchy that accounts for memory.

    In a container, the group is often the container's own, not the root. Besides version 1, version 2 is in a subfolder.
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
    """Return the groups below `mounted`, down to the group at `path`; empty if `path` is not below `mounted`."""
    parts, top = _parts(path), _parts(mounted)
    way = parts[len(top) :] if parts[: len(top)] == top else []
    return [] if ".." in way else way  # a group outside of the namespace has no path here


def _up_from(mount: Path, way: list[str]) -> Iterator[int]:
    """Yield the bytes that each visible group leaves, from the end of `way` up to the mount."""
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
