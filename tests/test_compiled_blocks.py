"""Compiled blocks on shapes alone: they save what torch's compiled code saves, and a session keeps the plans made from them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import config as functorch
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import chameleon_mm as cm
from chameleon_mm.bench import _training_models as trained
from chameleon_mm.bench._llama import Shape
from chameleon_mm.device import SPECS, SimDevice
from chameleon_mm.plan.unswapped_memory import least_memory, peak_memory
from chameleon_mm.tools import plan_command, session_on_shapes
from chameleon_mm.tools.blocks import blocks_of
from chameleon_mm.tools.cli import main
from chameleon_mm.tools.compiled_blocks import Fusion, Kernel, attention_known, compile_blocks
from chameleon_mm.tools.plan_command import source_of
from chameleon_mm.tools.prediction import PARTITIONS, predict, predict_compiled
from chameleon_mm.tools.session_on_shapes import RunRequest, Swapped, record, run_session
from chameleon_mm.tools.workload import Block, Build, LlamaShape, Workload, _rotation, built_in
from chameleon_mm.units import GIB, MIB

H100 = SPECS["h100"]
SHAPE = LlamaShape(layers=1, width=64, heads=4, kv_heads=2, ffn=176, vocabulary=100, context=32)


class Convolution(nn.Module):
    """A residual block, whose batch norm writes its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class Encoder(nn.Module):
    """A layer norm, attention written out, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + F.gelu(self.out((q @ k.transpose(-1, -2) / 8).softmax(-1) @ v))


class Constant(nn.Module):
    """A block with a constant, a dropout and a result of several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        std, mean = torch.std_mean(self.linear(x), -1, keepdim=True)
        return F.dropout(x * torch.tensor([1.0, 2.0]).repeat(32), 0.1) * std + mean


def llama() -> tuple[nn.Module, tuple[Tensor, ...]]:
    x = torch.randn(2, 32, 64, requires_grad=True)
    return Block(SHAPE), (x, *_rotation(32, 16, x))


BLOCKS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "llama": llama,
    "convolution": lambda: (Convolution(), (torch.randn(2, 8, 16, 16, requires_grad=True),)),
    "constant": lambda: (Constant(), (torch.randn(2, 32, 64, requires_grad=True),)),
    "encoder": lambda: (Encoder(), (torch.randn(2, 32, 64, requires_grad=True),)),
}


def saved_by(block: nn.Module, args: tuple[Tensor, ...]) -> tuple[Counter[tuple[torch.dtype, int]], Tensor, list[torch.Size]]:
    """Return how many tensors of each dtype and size a forward of `block` saves, its result, and all gradients' shapes."""
    saved: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        if not any(t.untyped_storage()._cdata == p.untyped_storage()._cdata for p in block.parameters()):
            saved.append(t)
        return t

    with saved_tensors_hooks(note, lambda t: t):
        out = block(*args)
    out.sum().backward()
    gradients = [t.grad.shape for t in (*block.parameters(), *args) if t.grad is not None]
    return Counter((t.dtype, t.numel()) for t in saved), out, gradients


@pytest.mark.ci
@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_saves_what_torchs_compiled_code_saves(name: str, share: float) -> None:
    torch._dynamo.reset()
    block, args = BLOCKS[name]()
    with functorch.patch(activation_memory_budget=share), attention_known():
        compiled: Any = torch.compile(block, backend="aot_eager_decomp_partition")
        torch_saves, expected, gradients = saved_by(compiled, args)
    holder = nn.ModuleList([BLOCKS[name]()[0]])
    assert compile_blocks(holder, activation_memory_budget=share)[0].startswith("1 blocks")
    ours, out, got = saved_by(holder[0], args)
    assert ours == torch_saves
    assert (out.shape, out.stride(), out.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert got == gradients


# --- kernels


def kernels_of(function: Callable[..., Any], *args: Tensor) -> list[Kernel]:
    return Fusion(make_fx(function)(*args).graph).in_order()


def test_elementwise_operators_are_one_kernel_with_the_reduction_that_they_end_in() -> None:
    x = torch.randn(16, 64)
    (kernel,) = kernels_of(lambda x: ((x * 2).sin() + 1).mean(-1, keepdim=True).rsqrt() * x, x)
    assert (len(kernel.reads), kernel.numel, kernel.reduced) == (1, 16 * 64, (16, 1))


def test_reductions_over_different_axes_are_two_kernels() -> None:
    rows, columns = kernels_of(lambda x: (x.sum(0), x.sum(1)), torch.randn(16, 64))
    assert {rows.reduced, columns.reduced} == {(64,), (16,)}


def test_a_product_is_a_kernel_of_its_own_between_two() -> None:
    before, product, after = kernels_of(lambda x: ((x + 1) @ x.t()).relu(), torch.randn(16, 16))
    assert [len(kernel.nodes) for kernel in (before, product, after)] == [1, 1, 1]
    assert product.nodes[0] in after.reads


def test_what_reads_much_and_is_used_twice_is_stored() -> None:
    def read(count: int) -> int:
        def both(*given: Tensor) -> tuple[Tensor, Tensor]:
            total = sum(given[1:], given[0])
            return total.sum(0), total.sum(1)

        return sum(len(kernel.nodes) for kernel in kernels_of(both, *(torch.randn(8, 8) for _ in range(count))))

    assert (read(4), read(5)) == (2, 3)  # Inductor's `realize_reads_threshold` is 4


@pytest.mark.parametrize("name", BLOCKS)
def test_every_kernel_runs_after_what_it_reads(name: str) -> None:
    graphs: list[fx.Graph] = []

    def kept(graph: fx.GraphModule, given: Any) -> Any:
        graphs.append(graph.graph)
        return boxed_nop(graph, given)

    block, args = BLOCKS[name]()
    torch._dynamo.reset()
    aot = torch._dynamo.backends.common.aot_autograd(fw_compiler=kept, bw_compiler=kept)
    torch.compile(block, backend=aot)(*args).sum().backward()
    for graph in graphs:
        fusion, there = Fusion(graph), set[fx.Node]()
        for kernel in fusion.in_order():
            assert all(read in there or fusion.kinds[read] == "stored" for read in kernel.reads)
            there.update(kernel.nodes)
        (output,) = (node for node in graph.nodes if node.op == "output")
        assert {fusion.base(node) for node in output.all_input_nodes} <= there | set(graph.find_nodes(op="placeholder"))


def test_the_blocks_of_a_model_are_its_outermost_repeated_modules() -> None:
    model = nn.ModuleDict({
        "stages": nn.ModuleList([nn.Sequential(Convolution(), Convolution()), nn.Sequential(Convolution(), nn.ReLU())]),
        "head": nn.Linear(4, 4),
    })  # fmt: skip
    assert [type(block) for block in blocks_of(model)] == [Convolution] * 3
    alone = nn.Linear(4, 4)
    assert blocks_of(alone) == [alone]


# --- plans


def request(share: float | None, budget: int, layers: int = 2) -> RunRequest:
    return RunRequest(
        build=built_in("llama-7b", batch=2, seq=2048, layers=layers), spec=H100, swapped=Swapped(), hbm_budget_bytes=budget,
        host_budget_bytes=None, dtype=torch.bfloat16, optimizer="adamw-fused", min_bytes=MIB, compiled=share,
    )  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_session_keeps_the_plan_of_compiled_blocks(share: float) -> None:
    """The session's own executor, on the simulated device: time within 2 %, and no later step above the budget."""
    step = record(request(share, GIB, layers=6))
    least = least_memory(step.trace).nbytes
    budget = least + 3 * (peak_memory(step.trace).nbytes - least) // 10
    prediction = predict(step, H100, budget, None, ())
    assert prediction.plan is not None
    assert prediction.plan.swaps
    run = run_session(request(share, budget, layers=6), steps=range(6), counted=False)
    assert run.steps[-1].step_us == pytest.approx(prediction.plan.step_us, rel=0.02)
    assert run.holds_later


@pytest.mark.ci
def test_a_session_that_computes_compiled_blocks_takes_the_time_of_its_plan() -> None:
    """Within 2 %, and within the budget, with real numbers. The simulated GPU is so slow that small kernels are not the host's
    time. Copies that queue in another order than the plan's took 3.2 % longer: the plan moves a part of one storage."""
    slow = {name: getattr(H100, name) / 300 for name in ("hbm_gbps", "bf16_tflops", "fp32_tflops")}
    link = {name: getattr(H100, name) / 300 for name in ("h2d_gbps", "d2h_gbps", "duplex_gbps")}
    device = SimDevice(replace(H100, **slow, **link))
    shape = Shape(layers=4, width=128, heads=4, ffn=384, batch=4, seq=256, dtype="float32")
    with device.compute():
        model, loss_of = (work := trained.compiled(trained.llama(shape), "aot_eager")).make(device.torch_device, False)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step() -> None:
            batch = work.batch(device.torch_device)
            loss_of(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        step()
        device.reset_peaks()
        before = device.allocated_bytes()
        step()
        budget = before + int(0.6 * (device.peak_allocated_bytes() - before))
        with cm.SwapSession(budget, None, device, min_bytes=4096, model=model) as session:
            for _ in range(6):
                device.reset_peaks()
                start = device.current_stream().record(timed=True)
                with session.step():
                    step()
                end = device.current_stream().record(timed=True)
                device.synchronize()
        assert device.peak_allocated_bytes() <= budget
    assert session._adaptation is not None and (planned := session._adaptation.latest) is not None
    plan = session._adaptation.latest_plan
    assert plan is not None
    assert any(action.nbytes < planned.trace.tensor_bytes[action.tensor] for action in plan.swaps)
    assert end.elapsed_us(start) == pytest.approx(plan.step_us, rel=0.02)


@pytest.mark.ci
def test_the_plan_takes_less_time_than_torchs_partition_and_torchs_memory_budget_alone() -> None:
    budget = int(5.9 * GIB)
    prediction = predict_compiled([record(request(share, budget)) for share in PARTITIONS[::2]], H100, budget, None)
    ways = {way.name: way for way in prediction.ways}
    assert [one.activation_memory_budget for one in prediction.partitions] == list(PARTITIONS[::2])
    assert ways["this plan"].step_us <= min(ways["torch's partition"].step_us, ways["memory budget"].step_us)
    assert ways["memory budget"].peak_bytes <= budget < ways["no swapping"].peak_bytes
    assert prediction.plan is not None
    trace = prediction.step.trace
    made_by = np.repeat(np.arange(len(trace.op_us)), np.diff(trace.write_offsets))
    for action in prediction.plan.recomputed:  # nothing inside of compiled code runs again alone
        names = {trace.op_names[trace.op_name[op]] for op in made_by[trace.write_tensors == action.tensor]}
        assert not any(name.startswith("compiled::") for name in names)
    assert "compiled::mm" in trace.op_names


def test_what_the_user_compiled_is_planned_as_it_would_be_uncompiled() -> None:
    torch._dynamo.reset()

    def build(*, compiled: bool) -> Build:
        def of() -> Workload:
            workload = built_in("llama-7b", batch=1, seq=256, layers=2)()
            for block in blocks_of(workload.model) if compiled else ():
                block.compile(backend="aot_eager")
            return workload

        return of

    plain, compiled = (record(replace(request(None, GIB), build=build(compiled=c))) for c in (False, True))
    assert plain.trace.op_names == compiled.trace.op_names
    assert (plain.trace.op_us == compiled.trace.op_us).all()


FEW = (1.0, 0.5, 0.0)
"""Partitions of a command's run: compiling a dozen blocks for each of all takes half a minute."""


@pytest.mark.ci
def test_the_command_prints_the_partition_and_writes_all_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_command, "PARTITIONS", FEW)
    out = tmp_path / "plan.json"
    assert main(["plan", "gpt2", "--batch", "2", "--seq", "256", "--gpu", "h100", "--compile", "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "activation_memory_budget = " in said
    assert "12 blocks are compiled" in said
    assert [one["activation_memory_budget"] for one in json.loads(out.read_text())["partitions"]] == list(FEW)


@pytest.mark.parametrize("more", [["--largest", "batch"], ["--swap-optimizer"], ["--swap-parameters"]])
def test_what_it_does_not_predict_is_refused(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt2", "--compile", *more]) == 2
    assert "--compile: expected no --largest" in capsys.readouterr().err


@pytest.mark.ci
@pytest.mark.parametrize(("name", "share"), [("llama-7b", 1.0), ("llama-13b", None), ("dit-xl2", None)])
def test_a_plan_costs_no_more_if_the_host_is_not_far_ahead(
    name: str, share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are handed over whole at their hooks, so the link does not starve between them."""
    size = {"batch": 64, "seq": None} if name == "dit-xl2" else {"batch": 2, "seq": 2048}
    asked = replace(request(share, GIB), build=built_in(name, **size, layers=4))
    step = record(asked)
    least = least_memory(step.trace).nbytes
    budget = least + (peak_memory(step.trace).nbytes - least) // 2
    took_us = []
    for lead in (1000, 100):
        monkeypatch.setattr(session_on_shapes, "SimDevice", partial(SimDevice, host_lead=lead))
        took_us.append(run_session(replace(asked, hbm_budget_bytes=budget), steps=range(6), counted=False).steps[-1].step_us)
    assert took_us[1] - took_us[0] <= 0.005 * step.trace.duration_us


@pytest.mark.thorough
@pytest.mark.parametrize(("share", "gibs", "most"), [(0.9, 72, 1.02), (0.6, 66.4, 1.06), (0.4, 55, 1.14)])
def test_a_compiled_llama_within_the_memory_of_one_gpu(share: float, gibs: float, most: float) -> None:
    asked = replace(request(share, int(gibs * GIB)), build=source_of("llama-7b", batch=4, seq=4096, dtype=torch.bfloat16))
    unswapped_us = record(replace(asked, compiled=1.0)).trace.duration_us
    run = run_session(asked, steps=range(6), counted=False)
    assert run.steps[-1].step_us <= most * unswapped_us
    assert run.holds_later
