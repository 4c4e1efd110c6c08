"""When no more host memory can be pinned: the device while the budget allows it, then pageable memory, then an error.

A stack of layers saves more than the host budget holds; the budget of the device is wide, narrow, or narrow beside a full host.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.pool.pool import PinnedPool
from chameleon_mm.units import MIB
from tests._programs import assert_same

pytestmark = pytest.mark.usefixtures("no_gc")

HOST_BUDGET = 4 * MIB
STEPS = 3


def train(device: cm.SimDevice, session: cm.SwapSession | None) -> tuple[list[Tensor], int]:
    """Losses of every step, and the peak of device memory."""
    torch.manual_seed(0)
    losses = []
    with device.compute():
        model = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(128, 128), nn.GELU())))
        batch = torch.randn(2048, 128)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        device.reset_peaks()
        with session or nullcontext():
            for _ in range(STEPS):
                with session.step() if session else nullcontext():
                    loss = model(batch).square().mean()
                    loss.backward()
                    losses.append(loss.detach())
                    del loss
                    optimizer.step()
                    optimizer.zero_grad()
    return losses, device.peak_allocated_bytes()


def swapping(device: cm.SimDevice, hbm_budget: int) -> cm.SwapSession:
    return cm.SwapSession(hbm_budget, HOST_BUDGET, device, min_bytes="64KiB")


@pytest.fixture
def unswapped() -> tuple[list[Tensor], int]:
    return train(cm.SimDevice(), None)


def test_a_wide_budget_keeps_on_the_device_what_the_host_does_not_take(
    sim: cm.SimDevice, unswapped: tuple[list[Tensor], int]
) -> None:
    session = swapping(sim, 2 * unswapped[1])
    assert_same(train(sim, session)[0], unswapped[0])
    report = session.report()
    assert report.fallbacks > 0
    assert report.pageable_swap_outs == 0
    assert report.peak_host_bytes <= HOST_BUDGET


def test_a_narrow_budget_sends_it_to_pageable_memory(sim: cm.SimDevice, unswapped: tuple[list[Tensor], int]) -> None:
    budget = unswapped[1] // 2
    session = swapping(sim, budget)
    losses, peak = train(sim, session)
    assert_same(losses, unswapped[0])
    assert peak <= budget
    report = session.report()
    assert report.pageable_swap_outs > 0
    assert report.budget_misses == 0
    stats = session.pool.stats()
    assert (stats.num_live, stats.pageable_bytes) == (0, 0)
    assert stats.peak_reserved_bytes <= HOST_BUDGET


def test_with_neither_the_error_says_so_and_nothing_leaks(
    sim: cm.SimDevice, unswapped: tuple[list[Tensor], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(pool: PinnedPool, nbytes: int, stream: object = None) -> None:
        raise cm.HostMemoryExhausted(f"host memory: asked for {nbytes} bytes, which this machine does not give")

    session = swapping(sim, unswapped[1] // 2)
    before = sim.allocated_bytes()
    with monkeypatch.context() as host:
        host.setattr(PinnedPool, "allocate_pageable", none_left)
        with pytest.raises(cm.HostMemoryExhausted, match=r"budget of \d+, but the host takes no more.*raise hbm_budget"):
            train(sim, session)
    sim.synchronize()
    assert session.pool.stats().num_live == 0
    assert sim.allocated_bytes() == before
    assert_same(train(sim, swapping(sim, unswapped[1] // 2))[0], unswapped[0])  # the host has room again
