"""What the doctor looks at: versions, GPUs and their links, limits on pinned memory, and the link's rates.

CHECKS: (section, name, check); check(root) returns a text, or raises with the reason and the command that mends it

Nothing is imported to learn its version: an installed CuPy may refuse to import. Containers are told their own limits.
"""

from __future__ import annotations

import platform
import resource
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

from chameleon_mm import __version__, native
from chameleon_mm.device import present_device
from chameleon_mm.device.cuda import visible_gpus
from chameleon_mm.pinned.host_memory import auto_limit_bytes, available_host_bytes, of_machine
from chameleon_mm.transfer import calibrate, keep
from chameleon_mm.units import format_size

Check = Callable[[Path], str]
"""Looks at one thing. The path is where `proc` and `sys` lie."""


class Unavailable(Exception):  # an answer among the doctor's findings, not an error
    """Raised by a check with the reason why there is nothing to tell, and the command that mends it."""


def torch_version(root: Path) -> str:
    built_for = torch.version.cuda
    return f"{torch.__version__}, built {'without CUDA' if built_for is None else f'for CUDA {built_for}'}"


def installed(root: Path, *, distributions: tuple[str, ...]) -> str:
    """Version of the first of `distributions` that is installed; the first is the one to install."""
    for name in distributions:
        try:
            return f"{metadata.version(name)} ({name})"
        except metadata.PackageNotFoundError:
            continue
    raise Unavailable(f"not installed; pip install {distributions[0]}")


def helpers(root: Path) -> str:
    return "\n".join(f"{name}: {native.status(name).words}" for name in native.useful())


def driver(root: Path) -> str:
    # "NVRM version: NVIDIA UNIX ... Kernel Module  580.159.03  Release Build ..."
    words = _read(root, "proc/driver/nvidia/version").splitlines()[0].split()
    return next(word for word in words if word[:1].isdigit() and "." in word)


def gpus(root: Path) -> str:
    """A line for each GPU: what it is, and its link as the kernel has it."""
    found = visible_gpus()
    if not found and torch.version.cuda is None:
        raise Unavailable("torch is built without CUDA; pip install a build with CUDA, see pytorch.org/get-started")
    if not found:
        raise Unavailable("torch finds no GPU; nvidia-smi says whether the driver does")
    return "\n".join(
        f"{gpu.index}: {gpu.name}, {format_size(gpu.total_bytes)}, capability {gpu.capability}, {_link(root, gpu.pci_id)}"
        for gpu in found
    )


def _link(root: Path, pci_id: str | None) -> str:
    folder = f"sys/bus/pci/devices/{pci_id}"
    try:
        now, most = (
            f"{_read(root, f'{folder}/{of}_link_speed')} x{_read(root, f'{folder}/{of}_link_width')}"
            for of in ("current", "max")
        )
    except Unavailable as unknown:
        return f"link unknown ({unknown})"
    return f"link {now}" if now == most else f"link {now} now, at most {most} (an idle GPU lowers its link)"


def memory(root: Path) -> str:
    """Host memory available, and the part that may be pinned by default: half of it, divided among the ranks here."""
    available, machine = available_host_bytes(root), max(of_machine(root), default=0)
    share = auto_limit_bytes(available_bytes=available)
    text = f"{format_size(available)}, of which {format_size(share)} may be pinned by default"
    if available < machine:
        text += f"; a control group leaves less than the {format_size(machine)} of the machine: raise its memory limit"
    return text


def memlock(root: Path) -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "none" if soft == resource.RLIM_INFINITY else f"{format_size(soft)}; where pinning fails: ulimit -l unlimited"


def link_rates(root: Path) -> str:
    """Measure the link and keep its rates: a session's first guess. Raises what `calibrate` raises."""
    device = present_device()
    rates = calibrate(device)
    kept = "; kept for sessions" if keep(device, "link", rates) else "; not kept"
    told = ("h2d_gbps", "to the device"), ("d2h_gbps", "to the host"), ("duplex_gbps", "both ways at once")
    return f"{device.name}: " + ", ".join(f"{rates[name]:.1f} GB/s {way}" for name, way in told) + kept


def _read(root: Path, path: str) -> str:
    """Text of a file of the kernel's, stripped. Raises `Unavailable` where it cannot be read."""
    try:
        return (root / path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise Unavailable(f"/{path}: {error.strerror}") from error


CHECKS: tuple[tuple[str, str, Check], ...] = (
    ("software", "python", lambda root: platform.python_version()),
    ("software", "system", lambda root: platform.platform()),
    ("software", "chameleon-mm", lambda root: __version__),
    ("software", "torch", torch_version),
    ("software", "triton", partial(installed, distributions=("triton",))),
    ("software", "cupy", partial(installed, distributions=("cupy-cuda13x", "cupy-cuda12x", "cupy"))),
    ("software", "C++ helpers", helpers),
    ("software", "NVIDIA driver", driver),
    ("gpu", "GPUs", gpus),
    ("host", "memory available", memory),
    ("host", "memlock limit", memlock),
    ("link", "rates", link_rates),
)
"""All rows, in the order in which they are shown."""
