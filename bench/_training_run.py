"""Run of one peer in the training benchmark: a fresh model, optimizer and data by the same seed, timed step by step.

    warm-up:  pins memory, makes optimizer state; a peer that plans records, plans and tries. The host waits after each step.
    steps:    each is between two timed events of the compute stream; the host does not wait
    run = PeerRun(losses of both, times and peak of the steps, predictions of a plan)

The wait lets a session read the time of a plan on trial at once, so that its trials end within the warm-up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from chameleon_mm.api.session import SwapSession
from chameleon_mm.bench._measure import free_unused
from chameleon_mm.bench._stand_in import computes_on_cpu
from chameleon_mm.bench._training_models import Workload
from chameleon_mm.bench._training_peers import FILLING_STEPS, Peer
from chameleon_mm.device.protocols import Device
from chameleon_mm.device.reproducible import reproducible
from chameleon_mm.errors import InfeasibleBudget
from chameleon_mm.follow.adaptation import TRIAL_PLANS, Adaptation
from chameleon_mm.follow.link_rates import link_cost_for, rates_of
from chameleon_mm.follow.planned_step import SAMPLES
from chameleon_mm.follow.structure import RECENT_STEPS
from chameleon_mm.plan.swap_plan import SwapPlan
from chameleon_mm.plan.timing import LinkCost
from chameleon_mm.plan.trace import Trace
from chameleon_mm.report.step_history import TIMED_EVERY

WARMUP_STEPS = 2
"""Warm-up of a peer that does not plan: the first step pins memory and makes the optimizer's state, the second follows it."""

PLANNED_WARMUP_STEPS = 2 * TIMED_EVERY
"""Warm-up of a peer that plans, and of the reference: a recorded step, `RECENT_STEPS` after which the session forgets what only
the recorded one allocated and plans again, and the trials of its new plans. The first step that counts is then one that
sessions time, so that its stall is known."""

SIMULATED_WARMUP_STEPS = 9
"""Warm-up of such peers where a CPU does the work: on the simulator predictions are right to a few percent, and a third plan is
rare; on the stand-in no time counts. A recorded step, and two trials of two steps, each after at most two steps of proofs."""

assert 1 + RECENT_STEPS + TRIAL_PLANS * (1 + SAMPLES) <= PLANNED_WARMUP_STEPS

NO_PLAN = "no plan was within the budget, and every step went by the default rule"


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """Plan that a session followed in the steps that count, and the figures of those steps."""

    plan: SwapPlan
    stall_us: float | None
    """Time that compute waited for copies, per timed step; None: none was timed."""
    steady: bool
    """True if no plan was on trial any more, and every step followed this one."""
    changes: tuple[int, ...]
    """Numbers of the steps, warm-up included, after which the session had another plan to follow."""
    trace: Trace
    """Trace from which the plan was made."""
    link: LinkCost
    """Link rates that the session measured by its own copies."""
    replayable: frozenset[str]
    """Base names of the operators that may run again; empty if the session only swaps."""
    classes: Mapping[str, int]
    """Bytes that the plan keeps, swaps, recomputes and holds."""
    swapped_bytes: float
    """Bytes that went to the host, per step."""
    recomputed_bytes: float
    """Bytes that were dropped and recomputed, per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRun:
    """Figures of one peer's run."""

    losses: Tensor
    """[warm-up and timed steps], float32 on the CPU."""
    step_us: tuple[float, ...]
    peak_allocated_bytes: int
    """Maximum bytes in live tensors over the whole run."""
    peak_reserved_bytes: int | None
    steady_peak_bytes: int
    """Maximum bytes in live tensors over the timed steps."""
    kept_bytes: int
    """Bytes in live tensors after the last step: parameters, optimizer state, one batch."""
    followed: Followed | None = None
    """None: the peer does not plan."""

    @property
    def activation_bytes(self) -> int:
        """Bytes that a timed step needs at its peak, without the bytes kept between steps."""
        return self.steady_peak_bytes - self.kept_bytes

    def budget_for(self, share: float) -> int:
        """Bytes for a step like this one with `share` of its activation memory."""
        return self.kept_bytes + int(share * self.activation_bytes)


def planned_warmup_steps(device: Device) -> int:
    """Warm-up of a peer that plans on `device`."""
    return SIMULATED_WARMUP_STEPS if computes_on_cpu(device) else PLANNED_WARMUP_STEPS


def warmup_steps(peer: Peer, device: Device) -> int:
    """Number of steps of `peer` that do not count. The reference makes as many as any other peer."""
    if not peer.planned and peer.key != "no_swap":
        return FILLING_STEPS + 1 if peer.filling else WARMUP_STEPS
    return planned_warmup_steps(device)


def run_peer(peer: Peer, work: Workload, device: Device, *, steps: int, seed: int, hbm_budget: int) -> PeerRun:
    """Train a fresh model inside `peer`: its warm-up, then `steps` steps. Raises what the peer and the device raise, and
    `InfeasibleBudget` after two steps if `peer` plans and no plan is within the budget."""
    free_unused()  # a reference cycle in torch keeps the last peer's optimizer and model; cached blocks count as reserved
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
            losses.append(loss.detach().clone())  # mse_loss leaves its mean in memory as large as its input

        with peer.over_run(device, model, hbm_budget) as around:
            plans = [_plan_of(around.session)]
            for step in range(warmup_steps(peer, device)):
                train(around.step(), around.forward())
                device.synchronize()
                plans.append(_plan_of(around.session))
                if step and peer.planned and plans[-1] is None:
                    raise InfeasibleBudget(NO_PLAN)
            before, reserved = device.peak_allocated_bytes(), device.peak_reserved_bytes()
            device.reset_peaks()
            watch = None if around.session is None else _Watch.begin(around.session)
            marks = [device.current_stream().record(timed=True)]
            for _ in range(steps):
                train(around.step(), around.forward())
                marks.append(device.current_stream().record(timed=True))
                plans.append(_plan_of(around.session))
            device.synchronize()
            kept = device.allocated_bytes()
            followed = None if watch is None else watch.end(plans)
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


def _plan_of(session: SwapSession | None) -> SwapPlan | None:
    return None if session is None or session._adaptation is None else session._adaptation.latest_plan


class _Watch:
    """Figures of a session's steps from now until `end`. The device is idle at both times."""

    def __init__(self, session: SwapSession, adaptation: Adaptation) -> None:
        self._session, self._adaptation = session, adaptation
        self._before, self._plan = session.report(), adaptation.latest_plan

    @classmethod
    def begin(cls, session: SwapSession) -> _Watch | None:
        """Begin to watch `session`; None: it does not plan."""
        # The report lacks the predicted stall and the trace, which only this benchmark needs.
        adaptation = session._adaptation
        return None if adaptation is None else cls(session, adaptation)

    def end(self, plans: Sequence[SwapPlan | None]) -> Followed:
        """Return the figures. `plans`: those to follow in each step and the next. Raises `InfeasibleBudget` if no plan
        is within the budget any more."""
        before, after = self._before, self._session.report()
        planned, plan = self._adaptation.latest, self._adaptation.latest_plan
        if planned is None or plan is None:
            raise InfeasibleBudget(NO_PLAN)
        timed, steps = after.timed_steps - before.timed_steps, after.steps - before.steps
        followed = after.plan_cache_hits - before.plan_cache_hits == steps
        return Followed(
            plan=plan,
            stall_us=((after.stall_us or 0.0) - (before.stall_us or 0.0)) / timed if timed else None,
            steady=followed and planned.is_decided and plan is self._plan,
            changes=tuple(step for step, (old, new) in enumerate(pairwise(plans)) if new is not old),
            trace=planned.trace,
            link=rates_of(after.spans, link_cost_for(self._session.device)),
            replayable=planned.admitted,
            classes=planned.bytes_by_class(),
            swapped_bytes=(after.bytes_swapped_out - before.bytes_swapped_out) / steps,
            recomputed_bytes=(after.bytes_recomputed - before.bytes_recomputed) / steps,
        )
