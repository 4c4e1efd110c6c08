"""Compute beside copies: what copies cost the compute they run beside, and how much of their own time disappears behind it.

for work in (matrix products, a memory-bound loop), for ways in (H2D, D2H, both):
    interleave: compute alone | copies alone | serial: compute, then copies | together: both from the same start
    slowdown = compute beside copies / compute alone
    hidden   = (serial - together) / copies alone          # the serial run of the same work, not a constant
then: matrix products beside copies that never pause, pack kernels, and both at once  # see _overlap_packing.py
      an urgent copy beside a large reload                                           # see _overlap_latency.py

chameleon-mm bench overlap --json overlap.json
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from rich.console import Console

from chameleon_mm.bench import _overlap_latency
from chameleon_mm.bench._buffers import Buffers
from chameleon_mm.bench._measure import Cell, Column, Results, add_output_arguments, environment, interleave
from chameleon_mm.bench._overlap_latency import CPU_RELOAD, GPU_RELOAD, Reload
from chameleon_mm.bench._overlap_packing import WAYS, beside_its_kind, bounds, packed, packing, saturated
from chameleon_mm.bench._overlap_work import Beside, Copier, Sample, Sizes, compute_us, count_for, operators
from chameleon_mm.bench._report import Report
from chameleon_mm.bench._stand_in import computes_on_cpu, is_stand_in
from chameleon_mm.device import resolve_device
from chameleon_mm.device.protocols import Device
from chameleon_mm.units import MIB

_COPY_SHARE = 0.9  # of the compute's time: the engines are busy almost throughout, and all of it could be hidden
_LIMIT_S = 3.0

_GPU_SIZES = Sizes(gemm=8192, stream_elements=128 * MIB, dtype=torch.bfloat16, chunk_bytes=32 * MIB, target_us=30_000)
_CPU_SIZES = Sizes(gemm=768, stream_elements=4 * MIB, dtype=torch.float32, chunk_bytes=1 * MIB, target_us=150)
_STAND_IN_SIZES = replace(_CPU_SIZES, launches=1)  # Triton's interpreter takes a quarter of a second for each MiB


def _columns(*, simulated: bool) -> tuple[Column, ...]:
    prefix = "simulated_" if simulated else ""
    titles = {
        "compute": ("compute us", "operators alone"),
        "copies": ("copies us", "copies alone"),
        "slowdown": ("slowdown", "compute beside copies / compute alone, by round"),
        "hidden": ("hidden", "(compute then copies - both from one start) / copies alone, by round: 1 is all of it"),
    }
    return tuple(
        Column(key=prefix + key, title=title, formula=formula, simulated=simulated) for key, (title, formula) in titles.items()
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Register the options of `chameleon-mm bench overlap`."""
    add_output_arguments(parser)
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="samples of each figure (default: %(default)s)")


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure, print, write what was asked for. Returns 0; raises `ValueError` for an unknown device."""
    device = resolve_device(args.device)
    with console.status("measuring ..."):
        report = measure_all(device, sizes_for(device), repeats=args.repeats)
    report.deliver(args, console)
    return 0


def sizes_for(device: Device) -> Sizes:
    """Work that `device` does in milliseconds."""
    if is_stand_in(device.name):
        return _STAND_IN_SIZES
    return _CPU_SIZES if device.simulated else _GPU_SIZES


def measure_all(device: Device, sizes: Sizes, *, repeats: int = 7, reload: Reload | None = None) -> Report:
    """Every table, and the bounds on the saturated link, packed copies included."""
    repeats = _repeats(device, repeats)
    tables = {"hidden": measure(device, sizes, repeats=repeats)}
    with Buffers(device) as buffers, device.compute():
        tables["saturated"] = saturated(device, buffers, sizes, repeats=repeats)
    with Buffers(device) as buffers, device.compute():
        tables["packing"] = packing(device, buffers, sizes, repeats=repeats)
    with Buffers(device) as buffers, device.compute():
        tables["packed"] = packed(device, buffers, sizes, repeats=repeats)
    with Buffers(device) as buffers:
        reload = reload or (CPU_RELOAD if computes_on_cpu(device) else GPU_RELOAD)
        tables["urgent"] = _overlap_latency.measure(device, buffers, reload, repeats=repeats)
    return Report(
        header=environment("overlap", device), tables=tables, bounds=bounds(device, tables["saturated"], tables["packed"])
    )


def measure(device: Device, sizes: Sizes, *, repeats: int = 7) -> Results:
    """The table of both kinds of compute beside copies each way and both ways at once."""
    repeats = _repeats(device, repeats)
    results = Results("overlap", device, [*_columns(simulated=False), *_columns(simulated=True)])
    results.notes.append("gemm: matrix products; mul: products by element, bound by memory bandwidth")
    with Buffers(device) as buffers, device.compute():
        copier = Copier(device, buffers, sizes.chunk_bytes)
        for work, operator in operators(device, sizes).items():
            count = count_for(partial(compute_us, device, operator), sizes.target_us)
            alone_us = compute_us(device, operator, count)
            for ways, names in WAYS.items():
                copies = count_for(partial(copier.run_us, names), _COPY_SHARE * alone_us)
                beside = Beside(copier, operator, count, names, copies)
                samples = interleave(beside.peers(), warmup=1, repeats=repeats, limit_s=_LIMIT_S)
                params = {"operators": count, "copies_each_way": copies, "bytes_each_way": copies * sizes.chunk_bytes}
                results.add(f"{work}, {ways}", params, derive(device, samples))
    return results


def _repeats(device: Device, repeats: int) -> int:
    # Virtual time repeats itself exactly, which the second round shows; what the CUDA stand-in takes is not looked at.
    return min(repeats, 2) if computes_on_cpu(device) else repeats


def derive(device: Device, samples: Mapping[str, Sequence[Sample]]) -> dict[str, Cell]:
    """The cells of one row from the samples of its four peers, round by round."""
    rounds = list(zip(*(samples[name] for name in ("compute", "copies", "serial", "together")), strict=True))
    figures = {
        "compute": ([compute.total_us for compute, _, _, _ in rounds], "us"),
        "copies": ([copies.total_us for _, copies, _, _ in rounds], "us"),
        "slowdown": ([together.compute_us / compute.compute_us for compute, _, _, together in rounds], "1"),
        "hidden": ([(serial.total_us - both.total_us) / copies.total_us for _, copies, serial, both in rounds], "1"),
    }
    return beside_its_kind(device, figures)
