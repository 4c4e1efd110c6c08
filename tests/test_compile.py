"""`torch.compile` around, inside and next to swapping: the bits of the same compiled program without it, or torch's own error.

    expected = run(compiled program)
    got      = run(compiled program, under hooks | entering hooks itself)

Most of this runs on a device whose compute is not looked at, as a GPU's is not; its copies are still late and its memory still
poisoned. `tests/test_compiled_regions.py` runs programs under the simulator's own compute.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo  # else the first test would include its import
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.device.sim import SimStream
from chameleon_mm.units import MIB
from tests._fakes import Unwatched
from tests._programs import assert_same, deep

pytestmark = [
    pytest.mark.usefixtures("short_search"),
    # Dynamo reads `.grad` of any tensor that lives across a graph break, and torch warns of that in the user's name.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    # Flex attention recommends compiling it.
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    # ... and reports its graph break when it meets the hooks being installed.
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning"),
]


inductor = pytest.param(
    "inductor",
    marks=[
        pytest.mark.slow,  # builds C++, tens of seconds the first time
        pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler"),
    ],
)


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def unwatched(request: pytest.FixtureRequest) -> Device:
    return Unwatched() if request.param == "sim" else cm.CudaDevice()


@pytest.fixture(autouse=True)
def _nothing_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_frames() -> int:
    return int(torch._dynamo.utils.counters["frames"]["ok"])


# --- training, compiled


class Mixed(nn.Module):
    """An eager model with a part that is compiled."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(32, 64), nn.GELU())
        self.middle = torch.compile(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()), backend=backend)
        self.last = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(self.first(x))))  # type: ignore[no-any-return]  # a module's call is Any


def test_compiled_steps_are_planned_once_nothing_is_compiled_any_more(unwatched: Device) -> None:
    """A step in which dynamo compiles is no measure of later ones: the next step is recorded. For the recorder's sake, dynamo
    compiles nothing again, and nothing runs by eager instead."""
    torch.manual_seed(2)
    net = Mixed("aot_eager").to(unwatched.torch_device)
    batch = torch.randn(16, 32, device=unwatched.torch_device)

    def step() -> list[Tensor]:
        loss = net(batch).square().mean()
        return [loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))]

    expected = step()
    torch._dynamo.reset()
    session = cm.SwapSession(unwatched.allocated_bytes() + 16 * MIB, "16MiB", unwatched, min_bytes=0)
    frames, detailed = [], []
    before = compiled_frames()
    with session:
        for _ in range(4):
            with session.step():
                assert_same(expected, step())
            frames.append(compiled_frames() - before)
            detailed.append(session.report().detailed_steps)
    assert frames == [1, 1, 1, 1]
    assert detailed == [0, 1, 1, 1]
    assert session.report().plan_cache_hits == 2
    assert session.pool.stats().num_live == 0


def test_flex_attention_in_a_recorded_step(unwatched: Device) -> None:
    """It compiles itself, and refuses to be run by eager. The simulator's own compute takes no operator of higher order."""
    x = torch.randn(1, 2, 16, 16, device=unwatched.torch_device, requires_grad=True)

    def step() -> list[Tensor]:
        query = x * 2 if x.is_cuda else x.detach()  # on a CPU it has no backward
        mixed = flex_attention(query, query, query)
        return [mixed.detach(), *torch.autograd.grad((deep(x * 2) * mixed).sum(), x)]

    expected = step()
    session = cm.SwapSession(unwatched.allocated_bytes() + 16 * MIB, "16MiB", unwatched, min_bytes=0)
    with session:
        for _ in range(3):
            with session.step():
                assert_same(expected, step())
    assert session.report().detailed_steps == 1
    assert session.report().plan_cache_hits > 0
    assert session.pool.stats().num_live == 0


# --- hooks entered within what is compiled


# `deep` twice, each a graph of its own where dynamo cannot compile the whole: what the first one saves leaves when the second
# one saves. In backward it may not leave: on a GPU that is another thread, which does not know which operators are over.
Build = Callable[[cm.save_on_cpu], Callable[[Tensor], Tensor]]


def enters_and_leaves(manager: cm.save_on_cpu) -> Callable[[Tensor], Tensor]:
    def program(x: Tensor) -> Tensor:
        y = torch.tanh(x * 2)
        with manager:
            y = deep(deep(y))
        return (y * y).sum()

    return program


def never_enters(x: Tensor) -> Tensor:
    y = deep(deep(torch.tanh(x * 2)))
    return (y * y).sum()


def breaks_its_graph(manager: cm.save_on_cpu) -> Callable[[Tensor], Tensor]:
    def program(x: Tensor) -> Tensor:
        y = torch.tanh(x * 2)
        torch._dynamo.graph_break()
        y = deep(deep(y))
        return (y * y).sum()

    return program


PROGRAMS: dict[str, Build] = {"enters and leaves": enters_and_leaves, "breaks its graph": breaks_its_graph}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("nested", [False, True], ids=["alone", "inside another's hooks"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_compiled_function_that_meets_hooks_half_way(program: str, nested: bool, backend: str, unwatched: Device) -> None:
    """After a graph break, dynamo would compile the next calls, our hooks among them, if they did not refuse."""
    manager = cm.save_on_cpu(pool=cm.PinnedPool("4MiB", device=unwatched), min_bytes=0)
    outer = cm.save_on_cpu(pool=cm.PinnedPool("4MiB", device=unwatched), min_bytes=0)
    x = torch.randn(16, 16, device=unwatched.torch_device, requires_grad=True)
    (expected,) = torch.autograd.grad(never_enters(x), x)
    run = torch.compile(PROGRAMS[program](manager), backend=backend)
    for _ in range(2):  # compiling, then compiled
        with outer if nested else nullcontext():
            out = run(x)
        (got,) = torch.autograd.grad(out, x)
        assert torch.equal(got, expected)
        del out
    assert (manager.pool.stats().num_live, outer.pool.stats().num_live) == (0, 0)
    assert (outer.pool.stats().peak_live_bytes > 0) is nested
    assert (manager.pool.stats().peak_live_bytes > 0) is (program != "breaks its graph")


@pytest.mark.parametrize("what", ["a step", "hooks and backward", "backward alone"])
def test_a_compiled_function_that_trains(what: str, unwatched: Device) -> None:
    manager = cm.save_on_cpu(pool=cm.PinnedPool("4MiB", device=unwatched), min_bytes=0)
    session = cm.SwapSession(unwatched.allocated_bytes() + 16 * MIB, "4MiB", unwatched, min_bytes=0)

    def program(x: Tensor) -> None:
        if what == "a step":
            with session.step():
                deep(deep(x)).sum().backward()
        elif what == "hooks and backward":
            with manager:
                out = deep(deep(x)).sum()
            out.backward()
        else:
            half = deep(x)
            torch._dynamo.graph_break()  # the last saved tensor is not worth a copy: its use comes next
            deep(half).sum().backward()

    x = torch.randn(16, 16, device=unwatched.torch_device, requires_grad=True)
    (expected,) = torch.autograd.grad(deep(deep(x)).sum(), x)
    run = torch.compile(program, backend="aot_eager")
    with session if what != "hooks and backward" else nullcontext():
        for _ in range(2):
            leaf = x.detach().requires_grad_()
            run(leaf)
            assert leaf.grad is not None
            assert torch.equal(leaf.grad, expected)
    used = manager.pool if what == "hooks and backward" else session.pool
    assert used.stats().peak_live_bytes > 0
    assert used.stats().num_live == 0


def test_fullgraph_works_under_hooks_and_refuses_to_enter_them(unwatched: Device) -> None:
    manager = cm.save_on_cpu(pool=cm.PinnedPool("4MiB", device=unwatched), min_bytes=0)
    x = torch.randn(16, 16, device=unwatched.torch_device, requires_grad=True)
    (expected,) = torch.autograd.grad(never_enters(deep(x)), x)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(enters_and_leaves(manager), backend="aot_eager", fullgraph=True)(x)
    with manager:
        out = torch.compile(never_enters, backend="aot_eager", fullgraph=True)(deep(x))
    (got,) = torch.autograd.grad(out, x)
    assert torch.equal(got, expected)
    assert manager.pool.stats().peak_live_bytes > 0
    # The refused attempt leaves nothing: outside, no hooks act.
    after = manager.pool.stats().peak_live_bytes
    deep(torch.randn(512, 512, device=unwatched.torch_device, requires_grad=True)).sum().backward()
    assert manager.pool.stats().peak_live_bytes == after


# --- swapping that is built within a compiled function

# Records for each new stream whether dynamo compiles the code that makes it.


class Noticing(cm.SimDevice):
    """Notes for each stream that is made whether dynamo compiles what makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled: list[bool] = []

    def new_stream(self, name: str) -> SimStream:
        self.compiled.append(torch.compiler.is_compiling())
        return super().new_stream(name)


def with_the_drop_in(device: Device) -> Callable[[Tensor], Tensor]:
    def program(x: Tensor) -> Tensor:
        y = torch.tanh(x * 2)
        with cm.save_on_cpu(device=device, min_bytes=0):
            y = deep(y)
        return torch.autograd.grad((y * y).sum(), x)[0]

    return program


def with_a_session(device: Device) -> Callable[[Tensor], Tensor]:
    def program(x: Tensor) -> Tensor:
        y = torch.tanh(x * 2)
        with cm.SwapSession("64MiB", "4MiB", device, min_bytes=0) as session, session.step():
            y = deep(y)
            return torch.autograd.grad((y * y).sum(), x)[0]

    return program


@pytest.mark.parametrize("program", [with_the_drop_in, with_a_session])
@pytest.mark.parametrize("kind", ["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_may_be_built_in_what_is_compiled(kind: str, program: Callable[[Device], Callable[[Tensor], Tensor]]) -> None:
    device = Noticing() if kind == "sim" else cm.CudaDevice()
    x = torch.randn(16, 16, device=device.torch_device, requires_grad=True)
    expected = gradient(x)
    compiled = torch.compile(program(device), backend="eager")
    for _ in range(2):  # compiling, then compiled
        assert torch.equal(compiled(x), expected)
    assert not isinstance(device, Noticing) or set(device.compiled) == {False}


def gradient(x: Tensor) -> Tensor:
    y = deep(torch.tanh(x * 2))
    return torch.autograd.grad((y * y).sum(), x)[0]
