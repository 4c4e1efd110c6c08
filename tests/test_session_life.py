"""Everything of a session is freed by reference counts alone, with every option, however the session ends."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.device import Device

pytestmark = pytest.mark.usefixtures("no_gc", "quiet")

SIDE, STEPS, BUDGET = 96, 4, 4 << 20


class Training:
    """Model, its optimizer, and the steps of both."""

    def __init__(self, device: Device) -> None:
        torch.manual_seed(0)
        self.to = device.torch_device
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(SIDE, SIDE), nn.GELU()) for _ in range(4))).to(self.to)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def step(self) -> Tensor:
        loss: Tensor = self.model(torch.ones(64, SIDE, device=self.to)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def refs(self) -> dict[str, weakref.ref[Any]]:
        """Objects that must not outlive the training."""
        weight = next(self.model.parameters())
        return {"model": weakref.ref(self.model), "optimizer": weakref.ref(self.optimizer), "weight": weakref.ref(weight)}


def in_steps(training: Training, session: cm.SwapSession) -> None:
    with session:
        for _ in range(STEPS):
            with session.step():
                training.step()
        session.report()


def with_an_error(training: Training, session: cm.SwapSession) -> None:
    with pytest.raises(ZeroDivisionError), session:
        for number in range(STEPS):
            with session.step():
                training.step()
                if number == STEPS - 1:
                    raise ZeroDivisionError


def with_a_snapshot(training: Training, session: cm.SwapSession) -> None:
    with session:
        session.run_step(training.step)
        session.snapshot()
        session.run_step(training.step)
        session.restore()
        with session.step():
            training.step()


OPTIONS: dict[str, Callable[[Training], dict[str, Any]]] = {
    "nothing": lambda training: {},
    "model": lambda training: {"model": training.model},
    "swap only": lambda training: {"recompute": False},
    "no plans": lambda training: {"plans": False},
    "optimizer": lambda training: {"model": training.model, "optimizer": training.optimizer},
    "parameters": lambda training: {"model": training.model, "parameters": "swap"},
    "both": lambda training: {"model": training.model, "optimizer": training.optimizer, "parameters": "swap"},
}

WAYS = [in_steps, with_an_error, with_a_snapshot]


def left_after(run: Callable[[], dict[str, weakref.ref[Any]]], device: Device) -> tuple[list[str], int]:
    """Return the names of objects that outlived `run`, and the bytes of device memory that it left."""
    alive_after(run())  # includes objects that torch makes once, such as cuBLAS's workspace
    before = device.allocated_bytes()
    alive = alive_after(run())
    device.synchronize()
    return alive, device.allocated_bytes() - before


def alive_after(refs: dict[str, weakref.ref[Any]]) -> list[str]:
    """Return the names of live objects: autograd's own thread frees a backward some time after it has returned."""
    for _ in range(200):
        if all(ref() is None for ref in refs.values()):
            break
        time.sleep(0.01)
    return [name for name, ref in refs.items() if ref() is not None]


@pytest.mark.ci
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_session_goes_with_its_last_reference(
    options: Callable[[Training], dict[str, Any]], way: Callable[[Training, cm.SwapSession], None], device: Device
) -> None:
    def run() -> dict[str, weakref.ref[Any]]:
        with device.compute():
            training = Training(device)
            chosen = options(training)
            if way is with_a_snapshot:
                chosen |= {"model": training.model, "optimizer": training.optimizer}
            session = cm.SwapSession(BUDGET, "64MiB", device, min_bytes=1024, progress=list[object]().append, **chosen)
            refs = training.refs() | {"session": weakref.ref(session), "executor": weakref.ref(session._executor)}
            way(training, session)
            return refs

    assert left_after(run, device) == ([], 0)


@pytest.mark.parametrize("swaps", ["activations", "optimizer"])
def test_what_was_attached_goes_with_the_model(swaps: str, device: Device) -> None:
    def run() -> dict[str, weakref.ref[Any]]:
        with device.compute():
            training = Training(device)
            optimizer = training.optimizer if swaps == "optimizer" else None
            handle = cm.attach(training.model, optimizer, hbm_budget=BUDGET, device=device, min_bytes=1024)
            for _ in range(STEPS):
                training.step()
            refs = training.refs() | {"session": weakref.ref(handle.session)}
            handle.detach()
            return refs

    assert left_after(run, device) == ([], 0)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("attached", [False, True])
def test_a_session_that_ended_holds_neither_model_nor_optimizer(
    attached: bool, options: Callable[[Training], dict[str, Any]], device: Device
) -> None:
    kept: list[Any] = []

    def run() -> dict[str, weakref.ref[Any]]:
        with device.compute():
            training = Training(device)
            chosen = {"hbm_budget": BUDGET, "host_budget": "64MiB", "device": device, "min_bytes": 1024, **options(training)}
            if attached:
                chosen.pop("model", None)
                kept.append(cm.attach(training.model, **chosen))
                for _ in range(STEPS):
                    training.step()
                kept[-1].detach()
            else:
                kept.append(cm.SwapSession(**chosen))
                in_steps(training, kept[-1])
            return training.refs()

    assert left_after(run, device) == ([], 0)
    assert [one.report().steps for one in kept] == [STEPS, STEPS]
    if not attached:
        with pytest.raises(cm.SessionClosedError):
            kept[-1].run_step(lambda: None)
