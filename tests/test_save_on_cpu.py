"""The drop-in: torch's own call, a pool of one's own or shared, bounded memory while it forwards."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.units import MIB

pytestmark = pytest.mark.usefixtures("no_gc")


def chain(x: Tensor, links: int = 4) -> Tensor:
    """Every link saves two tensors that nobody else keeps."""
    for _ in range(links):
        x = torch.tanh(x * 1.5).exp() - 1
    return x


def gradient(device: Device, manager: cm.save_on_cpu, x: Tensor) -> Tensor:
    with device.compute():
        with manager:
            out = chain(x).sum()
        return torch.autograd.grad(out, x)[0]


def expected(device: Device, x: Tensor) -> Tensor:
    with device.compute():
        return torch.autograd.grad(chain(x).sum(), x)[0]


@pytest.fixture
def x(device: Device) -> Tensor:
    return torch.randn(64, 64, device=device.torch_device, requires_grad=True)


# --- torch's call


def test_the_signature_begins_with_torchs() -> None:
    theirs = list(inspect.signature(torch.autograd.graph.save_on_cpu.__init__).parameters.values())[1:]
    ours = list(inspect.signature(cm.save_on_cpu.__init__).parameters.values())[1:]
    assert [(p.name, p.kind, p.default) for p in ours[: len(theirs)]] == [(p.name, p.kind, p.default) for p in theirs]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is None for p in ours[len(theirs) :])


@pytest.mark.parametrize(
    ("positional", "keywords"),
    [
        ((), {}),
        ((True,), {}),
        ((True, "cuda"), {}),
        ((), {"pin_memory": True}),
        ((), {"pin_memory": False, "device_type": "cuda"}),
        ((True,), {"device_type": "xpu"}),
    ],
)
def test_torchs_arguments_are_accepted_and_harmless(
    positional: tuple[bool, str], keywords: dict[str, object], device: Device, x: Tensor
) -> None:
    pool = cm.PinnedPool("8MiB", device=device)
    manager = cm.save_on_cpu(*positional, device=device, min_bytes=0, pool=pool, **keywords)  # type: ignore[arg-type]  # as a caller may
    assert torch.equal(gradient(device, manager, x), expected(device, x))
    assert pool.stats().peak_live_bytes > 0
    assert pool.stats().num_live == 0


# --- bad input


@pytest.mark.parametrize("size", ["1 potato", "-5", "", "1.5B", -1])
def test_a_malformed_size_is_refused(size: int | str) -> None:
    with pytest.raises(ValueError, match="min_bytes"):
        cm.save_on_cpu(device="sim", min_bytes=size)


@pytest.mark.parametrize("name", ["tpu", "sim:h9000", "cuda:x", ""])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        cm.save_on_cpu(device=name)


def test_a_pool_of_another_device_is_refused_by_name() -> None:
    one, other = cm.SimDevice("h200"), cm.SimDevice("a100")
    pool = cm.PinnedPool("1MiB", device=one)
    with pytest.raises(ValueError, match=r"pool: expected one of simulated A100.*, got one of simulated H200; pass device"):
        cm.save_on_cpu(device=other, pool=pool)


# --- the pool


def test_a_pool_brings_its_device(device: Device) -> None:
    pool = cm.PinnedPool("1MiB", device=device)
    manager = cm.save_on_cpu(pool=pool)
    assert manager.device is device
    assert manager.pool is pool


def test_one_pool_serves_several_managers_at_once(device: Device, x: Tensor) -> None:
    pool = cm.PinnedPool("8MiB", device=device)
    y = torch.randn(64, 64, device=device.torch_device, requires_grad=True)
    managers = [cm.save_on_cpu(pool=pool, min_bytes=0) for _ in range(2)]
    with device.compute():
        outs = []
        for manager, t in zip(managers, (x, y), strict=True):
            with manager:
                outs.append(chain(t).sum())
        both = pool.stats().num_live
        for out, t in zip(outs, (x, y), strict=True):
            (got,) = torch.autograd.grad(out, t)
            assert torch.equal(got, expected(device, t))
        del out, outs
    assert both >= 2 * 4
    assert pool.stats().num_live == 0


def test_a_manager_keeps_its_own_pool_between_entries(device: Device, x: Tensor) -> None:
    manager = cm.save_on_cpu(device=device, min_bytes=0)
    for _ in range(3):
        gradient(device, manager, x)
    stats = manager.pool.stats()
    assert stats.num_live == 0
    assert stats.num_chunks == 1


def test_nothing_is_pinned_before_the_first_save(device: Device) -> None:
    manager = cm.save_on_cpu(device=device)
    with manager:
        pass
    assert manager.pool.stats().peak_reserved_bytes == 0


# --- hooks


def test_the_hooks_are_gone_after_the_block_even_by_an_exception(device: Device, x: Tensor) -> None:
    manager = cm.save_on_cpu(device=device, min_bytes=0)
    with pytest.raises(RuntimeError, match="the user's own"), manager:
        raise RuntimeError("the user's own")
    with device.compute():
        chain(x).sum().backward()
    assert manager.pool.stats().peak_live_bytes == 0


def test_small_tensors_stay_by_default(device: Device, x: Tensor) -> None:
    pool = cm.PinnedPool("8MiB", device=device)
    manager = cm.save_on_cpu(pool=pool)  # 1 MiB
    assert torch.equal(gradient(device, manager, x), expected(device, x))
    assert pool.stats().peak_live_bytes == 0


def test_hooks_act_on_the_innermost_manager(device: Device, x: Tensor) -> None:
    outer, inner = (cm.save_on_cpu(pool=cm.PinnedPool("8MiB", device=device), min_bytes=0) for _ in range(2))
    with device.compute():
        with outer, inner:
            out = chain(x).sum()
        assert outer.pool.stats().num_live == 0 < inner.pool.stats().num_live
        assert torch.equal(torch.autograd.grad(out, x)[0], expected(device, x))


# --- memory


def test_device_memory_is_bounded_while_the_graph_is_alive(sim: cm.SimDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """One link's activation is A. Every link of `chain` makes three and saves two; nothing but autograd holds them.

    Unswapped, a graph of n links holds 2nA (tanh's result and exp's result), and the chain's own result beside it.
    Swapped, what is held once forward is over is
      LEAVING_BYTES                 copies on their way out (8A here): more make compute wait for the oldest
      + 2A                          the last link's saves, whose copies begin at the next hook at the earliest
      + A                           the result.
    """
    nbytes, links = MIB, 24
    leaving_bytes = 8 * nbytes
    # By its module's full name: in the package that name is the class.
    monkeypatch.setattr(importlib.import_module("chameleon_mm.save_on_cpu"), "LEAVING_BYTES", leaving_bytes)
    x = torch.randn(nbytes // 4, requires_grad=True)
    with sim.compute():
        plain = chain(x, links)
        before = sim.allocated_bytes()
        held_plain = before - nbytes  # x was counted with its first use
        del plain
        floor = sim.allocated_bytes()
        with cm.save_on_cpu(pool=cm.PinnedPool("256MiB", device=sim)):
            swapped = chain(x, links)
        held_swapped = sim.allocated_bytes() - floor
        del swapped
    assert floor == nbytes
    assert held_plain >= 2 * links * nbytes
    assert held_swapped <= leaving_bytes + 3 * nbytes
    assert leaving_bytes + 3 * nbytes < held_plain / 2  # the bound says something
