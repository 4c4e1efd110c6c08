"""Training in plain PyTorch, and the same under swapping. The oracle has nothing of ours around it.

    plain = trained_plainly(case, CUDA)                   # no mode, no hooks, no device of ours: torch alone
    swapped, report = trained_in_session(case, budget_of(case, 0.5, CUDA), CUDA)  # room for half of what forward leaves
    assert differences(plain, swapped) == []

A simulated GPU's reference is torch on the CPU. CUDA's is torch on CUDA, which draws other random numbers.
What is compared is named: the losses and gradients of every step, the random state after it, and the weights, buffers and
optimizer state at the end, each with dtype, shape, strides and bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.units import MIB
from tests._plain_models import Case

Image = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], bytes]
Outcome = dict[str, Image]

MIN_BYTES = 256
"""Small enough for nearly all saved tensors of models of this size."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of device on which a case is trained. `torch_type`: the torch device type of its tensors."""

    torch_type: str
    make: Callable[[], Device]

    def placed(self) -> AbstractContextManager[object]:
        """Return a context in which factories make tensors on this kind of device."""
        return nullcontext() if self.torch_type == "cpu" else torch.device(self.torch_type)


def _cuda() -> Device:
    from chameleon_mm.device.cuda import CudaDevice

    torch.cuda.empty_cache()
    return CudaDevice()


SIM = Kind("cpu", cm.SimDevice)
CUDA = Kind("cuda", _cuda)


def image(t: Tensor) -> Image:
    plain = t.detach().contiguous().cpu()
    raw = (plain if plain.dim() else plain.reshape(1)).view(torch.uint8).numpy().tobytes()
    return t.dtype, tuple(t.shape), t.stride(), raw


def differences(expected: Outcome, got: Outcome) -> list[str]:
    """Return the names of the values that differ bitwise, in the order in which they were computed."""
    assert list(expected) == list(got)
    return [name for name, value in expected.items() if got[name] != value]


class Training:
    """A model and its optimizer, trained step by step."""

    def __init__(self, case: Case, kind: Kind = SIM) -> None:
        torch.manual_seed(7)
        self.seen: Outcome = {}
        self._case = case
        self._kind = kind
        with kind.placed():
            self._model = case.build()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=case.learning_rate, fused=True)
        self._step = 0

    def forward(self) -> Tensor:
        with self._kind.placed(), torch.autocast(self._kind.torch_type, torch.bfloat16, enabled=self._case.autocast):
            return self._case.loss(self._model)

    def step(self) -> None:
        self._step += 1
        for number in range(self._case.micro_batches):
            loss = self.forward()
            loss.backward()
            self._see(f"loss {number}", loss)
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                self._see(f"gradient of {name}", parameter.grad)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._see("random state", torch.get_rng_state())
        if self._kind.torch_type == "cuda":
            self._see("random state of the GPU", torch.cuda.get_rng_state())

    def finish(self) -> Outcome:
        for name, value in self._model.state_dict(keep_vars=True).items():
            self._see(name, value)
        for number, state in self._optimizer.state_dict()["state"].items():
            for name, value in state.items():
                self._see(f"{name} of parameter {number}", value)
        return self.seen

    def _see(self, what: str, t: Tensor) -> None:
        self.seen[f"step {self._step}: {what}"] = image(t)


def trained_plainly(case: Case, kind: Kind = SIM) -> Outcome:
    training = Training(case, kind)
    for _ in range(case.steps):
        training.step()
    return training.finish()


def check_session(case: Case, kind: Kind = SIM) -> None:
    """Train `case` in sessions of ever larger budgets until one has a plan to follow: in each, the bits are the same. The last
    budget is the least that has a plan, as the session before it said, and 1 MiB: on a GPU a kernel may take more inside than
    all that is saved."""
    plain = trained_plainly(case, kind)
    budgets = [budget_of(case, room, kind) for room in (0.5, 1.0, 2.0)]
    while budgets:
        swapped, report = trained_in_session(case, budgets.pop(0), kind)
        assert differences(plain, swapped) == []
        assert report.detailed_steps > 0
        if report.plan_cache_hits:
            assert report.bytes_swapped_out > 0
            return
        if not budgets and (least := sum(report.least_peak.values()) + MIB) > report.hbm_budget_bytes:
            budgets.append(least)
    raise AssertionError(f"expected a step that follows a plan, got none in any session; of the last: {report}")


def trained_in_session(case: Case, budget: int, kind: Kind = SIM) -> tuple[Outcome, cm.SwapReport]:
    device = kind.make()
    with device.compute():
        training = Training(case, kind)
        session = cm.SwapSession(budget, "64MiB", device, min_bytes=MIN_BYTES)
        with session:
            for _ in range(case.steps):
                with session.step():
                    training.step()
        seen = training.finish()
    assert session.pool.stats().num_live == 0
    return seen, session.report()


def check_save_on_cpu(case: Case, kind: Kind = SIM) -> None:
    swapped, most_on_host_bytes = trained_with_save_on_cpu(case, kind)
    assert differences(trained_plainly(case, kind), swapped) == []
    assert most_on_host_bytes > 0


def trained_with_save_on_cpu(case: Case, kind: Kind = SIM) -> tuple[Outcome, int]:
    """Also returns the most bytes that were on the host at once."""
    device = kind.make()
    pool = cm.PinnedPool("64MiB", device=device)
    with device.compute():
        training = Training(case, kind)
        with cm.save_on_cpu(device=device, pool=pool, min_bytes=MIN_BYTES):
            for _ in range(case.steps):
                training.step()
        seen = training.finish()
    stats = pool.stats()
    assert stats.num_live == 0
    return seen, stats.peak_live_bytes


def budget_of(case: Case, room: float, kind: Kind = SIM) -> int:
    """Return a step's unswapped peak, minus the share of forward's saved storages that shall have no room."""
    device = kind.make()
    with device.compute():
        peak, left = peak_and_left(device, Training(case, kind))
    return peak - int(left * (1 - room))


def peak_and_left(device: Device, training: Any) -> tuple[int, int]:
    """Return the peak of a step, and what forward leaves for backward, in bytes. `training`: with `forward` and `step`."""
    training.step()  # the optimizer's state comes with the first one
    device.reset_peaks()
    training.step()
    peak, there = device.peak_allocated_bytes(), device.allocated_bytes()
    loss = training.forward()
    left = device.allocated_bytes() - there
    del loss
    return peak, left
