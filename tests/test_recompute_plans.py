"""Sessions whose plans recompute: plain PyTorch's bits, within the budget in every step, about the time that was predicted.

The model is a small decoder of the Llama family on a simulated GPU whose host takes no time, as `simulate` supposes. References
are plain PyTorch: nothing of ours, no dispatch mode, no simulated device.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.adaptive.planned_step import PlannedStep
from chameleon_mm.executor.audits import Audits
from chameleon_mm.executor.rebuilds import Rebuilds
from chameleon_mm.executor.recomputing import Recomputing
from chameleon_mm.policy import LinkCost
from chameleon_mm.saved.metrics import StepTime
from chameleon_mm.saved.recipe import Recipe, Refusal
from chameleon_mm.saved.saved_storage import SavedStorage
from tests._mix_models import bits
from tests._random_models import far_ahead

WIDTH, HIDDEN, SEQ, BATCH, LAYERS = 64, 224, 128, 8, 4


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide: Tensor = x.float()
        normed: Tensor = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return normed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = RMSNorm(), RMSNorm()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(heads.transpose(1, 2).flatten(2)), 0.1)
        y = self.between(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


@dataclass
class Run:
    """A few steps of training."""

    seen: list[bytes] = field(default_factory=list)
    """Losses, gradients, parameters, random state."""
    peaks: list[int] = field(default_factory=list)
    """Peak of device memory of each step, in bytes."""
    kept_bytes: int = 0
    """Bytes that are there between two steps."""
    session: cm.SwapSession | None = None


def train(
    steps: int,
    budget: int | None = None,
    *,
    device: cm.SimDevice | None = None,
    audit_every: int = 1,
    **given: Any,
) -> Run:
    """Train in plain PyTorch, or on `device`, within `budget` where there is one."""
    run = Run()
    with device.compute() if device else nullcontext():
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(LAYERS)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        if budget is not None:
            run.session = cm.SwapSession(budget, "1GiB", device, min_bytes="16KiB", model=model, **given)
            run.session.audit_every = audit_every
        with run.session or nullcontext():
            for _ in range(steps):
                if device:
                    device.reset_peaks()
                with run.session.step() if run.session else nullcontext():
                    loss = model(torch.randn(BATCH, SEQ, WIDTH)).square().mean()
                    loss.backward()
                    run.seen += [bits(p.grad) for p in model.parameters() if p.grad is not None]
                    optimizer.step()
                    optimizer.zero_grad()
                run.seen += [bits(loss), bits(torch.get_rng_state()), *(bits(p) for p in model.parameters())]
                del loss
                if device:
                    device.synchronize()  # so that a session knows at once how long its step took
                    run.peaks.append(device.peak_allocated_bytes())
        run.kept_bytes = device.allocated_bytes() if device else 0
    return run


@cache
def plainly(steps: int) -> Run:
    return train(steps)


@cache
def unswapped() -> Run:
    return train(3, device=far_ahead())


def budget_for(share: float) -> int:
    """Bytes for a step with that share of the activations."""
    run = unswapped()
    return run.kept_bytes + int(share * (run.peaks[-1] - run.kept_bytes))


def totals(run: Run) -> Any:
    assert run.session is not None
    return run.session._executor.metrics.totals


@pytest.mark.parametrize("share", [0.6, 0.4, 0.3])
def test_a_plan_that_recomputes_gives_plain_bits_within_the_budget(share: float) -> None:
    budget = budget_for(share)
    run = train(8, budget, device=far_ahead())
    assert run.session is not None
    assert run.seen == plainly(8).seen
    assert totals(run).recomputed > 0
    assert totals(run).rebuilds > 0
    assert max(run.peaks) <= budget
    report = run.session.report()
    assert report.steps_by_phase == {"recorded": 1, "planned": 7}
    assert report.planned_peak_bytes is not None
    assert run.peaks[-1] == pytest.approx(report.planned_peak_bytes, rel=0.01)
    assert run.peaks[-1] >= 0.98 * budget


@pytest.mark.parametrize("share", [0.6, 0.4, 0.3])
def test_the_step_takes_the_time_that_was_predicted(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[float, float]] = []
    add_time = PlannedStep.add_time

    def note(planned: PlannedStep, trial: Any, time: StepTime) -> None:
        measured.append((time.step_us, trial.schedule.plan.step_us))
        add_time(planned, trial, time)

    monkeypatch.setattr(PlannedStep, "add_time", note)
    train(8, budget_for(share), device=far_ahead())
    assert len(measured) >= 2
    for step_us, predicted_us in measured:
        assert step_us == pytest.approx(predicted_us, rel=0.03)


def test_recomputing_is_faster_than_swapping_alone() -> None:
    budget = budget_for(0.4)
    mixed, swapping = (train(8, budget, device=far_ahead(), recompute=on) for on in (True, False))
    assert mixed.seen == swapping.seen == plainly(8).seen
    assert totals(swapping).recomputed == totals(swapping).proofs == 0
    steps_us = []
    for run in (mixed, swapping):
        assert run.session is not None
        report = run.session.report()
        assert report.planned_step_us is not None
        steps_us.append(report.planned_step_us)
    assert run.session is not None
    adaptation = run.session._adaptation
    assert adaptation is not None
    assert adaptation.latest is not None
    unswapped_us = adaptation.latest.trace.duration_us
    assert steps_us[0] - unswapped_us < 0.5 * (steps_us[1] - unswapped_us)


@pytest.mark.parametrize(("audit_every", "most"), [(1, 7), (3, 2), (0, 0)])
def test_each_place_is_proven_once_and_one_storage_is_audited_in_so_many_steps(audit_every: int, most: int) -> None:
    run = train(8, budget_for(0.4), device=far_ahead(), audit_every=audit_every)
    assert run.seen == plainly(8).seen
    assert run.session is not None
    adaptation = run.session._adaptation
    assert adaptation is not None
    assert adaptation.latest is not None
    proven = len(adaptation.latest.proven)
    assert proven > 0
    assert proven + (audit_every == 1) <= totals(run).proofs <= proven + most


def test_an_error_of_an_operator_in_an_audit_is_not_the_users(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compare, compare_bits = Audits.compare, Rebuilds._compare
    auditing, raised = [False], list[str]()

    def audit(*given: Any) -> bool:
        auditing[0] = True
        try:
            return compare(*given)
        finally:
            auditing[0] = False

    def fails(rebuilds: Rebuilds, recipe: Recipe, *given: Any) -> Tensor | Refusal:
        if not auditing[0]:
            return compare_bits(rebuilds, recipe, *given)
        raised.extend(recipe.operators)
        raise RuntimeError("it does not run in this mode")

    monkeypatch.setattr(Audits, "compare", audit)
    monkeypatch.setattr(Rebuilds, "_compare", fails)
    run = train(8, budget_for(0.4), device=far_ahead())
    assert run.seen == plainly(8).seen
    assert run.session is not None
    assert raised
    assert set(run.session.report().recipes_banned) == set(raised)
    assert set(run.session.report().to_dict()["recipes_banned"]) == set(raised)
    assert all(caplog.text.count(f"{name} is not run again any more") == 1 for name in set(raised))


def test_between_steps_nothing_is_watched() -> None:
    """Autograd puts the watch back after the step's backward: it is taken off as the step ends."""
    device = far_ahead()
    with device.compute():
        model = nn.Sequential(*(Block() for _ in range(LAYERS)))
        session = cm.SwapSession(budget_for(0.4), "1GiB", device, min_bytes="16KiB", model=model)
        with session:
            outside = torch._C._len_torch_dispatch_stack()
            for _ in range(5):
                with session.step():
                    model(torch.randn(BATCH, SEQ, WIDTH)).square().mean().backward()
                    model.zero_grad()
                assert torch._C._len_torch_dispatch_stack() == outside
    assert session.report().rebuilds > 0


def test_what_a_proof_finds_to_differ_is_swapped_and_planned_without(monkeypatch: pytest.MonkeyPatch) -> None:
    disproof = Recomputing._disproof
    refused: list[SavedStorage] = []

    def once(recomputing: Recomputing, recipe: Recipe, saved: SavedStorage, restore: Any) -> Refusal | None:
        if refused:
            return disproof(recomputing, recipe, saved, restore)
        refused.append(saved)
        return Refusal("other bits than the original")

    monkeypatch.setattr(Recomputing, "_disproof", once)
    run = train(8, budget_for(0.4), device=far_ahead())
    assert run.session is not None
    assert run.seen == plainly(8).seen
    report = run.session.report()
    assert report.not_recomputed_by_reason == {"other bits than the original": 1}
    assert "1 other bits than the original" in str(report)
    adaptation = run.session._adaptation
    assert adaptation is not None
    assert adaptation.latest is not None
    assert adaptation.latest.current is not None
    (number,) = adaptation.latest.refused
    assert refused[0].planned is not None
    assert number == refused[0].planned.tensor
    assert number not in {action.tensor for action in adaptation.latest.current.schedule.plan.recomputed}


def test_another_link_is_told_from_the_one_that_plans_are_made_for() -> None:
    """A rate that is measured to be more than 10 % off the one that plans were made for."""
    run = train(8, budget_for(0.4), device=far_ahead())
    assert run.session is not None
    adaptation = run.session._adaptation
    assert adaptation is not None
    planned = adaptation.latest
    assert planned is not None
    link = planned.link
    assert link is not None

    def at(share: float) -> LinkCost:
        return LinkCost(d2h_gbps=link.d2h_gbps * share, h2d_gbps=link.h2d_gbps * share, duplex_gbps=link.duplex_gbps * share)

    assert planned.chooses_by_link
    assert not planned.is_for_another_link(at(0.95))
    assert planned.is_for_another_link(at(0.85))
    assert planned.is_for_another_link(at(1.15))


@pytest.mark.parametrize("given", [1, "yes", None])
def test_recompute_is_true_or_false(given: Any) -> None:
    with pytest.raises(TypeError, match="recompute: expected True or False"):
        cm.SwapSession("1GiB", device="sim", recompute=given)
