"""Hooks of planned steps in C++ (`native/planned.cpp`): gradients are plain PyTorch's, the state after each is Python's."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import chameleon_mm as cm
from chameleon_mm.adaptive.hook_schedule import BEHIND_ALL
from chameleon_mm.adaptive.plan_follower import PlanFollower
from chameleon_mm.device.cuda import CudaDevice
from chameleon_mm.device.cuda.cuda_allocator_hook import SEGMENT_BYTES
from chameleon_mm.executor.autograd_hooks import autograd_hooks
from chameleon_mm.profiler.light import FIXED_STORAGE, NEW_STORAGE
from chameleon_mm.profiler.step_record import EARLIER_STEP
from chameleon_mm.reclaim import SHORT_SHARE
from chameleon_mm.saved.handles import NO_HOOK
from chameleon_mm.saved.metrics import Metrics
from chameleon_mm.step_history import StepHistory
from chameleon_mm.transfer import Thresholds
from chameleon_mm.units import ALLOCATION_UNIT_BYTES
from tests._native import helper, only
from tests._op_samples import BareMode
from tests._plain_models import CASES
from tests._plain_training import CUDA, differences, trained_in_session, trained_plainly
from tests.test_hook_path import planned_hooks

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_gc")]

STEPS = 6
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The helper, which sessions use from then on."""
    return helper("planned", monkeypatch)


@pytest.fixture(params=[(), ("memory",), ("memory", "reclaim")], ids=["alone", "memory", "memory and reclaim"])
def beside(request: pytest.FixtureRequest, planned: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other helpers that are built, and those that are not."""
    for name in request.param:
        helper(name, monkeypatch)
    only(["planned", *request.param], monkeypatch)


@pytest.fixture(autouse=True)
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is timed: hooks of timed ones are Python's. So no plan is preferred to another because of the times of a run."""
    begin = StepHistory.begin
    monkeypatch.setattr(StepHistory, "begin", lambda history, budget_bytes: bool(begin(history, budget_bytes)) and False)
    monkeypatch.setattr(Metrics, "time_step", lambda metrics, compute: None)


class Chain(nn.Module):
    """Operators that save their input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 1024))

    def forward(self) -> Tensor:
        y: Tensor = self.weight
        for _ in range(30):
            y = y.sin()
        return y.sum()


class Block(nn.Module):
    """Storages that several operators save, whole, as views and in part; dropout; writes in place; small ones that stay."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.q, self.k, self.v = nn.LayerNorm(width), *(nn.Linear(width, width) for _ in range(3))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = self.q(y), self.k(y), self.v(y)
        half = q.shape[-1] // 2
        q = torch.cat((q[..., :half] * k[..., half:], q[..., half:] * k[..., :half]), -1)
        x = x + F.dropout((q @ k.transpose(-1, -2)).softmax(-1) @ v, 0.1)
        hidden = self.up(x)
        hidden = hidden * torch.sigmoid(hidden)
        out: Tensor = x + self.down(hidden.relu_())
        return out


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.register_buffer("x", torch.randn(16, 32, 64))

    def forward(self) -> Tensor:
        y: Tensor = self.blocks(self.x)
        return y.square().mean()


PROGRAMS: dict[str, Callable[[], nn.Module]] = {"chain": Chain, "blocks": Blocks}


def made(name: str) -> nn.Module:
    torch.manual_seed(3)
    with torch.device("cuda"):
        return PROGRAMS[name]()


def gradients(model: nn.Module) -> list[Tensor]:
    """Loss and gradients of one step, in plain PyTorch or under whatever hooks are on."""
    loss = model()
    loss.backward()
    found = [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return found


def plain(name: str) -> tuple[list[list[Tensor]], int]:
    """Gradients of every step by torch alone, and the most bytes that a step took beyond the model's."""
    model = made(name)
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    steps = [gradients(model)]
    peak = torch.cuda.max_memory_allocated() - held
    return steps + [gradients(model) for _ in range(STEPS - 1)], peak


def state_of(session: cm.SwapSession, held: int) -> dict[str, object]:
    """All that hooks leave behind, addresses and clocks aside. `held`: bytes allocated before the session."""
    executor = session._executor
    follower, budget, parts, transfer = executor.director, executor.budget, executor.parts, executor.parts.context.transfer
    assert isinstance(follower, PlanFollower)
    storages = {
        key: (
            saved.state, saved.views, saved.uses_left, saved.swap_in_number, saved.op_is_over, saved.planned, saved.copies,
            saved.nbytes, saved.dtype, saved._noted_in, saved._device is None, saved._lent is None, saved._block is None,
            saved.last_save.epoch, saved.last_save.hook, saved.last_save.num_claims, saved.last_save.lent is None,
            [(one.begin, one.end, one.is_dense, one._geometry, one.probe.expected) for one in saved._saved_bytes],
            [move and (move.nbytes, move.next_byte, move.ended, move.timed) for move in (saved._out, saved._in)],
        )
        for key, saved in parts.registry._storages.items()
    }  # fmt: skip
    return {
        "storages": storages,
        "claims": (parts.registry.next_index, parts.registry.of_epoch),
        "waiting": (len(parts.outs.fresh), parts.outs.waiting_bytes, len(budget.planned.entries), budget.planned.pending_bytes),
        "queues": [(len(queue.queued), len(queue._running)) for queue in (transfer._out, transfer._in)],
        "budget": (*(seen and seen - held for seen in (budget._allocated, budget.peak_seen_bytes)), budget._taken),
        "forecast": (type(budget.forecast), follower._plan_forecast.growth_bytes),
        "growth": budget.headroom._growing[:],
        "follower": (
            follower._reached, follower.at_rest_until, follower._had_plan, sorted(follower._storages),
            list(follower._first_saves), follower._checked_at, follower._growth_bytes,
        ),
        "diverged": follower._diverged,
        "light": (follower.light.num_hooks, follower.light._last_used),
        "counts": (executor.hook_counts.saves, executor.hook_counts.uses, executor._saved_any, executor._used_any),
        "totals": executor.metrics.totals.counters(),
        "kept": dict(executor.metrics.totals.kept_by_reason),
        "order": list(parts.order._current),
        "pool": session.pool.stats(),
        "free": (list(parts.context.pool._ledger._free_list._sizes), parts.context.pool._ledger._free_list._free_units),
    }  # fmt: skip


def python_hooks(session: cm.SwapSession, monkeypatch: pytest.MonkeyPatch) -> Hooks:
    """The session's hooks without any helper."""
    with monkeypatch.context() as patch:
        only([], patch)
        return autograd_hooks(session._executor)


def trained(
    name: str, peak: int, share: float, choose: Callable[[cm.SwapSession], Callable[[], Hooks]]
) -> tuple[list[list[Tensor]], list[dict[str, object]], cm.SwapReport]:
    """Gradients of every step, the state after each hook, and the report. `choose(session)()`: the hooks to call now."""
    model = made(name)
    session, held = session_for(peak, share), torch.cuda.memory_allocated()
    states: list[dict[str, object]] = []
    hooks_now = choose(session)

    def watched(which: int) -> Callable[[Any], Any]:
        def hook(argument: Any) -> Any:
            result = hooks_now()[which](argument)
            states.append(state_of(session, held))
            return result

        return hook

    steps: list[list[Tensor]] = []
    with session.pool, session:
        for _ in range(STEPS):
            with session.step(), saved_tensors_hooks(watched(0), watched(1)):
                steps.append(gradients(model))
        report = session.report()
    torch.cuda.synchronize()
    return steps, states, report


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("share", [0.45, 0.7])
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_hook_may_take_either_way(name: str, share: float, planned: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, peak = plain(name)
    rng = Random(5)

    def always_python(session: cm.SwapSession) -> Callable[[], Hooks]:
        hooks = python_hooks(session, monkeypatch)
        return lambda: hooks

    def always_native(session: cm.SwapSession) -> Callable[[], Hooks]:
        hooks: Hooks = planned.hooks(*python_hooks(session, monkeypatch), session._executor)
        return lambda: hooks

    def either(session: cm.SwapSession) -> Callable[[], Hooks]:
        both = always_python(session)(), always_native(session)()
        return lambda: rng.choice(both)

    by_python, states, report = trained(name, peak, share, always_python)
    assert report.plan_cache_hits > 1
    assert report.bytes_swapped_out > 0
    for way in (always_native, either):
        got, found, _ = trained(name, peak, share, way)
        for hook, (python, ours) in enumerate(zip(states, found, strict=True)):
            if python["diverged"]:
                break  # by the default rule what moves hangs on which copies are complete by now
            assert {key: value for key, value in ours.items() if value != python[key]} == {}, f"hook {hook}: {python}"
        assert same(expected, got)
    assert same(expected, by_python)


def steps_in_session(session: cm.SwapSession, model: nn.Module) -> list[list[Tensor]]:
    """Gradients of every step under the session's own hooks."""
    with session:
        steps = []
        for _ in range(STEPS):
            with session.step():
                steps.append(gradients(model))
        return steps


def session_for(peak: int, share: float = 0.5, host: str = "64MiB") -> cm.SwapSession:
    """A session in whose steps some of what forward leaves has to move. Made after the model."""
    torch.cuda.synchronize()
    budget = torch.cuda.memory_allocated() + int(share * peak)
    return cm.SwapSession(budget, host, device=CudaDevice(), min_bytes=4096, recompute=False, thresholds=Thresholds.direct())


def same(expected: list[list[Tensor]], got: list[list[Tensor]]) -> bool:
    return all(torch.equal(a, b) for one, other in zip(expected, got, strict=True) for a, b in zip(one, other, strict=True))


@pytest.mark.usefixtures("planned")
def test_in_planned_steps_python_has_nothing_to_do_but_for_the_first_save_and_use(long_ways: list[str]) -> None:
    expected, peak = plain("chain")
    with session_for(peak) as session:
        model = made("chain")
        for _ in range(STEPS):
            long_ways.clear()
            with session.step():
                got = gradients(model)
        assert all(torch.equal(a, b) for a, b in zip(expected[-1], got, strict=True))
    assert session.report().plan_cache_hits > 1
    # The first save and the first use tell which step it is; the leaf is a parameter, which stays.
    assert long_ways.count("save") <= 2
    assert long_ways.count("use") <= 2


def test_its_constants_are_pythons(planned: ModuleType) -> None:
    assert planned.constants() == {
        "NO_HOOK": NO_HOOK,
        "EARLIER_STEP": EARLIER_STEP,
        "NEW_STORAGE": NEW_STORAGE,
        "FIXED_STORAGE": FIXED_STORAGE,
        "BEHIND_ALL": BEHIND_ALL,
        "SEGMENT_BYTES": SEGMENT_BYTES,
        "SHORT_SHARE": SHORT_SHARE,
        "ALLOCATION_UNIT_BYTES": ALLOCATION_UNIT_BYTES,
    }


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("host", ["2MiB", "512KiB"])
def test_where_the_host_takes_no_more_it_stays(host: str) -> None:
    expected, peak = plain("blocks")
    model = made("blocks")
    session = session_for(peak, 0.9, host)
    assert same(expected, steps_in_session(session, model))
    assert session.pool.stats().num_live == 0


@pytest.mark.usefixtures("planned")
def test_a_write_after_the_save_is_eagers_error() -> None:
    _, peak = plain("chain")
    model = made("chain")
    with session_for(peak) as session:
        for _ in range(STEPS):
            with session.step():
                written_after_its_save(model, write=False)
                model.zero_grad()
        assert session.report().plan_cache_hits > 1
        with session.step(), pytest.raises(RuntimeError) as swapped:
            written_after_its_save(model)
    model.zero_grad()
    with pytest.raises(RuntimeError) as eager:
        written_after_its_save(model)
    assert str(swapped.value) == str(eager.value)
    assert "modified by an inplace operation" in str(eager.value)


def written_after_its_save(model: nn.Module, *, write: bool = True) -> None:
    """A step in which something is overwritten, or not, that backward needs: by no operator of autograd's, so that it stays the
    step that is followed."""
    weight = model.weight
    assert isinstance(weight, Tensor)
    y = first = weight.sin()
    for number in range(30):
        y = y.sin()
        if number == 20 and write:
            with torch.no_grad():
                first.add_(1)
    y.sum().backward()


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("company", ["mode", "profiler", "stream", "graph is kept"])
def test_in_other_company_the_bits_are_the_same(company: str) -> None:
    expected, peak = plain("blocks")
    model = made("blocks")
    session = session_for(peak, 0.8)
    other = torch.cuda.Stream()
    got = []
    with session:
        for number in range(STEPS):
            with session.step():
                if number < STEPS - 2:
                    got.append(gradients(model))
                elif company == "mode":
                    with BareMode():  # type: ignore[no-untyped-call]  # torch's
                        got.append(gradients(model))
                elif company == "profiler":
                    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
                        got.append(gradients(model))
                elif company == "stream":
                    other.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(other):
                        got.append(gradients(model))
                    torch.cuda.current_stream().wait_stream(other)
                else:
                    loss = model()
                    loss.backward(retain_graph=True)
                    model.zero_grad()
                    loss.backward()
                    got.append([loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)])
                    model.zero_grad()
    assert same(expected, got)
    assert session.report().plan_cache_hits > 0
    assert session.report().bytes_swapped_out > 0
    assert session.pool.stats().num_live == 0


@pytest.mark.usefixtures("beside")
def test_a_hook_crosses_few_files_of_ours() -> None:
    paths = planned_hooks(CudaDevice())
    saves, uses = (sorted(path.num_calls for path in paths if path.kind == kind) for kind in ("save", "use"))
    assert len(saves) == len(uses) == 29
    assert max(path.num_files for path in paths if path.kind == "save") <= 15
    assert saves[-1] <= 60
    assert saves[-2] <= 10  # but for the first one, which tells which step it is
    assert uses[-2] <= 10  # and for the first use, which tells that backward begins


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("name", ["llama", "gpt-2, micro-batches", "bert", "llama, autocast", "resnet", "experts"])
def test_models_train_as_in_plain_pytorch(name: str) -> None:
    case = CASES[name]
    expected = trained_plainly(case, CUDA)
    found, report = trained_in_session(case, 1.0, CUDA, recompute=False)
    assert differences(expected, found) == []
    assert report.bytes_swapped_out > 0
    assert report.plan_cache_hits > 0


@pytest.mark.usefixtures("planned")
def test_what_the_helper_does_not_know_stays_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    only(["planned"], monkeypatch)
    model = made("blocks")
    budget = torch.cuda.memory_allocated() + (64 << 20)
    plain_session = cm.SwapSession(budget, device=CudaDevice(), model=model)
    assert not isinstance(plain_session._save, FunctionType)
    # A device that counts for parameters too, and a size beyond what the helper counts with.
    for session in (
        cm.SwapSession(budget, device=CudaDevice(), model=model, parameters="swap"),
        cm.SwapSession(budget, device=CudaDevice(), min_bytes=1 << 63),
        cm.SwapSession(budget, device=CudaDevice(), verify=True),
    ):
        assert isinstance(session._save, FunctionType)
