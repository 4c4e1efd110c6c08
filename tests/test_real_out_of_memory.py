"""CUDA's caching allocator runs out of memory inside a step: operators and steps are run again, and the bits are torch's own.

The reference is torch alone on a device with enough memory. The shortage is real: `set_per_process_memory_fraction`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.bench._measure import free_unused
from chameleon_mm.device.cuda import CudaDevice
from chameleon_mm.swap.executor import Executor
from chameleon_mm.tools.demo import GPT, GPTConfig
from chameleon_mm.units import MIB
from tests._memory_limit import fraction_of_memory
from tests._plain_training import image
from tests.cuda_stand_in import control

pytestmark = pytest.mark.gpu

OF_PRODUCTS = 24 * MIB
"""Bytes that an H200's backward asked for at once, beside the activations."""

CONFIG = GPTConfig(layers=6, width=128, heads=4, context=256, dropout=0.1)
BATCH, STEPS = 12, 4


class Training:
    """GPT that draws random numbers, and the results of its steps."""

    def __init__(self, device: CudaDevice) -> None:
        torch.manual_seed(1)
        at = device.torch_device
        self.model = GPT(CONFIG).to(at)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.rows = [torch.randint(256, (2, BATCH, CONFIG.context)).to(at) for _ in range(STEPS)]
        self.losses: list[Tensor] = []

    def step(self, row: Tensor) -> Tensor:
        loss = self.model.loss(row[0], row[1])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def outcome(self) -> list[object]:
        state = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return [image(t) for t in (*self.losses, *self.model.parameters(), *state, torch.cuda.get_rng_state())]


class Plain(NamedTuple):
    """The run by torch alone."""

    peak_bytes: int
    """Bytes above those allocated before the run."""
    outcome: list[object]


@pytest.fixture(scope="module")
def plain() -> Plain:
    free_unused()
    device = CudaDevice()
    before = device.allocated_bytes()
    device.reset_peaks()
    training = Training(device)
    training.losses = [training.step(row) for row in training.rows]
    return Plain(device.peak_allocated_bytes() - before, training.outcome())


@contextmanager
def short_of_memory(peak_bytes: int) -> Iterator[CudaDevice]:
    """Device on which the process may reserve four tenths of `peak_bytes` more than it has."""
    free_unused()
    device = CudaDevice()
    with fraction_of_memory(torch.cuda.memory_reserved(device.index) + peak_bytes * 4 // 10, device.index):
        yield device
    free_unused()


def test_torch_alone_runs_out(plain: Plain) -> None:
    with short_of_memory(plain.peak_bytes) as device:
        training = Training(device)
        with pytest.raises(torch.OutOfMemoryError):
            training.step(training.rows[0])
        del training


class Chain:
    """Layers whose activations are 12 MiB each, one of the allocator's segments. A short step, then two whole ones."""

    def __init__(self, device: CudaDevice) -> None:
        torch.manual_seed(2)
        layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.1))]
        self.model = nn.Sequential(*layers).to(device.torch_device)
        whole = torch.randn(6144, 512).to(device.torch_device)
        self.batches = [whole[:3072], whole, whole]
        self.losses: list[Tensor] = []

    def step(self, batch: Tensor) -> None:
        self.model.zero_grad()
        loss = self.model(batch).square().mean()
        loss.backward()
        self.losses.append(loss.detach())

    def outcome(self) -> list[object]:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [image(t) for t in (*self.losses, *grads, torch.cuda.get_rng_state())]


@pytest.mark.parametrize("segments", [5, 12])
def test_an_operator_without_memory_is_run_again_after_something_was_swapped(
    segments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded step of a session that knows its steps' memory and so keeps as much as its budget has room for. The memory is
    missing all the same, as when another process takes it. Torch alone needs 19 activations at a time."""
    free_unused()
    device = CudaDevice()
    plain = Chain(device)
    for batch in plain.batches:
        plain.step(batch)
    expected = plain.outcome()
    del plain
    freed_for_operators = []
    real = Executor.reclaim_some

    def reclaim_some(self: Executor, nbytes: int, busy: Sequence[torch.UntypedStorage]) -> bool:
        freed_for_operators.append(real(self, nbytes, busy))
        return freed_for_operators[-1]

    monkeypatch.setattr(Executor, "reclaim_some", reclaim_some)
    chain = Chain(device)
    with cm.SwapSession("1GiB", device=device, model=chain.model, min_bytes="64KiB") as session:
        for batch in chain.batches[:-1]:
            with session.step():
                chain.step(batch)
        chain.model.zero_grad()
        free_unused()
        held = torch.cuda.memory_reserved(device.index) + (0 if control.is_loaded() else OF_PRODUCTS)
        with fraction_of_memory(held + (segments * 12 + 8) * MIB, device.index), session.step():
            chain.step(chain.batches[-1])
    report = session.report()
    assert report.steps_by_phase == {"recorded": 2, "by_rule": 1}
    assert any(freed_for_operators)
    assert chain.outcome() == expected


@pytest.mark.parametrize("plans", [True, False], ids=["planned", "by the rule"])
def test_a_step_that_ran_out_is_run_again_within_less(plain: Plain, plans: bool) -> None:
    with short_of_memory(plain.peak_bytes) as device:
        training = Training(device)
        budget = 2 * plain.peak_bytes
        with cm.SwapSession(budget, device=device, model=training.model, min_bytes="64KiB", plans=plans) as session:
            training.losses = [session.run_step(partial(training.step, row)) for row in training.rows]
        report = session.report()
        assert report.steps == STEPS
        assert report.steps_run_again > 0
        assert (report.plan_cache_hits > 0) == plans
        assert report.bytes_swapped_out > 0
        assert training.outcome() == plain.outcome
        del training
