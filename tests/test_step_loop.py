"""The loop that runs a compiled plan: its rows are the plan's, its steps eager's, and leaving it costs a word to the director.

The reference is plain PyTorch: the same program with no session, no simulated device and no mode around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.adaptive.hook_schedule import HookSchedule
from chameleon_mm.executor.step_loop import StepLoop
from chameleon_mm.policy.step_program import AGAIN, DROP, FIRST, KEPT, OUT, USE, StepProgram, compile_program
from chameleon_mm.saved.version import SavedBytes
from chameleon_mm.trace import Trace
from tests._ordering import Machine, OnCuda, OnSim, drop_waits
from tests._plain_training import Image, image
from tests._traces import plan_of, random_plan, random_step
from tests.observed import SimLifetimeError, SimRaceError

pytestmark = [
    pytest.mark.usefixtures("no_gc"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # of what a mutant breaks at the end
]

MACHINES = [OnSim, pytest.param(OnCuda, marks=pytest.mark.gpu)]

SIDE, LAYERS, STEPS = 128, 6, 5


# --- what is compiled


def compiled(trace: Trace, plan: Any) -> StepProgram | None:
    """The program of a step whose saves have features as a model's would."""
    features: list[tuple[Any, ...]] = []
    saves: list[int] = []
    latest: dict[int, int] = {}
    for hook, (tensor, use) in enumerate(zip(trace.hook_tensor.tolist(), trace.hook_use.tolist(), strict=True)):
        if use:
            assume(tensor in latest)
            features.append(("node", hook - latest[tensor]))
            saves.append(latest[tensor])
            continue
        since = -1 if tensor < 0 else hook - latest[tensor] if tensor in latest else 0
        features.append((Tensor, (tensor,), torch.float32, 1, since))
        saves.append(-1)
        latest[tensor] = hook
    growth = HookSchedule.of(trace, plan).growth
    return compile_program(trace, plan, features, saves, growth, frozenset({Tensor}))


@given(st.randoms(use_true_random=False))
def test_what_is_due_at_each_hook_is_what_the_schedule_has(rng: Random) -> None:
    trace = random_step(rng)
    plan = random_plan(rng, trace)
    program, cursor = compiled(trace, plan), HookSchedule.of(trace, plan).begin_step()
    assert program is not None and len(program.rows) == plan.num_hooks
    for hook, row in enumerate(program.rows):
        due = cursor.advance_to(hook)
        reclaims, outs, ins, drops = ([], [], [], []) if due is None else due
        assert [(number, nbytes) for op, number, nbytes in row.ops if op != OUT] == [(a.tensor, a.nbytes) for a in reclaims]
        assert [op == DROP for op, _, _ in row.ops if op != OUT] == [a.again for a in reclaims]
        assert [(number, nbytes) for op, number, nbytes in row.ops if op == OUT] == [(a.tensor, a.nbytes) for a in outs]
        assert list(row.ins) == [a.tensor for a in ins]
        assert drops == []
        assert (row.growth >= 0) == (row.number >= 0 or bool(reclaims))
        assert row.kind == (USE if trace.hook_use[hook] else KEPT if row.number < 0 else row.kind)
        assert [op for op, _, _ in row.ops] == sorted((op for op, _, _ in row.ops), key=lambda op: op == OUT)
    firsts = [row.number for row in program.rows if row.kind == FIRST]
    assert len(firsts) == len(set(firsts))
    assert all(row.number in firsts for row in program.rows if row.kind == AGAIN)


@pytest.mark.parametrize(
    "feature",
    [
        ("DTensor", (8,), torch.float32, 1, 0),  # a wrapper class
        (Tensor, (8,), torch.float32, 1, 0, "backward"),  # a forward that backward runs again
        (Tensor, (8,), torch.float32, 1, -1),  # it stays, and the trace says that it may move
        (Tensor, (8,), torch.float32, 1, object()),  # any number of hooks since its last save
    ],
)
def test_what_the_loop_cannot_run_is_not_compiled(feature: tuple[Any, ...]) -> None:
    trace = random_step(Random(3))
    use = int(trace.hook_use.argmax())
    features = [feature] * use + [("node", 1)] * (len(trace.hook_use) - use)
    growth = HookSchedule.of(trace, plan_of(trace)).growth
    saves = [-1] * use + [0] * (len(features) - use)
    assert compile_program(trace, plan_of(trace), features, saves, growth, frozenset({Tensor})) is None


# --- what runs


class Work:
    """A chain of operators, one letter each: tanh, sigmoid, a product, a view that is saved again, a write in place."""

    def __init__(self, machine: Machine) -> None:
        torch.manual_seed(3)
        self.weights = [
            torch.randn(SIDE, SIDE, device=machine.torch_device, requires_grad=True) for _ in range(LAYERS)
        ]  # fmt: skip
        self.x = torch.randn(SIDE, SIDE, device=machine.torch_device)

    def step(self, word: str) -> list[Tensor]:
        x, held = self.x, None
        for letter, weight in zip(word, self.weights * len(word), strict=False):
            if letter == "m":
                x = x @ weight
            elif letter == "t":
                x = x.tanh()
            elif letter == "v":
                x = x.t().sigmoid() * x.t()
            elif letter == "h":
                held = x
                x = x.exp().clamp(max=3)
            elif letter == "i":
                x = (x * weight).relu_()
        loss = x.sum() if held is None else x.sum() + held.mean()
        return list(torch.autograd.grad(loss, self.weights, allow_unused=True, materialize_grads=True))


WORD = "mtvmhimtmv"


Steps = list[list[Image]]
"""Gradients of each step."""


def plainly(machine: Machine, words: Sequence[str]) -> Steps:
    work = Work(machine)
    return [list(map(image, work.step(word))) for word in words]


class Session:
    """The same steps in a session with little room, on a slow link."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.device = machine, machine.device
        self.done: list[int] = []
        """Of each step, the latest hook that the loop did."""

    def run(self, words: Sequence[str], *, inside: Any = None) -> Steps:
        found: Steps = []
        with self.device.compute():
            work = Work(self.machine)
            self.budget = budget = self.device.allocated_bytes() + 12 * SIDE * SIDE * 4
            self.device.reset_peaks()  # a CUDA device's peak is its whole process's
            with cm.SwapSession(budget, "64MiB", self.device, min_bytes=256, recompute=False) as session:
                self.loop: StepLoop = session._executor.loop
                for number, word in enumerate(words):
                    if inside is not None:
                        inside(number)
                    with session.step():
                        found.append(list(map(image, work.step(word))))
                    self.done.append(self.loop.hook)
                self.device.synchronize()
                self.report = session.report()
        return found


@pytest.mark.parametrize("machine_type", MACHINES)
def test_a_planned_step_runs_by_the_loop_to_its_end(machine_type: type[Machine]) -> None:
    words = [WORD] * STEPS
    expected, session = plainly(machine_type(), words), Session(machine_type())
    assert session.run(words) == expected
    assert session.report.bytes_swapped_out > 0
    hooks = session.done[-1] + 1
    assert session.report.plan_cache_hits >= 2
    assert session.report.planned is not None and hooks == session.report.planned.plan.num_hooks
    assert session.device.peak_allocated_bytes() <= session.budget


@pytest.mark.parametrize(("at", "letter"), list(enumerate("mtvhimtvhim")))
def test_a_step_that_leaves_at_any_place_is_eagers(at: int, letter: str) -> None:
    words = [WORD] * 4 + [WORD[:at] + letter + WORD[at:], WORD, WORD[:at] or "m", WORD]
    expected, session = plainly(OnSim(), words), Session(OnSim())
    assert session.run(words) == expected
    assert session.done[3] >= 20


@pytest.mark.parametrize("letter", "mv")
@pytest.mark.parametrize("at", [1, 5, 9])
@pytest.mark.gpu
def test_a_step_that_leaves_on_cuda_is_eagers(at: int, letter: str) -> None:
    words = [WORD] * 4 + [WORD[:at] + letter + WORD[at:], WORD]
    expected, session = plainly(OnCuda(), words), Session(OnCuda())
    assert session.run(words) == expected


@pytest.mark.parametrize(
    ("waiter", "recorder"), [("d2h", "compute"), ("compute", "d2h"), ("h2d", "compute"), ("compute", "h2d")]
)
def test_a_planned_step_without_one_wait_goes_red(waiter: str, recorder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[list[int]] = []
    machine = OnSim()

    def inside(number: int) -> None:
        if number == STEPS - 1:
            dropped.append(drop_waits(monkeypatch, machine, waiter, recorder))

    words, session = [WORD] * STEPS, Session(machine)
    with pytest.raises((SimRaceError, SimLifetimeError, AssertionError)):
        assert session.run(words, inside=inside) == plainly(OnSim(), words)
    assert dropped[0][0] > 0


def test_a_write_to_what_is_saved_raises_eagers_error_in_the_loop() -> None:
    def step(x: Tensor, weight: Tensor, *, write: bool) -> None:
        y = (x @ weight).tanh()
        loss = (y.exp() @ weight).sum()
        if write:
            with torch.no_grad():
                y.add_(1)
        loss.backward()

    device = cm.SimDevice()
    x, weight = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE, requires_grad=True)
    with pytest.raises(RuntimeError) as eager:
        step(x, weight, write=True)
    with device.compute(), cm.SwapSession("512KiB", "64MiB", device, min_bytes=256, recompute=False) as session:
        for number in range(STEPS):
            weight.grad = None
            with session.step():
                if number < STEPS - 1:
                    step(x, weight, write=False)
                    continue
                with pytest.raises(RuntimeError) as swapped:
                    step(x, weight, write=True)
                assert session._executor.loop.hook > 0
    assert str(swapped.value) == str(eager.value)


def test_without_its_check_the_version_is_not_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SavedBytes, "check", lambda self: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_a_write_to_what_is_saved_raises_eagers_error_in_the_loop()
