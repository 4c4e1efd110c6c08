"""A prediction for people: what the step needs, what every way of running it comes to, and what that means.

show(prediction, console)
verdicts(prediction), assumptions(prediction)        # lines; pure, so that tests read them
save_plot(prediction, Path("plan.png"))              # memory over the step: without swapping, with the plan, and the budget

Time is predicted. In the picture, stalls of compute are the gaps by which the plan's phases are longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from chameleon_mm.device.sim.cost import CostModel
from chameleon_mm.device.specs import GpuSpec
from chameleon_mm.outputs import print_line, print_table
from chameleon_mm.planning.prediction import HIDDEN_WITHIN, MemoryNeed, Prediction, Way, default_budget
from chameleon_mm.planning.record import RecordedStep
from chameleon_mm.policy import EngineSpan, Peak, memory_curve
from chameleon_mm.trace import StepPhase, Trace
from chameleon_mm.trace.trace import Float64s, Int64s
from chameleon_mm.units import GIB, MIB, format_size, format_size_up, format_us

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_MOST_WIDTH = 38
"""Characters of a column in which the table of classes is 80 wide."""

_UNFUSED = frozenset({"aten::_safe_softmax", "aten::_scaled_dot_product_attention_math"})
"""Operator that torch's fused attention becomes where no fused kernel takes its arguments."""


def show(prediction: Prediction, console: Console) -> None:
    """Print both tables, the verdicts and the assumptions."""
    head(prediction.step, prediction.spec, console)
    print_table(console, needs_table(prediction.needs, prediction.peak, prediction.phase))
    print_table(console, _ways(prediction))
    if prediction.plan is not None and prediction.plan.actions:
        print_table(console, _classes(prediction))
    for text in verdicts(prediction):
        print_line(console, text, style="bold" if prediction.infeasible is None else "bold red")
    print_line(console, "assumptions:")
    lines = Table.grid(padding=(0, 1))
    for text in assumptions(prediction):
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
    if prediction.ideal_us is not None and prediction.swap_ideal_us is not None:
        ideal, swap = format_us(prediction.ideal_us), format_us(prediction.swap_ideal_us)
        lines.append(
            f"ideal bound T* within this budget: {ideal}, and {swap} for swapping alone; this plan reaches "
            f"{prediction.ideal_share:.1%} of T*"
        )
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


def _classes(prediction: Prediction) -> Table:
    table = Table(title="what this plan makes of what is idle at the peak", title_justify="left")
    for title in ("", "bytes", "storages"):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    table.add_column("most of it, by who made it", no_wrap=True)
    for group in prediction.classes:
        most = ""
        for maker, nbytes in group.most:
            longer = f"{most}{', ' * bool(most)}{_short(maker)} {format_size(nbytes)}"
            most = longer if len(longer) <= _MOST_WIDTH else most
        table.add_row(group.name, format_size(group.nbytes), str(group.count), most or "-")
    return table


def _short(maker: str) -> str:
    return "attention" if "attention" in maker else maker.strip("_")[:24]


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


_UNSWAPPED, _PLANNED, _BUDGET = "#9a6324", "#1f5fa8", "#b3261e"
_PHASES = {StepPhase.FORWARD: "#9ec5e8", StepPhase.BACKWARD: "#f2b680", StepPhase.OPTIMIZER: "#b7d7a8"}
_OUT, _BACK = "#5b7db1", "#7a9e5f"


def save_plot(prediction: Prediction, path: Path) -> None:
    """Write the picture as PNG. Needs matplotlib; raises `OSError` where the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # without pyplot: no state of the process, no display

    figure = Figure(figsize=(11, 6.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    memory, rows = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1.3))
    _draw_memory(prediction, memory)
    _draw_rows(prediction, rows)
    title = f"{prediction.step.about} on {prediction.spec.name}, one training step (predicted)"
    figure.suptitle(title, fontsize=12)
    figure.savefig(path, format="png")


def _draw_memory(prediction: Prediction, axes: Axes) -> None:
    trace, timeline = prediction.step.trace, prediction.timeline
    peak, budget = prediction.peak.nbytes, prediction.hbm_budget_bytes
    in_sight = budget <= 3 * peak  # a budget far above would press the curve flat
    highest = max(peak, budget) if in_sight else peak
    unit, unit_bytes = ("GiB", GIB) if highest >= GIB else ("MiB", MIB)
    ms, curve = _steps(trace.clock_us()[:-1], memory_curve(trace), trace.duration_us)
    label = f"no swapping, peak {format_size(peak)}"
    axes.plot(ms, curve / unit_bytes, color=_UNSWAPPED, linewidth=1.0, label=label)
    if timeline is not None and prediction.plan is not None and prediction.plan.actions:
        ms, curve = _steps(timeline.tick_us, timeline.allocated_bytes, timeline.step_us)
        label = f"this plan, peak {format_size(timeline.peak_bytes)}"
        axes.plot(ms, curve / unit_bytes, color=_PLANNED, linewidth=1.0, label=label)
    label = f"budget {format_size(budget)}{'' if in_sight else ', above'}"
    axes.axhline(budget / unit_bytes, color=_BUDGET, linewidth=1.2, linestyle="--", label=label)
    axes.set_ylabel(f"device memory ({unit})")
    axes.set_ylim(0, 1.06 * highest / unit_bytes)
    axes.grid(visible=True, axis="y", color="#dddddd", linewidth=0.6)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)


def _draw_rows(prediction: Prediction, axes: Axes) -> None:
    trace, timeline = prediction.step.trace, prediction.timeline
    rows = ["no swapping"]
    _draw_phases(axes, 0, trace, trace.clock_us())
    if timeline is not None and prediction.plan is not None and prediction.plan.actions:
        rows += ["this plan", "copies out", "copies back"]
        _draw_phases(axes, 1, trace, np.append(timeline.tick_us, timeline.step_us))
        _draw_copies(axes, 2, timeline.out_spans, _OUT)
        _draw_copies(axes, 3, timeline.in_spans, _BACK)
    for phase, color in _PHASES.items():
        axes.broken_barh([], (0, 0), facecolors=color, label=phase.name.lower())
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(3.6, -0.6)  # four rows, whether all are there or not: bars of one height
    axes.set_xlabel("time in the step (ms, predicted)")
    axes.set_xlim(left=0)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.42), ncols=3, frameon=False)


def _draw_phases(axes: Axes, row: int, trace: Trace, edges_us: Float64s) -> None:
    """Bars from each change of phase to the next. edges_us: (ticks + 1,)."""
    changes = np.flatnonzero(np.diff(trace.op_phase, prepend=np.uint8(255)))
    starts = edges_us[trace.op_tick[changes]] / 1e3
    ends = np.append(starts[1:], edges_us[-1] / 1e3)
    spans = list(zip(starts.tolist(), (ends - starts).tolist(), strict=True))
    colors = [_PHASES[StepPhase(int(phase))] for phase in trace.op_phase[changes]]
    axes.broken_barh(spans, (row - 0.35, 0.7), facecolors=colors)


def _draw_copies(axes: Axes, row: int, spans: tuple[EngineSpan, ...], color: str) -> None:
    bars = [(span.start_us / 1e3, (span.end_us - span.start_us) / 1e3) for span in spans]
    axes.broken_barh(bars, (row - 0.35, 0.7), facecolors=color)


def _steps(tick_us: Float64s, nbytes: Int64s, end_us: float) -> tuple[Float64s, Float64s]:
    """Points of a line that keeps each tick's value until the next; milliseconds and bytes."""
    edges = np.append(tick_us, end_us) / 1e3
    return np.repeat(edges, 2)[1:-1], np.repeat(nbytes.astype(np.float64), 2)
