"""`chameleon-mm bench lengths`: training on batches whose length changes with every step, on a simulated GPU.

    no session        each step's time and peak, nothing swapped
    plans=False       all saved tensors swapped by the default rule
    session           steps recorded, by rule and followed; none over the budget

    chameleon-mm bench lengths --svg lengths.svg

Runs only on the simulator, whose GPU is made as slow as the models are small. It draws the picture in docs/adaptation.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

from rich.console import Console

from chameleon_mm.bench._environment import write_text
from chameleon_mm.bench._length_models import MODELS, lengths_of
from chameleon_mm.bench._lengths_run import SMALL_GPU, LengthRun, run_lengths
from chameleon_mm.bench._lengths_svg import lengths_svg
from chameleon_mm.bench._measure import Cell, Results, Waived, columns, simulated_figure
from chameleon_mm.device import SimDevice, resolve_device
from chameleon_mm.units import MIB, format_size

COLUMNS = columns(
    {
        "time": ("time", "virtual time of all steps / that without a session"),
        "peak": ("peak MiB", "most bytes allocated in any step / 2**20"),
        "recorded": ("recorded", "steps that a recorder saw whole"),
        "in_part": ("in part", "steps in which some hooks followed a plan"),
        "followed": ("followed", "steps in which all hooks followed a plan"),
    },
    simulated=True,
)
MODEL, SHARE = "llama", 0.5
"""Model to train, and the budget as a share of the highest peak of any step."""

_NO_SESSION = Waived("no session: nothing is recorded")
_NO_PLANS = Waived("plans=False: nothing is recorded")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run all three, print, and write the files asked for. Returns 0. Raises `ValueError` for bad usage."""
    resolve_device(args.device)  # raises for an unknown device, with the reason
    if args.device != "sim":
        raise ValueError(f"--device: expected sim, a small GPU of the benchmark's own, got {args.device!r}; leave it out")
    if args.steps < 1:
        raise ValueError(f"--steps: expected 1 or more, got {args.steps}")
    make, lengths = MODELS[MODEL], lengths_of(args.distribution, args.steps, Random(5))
    shapes = [(1, length) for length in lengths]
    with console.status("running ..."):
        unswapped = run_lengths(make, shapes, None)
        budget = int(max(unswapped.peaks) * SHARE)
        by_rule = run_lengths(make, shapes, budget, plans=False)
        planned = run_lengths(make, shapes, budget)
    results = Results("lengths", SimDevice(SMALL_GPU), COLUMNS)
    results.notes += [
        f"{MODEL}: {args.steps} steps, {args.distribution} lengths {min(lengths)} to {max(lengths)}, rows 1",
        f"HBM budget {format_size(budget)}; losses equal to those without a session in all steps: "
        + ("yes" if planned.losses == by_rule.losses == unswapped.losses else "NO"),
    ]
    for name, one in (("no session", unswapped), ("plans=False", by_rule), ("session", planned)):
        results.add(name, {"budget_bytes": budget}, _cells(one, unswapped, name))
    results.deliver(args, console)
    if args.svg:
        title = f"{args.steps} steps of {args.distribution} lengths, {MODEL}-shaped model (simulated)"
        write_text(Path(args.svg), lengths_svg(planned, unswapped, lengths, budget, title), results.header)
    return 0


def _cells(run: LengthRun, unswapped: LengthRun, name: str) -> dict[str, Cell]:
    cells: dict[str, Cell] = {
        "time": simulated_figure(sum(run.times_us) / sum(unswapped.times_us), "ratio"),
        "peak": simulated_figure(max(run.peaks) / MIB, "MiB"),
    }
    if name != "session":
        return cells | dict.fromkeys(("recorded", "in_part", "followed"), _NO_PLANS if run.kinds else _NO_SESSION)
    kinds = {"recorded": "recorded", "in_part": "partly_planned", "followed": "planned"}
    return cells | {key: simulated_figure(run.kinds.count(kind), "steps") for key, kind in kinds.items()}
