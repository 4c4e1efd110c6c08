"""A training whose steps draw random numbers, write buffers and add to gradients that exist, for tests of snapshots.

    plain = plainly("AdamW, foreach", at, range(6))                # nothing of ours
    training, session = opened("AdamW, foreach", device, "parameters")

Every second step leaves its gradients, and the next one adds to them: a snapshot after it has some.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.state.hosted import Where
from chameleon_mm.state.swapped_state import SwappedState
from chameleon_mm.units import KIB

Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "AdamW, foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "SGD, momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2),
}

KINDS = {
    "optimizer": ("AdamW, foreach", "AdamW, fused", "SGD, momentum"),
    "parameters": ("AdamW, foreach", "AdamW, fused", "SGD, momentum"),
    "neither": ("SGD",),
}
"""Parts that a session swaps in addition to activations, and the optimizers tried with each. A session that does not know its
optimizer's state leaves it to the caller, so its optimizer has none."""

RUNS = [(kind, name) for kind, names in KINDS.items() for name in names]

WIDTH, LAYERS = 128, 4
"""A weight has 64 KiB: the least that leaves the device."""


class Training:
    """A model, an optimizer and batches."""

    def __init__(self, name: str, at: torch.device) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(LAYERS):
            layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.2)]
        self.model = nn.Sequential(*layers).to(at)
        self.model[-1].register_buffer("fleeting", torch.arange(3.0, device=at), persistent=False)
        self.make = OPTIMIZERS[name]
        self.optimizer = self.make(self.model.parameters())
        self.at = at

    def step(self, number: int) -> None:
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number)).to(self.at)
        cast(Tensor, self.model(x)).square().mean().backward()
        self.optimizer.step()
        if number % 2:
            self.optimizer.zero_grad()

    def outcome(self) -> list[Tensor]:
        """Parameters, buffers, gradients, state and random states, on the host. State is read by the public API."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += [p.grad for p in self.model.parameters() if p.grad is not None]
        for state in self.optimizer.state_dict()["state"].values():
            tensors += [value for _, value in sorted(state.items()) if isinstance(value, Tensor)]
        return [t.detach().cpu().clone() for t in (*tensors, *random_states(self.at))]


def random_states(at: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(at)] if at.type == "cuda" else [])]


def plainly(name: str, at: torch.device, numbers: Iterable[int]) -> list[Tensor]:
    training = Training(name, at)
    for number in numbers:
        training.step(number)
    return training.outcome()


def session_of(training: Training, device: Device, kind: str, **given: Any) -> cm.SwapSession:
    """A session in which weights and their state are away between steps, as far as `kind` says: the window of "parameters" has
    no room for all of them."""
    given = {"host_budget": "64MiB", "plans": False, "min_bytes": 64 * KIB, **given}
    room = {"neither": 1024, "optimizer": 3 * 1024, "parameters": 1024}[kind]
    leaves_bytes = 4 * WIDTH * WIDTH * LAYERS if kind == "parameters" else 0
    budget = room * KIB + device.allocated_bytes() - leaves_bytes
    if kind != "neither":
        given["optimizer"] = training.optimizer
    if kind == "parameters":
        given["parameters"] = "swap"
    return cm.SwapSession(budget, device=device, model=training.model, **given)


def opened(name: str, device: Device, kind: str, **given: Any) -> tuple[Training, cm.SwapSession]:
    training = Training(name, device.torch_device)
    return training, session_of(training, device, kind, **given)


def steps(session: cm.SwapSession, training: Any, numbers: Iterable[int]) -> None:
    for number in numbers:
        with session.step():
            training.step(number)


def away(session: cm.SwapSession, training: Training) -> tuple[int, int]:
    """How many parameters and gradients are on the host alone, and how many tensors of state."""
    swap = session._model_swap._parameters
    entries = [] if swap is None else swap.window.entries
    states = (state for state in training.optimizer.state.values() if isinstance(state, SwappedState))
    hosted = [hosted for state in states for _, hosted in state.away()]
    return sum(it.where is Where.ON_HOST for it in entries), sum(it.where is Where.ON_HOST for it in hosted)


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint by torch's own functions."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "all.pt")
        dcp_to_torch_save(path, file)
        saved: dict[str, Any] = torch.load(file, weights_only=True)
    return saved
