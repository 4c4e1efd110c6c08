"""The library's work has names in torch.profiler's traces, and nothing changes when nobody profiles."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import chameleon_mm as cm
from chameleon_mm.swap.calling_thread import annotation
from tests._programs import assert_same, deep, leaf
from tests._random_models import far_ahead

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # the profiler's own, about what it will do in later versions


def trained(*, profiled: bool) -> tuple[list[Tensor], Counter[str]]:
    """Gradients of three steps, and how often each range of ours came in the last one."""
    device = far_ahead()
    torch.manual_seed(0)
    with device.compute():
        x = leaf(device)
        budget = device.allocated_bytes() + 6 * x.nbytes
    gradients, names = [], Counter[str]()
    with cm.SwapSession(budget, "8MiB", device, min_bytes=1024) as session:
        for step in range(3):
            watched = profile(activities=[ProfilerActivity.CPU]) if profiled and step == 2 else nullcontext()
            with watched as profiler, session.step():
                gradients.append(torch.autograd.grad(deep(x).sum(), x)[0])
            if isinstance(profiler, profile):
                names.update(event.name for event in profiler.events() if event.name.startswith("chameleon::"))
    return gradients, names


def test_copies_and_waits_are_ranges_of_the_profilers_trace() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64, requires_grad=True)
    plain = torch.autograd.grad(deep(x).sum(), x)[0]  # plain PyTorch: nothing of ours around it
    unprofiled, nothing = trained(profiled=False)
    gradients, names = trained(profiled=True)
    assert not nothing
    assert_same([plain] * 6, [*unprofiled, *gradients])
    assert min(names[f"chameleon::{what}"] for what in ("swap_out", "swap_in", "reclaim")) > 0
    assert annotation("chameleon::swap_out") is annotation("chameleon::reclaim")  # without a profiler: one that does nothing
