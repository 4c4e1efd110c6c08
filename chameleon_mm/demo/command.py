"""`chameleon-mm demo`: arguments in, three runs, a table and an exit code out.

    unswapped = train(...)                        # its peak gives the default budget
    swapped = train(..., SwapSession)
    plain = train_plain(...)                      # the same training with nothing of the library around it: the judge
    table, the session's report, verdicts, JSON

torch is imported when the command runs, not when its arguments are declared: help stays fast.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from chameleon_mm.outputs import check_outputs, print_line, print_table, tell_written
from chameleon_mm.units import format_size, format_size_up, format_us, parse_size

if TYPE_CHECKING:
    from chameleon_mm.demo.training import Program
    from chameleon_mm.device.protocols import Device
    from chameleon_mm.report import SwapReport
    from chameleon_mm.session import SwapSession

SIZES: dict[str, dict[str, int]] = {
    "simulated": {"steps": 6, "layers": 4, "width": 64, "heads": 2, "context": 8192, "batch": 1},
    "real": {"steps": 20, "layers": 12, "width": 1024, "heads": 16, "context": 1024, "batch": 16},
}
"""Default sizes by kind of device. Activations are over four fifths of the unswapped peak. Simulated ones are computed on the
CPU: only a long context gives a narrow model the compute per saved byte of a real one. Real ones take about 20 GiB."""

RATIO_SIZES: dict[str, dict[str, int]] = {
    "simulated": {"steps": 6, "layers": 12, "width": 512, "heads": 8, "context": 256, "batch": 2},
    "real": {"steps": 20, "layers": 24, "width": 2048, "heads": 16, "context": 1024, "batch": 8},
}
"""Default sizes under --ratio: weights, gradients and AdamW's state are half of the unswapped peak or more. Real ones take
about 40 GiB."""

_SIZE_HELP = {
    "steps": "steps of each run", "layers": "transformer blocks", "width": "width of the residual stream",
    "heads": "attention heads, a divisor of the width", "context": "bytes per row", "batch": "rows per step",
}  # fmt: skip


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
    for name, text in _SIZE_HELP.items():
        simulated, real = (SIZES[kind][name] for kind in ("simulated", "real"))
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{text} (default {simulated} simulated, {real} on a GPU)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every figure as data")
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="the swapped run's report as a page")
    parser.add_argument("--trace", type=Path, metavar="FILE.json", help="the swapped run's copies, for Perfetto")


def run(args: argparse.Namespace, console: Console, environment: Callable[[str, Device], Mapping[str, Any]]) -> int:
    """Run the demo and return its exit code: 0 if all runs are bit-identical and the budget held, 1 if not.

    `environment(theme, device)` is the header of the JSON. Raises `ValueError` and `DeviceUnavailable` for bad usage, and
    `torch.OutOfMemoryError` where a run does not fit.
    """
    from chameleon_mm.device import present_device, resolve_device

    check_outputs({"--json": args.json, "--report": args.report, "--trace": args.trace})
    budget_bytes = None if args.hbm_budget is None else parse_size(args.hbm_budget, what="--hbm-budget")
    if args.ratio is not None and not 1.0 < args.ratio < float("inf"):
        raise ValueError(f"--ratio: expected more than 1, got {args.ratio:g}; 4 trains within a quarter of the memory")

    def new_device() -> Device:  # a fresh one on the simulator, the same GPU again on CUDA
        return present_device() if args.device is None else resolve_device(args.device)

    device = new_device()
    defaults = (SIZES if args.ratio is None else RATIO_SIZES)["simulated" if device.simulated else "real"]
    sizes = {name: default if (given := getattr(args, name)) is None else given for name, default in defaults.items()}
    figures, report = _train(sizes, (new_device(), device), budget_bytes, args.ratio, console)
    show(figures, report, device, console)
    if args.report is not None:
        report.save_html(args.report)
    if args.trace is not None:
        report.save_trace(args.trace)
    if args.json is not None:
        args.json.write_text(json.dumps({**environment("demo", device), **figures}, indent=1) + "\n", encoding="utf-8")
    for path in (args.report, args.trace, args.json):
        if path is not None:
            tell_written(console, path)
    return 0 if figures["passed"] else 1


def _train(
    sizes: Mapping[str, int], devices: tuple[Device, Device], budget_bytes: int | None, ratio: float | None, console: Console
) -> tuple[dict[str, Any], SwapReport]:
    """Train three times, on `devices` without swapping and with it. Returns all figures, ready for JSON, and the report."""
    import torch

    from chameleon_mm.demo import training
    from chameleon_mm.demo.model import GPTConfig
    from chameleon_mm.session import SwapSession

    config = GPTConfig(**{name: sizes[name] for name in ("layers", "width", "heads", "context")})
    rows = training.draw_rows(training.read_text(), **{name: sizes[name] for name in ("steps", "batch", "context")})
    built = None if ratio is None else torch.device("cpu")
    sessions: list[SwapSession] = []

    def session_of(program: Program) -> SwapSession:
        more: dict[str, Any] = {} if ratio is None else {"optimizer": program.optimizer, "parameters": "swap"}
        sessions.append(SwapSession(budget_bytes, device=devices[1], model=program.model, **more))
        return sessions[0]

    with console.status("training without swapping ..."):
        unswapped = training.train(config, rows, devices[0], built=built)
    budget_bytes = int(unswapped.peak_bytes / (ratio or 2)) if budget_bytes is None else budget_bytes
    with console.status("training with swapping ..."):
        swapped = training.train(config, rows, devices[1], session_of, built=built)
    with console.status("training in plain PyTorch ..."):
        plain = training.train_plain(config, rows, devices[1].torch_device, built=built)
    # The run reset the device's peaks before each step, and read them after it: of them all the session knows less.
    report = replace(sessions[0].report(), peak_hbm_bytes=swapped.peak_bytes, peak_hbm_at_most_bytes=swapped.peak_bytes)
    difference, to_plain = (training.first_difference(values, swapped.values) for values in (unswapped.values, plain))
    figures = {
        "schema": "chameleon_mm.demo/5", "config": dict(sizes), "hbm_budget_bytes": budget_bytes, "ratio": ratio,
        "budget_held": report.budget_held, "first_difference": difference, "first_difference_to_plain": to_plain,
        "passed": bool(report.budget_held) and difference is to_plain is None,
        "unswapped": unswapped.to_dict(), "swapped": swapped.to_dict(), "report": report.to_dict(),
    }  # fmt: skip
    return figures, report


def show(figures: Mapping[str, Any], report: SwapReport, device: Device, console: Console) -> None:
    """Print the runs beside each other, the session's report, what they were measured on, and the verdicts."""
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
    """Rows of the table: what, without swapping, with swapping."""

    def step(run: Mapping[str, Any]) -> str:
        times = run["step_us"][1:] or run["step_us"]  # the first step warms up or is recorded
        return format_us(statistics.median(times))

    def both(what: str, text: Callable[[Mapping[str, Any]], str]) -> tuple[str, str, str]:
        return what, text(figures["unswapped"]), text(figures["swapped"])

    held = "held" if figures["budget_held"] else "NOT held"
    return [
        both("peak device memory", lambda run: format_size(run["peak_bytes"])),
        ("HBM budget", "-", f"{format_size(figures['hbm_budget_bytes'])}, {held}"),
        both(f"step, median{' (simulated)' if device.simulated else ''}", step),
        both("loss, first step", lambda run: f"{run['losses'][0]:.9g}"),  # nine digits tell any two float32 apart
        both("loss, last step", lambda run: f"{run['losses'][-1]:.9g}"),
    ]


def verdicts(figures: Mapping[str, Any], device: Device) -> list[str]:
    """Lines that say what the figures mean."""
    where = device.torch_device.type
    said = {
        "bit-identical": ("first_difference", "every loss and gradient norm, final weights, random state"),
        "bit-identical to plain PyTorch": ("first_difference_to_plain", f"same training on {where}, no chameleon_mm"),
    }
    lines = [
        f"{what}: {f'yes ({of})' if figures[name] is None else f'no - {figures[name]}'}" for what, (name, of) in said.items()
    ]
    if not figures["budget_held"]:
        peak = figures["swapped"]["peak_bytes"]
        above = format_size(peak - figures["hbm_budget_bytes"])
        lines.append(f"budget not held: the peak is {above} above it; raise --hbm-budget to {format_size_up(peak)}")
    return lines
