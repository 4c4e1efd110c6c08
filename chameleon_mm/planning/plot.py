"""Memory over the step as a picture: without swapping, with the plan, and the budget; below it phases and copies.

    save_plot(prediction, Path("plan.png"))

Time is predicted. Stalls of compute are the gaps by which the plan's phases are longer.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from chameleon_mm.planning.prediction import Prediction
from chameleon_mm.policy import EngineSpan, memory_curve
from chameleon_mm.trace import StepPhase, Trace
from chameleon_mm.trace.trace import Float64s, Int64s
from chameleon_mm.units import GIB, MIB, format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
