"""Describes what this machine offers: each part is probed on its own, and one that is missing is a row, never a crash.

    report = collect()          # software, gpu, host, device, transfer; data
    run(json_path, console)     # the same, shown, and written as JSON where a path is given

The table and the JSON say the same.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from chameleon_mm.device import Device, present_device
from chameleon_mm.doctor.gpu import gpus
from chameleon_mm.doctor.host import host, software
from chameleon_mm.doctor.report import DoctorReport, Finding, Machine, Unavailable, render, run_probe
from chameleon_mm.doctor.transfer import transfer
from chameleon_mm.outputs import tell_written
from chameleon_mm.transfer import CalibrationCache
from chameleon_mm.units import MIB, format_size, format_us

__all__ = ["DoctorReport", "Finding", "Machine", "collect", "render", "run"]

PIN_TRIAL_BYTES = 256 * MIB
_PROGRAM_TIMEOUT_S = 20


def collect(machine: Machine | None = None, cache: CalibrationCache | None = None) -> DoctorReport:
    """Look at everything. Never raises for a missing part. Starts CUDA where there is one, pins 256 MiB for a moment and
    measures the link for up to 5 s.

    `machine` says where to look (None: this one), `cache` where to keep what was measured (None: the user's own).
    """
    machine = machine or Machine(root=Path("/"), run=run_program)
    chosen: list[Device] = []
    return DoctorReport(
        findings=(
            *software(machine),
            *gpus(machine),
            *host(machine),
            *_device(chosen),
            *transfer(chosen, cache or CalibrationCache()),
        )
    )


def run(json_path: Path | None, console: Console) -> int:
    """Collect, show on `console`, write JSON to `json_path` if given. The exit code: 0, whatever was found.

    Raises `OSError` when the file cannot be written.
    """
    report = collect()
    console.print(render(report))
    if json_path is not None:
        json_path.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
        tell_written(console, json_path)
    return 0


def run_program(command: Sequence[str]) -> str:
    """Run a program and return what it printed. Raises `Unavailable` when it is not there, fails or takes longer than 20 s."""
    name, *arguments = command
    path = shutil.which(name)
    if path is None:
        raise Unavailable(f"{name}: not on the PATH")
    try:
        done = subprocess.run(
            [path, *arguments], capture_output=True, text=True, errors="replace", timeout=_PROGRAM_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{name}: {error}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Unavailable(f"{name}: {said[0] if said else f'exit code {done.returncode}'}")
    return done.stdout


def _device(chosen: list[Device]) -> Iterator[Finding]:
    """Rows of the section `device`: what device=None stands for here, which goes to `chosen`, and whether it can pin."""

    def choose() -> tuple[str, Any]:
        device = present_device()
        chosen.append(device)
        about = {
            "name": device.name,
            "torch_device": str(device.torch_device),
            "simulated": device.simulated,
            "capacity_bytes": device.capacity,
            "driver": device.driver,
        }
        return f"{device.name} ({device.torch_device}), {format_size(device.capacity)} for tensors", about

    def pin() -> tuple[str, Any]:
        if not chosen:
            raise Unavailable("there is no device to pin for")
        return pin_trial(chosen[0], PIN_TRIAL_BYTES)

    yield run_probe("device", "device=None picks", choose)
    yield run_probe("device", "pinned allocation", pin)


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
