"""`chameleon-mm bench timeline`: one step of a small GPT on a simulated GPU, without swapping and by a plan, as a picture.

    no swapping:  step, peak
    by the plan:  step, stall, peak, bytes each way, copies that ran beside kernels

    chameleon-mm bench timeline --svg timeline.svg

Runs only on a simulator: reading the clocks of its streams does not change them. It draws the picture in the README.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

from rich.console import Console

from chameleon_mm.bench._environment import write_text
from chameleon_mm.bench._measure import Cell, Results, Waived, columns, simulated_figure
from chameleon_mm.bench._timeline_run import Comparison, watched
from chameleon_mm.bench._timeline_step import Step
from chameleon_mm.bench._timeline_svg import timeline_svg
from chameleon_mm.device import SimDevice, resolve_device
from chameleon_mm.tools.demo import GPTConfig
from chameleon_mm.units import MIB, format_size

COLUMNS = columns(
    {
        "step": ("step ms", "virtual time from the step's begin to its end"),
        "stall": ("stall us", "virtual time that compute waited for copies"),
        "peak": ("peak MiB", "most bytes in live tensors, model and optimizer included"),
        "out": ("out MiB", "bytes copied to the host"),
        "back": ("back MiB", "bytes copied back"),
        "beside": ("beside %", "100 * time of copies beside kernels / time of copies"),
    },
    simulated=True,
)
CONFIG = GPTConfig(layers=4, width=64, heads=2, context=8192)
SHARE = 0.62
"""Part of a step's added memory that fits into the budget."""

_NONE_MOVED = Waived("nothing is copied without swapping")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run both steps, print, and write the files asked for. Returns 0. Raises `ValueError` for bad usage."""
    device = resolve_device(args.device)
    if not isinstance(device, SimDevice):
        raise ValueError(f"--device: expected a simulated GPU, whose clocks can be read, got {device.name}; take sim:h200")
    with console.status("running ..."):
        found = watched(device.spec, CONFIG, SHARE)
    results = table(found, device)
    results.deliver(args, console)
    if args.svg:
        write_text(Path(args.svg), timeline_svg(found), results.header)
    return 0


def table(found: Comparison, device: SimDevice) -> Results:
    """Table with one row per step."""
    results = Results("timeline", device, COLUMNS)
    config = found.config
    results.notes += [
        f"GPT: layers {config.layers}, width {config.width}, heads {config.heads}, context {config.context}; batch 1, AdamW",
        f"HBM budget {format_size(found.hbm_budget_bytes)}; {len(found.plan.actions)} storages move",
        f"the plan foresaw a step of {found.plan.step_us / 1e3:.2f} ms with a stall of {found.plan.stall_us:.1f} us",
    ]
    for name, step in (("no swapping", found.unswapped), ("by the plan", found.planned)):
        results.add(name, {"budget_bytes": found.hbm_budget_bytes}, _cells(step))
    return results


def beside_kernels(step: Step) -> float:
    """Share of the time of a step's copies during which a kernel ran. Raises `ValueError` for a step without copies."""
    copies_us = sum(copy.end_us - copy.start_us for copy in step.copies)
    if not copies_us:
        raise ValueError("beside_kernels: expected a step with copies, got one without; swap something")
    pairs = product(step.copies, step.kernels)
    return sum(max(0.0, min(a.end_us, b.end_us) - max(a.start_us, b.start_us)) for a, b in pairs) / copies_us


def _cells(step: Step) -> dict[str, Cell]:
    cells: dict[str, Cell] = {
        "step": simulated_figure(step.step_us / 1e3, "ms"),
        "stall": simulated_figure(step.stall_us, "us"),
        "peak": simulated_figure(step.peak_bytes / MIB, "MiB"),
    }
    if not step.copies:
        return cells | dict.fromkeys(("out", "back", "beside"), _NONE_MOVED)
    for key, direction in (("out", "d2h"), ("back", "h2d")):
        moved = sum(copy.nbytes for copy in step.copies if copy.direction == direction)
        cells[key] = simulated_figure(moved / MIB, "MiB")
    return cells | {"beside": simulated_figure(100 * beside_kernels(step), "%")}
