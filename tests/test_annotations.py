"""The library's work has names in torch.profiler's traces, and nothing changes when nobody profiles."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import chameleon_mm as cm
from chameleon_mm.swap.calling_thread import annotation
from tests._random_models import far_ahead

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # the profiler's own, about what it will do in later versions


def gradient_of(x: torch.Tensor) -> torch.Tensor:
    y = x
    for _ in range(8):
        y = torch.tanh(y * 1.5)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    return gradient


def trained(*, profiled: bool) -> tuple[list[torch.Tensor], Counter[str]]:
    """Gradients of three steps, and how often each range of ours came in the last one."""
    device = far_ahead()
    torch.manual_seed(0)
    with device.compute():
        x = torch.randn(64, 64, requires_grad=True)
        budget = device.allocated_bytes() + 6 * x.nbytes
    gradients, names = [], Counter[str]()
    with cm.SwapSession(budget, "8MiB", device, min_bytes=1024) as session:
        for step in range(3):
            watched = profile(activities=[ProfilerActivity.CPU]) if profiled and step == 2 else nullcontext()
            with watched as profiler, session.step():
                gradients.append(gradient_of(x))
            if isinstance(profiler, profile):
                names.update(event.name for event in profiler.events() if event.name.startswith("chameleon::"))
    return gradients, names


def test_copies_and_waits_are_ranges_of_the_profilers_trace() -> None:
    torch.manual_seed(0)
    plain = gradient_of(torch.randn(64, 64, requires_grad=True))  # plain PyTorch: nothing of ours around it
    unprofiled, nothing = trained(profiled=False)
    gradients, names = trained(profiled=True)
    assert not nothing
    assert all(torch.equal(gradient, plain) for gradient in (*unprofiled, *gradients))
    assert names["chameleon::swap_out"] > 0
    assert names["chameleon::swap_in"] > 0
    assert names["chameleon::reclaim"] > 0


def test_without_a_profiler_a_range_is_one_object_that_does_nothing() -> None:
    assert annotation("chameleon::swap_out") is annotation("chameleon::reclaim")
