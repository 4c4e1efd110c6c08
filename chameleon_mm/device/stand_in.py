"""Tells the CUDA stand-in of our tests from a GPU: torch's CUDA build over a runtime that computes on the CPU.

is_stand_in(device.name)         # by the name that it gives its device
computes_on_cpu(device)          # the stand-in or a simulator: sizes have to be small
"""

from __future__ import annotations

from chameleon_mm.device.protocols import Device

STAND_IN = "CUDA stand-in"
"""Begins the name that the stand-in gives its device. No GPU is called that."""


def is_stand_in(device_name: str) -> bool:
    """Whether a device of this name is the stand-in."""
    return "stand-in" in device_name


def computes_on_cpu(device: Device) -> bool:
    """Whether a CPU does the work of `device`, so that sizes made for a GPU would take it hours."""
    return device.simulated or is_stand_in(device.name)
