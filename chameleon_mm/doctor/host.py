"""The host: processors, nodes, memory and the limits on it, and the versions of what the library stands on.

    memory that may be pinned by default = what a PinnedPool of max_bytes="auto" takes: half of what the kernel and every
                                           control group leave, divided among the ranks on this machine
    python, system, driver                 from the interpreter and the kernel
    torch and the CUDA it was built for; triton, numpy, cupy, cuda-bindings by their installed distributions, not imported

Containers are told their own limits here, not their host's. Nothing is imported to learn its version: an installed CuPy may
refuse to import.
"""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from typing import Any

import torch

from chameleon_mm import __version__, native
from chameleon_mm.device.numa import numbers_in
from chameleon_mm.doctor.report import Finding, Machine, Unavailable, run_probe
from chameleon_mm.pinned.host_memory import auto_limit_bytes, available_host_bytes
from chameleon_mm.units import format_size

_NO_LIMIT_BYTES = 1 << 60  # control groups of version 1 write "no limit" as about 2**63

_DISTRIBUTIONS = {
    "triton": ("triton",),
    "numpy": ("numpy",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "cuda-bindings": ("cuda-bindings",),
}


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
    nodes = [int(f.name[4:]) for f in folders if usable & numbers_in(machine.read(f"sys/devices/system/node/{f.name}/cpulist"))]
    return f"this process runs on {nodes} of {len(folders)}", {"process": nodes, "total": len(folders)}


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


def software(machine: Machine) -> Iterator[Finding]:
    """Rows of the section `software`."""
    yield run_probe("software", "python", lambda: (platform.python_version(), platform.python_version()))
    yield run_probe("software", "system", lambda: (platform.platform(), platform.platform()))
    yield run_probe("software", "chameleon-mm", lambda: (__version__, __version__))
    yield run_probe("software", "torch", _torch)
    for name, distributions in _DISTRIBUTIONS.items():
        yield run_probe("software", name, partial(_installed, distributions))
    for name in native.useful():
        yield run_probe("software", f"C++ helper {name}", partial(_helper, name))
    yield run_probe("software", "NVIDIA driver", lambda: _driver(machine))


def _helper(name: str) -> tuple[str, Any]:
    found = native.status(name)
    return found.words, {"active": found.active}


def _torch() -> tuple[str, Any]:
    built_for = torch.version.cuda
    text = f"{torch.__version__}, built {'without CUDA' if built_for is None else f'for CUDA {built_for}'}"
    return text, {"version": str(torch.__version__), "cuda": built_for}


def _installed(distributions: tuple[str, ...]) -> tuple[str, Any]:
    for name in distributions:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return version if len(distributions) == 1 else f"{version} ({name})", version
    raise Unavailable("not installed")


def _driver(machine: Machine) -> tuple[str, Any]:
    try:
        version = machine.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).splitlines()[0].strip()
    except (Unavailable, IndexError):
        # "NVRM version: NVIDIA UNIX ... Kernel Module  580.159.03  Release Build ..."
        try:
            words = machine.read("proc/driver/nvidia/version").splitlines()[0].split()
        except Unavailable:
            raise Unavailable("none is loaded") from None
        version = next((word for word in words if word[:1].isdigit() and "." in word), "")
        if not version:
            raise Unavailable("no version in /proc/driver/nvidia/version") from None
    return version, version
