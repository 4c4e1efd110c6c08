"""Trainings step by step, and what is noted of each step.

run_steps(None, make, step, 20)             # plain PyTorch: no device, no session, no mode
run_steps(device, make, step, 20)           # on a device, unswapped
run_steps(device, make, step, 20, budget)   # in a session
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.device import Device

Model = TypeVar("Model", bound=nn.Module)
Step = Callable[[Model, torch.optim.Optimizer, int], list[Any]]
"""Run a step by its number. Returns what is compared of it."""


@dataclass(slots=True, kw_only=True)
class Run:
    seen: list[Any] = field(default_factory=list)
    """Results of the steps, in order."""
    parameters: list[Tensor] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    """Peak of device memory in each step, in bytes."""
    ran_in: cm.SwapSession | None = None

    @property
    def session(self) -> cm.SwapSession:
        assert self.ran_in is not None
        return self.ran_in

    @property
    def report(self) -> cm.SwapReport:
        return self.session.report()

    @property
    def kinds(self) -> list[str]:
        """Kinds of the session's steps."""
        return [step.kind.value for step in self.report.step_figures]

    @property
    def recorded(self) -> list[bool]:
        return [kind == "recorded" for kind in self.kinds]


def run_steps(
    device: Device | None,
    make: Callable[[], tuple[Model, torch.optim.Optimizer]],
    step: Step[Model],
    steps: int,
    budget: int | None = None,
    *,
    host_budget: str = "64MiB",
    min_bytes: int = 8 << 10,
    before: Callable[[int], object] = lambda number: None,
    **given: Any,
) -> Run:
    """`before`: called ahead of each step; what it returns lives until that step has ended. `given`: to the session."""
    torch.manual_seed(0)
    with device.compute() if device else nullcontext():
        model, optimizer = make()
    session = None if budget is None else cm.SwapSession(budget, host_budget, device, min_bytes, model=model, **given)
    run = Run(ran_in=session)
    with session or (device.compute() if device else nullcontext()):
        for number in range(steps):
            held = before(number)
            if device:
                device.reset_peaks()
            with session.step() if session else nullcontext():
                run.seen += step(model, optimizer, number)
            if device:
                run.peaks.append(device.peak_allocated_bytes())
            del held
    run.parameters = [p.detach().clone() for p in model.parameters()]
    return run
