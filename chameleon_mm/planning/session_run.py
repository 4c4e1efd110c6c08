"""A session's first steps on a GPU that is not there, on shapes alone: everything runs as it would, but no number is computed.

    run = run_session(RunRequest(build=build, spec=spec, swapped=Swapped(optimizer=True, parameters=True), ...))
    run.steps[0], run.steps[-1]        the first step, by the default rule, and one that follows a plan: time and peak
    run.refused                        why there is no such run, where there is none

The session, its executor and its planner are the library's own, on the simulated device; `NoArithmetic` stands for the
operators. So what is predicted is what the same steps come to on the simulated device when they are computed: the same copies
at the same time. The model comes to the session as a user's does: on the host where its parameters are swapped, else on the
device; its optimizer has no state yet.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch

from chameleon_mm.device.sim import SimDevice
from chameleon_mm.device.specs import GpuSpec
from chameleon_mm.errors import HostMemoryExhausted, InfeasibleBudget
from chameleon_mm.planning.gpu_operators import GpuOperators, gpu_autocast
from chameleon_mm.planning.no_arithmetic import NoArithmetic
from chameleon_mm.planning.record import TrainingStep, default_dtype
from chameleon_mm.planning.workload import Build
from chameleon_mm.session import SwapSession

RUN_STEPS = 4
"""Steps that are run: one that is recorded, two in which plans may be on trial, one as all later ones are."""

ANY_HOST_BYTES = 1 << 46
"""Pinned memory where nobody limits it: more than any step takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swapped:
    """Choice of what a session swaps beside activations."""

    optimizer: bool = False
    """Whether the optimizer's state is on the host between its steps: `SwapSession(optimizer=...)`."""
    parameters: bool = False
    """Whether parameters and gradients come in their turn: `SwapSession(parameters="swap")`."""

    def __bool__(self) -> bool:
        return self.optimizer or self.parameters

    def __str__(self) -> str:
        names = ["optimizer state"] * self.optimizer + ["parameters and gradients"] * self.parameters
        return ", ".join(["activations", *names])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun:
    """One step of the run."""

    step_us: float
    """Time on the compute stream, from the end of the step before."""
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRun:
    """A session's first steps within one budget."""

    swapped: Swapped
    hbm_budget_bytes: int
    steps: tuple[StepRun, ...] = ()
    """The steps that were run; none where `refused` says why."""
    host_bytes: int = 0
    stall_us: float = 0.0
    """Time in one more step that compute waited for copies."""
    plans: int = 0
    """Number of plans that were made; 0: there is none within the budget, or nothing to plan."""
    refused: str | None = None
    """Reason why it does not run at all."""

    @property
    def holds(self) -> bool:
        """Whether every step keeps within the budget."""
        return self.refused is None and all(step.peak_bytes <= self.hbm_budget_bytes for step in self.steps)

    @property
    def holds_later(self) -> bool:
        """Whether every step keeps within it but the first, of which nothing is known before it."""
        return self.refused is None and all(step.peak_bytes <= self.hbm_budget_bytes for step in self.steps[1:])

    def to_dict(self) -> dict[str, Any]:
        """Dictionary as plain data."""
        return {**asdict(self), "holds": self.holds, "holds_later": self.holds_later}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """Request for a run: a model, a device, budgets."""

    build: Build
    spec: GpuSpec
    swapped: Swapped
    hbm_budget_bytes: int
    host_budget_bytes: int | None
    """Bytes of pinned memory; None: any."""
    dtype: torch.dtype
    optimizer: str
    min_bytes: int
    autocast: torch.dtype | None = None


def run_session(request: RunRequest, *, steps: int = RUN_STEPS, counted: bool = True) -> SessionRun:
    """Run the first `steps` steps of a session that never recomputes. `counted`: and one more, for its stall.

    Takes a fifth of a millisecond for each operator, and no memory to speak of. Raises what the model raises; a budget that is
    too small is an answer: `SessionRun.refused`.
    """
    device = SimDevice(request.spec, moves_bytes=False)
    with _quiet(), NoArithmetic(), default_dtype(request.dtype), GpuOperators(), gpu_autocast():
        try:
            with nullcontext() if request.swapped.parameters else device.compute():
                step = TrainingStep(request.build(), request.optimizer, request.autocast, started=False)
            with device.compute():
                session = _session(request, device, step)
                return _run(request, device, session, step, steps, counted=counted)
        except (InfeasibleBudget, HostMemoryExhausted, torch.OutOfMemoryError) as error:
            return SessionRun(swapped=request.swapped, hbm_budget_bytes=request.hbm_budget_bytes, refused=str(error))


def _session(request: RunRequest, device: SimDevice, step: TrainingStep) -> SwapSession:
    swapped, host_bytes = request.swapped, request.host_budget_bytes
    return SwapSession(
        request.hbm_budget_bytes,
        ANY_HOST_BYTES if host_bytes is None else host_bytes,
        device,
        request.min_bytes,
        model=step.model,
        recompute=False,
        optimizer=step.optimizers[0] if swapped.optimizer and step.optimizers else None,
        parameters="swap" if swapped.parameters else "keep",
    )


def _run(
    request: RunRequest, device: SimDevice, session: SwapSession, step: TrainingStep, steps: int, *, counted: bool
) -> SessionRun:
    def run_step() -> None:
        with session.step():
            loss = step.forward_backward()
            step.update()
            del loss

    peaks, stall_us = [], 0.0
    with session:
        marks = [device.current_stream().record(timed=True)]
        for _ in range(steps):
            device.reset_peaks()
            run_step()
            marks.append(device.current_stream().record(timed=True))
            peaks.append(device.peak_allocated_bytes())
        device.synchronize()
        plans, host_bytes = session.report().plans, session.pool.stats().peak_live_bytes
        if counted:
            before_us = session.report().stall_us or 0.0
            run_step()
            device.synchronize()  # waits are counted when they are over
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
    """Context in which the session tells nobody what its run says: that there is no plan, that something stays on the host."""
    logger = logging.getLogger("chameleon_mm")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
