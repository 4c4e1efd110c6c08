"""Gaps between blocks that torch's allocator reserves and cannot use: where they fill the device, plans leave more free."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from chameleon_mm.api.session import SwapSession
from chameleon_mm.bench._measure import free_unused
from tests._memory_limit import fraction_of_memory

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


@pytest.mark.gpu
def test_plans_leave_more_free_until_the_allocator_need_not_empty_its_cache(caplog: pytest.LogCaptureFixture) -> None:
    from chameleon_mm.device.cuda import CudaDevice, expandable_segments

    device = CudaDevice()
    assert not expandable_segments()
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
    budget = int(0.6 * device.peak_allocated_bytes())
    flushes, seen = [], []
    free_unused()
    with fraction_of_memory(int(1.12 * budget), device.index):
        session = SwapSession(budget, "1GiB", device, model=model, recompute=False)
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
