"""Findings about the link: what it carries, and which way a tensor of a given size goes, by a calibration made now.

link rates       each way alone, and both at once
transfer paths   the sizes at which one path ends and the next begins
path rates       the measured curve: GB/s, and the host's time per copy
kept in          the file from which later processes have it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from chameleon_mm.device import Device
from chameleon_mm.doctor.report import Finding, Unavailable, run_probe
from chameleon_mm.transfer import Calibration, CalibrationCache, Path, calibrate
from chameleon_mm.units import format_size

_MOVING = (Path.PACK, Path.DIRECT)


def transfer(chosen: Sequence[Device], cache: CalibrationCache) -> Iterator[Finding]:
    """Rows of the section `transfer`, of the first of `chosen`. Measures for up to 5 s and keeps that in `cache`."""
    found: list[Calibration] = []

    def measured() -> Calibration:
        if not found:
            raise Unavailable("nothing was measured")
        return found[0]

    def measure() -> tuple[str, Any]:
        if not chosen:
            raise Unavailable("there is no device to measure")
        device = chosen[0]
        found.append(calibrate(device, rounds=1) if device.simulated else calibrate(device))  # virtual times do not vary
        return link_text(measured()), measured().to_dict()

    yield run_probe("transfer", "link rates", measure)
    yield run_probe("transfer", "transfer paths", lambda: (paths_text(measured()), measured().to_dict()["thresholds"]))
    yield run_probe("transfer", "path rates", lambda: (curve_text(measured()), measured().to_dict()["curve"]))
    yield run_probe("transfer", "kept in", lambda: _keep(measured(), cache))


def link_text(calibration: Calibration) -> str:
    kind = "simulated: " if calibration.simulated else ""
    return (
        f"{kind}{calibration.h2d_gbps:.1f} GB/s to the device, {calibration.d2h_gbps:.1f} GB/s to the host, "
        f"{calibration.duplex_gbps:.1f} GB/s both ways at once"
    )


def paths_text(calibration: Calibration) -> str:
    """The ranges of sizes that some path serves, smallest first."""
    ends = calibration.thresholds
    served = [
        (ends.stay_below_bytes, "stays"),
        (ends.pack_below_bytes, "packed"),
    ]
    begin, parts = 0, []
    for end, what in served:
        if end > begin:
            parts.append(f"{what} below {format_size(end)}")
        begin = end
    return ", ".join([*parts, f"a copy of its own from {format_size(begin)} on"]) + _simulated(calibration)


def curve_text(calibration: Calibration) -> str:
    """One line for each size: GB/s of each path, and in brackets the host's microseconds per copy."""
    points = {(point.path, point.nbytes): point for point in calibration.curve}
    lines = [f"GB/s (host us per copy){_simulated(calibration)}", "size      " + "".join(f"{p.value:<11}" for p in _MOVING)]
    for nbytes in sorted({point.nbytes for point in calibration.curve}):
        cells = (f"{point.gbps:.1f} ({_short(point.host_us)})" for point in (points[path, nbytes] for path in _MOVING))
        lines.append(f"{format_size(nbytes):<10}" + "".join(f"{cell:<11}" for cell in cells))
    return "\n".join(line.rstrip() for line in lines)


def _short(us: float) -> str:
    return f"{us:.0f}" if us >= 9.95 else f"{us:.1f}"  # three characters: a line must fit beside the other columns in 80


def _simulated(calibration: Calibration) -> str:
    return " (simulated)" if calibration.simulated else ""


def _keep(calibration: Calibration, cache: CalibrationCache) -> tuple[str, Any]:
    if calibration.simulated:
        raise Unavailable("simulated figures are not kept")
    if not cache.store(calibration):
        raise Unavailable(f"{cache.path} cannot be written; the log says why")
    file = str(cache.file(calibration.device, calibration.driver))
    return file, file
