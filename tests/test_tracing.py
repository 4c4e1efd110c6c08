"""Tracers inside a session: fake tensors and traced graphs never reach the pool, and what is real goes on.

out = forward of real tensors              # copies pending
a tracer runs a forward and backward       # its tensors stay, its graph is the one without hooks
backward of the real ones                  # the bits of the run without a tracer
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import chameleon_mm as cm
from chameleon_mm.units import MIB
from tests._fakes import Unwatched
from tests._programs import deep

pytestmark = pytest.mark.usefixtures("no_gc")


def fake(x: Tensor) -> object:
    with FakeTensorMode() as mode:
        t = mode.from_tensor(x).requires_grad_()
        deep(t).sum().backward()
        assert t.grad is not None
        return t.grad.shape


def traced(tracing_mode: Literal["real", "fake", "symbolic"]) -> Callable[[Tensor], object]:
    def trace(x: Tensor) -> object:
        t = x.clone().requires_grad_()
        graph = make_fx(lambda t: torch.autograd.grad(deep(t).sum(), t)[0], tracing_mode=tracing_mode)(t)
        return [(node.op, str(node.target)) for node in graph.graph.nodes]

    return trace


TRACERS: dict[str, Callable[[Tensor], object]] = {
    "fake tensors": fake,
    "make_fx, real": traced("real"),
    "make_fx, fake": traced("fake"),
    "make_fx, symbolic": traced("symbolic"),
}


@pytest.mark.parametrize("device", [cm.SimDevice, Unwatched], ids=["simulated", "unwatched"])
@pytest.mark.parametrize("name", TRACERS)
def test_a_tracer_in_the_middle_of_a_step(name: str, device: Callable[[], cm.SimDevice]) -> None:
    sim = device()
    x = torch.randn(64, 64, requires_grad=True)
    d = x.detach()
    with sim.compute():
        (expected,) = torch.autograd.grad(deep(x).sum(), x)
        seen = TRACERS[name](d)
    session = cm.SwapSession(sim.allocated_bytes() + 16 * MIB, "8MiB", sim, min_bytes=0)
    with session:
        for _ in range(2):
            with session.step():
                out = deep(x).sum()
                assert TRACERS[name](d) == seen
                assert torch.equal(torch.autograd.grad(out, x)[0], expected)
                del out
    assert session.report().kept_by_reason["tracing"] > 0
    assert session.report().bytes_swapped_in > 0
    assert session.pool.stats().num_live == 0
