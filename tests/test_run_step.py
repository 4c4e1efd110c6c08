"""`session.run_step`: the state that a second run finds, when there is none, and the budget afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.state.rerun import LEAST_CUT, MAX_RETRIES, tighter
from chameleon_mm.units import KIB
from tests._mix_models import bits

SHORT = "out of memory: injected. Tried to allocate 1.00 MiB."


class Fails:
    """Step whose first `times` runs find no memory, after `body` has run."""

    def __init__(self, times: int, body: Callable[[], object] = lambda: None) -> None:
        self.times = times
        self.runs = 0
        self.body = body

    def __call__(self) -> object:
        self.runs += 1
        result = self.body()
        if self.runs <= self.times:
            raise torch.OutOfMemoryError(SHORT)
        return result


def session_for(model: nn.Module | None, device: Device | None = None, **settings: object) -> cm.SwapSession:
    device = device or cm.SimDevice(hbm_bytes="1GiB")
    return cm.SwapSession("512MiB", "64MiB", device, 4 * KIB, model=model, **settings)  # type: ignore[arg-type]  # by name


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))


# --- when it may be called, and what it returns


def test_it_needs_the_model() -> None:
    step = Fails(0)
    with session_for(None) as session, pytest.raises(ValueError, match=r"SwapSession\(model=model\)"):
        session.run_step(step)
    assert step.runs == 0
    assert session.report().steps == 0


def test_it_needs_an_open_session(model: nn.Module) -> None:
    step = Fails(0)
    session = session_for(model)
    with pytest.raises(cm.SessionClosedError, match=r"run_step\(\).*new"):
        session.run_step(step)
    with session:
        with session.step(), pytest.raises(cm.SessionClosedError, match="in step"):
            session.run_step(step)
        with pytest.raises(cm.SessionClosedError, match="in step"):
            session.run_step(lambda: session.run_step(step))
    with pytest.raises(cm.SessionClosedError, match="closed"):
        session.run_step(step)
    assert step.runs == 0


@pytest.mark.parametrize("value", [None, 7, torch.OutOfMemoryError("only returned")])
def test_it_returns_what_the_step_does(model: nn.Module, value: object) -> None:
    with session_for(model) as session:
        assert session.run_step(lambda: value) is value
    assert session.report().steps == 1


@pytest.mark.parametrize("kind", [ValueError, MemoryError, cm.HostMemoryExhausted, KeyboardInterrupt])
def test_other_exceptions_go_on_unchanged(model: nn.Module, kind: type[BaseException]) -> None:
    error = kind("theirs")
    runs = []

    def step() -> None:
        runs.append(1)
        raise error

    with session_for(model) as session:
        with pytest.raises(kind) as caught:
            session.run_step(step)
        assert caught.value is error
        assert len(runs) == 1
        assert session.run_step(lambda: 1) == 1
    assert (session.report().steps, session.report().steps_run_again) == (1, 0)


# --- what a second run finds


class Branches(nn.Module):
    """A weight for each thing that a step may do to a gradient, running statistics, and buffers of its own."""

    table: Tensor
    running: Tensor
    NAMES = ("none", "adds", "drops", "zeroes", "sets")

    def __init__(self, at: torch.device) -> None:
        super().__init__()
        # Dense, not contiguous.
        self.weights = nn.ParameterDict({name: nn.Parameter(torch.randn(4, 4, device=at).t()) for name in self.NAMES})
        self.norm = nn.BatchNorm1d(4, device=at)
        self.register_buffer("table", torch.tensor([1.0, -0.0, float("nan"), 2.0], device=at))
        self.register_buffer("running", torch.zeros(4, device=at))
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(sum((x @ weight for weight in self.weights.values()), torch.zeros_like(x)))
        return out


def test_gradients_buffers_and_random_states_are_as_they_were(device: Device) -> None:
    """The step may write, replace, drop or add them."""
    at = device.torch_device
    with device.compute():
        model = Branches(at)
        weights: dict[str, nn.Parameter] = {name: model.weights[name] for name in model.NAMES}
        for name in model.NAMES[1:]:
            grad = torch.randn(4, 4, device=at)
            grad[0, 0] = -0.0
            weights[name].grad = grad.t()
        table = model.table
        seen: list[list[bytes | tuple[int, ...] | None]] = []

        def body() -> None:
            grads = [weight.grad for weight in weights.values()]
            x = torch.randn(8, 4, device=at)
            seen.append(
                [None if grad is None else bits(grad) for grad in grads]
                + [None if grad is None else grad.stride() for grad in grads]
                + [bits(buffer) for buffer in model.buffers()]
                + [bits(x), bits(torch.randn(3))]
            )
            assert model.table is table
            assert list(model._buffers) == ["table", "running", "absent"]
            assert model._buffers["absent"] is None
            model(x).square().sum().backward()
            assert all(weight.grad is not None and bits(weight.grad) not in seen[-1] for weight in weights.values())
            weights["drops"].grad = None
            weights["zeroes"].grad = None if (grad := weights["zeroes"].grad) is None else grad.zero_()
            weights["sets"].grad = torch.ones(4, 4, device=at)
            model.running.add_(1)
            model.table.mul_(2)
            model.table = torch.ones(4, device=at)
            model._buffers["absent"] = torch.zeros(1, device=at)
            model.register_buffer("late", torch.zeros(2, device=at))

        with session_for(model, device) as session:
            session.run_step(Fails(MAX_RETRIES, body))
            assert session.pool.stats().num_live == 0
    assert len(seen) == MAX_RETRIES + 1
    assert all(found == seen[0] for found in seen)
    assert seen[0][0] is None
    assert seen[0][1] is not None
    assert session.report().steps_run_again == MAX_RETRIES


def test_a_gradient_that_is_still_there_is_filled_again_in_its_place(model: nn.Module) -> None:
    """A gradient in a bucket is held by others, too."""
    bucket = torch.arange(16.0 * 16 + 8)
    weight = model.get_parameter("0.weight")
    weight.grad = held = bucket[8:].view(16, 16)
    expected = bits(bucket)

    def body() -> None:
        assert weight.grad is held
        assert bits(bucket) == expected
        model(torch.ones(2, 16)).sum().backward()
        assert bits(bucket) != expected
        weight.grad = None

    with session_for(model) as session:
        session.run_step(Fails(2, body))


def test_gradients_that_are_no_rows_of_bytes(sim: cm.SimDevice) -> None:
    with sim.compute():
        model = nn.Embedding(8, 4, sparse=True)
        model(torch.tensor([1, 3])).sum().backward()
        assert model.weight.grad is not None
        expected = model.weight.grad.to_dense().clone()

        def body() -> None:
            assert model.weight.grad is not None
            assert model.weight.grad.is_sparse
            assert torch.equal(model.weight.grad.to_dense(), expected)
            model(torch.tensor([2])).sum().backward()

        with session_for(model, sim) as session:
            session.run_step(Fails(2, body))


def test_gradients_find_room_where_no_more_can_be_pinned(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    seen: list[bool] = []

    def body() -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        seen.append(len(grads) == 4 and all(torch.equal(grad, torch.full_like(grad, 3.0)) for grad in grads))
        for parameter in model.parameters():
            parameter.grad = None

    device = cm.SimDevice(hbm_bytes="1GiB")
    with cm.SwapSession("512MiB", 256, device, model=model) as session:
        session.run_step(Fails(1, body))
    assert seen == [True, True]


def test_a_graph_from_before_the_step_that_saved_a_buffer_stays_good(sim: cm.SimDevice) -> None:
    with sim.compute():
        model = Branches(sim.torch_device)
        model.table.fill_(3.0)
        x = torch.ones(4, requires_grad=True)
        with session_for(model, sim) as session:
            with session.step():
                earlier = (x * model.table).sum()

            def body() -> None:
                model.running.add_(1)
                assert torch.equal(model.running, torch.ones(4))

            session.run_step(Fails(2, body))
            earlier.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((4,), 3.0))


@pytest.mark.usefixtures("no_gc")
def test_nothing_of_the_failed_run_is_alive_in_the_next(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chameleon_mm.state.rerun.gc.collect", lambda: 0)  # by references alone
    made: list[weakref.ref[torch.UntypedStorage]] = []
    alive: list[int] = []

    def body() -> None:
        alive.append(sum(ref() is not None for ref in made))
        hidden = model(torch.ones(64, 16))
        made.append(weakref.ref(hidden.untyped_storage()))
        (hidden * hidden).sum().backward()
        try:
            raise ValueError("on the way")
        except ValueError as error:
            if len(made) <= 2:
                raise torch.OutOfMemoryError(SHORT) from error

    with session_for(model) as session:
        session.run_step(body)
    assert alive == [0, 0, 0]


# --- when there is none


@pytest.mark.parametrize("setting", ["foreach", "fused", "neither"])
def test_a_step_whose_optimizer_had_begun_is_not_run_again(model: nn.Module, setting: str) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=setting == "foreach", fused=setting == "fused")
    before = [bits(p) for p in model.parameters()]

    def body() -> None:
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()

    step = Fails(1, body)
    with session_for(model) as session:
        with pytest.raises(torch.OutOfMemoryError, match=r"injected.*not run again, because its optimizer had begun") as caught:
            session.run_step(step)
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        after = [bits(p) for p in model.parameters()]
        assert after != before
        assert session.run_step(lambda: 5) == 5
        assert session.pool.stats().num_live == 0
    assert step.runs == 1
    assert (session.report().steps, session.report().steps_run_again) == (1, 0)


def _add(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("0.weight").add_(1)


def _replace_data(model: nn.Module) -> None:
    model.get_parameter("0.weight").data = torch.zeros(16, 16)


def _replace(model: nn.Module) -> None:
    model.get_submodule("0").weight = nn.Parameter(torch.zeros(16, 16))


def _append(model: nn.Module) -> None:
    model.add_module("more", nn.Linear(1, 1))


@pytest.mark.parametrize("change", [_add, _replace_data, _replace, _append])
def test_a_step_that_changed_a_parameter_is_not_run_again(model: nn.Module, change: Callable[[nn.Module], None]) -> None:
    step = Fails(1, lambda: change(model))
    with session_for(model) as session, pytest.raises(torch.OutOfMemoryError, match="a parameter of the model had changed"):
        session.run_step(step)
    assert step.runs == 1


def test_an_optimizer_of_something_else_is_no_obstacle(model: nn.Module) -> None:
    other = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([other], lr=1.0)
    other.grad = torch.ones(3)
    step = Fails(1, optimizer.step)
    with session_for(model) as session:
        session.run_step(step)
    assert step.runs == 2


def test_among_other_ranks_no_step_is_run_again(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    step = Fails(1)
    with session_for(model) as session:
        with pytest.raises(torch.OutOfMemoryError, match=r"injected.*the other ranks would not"):
            session.run_step(step)
        session.run_step(step)
    assert (step.runs, session.report().steps) == (2, 1)


def test_it_gives_up_and_says_what_it_tried(model: nn.Module) -> None:
    weight = model.get_parameter("0.weight")
    weight.grad = torch.ones(16, 16)

    def body() -> None:
        torch.rand(3)
        model(torch.ones(2, 16)).sum().backward()

    step = Fails(99, body)
    with session_for(model) as session:
        state = torch.get_rng_state()
        with pytest.raises(
            torch.OutOfMemoryError, match=r"injected.*run 4 times, within budgets of 512.0 MiB, [\d.]+ \wi?B"
        ) as caught:
            session.run_step(step)
        assert "in __call__" in caught.value.__notes__[0]
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(weight.grad, torch.ones(16, 16))
        assert model.get_parameter("2.weight").grad is None
        assert session.pool.stats().num_live == 0
        assert session.run_step(lambda: 5) == 5
    assert step.runs == MAX_RETRIES + 1
    report = session.report()
    assert report.steps_run_again == MAX_RETRIES
    assert report.lowered_budget_bytes is not None and report.lowered_budget_bytes < report.hbm_budget_bytes


def test_a_grad_scaler_may_be_used_and_says_so_where_it_may_not_run_twice(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu")
    fails_before = fails_after = False

    def step() -> None:
        nonlocal fails_before, fails_after
        scaler.scale(model(torch.ones(2, 16)).sum()).backward()
        if fails_before:
            fails_before = False
            raise torch.OutOfMemoryError(SHORT)
        scaler.unscale_(optimizer)
        if fails_after:
            fails_after = False
            raise torch.OutOfMemoryError(SHORT)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    with session_for(model) as session:
        fails_before = True
        session.run_step(step)
        fails_after = True
        with pytest.raises(RuntimeError, match="unscale_"):
            session.run_step(step)
    assert (session.report().steps, session.report().steps_run_again) == (1, 2)


# --- budget and plan


def test_it_is_recorded_again_and_planned_within_a_tighter_budget() -> None:
    """A device with less than the budget, as where another process has some of it: found out in the first step by a plan."""
    device = cm.SimDevice(hbm_bytes=2200 * KIB)
    with device.compute():
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)])
        x = torch.randn(1024, 64)

        def body() -> Tensor:
            loss: Tensor = model(x).square().mean()
            loss.backward()
            model.zero_grad()
            return loss.detach()

        with cm.SwapSession("2.5MiB", "64MiB", device, 4 * KIB, model=model) as session:
            losses = [session.run_step(body)]
            before = session.report()
            losses.append(session.run_step(body))
            after = session.report()
            losses.append(session.run_step(body))
            last = session.report()
    assert before.steps_by_phase == {"recorded": 1}
    assert after.steps_by_phase == {"recorded": 2, "failed": 1}
    assert last.steps_by_phase == {"recorded": 2, "planned": 1, "failed": 1}
    assert (last.detailed_steps, last.steps, last.steps_run_again) == (2, 3, 1)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    assert before.planned_peak_bytes is not None
    assert last.planned_peak_bytes is not None
    assert last.planned_peak_bytes <= device.capacity * (1 - LEAST_CUT) < device.capacity < before.planned_peak_bytes


@pytest.mark.parametrize(
    ("budget", "allocated", "asked", "resting", "expected"),
    [
        (1000, 990, 20, 100, 950),  # one in twenty at least
        (1000, 900, 200, 100, 800),  # room for another such request
        (5000, 900, 200, 100, 900),  # from what could be had, not from a budget beyond it
        (1000, 900, 2000, 100, 550),  # never more than half of what moves
        (1000, 1200, 100, 1100, 1000),  # below what always lies there no budget helps
    ],
)
def test_a_tighter_budget(budget: int, allocated: int, asked: int, resting: int, expected: int) -> None:
    assert tighter(budget, allocated=allocated, asked=asked, resting=resting) == expected
