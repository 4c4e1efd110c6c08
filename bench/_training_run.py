"""One peer's run in the training benchmark: a fresh model, optimizer and data by the same seed, timed step by step.

    warm-up:  memory is pinned, optimizer state made; who plans records, plans and tries.  The host waits after each step.
    steps:    between two timed events of the compute stream each; nobody waits
    run = PeerRun(losses of both, times and peak of the steps, what a plan had foreseen)

The wait lets a session read at once how long a plan on trial took, so that its trials end with the warm-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from chameleon_mm.api.session import SwapSession
from chameleon_mm.bench._measure import free_unused
from chameleon_mm.bench._training_models import Workload
from chameleon_mm.bench._training_peers import Peer
from chameleon_mm.device.protocols import Device
from chameleon_mm.device.reproducible import reproducible
from chameleon_mm.follow.adaptation import Adaptation
from chameleon_mm.follow.link_rates import link_cost_for, rates_of
from chameleon_mm.follow.planned_step import MOST_PLANS, SAMPLES
from chameleon_mm.plan.swap_plan import SwapPlan
from chameleon_mm.plan.timing import LinkCost
from chameleon_mm.plan.trace import Trace
from chameleon_mm.report.step_history import TIMED_EVERY

WARMUP_STEPS = 2
"""Of a peer that does not plan: the first step pins memory and makes the optimizer's state, the second follows the first."""

PLANNED_WARMUP_STEPS = TIMED_EVERY
"""Of one that plans, and of whom it is compared with: a recorded step and every trial there may be, and then the first step
that counts is one that sessions time, so that its stall is known."""

SIMULATED_WARMUP_STEPS = 9
"""On a simulator, where plans are foreseen to a few percent and a third one is rare: a recorded step, and two trials of two,
each behind at most two steps in which recipes are proved."""

assert 1 + MOST_PLANS * SAMPLES <= PLANNED_WARMUP_STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """The plan that a session followed in the steps that count, and what came of it."""

    plan: SwapPlan
    stall_us: float | None
    """Compute's waits for copies, per step that was timed; None: none was."""
    steady: bool
    """Whether no plan was on trial any more, and every step went by this one."""
    trace: Trace
    """Of which it was made."""
    link: LinkCost
    """As the session's copies showed it by the end."""
    replayable: frozenset[str]
    """Base names of the operators that might run again; empty where the session only swaps."""
    classes: Mapping[str, int]
    """Bytes that the plan keeps, swaps, recomputes and holds."""
    swapped_bytes: float
    """Bytes that went to the host, per step."""
    recomputed_bytes: float
    """Bytes that were dropped and recomputed, per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRun:
    """What one peer's run gave."""

    losses: Tensor
    """[warm-up and timed steps], float32 on the CPU."""
    step_us: tuple[float, ...]
    """Timed steps alone."""
    peak_allocated_bytes: int
    """Of the whole run."""
    peak_reserved_bytes: int | None
    steady_peak_bytes: int
    """Of the timed steps: most bytes in live tensors."""
    kept_bytes: int
    """In live tensors after the last step: parameters, optimizer state, one batch."""
    followed: Followed | None = None
    """None: there was no plan to follow."""

    @property
    def activation_bytes(self) -> int:
        """What a timed step needs at its peak beyond what is kept between steps."""
        return self.steady_peak_bytes - self.kept_bytes

    def budget_for(self, share: float) -> int:
        """Bytes for a step like this one with `share` of its activation memory."""
        return self.kept_bytes + int(share * self.activation_bytes)


def warmup_steps(peer: Peer, device: Device) -> int:
    """Steps of `peer` that do not count. The peer that all are compared with makes as many as any."""
    if not peer.planned and peer.key != "no_swap":
        return WARMUP_STEPS
    return SIMULATED_WARMUP_STEPS if device.simulated else PLANNED_WARMUP_STEPS


def run_peer(peer: Peer, work: Workload, device: Device, *, steps: int, seed: int, hbm_budget: int) -> PeerRun:
    """Train a fresh model inside `peer`: its warm-up, then `steps` steps. Raises what the peer and the device raise."""
    free_unused()  # a cycle of torch's keeps the last peer's optimizer and with it the model; cached blocks count as reserved
    device.reset_peaks()
    with reproducible(), device.compute():
        torch.manual_seed(seed)
        model, loss_of = work.make(device.torch_device, peer.checkpointed)
        # fused: one kernel on every device. torch's default on a CPU is a dozen small ones per parameter, which no GPU runs.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        losses: list[Tensor] = []

        def train(step: AbstractContextManager[object], forward: AbstractContextManager[object]) -> None:
            with step:
                batch = work.batch(device.torch_device)
                with forward:
                    loss = loss_of(*batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach().clone())  # mse_loss leaves its mean in memory as large as what it is the mean of

        with peer.over_run(device, model, hbm_budget) as around:
            for _ in range(warmup_steps(peer, device)):
                train(around.step(), around.forward())
                device.synchronize()
            before, reserved = device.peak_allocated_bytes(), device.peak_reserved_bytes()
            device.reset_peaks()
            watch = None if around.session is None else _Watch.begin(around.session)
            marks = [device.current_stream().record(timed=True)]
            for _ in range(steps):
                train(around.step(), around.forward())
                marks.append(device.current_stream().record(timed=True))
            device.synchronize()
            kept = device.allocated_bytes()
            followed = None if watch is None else watch.end()
    steady, reserved_later = device.peak_allocated_bytes(), device.peak_reserved_bytes()
    return PeerRun(
        losses=torch.stack([loss.to("cpu", copy=True) for loss in losses]),
        step_us=tuple(end.elapsed_us(start) for start, end in pairwise(marks)),
        peak_allocated_bytes=max(before, steady),
        peak_reserved_bytes=None if reserved is None or reserved_later is None else max(reserved, reserved_later),
        steady_peak_bytes=steady,
        kept_bytes=kept,
        followed=followed,
    )


class _Watch:
    """What a session does from now until `end`, in steps alone. The device is idle at both."""

    def __init__(self, session: SwapSession, adaptation: Adaptation) -> None:
        self._session, self._adaptation = session, adaptation
        self._before, self._plan = session.report(), adaptation.latest_plan

    @classmethod
    def begin(cls, session: SwapSession) -> _Watch | None:
        """None: a session that does not plan."""
        # Not in its report: the stall that was foreseen, and the trace. This benchmark alone asks for them.
        adaptation = session._adaptation
        return None if adaptation is None else cls(session, adaptation)

    def end(self) -> Followed | None:
        """None: no plan was within the budget."""
        before, after = self._before, self._session.report()
        planned, plan = self._adaptation.latest, self._adaptation.latest_plan
        if planned is None or plan is None:
            return None
        timed, steps = after.timed_steps - before.timed_steps, after.steps - before.steps
        followed = after.plan_cache_hits - before.plan_cache_hits == steps
        return Followed(
            plan=plan,
            stall_us=((after.stall_us or 0.0) - (before.stall_us or 0.0)) / timed if timed else None,
            steady=followed and planned.is_decided and plan is self._plan,
            trace=planned.trace,
            link=rates_of(after.spans, link_cost_for(self._session.device)),
            replayable=planned.admitted,
            classes=planned.bytes_by_class(),
            swapped_bytes=(after.bytes_swapped_out - before.bytes_swapped_out) / steps,
            recomputed_bytes=(after.bytes_recomputed - before.bytes_recomputed) / steps,
        )
