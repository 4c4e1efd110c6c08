"""How much host memory may still be taken: the least of what the kernel and every control group around the process leave.

    available = min(MemAvailable, *(limit - usage + reclaimable page cache, for each cgroup v1 or v2 from ours up to the root))

Libraries that only read /proc/meminfo report the host's memory inside a container, and pinning past the container's limit
ends the process instead of raising an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""Per version: the limit's file, the usage's file, and the line of memory.stat that says how much of the usage is page cache
that nothing has touched lately. The kernel gives that up before it refuses anything, so it counts as available, as it does in
MemAvailable: else a job that has read its data set would find nothing left."""


def available_host_bytes(root: Path = Path("/")) -> int:
    """Bytes of host memory that this process may still take; 0 where nothing says so. Never raises.

    `root` is where `proc` and `sys` lie. Without /proc/meminfo (not Linux) psutil is asked instead.
    """
    limits = [*_of_machine(root), *_of_cgroups(root)]
    return max(0, min(limits, default=0))


def _of_machine(root: Path) -> Iterator[int]:
    for line in _text(root / "proc/meminfo").splitlines():
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
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        fields = line.split(":", 2)
        if len(fields) != 3:
            continue
        hierarchy, controllers, path = fields
        if hierarchy == "0" and not controllers:
            for base in (mount, mount / "unified"):  # "unified": beside v1 hierarchies
                yield from _up_from(base, path, _V2)
        elif "memory" in controllers.split(","):
            yield from _up_from(mount / "memory", path, _V1)


def _up_from(mount: Path, path: str, names: tuple[str, str, str]) -> Iterator[int]:
    """What each group from `path` up to the mount leaves; groups that a container cannot see are skipped."""
    group = mount.joinpath(*(part for part in path.split("/") if part not in ("", ".", "..")))
    while True:
        limit, usage = _number(group / names[0]), _number(group / names[1])
        if limit is not None and usage is not None:
            yield limit - usage + min(usage, _reclaimable(group, names[2]))
        if group == mount:
            return
        group = group.parent


def _reclaimable(group: Path, name: str) -> int:
    for line in _text(group / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None  # "max": no limit


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:  # absent, or not ours to read
        return ""
