"""A step in a session that swaps more than activations, predicted: what it needs, what its first steps come to, what would do.

prediction = predict_session(request)
prediction.run                                        # the session's first steps, on shapes alone (session_run.py)
show_session(prediction, console)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from chameleon_mm.model_swap import bucket_bytes_within
from chameleon_mm.outputs import print_table
from chameleon_mm.planning.beside import host_bytes_beside, left_beside_window
from chameleon_mm.planning.prediction import MemoryNeed, needs_of, peak_phase
from chameleon_mm.planning.prediction_text import conclude, head, needs_table, rooflines
from chameleon_mm.planning.record import RecordedStep, record_step
from chameleon_mm.planning.session_run import RunRequest, SessionRun, StepRun, run_session
from chameleon_mm.policy import Peak, peak_memory
from chameleon_mm.trace import StepPhase
from chameleon_mm.units import format_size, format_us

SCHEMA = "chameleon_mm.plan_session/1"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionPrediction:
    """A step of a session on one GPU within one budget."""

    request: RunRequest
    step: RecordedStep
    needs: tuple[MemoryNeed, ...]
    peak: Peak
    phase: StepPhase
    window_bytes: int
    """Bytes of the budget that are set aside for parameters and gradients; 0: for none."""
    host_bytes_beside: int
    """Pinned memory of parameters, gradients and state."""
    run: SessionRun

    @property
    def holds(self) -> bool:
        """Whether every step keeps within the budget."""
        return self.run.holds

    def to_dict(self) -> dict[str, Any]:
        """Dictionary of everything as plain data; all of it is predicted."""
        step, request = self.step, self.request
        return {
            "schema": SCHEMA,
            "predicted": True,
            **step.to_dict(),
            "hbm_budget_bytes": request.hbm_budget_bytes,
            "host_budget_bytes": request.host_budget_bytes,
            "needs": [asdict(need) for need in self.needs],
            "peak_bytes": self.peak.nbytes,
            "peak_phase": self.phase.name.lower(),
            "unswapped_step_us": step.trace.duration_us,
            "window_bytes": self.window_bytes,
            "host_bytes_beside": self.host_bytes_beside,
            "session": self.run.to_dict(),
        }


def record(request: RunRequest, *, in_buckets: bool) -> RecordedStep:
    """Record one step of what `request` is about. `in_buckets`: its optimizer steps as within the request's budget."""
    buckets = in_buckets and request.swapped.optimizer
    return record_step(
        request.build,
        request.spec,
        dtype=request.dtype,
        optimizer=request.optimizer,
        min_bytes=request.min_bytes,
        autocast=request.autocast,
        bucket_bytes=bucket_bytes_within(request.hbm_budget_bytes) if buckets else None,
    )


def predict_session(request: RunRequest) -> SessionPrediction:
    """Predict the session of `request`."""
    unswapped = record(request, in_buckets=False)
    peak = peak_memory(unswapped.trace)
    step = record(request, in_buckets=True)
    left = left_beside_window(step, request.swapped, request.hbm_budget_bytes)
    return SessionPrediction(
        request=request,
        step=unswapped,
        needs=needs_of(unswapped.trace, peak),
        peak=peak,
        phase=peak_phase(unswapped.trace, peak),
        window_bytes=request.hbm_budget_bytes - left if left >= 0 else 0,  # else the run says that there is no room
        host_bytes_beside=host_bytes_beside(step, request.swapped, request.hbm_budget_bytes),
        run=run_session(request),
    )


def show_session(prediction: SessionPrediction, console: Console) -> None:
    """Print both tables, the verdicts and the assumptions."""
    head(prediction.step, prediction.request.spec, console)
    print_table(console, needs_table(prediction.needs, prediction.peak, prediction.phase))
    if prediction.run.steps:
        print_table(console, _steps(prediction))
    conclude(session_verdicts(prediction), session_assumptions(prediction), console, holds=prediction.holds)


def session_verdicts(prediction: SessionPrediction) -> list[str]:
    """Lines that say what the figures mean; the first says whether the session keeps within its budget."""
    run, request = prediction.run, prediction.request
    budget, peak = format_size(request.hbm_budget_bytes), prediction.peak.nbytes
    times = f", {peak / request.hbm_budget_bytes:.2f} times the budget" if peak > request.hbm_budget_bytes else ""
    if run.refused is not None:
        lines = [f"does not run: {run.refused}"]
    elif run.holds:
        lines = [f"keeps within {budget} in every step, the first included; unswapped it takes {format_size(peak)}{times}"]
    elif run.holds_later:
        lines = [f"keeps within {budget} from the second step on; the first takes {format_size(run.steps[0].peak_bytes)}"]
    else:
        most = max(step.peak_bytes for step in run.steps[1:] or run.steps)
        lines = [f"does not keep within {budget}: it takes {format_size(most)}"]
    return lines


def session_assumptions(prediction: SessionPrediction) -> list[str]:
    """Lines that say what the figures rest on, one sentence each."""
    request = prediction.request
    swapped = request.swapped
    lines = [
        f"the steps are those of a session that swaps {swapped}",
        f"they run on the simulated {request.spec.name} with operators that compute nothing, all else is the session's own",
        *rooflines(request.spec),
        "the host launches each operator, and is late where that takes longer than the operator",
        "the session recomputes nothing",
    ]
    if swapped.parameters:
        lines.append(
            f"{format_size(prediction.window_bytes)} of the budget are set aside for parameters and gradients, "
            f"{format_size(prediction.host_bytes_beside)} of pinned memory are their home"
            + (" and that of the optimizer's state" if swapped.optimizer else "")
        )
    lines.extend(prediction.step.notes)
    return lines


def _steps(prediction: SessionPrediction) -> Table:
    run, unswapped_us = prediction.run, prediction.step.trace.duration_us
    budget = prediction.request.hbm_budget_bytes
    first, last = run.steps[0], run.steps[-1]
    rows: list[tuple[str, Callable[[StepRun], str]]] = [
        ("peak", lambda step: format_size(step.peak_bytes) + ("*" if step.peak_bytes > budget else "")),
        ("step", lambda step: format_us(step.step_us)),
        ("times unswapped", lambda step: f"{step.step_us / unswapped_us:.2f}" if unswapped_us else "-"),
    ]
    table = Table(title=f"what a session comes to within {format_size(budget)} (predicted)", title_justify="left")
    for title in ("", "unswapped", "first step", "later steps"):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    unswapped = StepRun(step_us=unswapped_us, peak_bytes=prediction.peak.nbytes)
    for what, text in rows:
        table.add_row(what, *map(text, (unswapped, first, last)))
    table.add_row("stall", "0.0 us", "", format_us(run.stall_us))
    table.add_row("pinned host", "0 B", "", format_size(run.host_bytes))
    if max(prediction.peak.nbytes, first.peak_bytes, last.peak_bytes) > budget:
        table.caption, table.caption_justify = "* over the budget", "left"
    return table
