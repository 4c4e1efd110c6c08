"""Training as plain PyTorch does it, and the same under swapping. The oracle has nothing of ours around it.

    plain = trained_plainly(case)                         # no mode, no hooks, no device of ours: torch alone
    swapped, report = trained_in_session(case, room=0.5)  # simulated GPU with room for half of what forward leaves
    assert differences(plain, swapped) == []

What is compared is named: the losses and gradients of every step, the random state after it, and the weights, buffers and
optimizer state at the end, each with dtype, shape, strides and bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

import chameleon_mm as cm
from tests._plain_models import Case

Image = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], bytes]
Outcome = dict[str, Image]

MIN_BYTES = 256
"""Small enough for nearly all that models of this size save."""


def image(t: Tensor) -> Image:
    plain = t.detach().contiguous()
    raw = (plain if plain.dim() else plain.reshape(1)).view(torch.uint8).numpy().tobytes()
    return t.dtype, tuple(t.shape), t.stride(), raw


def differences(expected: Outcome, got: Outcome) -> list[str]:
    """What is not the same bit for bit, in the order in which it came about."""
    assert list(expected) == list(got)
    return [name for name, value in expected.items() if got[name] != value]


class Training:
    """A model and its optimizer, trained step by step."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(7)
        self.seen: Outcome = {}
        self._case = case
        self._model = case.build()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=case.learning_rate)
        self._step = 0

    def forward(self) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self._case.autocast):
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

    def finish(self) -> Outcome:
        for name, value in self._model.state_dict(keep_vars=True).items():
            self._see(name, value)
        for number, state in self._optimizer.state_dict()["state"].items():
            for name, value in state.items():
                self._see(f"{name} of parameter {number}", value)
        return self.seen

    def _see(self, what: str, t: Tensor) -> None:
        self.seen[f"step {self._step}: {what}"] = image(t)


def trained_plainly(case: Case) -> Outcome:
    training = Training(case)
    for _ in range(case.steps):
        training.step()
    return training.finish()


def check_session(case: Case) -> None:
    """Trains `case` in sessions of ever larger budgets until one has a plan to follow: in each, the bits are the same."""
    plain = trained_plainly(case)
    for room in (0.5, 1.0, 2.0):
        swapped, report = trained_in_session(case, room)
        assert differences(plain, swapped) == []
        assert report.bytes_swapped_out > 0
        assert report.detailed_steps > 0
        if report.plan_cache_hits:
            return
    raise AssertionError("expected a step that follows a plan, got none in any session")


def trained_in_session(case: Case, room: float) -> tuple[Outcome, cm.SwapReport]:
    """Within a budget that has room for this share of what forward leaves for backward."""
    device = cm.SimDevice()
    budget = budget_of(case, room)
    with device.compute():
        training = Training(case)
        session = cm.SwapSession(hbm_budget=budget, host_budget="64MiB", device=device, min_bytes=MIN_BYTES)
        with session:
            for _ in range(case.steps):
                with session.step():
                    training.step()
        seen = training.finish()
    assert session.pool.stats().num_live == 0
    return seen, session.report()


def check_save_on_cpu(case: Case) -> None:
    swapped, most_on_host_bytes = trained_with_save_on_cpu(case)
    assert differences(trained_plainly(case), swapped) == []
    assert most_on_host_bytes > 0


def trained_with_save_on_cpu(case: Case) -> tuple[Outcome, int]:
    """Also returns the most bytes that were on the host at once."""
    device = cm.SimDevice()
    pool = cm.PinnedPool("64MiB", device=device)
    with device.compute():
        training = Training(case)
        with cm.save_on_cpu(device=device, pool=pool, min_bytes=MIN_BYTES):
            for _ in range(case.steps):
                training.step()
        seen = training.finish()
    stats = pool.stats()
    assert stats.num_live == 0
    return seen, stats.peak_live_bytes


def budget_of(case: Case, room: float) -> int:
    """A step's peak without swapping, less the share of what its forward leaves that is to have no room."""
    device = cm.SimDevice()
    with device.compute():
        training = Training(case)
        training.step()  # the optimizer's state comes with the first one
        device.reset_peaks()
        training.step()
        peak, there = device.peak_allocated_bytes(), device.allocated_bytes()
        loss = training.forward()
        left = device.allocated_bytes() - there
        del loss
    return peak - int(left * (1 - room))
