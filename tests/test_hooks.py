"""The short way of autograd's two hooks for what stays on the device: taken where nothing is due, and nothing is lost by it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.device import Device
from tests._fakes import Unwatched

pytestmark = pytest.mark.usefixtures("no_gc")


def small_chain(device: Device) -> Tensor:
    x = torch.ones(16, device=device.torch_device, requires_grad=True)
    y = x
    for _ in range(20):
        y = y.sin()
    y.sum().backward()
    assert x.grad is not None
    return x.grad


def test_what_stays_goes_the_short_way_under_save_on_cpu(device: Device, long_ways: list[str]) -> None:
    with device.compute(), cm.save_on_cpu(device=device):
        small_chain(device)
        del long_ways[:]  # the first save checks memory
        got = small_chain(device)
    assert torch.equal(got, small_chain(device))  # in plain PyTorch
    assert long_ways == []


def test_what_stays_goes_the_short_way_in_planned_steps(device: Device, long_ways: list[str]) -> None:
    with cm.SwapSession(device=device) as session:
        for number in range(6):
            del long_ways[:]
            with session.step():
                small_chain(device)
            assert number or len(long_ways) > 20  # a recorded step
    assert long_ways == ["save"]  # the step's first hook
    assert session.report().steps_by_phase["planned"] >= 3
    assert session.report().kept_by_reason["small"] > 0


class Twice(torch.autograd.Function):
    """Runs differentiable operators of its own before it saves what it returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x.detach().requires_grad_().sin().cos()
        out = x * 2
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (out,) = ctx.saved_tensors
        return grad * out


class SavesItsView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x * 2
        ctx.save_for_backward(out.view(-1))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (view,) = ctx.saved_tensors
        return grad * view.view_as(grad)


@pytest.mark.parametrize(
    "operator",
    [
        torch.exp,
        torch.Tensor.relu,
        lambda x: x.clone().tanh_(),
        lambda x: x.sin().view(4, 4).exp(),
        Twice.apply,
        SavesItsView.apply,
    ],
    ids=["exp", "relu", "tanh_", "of a view", "a function of one's own", "a view of the result"],
)
def test_no_node_keeps_itself_and_its_gradient_is_plain_pytorchs(operator: Callable[[Tensor], Tensor], device: Device) -> None:
    def gradient() -> Tensor:
        x = torch.arange(16.0, device=device.torch_device, requires_grad=True)
        return torch.autograd.grad(operator(x.cos()).sum(), x)[0]

    expected = gradient().cpu()
    with device.compute(), cm.save_on_cpu(device=device):
        assert torch.equal(gradient().cpu(), expected)
        x = torch.ones(16, device=device.torch_device, requires_grad=True)
        y = operator(x.cos())
        gone = weakref.ref(y)
        node = weakref.ref(y.untyped_storage())
        del y
    assert gone() is None
    assert node() is None


def error_of_a_write(device: Device) -> str:
    """Message of the error that a write to a saved tensor ends in."""
    x = torch.ones(16, device=device.torch_device, requires_grad=True)
    y = x.sin()
    z = y.sin()
    y.add_(1)
    with pytest.raises(RuntimeError) as raised:
        z.sum().backward()
    return str(raised.value)


@pytest.mark.parametrize("by_session", [False, True])
def test_a_write_to_what_stays_is_eagers_error(by_session: bool, device: Device) -> None:
    expected = error_of_a_write(device)
    if by_session:
        with cm.SwapSession(device=device) as session:
            for _ in range(4):
                with session.step():
                    small_chain(device)
            with session.step():
                got = error_of_a_write(device)
    else:
        with device.compute(), cm.save_on_cpu(device=device):
            got = error_of_a_write(device)
    assert got == expected


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_is_no_plain_tensor_is_kept(sim: cm.SimDevice) -> None:
    """Beside small plain ones, of which some may go later: these may not."""
    odd = {
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], requires_grad=True),
        "sparse": torch.eye(4).to_sparse().requires_grad_(),
    }
    with sim.compute(), cm.save_on_cpu(device=sim):
        for t in odd.values():
            (t * t).sum() if t.is_sparse else torch.nested.to_padded_tensor(t.sin(), 0.0).sum()

        x = torch.ones(2, 4, requires_grad=True)
        torch.vmap(torch.sin)(x).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.ones(2, 4).cos())


def test_dynamo_compiles_no_hook_and_nothing_that_it_calls() -> None:
    torch._dynamo.reset()
    device = Unwatched()
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def program(x: Tensor) -> Tensor:
        for _ in range(2):
            with torch.autograd.profiler.record_function("a break of the graph inside of a block"):
                torch._dynamo.graph_break()
                x = x.sin()
        return x

    with cm.save_on_cpu(device=device, min_bytes=0):
        torch.compile(program, backend=backend)(torch.ones(64, requires_grad=True)).sum().backward()
    assert graphs == []


def test_where_torch_cannot_mark_a_hook_it_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C._dynamo, "eval_frame", SimpleNamespace())
    hidden: list[str] = []

    def disable(hook: Callable[..., Any]) -> Callable[..., Any]:
        hidden.append(hook.__name__)
        return hook

    monkeypatch.setattr(torch.compiler, "disable", disable)
    with cm.SwapSession(device=cm.SimDevice(), plans=False) as session, session.step():
        nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
    assert {"save", "use"} <= set(hidden)
