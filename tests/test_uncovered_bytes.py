"""Copies out of storages that are saved in part, while their owner still writes the rest.

    a, b = product.unsafe_chunk(2, 1); use(a); b.sigmoid_(); use(b)     # a is saved, then b is written, under another counter

The link is slow, so that copies wait in their queue while the model goes on. Every program has the bits of plain PyTorch, and
no access is without an order: the simulator would raise `SimRaceError`, CUDA's stand-in would name both sides.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.device import SPECS
from chameleon_mm.device.protocols import Device
from chameleon_mm.plan.rule import Limits
from chameleon_mm.swap.handles import SavedBytes
from chameleon_mm.swap.slot import Slot
from tests._programs import assert_same
from tests.cuda_stand_in import control
from tests.observed import SimRaceError
from tests.test_shared_storages import FillsItsSlice

pytestmark = pytest.mark.usefixtures("no_gc")

ROWS, WIDTH, LAYERS = 576, 256, 6

RATES_GBPS = (1.0, 13.0)
"""Rates of a link at which copies wait in their queue until the end, or a few operators long."""

Layer = Callable[[Tensor, Tensor], Tensor]
"""Next activation, (ROWS, WIDTH), from one and a weight, (WIDTH, 3 * WIDTH)."""


def gates_in_turn(x: Tensor, w: Tensor) -> Tensor:
    """Compute the gates as torch's GRU does."""
    r, z, n = (x @ w).unsafe_chunk(3, 1)
    r = r.sigmoid_()
    z = z.sigmoid_()
    n = n.add_(x).mul_(0.5).tanh_()
    return (1 - z) * n + z * x + r * 0.1


def one_part_written_late(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (x @ w).unsafe_split(WIDTH, 1)
    score = q.sin() * k.cos()
    for _ in range(4):
        score = score.sin()
    return score + v.sigmoid_().tanh()


def half_after_the_other(x: Tensor, w: Tensor) -> Tensor:
    a, b = (x @ w[:, : 2 * WIDTH]).unsafe_chunk(2, 1)
    saved = a * a
    for _ in range(4):
        saved = saved.sin()
    return saved * b.sigmoid_()


def rows_in_turn(x: Tensor, w: Tensor) -> Tensor:
    """Parts that are ranges of bytes."""
    parts = (x @ w[:, :WIDTH]).unsafe_chunk(4, 0)
    return torch.cat([part.tanh_().sin().sin() for part in parts])


def chunked(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (x @ w).chunk(3, 1)
    return torch.softmax(q @ k.t(), 1) @ v


def unbound(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (x @ w).view(ROWS, 3, WIDTH).unbind(1)
    return F.scaled_dot_product_attention(q, k, v)


def buffer_part_by_part(x: Tensor, w: Tensor) -> Tensor:
    buffer = torch.zeros(3, ROWS, WIDTH, device=x.device)
    for number in range(3):
        x = FillsItsSlice.apply(x, buffer, number).sin()  # type: ignore[no-untyped-call]  # torch annotates no apply
    return x @ w[:, :WIDTH]


LAYER_PROGRAMS: dict[str, Layer] = {
    "gates in turn": gates_in_turn,
    "one part late": one_part_written_late,
    "half after the other": half_after_the_other,
    "rows in turn": rows_in_turn,
    "chunk": chunked,
    "unbind": unbound,
    "buffer": buffer_part_by_part,
}


class Layers(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, 3 * WIDTH) * 0.2) for _ in range(LAYERS)])
        self._layer = layer

    def forward(self, x: Tensor) -> Tensor:
        for w in self.weights:
            x = self._layer(x, w)
        return x


class Recurrent(nn.Module):
    def __init__(self, make: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        self.cell = make(WIDTH, WIDTH, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.backends.cudnn.flags(enabled=False):
            out: Tensor = self.cell(x.view(LAYERS, -1, WIDTH))[0]
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: (lambda layer=layer: Layers(layer)) for name, layer in LAYER_PROGRAMS.items()},  # type: ignore[misc]  # a default
    "GRU": lambda: Recurrent(nn.GRU),
    "LSTM": lambda: Recurrent(nn.LSTM),
}


def slow_sim(rate_gbps: float) -> cm.SimDevice:
    return cm.SimDevice(dataclasses.replace(SPECS["h200"], h2d_gbps=rate_gbps, d2h_gbps=rate_gbps, duplex_gbps=1.5 * rate_gbps))


def slow_devices(device: Device) -> list[Device]:
    return [slow_sim(rate) for rate in RATES_GBPS] if device.simulated else [device]


def model_on(device: Device, name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().to(device.torch_device)


def step(model: nn.Module, device: Device, hooks: Callable[[], AbstractContextManager[Any]] = nullcontext) -> list[Tensor]:
    """Loss and gradients of a step."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(device.torch_device)
    with hooks():
        loss = model(x).square().sum()
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return found


def steps(model: nn.Module, device: Device, pool: cm.PinnedPool | None = None, *, num: int = 2) -> list[list[Tensor]]:
    """Return the results of `num` steps under `save_on_cpu`. In the first, nothing is known, and no copy waits in its queue."""
    hooks = cm.save_on_cpu(device=device, min_bytes=0, pool=pool)
    return [step(model, device, lambda: hooks) for _ in range(num)]


def plain(device: Device, name: str) -> list[Tensor]:
    return [t.cpu() for t in step(model_on(device, name), device)]


@pytest.mark.ci
@pytest.mark.parametrize("name", MODELS)
def test_save_on_cpu_has_eagers_bits(name: str, device: Device) -> None:
    expected = plain(device, name)
    for slow in slow_devices(device):
        with cm.PinnedPool("256MiB", device=slow) as pool:
            with slow.compute():
                both = steps(model_on(slow, name), slow, pool)
                slow.synchronize()
            for got in both:
                assert_same(expected, [t.cpu() for t in got])
            assert pool.stats().num_live == 0


@pytest.mark.ci
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_every_step_of_a_session_has_eagers_bits(name: str, recompute: bool, device: Device) -> None:
    expected = plain(device, name)
    slow = slow_devices(device)[0]

    def train(budget: int | str) -> cm.SwapReport:
        with slow.compute():
            model = model_on(slow, name)
            with cm.SwapSession(budget, "256MiB", slow, 0, model=model, recompute=recompute) as session:
                for _ in range(4):
                    with session.step():
                        got = step(model, slow)
                    assert_same(expected, [t.cpu() for t in got])
        return session.report()

    peak = train("1GiB").peak_hbm_bytes
    report = train(int(0.8 * peak))
    assert report.bytes_swapped_out + report.bytes_recomputed > 0


def test_what_is_restored_does_not_undo_what_its_owner_wrote(sim: cm.SimDevice) -> None:
    """The owner holds the storage and writes the other half after the copy out and before the copy back."""
    with cm.PinnedPool("256MiB", device=sim) as pool, sim.compute():
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        with cm.save_on_cpu(device=sim, min_bytes=0, pool=pool):
            product = x * 2
            a, b = product.unsafe_chunk(2, 1)
            loss = a.sin().sum()
            other = b.detach()
            loss = loss.sin().sin()
            sim.synchronize()
            other.fill_(7)
        loss.backward()
        assert bool((other == 7).all()) and bool((product[:, WIDTH // 2 :] == 7).all())
        first = x.detach()[:, : WIDTH // 2] * 2
        assert torch.equal(product.detach()[:, : WIDTH // 2], first)
        sim.synchronize()
        del product, a, b, other, loss
    assert x.grad is not None


# --- rules, broken


def _wait_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slot, "has_uncovered", lambda self: False)


def whole(y: Tensor) -> tuple[Tensor, Tensor]:
    y = y.exp()
    return y, y


def half(y: Tensor) -> tuple[Tensor, Tensor]:
    """Save one half of a product. Return the other, which has a counter of its own."""
    a, b = (y * 1).unsafe_chunk(2)
    return torch.cat((a.sin(), a)), b


def saved_and_written(
    device: Device, write: Callable[[Tensor], object], num_between: int, save: Callable[[Tensor], tuple[Tensor, Tensor]] = whole
) -> Tensor:
    """Twelve tensors of which `save` saves all or a half. What it returns of every other one is written four saves later, when
    its copy may wait in the queue.

    In the second of two passes: in the first nothing is known, and copies are waited for."""
    hooks = cm.save_on_cpu(device=device, min_bytes=0)
    with device.compute():
        for writes in (False, True):
            with hooks:
                y = torch.randn(1 << 20, device=device.torch_device).requires_grad_() * 1
                saved = []
                for layer in range(12):
                    y, to_write = save(y)
                    saved.append(to_write)
                    for _ in range(num_between):
                        torch.ones(10, device=device.torch_device).sin()
                    if writes and layer >= 4 and layer % 2 == 0:
                        write(saved[layer - 4])
                device.synchronize()
            if not writes:
                y.sum().backward()
                del y, saved
    return y


def races(save: Callable[[Tensor], tuple[Tensor, Tensor]]) -> list[str]:
    """What the simulator says of writes that no counter of a saved tensor shows."""
    said = []
    for num_between in (1, 3, 4, 5, 6, 8, 12, 20):
        sim = slow_sim(10.0)
        try:
            saved_and_written(sim, lambda t: t.data.mul_(0.5), num_between, save)
        except SimRaceError as race:
            said.append(str(race))
        sim.synchronize()
    return said


def test_a_copy_of_uncovered_bytes_that_waits_in_the_queue_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not races(half)
    _wait_in_the_queue(monkeypatch)
    assert races(half)


def test_a_copy_of_saved_bytes_that_are_written_meanwhile_is_still_a_race() -> None:
    """No counter shows the write: eager itself would use other bytes."""
    assert any(
        re.search(r"read of bytes \[0, .* by d2h copy .* is not ordered after write .* by mul_", text) for text in races(whole)
    )


def test_a_saved_tensor_that_is_written_while_its_copy_waits_is_no_race() -> None:
    """Its counter says so, and a use raises eager's error."""
    for rate in RATES_GBPS:
        for num_between in (1, 5, 20):
            sim = slow_sim(rate)
            y = saved_and_written(sim, lambda t: t.detach().mul_(0.5), num_between)
            with sim.compute(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
            sim.synchronize()


def _far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make events look incomplete most of the time: the device lags, and copies wait in their queue.

    There is no budget, so that every copy is handed over at once, and runs during later writes.
    """
    from chameleon_mm.device.cuda.cuda_stream import CudaEvent

    # In mode early an event is complete as soon as it is asked.
    asked, every, query = itertools.count(1), 12 if control.mode() == "early" else 4, CudaEvent.query
    module = importlib.import_module("chameleon_mm.api.save_on_cpu")
    monkeypatch.setattr(module, "Limits", lambda hbm_budget_bytes, **others: Limits(**others))
    monkeypatch.setattr(CudaEvent, "query", lambda self: next(asked) % every == 0 and query(self))


named = pytest.mark.skipif(not control.is_loaded(), reason="a GPU names no violation")


@named
@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_blocks")
def test_the_stand_in_finds_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from chameleon_mm.device.cuda import CudaDevice

    _far_behind(monkeypatch)
    saved_and_written(CudaDevice(), lambda t: t.data.mul_(0.5), 0)
    assert any("no event orders" in said for said in control.violations())


@named
@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_blocks")
@pytest.mark.parametrize("waiting", [False, True])
def test_where_such_copies_wait_in_the_queue_the_stand_in_names_it(monkeypatch: pytest.MonkeyPatch, waiting: bool) -> None:
    from chameleon_mm.device.cuda import CudaDevice

    _far_behind(monkeypatch)
    if waiting:
        _wait_in_the_queue(monkeypatch)
    saved_and_written(CudaDevice(), lambda t: t.data.mul_(0.5), 0, half)
    assert any("no event orders" in said for said in control.violations()) == waiting


# --- whether a save covers its storage


@st.composite
def saves_of_a_matrix(draw: st.DrawFn) -> Tensor:
    rows, width, dim = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(0, 1))
    base = torch.zeros(rows, width)
    begin = draw(st.integers(0, base.shape[dim] - 1))
    view = base.narrow(dim, begin, draw(st.integers(1, base.shape[dim] - begin)))
    if draw(st.booleans()):
        view = view.t()
    return view[:: draw(st.integers(1, 2))]


@given(saves_of_a_matrix())
def test_a_save_is_said_to_cover_its_storage_exactly_where_it_does(view: Tensor) -> None:
    storage = view.untyped_storage()
    covered = torch.zeros(storage.nbytes() // 4)
    torch.as_strided(covered, view.shape, view.stride(), view.storage_offset()).fill_(1)
    slot = Slot(storage, SavedBytes(view), cm.SimDevice().current_stream())
    assert slot.has_uncovered() == (not covered.all())
