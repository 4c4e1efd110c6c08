"""Training within budgets for which something has to be away between two uses: as simulated, and with plain PyTorch's numbers.

Plain PyTorch knows of no device and no hooks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.plan.planner import generate_plan
from chameleon_mm.plan.simulate import simulate
from chameleon_mm.plan.swap_plan import Action, SwapPlan
from chameleon_mm.plan.timing import LinkCost
from chameleon_mm.plan.trace import NEVER, Trace
from chameleon_mm.plan.unswapped_memory import peak_memory, smallest_budget
from chameleon_mm.record.recorder import Recorder
from tests._random_models import SLOW_GPU, far_ahead, link_of, planning, seeds, train
from tests._trace_records import hooks_of
from tests._traces import away_before_first_uses_alone

TIME_SHARE = 0.02


# --- recorded


def test_a_recorder_notes_until_when_what_was_used_is_held(sim: cm.SimDevice) -> None:
    with sim.compute():
        recorder = Recorder(sim)
        with recorder:
            x = torch.ones(16, 16)  # tick 0
            storage = x.untyped_storage()
            traced = recorder.add_claim(storage)
            recorder.on_save([traced], 1)  # 1
            y = x.exp()  # 2
            del x
            recorder.sendable(traced)

            def used() -> Tensor:
                recorder.on_use([traced], 2)
                with recorder.paused():
                    recorder.restored(traced, storage)
                    return torch.empty(0).set_(storage, 0, (16, 16), (16, 1))

            held = used()  # 3
            y = y * held  # 4
            y = y + held  # 5
            del held
            y = y.exp()  # 6
            held = used()  # 7
            y = y * held  # 8: held until it is used again
            recorder.on_use([traced], 2)  # 9: by somebody of whom nobody tells what he was given
            del held
            y.exp()  # 10
            recorder.retired(traced)
        trace = recorder.finish()
    assert [(hook.tick, hook.released) for hook in hooks_of(trace)] == [(1, NEVER), (3, 5), (7, NEVER), (9, NEVER)]


# --- carried out


def budget_of(seed: int, share: float, backwards: int) -> tuple[int, bool]:
    """A budget for the model of `seed`, and whether first uses alone are not enough for it."""
    device = far_ahead()
    steps, _ = train(seed, device, planning(device), steps=2, backwards=backwards)
    trace = steps[-1].trace
    assert trace is not None
    least = smallest_budget(trace)
    budget = least + int((peak_memory(trace).nbytes - least) * share)
    return budget, budget < smallest_budget(away_before_first_uses_alone(trace))


@pytest.mark.parametrize("seed", seeds(2, of=range(6)))
@pytest.mark.parametrize(("share", "backwards"), [(0.02, 2), (0.4, 2), (0.1, 3)])
def test_the_executor_does_what_was_simulated(seed: int, share: float, backwards: int) -> None:
    """Device memory to the byte, time closely, and the numbers of the same steps with nothing swapped."""
    budget, is_between_uses = budget_of(seed, share, backwards)
    device = far_ahead()
    pool = cm.PinnedPool("64MiB", device=device)
    executor = planning(device, budget, pool=pool)
    expected, unswapped = train(seed, far_ahead(), steps=5, backwards=backwards)
    steps, swapped = train(seed, device, executor, steps=5, backwards=backwards)
    assert [step.loss for step in steps] == [step.loss for step in expected]
    assert all(torch.equal(a, b) for a, b in zip(swapped, unswapped, strict=True))
    for step in steps[1:]:
        assert step.plan is not None
        assert step.trace is not None
        assert is_between_uses == any(action.again for action in step.plan.actions)
        timeline = simulate(step.trace, step.plan, link_of(SLOW_GPU))
        assert step.peak_bytes == timeline.peak_bytes <= budget
        assert step.step_us == pytest.approx(timeline.step_us, rel=TIME_SHARE)
    assert len(executor._registry) == 0
    assert pool.stats().live_bytes == 0
    del swapped
    assert device.allocated_bytes() == 0


def without_first_actions(plan: SwapPlan) -> list[Action]:
    """What was to be away before is on the device alone when it is to be dropped: it has to be copied out then."""
    return [action for action in plan.actions if action.again]


def at_once(plan: SwapPlan) -> list[Action]:
    """Dropped at the hook of a use, which comes after the drop, and asked back at any."""
    return [
        dataclasses.replace(a, out_at=max(0, a.out_at - 3), reclaim_at=max(0, a.reclaim_at - 3), in_at=max(0, a.in_at - 2))
        for a in plan.actions
    ]


@pytest.mark.parametrize("seed", seeds(1, of=range(3)))
@pytest.mark.parametrize("wrong", [without_first_actions, at_once])
def test_a_wrong_plan_costs_time_alone(
    seed: int, wrong: Callable[[SwapPlan], list[Action]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[SwapPlan]()

    def plans(trace: Trace, hbm_budget: int, host_budget: int, link: LinkCost, **_: Any) -> Sequence[SwapPlan]:
        plan = generate_plan(trace, smallest_budget(trace), None, link, drafts=0)
        made.append(dataclasses.replace(plan, actions=tuple(wrong(plan))))
        return [made[-1]]

    monkeypatch.setattr("chameleon_mm.follow.adaptation.candidate_plans", plans)
    device = far_ahead()
    executor = planning(device)
    expected, unswapped = train(seed, far_ahead(), steps=4, backwards=2)
    steps, swapped = train(seed, device, executor, steps=4, backwards=2)
    assert [step.loss for step in steps] == [step.loss for step in expected]
    assert all(torch.equal(a, b) for a, b in zip(swapped, unswapped, strict=True))
    assert all(step.plan in made for step in steps[1:])  # it was followed all the same
    assert any(action.again for plan in made for action in plan.actions)


# --- sessions


class Keeps(torch.autograd.Function):
    """Holds what it saved until its own backward runs again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.exp(x)
        ctx.save_for_backward(y)
        return y.sin()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        ctx.held = y
        return torch.mul(grads[0] * y.cos(), y)


keeps: Callable[[Tensor], Tensor] = Keeps.apply


class Trunk(nn.Module):
    """A trunk of wide layers with dropout, and two heads."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(48, 192), nn.GELU(), nn.Dropout(0.1), nn.Linear(192, 48)) for _ in range(6)
        )
        self.heads = nn.ModuleList(nn.Linear(48, 48) for _ in range(2))
        self.keeps = keeps

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = x + layer(keeps(x) if self.keeps else x)
        return self.heads[0](x).square().mean(), self.heads[1](x).abs().mean()


def one_graph_twice(model: Trunk, x: Tensor) -> None:
    loss = sum(model(x))
    assert isinstance(loss, Tensor)
    loss.backward(retain_graph=True)
    loss.backward()


def two_losses(model: Trunk, x: Tensor) -> None:
    one, two = model(x)
    one.backward(retain_graph=True)
    two.backward()


def gradients_first(model: Trunk, x: Tensor) -> None:
    one, two = model(x)
    weights = list(model.layers.parameters())
    grads = torch.autograd.grad(one, weights, retain_graph=True)
    norm = torch.stack([g.square().sum() for g in grads]).sum()
    (one / (1 + norm) + two).backward()


def one_for_each_row(model: Trunk, x: Tensor) -> None:
    one, two = model(x)
    for weight in (0.5, 0.25, 0.125):
        (one * weight).backward(retain_graph=True)
    two.backward()


Program = Callable[[Trunk, Tensor], None]


def train_on(program: Program, keeps: bool, in_step: Callable[[Callable[[], None]], None], steps: int = 5) -> list[bytes]:
    """Gradients of every step, and the weights at the end; bytes, because a tensor would count as the device's."""
    torch.manual_seed(3)
    model, found = Trunk(keeps), list[bytes]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            program(model, torch.randn(128, 48))
            optimizer.step()

        in_step(step)
        found += [p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None]
    return [*found, *(p.detach().numpy().tobytes() for p in model.parameters())]


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("program", [one_graph_twice, two_losses, gradients_first, one_for_each_row])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_plain_pytorchs_within_a_tight_budget(program: Program, keeps: bool, recompute: bool) -> None:
    plain = train_on(program, keeps, lambda step: step())
    device, unswapped = cm.SimDevice(), list[int]()

    def measured(step: Callable[[], None]) -> None:
        device.reset_peaks()
        step()
        unswapped.append(device.peak_allocated_bytes())

    with device.compute():
        train_on(program, keeps, measured)
    device, peaks = cm.SimDevice(), list[int]()
    budget = int(max(unswapped) * 0.7)
    with device.compute(), cm.SwapSession(budget, "64MiB", device, 1024, recompute=recompute) as session:

        def swapped(step: Callable[[], None]) -> None:
            device.reset_peaks()
            with session.step():
                step()
            peaks.append(device.peak_allocated_bytes())

        got = train_on(program, keeps, swapped)
    report = session.report()
    assert got == plain
    assert max(peaks) <= budget < max(unswapped)
    assert report.plan_cache_hits == 4
    assert report.budget_misses == 0
