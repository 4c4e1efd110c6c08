"""Recorder in combination with all that users do inside a step: the bits of the run without a session, no leaks, then a plan.

Where the recorder cannot see all of the step, its flaw says so, and the default rule goes on.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Generator
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, Self

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import chameleon_mm as cm
from chameleon_mm.follow.adaptation import RECORDINGS
from chameleon_mm.record import recorder as recorder_module
from chameleon_mm.record.dispatch_state import is_on
from chameleon_mm.record.recorder import _INTERRUPTED, Recorder, RecordingHooks
from chameleon_mm.units import MIB
from tests._fakes import Unwatched, refusing
from tests._programs import assert_same, deep, on_a_thread

pytestmark = [
    pytest.mark.usefixtures("no_gc"),
    # Torch says so of some layouts, once a process.
    pytest.mark.filterwarnings("ignore:.*(in beta state|prototype stage|experimental|deprecated):Warning"),
]

STEPS = 3

Step = Callable[[Tensor], list[Tensor]]
"""Step on a leaf. Returns all that it computes."""


def trained(x: Tensor, program: Callable[[Tensor], Tensor]) -> list[Tensor]:
    out = program(x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    return [out.detach(), grad]


# --- programs


def transformed(x: Tensor) -> list[Tensor]:
    tangent = torch.func.jvp(deep, (x.detach(),), (torch.ones_like(x),))[1]
    return [tangent, *trained(x, lambda t: deep(torch.vmap(lambda row: torch.tanh(row * 2).exp())(deep(t))))]


def functional(x: Tensor) -> list[Tensor]:
    net = nn.Linear(64, 64)
    weights = {name: torch.full_like(p, 0.01) for name, p in net.named_parameters()}
    return trained(x, lambda t: deep(torch.func.functional_call(net, weights, (deep(t),))))


SELECTIVE = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])


def recomputed(x: Tensor, **how: Any) -> list[Tensor]:
    def block(t: Tensor) -> Tensor:
        return torch.dropout(deep(t @ t), 0.1, train=True)

    leaf = x.detach().requires_grad_()
    out = deep(checkpoint(block, deep(leaf), **how)).sum()
    out.backward()  # the reentrant kind refuses `autograd.grad`
    assert leaf.grad is not None
    return [out.detach(), leaf.grad]


def beside_a_thread(x: Tensor) -> list[Tensor]:
    """Run forward and backward on another thread, outside of any hooks, as replicas of a model do."""
    found: list[Tensor] = []
    out = deep(x)
    on_a_thread(lambda: found.extend(trained(x.detach().requires_grad_(), deep)))
    return [*found, *torch.autograd.grad(out.sum(), x)]


def evaluated(x: Tensor) -> list[Tensor]:
    out = deep(x)
    with torch.no_grad():
        seen = deep(out).mean()
    with torch.inference_mode():
        guessed = nn.functional.linear(deep(torch.ones(64, 64)), torch.ones(64, 64)).softmax(0).mean() * 2
    return [seen, torch.tensor(guessed.item()), *torch.autograd.grad(deep(out).sum(), x)]


def failing(x: Tensor) -> list[Tensor]:
    """Errors of operators and of the user's own, handled inside the step."""
    out = deep(x)
    with pytest.raises(RuntimeError, match="must match the size"):
        out + torch.ones(63)
    with pytest.raises(ValueError, match="the user's own"):
        raise_in_the_middle(x)
    return trained(x, lambda t: deep(deep(t)))


def raise_in_the_middle(x: Tensor) -> None:
    half = deep(x)
    half.register_hook(refusing(ValueError, "the user's own"))
    deep(half).sum().backward()


class Counts(TorchDispatchMode):
    """User's own mode, which counts some operators and runs its own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates no argument of it
        self.seen = 0
        self.total = torch.zeros(())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.tanh.default:
            self.seen += 1
            self.total = self.total + out.mean()
        return out


def counted(x: Tensor) -> list[Tensor]:
    out = deep(x)
    with Counts() as counts:
        grads = trained(x, lambda t: deep(deep(t)))
    return [torch.tensor(counts.seen), counts.total, *grads, *torch.autograd.grad(out.sum(), x)]


class Doubles(TorchFunctionMode):
    """User's own mode, one level up, which doubles `tanh`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.tanh else out


def doubled(x: Tensor) -> list[Tensor]:
    with Doubles():
        return trained(x, deep)


def sparse(x: Tensor) -> list[Tensor]:
    mask = torch.eye(64).roll(3, 0)
    table = torch.nn.Embedding(64, 8, sparse=True)
    table.weight.data.fill_(0.5)
    table(torch.arange(5)).square().sum().backward()
    assert table.weight.grad is not None
    products = trained(x, lambda t: deep(torch.sparse.mm(mask.to_sparse(), deep(t))))
    kept = trained(x, lambda t: torch.sparse.sum((deep(t).relu() + 1).to_sparse() * 3.0, dim=0).to_dense())
    return [table.weight.grad.to_dense(), *products, *kept]


def quantised(x: Tensor) -> list[Tensor]:
    def program(t: Tensor) -> Tensor:
        coarse = torch.quantize_per_tensor(t.detach(), 0.1, 0, torch.qint8).dequantize()
        return deep(torch.fake_quantize_per_tensor_affine(deep(t), 0.05, 0, -128, 127)) * coarse

    return trained(x, program)


def nested(x: Tensor) -> list[Tensor]:
    def program(t: Tensor) -> Tensor:
        t = deep(t)
        rows = torch.nested.as_nested_tensor([t[:3].sin(), t[3:].cos()], layout=torch.strided)
        return deep(torch.relu(rows).to_padded_tensor(0.0))

    return trained(x, program)


def jagged(x: Tensor) -> list[Tensor]:
    offsets = torch.tensor([0, 20, 64])

    def program(t: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor_from_jagged(deep(t), offsets)
        return deep(rows.sin() * rows.cos()).values()

    return trained(x, program)


def distributed(x: Tensor) -> list[Tensor]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))

        def program(t: Tensor) -> Tensor:
            sharded = DTensor.from_local(deep(t), mesh, [Shard(0)])
            product = sharded.sin() @ sharded.cos().t()
            assert isinstance(product, DTensor)
            return product.full_tensor()

        return trained(x, program)
    finally:
        dist.destroy_process_group()


class Wrapped(Tensor):
    """A wrapper of the user's own that nothing but its own `__torch_dispatch__` knows how to take apart."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Self:
        made: Self = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's stub lacks `func`
        return cls(func(*[a.held if isinstance(a, Wrapped) else a for a in args], **(kwargs or {})))


def wrapped(x: Tensor) -> list[Tensor]:
    seen: Any = Wrapped(x.detach().clone()) * 2 + Wrapped(torch.ones(64, 64))
    return [seen.held, *trained(x, deep)]


def cast(x: Tensor) -> list[Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return trained(x, lambda t: deep(deep(t @ t) @ t))


def twice(x: Tensor) -> list[Tensor]:
    (grad,) = torch.autograd.grad(deep(x).sum(), x, create_graph=True)
    return [grad.detach(), *torch.autograd.grad(grad.square().sum(), x)]


def watched(x: Tensor) -> list[Tensor]:
    """Hooks of the user's, on tensors and on gradients, that run operators in the middle of a backward."""
    leaf = x.detach().requires_grad_()
    seen: list[Tensor] = []
    leaf.register_post_accumulate_grad_hook(lambda t: seen.append(deep(t.detach())))
    half = deep(leaf)
    half.register_hook(deep)
    deep(half).sum().backward()
    return [*seen, half.detach()]


def traced(x: Tensor) -> list[Tensor]:
    """Fake tensors and traced graphs, in the middle: each graph is the one without hooks."""
    out = deep(x)
    batch = x.detach()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(batch).requires_grad_()
    deep(fake).sum().backward()  # outside of the mode: the tensors bring it along
    modes: tuple[Literal["real", "fake", "symbolic"], ...] = ("real", "fake", "symbolic")
    graphs = [make_fx(lambda t: torch.autograd.grad(deep(t).sum(), t)[0], tracing_mode=mode)(x) for mode in modes]
    seen = [torch.tensor(list(f"{node.op} {node.target}".encode())) for graph in graphs for node in graph.graph.nodes]
    return [*seen, *torch.autograd.grad(deep(out).sum(), x)]


def collected(x: Tensor) -> list[Tensor]:
    """Graphs that are dropped unused, some in a cycle that only the collector ends."""
    deep(x)
    cycle: list[Any] = [deep(x)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    return trained(x, deep)


PROGRAMS: dict[str, Step] = {
    "vmap and jvp": transformed,
    "functional_call": functional,
    "checkpoint, reentrant": partial(recomputed, use_reentrant=True),
    "checkpoint, not reentrant": partial(recomputed, use_reentrant=False),
    "checkpoint, selective": partial(recomputed, use_reentrant=False, context_fn=SELECTIVE),
    "another thread": beside_a_thread,
    "evaluation": evaluated,
    "errors that are handled": failing,
    "a dispatch mode": counted,
    "a function mode": doubled,
    "sparse": sparse,
    "quantised": quantised,
    "nested": nested,
    "jagged": jagged,
    "distributed": distributed,
    "a wrapper of one's own": wrapped,
    "autocast": cast,
    "hooks of the user's": watched,
    "tracers": traced,
    "graphs that are dropped": collected,
}


def run(device: cm.SimDevice, step: Step, session: cm.SwapSession | None, *, steps: int = STEPS) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(64, 64, requires_grad=True)
    seen: list[Tensor] = []
    with session or device.compute():
        for _ in range(steps):
            with session.step() if session else nullcontext():
                seen.extend(step(x))
    return seen


def opened(device: cm.SimDevice, **how: Any) -> cm.SwapSession:
    return cm.SwapSession(device.allocated_bytes() + 16 * MIB, "8MiB", device, min_bytes=0, **how)


@pytest.mark.ci
@pytest.mark.parametrize("device", [cm.SimDevice, Unwatched], ids=["simulated", "unwatched"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_recorded_step_and_those_that_follow_its_plan(
    name: str, device: Callable[[], cm.SimDevice], caplog: pytest.LogCaptureFixture
) -> None:
    expected = run(device(), PROGRAMS[name], None)
    sim = device()
    session = opened(sim)
    with caplog.at_level(logging.WARNING, logger="chameleon_mm"):
        assert_same(expected, run(sim, PROGRAMS[name], session))
    # No warning that something could not be recorded.
    assert [record.message for record in caplog.records if record.name.startswith("chameleon_mm")] == []
    report = session.report()
    assert (report.detailed_steps, report.plan_cache_hits) == (1, STEPS - 1)
    assert report.plans > 0
    assert report.kept_by_reason.get("tracing", 0) > 0 or name != "tracers"
    assert session.pool.stats().num_live == 0
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("device", [cm.SimDevice, Unwatched], ids=["simulated", "unwatched"])
def test_a_double_backward_in_recorded_and_planned_steps(device: Callable[[], cm.SimDevice]) -> None:
    """A storage that is saved again after its use is known if it stayed, and new if it was away. A step that moves it therefore
    compares as another step than one that does not."""
    expected = run(device(), twice, None, steps=6)
    sim = device()
    session = opened(sim)
    assert_same(expected, run(sim, twice, session, steps=6))
    report = session.report()
    assert report.detailed_steps == 1
    assert report.plan_cache_hits > 0
    assert session.pool.stats().num_live == 0


TIGHT = ("vmap and jvp", "checkpoint, not reentrant", "evaluation", "a dispatch mode", "sparse", "jagged", "autocast")


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name in TIGHT])
def test_plans_that_move_what_was_recorded_in_company(name: str) -> None:
    """The budget is four fifths of the first step's memory, and the steps' results stay: some storages have to leave."""
    plain = cm.SimDevice()
    expected = run(plain, PROGRAMS[name], None)
    sim = cm.SimDevice()
    session = cm.SwapSession(plain.peak_allocated_bytes() * 4 // 5, "8MiB", sim, min_bytes=0)
    assert_same(expected, run(sim, PROGRAMS[name], session, steps=STEPS))
    report = session.report()
    assert report.detailed_steps == 1
    assert report.plan_cache_hits == STEPS - 1
    assert report.bytes_swapped_in > 0
    assert session.pool.stats().num_live == 0


# --- steps that cannot be seen whole


def backward_elsewhere(x: Tensor) -> list[Tensor]:
    out = deep(x)
    found: list[Tensor] = []
    on_a_thread(lambda: found.extend(torch.autograd.grad(out.sum(), x)))
    return [out.detach(), *found]


def test_a_backward_on_another_thread_is_left_to_the_default_rule() -> None:
    """No mode sees its operators. After some attempts, the step is not recorded any more."""
    steps = RECORDINGS + 3
    device = Unwatched()  # a simulated device's own mode is not on that thread either
    expected = run(Unwatched(), backward_elsewhere, None, steps=steps)
    session = opened(device)
    made = Counting(session)
    assert_same(expected, run(device, backward_elsewhere, session, steps=steps))
    report = session.report()
    assert (report.detailed_steps, report.plans, report.steps) == (0, 0, steps)
    assert [recorder.flaw is not None for recorder in made.recorders] == [True] * RECORDINGS
    assert all("another thread" in str(recorder.flaw) for recorder in made.recorders)
    assert report.bytes_swapped_in > 0
    assert session.pool.stats().num_live == 0


class Counting:
    """Keeps the recorders that a session makes."""

    def __init__(self, session: cm.SwapSession) -> None:
        self.recorders: list[Recorder] = []
        adaptation = session._adaptation
        assert adaptation is not None
        make = adaptation._make_recorder

        def kept() -> Recorder:
            self.recorders.append(make())
            return self.recorders[-1]

        adaptation._make_recorder = kept


class Fails(TorchDispatchMode):
    """Mode below the recorder: an operator raises as often as configured."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates no argument of it
        self.errors: list[BaseException] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.errors and func is torch.ops.aten.exp.default:
            raise self.errors.pop()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", [cm.SimDevice, Unwatched], ids=["simulated", "unwatched"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward", "an operator"])
def test_a_recorded_step_that_does_not_end(where: str, error: type[BaseException], device: Callable[[], cm.SimDevice]) -> None:
    """The next one is recorded in its place."""

    def interrupted(x: Tensor) -> None:
        half = deep(x)
        if where == "an operator":
            below.errors.append(error("the user's own"))
        elif where == "backward":
            half.register_hook(refusing(error, "the user's own"))
        else:
            raise error("the user's own")
        deep(half).sum().backward()

    sim = device()
    expected = run(device(), lambda x: trained(x, deep), None)
    got: list[Tensor] = []
    torch.manual_seed(1)
    x = torch.randn(64, 64, requires_grad=True)
    with Fails() as below, opened(sim) as session:
        with pytest.raises(error, match="the user's own") as caught, session.step():
            interrupted(x)
        del caught
        for _ in range(STEPS):
            with session.step():
                got.extend(trained(x, deep))
    assert_same(expected, got)
    report = session.report()
    assert (report.steps, report.detailed_steps, report.plan_cache_hits) == (STEPS, 1, STEPS - 1)
    assert session.pool.stats().num_live == 0
    assert torch._C._len_torch_dispatch_stack() == 0


def test_an_interrupt_that_is_handled_inside_the_step_spoils_the_trace_alone() -> None:
    """It is unknown if the operator ran, and which tensors existed by then."""
    steps: list[int] = []

    def step(x: Tensor) -> list[Tensor]:
        steps.append(len(steps))
        if steps[-1] == 0:
            below.errors.append(KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                deep(x)
        return trained(x, deep)

    with Fails() as below:
        expected = run(Unwatched(), step, None, steps=4)
    steps.clear()
    device = Unwatched()
    session = opened(device)
    made = Counting(session)
    with Fails() as below:
        assert_same(expected, run(device, step, session, steps=4))
    assert [recorder.flaw for recorder in made.recorders] == [_INTERRUPTED, None]
    assert session.report().plan_cache_hits == 2


class Opaque(Tensor):
    """Wrapper with an inaccessible storage, which operators treat as a plain tensor."""


def test_a_tensor_that_cannot_be_looked_at_costs_the_trace_and_not_the_step(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = refusing(NotImplementedError, "no storage to look at")
    monkeypatch.setattr(Opaque, "untyped_storage", refuses, raising=False)
    device = Unwatched()
    recorder = Recorder(device)
    x = torch.ones(8)
    with caplog.at_level(logging.WARNING, logger="chameleon_mm"), recorder:
        y = x.as_subclass(Opaque).exp()
        z = y * 2
    assert torch.equal(z.as_subclass(Tensor), x.exp() * 2)
    assert recorder.flaw is not None
    assert "NotImplementedError: no storage to look at" in recorder.flaw
    assert [record.message for record in caplog.records if record.name.startswith("chameleon_mm")] == [
        "chameleon_mm: this step gives no plan: recording the operator exp failed: no storage to look at"
    ]
    with pytest.raises(RuntimeError, match=r"ended before .*no storage to look at"):
        recorder.finish()


# --- what a recorder does where it must not look


def test_tracers_pass_through_a_recorder(sim: cm.SimDevice) -> None:
    """Their operators are fake or traced: the trace is that of the step without them."""

    def step(recorder: Recorder, tracer: Callable[[Tensor], object]) -> int:
        with sim.compute(), recorder, RecordingHooks(recorder):
            x = torch.ones(16, 16, requires_grad=True)
            half = deep(x)
            tracer(torch.ones(16, 16))
            deep(half).sum().backward()
        assert recorder.flaw is None
        return recorder.finish().num_ticks

    def traces(mode: Any) -> Callable[[Tensor], object]:
        return make_fx(lambda t: deep(t).sum(), tracing_mode=mode)

    def fakes(t: Tensor) -> None:
        with FakeTensorMode() as mode:
            deep(mode.from_tensor(t))

    expected = step(Recorder(sim), lambda t: None)
    for tracer in (fakes, traces("real"), traces("fake"), traces("symbolic")):
        assert step(Recorder(sim), tracer) == expected


def test_a_recorder_is_left_by_identity() -> None:
    """The order of leaving does not matter, nor do the modes above: torch itself would remove the innermost mode."""
    recorder = Recorder(Unwatched())
    above: Any = Counts()
    recorder.__enter__()
    above.__enter__()
    recorder.__exit__(None, None, None)
    assert (is_on(recorder), is_on(above)) == (False, True)
    with FakeTensorMode(), Recorder(Unwatched()) as under_a_tracer:
        assert is_on(under_a_tracer)
    assert is_in_torch_dispatch_mode()
    above.__exit__(None, None, None)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not is_in_torch_dispatch_mode()  # or dynamo compiles a compiled model anew in each later step of the process

    recorder = Recorder(Unwatched())
    below: Any = Counts()
    below.__enter__()
    recorder.__enter__()
    below.__exit__(None, None, None)  # takes the recorder away
    assert (is_on(recorder), is_on(below)) == (False, True)
    recorder.__exit__(None, None, None)  # removes the remaining mode, the other's
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not is_in_torch_dispatch_mode()


@pytest.mark.usefixtures("flags_of_modes")
def test_a_recorder_that_is_left_on_another_thread_takes_nothing_away_there() -> None:
    recorder = Recorder(Unwatched())

    def enters() -> None:
        recorder.__enter__()

    on_a_thread(enters)
    with Counts() as mine:
        recorder.__exit__(None, None, None)
        assert is_on(mine)
    assert recorder.flaw == "it was left on a thread that had not entered it"
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("device", [cm.SimDevice, Unwatched], ids=["simulated", "unwatched"])
def test_a_generator_that_is_paused_in_a_recorded_step(device: Callable[[], cm.SimDevice]) -> None:
    """It is closed under another mode, which stays; and the session goes on to a plan."""
    expected = run(device(), lambda x: trained(x, deep), None)
    sim = device()
    torch.manual_seed(1)
    x = torch.randn(64, 64, requires_grad=True)
    got: list[Tensor] = []
    with opened(sim) as session:

        def paused() -> Generator[Tensor]:
            with session.step():
                yield deep(x)

        generator = paused()
        next(generator)
        with Counts() as counts:
            generator.close()
            assert is_on(counts)
            deep(x.detach())
        assert counts.seen == 4
        for _ in range(STEPS):
            with session.step():
                got.extend(trained(x, deep))
    assert_same(expected, got)
    assert (session.report().detailed_steps, session.report().plan_cache_hits) == (1, STEPS - 1)
    assert session.pool.stats().num_live == 0
    assert torch._C._len_torch_dispatch_stack() == 0


# --- operators whose backward rounds otherwise while a dispatch mode is on: the recorder leaves in time to keep their bits


def product(x: Tensor) -> Tensor:
    return (torch.tanh(x) * 3).prod(1).sin()


def running_product(x: Tensor) -> Tensor:
    return torch.tanh(x.to(torch.complex64) * 3).cumprod(1).abs()


def running_product_in_place(x: Tensor) -> Tensor:
    return (torch.tanh(x.to(torch.complex64) * 3) * 1.0).cumprod_(1).abs()


def filled(x: Tensor) -> Tensor:
    """The gradient of the filled value is a sum over the mask; only that of `masked_fill`'s value has another formula."""
    return (torch.tanh(x).masked_fill(x > 0.25, torch.sin(x[0, 0])) * 3).sin()


def filled_last(x: Tensor) -> Tensor:
    """Save nothing after the mask: the recorder is left by the hook that returns it."""
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
    """Autograd removes modes that were entered within a backward, and restores those that were left there."""
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
    """Two factors are too large to be multiplied, so that the formulas differ by more than rounding: the product over a factor
    is infinite, that of the others is not."""
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
