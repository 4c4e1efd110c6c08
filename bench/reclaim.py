"""`chameleon-mm bench reclaim`: device memory of a step whose saved tensors are copied out, by each way of giving it back.

    no swapping      nothing moves
    record_stream    copied out at the save; the block is left to torch's allocator
    Python           a session: reclaimed at hooks of autograd
    allocator        a session with the C++ helper `reclaim`: in the middle of an allocation, too

    chameleon-mm bench reclaim --device cuda --svg reclaim.svg

Only with torch's own caching allocator, so on CUDA. In the step that counts the model makes tensors beside its layers for a
moment, where no hook runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from chameleon_mm.bench._environment import write_text
from chameleon_mm.bench._measure import Cell, Column, Figure, Results, Waived, add_output_arguments, check_share
from chameleon_mm.bench._reclaim_svg import reclaim_svg
from chameleon_mm.bench.probe.reclaim_steps import LAYER_BYTES, LAYERS, SURPRISE, WAYS, Curve, has_helper, watched
from chameleon_mm.device import CudaDevice, resolve_device
from chameleon_mm.units import MIB, format_size

COLUMNS = (
    Column(key="active", title="active MiB", formula="peak of active_bytes above the start / 2**20", on_stand_in=True),
    Column(key="reserved", title="reserved MiB", formula="peak of reserved_bytes above the start / 2**20", on_stand_in=True),
    Column(key="ratio", title="reserved / active", formula="one peak / the other", on_stand_in=True),
    Column(key="retries", title="retries", formula="num_alloc_retries of all steps", on_stand_in=True),
    Column(key="inside", title="in malloc MiB", formula="reclaimed by the allocator in all steps / 2**20", on_stand_in=True),
)
_NO_HELPER = Waived("the C++ helper `reclaim` is not built: run `chameleon-mm native`")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Register the options of `chameleon-mm bench reclaim`."""
    add_output_arguments(parser)
    parser.add_argument(
        "--share", type=float, default=0.4, metavar="SHARE",
        help="of what a step takes unswapped, what a session's budget is, 0 < share < 1 (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--svg", metavar="FILE", help="write the curves as a picture to FILE (needs matplotlib)")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run all ways, print, write what was asked for. Returns 1 if two of them have other losses. Raises `ValueError`."""
    device = resolve_device(args.device)
    if not isinstance(device, CudaDevice):
        raise ValueError(f"--device: expected a CUDA GPU, on which torch's caching allocator runs, got {device.name}")
    check_share(args.share)
    with console.status("running ..."):
        curves, budget = measure(args.share)
    results = table(curves, budget, device)
    results.deliver(args, console)
    if args.svg:
        title = f"Device memory over one step of {LAYERS} layers, torch's own allocator ({device.name})"
        write_text(Path(args.svg), reclaim_svg(curves, budget, title), results.header)
    return int(len({curve.loss for curve in curves}) > 1)


def measure(share: float) -> tuple[list[Curve], int]:
    """The curves of all ways there are, and the sessions' budget in bytes above the start."""
    unswapped = watched("no swapping")
    budget = int((unswapped.peak_active_bytes - unswapped.start_bytes) * share)
    ways = [way for way in WAYS[1:] if way != "allocator" or has_helper()]
    return [unswapped, *(watched(way, budget) for way in ways)], budget


def table(curves: list[Curve], budget_bytes: int, device: CudaDevice) -> Results:
    """A row for each way."""
    results = Results("reclaim", device, COLUMNS)
    same = len({curve.loss for curve in curves}) == 1
    results.notes += [
        f"{LAYERS} layers of {format_size(LAYER_BYTES)}, and {SURPRISE} tensors more for a moment in the middle of forward",
        f"the sessions' budget is {format_size(budget_bytes)} above the start; all losses equal: {'yes' if same else 'NO'}",
    ]
    by_way = {curve.way: curve for curve in curves}
    for way in WAYS:
        curve = by_way.get(way)
        results.add(way, {"budget_bytes": budget_bytes}, dict.fromkeys(_KEYS, _NO_HELPER) if curve is None else _cells(curve))
    return results


_KEYS = tuple(column.key for column in COLUMNS)


def _cells(curve: Curve) -> dict[str, Cell]:
    figures = (
        ((curve.peak_active_bytes - curve.start_bytes) / MIB, "MiB"),
        ((curve.peak_reserved_bytes - curve.start_bytes) / MIB, "MiB"),
        (curve.peak_reserved_bytes / curve.peak_active_bytes, "1"),
        (curve.retries, "allocations"),
        (curve.by_allocator_bytes / MIB, "MiB"),
    )
    return {key: Figure.of([value], unit, simulated=False) for key, (value, unit) in zip(_KEYS, figures, strict=True)}
