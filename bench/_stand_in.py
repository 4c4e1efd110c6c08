"""Keeps figures of the CUDA stand-in of our tests apart from a GPU's: times are waived, files are in another folder."""

from __future__ import annotations

from pathlib import Path

from chameleon_mm.device import Device

STAND_IN = "CUDA stand-in"
"""Beginning of the stand-in's device name. No GPU has such a name."""

NOT_MEASURED = f"not measured: {STAND_IN}"


def is_stand_in(device_name: str) -> bool:
    """True if a device of this name is the stand-in."""
    return "stand-in" in device_name


def computes_on_cpu(device: Device) -> bool:
    """True if a CPU does the work of `device`: sizes made for a GPU would take hours."""
    return device.simulated or is_stand_in(device.name)


def check_place(path: Path, *, root: Path | None, stand_in: bool) -> None:
    """Raise `ValueError` if `stand_in` and `path` is in, or is, the folder of results of the checkout at `root`."""
    if stand_in and root is not None and path.resolve().is_relative_to(root / "bench" / "results"):
        raise ValueError(
            f"{path}: expected a folder other than bench/results, which holds what was measured on hardware, as this ran on "
            f"the {STAND_IN}; name another one"
        )
