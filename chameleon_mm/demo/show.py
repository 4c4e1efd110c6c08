"""The demo's outcome for people: the runs side by side, planned against measured by kind of step, then what it means.

rows(outcome) -> [(what, without swapping, with swapping)]         # pure, so that tests read it
kind_rows(outcome) -> [(what, steps of 8,192 bytes, evaluation, ...)]
show(outcome, console)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from chameleon_mm.demo.outcome import KindFigures, Outcome
from chameleon_mm.demo.program import StepKind
from chameleon_mm.demo.train import RunResult, same_bits
from chameleon_mm.outputs import print_line, print_table
from chameleon_mm.units import format_size, format_size_up, format_us


def rows(outcome: Outcome) -> list[tuple[str, str, str]]:
    """The table's rows: what, without swapping, with swapping."""
    report, unswapped, swapped = outcome.report, outcome.unswapped, outcome.swapped
    clock = _clock(outcome)
    return [
        ("peak device memory", format_size(unswapped.peak_bytes), format_size(swapped.peak_bytes)),
        ("HBM budget", "-", f"{format_size(outcome.hbm_budget_bytes)}, {'held' if outcome.budget_held else 'NOT held'}"),
        ("model (parameters, buffers)", format_size(unswapped.model_bytes), format_size(swapped.model_bytes)),
        ("peak host memory", "-", format_size(report["peak_host_bytes"])),
        *_moved(outcome),
        (
            f"share of copy time hidden{clock}",
            "-",
            _measured(report["hidden_fraction"], "{:.1%}".format),
        ),
        (f"stall, {_timed(report)}{clock}", "-", _measured(report["stall_us"], format_us)),
        ("what the steps were", "-", ", ".join(f"{n} {what}" for what, n in report["steps_by_phase"].items()) or "-"),
        ("steps recorded in detail", "-", str(report["detailed_steps"])),
        ("plans made, host time", "-", f"{report['plans']}, {format_us(report['planning_us'])}"),
        ("steps that had a plan already", "-", str(report["plan_cache_hits"])),
        ("loss, first step", *_losses(unswapped, swapped, 0)),
        ("loss, last step", *_losses(unswapped, swapped, -1)),
    ]


_CLASSES = {"activations": "", "parameters": "parameter_", "gradients": "gradient_", "optimizer state": "state_"}


def _moved(outcome: Outcome) -> list[tuple[str, str, str]]:
    """Rows of what moved in all steps: by class where more than activations may."""
    report = outcome.report
    if outcome.ratio is None:
        ways = (("out", "bytes_swapped_out"), ("in", "bytes_swapped_in"))
        return [(f"swapped {way}, all steps", "-", format_size(report[name])) for way, name in ways]
    return [
        (f"{what} out / in", "-", " / ".join(format_size(report[f"{kind}bytes_swapped_{way}"]) for way in ("out", "in")))
        for what, kind in _CLASSES.items()
    ]


def kind_rows(outcome: Outcome) -> list[tuple[str, ...]]:
    """The second table's rows: what, and a column for each of `outcome.by_kind()`."""
    clock = _clock(outcome)

    def time_text(us: float) -> str:
        return _measured(us, format_us)

    cells: list[tuple[str, Callable[[KindFigures], str]]] = [
        ("steps, of them recorded", lambda kind: f"{kind.steps}, {kind.recorded}"),
        (f"step, no swapping{clock}", lambda kind: time_text(kind.unswapped_us)),
        (f"step, planned{clock}", lambda kind: _or_none(kind.planned_us, time_text)),
        (f"step, measured{clock}", lambda kind: time_text(kind.measured_us)),
        ("peak, no swapping", lambda kind: format_size(kind.unswapped_peak_bytes)),
        ("peak, planned", lambda kind: _or_none(kind.planned_peak_bytes, format_size)),
        ("peak, measured", lambda kind: format_size(kind.measured_peak_bytes)),
    ]
    if outcome.ratio is not None:  # a plan's time is of a step whose parameters are there
        cells = [cell for cell in cells if not cell[0].startswith("step, planned")]
    kinds = outcome.by_kind()
    return [(what, *map(text, kinds)) for what, text in cells]


def verdicts(outcome: Outcome) -> list[str]:
    """Lines that say what the figures mean; those about the bits come first."""
    lines = []
    if outcome.difference is None:
        lines.append("bit-identical: yes (every loss and gradient norm, final weights, random state)")
    else:
        lines.append(f"bit-identical: no - {outcome.difference}")
    if outcome.reproducible is False:
        lines.append(
            "the unswapped run does not reproduce itself on this device, so this comparison says nothing about swapping"
        )
    if outcome.plain_difference is None:
        where = outcome.device.torch_device.type
        lines.append(f"bit-identical to plain PyTorch: yes (same training on {where}, no chameleon_mm)")
    else:
        lines.append(f"bit-identical to plain PyTorch: no - {outcome.plain_difference}")
    if outcome.plain_reproducible is False:
        lines.append(
            "plain PyTorch does not reproduce itself on this device, so this comparison says nothing about chameleon_mm"
        )
    lines.extend(outcome.remarks)
    if outcome.ratio is not None and outcome.floor is not None:
        budget, peak, floor = map(
            format_size, (outcome.hbm_budget_bytes, outcome.unswapped.peak_bytes, outcome.floor.smallest_bytes)
        )
        lines.append(
            f"ratio {outcome.ratio:g}: within {budget} of the {peak} that it takes unswapped, from the model's building on; "
            f"the floor is {floor}: {outcome.floor.why}"
        )
    if not outcome.budget_held:
        kept = ", ".join(f"{reason}: {count}" for reason, count in outcome.report["kept_by_reason"].items()) or "nothing"
        above = format_size(outcome.swapped.peak_bytes - outcome.hbm_budget_bytes)
        lines.append(
            f"budget not held: the peak is {above} above it; saved tensors kept on the device: {kept}; raise --hbm-budget to "
            f"{_enough(outcome)}, or lower --min-bytes where small ones add up"
        )
    return lines


def show(outcome: Outcome, console: Console) -> None:
    """Print the table, what it was measured on, and the verdicts."""
    config, model = outcome.config, outcome.config.model
    table = Table()
    table.add_column("")
    table.add_column("no swapping", justify="right", no_wrap=True)
    table.add_column("swapping", justify="right", no_wrap=True)
    for row in rows(outcome):
        table.add_row(*row)
    by_kind = Table()
    by_kind.add_column("by kind of step", no_wrap=True)
    for kind in outcome.by_kind():
        by_kind.add_column(kind.kind.name, justify="right", no_wrap=True)
    for cells in kind_rows(outcome):
        by_kind.add_row(*cells)
    print_line(console, f"chameleon-mm demo on {outcome.device.name}", style="bold")
    print_table(console, table)
    print_table(console, by_kind)
    print_line(
        console,
        f"GPT: layers {model.layers}, width {model.width}, heads {model.heads}, context {model.context}; "
        f"batch {config.batch}, seed {config.seed}",
    )
    print_line(console, f"steps {config.steps}: {_sequence(config.kinds)}")
    if outcome.device.simulated:
        print_line(console, "no GPU took part: computed on the CPU; times and copy speeds are simulated")
    for line in verdicts(outcome):
        print_line(console, line, style="bold" if outcome.passed else "bold red")


def _enough(outcome: Outcome) -> str:
    """A budget that would do: the peak is one that was kept, and where there was no plan the remarks say what one takes."""
    by_plan = " (and what plans take, above)" if outcome.remarks else ""
    return f"{format_size_up(outcome.swapped.peak_bytes)}, which this run took{by_plan}"


def _losses(unswapped: RunResult, swapped: RunResult, step: int) -> tuple[str, str]:
    first, second = unswapped.losses[step], swapped.losses[step]
    mark = "same bits" if same_bits(first, second) else "DIFFERS"
    return f"{first.item():.9g}", f"{second.item():.9g} ({mark})"  # nine digits tell any two float32 apart


def _measured(value: float | None, text: Callable[[float], str]) -> str:
    return "not measured" if value is None else text(value)


def _clock(outcome: Outcome) -> str:
    return " (simulated)" if outcome.device.simulated else ""


def _or_none(value: float | None, text: Callable[[float], str]) -> str:
    return "no plan" if value is None else text(value)


def _timed(report: Mapping[str, Any]) -> str:
    """Which steps the stall was measured in: on a GPU timing costs time, and a session times only some."""
    return "all steps" if report["timed_steps"] == report["steps"] else f"{report['timed_steps']} timed steps"


def _sequence(kinds: Sequence[StepKind]) -> str:
    """Kinds in order, those alike in a row as one."""
    return ", ".join(f"{sum(1 for _ in alike)} x {kind.name}" for kind, alike in groupby(kinds))
