"""`chameleon-mm demo`: arguments in, three runs, a table and an exit code out.

    unswapped = train(...)                        # its peak gives the default budget
    swapped = train(..., SwapSession)
    plain = train_plain(...)                      # the same training without the library: the reference
    table, the session's report, verdicts, JSON

torch is imported when the command runs, not when its arguments are declared, so that help is fast.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from chameleon_mm.files import write_file
from chameleon_mm.tools.outputs import check_outputs, print_line, print_table, tell_written
from chameleon_mm.units import format_size, format_size_up, format_us, parse_size

if TYPE_CHECKING:
    from chameleon_mm.device.protocols import Device
    from chameleon_mm.report.report import SwapReport

SIZES: dict[str, dict[str, int]] = {
    "simulated": {"steps": 6, "layers": 4, "width": 64, "heads": 2, "context": 8192, "batch": 1},
    "real": {"steps": 20, "layers": 12, "width": 1024, "heads": 16, "context": 1024, "batch": 16},
    "simulated, --ratio": {"steps": 6, "layers": 12, "width": 512, "heads": 8, "context": 256, "batch": 2},
    "real, --ratio": {"steps": 20, "layers": 24, "width": 2048, "heads": 16, "context": 1024, "batch": 8},
}
"""Default sizes. Activations are over four fifths of the unswapped peak; with --ratio half of it is parameters, gradients and
optimizer state. Simulated sizes are computed on the CPU: only a long context gives a narrow model the compute per saved byte
of a real one. Real sizes take about 20 GiB, and 40 GiB with --ratio."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the demo's options on `parser`."""
    where = "cuda, cuda:1, sim (an H200), sim:a100, ... (default: CUDA where there is one, else sim)"
    parser.add_argument("--device", metavar="DEVICE", help=where)
    budget = parser.add_mutually_exclusive_group()
    half = 'device memory the swapped run may use: "300MiB" (default: half of what it uses unswapped)'
    budget.add_argument("--hbm-budget", metavar="SIZE", help=half)
    budget.add_argument(
        "--ratio", type=float, metavar="N",
        help="train within 1/N of the device memory that it takes unswapped, with parameters, gradients and optimizer state "
        "swapped, too; other default sizes: a model too large for its device",
    )  # fmt: skip
    for name, simulated in SIZES["simulated"].items():
        text = f"of the GPT and its training (default {simulated} simulated, {SIZES['real'][name]} on a GPU)"
        parser.add_argument(f"--{name}", type=int, metavar="N", help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="every figure as data")


def run(args: argparse.Namespace, console: Console, environment: Callable[[str, Device], Mapping[str, Any]]) -> int:
    """Run the demo and return its exit code: 0 if all runs are bit-identical and the budget held, 1 if not.

    `environment(theme, device)` is the header of the JSON. Raises `ValueError` and `DeviceUnavailable` for bad usage, and
    `torch.OutOfMemoryError` where a run does not fit.
    """
    from chameleon_mm.device import present_device, resolve_device

    check_outputs({"--json": args.json})
    budget_bytes = None if args.hbm_budget is None else parse_size(args.hbm_budget, what="--hbm-budget")
    if args.ratio is not None and not 1.0 < args.ratio < float("inf"):
        raise ValueError(f"--ratio: expected more than 1, got {args.ratio:g}; 4 trains within a quarter of the memory")
    # Each run has a fresh device on the simulator, the same GPU again on CUDA.
    devices = [present_device() if args.device is None else resolve_device(args.device) for _ in range(2)]
    device = devices[1]
    kind = ("simulated" if device.simulated else "real") + ("" if args.ratio is None else ", --ratio")
    sizes = {name: default if (given := getattr(args, name)) is None else given for name, default in SIZES[kind].items()}
    figures, report = _train(sizes, devices, budget_bytes, args.ratio, console)
    show(figures, report, device, console)
    if args.json is not None:
        write_file(args.json, json.dumps({**environment("demo", device), **figures}, indent=1) + "\n")
        tell_written(console, args.json)
    return 0 if figures["passed"] else 1


def _train(
    sizes: Mapping[str, int], devices: Sequence[Device], budget_bytes: int | None, ratio: float | None, console: Console
) -> tuple[dict[str, Any], SwapReport]:
    """Train without swapping and with it on `devices`, then in plain PyTorch. Returns figures, ready for JSON, and a report."""
    from chameleon_mm.tools import demo as training
    from chameleon_mm.tools.demo import GPTConfig

    config = GPTConfig(**{name: sizes[name] for name in ("layers", "width", "heads", "context")})
    rows = training.draw_rows(training.read_text(), **{name: sizes[name] for name in ("steps", "batch", "context")})
    with console.status("training without swapping ..."):
        unswapped = training.train(config, rows, devices[0])
    budget_bytes = int(unswapped.peak_bytes / (ratio or 2)) if budget_bytes is None else budget_bytes
    with console.status("training with swapping ..."):
        swap = {"hbm_budget": budget_bytes, "parameters": "keep" if ratio is None else "swap"}
        swapped = training.train(config, rows, devices[1], swap)
    with console.status("training in plain PyTorch ..."):
        plain = training.train_plain(config, rows, devices[1].torch_device)
    report = swapped.report
    assert report is not None
    difference, to_plain = (training.first_difference(values, swapped.values) for values in (unswapped.values, plain))
    held = swapped.peak_bytes <= budget_bytes
    figures = {
        "schema": "chameleon_mm.tools/6", "config": dict(sizes), "hbm_budget_bytes": budget_bytes, "ratio": ratio,
        "budget_held": held, "first_difference": difference, "first_difference_to_plain": to_plain,
        "passed": held and difference is to_plain is None,
        "unswapped": unswapped.to_dict(), "swapped": swapped.to_dict(), "report": report.to_dict(),
    }  # fmt: skip
    return figures, report


def show(figures: Mapping[str, Any], report: SwapReport, device: Device, console: Console) -> None:
    """Print both runs in a table, the session's report, the model's sizes, and the verdicts."""
    table = Table()
    for name in ("", "no swapping", "swapping"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in table_rows(figures, device):
        table.add_row(*row)
    print_line(console, f"chameleon-mm demo on {device.name}", style="bold")
    print_table(console, table)
    print_line(console, f"{report}\n")
    print_line(console, "GPT: " + ", ".join(f"{name} {value}" for name, value in figures["config"].items()))
    if device.simulated:
        print_line(console, "no GPU took part: computed on the CPU; times and copy speeds are simulated")
    for line in verdicts(figures, device):
        print_line(console, line, style="bold" if figures["passed"] else "bold red")


def table_rows(figures: Mapping[str, Any], device: Device) -> list[tuple[str, str, str]]:
    """Rows of the table: label, without swapping, with swapping."""
    one, other = figures["unswapped"], figures["swapped"]
    # The first step warms up or is recorded, so the median excludes it.
    one_us, other_us = (format_us(statistics.median(run["step_us"][1:] or run["step_us"])) for run in (one, other))
    budget = f"{format_size(figures['hbm_budget_bytes'])}, {'held' if figures['budget_held'] else 'NOT held'}"
    return [
        ("peak device memory", format_size(one["peak_bytes"]), format_size(other["peak_bytes"])),
        ("HBM budget", "-", budget),
        (f"step, median{' (simulated)' if device.simulated else ''}", one_us, other_us),
        # Nine digits distinguish any two float32 values.
        ("loss, first step", f"{one['losses'][0]:.9g}", f"{other['losses'][0]:.9g}"),
        ("loss, last step", f"{one['losses'][-1]:.9g}", f"{other['losses'][-1]:.9g}"),
    ]


def verdicts(figures: Mapping[str, Any], device: Device) -> list[str]:
    """Return lines that say whether bits are identical and whether the budget was kept."""
    difference, to_plain = figures["first_difference"], figures["first_difference_to_plain"]
    bits, same = "every loss and gradient norm, final weights, random state", f"same training on {device.torch_device.type}"
    lines = [
        "bit-identical: " + (f"yes ({bits})" if difference is None else f"no - {difference}"),
        "bit-identical to plain PyTorch: " + (f"yes ({same}, no chameleon_mm)" if to_plain is None else f"no - {to_plain}"),
    ]
    if not figures["budget_held"]:
        peak = figures["swapped"]["peak_bytes"]
        above = format_size(peak - figures["hbm_budget_bytes"])
        lines.append(f"budget not held: the peak is {above} above it; raise --hbm-budget to {format_size_up(peak)}")
    return lines
