"""Describes what this machine offers, and says what is missing and which command mends it.

    report = collect()          # rows of software, gpu, host, device, transfer: data
    run(json_path, console)     # the same, shown, and written as JSON where a path is given

A part that is missing is a row, never a crash.
"""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from chameleon_mm.doctor.findings import DoctorReport, render
from chameleon_mm.doctor.probes import device_rows, gpu_rows, host_rows, software_rows
from chameleon_mm.outputs import tell_written
from chameleon_mm.transfer import CalibrationCache

__all__ = ["DoctorReport", "collect", "run"]


def collect(root: Path = Path("/"), cache: CalibrationCache | None = None) -> DoctorReport:
    """Look at everything. Never raises for a missing part. Starts CUDA where there is one, and copies for less than a second.

    `root` is where `proc` and `sys` lie; `cache` keeps the measured link rates (None: the user's own).
    """
    rows = (software_rows(root), gpu_rows(root), host_rows(root), device_rows(cache or CalibrationCache()))
    return DoctorReport(findings=tuple(row for section in rows for row in section))


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
