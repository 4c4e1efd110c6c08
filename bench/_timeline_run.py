"""Watches two steps of the demo's model on a simulated GPU, one without swapping and one by a plan.

watched(spec, config, share) -> Comparison(unswapped, planned, plan)
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from chameleon_mm.api.session import SwapSession
from chameleon_mm.bench._timeline_step import Copy, Step, Watch, WatchedDevice
from chameleon_mm.device.reproducible import reproducible
from chameleon_mm.device.specs import GpuSpec
from chameleon_mm.plan.swap_plan import SwapPlan
from chameleon_mm.plan.trace import Trace
from chameleon_mm.tools.demo import GPT, VOCABULARY, GPTConfig

WARMUP_STEPS = 2
"""Steps before the watched one: the first makes optimizer state, and a session records it."""
MOST_STEPS = 6
"""Maximum number of steps in which a session has to follow a plan."""


class Swap(NamedTuple):
    """Times on the compute stream, and copies, of one saved storage that moved."""

    save_us: float
    out: Copy
    reclaim_us: float
    prefetch_us: float
    back: Copy
    use_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Step of a model without swapping, and the same step by a plan."""

    device: str
    config: GPTConfig
    hbm_budget_bytes: int
    unswapped: Step
    planned: Step
    plan: SwapPlan
    trace: Trace
    """Trace from which the plan was made."""

    def swaps(self) -> list[Swap]:
        """Storages that moved, in the order of the copies out. Each engine copies in the order in which the plan queues."""
        step, actions = self.planned, sorted(self.plan.actions, key=lambda action: action.out_at)
        out, back = ([copy for copy in step.copies if copy.direction == way] for way in ("d2h", "h2d"))
        returned = dict(zip(sorted(actions, key=lambda action: (action.in_at, action.use_at)), back, strict=True))
        hooks = zip(self.trace.hook_tensor.tolist(), self.trace.hook_use.tolist(), strict=True)
        saves = {tensor: number for number, (tensor, use) in reversed(list(enumerate(hooks))) if not use}
        at = step.hooks_us
        return [
            Swap(at[saves[a.tensor]], copy, at[a.reclaim_at], at[a.in_at], returned[a], at[a.use_at])
            for a, copy in zip(actions, out, strict=True)
        ]


@dataclass
class _Training:
    """Demo's model on random bytes, from a fixed seed. Make and use it in `device.compute()`."""

    config: GPTConfig
    model: GPT = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = GPT(self.config)
        self._ids, self._targets = (torch.randint(0, VOCABULARY, (1, self.config.context)) for _ in range(2))
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def step(self, watch: Watch | None = None) -> None:
        """Forward, backward, optimizer; gradients are dropped. `watch` sees the operators."""

        def enter(phase: str) -> None:
            if watch is not None:
                watch.phase = phase

        with watch or nullcontext():
            loss = self.model.loss(self._ids, self._targets)
            enter("backward")
            loss.backward()
            del loss
            enter("optimizer")
            self._optimizer.step()
            self._optimizer.zero_grad()


def watched(spec: str | GpuSpec, config: GPTConfig, share: float) -> Comparison:
    """Watch the step of `config` on a simulated `spec`, without swapping and by a plan. The budget is the memory kept between
    steps and `share` of the memory that a step adds to it.

    Seeds torch's default generator. Raises `InfeasibleBudget`, a `ValueError`, if the budget is too small, and `ValueError` if
    no step followed a plan from its first hook to its last.
    """
    device = WatchedDevice(spec)
    with reproducible(), device.compute():
        training = _Training(config)
        for _ in range(WARMUP_STEPS):
            training.step()
        _begin(device)
        watch = Watch(device)
        training.step(watch)
        device.synchronize()
        unswapped, kept = watch.step(), device.allocated_bytes()
        budget = kept + int(share * (unswapped.peak_bytes - kept))
        with SwapSession(budget, device=device, model=training.model, recompute=False) as session:
            for _ in range(WARMUP_STEPS):
                with session.step():
                    training.step()
            planned, plan, trace = _planned_step(device, session, training)
    return Comparison(
        device=device.name, config=config, hbm_budget_bytes=budget, unswapped=unswapped, planned=planned, plan=plan, trace=trace
    )


def _planned_step(device: WatchedDevice, session: SwapSession, training: _Training) -> tuple[Step, SwapPlan, Trace]:
    executor, adaptation = session._executor, session._adaptation  # hooks to watch, and the plan, which no report has
    assert adaptation is not None
    for _ in range(MOST_STEPS):
        _begin(device)
        before, plan = session.report(), adaptation.latest_plan
        watch = Watch(device)
        with session.step(), watch.hooks(executor.save, executor.use):
            training.step(watch)
        device.synchronize()
        after = session.report()
        followed = after.steps_by_phase.get("planned", 0) > before.steps_by_phase.get("planned", 0)
        if followed and plan is not None and plan.actions and adaptation.latest is not None:
            step = watch.step(stall_us=(after.stall_us or 0.0) - (before.stall_us or 0.0))
            return step, plan, adaptation.latest.trace
    found = dict(session.report().steps_by_phase)
    raise ValueError(f"expected a step that follows a plan by which something moves, got {found}; choose another budget")


def _begin(device: WatchedDevice) -> None:
    device.synchronize()
    device.reset_peaks()
