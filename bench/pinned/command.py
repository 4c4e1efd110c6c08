"""`chameleon-mm bench pinned`: the allocator of pinned memory by itself, beside what else there is.

    operations:  a block released and another allocated, with 256 and 100,000 others live     -> us, by peer
    waste:       recorded training steps played to every allocator                            -> reserved / live, ...
    pinning:     by threads and page size, beside the driver's way and torch's                -> GB/s
    copies:      D2H into a block, beside a torch pinned tensor                               -> GB/s, ratio
    bounds:      what the pool promises, each held or not

Times of the host are measured on any machine, and waste is counted; the rest needs a GPU and is WAIVED without one.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from chameleon_mm.bench._measure import Results, Waived, add_output_arguments, environment
from chameleon_mm.bench._report import Bound, Report, median_of, over
from chameleon_mm.bench.pinned import operations, rates, waste
from chameleon_mm.bench.pinned.traces import trace_names
from chameleon_mm.device import resolve_device
from chameleon_mm.device.protocols import Device
from chameleon_mm.units import GIB, MIB, parse_size

PARTS = ("operations", "waste", "pinning", "copies")

MAX_FREE_LIST_US, MAX_POOL_US, MAX_GROWTH = 1.5, 5.0, 3.0
MAX_REPLAY_RATIO, MAX_BEST_FIT_RATIO, MAX_LOCKED_RATIO = 1.05, 1.10, 1.02
MIN_PINNING_GBPS, MIN_PINNING_RATIO, MAX_COPY_LOSS = 8.0, 3.0, 0.01


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options on `parser`."""
    add_output_arguments(parser)
    parser.add_argument(
        "--parts", metavar="PART,...", default=",".join(PARTS), help=f"which of {', '.join(PARTS)} (default: all of them)"
    )
    parser.add_argument("--traces", metavar="NAME,...", help=f"which of {', '.join(trace_names())} (default: all of them)")
    parser.add_argument(
        "--live", metavar="N,...", default="256,100000", help="live blocks beside those that are timed (default: %(default)s)"
    )
    parser.add_argument("--pin", metavar="SIZE", help="bytes to pin at a time (default: 1GiB on a GPU, 256MiB without one)")
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="samples of each time (default: %(default)s)")


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure, print, write what was asked for. 1 if a bound is missed that does not depend on the machine, else 0.

    Raises `ValueError` for bad usage, before anything is measured.
    """
    parts = _names("--parts", args.parts, PARTS)
    traces = _names("--traces", args.traces, trace_names()) if args.traces else ()
    live = tuple(_positive("--live", text) for text in args.live.split(","))
    _positive("--repeats", str(args.repeats))
    device = resolve_device(args.device)
    nbytes = parse_size(args.pin, what="--pin") if args.pin else 256 * MIB if device.simulated else GIB
    if not nbytes:
        raise ValueError("--pin: expected at least one byte, got 0")
    with console.status("measuring ..."):
        report = measure(device, parts, traces=traces, live=live, nbytes=nbytes, repeats=args.repeats)
    report.deliver(args, console)
    return int(report.failed)


def measure(
    device: Device,
    parts: Sequence[str] = PARTS,
    *,
    traces: Sequence[str] = (),
    live: Sequence[int] = operations.LIVE,
    nbytes: int = GIB,
    repeats: int = 9,
) -> Report:
    """The tables of `parts` on `device`, and the bounds on what they show. Without a GPU they bear the processor's name."""
    tables: dict[str, Results] = {}
    bounds: list[Bound] = []
    if "operations" in parts:
        tables["operations"] = operations.measure(device, live, repeats=repeats)
        bounds += operation_bounds(tables["operations"])
    if "waste" in parts:
        tables["waste"], ours = waste.measure(device, traces)
        bounds += waste_bounds(ours)
    if "pinning" in parts:
        tables["pinning"] = rates.pinning(device, nbytes, repeats=min(repeats, 3))
        bounds += pinning_bounds(tables["pinning"])
    if "copies" in parts:
        tables["copies"] = rates.copies(device, repeats=repeats)
        bounds += copy_bounds(tables["copies"])
    header = environment("pinned", device)
    if device.simulated:
        # Nothing here is the simulator's: without a GPU what is measured is the host, and so the figures bear its name.
        header |= {"device": processor_name(), "simulated": False}
    for table in tables.values():
        table.header |= {"device": header["device"], "simulated": header["simulated"]}
    return Report(header=header, tables=tables, bounds=bounds)


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What the kernel calls the first processor; the architecture where it does not say."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == "model name"]
    return names[0] if names and names[0] else platform.machine() or "unknown processor"


def operation_bounds(table: Results) -> list[Bound]:
    """At 256 live blocks or fewer the times themselves; for each larger number, the growth over the smallest."""
    bounds = []
    rows = sorted(table.rows, key=lambda row: int(row.params["live"]))
    ours = (
        ("free_list", "FreeList", MAX_FREE_LIST_US),
        ("pool", "PinnedPool", MAX_POOL_US),
        ("pool_event", "PinnedPool with an event", MAX_POOL_US),
    )
    for key, what, limit in ours:
        first = median_of(rows[0].cells[key])
        bounds.append(_bound(f"{what}, release and allocate, {rows[0].name}", limit, "us", first))
        for row in rows[1:]:
            later = median_of(row.cells[key])
            growth = later if isinstance(later, Waived) else over(later, first)
            bounds.append(_bound(f"{what}, {row.name} over {rows[0].name}", MAX_GROWTH, "x", growth))
    return bounds


def waste_bounds(ours: Mapping[tuple[str, str], waste.Waste]) -> list[Bound]:
    """Reserved over live on each trace, with a plan and without; and what rounding costs."""
    limits = {"best fit": MAX_BEST_FIT_RATIO, "replay": MAX_REPLAY_RATIO}
    bounds = []
    for (trace, allocator), found in ours.items():
        if allocator in limits:
            name = f"{trace}, {allocator}"
            limit = limits[allocator]
            bounds.append(_bound(f"{name}: reserved / peak live", limit, "", found.reserved_ratio, counted=True))
            if found.locked_ratio is not None:
                bounds.append(_bound(f"{name}: locked / requested", MAX_LOCKED_RATIO, "", found.locked_ratio, counted=True))
    return bounds


def pinning_bounds(table: Results) -> list[Bound]:
    cells = {row.name: row.cells for row in table.rows}
    ours, theirs = (median_of(cells[name]["total"]) for name in ("ours, as the pool does", "torch pin_memory"))
    return [
        _bound("pinning", MIN_PINNING_GBPS, "GB/s", ours, at_most=False),
        _bound("pinning over torch's", MIN_PINNING_RATIO, "x", over(ours, theirs), at_most=False),
    ]


def copy_bounds(table: Results) -> list[Bound]:
    """Judged on the largest copy: the small ones are mostly the call."""
    largest = max(table.rows, key=lambda row: int(row.params["bytes"]))
    ratio, pending = (median_of(largest.cells[key]) for key in ("ratio", "pending"))
    return [
        _bound(f"{largest.name} into a block over a torch pinned tensor", 1 - MAX_COPY_LOSS, "x", ratio, at_most=False),
        _bound(f"{largest.name}: the call returns before the copy ends", 1.0, "", pending, at_most=False),
    ]


def _bound(name: str, limit: float, unit: str, found: float | Waived, *, at_most: bool = True, counted: bool = False) -> Bound:
    return Bound(name=name, limit=limit, unit=unit, found=found, at_most=at_most, counted=counted)


def _names(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{option}: expected some of {', '.join(known)}, got {', '.join(unknown)!r}")
    return names


def _positive(option: str, text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"{option}: expected whole numbers of 1 or more, got {text!r}")
    return int(text)
