"""Training whose steps change: the numbers stay eager's, the budget holds at every step, each new sequence is recorded once.

Sequence length, layers that are skipped, frozen ones, evaluation in between, micro-batches and experts, each alone and all in
one run, on a simulated GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.bench._length_models import MODELS, LengthModel
from chameleon_mm.bench._lengths_run import SMALL_GPU as GPU
from chameleon_mm.bench._lengths_run import run_lengths
from chameleon_mm.device.sim import CostModel
from chameleon_mm.follow.adaptation import CACHED_STEPS, RECORDED_SHARE, UNUSED_RECORDINGS
from chameleon_mm.follow.structure import OPEN_MARGIN, RECENT_STEPS, ExtraMemory, Structure
from chameleon_mm.record.light_profiler import StepRecord
from tests._compiled_programs import Block
from tests._runs import Run, run_steps
from tests.test_random_lengths import budget_of, check, report_of

pytestmark = pytest.mark.usefixtures("no_gc", "short_search")

LAYERS, EXPERTS, WIDTH = 4, 3, 48
ROWS, LONG_ROWS = 192, 288
MIN_BYTES = 8 << 10
SMALL_SHARE = 0.62
"""Budget as a share of the unswapped peak. Where a block is left out, no plan exists below 0.61: parameters, optimizer state
and one operator's memory are that much of it."""


class Net(nn.Module):
    """Blocks, then experts, some of which each step takes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width=WIDTH) for _ in range(LAYERS))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor, *, skip: Collection[int] = (), route: Sequence[int] = ()) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i not in skip:
                x = block(x)
        if route:
            rows = len(x) // len(route)
            x = torch.cat([torch.tanh(self.experts[e](x[i * rows : (i + 1) * rows])) for i, e in enumerate(route)])
        return x.square().mean()


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of a step."""

    rows: int = ROWS
    skip: tuple[int, ...] = ()
    frozen: int = 0
    """The first blocks, whose parameters get no gradient."""
    evaluates: bool = False
    micro_batches: int = 1
    route: tuple[int, ...] = ()


PLAIN = Work()


def changes(kind: str, rng: Random) -> Work:
    """A step of that kind."""
    match kind:
        case "long":
            return Work(rows=rng.choice((ROWS, LONG_ROWS)))
        case "skip":
            return Work(skip=(rng.randrange(LAYERS),))
        case "freeze":
            return Work(frozen=rng.randrange(3))
        case "evaluate":
            return Work(evaluates=rng.random() < 0.3)
        case "accumulate":
            return Work(micro_batches=rng.randint(1, 3))
        case "route":
            return Work(route=tuple(rng.sample(range(EXPERTS), rng.randint(1, 2))))
    raise ValueError(kind)


KINDS = ("long", "skip", "freeze", "evaluate", "accumulate", "route")


def schedule(kinds: Sequence[str], steps: int) -> Iterator[Work]:
    rng = Random(5)
    return (changes(rng.choice(kinds), rng) for _ in range(steps))


def net() -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def run(works: Sequence[Work], budget: int | None = None, *, plain: bool = False) -> Run:
    """Unswapped without a budget. `plain`: in plain PyTorch."""
    device = None if plain else cm.SimDevice(GPU, cost=CostModel(spec=GPU, matmul_efficiency=1.0))
    return run_steps(device, net, partial(step, works), len(works), budget)


def step(works: Sequence[Work], model: Net, optimizer: torch.optim.Optimizer, number: int) -> list[float]:
    """Losses of all that it ran."""
    losses, generator, work = [], torch.Generator().manual_seed(number), works[number]
    for block in model.blocks[: work.frozen]:
        block.requires_grad_(False)
    if work.evaluates:
        with torch.no_grad():
            losses.append(model(torch.randn(LONG_ROWS, WIDTH, generator=generator)).item())
    for _ in range(work.micro_batches):
        loss = model(torch.randn(work.rows, WIDTH, generator=generator), skip=work.skip, route=work.route)
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    model.requires_grad_(True)
    return losses


def assert_exact_within(works: Sequence[Work], share: float) -> Run:
    """Train swapped within `share` of the unswapped peak, with the same bits and never more memory. Returns the swapped run."""
    expected = run(works)
    budget = int(max(expected.peaks) * share)
    got = run(works, budget)
    assert got.seen == expected.seen
    assert all(torch.equal(a, b) for a, b in zip(got.parameters, expected.parameters, strict=True))
    assert [
        (i, work, peak - budget) for i, (work, peak) in enumerate(zip(works, got.peaks, strict=True)) if peak > budget
    ] == []
    assert got.report.oom_retries == 0
    assert got.report.budget_misses == 0
    return got


def recordings(works: Sequence[Work], got: Run) -> Counter[Work]:
    """By kind of step: how often one was recorded to its end."""
    return Counter(work for work, recorded in zip(works, got.recorded, strict=True) if recorded)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_that_changes_in_one_way(kind: str) -> None:
    works = list(schedule((kind,), 12))
    got = assert_exact_within(works, 0.7)
    assert max(recordings(works, got).values()) <= 1


@pytest.mark.ci
def test_a_sequence_that_changes_in_every_way() -> None:
    works = list(schedule(KINDS, 30))
    got = assert_exact_within(works, 0.6)
    assert max(recordings(works, got).values()) <= 1


@pytest.mark.thorough
@pytest.mark.parametrize(("kinds", "steps"), [(KINDS, 200), *(((kind,), 60) for kind in KINDS)], ids=["all", *KINDS])
def test_many_steps(kinds: Sequence[str], steps: int) -> None:
    works = list(schedule(kinds, steps))
    got = assert_exact_within(works, SMALL_SHARE)
    assert max(recordings(works, got).values()) <= 1


def test_what_a_proof_had_kept_comes_back_beside_all_that_its_plan_has_then() -> None:
    """The plan drops it, and recomputes it earlier as another's source: at its use the plan has no room for it."""
    assert_exact_within([Work(skip=(2,)), Work(skip=(3,))], SMALL_SHARE)


def test_a_plan_whose_memory_others_hold() -> None:
    """Every block except the last ones is frozen or not: up to there the hooks are equal, and the other allocations are not."""
    works = [Work(frozen=frozen) for frozen in (2, 2, 1, 2, 0, 1, 0, 2, 2, 0, 1, 0, 0)]
    got = assert_exact_within(works, 0.6)
    assert got.report.plan_cache_hits > 0


def test_two_lengths_in_turn_are_recorded_once_each() -> None:
    works = [Work(rows=rows) for rows in (ROWS, LONG_ROWS)] * 8
    got = assert_exact_within(works, 0.7)
    assert sum(got.recorded) == 2
    assert recordings(works, got) == Counter(set(works))
    assert (
        got.report.plan_cache_hits >= len(works) - 4
    )  # all but the two that were recorded, and the first of each taken for another


@pytest.mark.ci
def test_a_known_sequence_that_comes_back_is_not_recorded_again() -> None:
    others = [Work(micro_batches=count) for count in (2, 3)]
    works = [PLAIN, *others * 25, PLAIN]
    got = assert_exact_within(works, 0.7)
    assert sum(got.recorded) == 3
    assert got.recorded[-1] == 0


def test_the_cache_of_known_steps_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chameleon_mm.follow.adaptation.CACHED_STEPS", 2)
    works = [Work(micro_batches=count) for count in (1, 2, 3, 1, 1, 1)]
    got = assert_exact_within(works, 0.7)
    assert recordings(works, got)[PLAIN] == 2  # forgotten meanwhile, recorded again, known from then on
    assert got.recorded[-1] == 0
    assert CACHED_STEPS == 32


# --- routing that changes with every step: how many rows each expert gets, or which parts run at all


LENGTHS = (96, 120, 80, 200, 64, 150, 100, 90, 170, 110, 130, 75)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("shapes", "share", "planned"), [([(4, 128)] * 12, 0.6, 7), ([(2, n) for n in LENGTHS], 0.7, 5)], ids=["equal", "lengths"]
)
def test_steps_whose_routing_nobody_can_tell_follow_one_plan(shapes: list[tuple[int, int]], share: float, planned: int) -> None:
    make = MODELS["mixture"]
    run = check(make, shapes, budget_of(make, max(shapes), share))
    assert report_of(run).detailed_steps <= 4
    assert report_of(run).steps_by_phase["planned"] >= planned


class Skipping(LengthModel):
    """Model that leaves out blocks depending on the data: hardly two steps run the same operators."""

    vocabulary = 64

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 48)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(48, 192), nn.GELU(), nn.Linear(192, 48)) for _ in range(12))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for place, block in enumerate(self.blocks):
            runs = int(tokens[0, place]) % 2
            x = x + block(F.layer_norm(x, (48,))) if runs else x.tanh()
        loss: Tensor = x.square().mean()
        return loss


@pytest.mark.ci
def test_recordings_that_nothing_comes_of_are_bounded() -> None:
    shapes = [(2, 128)] * 48
    budget = budget_of(Skipping, (2, 128), 0.8)
    run = check(Skipping, shapes, budget)
    # The first step is always recorded; of 48 the share allows one.
    assert report_of(run).detailed_steps <= 1 + UNUSED_RECORDINGS + RECORDED_SHARE * len(shapes)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_hundred_steps_of_changing_routing() -> None:
    make, shapes = MODELS["mixture"], [(8, 256)] * 100
    budget = budget_of(make, (8, 256), 0.5)
    run = check(make, shapes, budget)
    assert report_of(run).detailed_steps <= 6
    assert sum(run.times_us) < sum(run_lengths(make, shapes, budget, plans=False).times_us)


def test_one_odd_step_with_open_sizes_widens_the_margin_for_the_latest_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    structure = Structure((), min_bytes=0)
    structure.has_open_sizes = True
    monkeypatch.setattr(structure, "_tensor_bytes", SimpleNamespace(spread_bytes=lambda proportions: 100), raising=False)
    monkeypatch.setattr(structure, "_values", lambda features: {})
    monkeypatch.setattr(structure, "_proportions", lambda values: [])
    record, margins = StepRecord.of([], [], ()), list[int]()
    assert structure.note_growth(1000) == 1000 * OPEN_MARGIN
    for _ in range(RECENT_STEPS + 1):
        margins.append(structure.margin_bytes(record))
        structure.note_extra(ExtraMemory())
    assert margins == [*[1000 * OPEN_MARGIN] * RECENT_STEPS, 100 * OPEN_MARGIN]
