"""Autograd's two hooks: the short way for what stays on the device, which nothing is lost by; files and calls of ours that a
hook of a planned step crosses, the device's own aside, of which none may creep up; names in torch.profiler's traces.

.venv/bin/python -m tests.test_hooks        # a line for each hook of a planned step, then the longest path
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.two_tensor import TwoTensor

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.swap.calling_thread import annotation
from chameleon_mm.swap.classify import ProtectedStorages, reason_to_stay
from tests._programs import assert_same, deep, leaf
from tests._random_models import far_ahead

pytestmark = pytest.mark.usefixtures("no_gc")

# --- the short way, where nothing is due


def small_chain(device: Device) -> Tensor:
    x = torch.ones(16, device=device.torch_device, requires_grad=True)
    y = x
    for _ in range(20):
        y = y.sin()
    y.sum().backward()
    assert x.grad is not None
    return x.grad


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
    """Run differentiable operators of its own before saving its result."""

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
    """Small plain tensors may go later; these may not."""
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


def kept_in_a_step(device: Device, *, plans: bool) -> dict[str, int]:
    """Return the tensors that stay in a fourth step, by reason."""
    with cm.SwapSession(device=device, plans=plans, min_bytes=256) as session:
        model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 64, bias=False)).to(device.torch_device)
        weight, x = torch.ones(64, 64, requires_grad=True), torch.ones(4, 8)
        weight, x = (t.to(device.torch_device).detach().requires_grad_() for t in (weight, x))
        counts = []
        for _ in range(4):
            with session.step():
                (model(x) @ weight.t()).sin().sum().backward()
            counts.append(Counter(session.report().kept_by_reason))
    return dict(counts[3] - counts[2])


def test_the_loop_counts_what_stays_as_the_executor_does(device: Device) -> None:
    kept = kept_in_a_step(device, plans=True)
    assert kept == kept_in_a_step(device, plans=False)
    assert kept.keys() == {"leaf", "parameter", "persistent", "small"}


def test_a_view_of_a_parameter_of_a_subclass_stays_and_nothing_is_copied_by_asking(sim: cm.SimDevice) -> None:
    view = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4))).t()
    shared = torch._lazy_clone(torch.ones(64))
    assert reason_to_stay(view, sim, ProtectedStorages(), 1) == "parameter"
    assert not reason_to_stay(shared, sim, ProtectedStorages(), 1)
    assert torch._C._is_cow_tensor(shared)  # type: ignore[attr-defined]  # torch declares it in no stub


# --- the path of a hook of a planned step


PACKAGE = str(Path(cm.__file__).resolve().parent)
DEVICE = str(Path(PACKAGE) / "device")


class HookPath(NamedTuple):
    """Calls of one hook, by file and function."""

    kind: str
    calls: Counter[tuple[str, str]]

    @property
    def num_files(self) -> int:
        return len({file for file, _ in self.calls})

    @property
    def num_calls(self) -> int:
        return self.calls.total()


def counted(kind: str, hook: Callable[[Any], Any], paths: list[HookPath]) -> Callable[[Any], Any]:
    """Wrap `hook` to append the functions that it called to `paths`."""

    def run(argument: Any) -> Any:
        calls: Counter[tuple[str, str]] = Counter()

        def note(frame: FrameType, event: str, _: object) -> None:
            file = frame.f_code.co_filename
            if event == "call" and file.startswith(PACKAGE) and not file.startswith(DEVICE) and not of_device(frame):
                calls[file.removeprefix(PACKAGE + "/"), frame.f_code.co_qualname] += 1

        sys.setprofile(note)
        try:
            return hook(argument)
        finally:
            sys.setprofile(None)
            paths.append(HookPath(kind, calls))

    return run


def of_device(frame: FrameType) -> bool:
    """True if the device called it."""
    return frame.f_back is not None and frame.f_back.f_code.co_filename.startswith(DEVICE)


def planned_hooks(device: Device) -> list[HookPath]:
    """Return the hooks of a step of six blocks whose plan moves most activations and recomputes none."""
    torch.manual_seed(0)
    with device.compute(), torch.device(device.torch_device.type):
        blocks = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)]
        model, x = nn.Sequential(*blocks), torch.randn(512, 256)
    paths: list[HookPath] = []
    with cm.SwapSession(device.allocated_bytes() + (22 << 20), "1GiB", device, recompute=False) as session:
        own = session._save, session._use
        watched = counted("save", own[0], paths), counted("use", own[1], paths)
        for step in range(7):
            hooks = torch.autograd.graph.saved_tensors_hooks(*(watched if step == 6 else own))
            with session.step(), hooks:
                model(x).sum().backward()
            model.zero_grad()
    assert session.report().steps_by_phase == {"recorded": 1, "planned": 6}
    return paths


def test_a_hook_of_a_planned_step_crosses_no_more_than_it_did() -> None:
    paths = planned_hooks(cm.SimDevice())
    assert paths.pop(0).num_calls <= 63  # the step's first: the director finds out which step it is, and the loop takes over
    # Three hooks of each kind copy, free or bring back a part of a storage, which has a record. The others are the loop's.
    for kind, number, most_calls, median_calls, of_loop, most_files in (("save", 28, 42, 9, 12, 6), ("use", 29, 36, 5, 8, 4)):
        of_kind = sorted((path for path in paths if path.kind == kind), key=lambda path: path.num_calls)
        assert len(of_kind) == number
        assert of_kind[-1].num_calls <= most_calls
        assert of_kind[-4].num_calls <= of_loop
        assert median(path.num_calls for path in of_kind) <= median_calls
        assert max(path.num_files for path in of_kind[:-3]) <= most_files


# --- in the profiler's traces, and nothing changes without a profiler


def profiled_steps(*, profiled: bool) -> tuple[list[Tensor], Counter[str]]:
    """Return gradients of three steps, and the number of times that each range of ours came in the last one."""
    device = far_ahead()
    torch.manual_seed(0)
    with device.compute():
        x = leaf(device)
        budget = device.allocated_bytes() + 6 * x.nbytes
    gradients, names = [], Counter[str]()
    with cm.SwapSession(budget, "8MiB", device, min_bytes=1024) as session:
        for step in range(3):
            watched = profile(activities=[ProfilerActivity.CPU]) if profiled and step == 2 else nullcontext()
            with watched as profiler, session.step():
                gradients.append(torch.autograd.grad(deep(x).sum(), x)[0])
            if isinstance(profiler, profile):
                names.update(event.name for event in profiler.events() if event.name.startswith("chameleon::"))
    return gradients, names


@pytest.mark.filterwarnings("ignore::UserWarning")  # the profiler's own warning, about later versions
def test_copies_and_waits_are_ranges_of_the_profilers_trace() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64, requires_grad=True)
    plain = torch.autograd.grad(deep(x).sum(), x)[0]  # plain PyTorch: nothing of ours around it
    unprofiled, nothing = profiled_steps(profiled=False)
    gradients, names = profiled_steps(profiled=True)
    assert not nothing
    assert_same([plain] * 6, [*unprofiled, *gradients])
    assert min(names[f"chameleon::{what}"] for what in ("swap_out", "swap_in", "reclaim")) > 0
    assert annotation("chameleon::swap_out") is annotation("chameleon::reclaim")  # without a profiler: one that does nothing
