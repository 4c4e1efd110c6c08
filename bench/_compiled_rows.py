"""`chameleon-mm bench training --compile`: a step with compiled blocks within budgets, by each way of keeping them, predicted.

    steps = [a step on shapes alone for each value of torch's activation_memory_budget]
    for budget in (a session's default, what never moves + idle activations / 4 and / 8):
        rows = predict_compiled(steps, budget).ways          # the figures of `chameleon-mm plan --compile`

Times are prices of the kernels that Inductor's rules make (docs/plan.md). Nothing is compiled, and nothing runs.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from rich.console import Console

from chameleon_mm.bench._measure import Cell, Figure, Results, Waived, columns
from chameleon_mm.device.sim import SimDevice
from chameleon_mm.plan.unswapped_memory import least_memory, peak_memory
from chameleon_mm.tools.prediction import PARTITIONS, Way, default_budget, predict_compiled
from chameleon_mm.tools.session_on_shapes import RunRequest, Swapped, record
from chameleon_mm.tools.workload import built_in
from chameleon_mm.units import GIB, MIB, format_size

MODEL, ROWS = "llama-7b", 4
"""Model that is compiled, and rows of a batch by default; --seq is its context by default."""

_PARTS = (4, 8)
"""Divisors for further budgets: each is what never moves, plus the activations idle at the peak divided by one of these."""

_NAMES = {
    "no swapping": "no swap",
    "this plan": "SwapSession, partition chosen",
    "torch's partition": "SwapSession, torch's partition",
    "memory budget": "activation_memory_budget alone",
}
"""Names of the rows, by the ways of a prediction."""

_COLUMNS = {
    "step_ms": ("step ms", "predicted"),
    "ratio": ("x no swap", "step / step of no swap"),
    "peak_gib": ("peak GiB", "most bytes in live tensors / 2**30"),
}


def compiled_rows(args: argparse.Namespace, device: SimDevice, console: Console) -> Results:
    """Predict the step for each budget. `args`: those of `bench training`; a SimDevice gives prices and capacity."""
    request = RunRequest(
        build=built_in(MODEL, batch=args.batch or ROWS, seq=args.seq, layers=args.layers), spec=device.spec, swapped=Swapped(),
        hbm_budget_bytes=default_budget(device.spec), host_budget_bytes=None, dtype=torch.bfloat16, optimizer="adamw-fused",
        min_bytes=MIB,
    )  # fmt: skip
    with console.status("recording a step for each partition ..."):
        steps = [record(replace(request, compiled=share)) for share in PARTITIONS]
    own, results = steps[0].trace, Results("training", device, columns(_COLUMNS, simulated=True))
    results.notes.append(f"{steps[0].about}, each block compiled, bfloat16, AdamW fused: predicted from shapes, nothing ran")
    never, idle = least_memory(own).nbytes, peak_memory(own).nbytes - least_memory(own).nbytes
    for budget in (request.hbm_budget_bytes, *(never + idle // part for part in _PARTS)):
        ways = {way.name: way for way in predict_compiled(steps, device.spec, budget, None).ways}
        for name, told_as in _NAMES.items():
            cells = _cells(ways.get(name), own.duration_us)
            results.add(f"{told_as}, {format_size(budget)}", {"way": name, "budget_bytes": budget}, cells)
    return results


def _cells(way: Way | None, unswapped_us: float) -> dict[str, Cell]:
    if way is None:
        return dict.fromkeys(_COLUMNS, Waived("nothing of this kind keeps within the budget"))
    values = (way.step_us / 1e3, "ms"), (way.step_us / unswapped_us, "x"), (way.peak_bytes / GIB, "GiB")
    return {key: Figure.of([value], unit, simulated=True) for key, (value, unit) in zip(_COLUMNS, values, strict=True)}
