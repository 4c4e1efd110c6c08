"""What runs on the CUDA stand-in of our tests, and never passes for a GPU's figure.

is_stand_in(device.name)         # by the name that the stand-in gives its device
computes_on_cpu(device)          # the stand-in or a simulator: sizes have to be small
withheld(record)                 # the record with null for every time and rate; bytes, counts and verdicts stay
check_place(path, stand_in=...)  # bench/results is for what was measured
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chameleon_mm.device import Device

STAND_IN = "CUDA stand-in"
"""Begins the name that the stand-in gives its device. No GPU is called that."""

NOT_MEASURED = f"not measured: {STAND_IN}"

NO_TRITON = f"not run: {STAND_IN}, on which nothing that Triton compiles can run"

NO_SANITIZER = f"not run: {STAND_IN}, and compute-sanitizer watches kernels on a GPU"

NO_NVIDIA_SMI = f"not asked: {STAND_IN}, of which nvidia-smi knows nothing"

NO_CUPTI = f"not run: {STAND_IN}, which has no CUPTI, without which torch.profiler does not start"

NOT_RUN = {
    "kernels of Triton": NO_TRITON,
    "compute-sanitizer": NO_SANITIZER,
    "nvidia-smi": NO_NVIDIA_SMI,
    "torch.profiler": NO_CUPTI,
}
"""What no rehearsal on the stand-in reaches, and why."""

_TIMES = ("_us", "_ms", "_s", "_gbps", "_fraction")
"""Ends of the names of times, rates and shares of times."""


def is_stand_in(device_name: str) -> bool:
    """Whether a device of this name is the stand-in."""
    return "stand-in" in device_name


def computes_on_cpu(device: Device) -> bool:
    """Whether a CPU does the work of `device`, so that sizes made for a GPU would take it hours."""
    return device.simulated or is_stand_in(device.name)


def withheld(record: Any) -> Any:
    """`record`, as JSON has it, with null in place of each number that may be a time or a rate: every float, and what is named
    as one."""
    if isinstance(record, dict):
        return {key: None if _is_time(key, value) else withheld(value) for key, value in record.items()}
    if isinstance(record, list | tuple):
        return [withheld(value) for value in record]
    return None if isinstance(record, float) else record


def _is_time(key: str, value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and key.endswith(_TIMES))


def check_place(path: Path, *, root: Path | None, stand_in: bool) -> None:
    """Raise `ValueError` if `stand_in` and `path` is, or lies in, the folder of results of the checkout at `root`."""
    if stand_in and root is not None and path.resolve().is_relative_to(root / "bench" / "results"):
        raise ValueError(
            f"{path}: expected a folder other than bench/results, which holds what was measured on hardware, as this ran on "
            f"the {STAND_IN}; name another one"
        )
