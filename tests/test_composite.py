"""Operators with both a composite and a device kernel: the device kernel runs, as without any dispatch mode."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib.resources import files
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.device import SPECS, operators
from chameleon_mm.device.operators import CUDA_KERNELS, OpFactsCache, composite_on
from chameleon_mm.record.recorder import Recorder
from chameleon_mm.tools.step_on_shapes import StepRequest, record_step
from chameleon_mm.tools.workload import Workload
from tests._fakes import Unwatched
from tests._trace_records import ops_of

_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


def with_composite_kernel() -> list[str]:
    names = torch._C._dispatch_get_all_op_names()
    return [name for name in names if _has_kernel(name, "CompositeImplicitAutograd")]


def kernel_that_runs(name: str, key: str) -> str:
    """Return the line of the dispatcher's own table for `key`."""
    return next(line for line in torch._C._dispatch_dump_table(name).splitlines() if line.startswith(f"{key}: "))


# --- the rule, and the list


@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_operator_is_composite_where_the_dispatcher_runs_its_composite_kernel(device_type: str) -> None:
    names = with_composite_kernel()
    composite = {name for name in names if composite_on(name, device_type)}
    assert composite == {name for name in names if "[math kernel]" in kernel_that_runs(name, device_type.upper())}
    assert len(composite) > 500
    assert "aten::silu_backward" in set(names) - composite
    for op in (torch.ops.aten.native_channel_shuffle.default, torch.ops.aten._fused_rms_norm.default):
        assert OpFactsCache(device_type)[op].composite == (op.name() in composite)


@pytest.mark.gpu
def test_the_list_is_what_a_cuda_build_has() -> None:
    assert {name for name in with_composite_kernel() if _has_kernel(name, "CUDA")} == CUDA_KERNELS


def test_the_list_is_what_torchs_own_declarations_say() -> None:
    """Compare with the installed torch. A structured operator has the kernels of the overload that it delegates to."""
    text = (files("torchgen") / "packaged/ATen/native/native_functions.yaml").read_text(encoding="utf-8")
    blocks = {block.split("(")[0]: block for block in re.split(r"^- func: ", text, flags=re.MULTILINE)[1:]}

    def dispatched(name: str) -> set[str]:
        keys = re.findall(r"^    ([A-Za-z, ]+):", blocks[name].partition("  dispatch:")[2], flags=re.MULTILINE)
        delegate = re.search(r"structured_delegate: (\S+)", blocks[name])
        own = {key.strip() for line in keys for key in line.split(",")}
        return own | (dispatched(delegate[1]) & {"CPU", "CUDA"} if delegate else set())

    both = {f"aten::{name}" for name in blocks if {"CompositeImplicitAutograd", "CUDA"} <= dispatched(name)}
    assert both == CUDA_KERNELS


# --- what runs

Runner = Callable[[], AbstractContextManager[Any]]
RUNNERS: dict[str, Runner] = {"compute": lambda: cm.SimDevice().compute(), "recorder": lambda: Recorder(Unwatched())}


@pytest.fixture
def two_kernels() -> Iterator[Any]:
    """Operator whose composite kernel has another result than the CPU's own: which one ran does not depend on rounding."""
    library = torch.library.Library("chameleon_mm_test", "DEF")
    try:
        library.define("twofold(Tensor x) -> Tensor")
        library.impl("twofold", lambda x: x * 2, "CompositeImplicitAutograd")
        library.impl("twofold", lambda x: x + 1000, "CPU")
        yield torch.ops.chameleon_mm_test.twofold
    finally:
        library._destroy()


@pytest.fixture(params=RUNNERS)
def within(request: pytest.FixtureRequest) -> Runner:
    return RUNNERS[request.param]


@pytest.mark.parametrize("inference", [False, True])
def test_the_devices_own_kernel_runs(two_kernels: Any, within: Runner, *, inference: bool) -> None:
    with torch.inference_mode(inference):
        x = torch.arange(8.0)
        plain = two_kernels(x)
        with within():
            assert torch.equal(two_kernels(x), plain)


def test_by_the_rule_that_asks_for_a_composite_kernel_alone_another_would(
    two_kernels: Any, within: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "composite_on", lambda name, _: _has_kernel(name, "CompositeImplicitAutograd"))
    x = torch.arange(8.0)
    plain = two_kernels(x)
    with within():
        assert not torch.equal(two_kernels(x), plain)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors_run_kernels_of_their_own(within: Runner) -> None:
    """In inference mode a dispatch mode sees `linear` and `chunk` whole: dense tensors run them in parts, nested ones not."""
    w = torch.randn(4, 8)

    def rows() -> list[Tensor]:
        x = torch.nested.nested_tensor([torch.ones(3, 8), torch.arange(40.0).reshape(5, 8)])
        y = F.linear(x, w)
        return [t for part in y.chunk(2, -1) for t in part.unbind()]

    with torch.inference_mode():
        plain = rows()
        with within():
            seen = rows()
        assert [t.tolist() for t in seen] == [t.tolist() for t in plain]


# --- what a trace says


class Gated(nn.Module):
    """Block in the style of Llama: an RMS norm, a gate, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(16), nn.Linear(16, 64, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        out: Tensor = F.mish(x + self.down(F.silu(gate) * up))
        return out


def predicted_operators() -> list[str]:
    def build() -> Workload:
        model, x = Gated(), torch.randn(8, 16)
        return Workload(about="gated", model=model, loss=lambda: model(x).sum())

    request = StepRequest(build=build, spec=SPECS["h200"], dtype=torch.float32, optimizer="none", min_bytes=0)
    return [op.name for op in ops_of(record_step(request).trace)]


def test_a_prediction_has_the_operators_that_a_gpu_runs() -> None:
    names = predicted_operators()
    norms = [name for name in names if "rms_norm" in name]
    assert norms == ["aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"]
    assert {"aten::silu_backward", "aten::mish_backward"} <= set(names)
    parts = {"aten::sigmoid", "aten::rsqrt", "aten::softplus", "aten::tanh"}
    assert not parts & {name.partition(".")[0] for name in names}


@pytest.mark.gpu
def test_a_prediction_has_the_operators_of_a_step_recorded_on_a_gpu() -> None:
    device = cm.CudaDevice()
    model = Gated().to(device.torch_device)
    x = torch.randn(8, 16, device=device.torch_device)
    recorder = Recorder(device, model=model)
    with recorder:
        model(x).sum().backward()
    recorded = [op.name for op in ops_of(recorder.finish())]
    assert [name for name in recorded if name != "aten::detach"] == [
        name
        for name in predicted_operators()
        if name != "aten::detach"  # fake tensors are detached more often
    ]
