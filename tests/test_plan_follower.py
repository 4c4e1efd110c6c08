"""Running step among the known ones: phases, a switch to another in the middle, strays, and storages without a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.follow.adaptation import RECORDINGS
from chameleon_mm.plan.planner import generate_plan
from chameleon_mm.plan.swap_plan import SwapPlan
from chameleon_mm.plan.timing import LinkCost
from chameleon_mm.plan.trace import Trace
from chameleon_mm.plan.unswapped_memory import least_memory
from chameleon_mm.swap.executor import Executor
from tests._random_models import SLOW_GPU, adaptation_of, far_ahead, link_of, planning

pytestmark = pytest.mark.usefixtures("no_gc", "short_search")

SIDE = 96


@pytest.fixture(autouse=True)
def _all_that_can_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for the smallest budget there is: something moves in each."""

    def plans(trace: Trace, hbm_budget: int, host_budget: int, link: LinkCost, **_: Any) -> Sequence[SwapPlan]:
        return [generate_plan(trace, least_memory(trace).nbytes, None, link_of(SLOW_GPU))]

    monkeypatch.setattr("chameleon_mm.follow.adaptation.candidate_plans", plans)


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "t": torch.tanh,
    "s": torch.sigmoid,
    "e": lambda x: (x * 0.1).exp(),
    "c": torch.cos,
}


class Training:
    """Steps described by a word: each letter is an operator."""

    def __init__(self) -> None:
        self.device = far_ahead()
        self.pool = cm.PinnedPool("8MiB", device=self.device)
        self.executor: Executor = planning(self.device, pool=self.pool)
        self.adaptation = adaptation_of(self.executor)

    def step(self, word: str, *, completed: bool = True) -> bool:
        """Run a step; check that it is exact and leaves nothing allocated. Return True if the expected step had a plan."""
        with self.device.compute():
            x = torch.randn(SIDE, SIDE, requires_grad=True)
            (expected,) = torch.autograd.grad(self._run(x, word), x)
            self.executor.begin_step(timed=True)
            expected_step = self.adaptation.steps.current
            had_plan = expected_step is not None and expected_step.plan is not None and bool(expected_step.plan.trials)
            with torch.autograd.graph.saved_tensors_hooks(self.executor.save, self.executor.use):
                (got,) = torch.autograd.grad(self._run(x, word), x)
            self.executor.end_step(completed=completed)
            assert torch.equal(got, expected)
        assert not self.executor.registry.all()
        assert self.pool.stats().live_bytes == 0
        return had_plan

    def _run(self, x: Tensor, word: str) -> Tensor:
        for letter in word:
            x = OPERATORS[letter](x)
        return x.sum()

    @property
    def counts(self) -> tuple[int, int, int]:
        """Detailed steps, plans, steps that were known."""
        return self.adaptation.detailed_steps, self.adaptation.plans, self.adaptation.plan_cache_hits


def test_a_new_step_is_recorded_once_and_known_from_then_on() -> None:
    training = Training()
    for word in ("tsecst", "tsecst", "ttttss"):
        training.step(word)
    assert training.counts[0] == 1  # the known step was expected, so there was no recorder
    training.step("ttttss")
    assert training.counts[0] == 2
    before = training.counts
    for word in ("tsecst", "ttttss") * 3:
        training.step(word)
    assert training.counts[0] == before[0]
    assert training.counts[2] == before[2] + 6


def rarely(rng: Random, often: str, seldom: str) -> list[str]:
    return [seldom if rng.random() < 0.15 else often for _ in range(100)]


RARE = {
    "every fifth": ["tsecst", "tsecst", "tsecst", "tsecst", "ttssec"] * 5,
    "every tenth": [*["tsecst"] * 9, "ttssec"] * 4,
    "now and then": rarely(Random(1), "tsecst", "ttssec"),
    "told apart late": rarely(Random(2), "tsecstce", "tsecstcs"),
    "one that goes on where the other ends": ["tse", "tse", "tse", "tsec"] * 6,
}


@pytest.mark.ci
@pytest.mark.parametrize("words", RARE.values(), ids=RARE)
def test_a_sequence_that_is_never_expected_is_recorded_once_too(words: Sequence[str]) -> None:
    """And follows its plan from then on."""
    training = Training()
    recorded, planned = Counter[str](), Counter[str]()
    for word in words:
        detailed, _, hits = training.counts
        training.step(word)
        recorded[word] += training.counts[0] - detailed
        planned[word] += training.counts[2] - hits
    assert recorded == dict.fromkeys(words, 1)
    assert min(planned.values()) > 0
    assert planned[words[0]] == Counter(words)[words[0]] - 1  # the common one misses nothing


def test_another_known_step_takes_over_in_the_middle() -> None:
    """The plan of the step that it turns out to be is followed from there on, regardless of the expected step."""
    training = Training()
    for _ in range(3):
        training.step("tsecst")
    for _ in range(3):
        training.step("tsecttcc")
    detailed, _, hits = training.counts
    assert detailed == 2
    for word in ("tsecst", "tsecttcc", "tsecttcc", "tsecst", "tsecst", "tsecttcc"):
        training.step(word)
    assert training.counts[0] == detailed
    assert training.counts[2] == hits + 6


@pytest.mark.ci
@pytest.mark.parametrize("stray", ["tsecstst", "tsecs", "tscst", "ctsecst", "tsectsecst", "tsesct"])
def test_a_step_that_strays_is_exact_and_costs_one_recording(stray: str) -> None:
    training = Training()
    for _ in range(3):
        training.step("tsecst")
    detailed, _, hits = training.counts
    training.step(stray)
    assert training.counts[2] == hits
    training.step("tsecst")
    assert training.counts[2] == hits + 1  # the known one is still known
    had_plan = [training.step(stray) for _ in range(6)]
    assert training.counts[0] == detailed + 1
    assert had_plan[-1]


def test_a_stray_moves_what_it_has_in_common_with_the_plan() -> None:
    """Its first operators are the known step's, so their storages go by its plan, until it strays, and then by the rule."""
    training = Training()
    for _ in range(3):
        training.step("tsecsttsecst")
    before = training.executor.metrics.totals.bytes_swapped_in
    training.step("tsecsttsecstc")
    assert training.executor.metrics.totals.bytes_swapped_in > before


def test_a_step_that_ends_in_an_error_teaches_nothing() -> None:
    training = Training()
    assert not training.step("tsecst", completed=False)
    assert training.counts == (0, 0, 0)
    assert not training.step("tsecst")
    assert training.step("tsecst")
    assert training.counts[0] == 1
    training.step("tsecst", completed=False)
    assert training.step("tsecst")
    assert training.counts[2] == 2


def test_what_comes_outside_of_steps_goes_by_no_plan() -> None:
    training = Training()
    for _ in range(3):
        training.step("tsecst")
    before = training.counts
    with training.device.compute():
        x = torch.randn(SIDE, SIDE, requires_grad=True)
        (expected,) = torch.autograd.grad(training._run(x, "tsecst"), x)
        with torch.autograd.graph.saved_tensors_hooks(training.executor.save, training.executor.use):
            (got,) = torch.autograd.grad(training._run(x, "tsecst"), x)
    assert torch.equal(got, expected)
    training.step("tsecst")
    assert training.counts == (before[0], before[1], before[2] + 1)


def test_a_step_that_cannot_be_recorded_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chameleon_mm.record.recorder.Recorder.flaw", "made up")
    training = Training()
    had_plan = [training.step("tsecst") for _ in range(RECORDINGS + 2)]
    assert had_plan == [False] * (RECORDINGS + 2)
    assert training.counts == (0, 0, 0)
    assert training.executor.recording.recorder is None
