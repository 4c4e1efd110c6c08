"""Runs a model on batches of changing lengths on a simulated GPU, with or without a session, and records each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from chameleon_mm.api.session import SwapSession
from chameleon_mm.bench._length_models import LengthModel, batch_of, training_step
from chameleon_mm.device import SPECS, SimDevice
from chameleon_mm.device.sim import CostModel
from chameleon_mm.report.report import SwapReport
from chameleon_mm.swap.metrics import StepKind
from chameleon_mm.units import KIB

MIN_BYTES = 8 * KIB

SMALL_GPU = dataclasses.replace(
    SPECS["h200"], bf16_tflops=2.0, fp32_tflops=2.0, hbm_gbps=100.0, h2d_gbps=4.0, d2h_gbps=4.0, duplex_gbps=6.0
)
"""GPU that is as slow as the models are small, so that copies and kernels take similar times."""

Shape = tuple[int, int]
"""Rows and length of a batch."""

Train = Callable[[int, Shape], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthRun:
    """Figures of a run, by step."""

    losses: list[float] = dataclasses.field(default_factory=list)
    parameters: list[Tensor] = dataclasses.field(default_factory=list)
    """Parameters after the last step."""
    peaks: list[int] = dataclasses.field(default_factory=list)
    """Maximum bytes allocated in each step."""
    times_us: list[float] = dataclasses.field(default_factory=list)
    """Virtual time of each step."""
    kinds: list[str] = dataclasses.field(default_factory=list)
    """Kind of each step, as `StepKind` names it; empty without a session."""
    report: SwapReport | None = None


def run_lengths(
    make: Callable[[], LengthModel],
    shapes: Sequence[Shape],
    budget: int | None,
    *,
    prepare: Callable[[SwapSession, Train], None] | None = None,
    **given: Any,
) -> LengthRun:
    """Train on batches of these shapes. `budget` None: without a session; `given`: more arguments of the session.
    `prepare`: trains first in the session, and so changes the parameters."""
    device = SimDevice(SMALL_GPU, cost=CostModel(spec=SMALL_GPU, matmul_efficiency=1.0))
    torch.manual_seed(0)
    with device.compute():
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = None if budget is None else SwapSession(budget, "1GiB", device, MIN_BYTES, model=model, **given)
    run = LengthRun()
    with session or device.compute():
        if prepare is not None and session is not None:
            prepare(session, lambda number, shape: training_step(model, optimizer, batch_of(model, shape, number)))
        for number, shape in enumerate(shapes):
            before = {} if session is None else session.report().steps_by_phase
            device.synchronize()
            device.reset_peaks()
            began_us = device.host_us
            with nullcontext() if session is None else session.step():
                run.losses.append(training_step(model, optimizer, batch_of(model, shape, number)))
            device.synchronize()
            run.times_us.append(device.host_us - began_us)
            run.peaks.append(device.peak_allocated_bytes())
            after = {} if session is None else session.report().steps_by_phase
            run.kinds.extend(kind.value for kind in StepKind if after.get(kind.value, 0) > before.get(kind.value, 0))
    run.parameters.extend(p.detach().clone() for p in model.parameters())
    return run if session is None else dataclasses.replace(run, report=session.report())
