"""`chameleon-mm bench pack`: rate of many tensors to pinned memory by each way, and the host time of packing.

    rates:    n x size, and single blocks      -> GB/s by way
    host:     the same runs                                            -> host us per tensor by way
    bounds:   the promised limits, each held or not

    chameleon-mm bench pack --json pack.json --svg pack.svg

On a simulator all figures are simulated and marked so. Figures and bounds that it cannot give are WAIVED.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from rich.console import Console

from chameleon_mm.bench._buffers import Buffers
from chameleon_mm.bench._environment import write_text
from chameleon_mm.bench._figure import svg_of
from chameleon_mm.bench._measure import Cell, Figure, Results, Waived, columns, environment, interleave
from chameleon_mm.bench._pack_ways import NAMES, Sample, Way, Ways, Work, is_exact, measured
from chameleon_mm.bench._report import Bound, Found, Report, median_of, most, over
from chameleon_mm.bench._stand_in import NOT_MEASURED, computes_on_cpu, is_stand_in
from chameleon_mm.device import resolve_device
from chameleon_mm.device.protocols import Device
from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.units import KIB, MIB, format_size, parse_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

SIZES_BYTES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB)
SINGLES_BYTES = (16 * MIB, 64 * MIB, 256 * MIB)
_CPU_SINGLES_BYTES = (16 * MIB,)  # one core really moves every byte

MULTIPLE_BYTES = 512
"""Divisor of every size, so that packed tensors are adjacent."""

_GPU_TOTAL_BYTES = 64 * MIB
_CPU_TOTAL_BYTES = 16 * MIB
_CPU_MOST_TENSORS = 256
_LIMIT_S = 1.5

MIN_SINGLE, MIN_OVER_LOOP, MIN_LINK, MAX_HOST_US = 0.99, 10.0, 0.8, 1.0

_MANY_BYTES = (4 * KIB, 16 * KIB)
_LINK_BYTES = 16 * KIB


class Case(NamedTuple):
    """Row of the table: a number of tensors of `nbytes` each."""

    nbytes: int
    tensors: int

    @property
    def name(self) -> str:
        return f"{self.tensors} x {_size(self.nbytes)}"


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure, print, and write the files asked for. Returns 1 if a way delivered a wrong byte, else 0.

    Raises `ValueError` for bad usage, before anything is measured.
    """
    sizes = _parse_sizes(args.sizes)
    if args.repeats < 1:
        raise ValueError(f"--repeats: expected 1 or more, got {args.repeats}")
    device = resolve_device(args.device)
    with console.status("measuring ..."):
        report = measure(device, cases(device, sizes), repeats=args.repeats)
    report.deliver(args, console)
    if args.svg and is_stand_in(device.name):
        raise ValueError(
            f"--svg: expected a GPU or a simulator, whose rates are a picture, got rates {NOT_MEASURED}; leave it out"
        )
    if args.svg:
        write_text(Path(args.svg), picture(report.tables["rates"], device), report.header)
    return int(report.failed)


def cases(device: Device, sizes: Sequence[int] = SIZES_BYTES) -> list[Case]:
    """All rows: `sizes`, then single blocks. Fewer bytes if a CPU moves them all."""
    many = [Case(size, _count(device, size)) for size in sizes]
    return many + [Case(size, 1) for size in (_CPU_SINGLES_BYTES if computes_on_cpu(device) else SINGLES_BYTES)]


def measure(device: Device, rows: Sequence[Case], *, repeats: int = 7) -> Report:
    """Measure the tables of `rows` on `device`, and the bounds on their figures."""
    if computes_on_cpu(device):
        repeats = min(repeats, 2)  # virtual time repeats itself, which the second round shows; the stand-in's is not used
    ways = columns(NAMES, simulated=device.simulated)
    rates, host = (Results(f"pack, {what}", device, ways) for what in ("GB/s", "host us per tensor"))
    rates.notes.append("GB/s: size * tensors / time between two events around everything / 1e9")
    host.notes.append("host us: time until all was handed over / tensors; without what our queue only waits for the link")
    wrong = 0
    for case in rows:
        try:
            with Buffers(device) as buffers:
                taken, exact = _sample(device, Work.of(buffers, case.nbytes, case.tensors), repeats)
        except (HostMemoryExhausted, torch.OutOfMemoryError) as error:  # a device too small for this row still has the others
            taken, exact = dict.fromkeys(NAMES, Waived(str(error))), {}
        wrong += list(exact.values()).count(False)
        params = {"bytes": case.nbytes, "tensors": case.tensors, "exact": exact}
        rates.add(case.name, params, _cells(device, taken, "GB/s"))
        host.add(case.name, params, _cells(device, taken, "us"))
    bounds = [
        Bound(name="ways that delivered other bytes", limit=0, found=float(wrong), counted=True),
        *rate_bounds(device, rates),
        host_bound(device, host),
    ]
    return Report(header=environment("pack", device), tables={"rates": rates, "host": host}, bounds=bounds)


def rate_bounds(device: Device, rates: Results) -> list[Bound]:
    """Bounds on single blocks and on many small ones, against the loop and against the link."""
    single = [row for row in rates.rows if row.params["tensors"] == 1]
    many = {row.params["bytes"]: row for row in rates.rows if row not in single}
    no_row: Found = Waived("no such row was measured") if not device.simulated else _no_gpu(device)

    def found(row: Mapping[str, Cell] | None, way: str) -> Found:
        return no_row if row is None or device.simulated else median_of(row[way])

    bounds = []
    for row in single:
        name = f"{row.name}: ours over a loop of copies"
        bounds.append(_at_least(name, MIN_SINGLE, over(found(row.cells, "ours"), found(row.cells, "loop"))))
    for nbytes in _MANY_BYTES:
        cells = many[nbytes].cells if nbytes in many else None
        name, ours = _size(nbytes), found(cells, "ours")
        bounds.append(_at_least(f"many of {name}: ours over a loop of copies", MIN_OVER_LOOP, over(ours, found(cells, "loop"))))
    link = most([found(row.cells, way) for row in single for way in ("ours", "loop")] or [no_row])
    ours = found(many[_LINK_BYTES].cells if _LINK_BYTES in many else None, "ours")
    return [*bounds, _at_least("many of 16 KiB: share of the link, as single blocks have it", MIN_LINK, over(ours, link))]


def host_bound(device: Device, host: Results) -> Bound:
    """Bound on the host time of packing per tensor, including the kernel's launch."""
    many = [row for row in host.rows if row.params["tensors"] > 1]
    smallest = min(many, key=lambda row: int(row.params["bytes"]), default=None)
    found: Found = Waived("no many tensors were measured") if smallest is None else median_of(smallest.cells["pack"])
    found = _no_gpu(device) if device.simulated else found
    return Bound(name="host us per packed tensor", limit=MAX_HOST_US, unit="us", found=found)


def picture(rates: Results, device: Device) -> str:
    """SVG of the GB/s of each way by size, for many tensors. Needs matplotlib."""
    rows = [row for row in rates.rows if row.params["tensors"] > 1]
    how = "simulated, no GPU took part" if device.simulated else "measured"

    def draw(figure: Drawing) -> None:
        axes = figure.subplots()
        for key, (title, _) in NAMES.items():
            points = [(row.params["bytes"], cell.median) for row in rows if isinstance(cell := row.cells[key], Figure)]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=title)
        sizes = sorted({int(row.params["bytes"]) for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [_size(nbytes) for nbytes in sizes])
        axes.set_xlabel("size of one tensor")
        axes.set_ylabel("GB/s")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)

    return svg_of(f"{device.name}, many tensors to pinned memory ({how})", (7.6, 4.0), draw)


def _sample(device: Device, work: Work, repeats: int) -> tuple[dict[str, list[Sample] | Waived], dict[str, bool]]:
    ways = Ways(device, work).by_name()
    waived = {name: way for name, way in ways.items() if isinstance(way, Waived)}
    running: dict[str, Way] = {name: way for name, way in ways.items() if not isinstance(way, Waived)}
    expected = work.expected
    exact = {name: is_exact(device, work, way, expected) for name, way in running.items()}
    peers = {name: partial(measured, device, work, way) for name, way in running.items()}
    samples = interleave(peers, warmup=1, repeats=repeats, limit_s=_LIMIT_S)
    return waived | samples, exact


def _cells(device: Device, taken: Mapping[str, list[Sample] | Waived], unit: str) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for name, samples in taken.items():
        figure: Cell
        if isinstance(samples, Waived):
            figure = samples
        else:
            values = [sample.gbps if unit == "GB/s" else sample.host_us for sample in samples]
            figure = Figure.of(values, unit, simulated=device.simulated)
        cells[name] = figure
    return cells


def _size(nbytes: int) -> str:
    return format_size(nbytes).replace(".00", "").replace(".0", "")


def _no_gpu(device: Device) -> Waived:
    return Waived(f"measured on a CUDA GPU alone; this run is on a {device.name}")


def _at_least(name: str, limit: float, found: Found) -> Bound:
    return Bound(name=name, limit=limit, unit="x", found=found, at_most=False)


def _count(device: Device, size: int) -> int:
    if computes_on_cpu(device):
        return max(2, min(_CPU_MOST_TENSORS, _CPU_TOTAL_BYTES // size))
    return max(2, _GPU_TOTAL_BYTES // size)


def _parse_sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(parse_size(part, what="--sizes") for part in text.split(","))
    if not all(size and size % MULTIPLE_BYTES == 0 for size in sizes):
        raise ValueError(f"--sizes: expected multiples of {MULTIPLE_BYTES} bytes, got {text!r}; round them")
    return sizes
