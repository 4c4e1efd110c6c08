"""Hundreds of steps of the demo's model under a tight budget: the bits of the run without, and nothing that grows.

The garbage collector runs, as it does in training: torch leaves small cycles behind in every step, which are not ours.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import dataclass, field

import psutil
import pytest
import torch
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.device.reproducible import reproducible
from chameleon_mm.report.step_history import StepFigures
from chameleon_mm.tools.demo import GPT, GPTConfig
from chameleon_mm.units import MIB

SETTLED = 3
"""Steps after which no step differs: the first allocates gradients and optimizer state, the second prefetches for the first
time, the third repeats the second."""

MANY = 1_400
"""Enough steps to distinguish a few bytes kept in each from glibc's rounding."""

CONFIG = GPTConfig(layers=1, width=16, heads=2, context=16)
BATCH = 8
LEAST_BYTES = 256
"""Storages below it stay. Nearly all activations of this model are above."""


@dataclass
class Soaked:
    """Results of every step and of the run."""

    losses: list[float] = field(default_factory=list)
    """Float32 values: a Python float holds every bit of them."""
    weights: list[Tensor] = field(default_factory=list)
    random_state: Tensor = field(default_factory=lambda: torch.empty(0))
    allocated_bytes: list[int] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    """Peak of each step alone."""
    live_blocks: list[int] = field(default_factory=list)
    reserved_bytes: list[int] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)


def soak(device: cm.SimDevice, steps: int, *, hbm_budget: int | None) -> Soaked:
    done = Soaked()
    torch.manual_seed(5)
    with reproducible(), device.compute():
        model = GPT(CONFIG, device=device.torch_device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        session = None
        if hbm_budget is not None:
            session = cm.SwapSession(hbm_budget, "1MiB", device, LEAST_BYTES, model=model)
        with session or nullcontext():
            for step in range(1, steps + 1):
                device.reset_peaks()
                with session.step() if session else nullcontext():
                    row = torch.randint(0, 256, (BATCH, CONFIG.context + 1), device=device.torch_device)
                    loss = model.loss(row[:, :-1], row[:, 1:])
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    done.losses.append(loss.item())
                    del row, loss
                done.allocated_bytes.append(device.allocated_bytes())
                done.peak_bytes.append(device.peak_allocated_bytes())
                if session is not None:
                    stats = session.pool.stats()
                    done.live_blocks.append(stats.num_live)
                    done.reserved_bytes.append(stats.reserved_bytes)
                    if step in (steps // 2, steps):  # both take longer than a step
                        gc.collect()
                        done.objects.append(sum(type(one) is not StepFigures for one in gc.get_objects()))
                        done.resident_bytes.append(psutil.Process().memory_info().rss)
        if session is not None:
            report = session.report()
            assert (report.steps, report.fallbacks, report.oom_retries, report.budget_misses) == (steps, 0, 0, 0)
            assert report.bytes_swapped_in > 0
    done.weights = [p.detach() for p in model.parameters()]
    done.random_state = torch.get_rng_state()
    return done


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("steps", [400, pytest.param(MANY, marks=pytest.mark.thorough)])
def test_many_steps_leave_nothing_behind(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chameleon_mm.swap.metrics.MAX_SPANS", 10 * steps)  # full at the first look, at 30 copies a step
    plain = soak(cm.SimDevice(), steps, hbm_budget=None)
    # Not less: backward of the loss alone needs three quarters of the unswapped peak, the logits and their gradients.
    budget = max(plain.peak_bytes) * 4 // 5
    swapped = soak(cm.SimDevice(), steps, hbm_budget=budget)

    assert swapped.losses == plain.losses
    assert all(torch.equal(a, b) for a, b in zip(swapped.weights, plain.weights, strict=True))
    assert torch.equal(swapped.random_state, plain.random_state)

    assert max(swapped.peak_bytes) <= budget
    assert set(swapped.allocated_bytes[SETTLED - 1 :]) == {plain.allocated_bytes[SETTLED - 1]}
    assert len(set(swapped.peak_bytes[SETTLED - 1 :])) == 1
    assert set(swapped.live_blocks) == {0}
    assert len(set(swapped.reserved_bytes)) == 1

    # An object per step would add half as many as steps. Figures of the latest 10,000 steps are kept, one object each.
    half, end = swapped.objects
    assert abs(end - half) < 100, f"{half}, then {end} objects"
    if steps < MANY:
        return
    # 700 steps pass from look to look. 64 bytes kept of every saved tensor, of which a step has 39, would be 64 B * 39 * 700 =
    # 1.7 MB. The run itself keeps six numbers a step, of 32 bytes and 8 for their places in lists: 0.1 MB; the rest is glibc's
    # granularity.
    grown = swapped.resident_bytes[1] - swapped.resident_bytes[0]
    assert grown < MIB, f"{swapped.resident_bytes}"
