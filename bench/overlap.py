"""Compute and copies at the same time: slowdown of compute by copies, and the share of the copies' time that compute hides.

    hidden:     for work in (matrix products, a memory-bound loop), for ways in (H2D, D2H, both):
                    interleave: compute alone | copies alone | serial: compute, then copies | together: both from the same start
                    slowdown = compute beside copies / compute alone
                    hidden   = (serial - together) / copies alone      # the serial run of the same work, not a constant
    saturated:  matrix products together with copies that last longer than the products and never pause
                    kept     = copies alone / copies with compute
    packed:     the same with batches that are packed and copied out, as fast as the link takes them

    chameleon-mm bench overlap --json overlap.json

On the simulator, streams share only the host's time to launch. Its figures show that time, and no contention.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from rich.console import Console

from chameleon_mm.bench._buffers import Buffers
from chameleon_mm.bench._measure import Cell, Column, Figure, Results, Waived, columns, environment, interleave
from chameleon_mm.bench._overlap_work import (  # fmt: skip
    PACKED_TENSORS,
    Beside,
    Sample,
    Sizes,
    Traffic,
    compute_us,
    copier,
    count_for,
    operators,
    packed_copies,
)
from chameleon_mm.bench._report import Bound, Found, Report, median_of
from chameleon_mm.bench._stand_in import computes_on_cpu, is_stand_in
from chameleon_mm.device import resolve_device
from chameleon_mm.device.protocols import Device
from chameleon_mm.units import MIB, format_size

WAYS: dict[str, tuple[str, ...]] = {"H2D": ("h2d",), "D2H": ("d2h",), "both ways": ("h2d", "d2h")}
MAX_SLOWDOWN, MIN_KEPT = 1.01, 0.97

_COPY_SHARE = 0.9  # time of the copies / time of the compute: all copies could be hidden
_LONGER = 1.25  # time of the copies / time of the compute: copies never pause while compute runs
_LIMIT_S = 3.0

_GPU_SIZES = Sizes(gemm=8192, stream_elements=128 * MIB, dtype=torch.bfloat16, chunk_bytes=32 * MIB, target_us=30_000)
_CPU_SIZES = Sizes(gemm=768, stream_elements=4 * MIB, dtype=torch.float32, chunk_bytes=1 * MIB, target_us=150)
_STAND_IN_SIZES = replace(_CPU_SIZES, gemm=256, stream_elements=MIB // 4, batches=1)  # Triton's interpreter: 0.25 s a MiB

_FORMULAS = {
    "compute": ("compute us", "operators alone"),
    "copies": ("copies us", "copies alone"),
    "slowdown": ("slowdown", "compute beside copies / compute alone, by round"),
    "hidden": ("hidden", "(compute then copies - both from one start) / copies alone, by round: 1 is all of it"),
    "kept": ("of link", "copies of as many bytes alone / what runs beside compute, in time, by round"),
    "gbps": ("alone GB/s", "bytes / time of copies alone / 1e9"),
}


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure, print, and write the files asked for. Returns 0; raises `ValueError` for an unknown device."""
    device = resolve_device(args.device)
    with console.status("measuring ..."):
        report = measure(device, sizes_for(device), repeats=args.repeats)
    report.deliver(args, console)
    return 0


def sizes_for(device: Device) -> Sizes:
    """Sizes of work that `device` does in milliseconds."""
    if is_stand_in(device.name):
        return _STAND_IN_SIZES
    return _CPU_SIZES if device.simulated else _GPU_SIZES


def measure(device: Device, sizes: Sizes, *, repeats: int = 7) -> Report:
    """Measure every table, and the bounds on the saturated link, including packed copies."""
    # Virtual time repeats itself exactly, which the second round shows; times of the CUDA stand-in are not used.
    repeats = min(repeats, 2) if computes_on_cpu(device) else repeats
    tables = {
        "hidden": Results("overlap", device, _columns(device, "compute", "copies", "slowdown", "hidden")),
        "saturated": Results("overlap, saturated link", device, _columns(device, "slowdown", "kept", "gbps")),
        "packed": Results("overlap, packed copies", device, _columns(device, "slowdown", "kept", "gbps")),
    }
    tables["hidden"].notes.append("gemm: matrix products; mul: products by element, bound by memory bandwidth")
    tables["packed"].notes.append(f"each batch is {PACKED_TENSORS} tensors, {format_size(sizes.chunk_bytes)} in all")
    with Buffers(device) as buffers, device.compute():
        copies, packed = (make(device, buffers, sizes.chunk_bytes) for make in (copier, packed_copies))
        for work, operator in operators(device, sizes).items():
            count = count_for(partial(compute_us, device, operator), sizes.target_us)
            alone_us = compute_us(device, operator, count)

            def row(
                table: str, name: str, traffic: Traffic, names: tuple[str, ...], units: int,
                peers: tuple[str, ...], operator: Callable[[], None] = operator, count: int = count,
            ) -> None:  # fmt: skip
                beside = Beside(traffic, operator, count, names, units).peers()
                beside["copies"] = partial(copies.run, names, units)
                samples = interleave({peer: beside[peer] for peer in peers}, warmup=1, repeats=repeats, limit_s=_LIMIT_S)
                nbytes = units * sizes.chunk_bytes * len(names)
                params = {"operators": count, "copies_each_way": units, "bytes": nbytes}
                tables[table].add(name, params, derive(device, samples, nbytes))

            for ways, names in WAYS.items():
                units = count_for(partial(copies.run_us, names), _COPY_SHARE * alone_us)
                row("hidden", f"{work}, {ways}", copies, names, units, ("compute", "copies", "serial", "together"))
                if work == "gemm":
                    units = count_for(partial(copies.run_us, names), _LONGER * alone_us)
                    row("saturated", f"gemm, {ways}", copies, names, units, ("compute", "copies", "together"))
            if work == "gemm":
                units = sizes.batches or count_for(partial(copies.run_us, ("d2h",)), _LONGER * alone_us)
                row("packed", "gemm, packed D2H", packed, ("d2h",), units, ("compute", "copies", "together"))
    found = bounds(device, tables["saturated"], tables["packed"])
    return Report(header=environment("overlap", device), tables=tables, bounds=found)


def bounds(device: Device, *tables: Results) -> list[Bound]:
    """Bounds on the slowdown of matrix products by copies, including packed ones, and of copies by matrix products."""
    waived: Found = Waived(f"measured on a CUDA GPU alone; this run is on a {device.name}")
    found = []
    for row in (row for table in tables for row in table.rows):
        slowdown, kept = (waived if device.simulated else median_of(row.cells[key]) for key in ("slowdown", "kept"))
        found.append(Bound(name=f"{row.name}: slowdown", limit=MAX_SLOWDOWN, unit="x", found=slowdown))
        found.append(Bound(name=f"{row.name}: of the link", limit=MIN_KEPT, found=kept, at_most=False))
    return found


def derive(device: Device, samples: Mapping[str, Sequence[Sample]], nbytes: int) -> dict[str, Cell]:
    """Cells of a row from the samples of its peers, round by round. They contain the hidden share if there is a serial run,
    else the kept share."""
    rounds = list(zip(samples["compute"], samples["copies"], samples["together"], strict=True))
    figures = {"slowdown": ([together.compute_us / compute.compute_us for compute, _, together in rounds], "1")}
    if "serial" in samples:
        hidden = [
            (serial.total_us - both.total_us) / copies.total_us
            for serial, (_, copies, both) in zip(samples["serial"], rounds, strict=True)
        ]
        figures |= {
            "compute": ([compute.total_us for compute, _, _ in rounds], "us"),
            "copies": ([copies.total_us for _, copies, _ in rounds], "us"),
            "hidden": (hidden, "1"),
        }
    else:
        figures |= {
            "kept": ([alone.traffic_us / together.traffic_us for _, alone, together in rounds], "1"),
            "gbps": ([nbytes / (alone.traffic_us * 1e3) for _, alone, _ in rounds], "GB/s"),
        }
    return {key: Figure.of(values, unit, simulated=device.simulated) for key, (values, unit) in figures.items()}


def _columns(device: Device, *keys: str) -> tuple[Column, ...]:
    return columns({key: _FORMULAS[key] for key in keys}, simulated=device.simulated)
