"""Compiled regions under a session: each direction is one operator, and bits are those of the same program compiled without one.

    expected = train(program, no session)          # none of our code
    got      = train(program, in a session)        # recorded, then by plan, within half of the memory where it can be

All warnings are errors, and dynamo and the session may log none.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.plan.trace import Trace
from chameleon_mm.record.recorder import Recorder
from tests._compiled_programs import PLACE, PROGRAMS, Block, Stack, rows
from tests._programs import assert_same

inductor = pytest.param(
    "inductor",
    marks=[
        pytest.mark.slow,  # builds C++
        pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler"),
    ],
)
STEPS = 5
BY_INDUCTOR = (
    "per block", "whole", "function", "dynamic per block", "graph break in blocks", "experts", "convolution", "buffers in place",
    "LoRA", "dropout", "attention", "checkpoint around",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def same_as_alone(caplog: pytest.LogCaptureFixture) -> Callable[[Callable[[cm.SwapSession | None], list[Tensor]], cm.SwapSession], None]:
    """A check that a run in a session has the bits of a run without, and that nobody warns of more."""

    def check(run: Callable[[cm.SwapSession | None], list[Tensor]], session: cm.SwapSession, *known_without: str) -> None:
        """`known_without`: what an uncompiled session warns of as well."""
        expected = run(None)
        alone = {told.getMessage() for told in caplog.records if told.levelno >= logging.WARNING}
        caplog.clear()
        assert_same(expected, run(session))
        told = {told.getMessage() for told in caplog.records if told.levelno >= logging.WARNING}
        assert {message for message in told - alone if not any(known in message for known in known_without)} == set()
        assert session.report().bytes_swapped_in > 0
        assert session.pool.stats().num_live == 0

    return check


def train(program: str, backend: str, device: Device, session: cm.SwapSession | None, *, steps: int = STEPS) -> list[Tensor]:
    """Each loss and gradient, then parameters and buffers."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    PLACE.append(device.torch_device)
    model, loss_of = PROGRAMS[program](partial(torch.compile, backend=backend))
    model.to(device.torch_device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01)
    seen: list[Tensor] = []
    with session or nullcontext():
        for number in range(steps):
            with session.step() if session else nullcontext():
                loss = loss_of(number)
                loss.backward()
                seen.append(copy_of(loss))
                del loss
                seen.extend(copy_of(p.grad) for p in trained if p.grad is not None)
                optimizer.step()
                optimizer.zero_grad()
            if session is not None and number == 2:
                lower(session)
    PLACE.pop()
    return seen + [copy_of(t) for t in (*model.parameters(), *model.buffers())]


def copy_of(t: Tensor) -> Tensor:
    """A copy that is no memory of the simulated device, and so of no step."""
    return torch.from_numpy(t.detach().cpu().numpy().copy())


def lower(session: cm.SwapSession) -> None:
    """Half of the budget's memory, or the least that is enough."""
    try:
        session.hbm_budget = session.hbm_budget // 2
    except cm.InfeasibleBudget as refusal:
        assert refusal.smallest_bytes is not None
        if refusal.smallest_bytes < session.hbm_budget:
            session.hbm_budget = refusal.smallest_bytes


def session_on(device: Device, **options: Any) -> cm.SwapSession:
    return cm.SwapSession(device.allocated_bytes() + (1 << 20), "16MiB", device, min_bytes=0, **options)


PAIRS = [pytest.param(name, "aot_eager", id=f"{name}-aot_eager") for name in PROGRAMS] + [
    pytest.param(name, "inductor", id=f"{name}-inductor", marks=inductor.marks) for name in BY_INDUCTOR
]


@pytest.mark.parametrize(("program", "backend"), PAIRS)
def test_a_compiled_program_has_its_bits_in_a_session(program: str, backend: str, device: Device, same_as_alone: Any) -> None:
    session = session_on(device)
    known = ("more device memory allocated",) if program == "LSTM" else ()
    same_as_alone(lambda given: train(program, backend, device, given), session, *known)
    assert session.report().to_dict()["bytes_recomputed"] == 0 or program in WITH_EAGER_PARTS


WITH_EAGER_PARTS = ("among eager", "function", "full loss", "experts", "experts, whole", "LSTM")
"""Programs with eager operators in forward, which plans may recompute."""


# --- one operator each


def recorded(step: Callable[[], object], device: Device, model: nn.Module) -> Trace:
    """The trace of `step`, which has run once before."""
    step()
    recorder = Recorder(device, model=model)
    with device.compute(), recorder:
        step()
    assert recorder.flaw is None
    return recorder.finish()


def names(trace: Trace) -> list[str]:
    return [trace.op_names[number] for number in trace.op_name]


@pytest.mark.parametrize("backend", ["aot_eager", inductor])
def test_each_direction_of_a_region_is_one_operator(backend: str, device: Device) -> None:
    model = Stack(Block(), Block()).to(device.torch_device)
    parts = [torch.compile(block, backend=backend, fullgraph=True) for block in model.blocks]
    x = rows(0).to(device.torch_device)

    def step() -> None:
        (first := parts[0](x)).sum()
        parts[1](first).backward(torch.ones_like(x))

    trace = recorded(step, device, model)
    inside = [name for name in names(trace) if "compiled" in name or name.startswith(("aten::addmm", "aten::mm", "aten::gelu"))]
    assert inside == ["compiled::forward", "compiled::forward", "compiled::backward", "compiled::backward"]
    of_regions = [i for i, name in enumerate(names(trace)) if name == "compiled::forward"]
    born = [set(trace.write_tensors[trace.write_offsets[i] : trace.write_offsets[i + 1]]) for i in of_regions]
    read = [set(trace.read_tensors[trace.read_offsets[i] : trace.read_offsets[i + 1]]) for i in of_regions]
    assert len(born[0] & read[1]) == 1  # the second block reads what the first returned, and does not write it
    assert not born[0] & born[1]
    backward = names(trace).index("compiled::backward")
    reads_back = set(trace.read_tensors[trace.read_offsets[backward] : trace.read_offsets[backward + 1]])
    assert born[1] & reads_back  # what the second block saved
    assert (trace.op_us[of_regions] > 0).all() or not device.simulated
    assert (trace.tensor_dies[sorted(born[0] | born[1])] >= trace.op_tick[of_regions[0]]).all()


def test_memory_inside_a_region_is_its_peak_and_not_the_sum_of_what_it_made(sim: cm.SimDevice) -> None:
    """Sixteen products one after another, of which two live at a time."""
    weights = nn.ParameterList(nn.Parameter(torch.randn(64, 64) / 8) for _ in range(16))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def chain(x: Tensor) -> Tensor:
        for weight in weights:
            x = x @ weight.detach()
        return x * weights[0].sum()

    trace = recorded(lambda: chain(torch.randn(64, 64)).sum().backward(), sim, weights)
    (region,) = (i for i, name in enumerate(names(trace)) if name == "compiled::forward")
    made_bytes = 64 * 64 * 4
    assert 0 < trace.op_inner_bytes[region] <= 3 * made_bytes + 1024
    assert trace.op_inner_bytes[region] + trace.op_passed_bytes[region] >= 15 * made_bytes


def test_a_step_whose_first_backward_is_compiled_in_it_gives_no_plan(sim: cm.SimDevice) -> None:
    """Torch compiles the backward of a graph without symbolic sizes when it first runs, in which dynamo has no part."""
    model = Block()
    run = torch.compile(model, backend="aot_eager", dynamic=False)
    flaws = []
    with sim.compute():
        run(rows(0))
        for number in range(2):
            recorder = Recorder(sim, model=model)
            with recorder:
                run(rows(number)).sum().backward()
            flaws.append(recorder.flaw)
    assert flaws[0] is not None
    assert "compiled in it" in flaws[0]
    assert flaws[1] is None


@pytest.mark.parametrize("backend", ["aot_eager", inductor])
def test_loss_and_optimizer_may_be_compiled_as_full_graphs(backend: str, device: Device, same_as_alone: Any) -> None:
    """On the simulator, whose compute is a dispatch mode, as well."""

    def run(session: cm.SwapSession | None) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(3)
        model = Stack(Block(), Block()).to(device.torch_device)
        net = torch.compile(model, backend=backend, fullgraph=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True, capturable=not device.simulated)
        loss_of = torch.compile(lambda y, at: F.cross_entropy(y, at), backend=backend, fullgraph=True)
        scale = torch.compile(lambda grads: [grad.mul_(0.5) for grad in grads], backend=backend, fullgraph=True)
        step = torch.compile(optimizer.step, backend=backend)  # torch breaks the graph of its own optimizers once
        seen = []
        with session or nullcontext():
            for number in range(5):
                with session.step() if session else nullcontext():
                    x = rows(number).to(device.torch_device)
                    loss = loss_of(net(x), x.argmax(1))
                    loss.backward()
                    scale([p.grad for p in model.parameters()])
                    step()
                    optimizer.zero_grad()
                    seen.append(copy_of(loss))
                    del loss
        return [*seen, *map(copy_of, model.parameters())]

    same_as_alone(run, session_on(device))
