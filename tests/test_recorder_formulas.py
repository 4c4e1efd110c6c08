"""Operators whose backward rounds otherwise while a dispatch mode is on: a recorded step leaves in time to keep their bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import chameleon_mm as cm
from chameleon_mm.record import recorder as recorder_module
from tests._fakes import Unwatched

pytestmark = pytest.mark.usefixtures("no_gc")


def product(x: Tensor) -> Tensor:
    return (torch.tanh(x) * 3).prod(1).sin()


def running_product(x: Tensor) -> Tensor:
    return torch.tanh(x.to(torch.complex64) * 3).cumprod(1).abs()


def running_product_in_place(x: Tensor) -> Tensor:
    return (torch.tanh(x.to(torch.complex64) * 3) * 1.0).cumprod_(1).abs()


def filled(x: Tensor) -> Tensor:
    """The gradient of what is filled in is a sum over the mask; only that of `masked_fill`'s value is another formula's."""
    return (torch.tanh(x).masked_fill(x > 0.25, torch.sin(x[0, 0])) * 3).sin()


def filled_last(x: Tensor) -> Tensor:
    """Nothing is saved after it: the recorder is left by the hook that hands the mask back."""
    return torch.tanh(x).masked_fill(x > 0.25, torch.sin(x[0, 0])) / 3


FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "prod": product, "cumprod": running_product, "cumprod_": running_product_in_place, "masked_fill": filled,
    "masked_fill_last": filled_last,
}  # fmt: skip


def gradients(formula: Callable[[Tensor], Tensor], session: cm.SwapSession | None, steps: int = 3) -> list[Tensor]:
    torch.manual_seed(0)
    found = []
    with session or nullcontext():
        for _ in range(steps):
            x = torch.rand(64, 7, requires_grad=True)
            with session.step() if session else nullcontext():
                formula(x).sum().backward()
            assert x.grad is not None
            found.append(x.grad)
    return found


@pytest.mark.parametrize("name", FORMULAS)
def test_a_step_with_such_an_operator_has_eagers_bits_and_no_plan(name: str) -> None:
    session = cm.SwapSession("64MiB", "16MiB", Unwatched(), 1)
    swapped, plain = gradients(FORMULAS[name], session), gradients(FORMULAS[name], None)
    assert all(torch.equal(a, b) for a, b in zip(swapped, plain, strict=True))
    report = session.report()
    assert (report.detailed_steps, report.plans) == (0, 0)
    assert not _get_current_dispatch_mode_stack()


def test_the_second_gradient_has_eagers_bits_and_no_recorder_comes_back() -> None:
    """`matrix_exp` saves its input before it runs, and its gradient hangs on it: only hooks in the backward leave the recorder,
    which autograd puts back with every node, and once the backward is over."""
    x = torch.rand(8, 8, requires_grad=True)

    def twice(session: cm.SwapSession | None) -> list[Tensor]:
        with session or nullcontext(), session.step() if session else nullcontext():
            (first,) = torch.autograd.grad(torch.matrix_exp(x).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), x)
            (x * 2).sin()  # a save, after the backwards
            assert not _get_current_dispatch_mode_stack()
        return [first.detach(), second]

    swapped, plain = twice(cm.SwapSession("64MiB", "16MiB", Unwatched(), 1)), twice(None)
    assert all(torch.equal(a, b) for a, b in zip(swapped, plain, strict=True))


@pytest.mark.parametrize("within", ["begin", "end"])
def test_a_step_that_begins_or_ends_within_a_backward_leaves_the_modes_as_they_were(within: str) -> None:
    """Autograd takes away what was entered within a backward, and puts back what was left there."""
    device = cm.SimDevice()
    x = torch.rand(64, 64, requires_grad=True)
    session = cm.SwapSession("64MiB", "16MiB", device, 1)
    with session:
        outside = _get_current_dispatch_mode_stack()
        step = session.step()
        y = torch.tanh(x * 2)

        def hook(grad: Tensor) -> None:
            if within == "begin":
                step.__enter__()
            else:
                step.__exit__(None, None, None)

        y.register_hook(hook)
        if within == "end":
            step.__enter__()
        y.sum().backward()
        if within == "begin":
            step.__exit__(None, None, None)
        (x * 2).sin()
        assert _get_current_dispatch_mode_stack() == outside
    assert not _get_current_dispatch_mode_stack()


def overflowing_product(x: Tensor) -> Tensor:
    """Two factors are too large to be multiplied, so that the formulas differ by more than how they round: the product over a
    factor is infinite, that of the others is not."""
    return (x + torch.tensor([1e30, 1e30, 0, 0, 0, 0, 0])).prod(1)


def test_recorded_to_its_end_it_would_have_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "has_other_formula", lambda call: False)
    session = cm.SwapSession("64MiB", "16MiB", Unwatched(), 1)
    swapped, plain = gradients(overflowing_product, session, steps=1), gradients(overflowing_product, None, steps=1)
    assert session.report().detailed_steps == 1
    assert plain[0].isinf().all()
    assert swapped[0][:, :2].isfinite().all()


def test_without_a_gradient_it_is_recorded_like_any_other() -> None:
    session = cm.SwapSession("64MiB", "16MiB", Unwatched(), 1)
    weights = torch.rand(64, 7)
    gradients(lambda x: (torch.tanh(x) * weights.prod(1, keepdim=True)).masked_fill(weights > 0.5, 0.0), session)
    assert session.report().detailed_steps == 1
