"""Training whose routing changes with every step: how many rows each expert gets, or which parts run at all.

The reference is plain PyTorch, on plain tensors, with nothing of ours around it.
"""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from chameleon_mm.adaptive.adaptation import RECORDED_SHARE, UNUSED_RECORDINGS
from chameleon_mm.bench._length_models import MODELS, LengthModel
from chameleon_mm.bench._lengths_run import run_lengths
from tests.test_random_lengths import check, report_of, share_of_unswapped

pytestmark = pytest.mark.usefixtures("no_gc")


def test_steps_whose_routing_nobody_can_tell_follow_one_plan() -> None:
    make, shapes = MODELS["mixture"], [(4, 128)] * 12
    budget = share_of_unswapped(make, (4, 128), 0.6)
    run = check(make, shapes, budget)
    assert report_of(run).detailed_steps <= 4
    assert report_of(run).steps_by_phase["planned"] >= 7


def test_lengths_change_with_the_routing() -> None:
    make, shapes = MODELS["mixture"], [(2, n) for n in (96, 120, 80, 200, 64, 150, 100, 90, 170, 110, 130, 75)]
    budget = share_of_unswapped(make, (2, 200), 0.7)
    run = check(make, shapes, budget)
    assert report_of(run).detailed_steps <= 4
    assert report_of(run).steps_by_phase["planned"] >= 5


class Skipping(LengthModel):
    """Leaves out blocks as the data says: hardly two steps run the same operators."""

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


def test_recordings_that_nothing_comes_of_are_bounded() -> None:
    shapes = [(2, 128)] * 48
    budget = share_of_unswapped(Skipping, (2, 128), 0.8)
    run = check(Skipping, shapes, budget)
    # The first step is recorded whatever it is; of 48 the share allows one.
    assert report_of(run).detailed_steps <= 1 + UNUSED_RECORDINGS + RECORDED_SHARE * len(shapes)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_hundred_steps_of_changing_routing() -> None:
    make, shapes = MODELS["mixture"], [(8, 256)] * 100
    budget = share_of_unswapped(make, (8, 256), 0.5)
    run = check(make, shapes, budget)
    assert report_of(run).detailed_steps <= 6
    assert sum(run.times_us) < sum(run_lengths(make, shapes, budget, plans=False).times_us)
