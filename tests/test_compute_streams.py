"""Compute streams other than the default: forward on one and backward on another, two at once, one per micro-batch.

    with on(device, side): side comes after main; work; main comes after side
    the bits of the run on one stream; no SimRaceError; no block left

On a GPU autograd runs the backward of an op on the op's own stream; on the simulator it runs where it is called, so there the
user's waits are in the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.device.reproducible import reproducible
from tests._ordering import SLOW_LINK
from tests._programs import assert_same, deep, gradient, leaf, opened

pytestmark = pytest.mark.usefixtures("no_gc")


@pytest.fixture(params=["fast link", "slow link", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    if request.param == "cuda":
        return cm.CudaDevice()
    return cm.SimDevice(SLOW_LINK if request.param == "slow link" else "h200")


class Side:
    """A second compute stream of either kind of device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream: Any = device.new_compute_stream("side") if isinstance(device, cm.SimDevice) else device.new_stream("side")

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this stream current. Its work comes after all present work of the stream that was current."""
        self._stream.wait(self._device.current_stream().record())
        with (
            self._device.stream(self._stream) if isinstance(self._device, cm.SimDevice) else torch.cuda.stream(self._stream.raw)
        ):
            yield

    def follows(self) -> None:
        """Order later work of this stream after all present work of the current stream."""
        self._stream.wait(self._device.current_stream().record())

    def joined(self) -> None:
        """Order later work of the current stream after all present work of this stream."""
        self._device.current_stream().wait(self._stream.record())


@pytest.mark.parametrize("forward_aside", [True, False], ids=["forward aside", "backward aside"])
def test_forward_on_one_stream_and_backward_on_another(forward_aside: bool, device: Device) -> None:
    x = leaf(device)
    expected = gradient(device, x)
    session = opened(device)
    with session:
        side = Side(device)
        for _ in range(3):
            with session.step():
                if forward_aside:
                    with side.current():
                        out = deep(x).sum()
                    side.joined()
                    (got,) = torch.autograd.grad(out, x, retain_graph=True)
                else:
                    out = deep(x).sum()
                    with side.current():
                        (got,) = torch.autograd.grad(out, x, retain_graph=True)
                    side.joined()
                side.follows()  # each stream gets back its own memory, which the other may have used
                del out
                assert torch.equal(got, expected)
    assert session.report().bytes_swapped_in > 0
    assert session.pool.stats().num_live == 0


def test_two_streams_taking_turns(device: Device) -> None:
    """Each stream has a graph of its own in flight. The hooks of one advance the other's copies."""
    x, y = leaf(device), leaf(device)
    expected = [gradient(device, t) for t in (x, y)]
    session = opened(device)
    with session:
        side = Side(device)
        for _ in range(3):
            with session.step():
                on_main = torch.tanh(x * 1.5)
                with side.current():
                    aside = torch.tanh(y * 1.5)
                on_main = on_main.exp() - 1
                with side.current():
                    aside = aside.exp() - 1
                for _ in range(3):
                    on_main = torch.tanh(on_main * 1.5).exp() - 1
                    with side.current():
                        aside = torch.tanh(aside * 1.5).exp() - 1
                (first,) = torch.autograd.grad(on_main.sum(), x)
                with side.current():
                    (second,) = torch.autograd.grad(aside.sum(), y)
                del on_main, aside
                side.joined()
                assert torch.equal(first, expected[0])
                assert torch.equal(second, expected[1])
                del first, second
    assert session.report().bytes_swapped_in > 0
    assert session.pool.stats().num_live == 0


def trained(device: Device, session: cm.SwapSession | None, *, streams: int) -> list[Tensor]:
    """Three steps of three micro-batches, each on one of the streams; gradients are added up on the main one."""
    torch.manual_seed(6)
    where = device.torch_device
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32)).to(where)
    parameters = list(model.parameters())
    batches = [torch.randn(16, 32, device=where) for _ in range(3)]
    losses: list[Tensor] = []
    sides = [Side(device) for _ in range(streams)]
    for _ in range(3):
        with session.step() if session else device.compute():
            gradients: list[tuple[Tensor, ...]] = []
            for number, batch in enumerate(batches):
                with sides[number % streams].current() if sides else nullcontext():
                    loss = (model(batch) - batch).square().mean()
                    gradients.append(torch.autograd.grad(loss, parameters))
                    losses.append(loss.detach())
                    del loss
            for side in sides:
                side.joined()
            with torch.no_grad():
                for p, *parts in zip(parameters, *gradients, strict=True):
                    p.sub_(sum(parts), alpha=0.1)
                    del parts
            for side in sides:
                side.follows()  # the stream's next micro-batch reads data written here, and gets back memory dropped here
            del gradients, p
    return [*losses, *(p.detach() for p in parameters)]


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_a_stream_per_micro_batch(streams: int, device: Device) -> None:
    session = opened(device)
    with reproducible():
        expected = trained(device, None, streams=0)
        with session:
            got = trained(device, session, streams=streams)
    device.synchronize()
    assert_same(expected, got)
    assert session.report().bytes_swapped_in > 0
    assert session.pool.stats().num_live == 0
