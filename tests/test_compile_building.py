"""Swapping that is built within a compiled function: dynamo compiles whatever is called behind a graph break, constructors too.

On CUDA a stream that is made in compiled code is a `torch.Stream`, which has no `cuda_stream`: nothing of ours may be compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch._dynamo  # else importing it is part of the first test
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device.sim import SimStream
from tests._programs import deep

pytestmark = [
    # Dynamo looks at `.grad` of whatever lives across a graph break, and torch warns of that in the user's name.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    # ... and says what it breaks its graph at, when it meets the hooks being installed.
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning"),
]


@pytest.fixture(autouse=True)
def _nothing_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def with_the_drop_in(device: str) -> Callable[[Tensor], Tensor]:
    def program(x: Tensor) -> Tensor:
        y = torch.tanh(x * 2)
        with cm.save_on_cpu(device=device, min_bytes=0):
            y = deep(y)
        return torch.autograd.grad((y * y).sum(), x)[0]

    return program


def with_a_session(device: str) -> Callable[[Tensor], Tensor]:
    def program(x: Tensor) -> Tensor:
        y = torch.tanh(x * 2)
        with cm.SwapSession("64MiB", "4MiB", device, min_bytes=0) as session, session.step():
            y = deep(y)
            return torch.autograd.grad((y * y).sum(), x)[0]

    return program


@pytest.mark.parametrize("program", [with_the_drop_in, with_a_session])
@pytest.mark.parametrize("device", ["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_may_be_built_in_what_is_compiled(device: str, program: Callable[[str], Callable[[Tensor], Tensor]]) -> None:
    x = torch.randn(16, 16, device="cpu" if device == "sim" else device, requires_grad=True)
    y = deep(torch.tanh(x * 2))
    (expected,) = torch.autograd.grad((y * y).sum(), x)
    compiled = torch.compile(program(device), backend="eager")
    for _ in range(2):  # compiling, then compiled
        assert torch.equal(compiled(x), expected)


class Noticing(cm.SimDevice):
    """Notes for each stream that is made whether dynamo compiles what makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled: list[bool] = []

    def new_stream(self, name: str) -> SimStream:
        self.compiled.append(torch.compiler.is_compiling())
        return super().new_stream(name)


BUILDS: dict[str, Callable[[Noticing], object]] = {
    "drop-in": lambda device: cm.save_on_cpu(device=device),
    "session": lambda device: cm.SwapSession("1GiB", "4MiB", device),
}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_no_constructor_is_compiled(build: Callable[[Noticing], object]) -> None:
    device = Noticing()

    def program(x: Tensor) -> Tensor:
        y = torch.tanh(x * 2)
        build(device)
        return y + 1

    torch.compile(program, backend="eager")(torch.randn(4))
    assert set(device.compiled) == {False}
