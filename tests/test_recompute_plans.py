"""Sessions whose plans recompute: plain PyTorch's bits, within the budget in every step, about the time that was predicted.

The model is a small decoder of the Llama family on a simulated GPU whose host takes no time, as `simulate` supposes. References
are plain PyTorch: nothing of ours, no dispatch mode, no simulated device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.follow.planned_step import PlannedStep
from chameleon_mm.plan.timing import LinkCost
from chameleon_mm.swap.forms import Original
from chameleon_mm.swap.metrics import StepTime
from chameleon_mm.swap.recipe_runner import Comparisons, RecipeRunner
from tests._fakes import refusing
from tests._mix_models import bits
from tests._random_models import far_ahead
from tests._runs import Run, run_steps

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


def decoder() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = decoder()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> list[bytes]:
    """Gradients, loss, random state, parameters."""
    loss = model(torch.randn(BATCH, SEQ, WIDTH)).square().mean()
    loss.backward()
    seen = [bits(p.grad) for p in model.parameters() if p.grad is not None]
    optimizer.step()
    optimizer.zero_grad()
    return [*seen, bits(loss), bits(torch.get_rng_state()), *(bits(p) for p in model.parameters())]


def train(steps: int, budget: int, *, device: cm.SimDevice, **given: Any) -> Run:
    def settle(number: int) -> None:
        device.synchronize()  # so that a session knows at once how long its step took

    return run_steps(device, trained, step, steps, budget, host_budget="1GiB", min_bytes=16 << 10, before=settle, **given)


@cache
def plainly(steps: int) -> Run:
    return run_steps(None, trained, step, steps)


@cache
def unswapped() -> tuple[int, int]:
    """Bytes that are there between two steps, and a step's peak."""
    device, kept = far_ahead(), list[int]()
    run = run_steps(device, trained, step, 3, before=lambda number: kept.append(device.allocated_bytes()))
    return kept[-1], run.peaks[-1]


def budget_for(share: float) -> int:
    """Bytes for a step with that share of the activations."""
    kept, peak = unswapped()
    return kept + int(share * (peak - kept))


def latest(session: cm.SwapSession | None) -> PlannedStep:
    """The step that the session knows, and its plans."""
    assert session is not None and session._adaptation is not None and session._adaptation.latest is not None
    return session._adaptation.latest


def totals_of_session(session: cm.SwapSession) -> Any:
    return session._executor.metrics.totals


def totals(run: Run) -> Any:
    return totals_of_session(run.session)


@pytest.mark.ci
@pytest.mark.usefixtures("each_watch")
@pytest.mark.parametrize("share", [0.6, 0.4, 0.3])
def test_a_plan_that_recomputes_gives_plain_bits_within_the_budget(share: float) -> None:
    budget = budget_for(share)
    run = train(8, budget, device=far_ahead())
    assert run.seen == plainly(8).seen
    assert totals(run).recomputed > 0
    assert totals(run).recomputations > 0
    assert max(run.peaks) <= budget
    report = run.report
    assert report.steps_by_phase == {"recorded": 1, "planned": 7}
    assert report.planned_peak_bytes is not None
    assert run.peaks[-1] == pytest.approx(report.planned_peak_bytes, rel=0.01)
    assert run.peaks[-1] >= 0.98 * budget


@pytest.mark.ci
@pytest.mark.usefixtures("each_watch")
@pytest.mark.parametrize("share", [0.6, 0.4, 0.3])
def test_the_step_takes_the_time_that_was_predicted(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[float, float]] = []
    add_time = PlannedStep.add_time

    def note(planned: PlannedStep, trial: Any, time: StepTime) -> None:
        measured.append((time.step_us, trial.program.plan.step_us))
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
        report = run.report
        assert report.planned_step_us is not None
        steps_us.append(report.planned_step_us)
    unswapped_us = latest(run.session).trace.duration_us
    assert steps_us[0] - unswapped_us < 0.5 * (steps_us[1] - unswapped_us)


@pytest.mark.usefixtures("each_watch")
def test_each_place_is_proven_once_and_nothing_is_dropped_before_that() -> None:
    """Note [Relied on], rule 3: in the first step by a plan the originals stay until their uses, within the budget."""
    budget = budget_for(0.4)
    dropped, proofs = [], []
    for steps in (1, 2, 3, 8):
        run = train(steps, budget, device=far_ahead())
        assert run.seen == plainly(steps).seen
        assert max(run.peaks) <= budget
        dropped.append(totals(run).recomputed)
        proofs.append(totals(run).proofs)
    assert dropped[:2] == [0, 0]
    assert 0 < dropped[2] < dropped[3]
    assert proofs[0] == 0 < proofs[1]
    assert len(latest(run.session).proven) == proofs[3]
    assert run.report.not_recomputed_by_reason == {"proved at its use first": proofs[3]}


@pytest.mark.usefixtures("each_watch")
def test_what_is_recomputed_is_compared_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: list[bool] = []
    add = Comparisons.add

    def note(comparisons: Comparisons, original: Original, buffer: Tensor, *, is_proof: bool = False) -> None:
        pairs.append(is_proof)
        add(comparisons, original, buffer, is_proof=is_proof)

    monkeypatch.setattr(Comparisons, "add", note)
    run = train(6, budget_for(0.4), device=far_ahead())
    assert pairs.count(True) == totals(run).proofs
    assert pairs.count(False) == totals(run).recomputed


@pytest.mark.usefixtures("each_watch")
def test_an_error_of_an_operator_in_a_proof_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecipeRunner, "_run", refusing(RuntimeError, "it does not run in this mode"))
    run = train(8, budget_for(0.4), device=far_ahead())
    assert run.seen == plainly(8).seen
    assert totals(run).recomputed == 0
    assert totals(run).not_recomputed_by_reason["an error when it runs again"] > 0


def test_between_steps_nothing_is_watched() -> None:
    """Autograd puts the watch back after the step's backward: it is taken off as the step ends."""
    device = far_ahead()
    with device.compute():
        model = decoder()
        session = cm.SwapSession(budget_for(0.4), "1GiB", device, min_bytes="16KiB", model=model)
        with session:
            outside = torch._C._len_torch_dispatch_stack()
            for _ in range(5):
                with session.step():
                    model(torch.randn(BATCH, SEQ, WIDTH)).square().mean().backward()
                    model.zero_grad()
                assert torch._C._len_torch_dispatch_stack() == outside
    assert session.report().recomputations > 0


def differing(monkeypatch: pytest.MonkeyPatch, *, in_proof: bool) -> list[Original]:
    """Make the first comparison, of a proof or of a used storage, find another bit."""
    changed: list[Original] = []
    add = Comparisons.add

    def once(comparisons: Comparisons, original: Original, buffer: Tensor, *, is_proof: bool = False) -> None:
        if is_proof is in_proof and not changed:
            changed.append(original)
            buffer = buffer.clone()
            buffer[1] ^= 1
        add(comparisons, original, buffer, is_proof=is_proof)

    monkeypatch.setattr(Comparisons, "add", once)
    return changed


@pytest.mark.usefixtures("each_watch")
def test_what_a_proof_finds_to_differ_is_swapped_and_planned_without(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = differing(monkeypatch, in_proof=True)
    run = train(8, budget_for(0.4), device=far_ahead())
    assert run.seen == plainly(8).seen
    report = run.report
    assert set(report.recipes_banned) == set(changed[0].operators)
    assert "not run again any more" in str(report)
    planned = latest(run.session)
    (number,) = planned.refused
    assert planned.refused[number].reason == "other bits than the original"
    assert planned.current is not None
    assert number not in {action.tensor for action in planned.current.program.plan.recomputed}


@pytest.mark.usefixtures("each_watch")
def test_a_mismatch_ends_backward_with_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And steps after it are right: that tensor is not recomputed any more."""
    changed = differing(monkeypatch, in_proof=False)
    device = far_ahead()
    with device.compute():
        torch.manual_seed(0)
        model = decoder()
        session = cm.SwapSession(budget_for(0.4), "1GiB", device, min_bytes="16KiB", model=model)
        with session:
            for number in range(6):
                with pytest.raises(cm.RecomputeMismatch) if number == 2 else nullcontext() as error, session.step():
                    model(torch.randn(BATCH, SEQ, WIDTH)).square().mean().backward()
                    assert number != 2
                model.zero_grad()
                if number == 2:
                    assert error is not None
                    text = str(error.value)
    assert len(changed) == len(latest(session).refused) == 1
    module = changed[0].module()
    assert module.partition(".")[0] in map(str, range(LAYERS))
    assert f"{changed[0].nbytes} bytes of torch.float32, result of {changed[0].operators[-1]} in module {module!r}" in text
    assert "SwapSession(recompute=False)" in text
    assert session.report().steps_by_phase["failed"] == 1


@pytest.mark.usefixtures("each_watch")
def test_run_step_runs_a_step_with_a_mismatch_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With plain PyTorch's bits in each step, and without a lower budget."""

    def steps(run_step: Callable[[Callable[[], None]], None] | None, model: nn.Module) -> list[bytes]:
        seen: list[bytes] = []

        def step() -> None:
            model(torch.randn(BATCH, SEQ, WIDTH)).square().mean().backward()

        for _ in range(6):
            step() if run_step is None else run_step(step)
            seen += [bits(p.grad) for p in model.parameters() if p.grad is not None]
            model.zero_grad()
        return seen

    torch.manual_seed(0)
    expected = steps(None, decoder())
    changed = differing(monkeypatch, in_proof=False)
    device, budget = far_ahead(), budget_for(0.4)
    with device.compute():
        torch.manual_seed(0)
        model = decoder()
        with cm.SwapSession(budget, "1GiB", device, min_bytes="16KiB", model=model) as session:
            assert steps(session.run_step, model) == expected
            assert session.hbm_budget_bytes == budget
    assert len(changed) == 1
    assert session.report().steps_by_phase["failed"] == 1
    assert totals_of_session(session).steps_run_again == 1


def test_another_link_is_told_from_the_one_that_plans_are_made_for() -> None:
    """A rate that is more than 10 % above the one that plans were made for, or as much below it while steps are late."""
    planned = latest(train(8, budget_for(0.4), device=far_ahead()).session)
    link = planned.link
    assert link is not None

    def at(share: float) -> LinkCost:
        return LinkCost(d2h_gbps=link.d2h_gbps * share, h2d_gbps=link.h2d_gbps * share, duplex_gbps=link.duplex_gbps * share)

    assert planned.chooses_by_link
    assert not planned.is_for_another_link(at(0.95))
    assert not planned.is_for_another_link(at(0.85))
    assert planned.is_for_another_link(at(1.15))
    assert planned.current is not None
    for trial in planned.trials:
        trial.times_us[:] = [us * 1.1 for us in trial.times_us]
    assert planned.is_for_another_link(at(0.85))
    assert not planned.is_for_another_link(at(0.95))
    planned.link_plans = 10  # so often that the steps since then do not pay for one more
    assert not planned.is_for_another_link(at(0.85))
