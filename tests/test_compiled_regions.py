"""Compiled regions under a session: each direction is one operator, with the bits of the same program compiled without one.

    expected = train(program, no session)          # none of our code
    got      = train(program, in a session)        # recorded, then by plan, within half of the memory where it can be

All warnings are errors, and dynamo and the session may log none.
"""

from __future__ import annotations

import html
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch import config as functorch_config

import chameleon_mm as cm
from chameleon_mm.device import Device, region_partitions
from chameleon_mm.device.region_partitions import FirstChoice
from chameleon_mm.follow.adaptation import Adaptation
from chameleon_mm.plan.regions import SHARES
from chameleon_mm.plan.trace import Trace
from chameleon_mm.record.recorder import Recorder, RecordingHooks
from chameleon_mm.units import parse_size
from tests._compiled_programs import PLACE, PROGRAMS, Block, Stack, rows
from tests._programs import assert_same
from tests.test_compile import inductor

pytestmark = pytest.mark.usefixtures("short_search")

STEPS = 5
BY_INDUCTOR = (
    "whole", "per block", "graph break in blocks", "experts", "buffers in place", "checkpoint around", "function",
    "dynamic per block", "convolution", "LoRA", "dropout", "attention",
)  # fmt: skip
"""Half of them in CI, the others in `thorough`."""


@pytest.fixture(autouse=True)
def _nothing_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.backends.cudnn.flags(deterministic=True):  # else a convolution's gradients differ from run to run
        yield
    torch._dynamo.reset()


@pytest.fixture
def same_as_alone(
    caplog: pytest.LogCaptureFixture,
) -> Callable[[Callable[[cm.SwapSession | None], list[Tensor]], cm.SwapSession], None]:
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
    seen: list[Any] = []
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
    return tensors([*seen, *(copy_of(t) for t in (*model.parameters(), *model.buffers()))])


def copy_of(t: Tensor) -> Any:
    """A copy that is no memory of the simulated device, and so of no step, until `tensors` makes a tensor of it."""
    return t.detach().cpu().numpy().copy()


def tensors(copies: list[Any]) -> list[Tensor]:
    return [torch.from_numpy(copy) for copy in copies]


def lower(session: cm.SwapSession) -> None:
    """Half of the budget's memory, or the least that is enough."""
    try:
        session.hbm_budget = session.hbm_budget // 2
    except cm.InfeasibleBudget as refusal:
        session.hbm_budget = min(session.hbm_budget, refusal.smallest_bytes or session.hbm_budget)


def session_on(device: Device, **options: Any) -> cm.SwapSession:
    return cm.SwapSession(device.allocated_bytes() + (1 << 20), "16MiB", device, min_bytes=0, **options)


PAIRS = [pytest.param(name, "aot_eager", id=f"{name}-aot_eager") for name in PROGRAMS] + [
    pytest.param(name, "inductor", id=f"{name}-inductor", marks=[*inductor.marks, *[pytest.mark.thorough] * (number > 5)])
    for number, name in enumerate(BY_INDUCTOR)
]


def _marks(number: int, pair: Any, kind: str) -> list[Any]:
    runs = number % 2 == (kind == "sim") or (kind, pair.values[1]) == ("sim", "inductor")
    return [*pair.marks, *[pytest.mark.gpu] * (kind == "cuda"), *[pytest.mark.thorough] * (not runs)]


ON_EACH = [
    pytest.param(*pair.values, kind, id=f"{kind}-{pair.id}", marks=_marks(number, pair, kind))
    for kind in ("sim", "cuda")
    for number, pair in enumerate(PAIRS)
]
"""Each program by `aot_eager` on one of the two devices, by Inductor on the CPU; on the other device in `thorough`."""


@pytest.mark.ci
@pytest.mark.parametrize(("program", "backend", "device"), ON_EACH, indirect=["device"])
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
        return x * weights[0].sum()  # type: ignore[no-any-return]  # torch types modules as Any

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


@pytest.mark.ci
@pytest.mark.parametrize("backend", ["aot_eager", inductor])
def test_loss_and_optimizer_may_be_compiled_as_full_graphs(backend: str, device: Device, same_as_alone: Any) -> None:
    """On the simulator, whose compute is a dispatch mode, as well."""

    def run(session: cm.SwapSession | None) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(3)
        model = Stack(Block(), Block()).to(device.torch_device)
        net = torch.compile(model, backend=backend, fullgraph=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True, capturable=not device.simulated)
        loss_of = torch.compile(F.cross_entropy, backend=backend, fullgraph=True)
        scale = torch.compile(lambda grads: [grad.mul_(0.5) for grad in grads], backend=backend, fullgraph=True)
        step = torch.compile(optimizer.step, backend=backend)  # torch breaks the graph of its own optimizers once
        seen: list[Any] = []
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
        return tensors([*seen, *map(copy_of, model.parameters())])

    same_as_alone(run, session_on(device))


# --- what regions save


def test_what_a_cuda_graph_keeps_is_named_and_stays(sim: cm.SimDevice, caplog: pytest.LogCaptureFixture) -> None:
    """A region of a backend whose results lie in memory of its own, as those of CUDA graphs do."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def kept(t: Any) -> Any:
        return torch.from_numpy(t.numpy().copy()) if isinstance(t, Tensor) else t

    def compiler(gm: Any, _: Any) -> Any:
        def run(args: list[Any]) -> Any:
            return [kept(out) for out in torch.fx.Interpreter(gm).boxed_run(args)]

        run._boxed_call = True  # type: ignore[attr-defined]  # torch's mark
        return run

    backend = aot_autograd(fw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)

    def run(session: cm.SwapSession | None) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(3)
        model = Stack(Block(), Block())
        parts = [torch.compile(block, backend=backend) for block in model.blocks]
        seen: list[Any] = []
        with session or nullcontext():
            for number in range(4):
                with session.step() if session else nullcontext():
                    parts[1](parts[0](rows(number))).square().mean().backward()
                    seen.extend(copy_of(p.grad) for p in model.parameters() if p.grad is not None)
                    model.zero_grad()
        return tensors(seen)

    expected = run(None)
    session = session_on(sim)
    assert_same(expected, run(session))
    (told,) = {record.getMessage() for record in caplog.records if "CUDA graph" in record.getMessage()}
    assert "in _orig_mod" in told
    assert session.report().kept_by_reason["borrowed"] > 0


def test_dynamo_does_not_trace_the_recorders_hooks(sim: cm.SimDevice) -> None:
    model = Block(breaks_between)

    def step() -> None:
        with RecordingHooks(recorder):
            run(rows(0)).sum().backward()

    run = torch.compile(model, backend="aot_eager")
    recorder = Recorder(sim, model=model)
    with sim.compute(), recorder:
        step()
    assert recorder.flaw is not None  # it compiled; that no warning came is the test


def breaks_between(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return F.gelu(x)


# --- partitions


def train_whole(
    backend: str, device: Device, session: cm.SwapSession | None, *shares: float, beside: int = 0
) -> tuple[list[Tensor], int]:
    """Gradients and parameters of a model that is one region; and how often it compiled. `shares`: of a run without a session,
    for each time that it compiles. `beside`: elements of a parameter that is in no region, with momentum."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    model = Stack(*(Block() for _ in range(4))).to(device.torch_device)
    other = nn.Parameter(torch.randn(beside).to(device.torch_device))
    optimizer = torch.optim.SGD([*model.parameters(), other], lr=0.01, momentum=0.9 if beside else 0.0, foreach=False)
    counting = CompileCounterWithBackend(backend)
    net = torch.compile(model, backend=counting, dynamic=False)
    seen: list[Any] = []
    with session or cm.compiled_partition(*shares):
        for number in range(7):
            if number == 2 and len(shares) == 2:  # after the first recorded step, as a session
                torch._dynamo.reset()
            with session.step() if session else nullcontext():
                (net(rows(number, 512).to(device.torch_device)).square().mean() + other.square().sum()).backward()
                seen.extend(copy_of(p.grad) for p in model.parameters() if p.grad is not None)
                optimizer.step()
                optimizer.zero_grad()
    assert own_settings() == (None, "flops")
    return tensors([*seen, *map(copy_of, model.parameters())]), counting.frame_count


def own_settings() -> tuple[Any, Any]:
    assert functorch_config.activation_memory_budget == 1
    return functorch_config.joint_custom_pass, functorch_config.activation_memory_budget_runtime_estimator


def chosen(session: cm.SwapSession) -> list[float]:
    assert session._adaptation is not None
    return session._adaptation.first_partitions.shares


@pytest.mark.ci
@pytest.mark.parametrize("backend", ["aot_eager", inductor])
def test_the_session_chooses_the_partition_for_its_budget(
    backend: str, device: Device, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A region that is the whole model: all it saves is there when its backward begins, so swapping saves nothing. It is
    chosen as it first compiles, and the bits are those of the program that compiles with it."""
    caplog.set_level(logging.INFO, "chameleon_mm.device.region_partitions")
    caplog.set_level(logging.INFO, "chameleon_mm.follow.adaptation")
    budget_bytes = device.allocated_bytes() + (5 << 18)
    session = cm.SwapSession(budget_bytes, "16MiB", device, min_bytes=0)
    got, compiles = train_whole(backend, device, session)
    (share,) = chosen(session)
    assert 0 < share < 1
    assert compiles == 1
    assert_same(train_whole(backend, device, None, share)[0], got)
    report = session.report()
    assert report.steps_by_phase["planned"] >= 4
    assert report.peak_hbm_bytes <= budget_bytes
    line, later = report.compiled_partitions
    assert re.fullmatch(
        rf"forward at _compiled_programs.py:\d+, compile 0/0: activation_memory_budget {share:g}, for .*; estimates by that "
        rf"value: 1: peak .*, .* saved, \d+ operators remade; .*{share:g}: peak .* saved, \d+ operators remade",
        line,
    )
    assert later.startswith("as first compiled: by plan the step takes ")
    report.save_html(tmp_path / "page.html")
    for text in (line, later):
        assert ("partition of compiled regions", text) in report.rows()
        assert html.escape(text) in (tmp_path / "page.html").read_text()
        assert any(text in record.getMessage() for record in caplog.records)
    own = cm.SwapSession(budget_bytes, "16MiB", device, min_bytes=0, recompute=False)
    assert_same(train_whole(backend, device, None, 1)[0], train_whole(backend, device, own)[0])
    assert own.report().compiled_partitions == ()


@pytest.mark.parametrize(
    ("room_bytes", "tried", "fits"),
    [
        (990, [], True),
        (530, [1, 0.25], True),
        (420, [1, 0.25, 0.1, 0], False),
        (350, [1, 0.25, 0.1], False),
        (50, [1, 0.1], False),
    ],
)
def test_a_graph_is_divided_only_where_the_result_may_fit(
    room_bytes: int, tried: list[float], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peak and saved KiB of a decoder of three layers, by torch's `activation_memory_budget`."""
    estimates = {1: (979, 890), 0.75: (814, 662), 0.5: (702, 438), 0.25: (527, 212), 0.1: (452, 90), 0: (979, 0)}
    seen: list[float] = []
    monkeypatch.setattr(region_partitions, "_given", lambda _: {})
    monkeypatch.setattr(region_partitions, "_peak_bytes", lambda *_: 990)

    def divided(_: fx.GraphModule, share: float) -> region_partitions.Divided:
        seen.append(share)
        return region_partitions.Divided(*estimates[share], 0)

    monkeypatch.setattr(region_partitions, "divided", divided)
    choice = FirstChoice(SHARES)
    choice.budget_bytes = room_bytes
    chosen = choice._chosen(fx.GraphModule(nn.Module(), fx.Graph()), [])
    assert (seen, choice.fits) == (tried, fits)
    assert chosen == min(tried or [1], key=lambda share: max(estimates[share][0], room_bytes))


@pytest.mark.parametrize("backend", ["aot_eager", inductor])
def test_a_choice_that_was_too_large_is_corrected_once(backend: str, device: Device) -> None:
    """The optimizer's state and the gradient of the other parameter are made after the model has compiled."""
    session = cm.SwapSession(device.allocated_bytes() + (5 << 19), "16MiB", device, min_bytes=0)
    got, compiles = train_whole(backend, device, session, beside=100_000)
    first, second = chosen(session)
    assert second < first
    assert compiles == 2
    assert_same(train_whole(backend, device, None, first, second, beside=100_000)[0], got)
    assert session.report().compiled_partitions[-1].startswith("as first compiled no plan fits; compiled once more, ")
    assert session.report().steps_by_phase["planned"] >= 2


def test_a_budget_that_no_partition_fits_is_told_before_the_first_step_with_one_that_does(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    def told(budget_bytes: int) -> list[str]:
        caplog.clear()
        session = cm.SwapSession(budget_bytes, "16MiB", device, min_bytes=0)
        train_whole("aot_eager", device, session)
        said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert not said or re.sub("^chameleon_mm: ", "", said[0]) in str(session.report())
        return said

    before = device.allocated_bytes()
    first, *_ = told(before + (3 << 18))  # ahead of what is known once the step was recorded
    match = re.fullmatch(
        r"chameleon_mm: hbm_budget: expected (.*) or more for the compiled region in forward at _compiled_programs.py:\d+, "
        r"which has .* on the device at once, whatever it saves, got .*; no plan will keep this budget: raise it, .*",
        first,
    )
    assert match is not None
    least_bytes = parse_size(match[1])  # on the simulator the step adds 3 KiB that are in no region
    exact = [int(found[1]) for said in told(least_bytes) if (found := re.search(r"expected (\d+) bytes", said))]
    assert max(exact, default=least_bytes) < 1.01 * least_bytes
    assert not any("region" in said for said in told(max(exact, default=least_bytes)))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("program", "backend"),
    [
        *(pytest.param(name, "aot_eager", id=f"{name}-aot_eager") for name in BY_INDUCTOR),
        *(
            pytest.param(
                name, "inductor", id=f"{name}-inductor", marks=[*inductor.marks, *[pytest.mark.thorough] * (number > 0)]
            )
            for number, name in enumerate(BY_INDUCTOR)
        ),
    ],
)
def test_regions_with_other_partitions_have_the_bits_of_the_same_ones_alone(
    program: str, backend: str, sim: cm.SimDevice, same_as_alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = (0.0, 0.5, 0.25) * 10
    monkeypatch.setattr(FirstChoice, "_chosen", lambda choice, *_: shares[len(choice.shares)])
    monkeypatch.setattr(Adaptation, "choose_partition", lambda _: False)

    def run(given: cm.SwapSession | None) -> list[Tensor]:
        with nullcontext() if given else cm.compiled_partition(*shares):
            return train(program, backend, sim, given, steps=4)

    session = session_on(sim)
    same_as_alone(run, session)
    assert 0 < len(chosen(session)) < len(shares)


def test_settings_of_torch_are_as_before_whatever_ends_first() -> None:
    before = own_settings()
    outer, inner = cm.compiled_partition(0.5), cm.compiled_partition(0.25)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert own_settings() != before
    inner.__exit__(None, None, None)
    assert own_settings() == before
    with pytest.raises(KeyError), cm.SwapSession("1GiB", "16MiB", cm.SimDevice()):
        assert own_settings() != before
        raise KeyError
    assert own_settings() == before


def test_a_partition_of_the_users_own_stays(sim: cm.SimDevice) -> None:
    with functorch_config.patch(activation_memory_budget=0.5):
        session = session_on(sim)
        train("whole", "aot_eager", sim, session)
        assert functorch_config.activation_memory_budget == 0.5
    assert session.report().compiled_partitions == ()
    for wrong in ((2,), (), (0.5, -1)):
        with pytest.raises(ValueError, match="from 0 to 1"), cm.compiled_partition(*wrong):
            pass
