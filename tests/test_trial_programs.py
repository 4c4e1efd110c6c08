"""Programs that were given other bits than plain PyTorch's, or an error that it does not raise, each against plain PyTorch.

The reference is torch alone: CPU tensors, no hooks, no dispatch mode, no simulated device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import chameleon_mm as cm

pytestmark = pytest.mark.usefixtures("no_gc")

Gradients = list[Tensor]
Swapping = Callable[[cm.SimDevice], AbstractContextManager[object]]


def chunks_of_one_storage() -> Gradients:
    """Each chunk has a version counter of its own, and is saved and written while the next one is to come."""
    x = torch.randn(64, 64, requires_grad=True)
    out = torch.stack([(c.tanh_() * 1.0).sum() for c in (x * 2).unsafe_chunk(4, 1)]).sum()
    out.backward()
    return gradients_of(x)


def one_half_written_while_the_other_is_copied() -> Gradients:
    w = nn.Linear(64, 128)
    x = torch.randn(32, 64, requires_grad=True)
    a, b = w(x).unsafe_split(64, 1)
    (F.silu(a) * b.mul_(2)).sum().backward()
    return gradients_of(x, *w.parameters())


def silu_between_linear_layers() -> Gradients:
    """The README's first snippet has this model."""
    model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))
    x = torch.randn(64, 64, requires_grad=True)
    model(x).sum().backward()
    return gradients_of(x, *model.parameters())


def mish_between_linear_layers() -> Gradients:
    model = nn.Sequential(nn.Linear(64, 64), nn.Mish(), nn.Linear(64, 64))
    x = torch.randn(64, 64, requires_grad=True)
    model(x).sum().backward()
    return gradients_of(x, *model.parameters())


def hessian_by_legacy_vmap() -> Gradients:
    """What is saved under it has no storage."""
    x = torch.randn(16)
    hessian: Any = torch.autograd.functional.hessian(lambda t: (t.sin() * t.exp()).sum(), x, vectorize=True)
    return [hessian]


def hessian_forward_over_reverse() -> Gradients:
    x = torch.randn(16)
    hessians: list[Any] = [
        torch.autograd.functional.hessian(f, x, vectorize=True, outer_jacobian_strategy="forward-mode")
        for f in (lambda t: t.pow(3).sum(), lambda t: (t * t).sum().exp(), lambda t: t.tanh().square().sum())
    ]
    return hessians


def slices_written_through_data() -> Gradients:
    """Each part is written behind autograd's back before it is saved; the first save is of the same storage."""
    x = torch.randn(3, 64, 64, requires_grad=True)
    buffer = torch.empty(3, 64, 64)
    out = torch.zeros(())
    for part in range(3):
        buffer.data[part] = x.detach()[part].sin()
        out = out + (x[part] * buffer[part]).sum()
    del buffer
    out.backward()
    return gradients_of(x)


def a_storage_shared_by_set() -> Gradients:
    x = torch.randn(64, 64, requires_grad=True)
    base = x.detach() * 2
    upper = torch.empty(0).set_(base.untyped_storage(), 0, (32, 64), (64, 1))
    lower = torch.empty(0).set_(base.untyped_storage(), 32 * 64, (32, 64), (64, 1))
    out = (x[:32] * upper).sum()
    out = out + (x[32:] * lower.exp_()).sum()
    del base, upper, lower
    out.backward()
    return gradients_of(x)


def an_lstm_cell() -> Gradients:
    cell = nn.LSTMCell(32, 32)
    x = torch.randn(16, 64, 32, requires_grad=True)
    state = None
    for part in x.unbind(0):
        state = cell(part, state)
    assert state is not None
    (state[0] * state[1]).sum().backward()
    return gradients_of(x, *cell.parameters())


def gradients_of(*tensors: Tensor) -> Gradients:
    gradients = []
    for t in tensors:
        assert t.grad is not None
        gradients.append(t.grad)
    return gradients


PROGRAMS = (
    chunks_of_one_storage,
    one_half_written_while_the_other_is_copied,
    silu_between_linear_layers,
    mish_between_linear_layers,
    hessian_by_legacy_vmap,
    hessian_forward_over_reverse,
    slices_written_through_data,
    a_storage_shared_by_set,
    an_lstm_cell,
)


@contextmanager
def simulated(device: cm.SimDevice) -> Iterator[None]:
    """Nothing swapped."""
    with device.compute():
        yield


@contextmanager
def stateless(device: cm.SimDevice) -> Iterator[None]:
    with device.compute(), cm.save_on_cpu(device=device, pool=cm.PinnedPool("8MiB", device=device), min_bytes=0):
        yield


@contextmanager
def recorded(device: cm.SimDevice) -> Iterator[None]:
    """The first step of a session, which is recorded."""
    with cm.SwapSession("64KiB", "8MiB", device, min_bytes=0) as session, session.step():
        yield


@pytest.mark.parametrize("swapping", [simulated, stateless, recorded])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_gives_plain_pytorchs_bits(program: Callable[[], Gradients], swapping: Swapping, sim: cm.SimDevice) -> None:
    torch.manual_seed(3)
    plain = program()
    torch.manual_seed(3)
    with swapping(sim):
        swapped = program()
    for expected, got in zip(plain, swapped, strict=True):
        assert (got.dtype, got.shape, got.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
