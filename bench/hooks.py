"""`chameleon-mm bench hooks`: host time of a saved tensor, by the action taken on it.

    stays:               it is too small to move                             save_on_cpu | a planned step of SwapSession
    moves, by hand:      only the copies, in order, with new events, tensors and memory for each
    moves by the rule:   save_on_cpu, by a separate copy | packed with others
    moves by plan:       a planned step of SwapSession that only swaps, the same two ways
    dropped by plan:     a planned step of SwapSession, its operator run again at its use
    each against hooks that do nothing, in the same round                    -> us, difference, ratio

    chameleon-mm bench hooks --device cuda --json hooks.json

Times are the host's and measured, even on a simulated device and the CUDA stand-in. These are then part of the time, and the
table says so. Each hook is timed by itself: the operators around it take longer, and vary by more than it takes.

    bounds over hooks that do nothing:   a tensor that stays: 4 us, save and use together
                                         a tensor that moves by plan: 12 us at its save, 8 us at its use
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial

from rich.console import Console

from chameleon_mm.bench._environment import environment
from chameleon_mm.bench._hooks_peers import IDENTITY, TENSOR_BYTES, Sample, peers
from chameleon_mm.bench._measure import Cell, Figure, Results, Waived, columns, interleave
from chameleon_mm.bench._report import Bound, Report, median_of
from chameleon_mm.bench._stand_in import STAND_IN, is_stand_in
from chameleon_mm.device import native, resolve_device
from chameleon_mm.device.protocols import Device
from chameleon_mm.units import format_size

_LIMIT_S = 240.0

COLUMNS = columns(
    {
        "save": ("save us", "time inside of the hooks of the forward / saved tensors"),
        "use": ("use us", "time inside of the hooks of the backward / saved tensors"),
        "save_over": ("save +us", f"save us, less that of {IDENTITY} in the same round"),
        "use_over": ("use +us", f"use us, less that of {IDENTITY} in the same round"),
        "both_over": ("both +us", "save and use together, less the same"),
        "ratio": ("both x", f"save and use together / those of {IDENTITY}, by round"),
        "left": ("left %", "100 * bytes swapped out or dropped / bytes saved"),
    },
    on_stand_in=True,
)

BOUNDS = (
    ("stays, save_on_cpu", "both_over", "save and use over hooks that do nothing", 4.0),
    ("stays, session", "both_over", "save and use over hooks that do nothing", 4.0),
    ("moves by plan, alone", "save_over", "save over a hook that does nothing", 12.0),
    ("moves by plan, alone", "use_over", "use over a hook that does nothing", 8.0),
)
"""Row, column, description, maximum in us."""


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure, print, write what was asked for. Returns 0. Raises `ValueError` for bad usage, before anything is measured."""
    for name, least in (("saves", 50), ("repeats", 1)):  # a plan for a shorter chain would move too little
        if getattr(args, name) < least:
            raise ValueError(f"--{name}: expected {least} or more, got {getattr(args, name)}")
    device = resolve_device(args.device)
    with console.status("measuring ..."):
        tables = {"saved tensors": measure(device, saves=args.saves, repeats=args.repeats)}
    report = Report(header=environment("hooks", device), tables=tables, bounds=bounds(tables["saved tensors"], device))
    report.deliver(args, console)
    return 0


def bounds(results: Results, device: Device) -> list[Bound]:
    """Bounds on the time of hooks, with the times of this run."""
    cells = {row.name: row.cells for row in results.rows}
    return [
        Bound(
            name=f"{row}: {what}",
            limit=limit,
            unit="us",
            found=Waived("the simulator's accounts are most of it") if device.simulated else median_of(cells[row][key]),
            on_stand_in=True,
        )
        for row, key, what, limit in BOUNDS
        if row in cells
    ]


def measure(device: Device, *, saves: int, repeats: int) -> Results:
    """Measure a table with a row for each way. Ways run in turn, so that drift affects all alike."""
    results = Results("hooks", device, COLUMNS)
    results.notes += [
        f"{saves} saved tensors in a step, {format_size(TENSOR_BYTES)} each; the host's work, not the link's",
        "the steps of warm-up left out; a step's own beginning and end are not in it",
        f"helpers in C++: {', '.join(filter(native.load, native.HELPERS)) or 'none; `chameleon-mm native` builds them'}",
        _beneath(device),
    ]
    samples = interleave(peers(device, saves), warmup=0, repeats=repeats, limit_s=_LIMIT_S)
    for name, taken in samples.items():
        results.add(name, {"peer": name, "saves": saves, "bytes": TENSOR_BYTES}, cells(name, taken, samples[IDENTITY]))
    return results


def cells(name: str, taken: Sequence[Sample], identity: Sequence[Sample]) -> Mapping[str, Cell]:
    """Cells of a row, from its samples and those of hooks that do nothing, round by round."""
    figure = partial(Figure.of, simulated=False)
    row: dict[str, Cell] = {
        "save": figure([sample.save_us for sample in taken], "us"),
        "use": figure([sample.use_us for sample in taken], "us"),
        "left": figure([100 * sample.left for sample in taken], "%"),
    }
    if name == IDENTITY:
        keys = ("save_over", "use_over", "both_over", "ratio")
        return row | dict.fromkeys(keys, Waived("the others are compared with it"))
    rounds = list(zip(taken, identity, strict=True))
    return row | {
        "save_over": figure([ours.save_us - none.save_us for ours, none in rounds], "us"),
        "use_over": figure([ours.use_us - none.use_us for ours, none in rounds], "us"),
        "both_over": figure([_both(ours) - _both(none) for ours, none in rounds], "us"),
        "ratio": figure([_both(ours) / _both(none) for ours, none in rounds], "x"),
    }


def _both(sample: Sample) -> float:
    return sample.save_us + sample.use_us


def _beneath(device: Device) -> str:
    if device.simulated:
        return "beneath the hooks: the simulator, whose accounts of operators, copies and waits are in every figure"
    if is_stand_in(device.name):
        return f"beneath the hooks: the runtime of the {STAND_IN}; its copies and waits are in the figures, and no driver's"
    return "beneath the hooks: CUDA's runtime"
