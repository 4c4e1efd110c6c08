"""Loop of the steps that recompute: it does what the executor does, hook for hook, and the bits are plain PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.record.calls import Births
from chameleon_mm.swap.hand_over import HandOver
from chameleon_mm.swap.recomputing import Recomputing
from chameleon_mm.swap.step_ops import StepOps
from chameleon_mm.swap.swap_ins import Rescue
from chameleon_mm.swap.way import Way
from tests._mix_models import bits
from tests._relied_on import device_of

pytestmark = pytest.mark.usefixtures("each_watch")

WIDTH = 48
STEPS = 6
"""Recorded, recorded for a plan that recomputes, proofs, and three as planned."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        h = self.before(x)
        x = x + F.dropout(self.out(torch.softmax(self.query(h) @ self.key(h).transpose(-1, -2), -1) @ h), 0.1)
        return x + self.down(F.gelu(self.up(self.between(x))))


class Training:
    """A few steps of a transformer, as plain PyTorch or in a session."""

    def __init__(self, *, half: bool) -> None:
        torch.manual_seed(1)
        self.half, self.model = half, nn.Sequential(*(Block() for _ in range(4)))
        self.x = torch.randn(8, 24, WIDTH)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)

    def backward(self) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.half):
            loss = self.model(self.x).float().pow(2).mean()
        loss.backward()
        return loss.detach()

    def step(self) -> list[bytes]:
        found = [bits(self.backward()), *(bits(p.grad) for p in self.model.parameters() if p.grad is not None)]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found


def plainly(*, half: bool) -> list[list[bytes]]:
    training = Training(half=half)
    return [training.step() for _ in range(STEPS)]


class InSession:
    """The same steps with `share` of the memory that a step takes in addition to the model."""

    def __init__(self, link: str, share: float, *, half: bool, inside: Callable[[HandOver], None] = lambda _: None) -> None:
        self.memory: list[int] = []
        """Allocated bytes after each hook."""
        self.done: list[int] = []
        """Latest hook of a loop that the executor's hooks call, in each step; -1: none was its."""
        self.device = device = device_of(link)
        with device.compute():
            training = Training(half=half)
            before = device.allocated_bytes()
            training.backward()
            activations = device.peak_allocated_bytes() - before
            training = Training(half=half)
            device.reset_peaks()
            budget = device.allocated_bytes() + int(activations * share)
            with cm.SwapSession(budget, device=device, model=training.model, min_bytes=256) as session:
                hand_over = session._executor.hand_over
                inside(hand_over)
                self.steps = []
                for _ in range(STEPS):
                    hooks = torch.autograd.graph.saved_tensors_hooks(self.seen(session._save), self.seen(session._use))
                    with session.step(), hooks:
                        self.steps.append(training.step())
                    self.done.append(hand_over.loop.hook if hand_over.loop is hand_over._of_executor else -1)
                report = session.report()
        self.recomputed, self.held_bytes, self.num_hooks = report.recomputed, report.bytes_held, len(self.memory) // STEPS
        names = "recomputed", "recomputations", "proofs", "bytes_held", "not_recomputed_by_reason", "steps_by_phase"
        self.counts = {
            name: getattr(report, name) for name in (*names, "bytes_swapped_out", "swap_ins_on_demand", "prefetches")
        }
        assert device.peak_allocated_bytes() <= budget

    def seen(self, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(argument: Any) -> Any:
            result = hook(argument)
            self.memory.append(self.device.allocated_bytes())
            return result

        return run


def without_loop(hand_over: HandOver) -> None:
    hand_over._is_called = False


@cache
def by_executor(watch: str, link: str, share: float, *, half: bool) -> InSession:
    """The executor does each hook. `watch`: what `each_watch` names."""

    return InSession(link, share, half=half, inside=without_loop)


@pytest.mark.parametrize(
    ("link", "share", "half"),
    [("slowest", 0.5, True), ("slowest", 0.75, True), pytest.param("slowest", 0.6, False, marks=pytest.mark.ci)],
)
def test_each_hook_leaves_the_memory_that_the_executor_leaves(link: str, share: float, half: bool, each_watch: str) -> None:
    found, expected = InSession(link, share, half=half), by_executor(each_watch, link, share, half=half)
    assert found.steps == expected.steps == plainly(half=half)
    assert found.memory == expected.memory
    assert found.counts == expected.counts
    assert found.recomputed > 0
    assert found.held_bytes > 0 or not half
    assert found.done[-3:] == [found.num_hooks - 1] * 3
    assert set(expected.done) == {-1}


def nothing_is_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Recomputing, "hold_born", lambda *_: None)


def no_save_is_noted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Births, "at_hook", lambda self, hooks: None)


@pytest.mark.parametrize("mutation", [nothing_is_held, no_save_is_noted])
def test_without_one_of_its_duties_it_does_not_what_the_executor_does(
    mutation: Callable[[pytest.MonkeyPatch], None], each_watch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = by_executor(each_watch, "slowest", 0.75, half=True)
    mutation(monkeypatch)
    found = InSession("slowest", 0.75, half=True)
    assert found.steps == expected.steps
    assert (found.memory, found.counts) != (expected.memory, expected.counts)


@pytest.mark.ci
def test_a_drop_is_tried_once_although_its_row_begins_again(each_watch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that leaves at each tenth hook, after its ops."""
    tried: list[tuple[int, int]] = []
    carry_out = StepOps._carry_out

    def noted(self: StepOps, way: Way, ops: Any) -> None:
        before = set(way.dropped)
        carry_out(self, way, ops)
        tried.extend((way.epoch, number) for number in way.dropped - before)

    def inside(hand_over: HandOver) -> None:
        loop, check = hand_over._of_executor, type(hand_over._of_executor)._check
        monkeypatch.setattr(
            type(loop), "_check", lambda self, hook, *rest, **by: hook % 10 > 0 and check(self, hook, *rest, **by)
        )
        monkeypatch.setattr("chameleon_mm.swap.hand_over.MOST_ENTRIES", 1000)

    expected = by_executor(each_watch, "slowest", 0.6, half=False)
    monkeypatch.setattr(StepOps, "_carry_out", noted)
    found = InSession("slowest", 0.6, half=False, inside=inside)
    assert found.steps == expected.steps == plainly(half=False)
    assert found.counts["not_recomputed_by_reason"] == expected.counts["not_recomputed_by_reason"]
    assert len(tried) == len(set(tried)) > 0


class WritesInTheLastStep(torch.autograd.Function):
    """In the last step its backward writes over its own saved tensor. No plan knows that."""

    steps = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if WritesInTheLastStep.steps == STEPS:
            x.zero_()
        return gradients[0] * 3


def early_and_late(*, moves: bool) -> list[bytes]:
    """Gradients of tensors that may be dropped, made of the one that the function gets. `moves`: that one may be swapped."""
    WritesInTheLastStep.steps += 1
    x = torch.randn(160, 160, requires_grad=True)
    source = x * 2 if moves else x
    early = WritesInTheLastStep.apply(source)  # type: ignore[no-untyped-call]  # torch's own
    late = [(source + number).sin() for number in range(10)]
    early.sum().backward()
    return [bits(torch.autograd.grad(torch.stack([t.sum() for t in late]).sum(), source)[0])]


class LateInSession:
    def __init__(self, *, moves: bool, inside: Callable[[HandOver], None] = lambda _: None) -> None:
        WritesInTheLastStep.steps = 0
        device, self.found, self.error = device_of("slowest"), list[list[bytes]](), ""
        torch.manual_seed(1)
        with device.compute(), cm.SwapSession(device.allocated_bytes() + (2 << 20), device=device, min_bytes=256) as session:
            inside(session._executor.hand_over)
            try:
                for _ in range(STEPS):
                    with session.step():
                        self.found.append(early_and_late(moves=moves))
            except cm.RecomputeMismatch as error:
                self.error = str(error)
            report = session.report()
        self.hook = session._executor.hand_over._of_executor.hook
        self.figures = device.peak_allocated_bytes(), report.steps_by_phase, report.recomputed, report.recomputations


@pytest.mark.parametrize("moves", [True, False])
def test_what_a_node_may_write_to_was_used_before_in_the_loop_too(moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before memory is checked, as in the executor."""
    WritesInTheLastStep.steps = 0
    torch.manual_seed(1)
    expected = [early_and_late(moves=moves) for _ in range(STEPS)]  # plain PyTorch: nothing of ours around it
    by_loop, alone = LateInSession(moves=moves), LateInSession(moves=moves, inside=without_loop)
    assert by_loop.found == alone.found == expected
    assert by_loop.figures == alone.figures
    assert by_loop.hook >= 11  # the first use, at least
    assert alone.hook == -1
    monkeypatch.setattr(Rescue, "hand_out", lambda *_: None)
    assert "recomputed with other bits" in LateInSession(moves=moves).error
