"""Optimizer state in host memory between steps: training, checkpoints and readers of it see plain PyTorch's values.

The reference is plain PyTorch on the same device, with nothing of ours around it.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.device.process import ThisProcess
from chameleon_mm.device.sim import SimStream
from chameleon_mm.state.hosted import HostedStorage, Where
from chameleon_mm.state.swapped_state import SwappedState
from chameleon_mm.units import KIB, MIB
from tests._programs import same
from tests._snapshots import steps
from tests.observed import SimRaceError

pytestmark = pytest.mark.usefixtures("no_gc", "short_search")

Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "AdamW, foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "AdamW, amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True, foreach=False),
    "SGD, momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-3),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.5, centered=True),
}

WIDTH, LAYERS = 96, 8
BUCKET_BYTES = 80 * KIB
"""About a layer's moments: so each step is taken in four parts or more."""


class Counting(torch.optim.Optimizer):
    """User's own optimizer, which counts its steps for all parameters: it must not be taken apart."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"steps": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch has overloads
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("sum", torch.zeros_like(p)).add_(p.grad / group["steps"])
                    p.sub_(state["sum"], alpha=0.01)
        return None


class Training:
    """A model, an optimizer and batches."""

    def __init__(self, make: Make, at: torch.device) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.model = nn.Sequential(*layers).to(at)
        self.optimizer = make(self.model.parameters())
        self.at = at

    def forward(self, number: int) -> Tensor:
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number)).to(self.at)
        return cast(Tensor, self.model(x)).square().mean()

    def step(self, number: int) -> None:
        self.forward(number).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def outcome(self) -> list[Tensor]:
        """Parameters and state, on the host."""
        state = self.optimizer.state_dict()["state"]
        tensors = [value for entry in state.values() for _, value in sorted(entry.items()) if isinstance(value, Tensor)]
        return [t.detach().cpu().clone() for t in (*self.model.parameters(), *tensors)]


def session_of(training: Training, device: Device, *, budget: int | str = "1GiB", **given: Any) -> cm.SwapSession:
    session = cm.SwapSession(
        budget, "64MiB", device, min_bytes=4 * KIB, model=training.model, optimizer=training.optimizer, **given
    )
    swap = session._model_swap._state
    assert swap is not None
    swap.bucket_bytes, swap.home.min_bytes = BUCKET_BYTES, 4 * KIB
    return session


def plainly(make: Make, at: torch.device, steps: int) -> list[Tensor]:
    training = Training(make, at)
    for number in range(steps):
        training.step(number)
    return training.outcome()


def hosted(optimizer: torch.optim.Optimizer) -> list[HostedStorage]:
    states = (state for state in optimizer.state.values() if isinstance(state, SwappedState))
    return [hosted for state in states for _, hosted in state.away()]


RUNS = [
    *(("AdamW", False, 200), *((name, False, 8) for name in OPTIMIZERS if name != "AdamW"), ("AdamW, fused", True, 8)),
    *(pytest.param(*run, 200, marks=[pytest.mark.slow, pytest.mark.thorough]) for run in product(OPTIMIZERS, (False, True))),
]


@pytest.mark.ci
@pytest.mark.parametrize(("name", "plans", "steps"), RUNS)
def test_training_has_plain_pytorchs_bits(name: str, plans: bool, steps: int, device: Device) -> None:
    expected = plainly(OPTIMIZERS[name], device.torch_device, steps)
    with device.compute():
        training = Training(OPTIMIZERS[name], device.torch_device)
        session = session_of(training, device, plans=plans, recompute=False)
        with session.pool, session:
            for number in range(steps):
                with session.step():
                    training.step(number)
                where = {value.where for value in hosted(training.optimizer)}
                assert where == ({Where.ON_HOST} if name != "Adafactor" else set())  # whose state is a row and a column
        report = session.report()
        assert same(training.outcome(), expected)
    assert report.state_bytes_swapped_out == report.state_bytes_swapped_in or name == "Adafactor"
    assert not any(isinstance(state, SwappedState) for state in training.optimizer.state.values())
    assert session.pool.stats().live_bytes == 0


def test_no_state_is_on_the_device_between_steps(device: Device) -> None:
    expected = plainly(OPTIMIZERS["AdamW"], device.torch_device, 5)
    with device.compute():
        training = Training(OPTIMIZERS["AdamW"], device.torch_device)
        training.step(0)
        before = device.allocated_bytes()
        moments = 2 * sum(p.numel() * 4 for p in training.model.parameters() if p.dim() == 2)
        session = session_of(training, device)
        with session.pool, session:
            with session.step():
                pass
            assert before - device.allocated_bytes() >= moments
            peaks = []
            for number in range(1, 5):
                device.reset_peaks()
                with session.step():
                    training.step(number)
                peaks.append(device.peak_allocated_bytes())
        # Parameters, gradients, three buckets and a step's own temporaries: never all moments in addition to the gradients.
        assert max(peaks) < before + moments // 2
        assert same(training.outcome(), expected)


def test_a_step_that_would_not_fit_with_its_state_does(device: Device) -> None:
    """State is made part by part in the first step. The budget, which is below plain training's memory, is held."""
    with device.compute():
        start = device.allocated_bytes()
        training = Training(OPTIMIZERS["AdamW"], device.torch_device)
        model_bytes = device.allocated_bytes() - start
        budget = device.allocated_bytes() + 5 * model_bytes // 2  # gradients, the memory of a part of the step, and no more
        session = session_of(training, device, budget=budget, plans=False)
        with session.pool, session:
            device.reset_peaks()
            steps(session, training, range(3))
            assert device.peak_allocated_bytes() <= budget
            plain_peak = device.allocated_bytes() + 3 * model_bytes
            assert plain_peak > budget


# --- readers and writers of the state


def trained(device: Device, make: Make = OPTIMIZERS["AdamW"]) -> tuple[Training, cm.SwapSession]:
    training = Training(make, device.torch_device)
    return training, session_of(training, device, plans=False)


def test_a_checkpoint_in_the_middle_is_plain_and_goes_on_without_us(device: Device) -> None:
    expected = plainly(OPTIMIZERS["AdamW"], device.torch_device, 6)
    with device.compute():
        training, session = trained(device)
        with session.pool, session:
            steps(session, training, range(3))
            file = io.BytesIO()
            torch.save({"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}, file)
            copied = copy.deepcopy(training.optimizer.state_dict())
        assert all(type(state) is dict for state in copied["state"].values())
    file.seek(0)
    saved = torch.load(file, weights_only=True)  # nothing of ours is in it
    assert all(type(state) is dict for state in saved["optimizer"]["state"].values())
    resumed = Training(OPTIMIZERS["AdamW"], device.torch_device)
    resumed.model.load_state_dict(saved["model"])
    resumed.optimizer.load_state_dict(saved["optimizer"])
    for number in range(3, 6):
        resumed.step(number)
    assert same(resumed.outcome(), expected)


def test_a_checkpoint_is_loaded_in_the_middle(device: Device) -> None:
    at = device.torch_device
    earlier = Training(OPTIMIZERS["AdamW"], at)
    earlier.step(0)
    state = copy.deepcopy((earlier.model.state_dict(), earlier.optimizer.state_dict()))
    for number in range(1, 4):
        earlier.step(number)
    with device.compute():
        training, session = trained(device)
        with session.pool, session:
            with session.step():
                training.step(7)
            training.model.load_state_dict(state[0])
            training.optimizer.load_state_dict(copy.deepcopy(state[1]))
            steps(session, training, range(1, 4))
            assert hosted(training.optimizer)
        assert same(training.outcome(), earlier.outcome())


def test_state_is_read_and_written_between_steps(device: Device) -> None:
    def meddle(optimizer: torch.optim.Optimizer) -> list[float]:
        seen = []
        for state in optimizer.state.values():
            seen += [float(state["exp_avg"].norm()), float(state.get("exp_avg_sq").sum()), float(len(dict(state)))]
            state["exp_avg"].mul_(0.5)
            seen += [float(value.sum()) for value in {**state}.values()]
        return seen

    plain = Training(OPTIMIZERS["AdamW"], device.torch_device)
    expected = []
    for number in range(4):
        plain.step(number)
        expected += meddle(plain.optimizer)
    with device.compute():
        training, session = trained(device)
        got = []
        with session.pool, session:
            for number in range(4):
                with session.step():
                    training.step(number)
                got += meddle(training.optimizer)
        assert got == expected
        assert same(training.outcome(), plain.outcome())


def test_a_tensor_that_somebody_else_holds_stays_the_state(device: Device) -> None:
    expected = plainly(OPTIMIZERS["AdamW"], device.torch_device, 3)
    with device.compute():
        training, session = trained(device)
        with session.pool, session:
            with session.step():
                training.step(0)
            p = next(training.model.parameters())
            mine = training.optimizer.state[p]["exp_avg"]
            with session.step():
                training.step(1)
            assert training.optimizer.state[p]["exp_avg"] is mine
            assert len(hosted(training.optimizer)) == 2 * LAYERS - 1
            del mine
            with session.step():
                training.step(2)
            assert len(hosted(training.optimizer)) == 2 * LAYERS
        assert same(training.outcome(), expected)


def test_groups_added_later_and_parameters_without_gradients(device: Device) -> None:
    def train(training: Training, step: Callable[[int], None]) -> None:
        step(0)
        training.optimizer.add_param_group({"params": list(training.model[-2].parameters()), "lr": 0.5})
        for p in training.model[0].parameters():
            p.requires_grad_(False)
        step(1)
        step(2)

    def but_the_last(params: Iterable[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(list(params)[:-2], lr=1e-2)

    plain = Training(but_the_last, device.torch_device)
    train(plain, plain.step)
    with device.compute():
        training, session = trained(device, make=but_the_last)

        def step(number: int) -> None:
            with session.step():
                training.step(number)

        with session.pool, session:
            train(training, step)
            assert len(training.optimizer.param_groups) == 2
        assert same(training.outcome(), plain.outcome())


# --- around a step


def test_hooks_schedulers_closures_and_scalers_see_one_step(device: Device) -> None:
    def train(training: Training, around: Callable[[Callable[[], None]], None]) -> list[str]:
        seen: list[str] = []
        optimizer = training.optimizer
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        scaler = torch.amp.GradScaler(training.at.type, init_scale=4.0, enabled=True)

        def closure() -> Tensor:
            seen.append("closure")
            optimizer.zero_grad()
            loss = training.forward(1)
            loss.backward()
            return loss

        def scaled() -> None:
            optimizer.zero_grad()
            scaler.scale(training.forward(2)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()

        def closed() -> None:
            seen.append(str(float(cast(Tensor, optimizer.step(cast(Any, closure))).detach())))
            scheduler.step()

        for do in (scaled, closed, scaled):
            around(do)
        seen.append(str(optimizer.param_groups[0]["lr"]))
        return seen

    plain = Training(OPTIMIZERS["AdamW"], device.torch_device)
    expected = train(plain, lambda do: do())
    with device.compute():
        training, session = trained(device)

        def around(do: Callable[[], None]) -> None:
            with session.step():
                do()

        with session.pool, session:
            seen = train(training, around)
        assert seen == expected
        assert seen.count("before") == seen.count("after") == 3
        assert same(training.outcome(), plain.outcome())


def test_leaving_the_session_leaves_a_plain_optimizer(device: Device) -> None:
    with device.compute():
        training, session = trained(device)
        scheduled = torch.optim.lr_scheduler.StepLR(training.optimizer, 1)
        before = training.optimizer.__dict__["step"]
        with session.pool, session:
            with session.step():
                training.step(0)
            held = training.optimizer.state_dict()
            scheduled.step()
        assert training.optimizer.__dict__["step"] is before
        training.step(1)
        assert all(isinstance(value, Tensor) for entry in held["state"].values() for value in entry.values())


def test_state_that_does_not_fit_any_more_is_host_memory(caplog: pytest.LogCaptureFixture) -> None:
    device = cm.SimDevice("h200", 3 * MIB)
    with device.compute():
        training, session = trained(device)
        with session.pool, session:
            with session.step():
                training.step(0)
            blocking = torch.zeros((device.capacity - device.allocated_bytes() - 64 * KIB) // 4)
        assert "of optimizer state do not fit on the device and are in host memory now" in caplog.text
        del blocking
    assert same(training.outcome(), plainly(OPTIMIZERS["AdamW"], device.torch_device, 1))


def test_state_that_does_not_fit_is_read_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it hands the rest of its copy out to the device, from the queue that other threads' hooks use."""
    device, host_bytes, locked = cm.SimDevice("h200", 3 * MIB), HostedStorage.host_bytes, list[bool]()
    with device.compute():
        training, session = trained(device)

        def checked(hosted: HostedStorage, compute: Any) -> Tensor:
            locked.append(session._executor.hook_lock.lock.locked())
            return host_bytes(hosted, compute)

        monkeypatch.setattr(HostedStorage, "host_bytes", checked)
        with session.pool, session:
            with session.step():
                training.step(0)
            blocking = torch.zeros((device.capacity - device.allocated_bytes() - 64 * KIB) // 4)
        del blocking
    assert locked and all(locked)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # freed unordered as well, in a finaliser
def test_a_missing_wait_for_a_copy_back_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer must not read a moment before it has arrived: Note [Swap-in]."""
    from tests._ordering import SLOW_LINK

    device = cm.SimDevice(SLOW_LINK)
    arrive = HostedStorage.arrive

    def without_wait(self: HostedStorage, compute: Any) -> None:
        self._context.metrics.timed = False
        monkeypatch.setattr(type(compute), "wait", lambda stream, event: None)
        try:
            arrive(self, compute)
        finally:
            monkeypatch.undo()
            monkeypatch.setattr(HostedStorage, "arrive", without_wait)

    monkeypatch.setattr(HostedStorage, "arrive", without_wait)
    with pytest.raises(SimRaceError), device.compute():
        training, session = trained(device)
        with session:
            steps(session, training, range(2))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # as above
def test_a_missing_wait_for_a_copy_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory must not go before the copy that reads it: Note [Reclaim]."""
    from tests._ordering import SLOW_LINK

    def without_wait(self: HostedStorage) -> bool:
        assert self._out is not None
        self._context.out_queue.issue(self._out)
        return True

    monkeypatch.setattr(HostedStorage, "_ordered_after_copy", without_wait)
    device = cm.SimDevice(SLOW_LINK)
    with pytest.raises(SimRaceError), device.compute():
        training, session = trained(device)
        with session, session.step():
            training.step(0)


# --- copies that the device refuses


@pytest.mark.parametrize("direction", ["d2h", "h2d"])
def test_a_copy_that_is_refused_loses_nothing(direction: str, sim: cm.SimDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused copy out leaves the tensor where it is; a refused copy back raises, and the next read gets the bytes."""
    expected = plainly(OPTIMIZERS["AdamW"], sim.torch_device, 3)
    copy_of = SimStream.copy
    refused: list[str] = []

    def copy(self: SimStream, dst: Tensor, src: Tensor, *, speculative: bool = False) -> None:
        if self.name == direction and src.numel() == 4 * WIDTH * WIDTH and not refused:
            refused.append(direction)
            raise RuntimeError("refused")
        copy_of(self, dst, src, speculative=speculative)

    with sim.compute():
        training, session = trained(sim)
        with session.pool, session:
            steps(session, training, range(2))
            p = next(training.model.parameters())
            with monkeypatch.context() as patch:
                patch.setattr(SimStream, "copy", copy)
                if direction == "h2d":
                    with pytest.raises(cm.TransferFailed):
                        training.optimizer.state[p]["exp_avg"]
                    assert refused
                with session.step():
                    training.step(2)
            assert refused
        assert same(training.outcome(), expected)
    assert session.pool.stats().live_bytes == 0


# --- bad input


def test_state_that_is_away_cannot_be_read_in_a_capture_or_a_child(sim: cm.SimDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plainly(OPTIMIZERS["AdamW"], sim.torch_device, 1)
    with sim.compute():
        training, session = trained(sim)
        with session.pool, session:
            with session.step():
                training.step(0)
            p = next(training.model.parameters())
            with monkeypatch.context() as patch:
                patch.setattr(cm.SimDevice, "capturing", lambda self: True)
                with pytest.raises(RuntimeError, match="outside of the capture of a CUDA graph, in which it cannot come back"):
                    training.optimizer.state[p]["exp_avg"]
            with monkeypatch.context() as patch:
                patch.setattr(ThisProcess, "pid", -1)
                with pytest.raises(RuntimeError, match="got a read in a forked child"):
                    training.optimizer.state[p]["exp_avg"]
        assert same(training.outcome(), expected)


def test_what_is_no_optimizer_of_the_model_is_refused(sim: cm.SimDevice) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"optimizer: expected a torch\.optim\.Optimizer or None, got 'adam' \(str\)"):
        cm.SwapSession(device=sim, model=model, optimizer="adam")  # type: ignore[arg-type]  # what is tested
    with pytest.raises(ValueError, match="optimizer: expected its model beside it, got none; pass model="):
        cm.SwapSession(device=sim, optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match="expected one of the model's parameters alone, got one with 2 others"):
        cm.SwapSession(device=sim, model=model, optimizer=torch.optim.SGD([*model.parameters(), *other.parameters()]))
