"""`chameleon-mm plan`: a predicted step needs what it needs when it runs, and every wrong question is answered."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from torch.testing._internal.autocast_test_lists import AutocastTestLists

import chameleon_mm
from chameleon_mm.api.session import SwapSession
from chameleon_mm.device import SPECS
from chameleon_mm.device.sim import SimDevice
from chameleon_mm.plan.trace import StepPhase, TensorKind
from chameleon_mm.plan.unswapped_memory import peak_memory
from chameleon_mm.tools.cli import main
from chameleon_mm.tools.demo import GPT, GPTConfig
from chameleon_mm.tools.plan_command import source_of
from chameleon_mm.tools.plan_options import OPTIMIZERS, add_arguments, run
from chameleon_mm.tools.prediction import PARTITIONS, Prediction, assumptions, predict, show, verdicts
from chameleon_mm.tools.session_on_shapes import RUN_STEPS
from chameleon_mm.tools.shape_operators import GpuOperators, ShapesAlone, gpu_autocast
from chameleon_mm.tools.step_on_shapes import RecordedStep, StepRequest, record_step
from chameleon_mm.tools.workload import Build, Llama, LlamaShape, ModelUnusable, Workload, built_in
from chameleon_mm.units import GIB, MIB, parse_size
from tests._simulated_step import simulated_step
from tests._trace_records import ops_of
from tests._user_modules import write_module

H200 = SPECS["h200"]
LLAMA = LlamaShape(layers=2, width=64, heads=4, kv_heads=2, ffn=160, vocabulary=100, context=64)
MODELS = """
import torch
from torch import nn

constant = torch.ones(64)

class Mlp(nn.Module):
    def __init__(self, layers=8):
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.blocks = nn.ModuleList(block() for _ in range(layers))
    def forward(self, x):
        for block in self.blocks:
            x = x + block(x) * constant
        return x

def tiny(batch, seq=128):
    return Mlp(), torch.randn(batch, seq, 64), lambda out, x: (out - x).float().pow(2).mean()

def scalar():
    class Model(Mlp):
        def forward(self, x, y):
            return {"loss": (super().forward(x) - y).sum()}
    return Model(), {"x": torch.randn(2, 64), "y": torch.randn(2, 64)}

def converted():
    return Mlp().to(torch.float16), (torch.randn(2, 64, dtype=torch.float16),), lambda out, batch: out.sum()

class Amp(nn.Module):
    def __init__(self, autocast):
        super().__init__()
        self.linear, self.norm, self.autocast = nn.Linear(64, 64), nn.LayerNorm(64), autocast
    def forward(self, x):
        with self.autocast():
            return self.norm(self.linear(x)).sum()

@torch.autocast("cuda", dtype=torch.bfloat16)
def decorated(model, x): return model.norm(model.linear(x)).sum()

def amp(): return Amp(lambda: torch.autocast("cuda", dtype=torch.bfloat16)).float(), torch.randn(64, 64).float()
def amp_off(): return Amp(lambda: torch.autocast("cuda", torch.bfloat16, enabled=False)).float(), torch.randn(64, 64).float()
def amp_by_name(): return Amp(lambda: torch.amp.autocast("cuda", torch.bfloat16)).float(), torch.randn(64, 64).float()
def amp_decorated():
    class Model(Amp):
        def forward(self, x): return decorated(self, x)
    return Model(None).float(), torch.randn(64, 64).float()
def amp_half(): return Amp(lambda: torch.autocast("cuda")).float(), torch.randn(64, 64).float()

def wide(): return Mlp().float(), torch.randn(2, 64).float(), lambda out, x: out.sum()
def leaves(): raise SystemExit(3)
def talks(): raise ValueError("one of " + ", ".join(f"Config{i}" for i in range(1000)))
def nothing(): pass
def numbers(): return 3, 4
def no_loss(): return Mlp(), torch.randn(2, 64)
def bad_loss(): return Mlp(), torch.randn(2, 64), "mean"
def fails(): return Mlp(1 // 0), torch.randn(2, 64)
def looks(): return Mlp(), torch.randn(2, 64), lambda out, x: out.sum() if out.sum().item() > 0 else out.mean()
def frozen(): return Mlp().requires_grad_(False), torch.randn(2, 64)
def elsewhere(): return Mlp().to("meta"), torch.randn(2, 64, device="meta"), lambda out, x: out.sum()
number = 3
"""


def llama() -> Workload:
    model, ids = Llama(LLAMA), torch.zeros(2, 64, dtype=torch.int64)
    return Workload(about="a small llama", model=model, loss=lambda: model.loss(ids))


def gpt2(layers: int = 2, width: int = 64, batch: int = 2, seq: int = 64) -> Workload:
    model = GPT(GPTConfig(layers=layers, width=width, heads=4, context=1024, vocabulary=100))
    ids = torch.zeros(batch, seq, dtype=torch.int64)
    return Workload(about="a gpt2", model=model, loss=lambda: model.loss(ids, ids))


def large_llama() -> Workload:
    """A llama of some hundred MiB of activations: the smallest budgets are found to a MiB."""
    shape = LlamaShape(layers=4, width=256, heads=4, kv_heads=2, ffn=640, vocabulary=100, context=2048)
    model, ids = Llama(shape), torch.zeros(4, 2048, dtype=torch.int64)
    return Workload(about="a large llama", model=model, loss=lambda: model.loss(ids))


def large_gpt2() -> Workload:
    return gpt2(layers=4, width=256, batch=8, seq=1024)


def recorded(build: Build, **more: Any) -> RecordedStep:
    how: dict[str, Any] = {"spec": H200, "dtype": torch.float32, "optimizer": "adamw", "min_bytes": 1, **more}
    return record_step(StepRequest(build=build, **how))


def predicted(hbm_budget: Callable[[RecordedStep], int], host_budget: int | None = None, optimizer: str = "sgd") -> Prediction:
    step = recorded(llama, optimizer=optimizer)
    return predict(step, H200, hbm_budget(step), host_budget)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's in the working directory."""
    return write_module("models_of_a_user", MODELS, tmp_path, monkeypatch)


# --- the step


@pytest.mark.parametrize("build", [llama, gpt2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_that_never_ran_needs_what_it_needs_when_it_runs(build: Build, optimizer: str) -> None:
    """To the byte and to the microsecond, on the simulated GPU with a host that takes no time."""
    trace = recorded(build, optimizer=optimizer).trace
    start_bytes, peak_bytes, us = simulated_step(build, optimizer)
    assert peak_memory(trace).nbytes == peak_bytes
    assert trace.start_bytes == start_bytes
    assert trace.duration_us == pytest.approx(us, rel=1e-9)  # added up in another order


def test_it_takes_no_memory_and_leaves_torch_as_it_was() -> None:
    before = torch.get_default_dtype()
    step = recorded(source_of("gpt2", batch=1, seq=64, dtype=torch.bfloat16), dtype=torch.bfloat16, optimizer="none")
    assert step.num_parameters == 124_439_808  # as published
    assert torch.get_default_dtype() is before
    assert type(torch.empty(1)) is torch.Tensor
    with pytest.raises(ModelUnusable):
        nothing = Workload(about="x", model=torch.nn.ReLU(), loss=torch.Tensor)
        recorded(lambda: nothing, dtype=torch.float16, optimizer="none")
    assert torch.get_default_dtype() is before


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama-7b", 6_738_415_616),
        ("llama-3-8b", 8_030_261_248),
        ("gpt2-xl", 1_557_611_200),
        ("vit-l16", 304_326_632),
        ("resnet-50", 25_557_032),
        ("video-dit-2b", 2_150_259_856),  # of nobody's: about Open-Sora-Plan's
        ("dit-xl2", 675_129_632 - 256 * 1152),  # its positions are fixed: a buffer here
    ],
)
def test_what_is_built_in_has_the_published_number_of_parameters(name: str, count: int) -> None:
    with ShapesAlone():
        model = built_in(name, batch=1, seq=None)().model
    assert sum(p.numel() for p in model.parameters()) == count


def test_attention_that_drops_is_fused_all_the_same() -> None:
    def build(p: float) -> Build:
        def workload() -> Workload:
            model = torch.nn.Linear(64, 64, bias=False)
            x = torch.randn(1, 4, 512, 64)

            def loss() -> torch.Tensor:
                q = model(x)
                by_name = F.scaled_dot_product_attention(q, q, q, dropout_p=p, is_causal=True)
                return F.scaled_dot_product_attention(q, by_name, q, None, p, True).sum()

            return Workload(about="attention", model=model, loss=loss)

        return workload

    dropping, plain = recorded(build(0.1)).trace, recorded(build(0.0)).trace
    assert peak_memory(dropping) == peak_memory(plain)
    assert dropping.op_names == plain.op_names and dropping.op_name.tolist() == plain.op_name.tolist()
    assert int(plain.tensor_bytes.max()) < 4 * 512 * 512 * 4  # no matrix of scores


def test_dropout_saves_a_mask_of_bools_as_on_a_gpu() -> None:
    def build() -> Workload:
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.1))
        return Workload(about="dropout", model=model, loss=lambda: model(torch.zeros(1024, 64)).sum())

    trace = recorded(build).trace
    assert "aten::native_dropout" in trace.op_names
    saved = trace.tensor_bytes[trace.tensor_kind == TensorKind.ACTIVATION].tolist()
    assert sorted(saved) == [1024 * 64, 1024 * 64 * 4]  # the mask, and the layer's input


def test_what_is_below_min_bytes_never_moves() -> None:
    everything, large = recorded(llama).trace, recorded(llama, min_bytes=32 * 1024).trace
    sizes = [sorted(trace.tensor_bytes[np.unique(trace.hook_tensor)[1:]].tolist()) for trace in (everything, large)]
    assert [nbytes for nbytes in sizes[0] if nbytes >= 32 * 1024] == sizes[1]
    assert 0 < len(sizes[1]) < len(sizes[0])


# --- autocast


def saved_dtypes(build: Build, **options: Any) -> dict[str, set[int]]:
    """Return the bytes per number of each operator's results, which have 64 x 64 numbers."""
    trace = recorded_with(build, **options).trace
    return {
        op.name: {int(trace.tensor_bytes[tensor]) // 64**2 for tensor in op.writes}
        for op in ops_of(trace)
        if op.phase is StepPhase.FORWARD
    }


def recorded_with(build: Build, autocast: torch.dtype | None = None) -> RecordedStep:
    return recorded(build, optimizer="none", autocast=autocast)


@pytest.mark.parametrize(
    ("function", "product"), [("amp", 2), ("amp_by_name", 2), ("amp_decorated", 2), ("amp_half", 2), ("amp_off", 4)]
)
def test_autocast_for_cuda_casts_without_a_gpu(models: str, function: str, product: int) -> None:
    """Products have two bytes. Functions that CUDA's autocast runs in float32 have four, though the CPU's autocast does not."""
    source = source_of(f"{models}:{function}", batch=None, seq=None, dtype=torch.float32)
    written = saved_dtypes(source)
    assert written["aten::addmm"] == {product}
    assert 4 in written["aten::native_layer_norm"]
    assert 2 not in written["aten::native_layer_norm"]


def test_autocast_is_as_it_was_afterwards(models: str) -> None:
    original = torch.autocast.__init__
    source = source_of(f"{models}:amp", batch=None, seq=None, dtype=torch.float32)
    assert torch.autocast.__init__ is original
    recorded_with(source)
    assert torch.autocast.__init__ is original
    with pytest.raises(ValueError, match="inside"), gpu_autocast():
        raise ValueError("inside")
    assert torch.autocast.__init__ is original


def test_a_built_in_model_is_put_under_autocast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", "gpt2", "--seq", "64", "--autocast", "bfloat16", "--json", str(path)]) == 0
    assert "million parameters, float32, under autocast to bfloat16, optimizer" in capsys.readouterr().out
    told = json.loads(path.read_text())
    assert (told["dtype"], told["autocast"]) == ("float32", "bfloat16")
    plain, narrow = recorded_with(llama), recorded_with(llama, torch.bfloat16)
    assert plain.dtype == narrow.dtype == "float32"
    assert peak_memory(narrow.trace).nbytes < peak_memory(plain.trace).nbytes


@pytest.mark.parametrize("group", ["torch_fp32", "nn_fp32", "methods_fp32"])
def test_what_cudas_autocast_has_in_float32_is_torchs_own_list(group: str) -> None:
    """The list by which torch tests CUDA's autocast, run on the CPU."""
    lists = AutocastTestLists(torch.device("cpu"))
    cases = getattr(lists, group)
    assert cases
    for name, args, *more in cases:
        function: Any = getattr(args[0], name) if group == "methods_fp32" else None
        for owner in (torch, F, torch._C._nn):
            function = function or getattr(owner, name, None)
        keywords = more[0] if more and isinstance(more[0], dict) else {}
        with GpuOperators(), gpu_autocast(), torch.autocast("cuda", dtype=torch.bfloat16):
            result = function(*(args[1:] if group == "methods_fp32" else args), **keywords)
        assert result.dtype is torch.float32, name


# --- the prediction


def test_a_plan_that_recomputes_stands_beside_the_best_that_only_swaps() -> None:
    step, spec = recorded(large_llama, optimizer="sgd"), SPECS["rtx4090"]
    peak = peak_memory(step.trace)
    budget = peak.nbytes - peak.idle_bytes * 3 // 4
    outcome, swapping = predict(step, spec, budget, None), predict(step, spec, budget, None, ())
    assert [way.name for way in outcome.ways] == ["no swapping", "this plan", "swap only"]
    assert [way.name for way in swapping.ways] == ["no swapping", "this plan", "swap everything"]
    unswapped, plan, swap_only = outcome.ways
    assert asdict(swap_only) == asdict(swapping.ways[1]) | {"name": "swap only"}
    assert plan.step_us < swap_only.step_us
    assert plan.recompute_us > 0 == swap_only.recompute_us
    assert plan.step_us == pytest.approx(unswapped.step_us + plan.stall_us + plan.device_copy_us + plan.recompute_us)
    assert outcome.plan is not None and outcome.ideal_us is not None and swapping.ideal_us is not None
    assert swapping.plan is not None and not swapping.plan.recomputed
    assert outcome.ideal_us < swapping.ideal_us


def test_without_recomputation_the_command_only_swaps(models: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    command = ["plan", f"{models}:tiny", "--batch", "64", "--gpu", "RTX 4090", "--hbm-budget", "64MiB", "--json", str(path)]
    assert main([*command, "--no-recompute"]) == 0
    swapping: dict[str, Any] = json.loads(path.read_text())
    assert main(command) == 0
    mixed: dict[str, Any] = json.loads(path.read_text())
    assert (swapping["plan"]["num_recomputed"], swapping["plan"]["recompute_us"]) == (0, 0.0)
    assert mixed["plan"]["num_recomputed"] > 0
    assert mixed["ways"][1]["step_us"] < swapping["ways"][1]["step_us"]


def said_budget(outcome: Prediction) -> int:
    """Return the smallest budget, as parsed from the output."""
    lines = [line for line in verdicts(outcome) if line.startswith("smallest budget")]
    assert len(lines) == 1
    return parse_size(lines[0].rpartition(": ")[2])


@pytest.mark.ci
@pytest.mark.parametrize(
    ("build", "gpu", "optimizer"),
    [
        pytest.param(*way, marks=() if number in (0, 3, 5) else pytest.mark.thorough)
        for number, way in enumerate(product((large_llama, large_gpt2), ("rtx4090", "gh200"), ("adamw-fused", "none")))
    ],
)
def test_what_is_said_of_budgets_holds_when_they_are_given_back(build: Build, gpu: str, optimizer: str) -> None:
    spec = SPECS[gpu]
    step = recorded(build, spec=spec, optimizer=optimizer)
    peak = peak_memory(step.trace).nbytes
    for host_budget in (None, peak // 8):
        outcome = predict(step, spec, peak, host_budget)
        smallest = said_budget(outcome)
        assert outcome.smallest_budget_bytes <= smallest <= outcome.smallest_budget_bytes * 1.01
        assert predict(step, spec, smallest, host_budget).infeasible is None


def test_without_any_pinned_memory_the_peak_stays_and_it_says_why() -> None:
    outcome = predicted(lambda step: peak_memory(step.trace).nbytes * 3 // 4, host_budget=0)
    assert outcome.smallest_budget_bytes == outcome.peak.nbytes
    text = "\n".join(verdicts(outcome))
    assert "hardly a smaller budget within 0 B of pinned host memory" in text
    assert "nothing that could be away" not in text


def test_the_budget_is_a_sessions_own_by_default(models: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", f"{models}:wide", "--gpu", "a100", "--json", str(path)]) == 0
    told = json.loads(path.read_text())["hbm_budget_bytes"]
    assert told == SwapSession(device=SimDevice("a100")).hbm_budget_bytes < SPECS["a100"].hbm_bytes
    by_default = predict(recorded(llama), SPECS["a100"], told, None)
    assert "90% of A100's" in next(line for line in assumptions(by_default) if "as a session's is by default" in line)
    assert not any("by default" in line for line in assumptions(predict(by_default.step, SPECS["a100"], told - 1, None)))
    assert any("the budget is 0.061% of A100's" in line for line in assumptions(replace(by_default, hbm_budget_bytes=50 * MIB)))


def test_a_step_that_fits_moves_nothing() -> None:
    outcome = predicted(lambda step: peak_memory(step.trace).nbytes)
    assert outcome.fits
    assert outcome.plan is not None
    assert outcome.plan.actions == ()
    assert outcome.ideal_share == 1.0
    assert verdicts(outcome)[0].startswith("fits as it is")
    assert predict(outcome.step, H200, outcome.peak.nbytes - 1, None).fits is False


def test_the_classes_add_up_to_the_peak() -> None:
    outcome = predicted(lambda step: GIB)
    assert sum(need.at_peak_bytes for need in outcome.needs) + outcome.peak.untouched_bytes == outcome.peak.nbytes
    assert all(need.at_peak_bytes <= need.most_bytes for need in outcome.needs)
    assert {need.name for need in outcome.needs} >= {"parameters", "gradients", "optimizer state", "activations", "temporaries"}
    with ShapesAlone():
        parameters = list(llama().model.parameters())
    parameter_bytes = sum(-(-p.numel() * 4 // 512) * 512 for p in parameters)
    by_name = {need.name: need.most_bytes for need in outcome.needs}
    assert by_name["parameters"] == by_name["gradients"] == by_name["optimizer state"] == parameter_bytes  # one momentum each


def test_a_peak_that_is_the_optimizers_is_said_to_be() -> None:
    def build() -> Workload:
        model = torch.nn.Linear(512, 512)
        return Workload(about="wide", model=model, loss=lambda: model(torch.zeros(1, 512)).sum())

    outcome = predict(recorded(build), H200, GIB, None)
    assert outcome.phase is StepPhase.OPTIMIZER
    assert not outcome.can_be_lowered
    text = "\n".join(verdicts(outcome))
    assert "swapping cannot lower the peak" in text
    assert "--optimizer adamw-fused" in text
    fused = predict(recorded(build, optimizer="adamw-fused"), H200, GIB, None)
    assert fused.peak.nbytes < outcome.peak.nbytes
    assert "adamw-fused" not in "\n".join(verdicts(fused))
    small = "\n".join(verdicts(predict(recorded(build), H200, MIB, None)))
    assert all(way in small for way in ("a smaller batch does not help", "--swap-optimizer", "--fsdp N", "--lora R"))
    assert "--swap-optimizer" not in text  # it fits


def test_it_says_what_the_figures_rest_on() -> None:
    text = "\n".join(assumptions(predicted(lambda step: GIB)))
    assert "attention is fused" in text
    assert "the host would be late" in text  # kernels this small take less than launching them
    assert "unfused" not in text


@pytest.mark.parametrize("columns", [80, 120])
def test_all_of_it_is_shown_within_the_terminal(columns: int) -> None:
    outcome = predicted(lambda step: peak_memory(step.trace).nbytes * 3 // 4)
    file = io.StringIO()
    show(outcome, Console(width=columns, file=file))
    words = file.getvalue()
    lines = words.splitlines()
    tables = [line for line in lines if line.startswith(("│", "┃"))]
    assert max(map(len, tables)) <= columns
    assert not any("…" in line for line in tables)
    assert all(need.name in words for need in outcome.needs)
    body = [line for line in tables if line.startswith("│")]
    assert not any(line.startswith("│  ") for line in body)  # no cell breaks over two lines
    assert all(word in words for way in outcome.ways for word in way.name.split())
    assert "predicted" in words
    assert "T*" in words


# --- the command


def test_a_users_function_gives_tables_and_json(models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    command = ["plan", f"{models}:tiny", "--batch", "64", "--gpu", "RTX 4090", "--hbm-budget", "64MiB", "--json", str(path)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert f"{models}:tiny, batch 64" in out
    assert "RTX 4090" in out
    data: dict[str, Any] = json.loads(path.read_text())
    assert data["schema"] == "chameleon_mm.plan/1"
    assert data["predicted"] is data["simulated"] is True
    assert data["device"] == "simulated RTX 4090"
    assert (data["dtype"], data["autocast"], data["optimizer"], data["min_bytes"]) == ("bfloat16", None, "adamw", MIB)
    assert data["parameters_by_dtype"] == {"bfloat16": data["num_parameters"]}
    assert data["hbm_budget_bytes"] == 64 * MIB
    assert data["feasible"] and not data["fits"]
    for way in data["ways"]:
        spent = data["ways"][0]["step_us"] + way["stall_us"] + way["device_copy_us"] + way["recompute_us"]
        assert way["step_us"] == pytest.approx(spent)
    ways = {way["name"]: way for way in data["ways"]}
    assert ways["this plan"]["peak_bytes"] <= 64 * MIB < ways["no swapping"]["peak_bytes"] == data["peak_bytes"]
    assert ways["this plan"]["moved_bytes"] == data["plan"]["moved_bytes"] > 0
    assert 0 < data["ideal_share"] <= 1
    assert data["planning_ms"] > 0
    assert data["smallest_budget_bytes"] <= 64 * MIB


@pytest.mark.parametrize(("function", "dtype"), [("wide", "float32"), ("converted", "float16"), ("scalar", "bfloat16")])
def test_the_dtype_is_that_of_the_parameters(
    models: str, function: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", f"{models}:{function}", "--dtype", "bfloat16", "--json", str(path)]) == 0
    assert f"parameters, {dtype}, optimizer" in capsys.readouterr().out
    assert json.loads(path.read_text())["dtype"] == dtype


def test_several_dtypes_are_all_told() -> None:
    def build() -> Workload:
        model = torch.nn.Sequential(torch.nn.Linear(8, 2, dtype=torch.float32), torch.nn.Linear(8, 8, dtype=torch.bfloat16))
        return Workload(about="mixed", model=model, loss=lambda: sum(p.float().sum() for p in model.parameters()))  # type: ignore[arg-type,return-value]  # a sum of tensors is one

    step = recorded(build, optimizer="none")
    assert step.parameters_by_dtype == {"bfloat16": 72, "float32": 18}
    assert (step.dtype, step.num_parameters) == ("bfloat16 and float32", 90)


def test_a_budget_that_no_plan_meets_exits_with_1(models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    command = ["plan", f"{models}:tiny", "--batch", "64", "--hbm-budget", "1MiB", "--json", str(path)]
    assert main(command) == 1
    captured = capsys.readouterr()
    data = json.loads(path.read_text())
    assert data["feasible"] is False
    assert data["plan"] is data["planning_ms"] is data["ideal_us"] is data["ideal_share"] is None
    assert str(data["smallest_budget_bytes"]) in captured.out
    assert captured.err == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["MODEL"]),
        (["gpt2", "--gpu", "b300"], ["h200, h100, b200, a100", "'b300'"]),
        (["gpt2", "--hbm-budget", "much"], ["--hbm-budget", "'much'"]),
        (["gpt2", "--batch", "-1"], ["--batch", "1 or more, got -1"]),
        (["gpt2", "--seq", "1025"], ["1024 tokens at most", "1025"]),
        (["gpt2", "--optimizer", "adam"], ["--optimizer", "adamw-fused"]),
        (["gpt2", "--json", "no/such/folder.json"], ["--json", "existing folder"]),
        (["{models}:fails", "--json", "."], ["--json", "a folder"]),  # not the function's error
        (["{models}:fails", "--json", ""], ["--json", "a folder"]),
        ([""], ["MODEL", "llama-7b", "module:function", "got ''"]),
        (["llama7b"], ["llama-7b", "'llama7b'"]),
        (["no_such_module:f"], ["can be imported", "no_such_module"]),
        ([":f"], ["module:function", "':f'"]),
        (["{models}:absent"], ["a function 'absent'", "no such name"]),
        (["{models}:number"], ["a function 'number'", "int"]),
        (["{models}:tiny"], ["'batch'", "say --batch"]),
        (["{models}:nothing", "--seq", "3"], ["--seq", "leave it out"]),
        (["{models}:nothing"], ["(model, batch)", "None"]),
        (["{models}:numbers"], ["torch.nn.Module", "int"]),
        (["{models}:bad_loss"], ["loss_fn(output, batch)", "str"]),
        (["{models}:no_loss"], ["scalar", "(2, 64)", "loss_fn(output, batch)"]),
        (["{models}:fails"], ["ZeroDivisionError", "models_of_a_user.py:"]),
        (["{models}:leaves"], ["SystemExit: 3", "models_of_a_user.py:"]),
        (["{models}:looks"], ["models_of_a_user.py:", "fake tensors have shapes and no values"]),
        (["{models}:frozen"], ["require gradients"]),
        (["{models}:elsewhere"], ["on the CPU", "meta"]),
    ],
)
def test_bad_usage_is_one_line_and_exits_with_2(
    arguments: list[str], words: list[str], models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *(argument.format(models=models) for argument in arguments)]) == 2
    captured = capsys.readouterr()
    assert [word for word in words if word not in captured.err] == []
    assert captured.out == ""
    assert captured.err.count("\n") == 1


def test_a_long_message_of_somebody_elses_is_cut(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{models}:talks"]) == 2
    err = capsys.readouterr().err
    assert "one of Config0, Config1" in err
    assert len(err) < 500


# --- what needs more than the library does


def _without(monkeypatch: pytest.MonkeyPatch, absent: str) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("chameleon_mm.tools.hub_models.find_spec", lambda name: None if name == absent else find_spec(name))


def test_without_transformers_the_others_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _without(monkeypatch, "transformers")
    assert main(["plan", "somebody/some-model"]) == 2
    err = capsys.readouterr().err
    assert [word for word in ("llama-7b", "module:function", "chameleon-mm[plan]") if word not in err] == []


def test_a_name_that_the_hub_cannot_be_asked_for_costs_one_try(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    tries = list[str]()

    def unreachable(client: Any, request: Any, **_: Any) -> None:
        tries.append(str(request.url))
        raise httpx.ConnectError("no network", request=request)

    httpx = importlib.import_module(type(importlib.import_module("huggingface_hub").get_session()).__module__.split(".")[0])
    monkeypatch.setattr(httpx.Client, "send", unreachable)
    assert main(["plan", "lama"]) == 2
    assert sum(url.endswith("/lama/resolve/main/config.json") for url in tries) == 1
    assert "llama-70b" in (err := capsys.readouterr().err) and err.endswith("or an earlier download; llama-7b?\n")


def test_a_llama_of_hugging_faces_needs_what_ours_does(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=3, hidden_size=256, intermediate_size=688, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=1000, max_position_embeddings=512,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    shape = LlamaShape(layers=3, width=256, heads=8, kv_heads=4, ffn=688, vocabulary=1000, context=512)

    def ours() -> Workload:
        model, ids = Llama(shape), torch.zeros(2, 512, dtype=torch.int64)
        return Workload(about="ours", model=model, loss=lambda: model.loss(ids))

    def step(build: Build) -> RecordedStep:
        return recorded(build, dtype=torch.bfloat16, min_bytes=MIB)

    theirs = step(source_of(str(tmp_path / "config.json"), batch=2, seq=None, dtype=torch.bfloat16))
    mine = step(ours)
    assert theirs.num_parameters == mine.num_parameters
    saved = [one.trace.tensor_bytes[one.trace.tensor_kind == TensorKind.ACTIVATION].tolist() for one in (theirs, mine)]
    assert sorted(saved[0]) == sorted(saved[1])
    assert theirs.about.endswith("(LlamaForCausalLM), 2 x 512 tokens")


@pytest.mark.parametrize("path", ["./nofile.json", "nofile.json", "/nowhere/model", "../nowhere", "a/b/c", "./fifo.json"])
def test_a_path_to_nothing_is_told_as_one(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo.json")  # without a writer: a reader would wait for ever
    assert main(["plan", path]) == 2
    said = capsys.readouterr().err
    assert f"expected a file or folder with a Hugging Face configuration, got {path!r}, which is neither" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "vits"}, ["causal language model", "image classification", "VitsConfig", "module:function"]),
        ({"model_type": "llama", "hidden_size": 100, "num_attention_heads": 7}, ["100", "multiple", "heads (7)"]),
        ({"model_type": "no such"}, ["transformers can read", "no such"]),
        ([], ["transformers can read"]),
    ],
)
def test_why_a_configuration_is_refused_is_told_in_a_line(
    config: Any, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert main(["plan", str(path)]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert [word for word in words if word not in err] == []
    assert len(err) < 700


def test_a_quantization_that_is_ignored_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 99}
    config = {"model_type": "qwen2", **sizes, "num_key_value_heads": 2}
    notes = []
    for quantization in ({}, {"quantization_config": {"quant_method": "awq", "bits": 4}}):
        path.write_text(json.dumps({**config, **quantization}))
        assert main(["plan", str(path), "--seq", "16"]) == 0
        notes.append("quantization_config is ignored" in capsys.readouterr().out)
    assert notes == [False, True]


@pytest.mark.parametrize(
    ("more", "what", "done", "total"),
    [
        ([], "recording one step", 1, 2),  # the second part, the plan, is what it ends with
        (["--swap-optimizer"], "running a session's first steps", RUN_STEPS, RUN_STEPS),
        pytest.param(["--compile"], "compiling", len(PARTITIONS), len(PARTITIONS), marks=pytest.mark.thorough),
    ],
)
def test_a_bar_shows_what_is_done_on_a_terminal_alone(
    models: str, monkeypatch: pytest.MonkeyPatch, more: list[str], what: str, done: int, total: int
) -> None:
    add_arguments(parser := argparse.ArgumentParser())
    ends, stop = list[tuple[float, float | None]](), Progress.stop

    def stopped(bar: Progress) -> None:
        ends.append((bar.tasks[0].completed, bar.tasks[0].total))
        stop(bar)

    monkeypatch.setattr(Progress, "stop", stopped)
    for terminal in (True, False):
        console = Console(file=(out := io.StringIO()), force_terminal=terminal, width=120)
        assert run(parser.parse_args([f"{models}:tiny", "--batch", "2", *more]), console, lambda *_: {}) == 0
        assert (what in out.getvalue()) is terminal
    assert ends[0] == (done, total)


# --- at its size

_MEASURED = """
import json, resource, sys
from chameleon_mm.tools.cli import main
code = main(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))  # ru_maxrss has the parent's memory, too
peak_kib = int(status["VmHWM"].split()[0])
print(json.dumps({"code": code, "cpu_s": used.ru_utime + used.ru_stime, "peak_kib": peak_kib}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "llama-7b --batch 4 --gpu h100",
        pytest.param("llama-3-8b --gpu h100", marks=pytest.mark.thorough),
        pytest.param("llama-13b --gpu h200", marks=pytest.mark.thorough),
        pytest.param("llama-70b --fsdp 8 --gpu h200", marks=pytest.mark.thorough),
        pytest.param("video-dit-2b --gpu h100", marks=pytest.mark.thorough),
        pytest.param("llama-3-8b --lora 16 --gpu rtx4090 --seq 2048 --batch 2", marks=pytest.mark.thorough),
    ],
)
def test_what_people_train_is_planned_within_20_seconds_and_1_gib(command: str) -> None:
    root = Path(chameleon_mm.__file__).resolve().parents[1]
    program = [sys.executable, "-c", _MEASURED, "plan", *command.split(), "--optimizer", "adamw-fused"]
    done = subprocess.run(program, cwd=root, capture_output=True, text=True, check=True)
    used = json.loads(done.stdout.splitlines()[-1])
    assert used["code"] == 0
    assert used["peak_kib"] * 1024 <= GIB
    assert used["cpu_s"] <= 40  # of two cores: a busy machine makes the clock on the wall say nothing
