"""Predict a session's first steps on an absent GPU, by running them on shapes only.

    run = run_session(RunRequest(build=build, spec=spec, swapped=Swapped(optimizer=True, parameters=True), ...))
    run.steps[0], run.steps[-1]        time and peak of the first step, by the default rule, and of a planned step
    run.refused                        reason why the session does not run; None: it runs

Session, executor and planner are the library's own, on the simulated device; `NoArithmetic` replaces the operators. So the
prediction equals the same steps computed on the simulated device: the same copies at the same times. The model starts like a
user's: on the host if its parameters are swapped, else on the device. Its optimizer has no state yet.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from chameleon_mm.api.model_swap import bucket_bytes_within
from chameleon_mm.api.session import SwapSession
from chameleon_mm.device.sim import SimDevice
from chameleon_mm.errors import HostMemoryExhausted, InfeasibleBudget
from chameleon_mm.plan.trace import StepPhase, TensorKind, Trace
from chameleon_mm.state.hosted import MIN_BYTES
from chameleon_mm.state.optimizer_swap import BUCKETS_AT_ONCE
from chameleon_mm.tools.outputs import print_table
from chameleon_mm.tools.prediction import StepNeeds, conclude, rooflines
from chameleon_mm.tools.shape_operators import GpuOperators, NoArithmetic, gpu_autocast
from chameleon_mm.tools.sharding import Shards, shardable, sharded
from chameleon_mm.tools.step_on_shapes import RecordedStep, StepRequest, TrainingStep, default_dtype, record_step
from chameleon_mm.units import allocated_size, format_size, format_us

RUN_STEPS = 4
"""Number of steps to run: one recorded, two in which plans may be on trial, and one like all later steps."""

ANY_HOST_BYTES = 1 << 46
"""Host budget if none is given: more pinned memory than any step takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swapped:
    """Classes of storages that a session swaps besides activations."""

    optimizer: bool = False
    """True if the optimizer's state is on the host between its steps: `SwapSession(optimizer=...)`."""
    parameters: bool = False
    """True if parameters and gradients are swapped, too: `SwapSession(parameters="swap")`."""

    def __bool__(self) -> bool:
        return self.optimizer or self.parameters

    def __str__(self) -> str:
        names = ["optimizer state"] * self.optimizer + ["parameters and gradients"] * self.parameters
        return ", ".join(["activations", *names])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun:
    step_us: float
    """Time on the compute stream, from the end of the previous step."""
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRun:
    swapped: Swapped
    hbm_budget_bytes: int
    steps: tuple[StepRun, ...] = ()
    """Steps that were run; empty if `refused` gives a reason."""
    host_bytes: int = 0
    stall_us: float = 0.0
    """Time that compute waited for copies, in one more step."""
    plans: int = 0
    """Number of plans made; 0: no plan keeps the budget, or there is nothing to plan."""
    refused: str | None = None
    """Reason why the session does not run at all; None: it runs."""

    @property
    def holds(self) -> bool:
        """True if every step keeps within the budget."""
        return self.refused is None and all(step.peak_bytes <= self.hbm_budget_bytes for step in self.steps)

    @property
    def holds_later(self) -> bool:
        """True if every step after the first keeps the budget. The first step has no forecast."""
        return self.refused is None and all(step.peak_bytes <= self.hbm_budget_bytes for step in self.steps[1:])

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds, "holds_later": self.holds_later}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest(StepRequest):
    swapped: Swapped
    hbm_budget_bytes: int
    host_budget_bytes: int | None
    """Bytes of pinned memory; None: any."""
    shards: Shards | None = None
    """Ranks over which parameters, gradients and optimizer state are sharded; None: one rank has everything."""
    local_ranks: int = 1
    """Number of ranks that share the link and host memory. `spec` has one rank's part of the link."""


def run_session(request: RunRequest, *, steps: Iterable[Any] = range(RUN_STEPS), counted: bool = True) -> SessionRun:
    """Run the first steps of a session that never recomputes, one for each element of `steps`. `counted`: run one more, to
    measure its stall.

    Takes 0.2 ms for each operator, and hardly any memory. Raises what the model raises. `SessionRun.refused` reports a budget
    that is too small.
    """
    device = SimDevice(request.spec, moves_bytes=False)
    with _quiet(), NoArithmetic(), default_dtype(request.dtype), GpuOperators(), gpu_autocast():
        try:
            with nullcontext() if request.swapped.parameters else device.compute():
                step = TrainingStep(
                    request.build(), request.optimizer, request.autocast, started=False, compiled=request.compiled
                )
            with device.compute():
                return _run(request, device, step, steps, counted=counted)
        except (InfeasibleBudget, HostMemoryExhausted, torch.OutOfMemoryError) as error:
            return SessionRun(swapped=request.swapped, hbm_budget_bytes=request.hbm_budget_bytes, refused=str(error))


def _run(request: RunRequest, device: SimDevice, step: TrainingStep, steps: Iterable[Any], *, counted: bool) -> SessionRun:
    swapped, host_bytes = request.swapped, request.host_budget_bytes
    session = SwapSession(
        request.hbm_budget_bytes,
        ANY_HOST_BYTES if host_bytes is None else host_bytes,
        device,
        request.min_bytes,
        model=step.model,
        recompute=False,
        optimizer=step.optimizers[0] if swapped.optimizer and step.optimizers else None,
        parameters="swap" if swapped.parameters else "keep",
    )

    def run_step() -> None:
        with session.step():
            loss = step.forward_backward()
            step.update()
            del loss

    peaks, stall_us = [], 0.0
    with session:
        marks = [device.current_stream().record(timed=True)]
        for _ in steps:
            device.reset_peaks()
            run_step()
            marks.append(device.current_stream().record(timed=True))
            peaks.append(device.peak_allocated_bytes())
        device.synchronize()
        plans, host_bytes = session.report().plans, session.pool.stats().peak_live_bytes
        if counted:
            before_us = session.report().stall_us or 0.0
            run_step()
            device.synchronize()  # waits are counted after they have ended
            stall_us = (session.report().stall_us or 0.0) - before_us
    return SessionRun(
        swapped=request.swapped,
        hbm_budget_bytes=request.hbm_budget_bytes,
        steps=tuple(
            StepRun(step_us=end.elapsed_us(start), peak_bytes=peak)
            for (start, end), peak in zip(pairwise(marks), peaks, strict=True)
        ),
        host_bytes=host_bytes,
        stall_us=stall_us,
        plans=plans,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the session's warnings about its run, such as no plan, or storages that stay on the host."""
    logger = logging.getLogger("chameleon_mm")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


# --- Memory of a step, without the window of parameters and the optimizer's state on the host, by arithmetic over its trace
#
# parameters, gradients, state >= MIN_BYTES -> excluded; a gradient counts only from its product to its accumulation
# each operator of the optimizer            -> holds three buckets of state: copied back, stepped, copied out
# budget                                    -> reduced by the window, which grows with the budget

_NO_LIMIT = 1 << 62


def beside(step: RecordedStep, swapped: Swapped) -> Trace:
    """Return the trace of `step` without storages on the host or in the window. Times are those of the whole step."""
    trace = step.trace
    size = allocated_size(trace.tensor_bytes)
    large, kind = trace.tensor_bytes >= MIN_BYTES, trace.tensor_kind
    gone = np.zeros(len(size), np.bool_)
    dies, inner = trace.tensor_dies, trace.op_inner_bytes
    if swapped.optimizer:
        gone |= large & (kind == TensorKind.OPTIMIZER)
        in_optimizer = trace.op_phase == StepPhase.OPTIMIZER
        inner = inner + np.where(in_optimizer, BUCKETS_AT_ONCE * step.largest_bucket_bytes, 0)
    if swapped.parameters:
        gone |= large & (kind == TensorKind.PARAMETER)
        gradients = large & (kind == TensorKind.GRADIENT)
        gone |= gradients & (trace.tensor_born < 0)
        last = trace.last_write(trace.op_phase[trace.op_of_write()] == StepPhase.BACKWARD)
        dies = np.where(gradients & (trace.tensor_born >= 0), np.minimum(dies, last), dies)
    there_before = int(size[gone & (trace.tensor_born < 0)].sum())
    return dataclasses.replace(
        trace,
        start_bytes=trace.start_bytes - there_before,
        tensor_bytes=np.where(gone, 0, trace.tensor_bytes),
        tensor_dies=dies.astype(np.int32),
        op_inner_bytes=inner,
    )


def left_beside_window(step: RecordedStep, swapped: Swapped, hbm_budget: int) -> int:
    """Return the bytes of a budget without its window; below 0 if the window does not fit."""
    if not swapped.parameters:
        return hbm_budget
    try:
        return hbm_budget - step.window(hbm_budget)
    except InfeasibleBudget:
        return -1


def host_bytes_beside(step: RecordedStep, swapped: Swapped, hbm_budget: int) -> int:
    """Return the maximum bytes of pinned memory for swapped parameters, gradients and state."""
    trace = step.trace
    kinds = [TensorKind.OPTIMIZER] * swapped.optimizer + [TensorKind.PARAMETER] * swapped.parameters
    if swapped.parameters and hbm_budget - left_beside_window(step, swapped, hbm_budget) < step.window(_NO_LIMIT):
        kinds.append(TensorKind.GRADIENT)  # if everything fits the window, gradients stay there
    return int(trace.tensor_bytes[np.isin(trace.tensor_kind, kinds) & (trace.tensor_bytes >= MIN_BYTES)].sum())


# --- Prediction of a session that swaps more than activations: the step's needs, and time and peak of its first steps

SCHEMA = "chameleon_mm.plan_session/1"


@dataclass(slots=True, kw_only=True, eq=False)
class SessionPrediction(StepNeeds):
    """Prediction of a session's step on one GPU within one budget."""

    swapped: Swapped
    window_bytes: int
    """Bytes of the budget that are reserved for parameters and gradients; 0: none, or they do not fit."""
    host_bytes_beside: int
    """Pinned memory of parameters, gradients and state."""
    run: SessionRun

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            **StepNeeds.to_dict(self),
            "unswapped_step_us": self.step.trace.duration_us,
            "window_bytes": self.window_bytes,
            "host_bytes_beside": self.host_bytes_beside,
            "session": self.run.to_dict(),
        }


def record(request: RunRequest, *, in_buckets: bool = False) -> RecordedStep:
    """Record one step of the request's model. `in_buckets`: a swapped optimizer steps in buckets that suit the budget."""
    buckets = in_buckets and request.swapped.optimizer
    if request.shards is not None:
        request = replace(request, build=shardable(request.build, request.shards))
    step = record_step(request, bucket_bytes=bucket_bytes_within(request.hbm_budget_bytes) if buckets else None)
    if request.local_ranks > 1:
        note = f"{request.local_ranks} ranks share the link and host memory: rates and pinned bytes here are one rank's"
        step = replace(step, notes=(*step.notes, note))
    return step if request.shards is None else sharded(step, request.shards)


def predict_session(request: RunRequest, steps: Iterable[Any] = range(RUN_STEPS)) -> SessionPrediction:
    """Predict the first steps of a session, one for each element of `steps`, as `run_session` runs them."""
    step = record(request)
    left = left_beside_window(step, request.swapped, request.hbm_budget_bytes)
    return SessionPrediction(
        step=step,
        spec=request.spec,
        hbm_budget_bytes=request.hbm_budget_bytes,
        host_budget_bytes=request.host_budget_bytes,
        swapped=request.swapped,
        window_bytes=request.hbm_budget_bytes - left if left >= 0 else 0,  # otherwise the run reports that there is no room
        host_bytes_beside=host_bytes_beside(step, request.swapped, request.hbm_budget_bytes),
        run=run_session(request, steps=steps),
    )


def show_session(prediction: SessionPrediction, console: Console) -> None:
    prediction.show(console)
    if prediction.run.steps:
        print_table(console, _steps(prediction))
    conclude(session_verdicts(prediction), session_assumptions(prediction), console, holds=prediction.run.holds)


def session_verdicts(prediction: SessionPrediction) -> list[str]:
    """Lines that interpret the figures; the first says whether the session keeps within its budget."""
    run, nbytes = prediction.run, prediction.hbm_budget_bytes
    budget, peak = format_size(nbytes), prediction.peak.nbytes
    times = f", {peak / nbytes:.2f} times the budget" if peak > nbytes else ""
    if run.refused is not None:
        return [f"does not run: {run.refused}"]
    if run.holds:
        return [f"keeps within {budget} in every step, the first included; unswapped it takes {format_size(peak)}{times}"]
    if run.holds_later:
        return [f"keeps within {budget} from the second step on; the first takes {format_size(run.steps[0].peak_bytes)}"]
    most = max(step.peak_bytes for step in run.steps[1:] or run.steps)
    return [f"does not keep within {budget}: it takes {format_size(most)}"]


def session_assumptions(prediction: SessionPrediction) -> list[str]:
    """Lines that state the assumptions of the figures, one sentence each."""
    spec, swapped = prediction.spec, prediction.swapped
    lines = [
        f"the steps are those of a session that swaps {swapped}",
        f"they run on the simulated {spec.name} with operators that compute nothing, all else is the session's own",
        *rooflines(spec),
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
    budget = prediction.hbm_budget_bytes
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
