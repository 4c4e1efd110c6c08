"""Compares a session's plan with the measured steps, and both with the lower bound of any plan.

add_planned(planned_table(device), ...)    step, peak, stall, recomputation:  predicted | measured | error
add_classes(classes_table(device), ...)    bytes kept, swapped, recomputed, held, and what went out and was dropped after all
add_bound(bound_table(device), ...)        budget | T* | share of it that the session reaches | the checkpointed run

T* is `ideal` of the step that the session recorded. Its operators' times are scaled to add up to the step without swapping, so
that they exclude the host's cost of recording. T* includes recomputation if the session recomputes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from statistics import median

from chameleon_mm.bench._measure import Cell, Figure, Results, Waived, columns
from chameleon_mm.bench._training_run import PeerRun
from chameleon_mm.device.protocols import Device
from chameleon_mm.errors import InfeasibleBudget
from chameleon_mm.plan.bounds import ideal
from chameleon_mm.units import GIB

Outcome = PeerRun | Waived

QUANTITIES = ("step ms", "peak GiB", "stall ms", "recomputing ms")


def planned_table(device: Device) -> Results:
    """Table of predicted and measured figures: four rows for each session."""
    return _table(
        device,
        {
            "predicted": ("predicted", "by the plan that was followed"),
            "measured": ("measured", "median of the timed steps; stall: the mean; recomputing: step - stall - step of no swap"),
            "error": ("error %", "100 * (measured - predicted) / predicted; of stall and recomputing: / measured step"),
        },
    )


def _table(device: Device, about: Mapping[str, tuple[str, str]]) -> Results:
    return Results("training", device, columns(about, simulated=device.simulated))


def add_planned(table: Results, name: str, key: str, outcome: Outcome, baseline: PeerRun) -> None:
    """Add the four rows of one planned session."""
    if isinstance(outcome, Waived):
        for quantity in QUANTITIES:
            table.add(f"{name}: {quantity}", {"peer": key, "quantity": quantity}, dict.fromkeys(_keys(table), outcome))
        return
    found = outcome.followed
    assert found is not None
    step_us, plan = median(outcome.step_us), found.plan
    stall: float | Waived = Waived("no step was timed inside") if found.stall_us is None else found.stall_us / 1e3
    again = stall if isinstance(stall, Waived) else (step_us - median(baseline.step_us)) / 1e3 - stall
    predicted = plan.step_us / 1e3, plan.peak_bytes / GIB, plan.stall_us / 1e3, plan.recompute_us / 1e3
    measured = step_us / 1e3, outcome.steady_peak_bytes / GIB, stall, again
    figure = partial(Figure.of, simulated=table.columns[0].simulated)
    for quantity, foreseen, came, of in zip(QUANTITIES, predicted, measured, (None, None, step_us, step_us), strict=True):
        unit = quantity.split()[-1]
        cells: dict[str, Cell] = {"predicted": figure([foreseen], unit)}
        if isinstance(came, Waived):
            cells["measured"] = cells["error"] = came
        else:
            cells["measured"] = figure([came], unit)
            cells["error"] = figure([100 * (came - foreseen) / (foreseen if of is None else of / 1e3)], "%")
        table.add(f"{name}: {quantity}", {"peer": key, "quantity": quantity}, cells)
    unsteady = "" if found.steady else ": NOT steady: a plan was still on trial, or a step went by none"
    table.notes.append(f"{name}: another plan after steps {', '.join(map(str, found.changes))}{unsteady}")


def classes_table(device: Device) -> Results:
    """Table of the bytes that a plan keeps, swaps, recomputes and holds: one row for each planned session."""
    planned = {
        "kept": "stays",
        "swapped": "crosses the link, each way; held storages that do are in it",
        "recomputed": "is dropped and recomputed",
        "held": "is kept beyond its life, for others to be recomputed from it",
    }
    done = {"out": "bytes that went to the host", "dropped": "bytes that were dropped, to be recomputed"}
    foreseen = {key: (key, f"by the plan: GiB of what {what}") for key, what in planned.items()}
    counted = {key: (key, f"counted: {what}, GiB per timed step") for key, what in done.items()}
    both = (*columns(foreseen, simulated=device.simulated), *columns(counted, on_stand_in=True))
    return Results("training", device, both)


def add_classes(table: Results, name: str, key: str, outcome: Outcome) -> None:
    """Add the row of one planned session."""
    if isinstance(outcome, Waived):
        table.add(name, {"peer": key}, dict.fromkeys(_keys(table), outcome))
        return
    found = outcome.followed
    assert found is not None
    nbytes = {**found.classes, "swapped": found.plan.moved_bytes, "out": found.swapped_bytes, "dropped": found.recomputed_bytes}
    cells: dict[str, Cell] = {c.key: Figure.of([nbytes[c.key] / GIB], "GiB", simulated=c.simulated) for c in table.columns}
    table.add(name, {"peer": key}, cells)


def bound_table(device: Device) -> Results:
    """Table of T* divided by the step time of the runs: one row for each session."""
    return _table(
        device,
        {
            "budget": ("budget GiB", "kept between steps + that share of what a step adds"),
            "ideal": ("T* ms", "the least of any plan: ideal; of those that only swap, where the session only swaps"),
            "reached": ("of T*", "T* / median step of the session"),
            "checkpointing": ("checkpointing", "T* / median step of the checkpointed run, whose peak is in the first table"),
        },
    )


def add_bound(
    table: Results, name: str, share: float, run: Outcome, planned: Outcome, checkpointed: Outcome, baseline: PeerRun
) -> None:
    """Add the row of the session `run`. Its T* is of the step that `planned` recorded, which is `run` itself if that plans."""
    figure = partial(Figure.of, simulated=table.columns[0].simulated)
    budget = baseline.budget_for(share)
    cells: dict[str, Cell] = {"budget": figure([budget / GIB], "GiB")}
    least = ideal_step(planned, baseline, budget)
    if isinstance(least, Waived):
        cells |= dict.fromkeys(("ideal", "reached", "checkpointing"), least)
    else:
        cells["ideal"] = figure([least / 1e3], "ms")
        for which, outcome in (("reached", run), ("checkpointing", checkpointed)):
            cells[which] = outcome if isinstance(outcome, Waived) else figure([least / median(outcome.step_us)], "")
    table.add(name, {"share": share}, cells)


def ideal_step(planned: Outcome, baseline: PeerRun, budget: int) -> float | Waived:
    """T* in us within `budget`, or the reason why there is none."""
    if isinstance(planned, Waived):
        return planned
    found = planned.followed
    assert found is not None
    factor = median(baseline.step_us) / found.trace.duration_us
    trace = dataclasses.replace(found.trace, op_us=found.trace.op_us * factor)
    try:
        return ideal(trace, budget, found.link, recompute=found.replayable)
    except InfeasibleBudget as refusal:
        return Waived(str(refusal).splitlines()[0])


def _keys(table: Results) -> list[str]:
    return [column.key for column in table.columns]
