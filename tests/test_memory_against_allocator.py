"""What the simulator says of a training step's memory, against torch's caching allocator in the CUDA build.

The same step makes the same tensors on both, in the same order, and both round each up to 512 bytes. So without swapping

    simulated peak - a <= allocated peak <= simulated peak + b
    a = the most that an operator holds inside itself, as simulated  + what operators that CUDA lacks made of the simulated peak
    b = the most that an operator holds inside itself, on CUDA       + what operators that the CPU lacks made of the other peak

each taken from a recorded step, none chosen. With swapping each session has a plan of its own, since times differ: its peak is
the plan's, less at most what operators hold inside (a plan takes that at its most), and both lie between what can never leave
and the budget. Peaks are what a step adds to what was there before it.
"""

from __future__ import annotations

from functools import cache

import pytest
from torch import nn

from chameleon_mm.adaptive.planning import SLACK_PART
from chameleon_mm.device import SimDevice
from chameleon_mm.device.cuda import CudaDevice
from chameleon_mm.units import allocated_size
from tests._memory_models import MODELS
from tests._memory_steps import Seen, bounds, foreign_names, inner_bytes, swapped, unswapped

pytestmark = pytest.mark.gpu

SAME_OPERATORS = ("mlp", "gpt", "conv", "recurrent")
"""Models that run as the same operators on the simulator, which is a CPU, and on CUDA."""


@cache
def pair(name: str) -> tuple[Seen, Seen]:
    return unswapped(SimDevice(), MODELS[name]), unswapped(CudaDevice(), MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_peaks_without_swapping_agree(name: str) -> None:
    simulated, allocated = pair(name)
    assert simulated.trace is not None
    assert allocated.trace is not None
    low, high = bounds(simulated.trace, allocated.trace)
    assert simulated.above_bytes + low <= allocated.above_bytes <= simulated.above_bytes + high
    if name in SAME_OPERATORS:
        # Nothing is forgiven but what operators hold inside themselves.
        assert (-low, high) == (inner_bytes(simulated.trace), inner_bytes(allocated.trace))


@pytest.mark.parametrize("name", SAME_OPERATORS)
def test_before_a_step_only_the_step_counts_differ(name: str) -> None:
    """AdamW keeps its number of steps, one tensor for each parameter, on the host: in the simulator all of the host is its."""
    simulated, allocated = pair(name)
    parameters = sum(isinstance(p, nn.Parameter) for p in MODELS[name]().model.parameters())
    assert simulated.training_bytes - allocated.training_bytes == parameters * allocated_size(4)


def test_dropout_is_known_to_differ() -> None:
    """CUDA has an operator for it whose mask is of bools; on a CPU torch draws a mask of floats, and saves that."""
    simulated, allocated = pair("gpt, dropout")
    assert simulated.trace is not None
    assert allocated.trace is not None
    assert "aten::native_dropout" in foreign_names(allocated.trace, simulated.trace)
    assert "aten::bernoulli_.float" in foreign_names(simulated.trace, allocated.trace)
    assert simulated.above_bytes > allocated.above_bytes


@pytest.mark.slow
@pytest.mark.parametrize("share", [pytest.param(0.5, marks=pytest.mark.thorough), 0.25], ids=["half", "quarter"])
@pytest.mark.parametrize("name", MODELS)
def test_budgets_hold_on_the_real_allocator(name: str, share: float) -> None:
    simulated, allocated = pair(name)
    # Or the smallest for which there is a plan, and a part more: the caching allocator may hand out more than is asked for.
    least = max(simulated.least_above_bytes, allocated.least_above_bytes) + simulated.above_bytes // SLACK_PART
    above = max(least, int(share * simulated.above_bytes))
    for device, plain in ((SimDevice(), simulated), (CudaDevice(), allocated)):
        seen = swapped(device, MODELS[name], above)
        assert plain.trace is not None
        assert seen.budget_bytes is not None
        assert seen.planned_peak_bytes is not None, "expected steps that follow a plan"
        inner = inner_bytes(plain.trace)
        slack = min(device.block_slack_bytes, seen.budget_bytes - seen.planned_peak_bytes)
        assert seen.planned_peak_bytes - inner <= seen.peak_bytes <= seen.planned_peak_bytes + slack <= seen.budget_bytes
        assert plain.least_above_bytes - inner <= seen.above_bytes <= above
