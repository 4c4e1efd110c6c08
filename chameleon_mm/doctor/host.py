"""The host: processors, nodes, memory and the limits on it.

    memory that may be pinned by default = what a PinnedPool of max_bytes="auto" takes: half of what the kernel and every
                                           control group leave, divided among the ranks on this machine

Containers are told their own limits here, not their host's.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from typing import Any

from chameleon_mm.doctor.report import Finding, Machine, Unavailable, run_probe
from chameleon_mm.pinned.host_memory import auto_limit_bytes, available_host_bytes
from chameleon_mm.units import format_size

_NO_LIMIT_BYTES = 1 << 60  # control groups of version 1 write "no limit" as about 2**63


def host(machine: Machine) -> Iterator[Finding]:
    """Rows of the section `host`."""
    yield run_probe("host", "processors", _processors)
    yield run_probe("host", "NUMA nodes", lambda: _numa_nodes(machine))
    yield run_probe("host", "memory available", lambda: _memory(machine))
    yield run_probe("host", "memory that may be pinned", lambda: _may_be_pinned(machine))
    yield run_probe("host", "cgroup memory limit", lambda: _cgroup(machine))
    yield run_probe("host", "memlock limit", _memlock)


def _processors() -> tuple[str, Any]:
    usable, total = len(os.sched_getaffinity(0)), os.cpu_count()
    return f"{usable} usable of {total}", {"usable": usable, "total": total}


def _numa_nodes(machine: Machine) -> tuple[str, Any]:
    """The nodes whose processors this process may use."""
    usable = os.sched_getaffinity(0)
    folders = sorted((machine.root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda folder: int(folder.name[4:]))
    if not folders:
        raise Unavailable("/sys/devices/system/node names no node")
    nodes = [
        int(f.name[4:]) for f in folders if usable & _parse_cpus(machine.read(f"sys/devices/system/node/{f.name}/cpulist"))
    ]
    return f"this process runs on {nodes} of {len(folders)}", {"process": nodes, "total": len(folders)}


def _parse_cpus(text: str) -> set[int]:
    """Numbers in a text such as "0-3,8"."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def _available(machine: Machine) -> int:
    available = available_host_bytes(machine.root)
    if available <= 0:
        raise Unavailable("neither /proc/meminfo nor a control group says")
    return available


def _memory(machine: Machine) -> tuple[str, Any]:
    available = _available(machine)
    return f"{format_size(available)} (control groups counted)", available


def _may_be_pinned(machine: Machine) -> tuple[str, Any]:
    share = auto_limit_bytes(available_bytes=_available(machine))
    return f"{format_size(share)} by default (half of it, divided among the ranks here)", share


def _cgroup(machine: Machine) -> tuple[str, Any]:
    """The narrowest limit from this process's group up to the root, and what is used under it."""
    limits = [limit for line in machine.read("proc/self/cgroup").splitlines() for limit in _limits(machine, line)]
    if not limits:
        return "none", None
    limit, used, group = min(limits)
    return f"{format_size(limit)}, of which {format_size(used)} used ({group})", {"limit_bytes": limit, "used_bytes": used}


def _limits(machine: Machine, line: str) -> Iterator[tuple[int, int, str]]:
    """`(limit, used, group)` of every limited group that one line of /proc/self/cgroup leads to."""
    hierarchy, controllers, path = line.split(":", 2)
    if hierarchy == "0" and not controllers:
        mounts, names = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], ("memory.max", "memory.current")
    elif "memory" in controllers.split(","):
        mounts, names = ["sys/fs/cgroup/memory"], ("memory.limit_in_bytes", "memory.usage_in_bytes")
    else:
        return
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    for mount in mounts:
        for depth in range(len(parts), -1, -1):
            group = "/".join([mount, *parts[:depth]])
            try:
                limit, used = machine.read(f"{group}/{names[0]}"), machine.read(f"{group}/{names[1]}")
            except Unavailable:
                continue  # a container sees some of its groups only, and the root has no limit file
            if limit.isdecimal() and used.isdecimal() and int(limit) < _NO_LIMIT_BYTES:
                yield int(limit), int(used), f"/{group}"


def _memlock() -> tuple[str, Any]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return ("none", None) if soft == resource.RLIM_INFINITY else (format_size(soft), soft)
