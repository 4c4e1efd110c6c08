"""Copies over the link that a program makes itself: recorded, left room for by plans, and counted apart from the session's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from random import Random
from statistics import median

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.bench.training import fresh_device
from chameleon_mm.device import SimDevice
from chameleon_mm.plan.planner import generate_plan
from chameleon_mm.plan.simulate import simulate
from chameleon_mm.replayable import DEFAULT
from chameleon_mm.units import MIB
from tests._oracles import timed_one_by_one
from tests._traces import H200_LINK, between, random_step

pytestmark = pytest.mark.usefixtures("short_search")

LAYERS, WIDTH, ROWS, STEPS = 10, 64, 1024, 16
PART = MIB // 4
"""Elements of float32, 1 MiB, that each layer reads from the host and writes there."""


def by_copy(here: Tensor, source: Tensor) -> None:
    here.copy_(source, non_blocking=True)


def by_list(here: Tensor, source: Tensor) -> None:
    torch._foreach_copy_(list(here.chunk(2)), list(source.chunk(2)), non_blocking=True)  # as FSDP2 and optimizers copy


def trained(
    device: SimDevice | None, session: cm.SwapSession | None, copy: Callable[[Tensor, Tensor], None] = by_copy
) -> list[Tensor]:
    """Losses, weights, and what each layer wrote to the host: in pinned memory of `device`, or plain tensors without one."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(LAYERS)]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    host = [device.alloc_pinned(4 * PART).view(torch.float32) if device else torch.empty(PART) for _ in range(LAYERS)]
    for part in host:
        part.copy_(torch.randn(PART))
    losses = []
    with session or nullcontext():
        for _ in range(STEPS):
            with session.step() if session else nullcontext():
                x = torch.randn(ROWS, WIDTH)
                for weight, part in zip(weights, host, strict=True):
                    x = F.gelu(x @ weight)
                    here = torch.empty(PART)
                    copy(here, part)
                    copy(part, here * 0.5)
                    x = x + here[:WIDTH] * 0.01
                    x = x * x.sigmoid()
                loss = x.square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach().clone())
    return [*losses, *(weight.detach() for weight in weights), *(part.clone() for part in host)]


@pytest.mark.parametrize("copy", [by_copy, by_list])
@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.ci)])
def test_a_program_that_copies_itself_has_its_bits_and_plans_leave_it_the_link(
    recompute: bool, copy: Callable[[Tensor, Tensor], None]
) -> None:
    device = fresh_device("sim")  # its host takes no time: what is late is late by the link
    assert isinstance(device, SimDevice)
    session = cm.SwapSession("6.7MiB", "64MiB", device, min_bytes=1024, recompute=recompute)  # half of what the step takes
    swapped, plain = trained(device, session, copy), trained(None, None)
    assert all(torch.equal(one, other) for one, other in zip(swapped, plain, strict=True))
    report = session.report()
    assert report.bytes_swapped_out > 0
    assert report.budget_held
    assert report.program_bytes_out == report.program_bytes_back == LAYERS * MIB
    assert ("the program's own copies", "10.0 MiB out, 10.0 MiB back a step") in report.rows()
    assert session._adaptation is not None and session._adaptation.latest is not None
    planned = session._adaptation.latest
    trial = next(trial for trial in planned.trials if trial.times_us)
    assert planned.times_corrected == 0
    assert median(trial.times_us) == pytest.approx(trial.program.plan.step_us, rel=0.02)
    assert trial.program_waits_us > 0


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 1.0), recompute=st.booleans())
def test_plans_with_own_copies_are_timed_as_carried_out_one_by_one(seed: int, share: float, recompute: bool) -> None:
    trace = random_step(random := Random(seed))
    # Copies at some of the operators, some both ways, small and of several pieces.
    out, back = np.array(random.choices((0, 0, 512, MIB, 40 * MIB), k=2 * len(trace.op_us))).reshape(2, -1)
    trace = replace(trace, op_out_bytes=out, op_back_bytes=back)
    plan = generate_plan(trace, between(trace, share), None, H200_LINK, drafts=30, recompute=DEFAULT if recompute else ())
    told = simulate(trace, plan, H200_LINK)
    assert told.step_us == pytest.approx(plan.step_us, rel=1e-9, abs=1e-6)
    if not plan.recomputed and not plan.held:
        one_by_one = timed_one_by_one(trace, plan, H200_LINK)
        assert told.tick_us.tolist() == pytest.approx(one_by_one.tick_us, rel=1e-9, abs=1e-6)
        assert told.step_us == pytest.approx(one_by_one.step_us, rel=1e-9, abs=1e-6)
