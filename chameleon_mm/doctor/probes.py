"""What the doctor looks at: versions, GPUs and their links, limits on pinned memory, the device and its link's rates.

Nothing is imported to learn its version: an installed CuPy may refuse to import. Containers are told their own limits.
"""

from __future__ import annotations

import platform
import resource
import time
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from chameleon_mm import __version__, native
from chameleon_mm.device import Device, present_device
from chameleon_mm.device.cuda import VisibleGpu, visible_gpus
from chameleon_mm.doctor.findings import Finding, Unavailable, run_probe
from chameleon_mm.pinned.host_memory import auto_limit_bytes, available_host_bytes
from chameleon_mm.transfer import CalibrationCache, calibrate
from chameleon_mm.units import MIB, format_size, format_us

PIN_TRIAL_BYTES = 256 * MIB

_DISTRIBUTIONS = {
    "triton": (("triton",), "pip install triton"),
    "cupy": (("cupy-cuda13x", "cupy-cuda12x", "cupy"), "pip install cupy-cuda13x"),
    "cuda-bindings": (("cuda-bindings",), "pip install cuda-bindings"),
}
"""Distributions that may have each part, and the command that installs it."""


def software_rows(root: Path) -> Iterator[Finding]:
    """Rows of the section `software`."""
    yield run_probe("software", "python", lambda: (platform.python_version(), platform.python_version()))
    yield run_probe("software", "system", lambda: (platform.platform(), platform.platform()))
    yield run_probe("software", "chameleon-mm", lambda: (__version__, __version__))
    yield run_probe("software", "torch", _torch)
    for name, (distributions, command) in _DISTRIBUTIONS.items():
        yield run_probe("software", name, partial(_installed, distributions, command))
    for name in native.useful():
        yield run_probe("software", f"C++ helper {name}", partial(_helper, name))
    yield run_probe("software", "NVIDIA driver", lambda: _driver(root))


def _torch() -> tuple[str, Any]:
    built_for = torch.version.cuda
    text = f"{torch.__version__}, built {'without CUDA' if built_for is None else f'for CUDA {built_for}'}"
    return text, {"version": str(torch.__version__), "cuda": built_for}


def _installed(distributions: tuple[str, ...], command: str) -> tuple[str, Any]:
    for name in distributions:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return f"{version} ({name})", version
    raise Unavailable(f"not installed; {command}")


def _helper(name: str) -> tuple[str, Any]:
    found = native.status(name)
    return found.words, {"active": found.active}


def _driver(root: Path) -> tuple[str, Any]:
    # "NVRM version: NVIDIA UNIX ... Kernel Module  580.159.03  Release Build ..."
    words = _read(root, "proc/driver/nvidia/version").splitlines()[0].split()
    version = next((word for word in words if word[:1].isdigit() and "." in word), None)
    if version is None:
        raise Unavailable("no version in /proc/driver/nvidia/version")
    return version, version


def gpu_rows(root: Path) -> Iterator[Finding]:
    """Rows of the section `gpu`: three for each GPU, or one that says why there is none."""
    found: list[VisibleGpu] = []

    def search() -> tuple[str, Any]:
        found.extend(visible_gpus())
        if not found and torch.version.cuda is None:
            raise Unavailable("torch is built without CUDA; pip install a build with CUDA, see pytorch.org/get-started")
        if not found:
            raise Unavailable("torch finds no GPU; nvidia-smi says whether the driver does")
        return f"{len(found)} found", len(found)

    yield run_probe("gpu", "GPUs", search)
    for gpu in found:
        yield run_probe("gpu", f"{gpu.index}", partial(_identity, gpu))
        yield run_probe("gpu", f"{gpu.index} link", partial(_link, root, gpu))
        yield run_probe("gpu", f"{gpu.index} NUMA node", partial(_numa_node, root, gpu))


def _identity(gpu: VisibleGpu) -> tuple[str, Any]:
    text = f"{gpu.name}, {format_size(gpu.total_bytes)}, compute capability {gpu.capability}, PCI {gpu.pci_id or 'unknown'}"
    value = {"name": gpu.name, "total_bytes": gpu.total_bytes, "compute_capability": gpu.capability, "pci_id": gpu.pci_id}
    return text, value


def _link(root: Path, gpu: VisibleGpu) -> tuple[str, Any]:
    folder = f"sys/bus/pci/devices/{gpu.pci_id}"
    now, most = (
        f"{_read(root, f'{folder}/{of}_link_speed')} x{_read(root, f'{folder}/{of}_link_width')}" for of in ("current", "max")
    )
    text = now if now == most else f"{now} now, at most {most} (an idle GPU lowers its link)"
    return text, {"current": now, "max": most}


def _numa_node(root: Path, gpu: VisibleGpu) -> tuple[str, Any]:
    node = int(_read(root, f"sys/bus/pci/devices/{gpu.pci_id}/numa_node"))
    if node < 0:
        raise Unavailable("the kernel ties this GPU to no node (one node, or a virtual machine)")
    return str(node), node


def host_rows(root: Path) -> Iterator[Finding]:
    """Rows of the section `host`: what limits pinned memory."""
    yield run_probe("host", "memory available", lambda: _memory(root))
    yield run_probe("host", "memory that may be pinned", lambda: _may_be_pinned(root))
    yield run_probe("host", "memlock limit", lambda: _memlock(root))


def _available(root: Path) -> int:
    available = available_host_bytes(root)
    if available <= 0:
        raise Unavailable("neither /proc/meminfo nor a control group says")
    return available


def _memory(root: Path) -> tuple[str, Any]:
    available, machine = _available(root), 0
    for line in _read(root, "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            machine = int(line.split()[1]) * 1024
    text = format_size(available)
    if available < machine:
        text += f": a control group leaves less than the {format_size(machine)} of the machine; raise its memory limit"
    return text, {"available_bytes": available, "machine_bytes": machine}


def _may_be_pinned(root: Path) -> tuple[str, Any]:
    share = auto_limit_bytes(available_bytes=_available(root))
    return f"{format_size(share)} by default (half of it, divided among the ranks here)", share


def _memlock(root: Path) -> tuple[str, Any]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return "none", None
    mend = "; where pinning fails: ulimit -l unlimited" if soft < auto_limit_bytes(available_bytes=_available(root)) else ""
    return f"{format_size(soft)}{mend}", soft


def device_rows(cache: CalibrationCache) -> Iterator[Finding]:
    """Rows of the sections `device` and `transfer`: what device=None stands for, whether it pins, and its link's rates, which
    are kept in `cache`."""
    chosen: list[Device] = []

    def choose() -> tuple[str, Any]:
        device = present_device()
        chosen.append(device)
        about = {
            "name": device.name, "torch_device": str(device.torch_device), "simulated": device.simulated,
            "capacity_bytes": device.capacity, "driver": device.driver,
        }  # fmt: skip
        return f"{device.name} ({device.torch_device}), {format_size(device.capacity)} for tensors", about

    def the_device() -> Device:
        if not chosen:
            raise Unavailable("there is no device")
        return chosen[0]

    yield run_probe("device", "device=None picks", choose)
    yield run_probe("device", "pinned allocation", lambda: pin_trial(the_device(), PIN_TRIAL_BYTES))
    yield run_probe("transfer", "link rates", lambda: link_rates(the_device(), cache))


def pin_trial(device: Device, nbytes: int) -> tuple[str, Any]:
    """Pin `nbytes` once, with the clock running, and give them back. Raises what `alloc_pinned` raises."""
    if device.simulated:
        raise Unavailable("the simulator's pinned memory is plain memory")
    start = time.perf_counter()
    memory = device.alloc_pinned(nbytes)
    seconds = time.perf_counter() - start
    pinned = memory.is_pinned()
    device.free_pinned(memory)
    if not pinned:
        raise Unavailable(f"{format_size(nbytes)} were allocated, but torch does not take them for pinned")
    gbps = nbytes / seconds / 1e9
    text = f"{format_size(nbytes)} in {format_us(seconds * 1e6)}, {gbps:.1f} GB/s (once, cold)"
    return text, {"nbytes": nbytes, "seconds": seconds, "gbps": gbps}


def link_rates(device: Device, cache: CalibrationCache) -> tuple[str, Any]:
    """Measure the link and keep its rates in `cache`: a session's first guess. Raises what `calibrate` raises."""
    measured = calibrate(device)
    kept = cache.store(measured)
    text = (
        f"{'simulated: ' if measured.simulated else ''}{measured.h2d_gbps:.1f} GB/s to the device, "
        f"{measured.d2h_gbps:.1f} GB/s to the host, {measured.duplex_gbps:.1f} GB/s both ways at once"
    )
    where = f"; kept in {cache.path}" if kept else "" if measured.simulated else f"; {cache.path} cannot be written"
    return text + where, {**measured.to_dict(), "kept": kept}


def _read(root: Path, path: str) -> str:
    """The text of a file of the kernel's, stripped. Raises `Unavailable` where it cannot be read."""
    try:
        return (root / path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise Unavailable(f"/{path}: {error.strerror}") from error
