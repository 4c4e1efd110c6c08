"""Versions of what the library stands on.

    python, system, driver            from the interpreter and the kernel
    torch and the CUDA it was built for; triton, numpy, cupy, cuda-bindings by their installed distributions, not imported

Nothing is imported to learn its version: an installed CuPy may refuse to import.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from typing import Any

import torch

from chameleon_mm import __version__
from chameleon_mm.doctor.report import Finding, Machine, Unavailable, run_probe

_DISTRIBUTIONS = {
    "triton": ("triton",),
    "numpy": ("numpy",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "cuda-bindings": ("cuda-bindings",),
}


def software(machine: Machine) -> Iterator[Finding]:
    """Rows of the section `software`."""
    yield run_probe("software", "python", lambda: (platform.python_version(), platform.python_version()))
    yield run_probe("software", "system", lambda: (platform.platform(), platform.platform()))
    yield run_probe("software", "chameleon-mm", lambda: (__version__, __version__))
    yield run_probe("software", "torch", _torch)
    for name, distributions in _DISTRIBUTIONS.items():
        yield run_probe("software", name, partial(_installed, distributions))
    yield run_probe("software", "NVIDIA driver", lambda: _driver(machine))


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
