"""Training whose lengths change with every step: two steps are recorded, all others are predicted from them.

The reference is plain PyTorch, on plain tensors, with nothing of ours around it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.bench._length_models import MODELS, LengthModel, Llama, batch_of, lengths_of, training_step
from chameleon_mm.bench._lengths_run import MIN_BYTES, LengthRun, Shape, Train, run_lengths
from chameleon_mm.follow.step_cache import StepCache
from chameleon_mm.follow.structure import RECORDED, Structure, Structures
from chameleon_mm.plan.trace import Trace
from chameleon_mm.record.light_profiler import Feature, StepRecord, sizes_of
from tests._trace_records import ops_of

pytestmark = pytest.mark.usefixtures("no_gc")


def plainly(make: Callable[[], LengthModel], shapes: Sequence[Shape]) -> tuple[list[float], list[Tensor]]:
    """Losses and parameters in plain PyTorch."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = [training_step(model, optimizer, batch_of(model, shape, number)) for number, shape in enumerate(shapes)]
    return losses, list(model.parameters())


def report_of(run: LengthRun) -> cm.SwapReport:
    assert run.report is not None
    return run.report


def assert_exact(run: LengthRun, make: Callable[[], LengthModel], shapes: Sequence[Shape]) -> None:
    losses, parameters = plainly(make, shapes)
    assert run.losses == losses
    assert all(torch.equal(got, plain) for got, plain in zip(run.parameters, parameters, strict=True))


def budget_of(make: Callable[[], LengthModel], longest: Shape, share: float) -> int:
    """Return `share` of the peak bytes of such a step without swapping."""
    return int(max(run_lengths(make, [longest] * 2, None).peaks) * share)


def assert_within(run: LengthRun, budget: int) -> None:
    assert [(i, peak - budget) for i, peak in enumerate(run.peaks) if peak > budget] == []
    assert (report_of(run).budget_misses, report_of(run).oom_retries) == (0, 0)


def check(make: Callable[[], LengthModel], shapes: Sequence[Shape], budget: int, **given: Any) -> LengthRun:
    """A run that has plain PyTorch's bits, and is within the budget in every step."""
    run = run_lengths(make, shapes, budget, **given)
    assert_exact(run, make, shapes)
    assert_within(run, budget)
    return run


@pytest.mark.ci
@pytest.mark.parametrize(("name", "recompute"), [("llama", True), ("bert", False)])
def test_lengths_that_nobody_saw_are_planned_without_a_recording(name: str, recompute: bool) -> None:
    make, shapes = MODELS[name], [(2, n) for n in lengths_of("uniform", 24, Random(1), longest=400)]
    budget = budget_of(make, max(shapes), 0.6)
    run = check(make, shapes, budget, recompute=recompute)
    assert report_of(run).detailed_steps == 2
    assert report_of(run).steps_by_phase == {"recorded": 2, "by_rule": 1, "planned": 21}


@pytest.mark.ci
def test_rows_and_length_change_apart() -> None:
    rng = Random(2)
    make, shapes = MODELS["llama"], [(rng.randint(1, 5), rng.randint(40, 300)) for _ in range(20)]
    budget = budget_of(make, (5, 300), 0.6)
    run = check(make, shapes, budget)
    assert report_of(run).detailed_steps <= RECORDED
    assert report_of(run).steps_by_phase["planned"] >= 14


def test_one_longer_than_all_known_is_within_the_budget_at_once() -> None:
    make, shapes = MODELS["llama"], [(2, n) for n in (100, 120, 140, 110, 130, 600, 60, 601)]
    budget = budget_of(make, (2, 601), 0.6)
    run = check(make, shapes, budget)
    assert report_of(run).detailed_steps <= 4
    assert report_of(run).steps_by_phase["planned"] >= 2


@pytest.mark.ci
@pytest.mark.parametrize("factor", [pytest.param(0.5, marks=pytest.mark.thorough), 2.0])
def test_a_wrong_prediction_costs_time_alone(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    trace_of = Structure.trace_of

    def wrong(structure: Structure, record: Any) -> Trace:
        trace = trace_of(structure, record)
        return dataclasses.replace(
            trace, tensor_bytes=(trace.tensor_bytes * factor).astype("int64"), op_us=trace.op_us * factor
        )

    monkeypatch.setattr(Structure, "trace_of", wrong)
    make, shapes = MODELS["llama"], [(2, n) for n in lengths_of("uniform", 16, Random(3), longest=300)]
    assert len(set(shapes)) < len(shapes)  # a step that was taken for a wrong one comes again
    budget = budget_of(make, (2, 300), 0.7)
    check(make, shapes, budget)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_recorded_steps_of_two_lengths_have_the_operators_of_the_model_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators that swapping runs outside of hooks, when autograd releases a storage, are not recorded."""
    traces: list[Trace] = []
    note = Structure.note

    def keep(structure: Structure, record: Any, trace: Trace) -> None:
        traces.append(trace)
        note(structure, record, trace)

    monkeypatch.setattr(Structure, "note", keep)
    shapes = [(1, n) for n in (1295, 543, 1539, 754)]
    run_lengths(MODELS[name], shapes, budget_of(MODELS[name], (1, 1900), 0.5))
    one, other = traces  # the first step makes the optimizer's state, which is none of either
    assert [op.name for op in ops_of(one)] == [op.name for op in ops_of(other)]
    assert not any(op.name.startswith("aten::set_") for op in ops_of(one))
    assert all(sorted(a.reads) == sorted(b.reads) for a, b in zip(ops_of(one), ops_of(other), strict=True))


def test_a_predicted_step_says_whose_storages_are_saved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the same sizes that saves other storages is none like it."""
    predicted: list[StepRecord] = []
    predict = Structure.predict

    def keep(structure: Structure, features: Any) -> StepRecord | None:
        record = predict(structure, features)
        predicted.extend([] if record is None else [record])
        return record

    monkeypatch.setattr(Structure, "predict", keep)
    shapes = [(2, n) for n in (100, 150, 120, 200, 180)]
    run_lengths(MODELS["llama"], shapes, budget_of(MODELS["llama"], (2, 200), 0.6))
    saves = [feature for record in predicted for feature in record.features if sizes_of(feature) is not None]
    since = [save[4] for save in saves]
    assert len(since) > 100
    assert all(isinstance(hooks, int) for hooks in since)


class Padded(LengthModel):
    """Pads its input to a multiple of 64: a size that follows from no other."""

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
    run = check(Padded, shapes, budget)
    assert report_of(run).detailed_steps <= RECORDED


class _EachAlone(Structures):
    """Structures that relate no step to another."""

    def of(self, record: StepRecord) -> Structure | None:
        return None

    def beginning_with(self, features: Sequence[Feature]) -> list[Structure]:
        return []


def know_each(session: cm.SwapSession, train: Train, shapes: Sequence[Shape]) -> None:
    """Have the session record and plan a step of each of these shapes, by `train(number, shape)`, and no other from then on."""
    adaptation = session._adaptation
    assert adaptation is not None
    adaptation.steps, adaptation._structures = StepCache(2 * len(shapes)), _EachAlone(MIN_BYTES)
    adaptation._is_worth_recording = lambda expected: True  # type: ignore[method-assign]  # nobody else has to
    for number, shape in enumerate((shapes[0], *dict.fromkeys(shapes))):  # the first step is like no other
        with session.step():
            train(number, shape)
    adaptation._is_worth_recording = lambda expected: False  # type: ignore[method-assign]  # for this measurement alone


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_two_hundred_lengths_take_no_longer_than_where_each_was_planned_before() -> None:
    make = partial(Llama, layers=1)
    shapes = [(1, n) for n in lengths_of("log-normal", 200, Random(5))]
    budget = budget_of(make, max(shapes), 0.5)
    run = check(make, shapes, budget)
    known = run_lengths(make, shapes, budget, prepare=partial(know_each, shapes=shapes))
    assert sum(run.times_us) <= 1.03 * sum(known.times_us)
    assert sum(run.times_us[4:]) <= 1.02 * sum(known.times_us[4:])  # those before it are recorded, or not known yet


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
