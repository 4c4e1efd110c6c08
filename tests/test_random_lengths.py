"""Training whose lengths change with every step: three steps are recorded, all others are predicted from them.

The reference is plain PyTorch, on plain tensors, with nothing of ours around it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.adaptive.structure import RECORDED, Structure
from chameleon_mm.bench._length_models import MODELS, LengthModel, lengths_of
from chameleon_mm.bench._lengths_run import MIN_BYTES, SMALL_GPU
from chameleon_mm.device.sim import CostModel
from chameleon_mm.trace import Trace

pytestmark = pytest.mark.usefixtures("no_gc")

Shape = tuple[int, int]
"""Rows and length of a batch."""


class Training:
    """A model and its optimizer, one step for each batch."""

    def __init__(self, make: Callable[[], LengthModel]) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.losses: list[float] = []

    def step(self, shape: Shape) -> None:
        batch = torch.randint(0, self.model.vocabulary, shape, generator=torch.Generator().manual_seed(len(self.losses)))
        loss = self.model(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


def plainly(make: Callable[[], LengthModel], shapes: Sequence[Shape]) -> Training:
    training = Training(make)
    for shape in shapes:
        training.step(shape)
    return training


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run in a session."""

    training: Training
    peaks: list[int]
    times_us: list[float]
    report: cm.SwapReport


def swapped(make: Callable[[], LengthModel], shapes: Sequence[Shape], budget: int, **given: Any) -> Run:
    device = cm.SimDevice(SMALL_GPU, cost=CostModel(spec=SMALL_GPU, matmul_efficiency=1.0), check_races=False)
    with device.compute():
        training = Training(make)
    session = cm.SwapSession(budget, "512MiB", device, MIN_BYTES, model=training.model, **given)
    peaks, times_us = [], []
    with session:
        for shape in shapes:
            device.reset_peaks()
            device.synchronize()
            began_us = device.host_us
            with session.step():
                training.step(shape)
            device.synchronize()
            times_us.append(device.host_us - began_us)
            peaks.append(device.peak_allocated_bytes())
    return Run(training=training, peaks=peaks, times_us=times_us, report=session.report())


def budget_of(make: Callable[[], LengthModel], longest: Shape, share: float) -> int:
    return int(max(swapped(make, [longest] * 2, 1 << 34, plans=False).peaks) * share)


def assert_exact(run: Run, make: Callable[[], LengthModel], shapes: Sequence[Shape]) -> None:
    expected = plainly(make, shapes)
    assert run.training.losses == expected.losses
    pairs = zip(run.training.model.parameters(), expected.model.parameters(), strict=True)
    assert all(torch.equal(got, plain) for got, plain in pairs)


def assert_within(run: Run, budget: int) -> None:
    assert [(i, peak - budget) for i, peak in enumerate(run.peaks) if peak > budget] == []
    assert (run.report.budget_misses, run.report.oom_retries) == (0, 0)


@pytest.mark.parametrize(("name", "recompute"), [("llama", True), ("bert", False)])
def test_lengths_that_nobody_saw_are_planned_without_a_recording(name: str, recompute: bool) -> None:
    make, shapes = MODELS[name], [(2, n) for n in lengths_of("uniform", 24, Random(1), longest=400)]
    budget = budget_of(make, max(shapes), 0.6)
    run = swapped(make, shapes, budget, recompute=recompute)
    assert_exact(run, make, shapes)
    assert_within(run, budget)
    assert run.report.detailed_steps == 3
    assert run.report.steps_by_phase == {"recorded": 3, "partly planned": 1, "planned": 20}


def test_rows_and_length_change_apart() -> None:
    rng = Random(2)
    make, shapes = MODELS["llama"], [(rng.randint(1, 5), rng.randint(40, 300)) for _ in range(20)]
    budget = budget_of(make, (5, 300), 0.6)
    run = swapped(make, shapes, budget)
    assert_exact(run, make, shapes)
    assert_within(run, budget)
    assert run.report.detailed_steps <= RECORDED
    assert run.report.steps_by_phase["planned"] >= 14


def test_one_longer_than_all_known_is_within_the_budget_at_once() -> None:
    make, shapes = MODELS["llama"], [(2, n) for n in (100, 120, 140, 110, 130, 600, 60, 601)]
    budget = budget_of(make, (2, 601), 0.6)
    run = swapped(make, shapes, budget)
    assert_exact(run, make, shapes)
    assert_within(run, budget)
    assert run.report.detailed_steps <= 4
    assert run.report.steps_by_phase["planned"] >= 2


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_wrong_prediction_costs_time_alone(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    trace_of = Structure.trace_of

    def wrong(structure: Structure, record: Any) -> Trace:
        trace = trace_of(structure, record)
        return dataclasses.replace(
            trace, tensor_bytes=(trace.tensor_bytes * factor).astype("int64"), op_us=trace.op_us * factor
        )

    monkeypatch.setattr(Structure, "trace_of", wrong)
    make, shapes = MODELS["llama"], [(2, n) for n in lengths_of("uniform", 16, Random(3), longest=300)]
    budget = budget_of(make, (2, 300), 0.7)
    run = swapped(make, shapes, budget)
    assert_exact(run, make, shapes)
    assert_within(run, budget)


class Padded(LengthModel):
    """Pads what it gets to a multiple of 64: a size that follows from no other."""

    vocabulary = 128

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(128, 64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.pad(self.embedding(tokens), (0, 0, 0, -tokens.shape[1] % 64))
        loss: Tensor = self.down(F.gelu(self.up(x))).square().mean()
        return loss


def test_a_size_that_follows_from_none_is_learned_where_it_is_seen() -> None:
    shapes = [(4, n) for n in lengths_of("uniform", 16, Random(4), longest=400)]
    budget = budget_of(Padded, (4, 400), 0.9)
    run = swapped(Padded, shapes, budget)
    assert_exact(run, Padded, shapes)
    assert_within(run, budget)
    assert run.report.detailed_steps <= RECORDED


@pytest.mark.slow
@pytest.mark.parametrize(("name", "distribution", "longest"), [("llama", "log-normal", 2048), ("bert", "uniform", 1024)])
def test_two_hundred_random_lengths(name: str, distribution: str, longest: int) -> None:
    make, shapes = MODELS[name], [(1, n) for n in lengths_of(distribution, 200, Random(5), longest=longest)]
    budget = budget_of(make, max(shapes), 0.5)
    run = swapped(make, shapes, budget)
    assert_exact(run, make, shapes)
    assert_within(run, budget)
    assert run.report.detailed_steps <= 6
    assert sum(run.times_us) < sum(swapped(make, shapes, budget, plans=False).times_us)


@pytest.mark.gpu
def test_random_lengths_on_cuda() -> None:
    device, lengths = cm.CudaDevice(), lengths_of("uniform", 16, Random(6), longest=400)
    torch.manual_seed(0)
    model = MODELS["llama"]().to(device.torch_device)

    def train(session: cm.SwapSession | None) -> tuple[list[Tensor], list[int]]:
        """Gradients and allocated peaks of all steps."""
        grads: list[Tensor] = []
        peaks = []
        for number, length in enumerate(lengths):
            tokens = torch.randint(0, 256, (2, length), generator=torch.Generator().manual_seed(number)).to(device.torch_device)
            device.synchronize()
            torch.cuda.reset_peak_memory_stats()
            with nullcontext() if session is None else session.step():
                model(tokens).backward()
                grads += [p.grad.cpu() for p in model.parameters() if p.grad is not None]
                model.zero_grad()
            device.synchronize()
            peaks.append(torch.cuda.max_memory_allocated())
        return grads, peaks

    expected, unswapped = train(None)
    budget = int(0.8 * max(unswapped))
    session = cm.SwapSession(budget, "256MiB", device, MIN_BYTES, model=model)
    with session:
        got, peaks = train(session)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert max(peaks) <= budget
    assert session.report().detailed_steps <= RECORDED
    assert session.report().steps_by_phase["planned"] >= 10
