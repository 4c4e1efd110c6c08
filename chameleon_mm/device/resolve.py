"""Choose the device: CUDA if available, else the simulator.

device = resolve_device(None)              # or "cuda:1", "sim:a100", a Device
warn_of_newer_torch()                      # once per process
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache

import torch

from chameleon_mm.device.cuda import CudaDevice, cuda_is_available
from chameleon_mm.device.protocols import Device
from chameleon_mm.device.sim import SimDevice
from chameleon_mm.errors import describe

_log = logging.getLogger(__package__)


def present_device() -> Device:
    """Return the GPU if there is one, else a simulated one, without a warning in the log."""
    return CudaDevice() if cuda_is_available() else SimDevice()


@cache  # once per process
def _say_simulating() -> None:
    build = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no driver or no visible GPU"
    _log.warning(
        "chameleon_mm: no CUDA found: simulating a GPU on the CPU (%s); install a CUDA build of torch to train on a GPU, or "
        'pass device="sim" where a simulated one is meant',
        build,
    )


TESTED_TORCH = (2, 14)
"""Newest minor release of torch on which the tests ran, as docs/integrations.md lists them."""


@cache  # once per process
def warn_of_newer_torch() -> None:
    """Log a warning if this torch is newer than the tested ones."""
    if tuple(map(int, torch.__version__.split(".")[:2])) > TESTED_TORCH:
        tested = ".".join(map(str, TESTED_TORCH))
        _log.warning("chameleon_mm: torch %s is newer than %s, the newest that was tested", torch.__version__, tested)


def resolve_device(device: Device | torch.device | str | None = None) -> Device:
    """Return the device for a `Device`, a `torch.device` or a name: "cuda", "cuda:1", "sim", "sim:a100".

    None is CUDA if available, else the simulator; a warning in the log says so once per process. Raises `ValueError` for
    another name, an unknown spec or an invalid GPU index. Raises `TypeError` for another type, and `RuntimeError` for "cuda"
    without a GPU.
    """
    if device is None:
        device = present_device()
        if device.simulated:
            _say_simulating()
        return device
    if isinstance(device, torch.device):
        device = str(device)
    if isinstance(device, str):
        kind, colon, which = device.partition(":")
        if kind == "sim" and (which or not colon):
            return SimDevice(which) if which else SimDevice()
        if kind == "cuda" and (which.isdecimal() or not colon):
            return CudaDevice(int(which)) if which else CudaDevice()
        raise ValueError(f"device: expected the name of one, got {device!r}: {_NAMES}")
    given: object = device
    if isinstance(given, Device) and not isinstance(given, type):  # a class has all methods, too
        return given
    raise TypeError(f"device: expected a Device, a name or None, got {describe(device)}; {_NAMES}")


def gpu_name(tensor: torch.Tensor) -> str | None:
    """Return the name of the GPU with `tensor`, in a form that `resolve_device` accepts; None if it is not on a GPU."""
    return str(tensor.device) if tensor.device.type == "cuda" else None


def check_placement(tensors: Iterable[torch.Tensor]) -> None:
    """Raise `ValueError` unless each of a model's `tensors` is on CUDA, or on the CPU for a simulated GPU."""
    for kind in (t.device.type for t in tensors):
        if kind not in ("cuda", "cpu"):
            raise ValueError(
                f"model: expected parameters and buffers on CUDA, or on the CPU with a simulated GPU, got one on {kind}, from "
                f"which nothing can be swapped; move the model to CUDA first, or train without a session"
            )


_NAMES = 'pass "cuda", "cuda:0", "sim", "sim:h200" (any of chameleon_mm.device.SPECS), a SimDevice or a CudaDevice'
