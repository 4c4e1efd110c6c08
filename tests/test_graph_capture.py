"""CUDA graphs: while a stream is captured, swapping stays out of it. What is saved stays, and nothing is asked of the device.

A copy in a capture would be replayed without the host that has to follow it; an event query or a host wait ends a capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.device.sim.machine import SimEvent, SimStream
from tests._programs import assert_same, deep, gradient, opened

pytestmark = pytest.mark.usefixtures("no_gc")


class Captures(cm.SimDevice):
    """Simulated device whose test controls the capture. Records the calls made to it meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.is_capturing = False
        self.asked: list[str] = []

    def capturing(self) -> bool:
        return self.is_capturing


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    device = Captures()

    def noted(kind: type, name: str) -> None:
        original = getattr(kind, name)

        def note(self: object, *args: object, **kwargs: object) -> Any:
            if device.is_capturing:
                device.asked.append(f"{kind.__name__}.{name}")
            return original(self, *args, **kwargs)

        monkeypatch.setattr(kind, name, note)

    for name in ("alloc", "free", "copy", "record", "wait"):
        noted(SimStream, name)
    for name in ("query", "synchronize"):
        noted(SimEvent, name)
    for name in ("alloc_pinned", "alloc_pageable", "free_pinned", "allocated_bytes", "read_memory", "synchronize"):
        noted(cm.SimDevice, name)
    device.is_capturing = True  # the notes see every call
    device.read_memory()
    device.current_stream().record().query()
    assert device.asked == ["SimDevice.read_memory", "SimStream.record", "SimEvent.query"]
    device.asked.clear()
    device.is_capturing = False
    return device


@pytest.fixture
def x() -> Tensor:
    return torch.randn(64, 64, requires_grad=True)


@pytest.fixture
def expected(captures: Captures, x: Tensor) -> Tensor:
    return gradient(captures, x)


@pytest.fixture
def session(captures: Captures, expected: Tensor) -> Iterator[cm.SwapSession]:
    """At its end no block of it is live, and the device was not queried in a capture."""
    session = opened(captures)
    yield session
    assert captures.asked == []
    assert session.pool.stats().num_live == 0


def test_what_is_saved_in_a_capture_stays_and_nothing_is_asked(
    captures: Captures, x: Tensor, expected: Tensor, session: cm.SwapSession
) -> None:
    with session, session.step():
        captures.is_capturing = True
        (got,) = torch.autograd.grad(deep(x).sum(), x)
        captures.is_capturing = False
    assert torch.equal(got, expected)
    report = session.report()
    assert set(report.kept_by_reason) == {"capturing"}
    assert report.bytes_swapped_out == 0


def test_a_capture_in_the_middle_of_a_step(captures: Captures, x: Tensor, expected: Tensor, session: cm.SwapSession) -> None:
    """Copies of tensors saved before are pending: they continue when the capture is over."""
    with session:
        for _ in range(2):  # the second step has learned an order, and prefetches
            with session.step():
                before = deep(x).sum()
                captures.is_capturing = True
                (inside,) = torch.autograd.grad(deep(x).sum(), x)
                captures.is_capturing = False
                after = deep(x).sum()
                assert torch.equal(inside, expected)
                assert all(torch.equal(torch.autograd.grad(out, x)[0], expected) for out in (after, before))
                del before, after
    assert session.report().bytes_swapped_in > 0


def test_a_step_with_a_capture_in_it_makes_no_plan_and_those_without_do(
    captures: Captures, x: Tensor, expected: Tensor, session: cm.SwapSession
) -> None:
    """No hooks see the captured operators, so the recorded step is not the one that follows."""
    plans = []
    with session:
        for step in range(5):
            with session.step():
                out = deep(x).sum()
                if step == 0:
                    captures.is_capturing = True
                    assert torch.equal(torch.autograd.grad(deep(x).sum(), x)[0], expected)
                    captures.is_capturing = False
                assert torch.equal(torch.autograd.grad(out, x)[0], expected)
                del out
            plans.append(session.report().plans > 0)
    assert plans == [False, True, True, True, True]
    report = session.report()
    assert (report.detailed_steps, report.plan_cache_hits) == (1, 3)


@pytest.mark.parametrize("begins", ["before the step", "in it"])
@pytest.mark.parametrize("ends", ["in it", "after it"])
def test_a_capture_that_does_not_begin_or_end_with_its_step(
    begins: str, ends: str, captures: Captures, x: Tensor, expected: Tensor, session: cm.SwapSession
) -> None:
    with session:
        captures.is_capturing = begins == "before the step"
        with session.step():
            captures.is_capturing = True
            assert torch.equal(torch.autograd.grad(deep(x).sum(), x)[0], expected)
            captures.is_capturing = ends == "after it"
            if not captures.is_capturing:
                assert torch.equal(torch.autograd.grad(deep(x).sum(), x)[0], expected)
        captures.is_capturing = False
        for _ in range(3):
            with session.step():
                assert torch.equal(torch.autograd.grad(deep(x).sum(), x)[0], expected)
    report = session.report()
    assert (report.detailed_steps, report.plan_cache_hits) == (1, 2)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_graph_dropped_in_a_capture_gives_its_blocks_back_after_it(
    captures: Captures, x: Tensor, session: cm.SwapSession
) -> None:
    with session, session.step():
        out = deep(x)
        assert session.pool.stats().num_live > 0
        captures.is_capturing = True
        del out
        captures.is_capturing = False
        deep(x).sum().backward()


def test_a_backward_captured_without_its_forward_is_refused_and_can_be_done_after(
    captures: Captures, x: Tensor, expected: Tensor, session: cm.SwapSession
) -> None:
    with session, session.step():
        out = deep(x).sum()
        captures.is_capturing = True
        with pytest.raises(RuntimeError, match="capture both together"):
            torch.autograd.grad(out, x, retain_graph=True)
        captures.is_capturing = False
        assert torch.equal(torch.autograd.grad(out, x)[0], expected)
        del out


def test_a_write_to_what_was_saved_in_a_capture_raises_as_in_eager(captures: Captures) -> None:
    x = torch.randn(8, requires_grad=True)
    manager = cm.save_on_cpu(pool=cm.PinnedPool("1MiB", device=captures), min_bytes=0)
    with captures.compute(), manager:
        captures.is_capturing = True
        y = x * 2
        out = y.sin()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


# --- on a GPU


def trained_by_replays(device: Device, session: cm.SwapSession | None) -> list[Tensor]:
    """Warm up, capture forward and backward once, replay them on new batches; every loss and the last weights.

    After torch's own recipe: warm-up on a side stream, gradients and the batch at fixed addresses.
    """
    torch.manual_seed(4)
    where = device.torch_device
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64)).to(where)
    batches = [torch.randn(32, 64, device=where) for _ in range(4)]
    batch = torch.empty_like(batches[0])
    losses: list[Tensor] = []
    with session or nullcontext():
        side = torch.cuda.Stream(where)
        side.wait_stream(torch.cuda.current_stream(where))
        with torch.cuda.stream(side):
            for _ in range(3):
                with session.step() if session else nullcontext():
                    batch.copy_(batches[0])
                    model.zero_grad(set_to_none=True)
                    (model(batch) - batch).square().mean().backward()
        torch.cuda.current_stream(where).wait_stream(side)
        model.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with session.step() if session else nullcontext():
            with torch.cuda.graph(graph):
                loss = (model(batch) - batch).square().mean()
                loss.backward()
            for new in batches:
                batch.copy_(new)
                graph.replay()
                losses.append(loss.detach().clone())
                with torch.no_grad():
                    for p in model.parameters():
                        assert p.grad is not None
                        p.sub_(p.grad, alpha=0.1)
        with session.step() if session else nullcontext():  # and eagerly again
            model.zero_grad(set_to_none=True)
            last = (model(batch) - batch).square().mean()
            last.backward()
            losses.append(last.detach())
            del last
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    torch.cuda.synchronize(where)
    return [*losses, *gradients, *(p.detach() for p in model.parameters())]


@pytest.mark.gpu
def test_a_captured_step_replays_bit_identically_inside_a_session() -> None:
    device = cm.CudaDevice()
    expected = trained_by_replays(device, None)
    session = opened(device)
    assert_same(expected, trained_by_replays(device, session))
    report = session.report()
    assert report.kept_by_reason["capturing"] > 0
    assert report.bytes_swapped_in > 0  # in the steps that were not captured
    assert session.pool.stats().num_live == 0
