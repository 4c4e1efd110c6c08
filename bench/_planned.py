"""What a session's plan had foreseen, beside what was measured, and beside what no plan can beat.

add_planned(planned_table(device), ...)    step, peak, stall:  predicted | measured | error
add_bound(bound_table(device), ...)        budget | T* | share of it that the planned, the unplanned, the checkpointed run reach

T* is `policy.ideal` of the step that the session recorded, its operators' times scaled to add up to the step without swapping:
what recording cost the host is in none of them then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from statistics import median

from chameleon_mm.bench._measure import Cell, Column, Figure, Results, Waived
from chameleon_mm.bench._training_run import Followed, PeerRun
from chameleon_mm.device.protocols import Device
from chameleon_mm.errors import InfeasibleBudget
from chameleon_mm.policy import Ideal, ideal
from chameleon_mm.units import GIB

Outcome = PeerRun | Waived

NO_PLAN = Waived("no plan was within the budget, and every step went by the default rule")


def planned_table(device: Device) -> Results:
    """Predicted against measured: three rows for each budget."""
    sim = device.simulated
    return Results(
        "training",
        device,
        (
            Column(key="predicted", title="predicted", formula="by the plan that was followed", simulated=sim),
            Column(key="measured", title="measured", formula="median of the timed steps; stall: the mean", simulated=sim),
            Column(
                key="error",
                title="error %",
                formula="100 * (measured - predicted) / predicted; of stall: / measured step",
                simulated=sim,
            ),
        ),
    )


def add_planned(table: Results, name: str, key: str, outcome: Outcome) -> None:
    """The three rows of one planned session."""
    sim = any(column.simulated for column in table.columns)
    add = partial(_add_comparison, table, simulated=sim)
    if isinstance(outcome, Waived) or outcome.followed is None:
        why = outcome if isinstance(outcome, Waived) else NO_PLAN
        for quantity in ("step ms", "peak GiB", "stall ms"):
            table.add(f"{name}: {quantity}", {"peer": key, "quantity": quantity}, dict.fromkeys(_keys(table), why))
        return
    found = outcome.followed
    step_us = median(outcome.step_us)
    stall: float | Waived = Waived("no step was timed inside") if found.stall_us is None else found.stall_us / 1e3
    add(name, key, "step ms", found.plan.step_us / 1e3, step_us / 1e3, "ms")
    add(name, key, "peak GiB", found.plan.peak_bytes / GIB, outcome.steady_peak_bytes / GIB, "GiB")
    add(name, key, "stall ms", found.plan.stall_us / 1e3, stall, "ms", of=step_us / 1e3)
    table.notes.append(_about(name, found))


def _add_comparison(
    table: Results,
    name: str,
    key: str,
    quantity: str,
    predicted: float,
    measured: float | Waived,
    unit: str,
    *,
    simulated: bool,
    of: float | None = None,
) -> None:
    """`of`: what the difference is a share of, where that is not `predicted`."""
    figure = partial(Figure.of, simulated=simulated)
    cells: dict[str, Cell] = {"predicted": figure([predicted], unit)}
    if isinstance(measured, Waived):
        cells["measured"] = cells["error"] = measured
    else:
        cells["measured"] = figure([measured], unit)
        cells["error"] = figure([100 * (measured - predicted) / (predicted if of is None else of)], "%")
    table.add(f"{name}: {quantity}", {"peer": key, "quantity": quantity}, cells)


def _about(name: str, found: Followed) -> str:
    moved, size = found.plan.moved_bytes / GIB, len(found.plan.actions)
    steady = "" if found.steady else "; NOT steady: a plan was still on trial, or a step went by none"
    return f"{name}: {size} storages, {moved:.3g} GiB, move each way{steady}"


def bound_table(device: Device) -> Results:
    """How near the runs come to T*: one row for each budget."""
    sim = device.simulated
    share = "T* / median step"
    return Results(
        "training",
        device,
        (
            Column(
                key="budget", title="budget GiB", formula="kept between steps + that share of what a step adds", simulated=sim
            ),
            Column(key="ideal", title="T* ms", formula="the least of any plan that swaps alone: policy.ideal", simulated=sim),
            Column(key="planned", title="planned of T*", formula=f"{share} of the planned session", simulated=sim),
            Column(key="unplanned", title="unplanned", formula=f"{share} of the session with plans=False", simulated=sim),
            Column(
                key="checkpointing",
                title="checkpointing",
                formula=f"{share} of the checkpointed run, whose peak is in the first table",
                simulated=sim,
            ),
        ),
    )


def add_bound(table: Results, name: str, share: float, runs: Mapping[str, Outcome], baseline: PeerRun) -> None:
    """One row. `runs`: "planned", "unplanned" and "checkpointing"."""
    sim = any(column.simulated for column in table.columns)
    figure = partial(Figure.of, simulated=sim)
    budget = baseline.budget_for(share)
    cells: dict[str, Cell] = {"budget": figure([budget / GIB], "GiB")}
    least = ideal_step(runs["planned"], baseline, budget)
    if isinstance(least, Waived):
        cells |= dict.fromkeys(("ideal", *runs), least)
    else:
        cells["ideal"] = figure([least.step_us / 1e3], "ms")
        for which, run in runs.items():
            cells[which] = run if isinstance(run, Waived) else figure([least.reached_by(median(run.step_us))], "")
    table.add(name, {"share": share}, cells)


def ideal_step(planned: Outcome, baseline: PeerRun, budget: int) -> Ideal | Waived:
    """T* within `budget`, or why there is none."""
    if isinstance(planned, Waived):
        return planned
    if planned.followed is None:
        return NO_PLAN
    trace, link = planned.followed.trace, planned.followed.link
    factor = median(baseline.step_us) / trace.duration_us
    try:
        return ideal(dataclasses.replace(trace, op_us=trace.op_us * factor), budget, link)
    except InfeasibleBudget as refusal:
        return Waived(str(refusal).splitlines()[0])


def _keys(table: Results) -> list[str]:
    return [column.key for column in table.columns]
