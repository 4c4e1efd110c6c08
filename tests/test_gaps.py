"""Gaps between blocks that torch's allocator reserves and cannot use: where they fill the device, plans leave more free."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from chameleon_mm.api.session import SwapSession
from chameleon_mm.bench._measure import free_unused
from chameleon_mm.follow.adaptation import FLUSHES, GAP_PART
from tests._memory_limit import fraction_of_memory
from tests.test_budget_change import Training
from tests.test_changing_steps import PLAIN

ROWS = [11, 11, 13, 11, 13, 12, 13, 11] * 2
"""MiB of each layer's activation: each has a segment of its own, which a larger one does not fit."""

STEPS = 12
"""One by rule, one recorded, two that find the device full under each of at most three plans, and some after."""


class Layer(nn.Module):
    """Doubles its input, or cuts it, to a number of MiB."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024))
        self.rows = mib * 256

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, x])[: self.rows] if len(x) < self.rows else x[: self.rows].clone()
        return torch.tanh(x * self.scale)


def test_plans_leave_a_part_more_free_each_time_up_to_a_quarter(caplog: pytest.LogCaptureFixture) -> None:
    training = Training(0.95, [PLAIN] * 40)
    adaptation, flushes, gaps, peaks = training.session._adaptation, 0, list[int](), list[int]()
    assert adaptation is not None
    adaptation.cache_flushes = lambda: flushes
    with training.session.pool, training.session, caplog.at_level(logging.WARNING):
        for number in range(40):
            flushes += number % 2 if number < 12 else number < 36  # now and then, in each step, no more
            peaks.append(training.step())
            gaps.append(adaptation.planning.gap_parts * (training.session.hbm_budget // GAP_PART))
    part, budget = training.session.hbm_budget // GAP_PART, training.session.hbm_budget
    most = GAP_PART // 4
    assert gaps[: 10 + FLUSHES : FLUSHES] == [0] * 6
    assert gaps[10 + FLUSHES :: FLUSHES] == [part * min(times, most) for times in range(1, 15)]
    assert all(peak <= budget - gap for peak, gap in zip(peaks[14::FLUSHES], gaps[13::FLUSHES], strict=False))
    assert sum("emptied its cache" in record.getMessage() for record in caplog.records) == 1
    training.assert_exact()


@pytest.mark.gpu
@pytest.mark.thorough
@pytest.mark.slow
def test_plans_leave_more_free_until_the_allocator_need_not_empty_its_cache(caplog: pytest.LogCaptureFixture) -> None:
    from chameleon_mm.device.cuda import CudaDevice, expandable_segments

    device = CudaDevice()
    assert not expandable_segments()
    free_unused()
    before_bytes, held_bytes = device.allocated_bytes(), torch.cuda.memory_reserved(device.index)
    model = nn.Sequential(*map(Layer, ROWS)).to(device.torch_device)
    x = torch.randn(ROWS[0] * 256, 1024, device=device.torch_device)

    def step() -> list[Tensor]:
        model(x).sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return gradients

    free_unused()
    device.reset_peaks()
    plain = step()
    room_bytes = int(0.6 * (device.peak_allocated_bytes() - before_bytes))
    flushes, seen = [], []
    free_unused()
    with fraction_of_memory(held_bytes + int(1.12 * room_bytes), device.index):
        session = SwapSession(before_bytes + room_bytes, "1GiB", device, model=model, recompute=False)
        with session.pool, session, caplog.at_level(logging.WARNING):
            for _ in range(STEPS):
                before = device.cache_flushes()
                with session.step():
                    seen.append(step())
                flushes.append(device.cache_flushes() - before)
    assert all(torch.equal(left, right) for gradients in seen for left, right in zip(gradients, plain, strict=True))
    full = [number for number, times in enumerate(flushes) if times]
    assert len(full) >= 2 and full[-1] < STEPS - 2  # in planned steps, and no longer
    told = [record for record in caplog.records if "expandable_segments:True" in record.getMessage()]
    assert len(told) == 1
