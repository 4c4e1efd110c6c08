"""A prediction for people: what the step needs, what every way of running it comes to, and what that means.

show(prediction, console)
verdicts(prediction), assumptions(prediction)        # lines; pure, so that tests read them

Time is predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from chameleon_mm.device.sim.cost_model import CostModel
from chameleon_mm.device.specs import GpuSpec
from chameleon_mm.outputs import print_line, print_table
from chameleon_mm.planning.prediction import HIDDEN_WITHIN, MemoryNeed, Prediction, Way, default_budget
from chameleon_mm.planning.record import RecordedStep
from chameleon_mm.policy import Peak
from chameleon_mm.trace import StepPhase
from chameleon_mm.units import format_size, format_size_up, format_us

_UNFUSED = frozenset({"aten::_safe_softmax", "aten::_scaled_dot_product_attention_math"})
"""Operator that torch's fused attention becomes where no fused kernel takes its arguments."""


def show(prediction: Prediction, console: Console) -> None:
    """Print both tables, the verdicts and the assumptions."""
    head(prediction.step, prediction.spec, console)
    print_table(console, needs_table(prediction.needs, prediction.peak, prediction.phase))
    print_table(console, _ways(prediction))
    conclude(verdicts(prediction), assumptions(prediction), console, holds=prediction.infeasible is None)


def conclude(verdicts: Sequence[str], assumptions: Sequence[str], console: Console, *, holds: bool) -> None:
    """Print what the figures mean, and what they rest on."""
    for text in verdicts:
        print_line(console, text, style="bold" if holds else "bold red")
    print_line(console, "assumptions:")
    lines = Table.grid(padding=(0, 1))
    for text in assumptions:
        lines.add_row("-", Text(text))  # Text, not str: a model's name may look like markup
    console.print(lines)


def head(step: RecordedStep, spec: GpuSpec, console: Console) -> None:
    """Print what the prediction is about."""
    print_line(console, f"chameleon-mm plan: {step.about}", style="bold")
    autocast = "" if step.autocast is None else f"under autocast to {step.autocast}, "
    print_line(
        console,
        f"{_count(step.num_parameters)} parameters, {step.dtype}, {autocast}optimizer {step.optimizer}; one training step on "
        f"{spec.name}, predicted: nothing ran",
    )


def verdicts(prediction: Prediction) -> list[str]:
    """Lines that say what the figures mean; the first says whether the step fits."""
    budget, peak = format_size(prediction.hbm_budget_bytes), prediction.peak
    if prediction.infeasible is not None:
        lines = [f"does not fit, and no plan makes it: {prediction.infeasible}"]
    elif prediction.fits:
        lines = [f"fits as it is: {format_size(peak.nbytes)} of {budget}; nothing needs to move"]
    else:
        lines = [f"does not fit as it is, {format_size(peak.nbytes)} of {budget}; with this plan it does"]
    if prediction.ideal_us is not None:
        ideal = format_us(prediction.ideal_us)
        lines.append(f"ideal bound T* within this budget: {ideal}; this plan reaches {prediction.ideal_share:.1%} of it")
    if prediction.can_be_lowered:
        # Rounded up: each of these texts may be given back as --hbm-budget.
        smallest, hidden = (
            format_size_up(nbytes) for nbytes in (prediction.smallest_budget_bytes, prediction.hidden_budget_bytes)
        )
        lines.append(
            f"smallest budget{_within_host(prediction)}: {smallest} with any plan, {hidden} with all copies hidden (a step at "
            f"most {HIDDEN_WITHIN:.1%} longer)"
        )
    elif prediction.least_bytes < prediction.peak.nbytes:
        lines.append(f"hardly a smaller budget{_within_host(prediction)}: too little for what would have to move")
    else:
        lines.append("swapping cannot lower the peak: nothing that could be away until its first use is idle then")
    if prediction.least_phase is StepPhase.OPTIMIZER and prediction.step.optimizer == "adamw":
        lines.append("what is left is the optimizer's: --optimizer adamw-fused has no temporaries")
    return lines


def assumptions(prediction: Prediction) -> list[str]:
    """Lines that say what the figures rest on, one sentence each."""
    spec, trace = prediction.spec, prediction.step.trace
    cost = CostModel(spec=spec)
    lines = [
        *rooflines(spec, host="; the host is not late"),
        f"the budget is {_budget_from(prediction)}",
        "memory is that of the tensors and what a few operators hold inside; CUDA's context, gaps and workspaces come on top",
        "operators are those of torch on a CPU, but for attention and dropout; a few of CUDA's may save more or less",
    ]
    host_us = int(np.count_nonzero(trace.op_us)) * cost.launch_us
    if host_us > trace.duration_us:
        lines.append(
            f"the host would be late: launching the kernels takes it {format_us(host_us)}, at {cost.launch_us:g} us each"
        )
    if any("scaled_dot_product_flash_attention" in name for name in trace.op_names):
        lines.append("attention is fused: it saves q, k, v, its output and one float32 a row, no matrix of scores")
    if not _UNFUSED.isdisjoint(trace.op_names):
        lines.append("some attention ran unfused and saved matrices of scores: its arguments suit no fused kernel of a CPU")
    if prediction.plan is not None and prediction.plan.recomputed:
        lines.append(
            "what runs again takes its time in forward once more; products run again only where the device repeats them exactly"
        )
    lines.append("full recomputation is an estimate, its segments cut where the least crosses; no plan of ours does it")
    lines.extend(prediction.step.notes)
    return lines


def rooflines(spec: GpuSpec, *, host: str = "") -> list[str]:
    """Lines that say at which rates a GPU works and copies."""
    cost = CostModel(spec=spec)
    arithmetic, bandwidth = f"{cost.matmul_efficiency:.0%}", f"{cost.memory_efficiency:.0%}"
    return [
        f"operators at {arithmetic} of {spec.name}'s arithmetic or {bandwidth} of its memory bandwidth{host}",
        f"copies run at {spec.d2h_gbps:g} GB/s out, {spec.h2d_gbps:g} back and {spec.duplex_gbps:g} both ways together",
    ]


def needs_table(needs: Sequence[MemoryNeed], peak: Peak, phase: StepPhase) -> Table:
    """A row for each class of storages."""
    table = Table(title="what the step needs", title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("at most", justify="right", no_wrap=True)
    table.add_column(f"at the peak, in {_phase(phase)}", justify="right")
    for need in needs:
        table.add_row(need.name, format_size(need.most_bytes), format_size(need.at_peak_bytes))
    table.add_section()
    table.add_row("all at once", format_size(peak.nbytes), format_size(peak.nbytes))
    table.add_row("of it idle, could be swapped", "-", format_size(peak.idle_bytes))
    return table


def _ways(prediction: Prediction) -> Table:
    """A column for each way: as rows they would be wider than 80 characters."""
    budget, unswapped = prediction.hbm_budget_bytes, prediction.ways[0]
    rows: list[tuple[str, Callable[[Way], str]]] = [
        ("peak", lambda way: format_size(way.peak_bytes)),
        ("pinned host", lambda way: format_size(way.host_bytes)),
        ("moved each way", lambda way: format_size(way.moved_bytes)),
        ("stall", lambda way: format_us(way.stall_us)),
        ("on-device copies", lambda way: format_us(way.device_copy_us)),
        ("recomputing", lambda way: format_us(way.recompute_us)),
        ("step", lambda way: format_us(way.step_us)),
        ("slower by", lambda way: _slower(way, unswapped)),
    ]
    over = {way.name for way in prediction.ways if way.peak_bytes > budget}
    table = Table(title=f"what it comes to within {format_size(budget)} (predicted)", title_justify="left")
    table.add_column("", no_wrap=True)
    for way in prediction.ways:
        table.add_column(way.name.replace(" ", "\n"), justify="right", no_wrap=True)
    for what, text in rows:
        table.add_row(
            what, *(text(way) + ("*" if what == "peak" and way.name in over else " " * bool(over)) for way in prediction.ways)
        )
    if over:
        table.caption, table.caption_justify = "* over the budget", "left"
    return table


def _slower(way: Way, unswapped: Way) -> str:
    if way is unswapped:
        return "-"
    share = way.step_us / unswapped.step_us - 1 if unswapped.step_us else 0.0
    return f"{round(share, 3) + 0.0:.1%}"  # no "-0.0%"


def _within_host(prediction: Prediction) -> str:
    budget = prediction.host_budget_bytes
    return "" if budget is None else f" within {format_size(budget)} of pinned host memory"


def _budget_from(prediction: Prediction) -> str:
    budget, spec = prediction.hbm_budget_bytes, prediction.spec
    by_default = ", as a session's is by default" if budget == default_budget(spec) else ""
    return f"{budget / spec.hbm_bytes:.0%} of {spec.name}'s {format_size(spec.hbm_bytes)}{by_default}"


def _count(number: int) -> str:
    for factor, unit in ((1e9, " billion"), (1e6, " million")):
        if number >= factor:
            return f"{number / factor:.3g}{unit}"
    return str(number)


def _phase(phase: StepPhase) -> str:
    return {StepPhase.FORWARD: "forward", StepPhase.BACKWARD: "backward", StepPhase.OPTIMIZER: "the optimizer"}[phase]
