"""The life of saved tensors under swapping, on the simulator and on CUDA: lives, views, versions, parameters, failures."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.swap.handles import KeptTensor, SwappedView
from tests._programs import assert_same, deep, swapping_executor

pytestmark = pytest.mark.usefixtures("no_gc")

KIB = 1 << 10


@pytest.fixture
def pool(device: Device) -> cm.PinnedPool:
    return cm.PinnedPool("8MiB", device=device)


@pytest.fixture
def settle(device: Device) -> Callable[[], None]:
    """Return once autograd's own thread, which runs a GPU's backward, has freed a backward that raised.

    It frees a node when it takes the next one, and takes the node of the latest op first. The node of this op, the oldest of
    the test, comes after all that the failed backward left in the queue.
    """
    oldest = torch.ones((), device=device.torch_device, requires_grad=True) * 1
    return oldest.backward


def swapping(device: Device, pool: cm.PinnedPool) -> cm.save_on_cpu:
    """Every saved storage moves, however small."""
    return cm.save_on_cpu(device=device, pool=pool, min_bytes=0)


def randn(device: Device, *shape: int, grad: bool = False) -> Tensor:
    return torch.randn(shape, device=device.torch_device, requires_grad=grad)


# --- lives


def twice_with_retain_graph(x: Tensor) -> list[Tensor]:
    out = deep(x).sum()
    return [torch.autograd.grad(out, x, retain_graph=True)[0], torch.autograd.grad(out, x)[0]]


def double_backward(x: Tensor) -> list[Tensor]:
    (g,) = torch.autograd.grad(deep(x).square().sum(), x, create_graph=True)
    return [torch.autograd.grad(g.square().sum(), x)[0]]


def two_in_flight(x: Tensor, order: tuple[int, int]) -> list[Tensor]:
    outs = [deep(x).sum(), deep(x * 2).sum()]
    return [torch.autograd.grad(outs[which], x)[0] for which in order]


def a_branch_that_backward_never_visits(x: Tensor) -> list[Tensor]:
    used, unused = deep(x), deep(x * 2)
    found = list(torch.autograd.grad(used.sum(), x))
    del unused
    return found


LIVES: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "twice": twice_with_retain_graph,
    "double backward": double_backward,
    "two in flight, the first first": partial(two_in_flight, order=(0, 1)),
    "two in flight, the last first": partial(two_in_flight, order=(1, 0)),
    "an unused branch": a_branch_that_backward_never_visits,
}


@pytest.mark.parametrize("program", LIVES.values(), ids=LIVES)
def test_graphs_that_are_used_in_odd_ways(
    program: Callable[[Tensor], list[Tensor]], device: Device, pool: cm.PinnedPool
) -> None:
    x = randn(device, 32, 32, grad=True)
    with device.compute():
        expected = program(x)
        with swapping(device, pool):
            assert_same(expected, program(x))
    assert pool.stats().peak_live_bytes > 0
    assert pool.stats().num_live == 0


def test_an_exception_in_backward_returns_every_block(device: Device, pool: cm.PinnedPool, settle: Callable[[], None]) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> Tensor:
            raise RuntimeError("the user's own")

    x = randn(device, 64, 64, grad=True)
    with device.compute(), swapping(device, pool):
        out = deep(Fails.apply(deep(x)))  # type: ignore[no-untyped-call]  # torch leaves `apply` untyped
        with pytest.raises(RuntimeError, match="the user's own"):
            out.sum().backward()
        del out
    settle()
    gc.collect()  # the custom function's context and its node hold each other, with or without swapping
    assert pool.stats().num_live == 0


def test_a_manager_entered_again_and_nested(device: Device, pool: cm.PinnedPool) -> None:
    x = randn(device, 32, 32, grad=True)
    manager = swapping(device, pool)
    with device.compute():
        (expected,) = torch.autograd.grad(deep(deep(x)).sum(), x)
        for _ in range(2):
            with manager:
                half = deep(x)
                with manager:
                    out = deep(half).sum()
            del half
            assert torch.equal(torch.autograd.grad(out, x)[0], expected)
            del out
    assert pool.stats().num_live == 0


# --- identity


@pytest.mark.parametrize(("begun", "copies"), [(True, 2), (False, 1)])
def test_a_new_version_is_a_new_copy_where_one_has_begun(begun: bool, copies: int, device: Device, pool: cm.PinnedPool) -> None:
    """A copy that begins after the write has the new bytes; the old ones may not be used."""
    swapper = swapping_executor(device, pool)
    with device.compute():
        base = randn(device, 32)
        before = swapper.save(base)
        if begun:
            torch.ones(1, requires_grad=True).exp()  # the operator that saved it is over
            swapper.save(randn(device, 8))  # a hook
        base.add_(1)
        after = swapper.save(base)
        assert isinstance(after, SwappedView)
        assert after.claim.saved.copies == copies
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            swapper.use(before)
        assert torch.equal(swapper.use(after), base)


def test_parameters_pass_by_reference(device: Device, pool: cm.PinnedPool) -> None:
    swapper = swapping_executor(device, pool)
    weight = nn.Parameter(randn(device, 16, 16))
    handles = [swapper.save(weight), swapper.save(weight.t())]
    assert all(isinstance(h, KeptTensor) for h in handles)
    assert swapper.use(handles[0]) is weight
    assert swapper.use(handles[1]).data_ptr() == weight.data_ptr()
    assert swapper.metrics.totals.kept_by_reason == {"parameter": 2}


def test_what_stays_is_counted_by_reason(device: Device, pool: cm.PinnedPool) -> None:
    swapper = swapping_executor(device, pool, min_bytes=KIB)
    leaf = randn(device, 32, 32, grad=True)
    kept = {
        "small": randn(device, 4),
        "leaf": leaf,
        "empty": randn(device, 0),
        "layout": randn(device, 4, 4).to_sparse(),
    }
    with torch.no_grad():
        for reason, t in kept.items():
            if reason != "empty":
                assert isinstance(swapper.save(t), KeptTensor)
    assert dict(swapper.metrics.totals.kept_by_reason) == {"small": 1, "leaf": 1, "layout": 1}
    assert pool.stats().num_live == 0


def test_a_buffer_that_outlives_its_saves_moves_once(device: Device, pool: cm.PinnedPool) -> None:
    swapper = swapping_executor(device, pool)
    mask = randn(device, 32, 32)
    with device.compute():
        first = swapper.save(mask)
        assert isinstance(first, SwappedView)
        swapper.use(first)
        del first
        assert isinstance(swapper.save(mask), KeptTensor)
    assert swapper.metrics.totals.kept_by_reason == {"persistent": 1}


# --- versions: eager's check, in eager's words


def messages(build: Callable[[], Tensor], device: Device, pool: cm.PinnedPool) -> tuple[str, str]:
    """Return the errors of eager and of swapping for a program that eager refuses."""
    said = []
    for manager in (None, swapping(device, pool)):
        torch.manual_seed(0)
        with nullcontext() if manager is None else device.compute(), pytest.raises(RuntimeError) as caught:
            if manager is None:
                out = build()
            else:
                with manager:
                    out = build()
            out.sum().backward()
        said.append(str(caught.value))
    return said[0], said[1]


@pytest.mark.parametrize("of", ["activation", "leaf", "output", "view"])
def test_the_inplace_error_in_eagers_words(of: str, device: Device, pool: cm.PinnedPool) -> None:
    alive: list[Tensor] = []  # eager names the op that wrote a tensor last, which only the tensor itself knows

    def build() -> Tensor:
        x = randn(device, 4, 6, grad=True)
        y = x * 2
        alive.append(y)
        if of == "activation":
            out = y.sin()
            y.add_(1)
        elif of == "leaf":
            out = x.sin()
            with torch.no_grad():
                x.add_(1)
        elif of == "output":
            out = y.exp()
            out.add_(1)
        else:
            out = y.sin()
            y[1:].mul_(3)
        return out

    eager, ours = messages(build, device, pool)
    assert "modified by an inplace operation" in eager
    assert ours == eager


def test_wrapper_subclasses_are_taken_apart(device: Device, pool: cm.PinnedPool) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    inner = [randn(device, 32, 32) for _ in range(2)]

    def gradients(manager: AbstractContextManager[object]) -> TwoTensor:
        x = TwoTensor(inner[0].clone(), inner[1].clone()).requires_grad_()
        with manager:
            out = deep(x).sum()
        (grad,) = torch.autograd.grad(out, x)
        assert isinstance(grad, TwoTensor)
        return grad

    expected = gradients(nullcontext())
    got = gradients(swapping(device, pool))
    assert torch.equal(expected.a, got.a)
    assert torch.equal(expected.b, got.b)
    assert pool.stats().peak_live_bytes > 0
    assert pool.stats().num_live == 0
