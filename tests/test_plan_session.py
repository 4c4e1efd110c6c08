"""Tests of `chameleon-mm plan` for sessions that swap more than activations: its figures are those of the session itself.

The reference of a predicted run is the same session on the simulated device, whose operators compute every number.
"""

from __future__ import annotations

import json
import resource
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import chameleon_mm as cm
from chameleon_mm.device.sim import SimDevice
from chameleon_mm.device.specs import SPECS
from chameleon_mm.plan.unswapped_memory import least_memory, peak_memory
from chameleon_mm.tools import session_on_shapes
from chameleon_mm.tools.cli import main
from chameleon_mm.tools.demo import GPT, GPTConfig
from chameleon_mm.tools.largest import SEQ_STEP, Bound, Tried, _search
from chameleon_mm.tools.plan_command import source_of
from chameleon_mm.tools.session_on_shapes import RunRequest, Swapped, beside, host_bytes_beside, record, run_session
from chameleon_mm.tools.shape_operators import GpuOperators, NoArithmetic
from chameleon_mm.tools.step_on_shapes import TrainingStep
from chameleon_mm.tools.workload import Build, Llama, LlamaShape, Workload
from chameleon_mm.units import KIB, MIB, format_us
from tests._fakes import refusing
from tests._traces import away_before_first_uses_alone
from tests._user_modules import write_module

BOTH, STATE = Swapped(optimizer=True, parameters=True), Swapped(optimizer=True)


def gpt() -> Workload:
    model = GPT(GPTConfig(layers=6, width=192, heads=4, context=192))
    ids = torch.zeros(2, 192, dtype=torch.int64)
    return Workload(about="a gpt", model=model, loss=lambda: model.loss(ids, ids))


def llama() -> Workload:
    model = Llama(LlamaShape(layers=3, width=192, heads=4, kv_heads=2, ffn=512, vocabulary=100, context=512))
    ids = torch.zeros(1, 512, dtype=torch.int64)
    return Workload(about="a llama", model=model, loss=lambda: model.loss(ids))


def request_for(build: Build, swapped: Swapped, hbm_budget: int = 1 << 40, optimizer: str = "adamw-fused") -> RunRequest:
    return RunRequest(
        build=build,
        spec=SPECS["h200"],
        swapped=swapped,
        hbm_budget_bytes=hbm_budget,
        host_budget_bytes=None,
        dtype=torch.float32,
        optimizer=optimizer,
        min_bytes=64 * KIB,
    )


def within(build: Build, swapped: Swapped, ratio: float, optimizer: str = "adamw-fused") -> RunRequest:
    """A request whose budget is the unswapped peak divided by `ratio`."""
    request = request_for(build, swapped, optimizer=optimizer)
    return replace(request, hbm_budget_bytes=int(peak_memory(record(request, in_buckets=False).trace).nbytes / ratio))


def computed(request: RunRequest, steps: int) -> tuple[list[float], list[int]]:
    """Time and peak of each step, of a session whose operators compute."""
    device = SimDevice(request.spec)
    with nullcontext() if request.swapped.parameters else device.compute(), GpuOperators():  # else it is built on the host
        step = TrainingStep(request.build(), request.optimizer, started=False)
    with device.compute(), GpuOperators():
        session = cm.SwapSession(
            request.hbm_budget_bytes,
            "8GiB",
            device,
            request.min_bytes,
            model=step.model,
            optimizer=step.optimizers[0],
            recompute=False,
            parameters="swap" if request.swapped.parameters else "keep",
        )
        peaks = []
        with session:
            marks = [device.current_stream().record(timed=True)]
            for _ in range(steps):
                device.reset_peaks()
                with session.step():
                    loss = step.forward_backward()
                    step.update()
                    del loss
                marks.append(device.current_stream().record(timed=True))
                peaks.append(device.peak_allocated_bytes())
            marks[-1].synchronize()
    return [end.elapsed_us(start) for start, end in pairwise(marks)], peaks


# --- operators that compute nothing


def test_results_have_the_shapes_and_strides_that_they_have_when_computed() -> None:
    def shapes() -> list[tuple[Any, ...]]:
        step = TrainingStep(gpt(), "adamw", started=False)
        loss = step.forward_backward()
        tensors = [loss, *step.model.parameters(), *(p.grad for p in step.model.parameters() if p.grad is not None)]
        step.update()
        tensors += [t for state in step.optimizers[0].state.values() for t in state.values()]
        return [(t.shape, t.stride(), t.dtype, type(t), t.untyped_storage().nbytes()) for t in tensors]

    plain = shapes()
    with NoArithmetic():
        assert shapes() == plain


def test_small_numbers_are_computed_and_large_ones_are_not() -> None:
    with NoArithmetic():
        count = torch.zeros(()) + 3
        large = torch.zeros(1 << 20) + 3
        view = large[: 1 << 19]
        added = large.add_(1)
    assert count.item() == 3
    assert added is large
    assert view.untyped_storage().data_ptr() == large.untyped_storage().data_ptr()


def test_memory_that_nobody_writes_is_never_there() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with NoArithmetic():
        large = torch.zeros(1 << 14, 1 << 15)  # 2 GiB
        product = large @ large.t()
        product.mul_(2)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert product.shape == (1 << 14, 1 << 14)
    assert grown * KIB < 64 * MIB


# --- the run


@pytest.mark.ci
@pytest.mark.parametrize(
    ("build", "swapped", "ratio", "optimizer"),
    [(gpt, BOTH, 4.0, "adamw-fused"), (gpt, BOTH, 3.0, "adamw"), (llama, BOTH, 2.5, "sgd"), (llama, STATE, 2.0, "adamw-fused")],
)
def test_the_predicted_run_is_the_computed_one(build: Build, swapped: Swapped, ratio: float, optimizer: str) -> None:
    """Times on the virtual clock agree to the microsecond, and peaks to the byte, the first step included."""
    request = within(build, swapped, ratio, optimizer)
    run = run_session(request)
    times, peaks = computed(request, len(run.steps))
    assert run.refused is None
    assert run.plans > 0
    assert [step.peak_bytes for step in run.steps] == peaks
    assert [step.step_us for step in run.steps] == times
    assert run.holds


def recorded_by_a_session(request: RunRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trace that the session recorded, of which it makes its plans."""
    sessions: list[cm.SwapSession] = []

    def made(*args: Any, **given: Any) -> cm.SwapSession:
        sessions.append(cm.SwapSession(*args, **given))
        return sessions[-1]

    monkeypatch.setattr(session_on_shapes, "SwapSession", made)
    run_session(request, steps=range(2), counted=False)
    adaptation = sessions[0]._adaptation
    assert adaptation is not None
    assert adaptation.latest is not None
    return adaptation.latest.trace


@pytest.mark.ci
@pytest.mark.parametrize("build", [gpt, llama])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_what_lies_beside_the_window_is_what_a_session_records(
    build: Build, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = within(build, BOTH, 2.0, optimizer)
    step = record(request, in_buckets=True)
    window = step.window(request.hbm_budget_bytes)
    # A session's plans know nothing of buckets of state, which come and go while nothing is recorded.
    predicted, recorded = beside(replace(step, largest_bucket_bytes=0), BOTH), recorded_by_a_session(request, monkeypatch)
    assert peak_memory(predicted).nbytes == peak_memory(recorded).nbytes - window
    # Only the session knows the storages that are idle between two uses.
    assert least_memory(predicted).nbytes == least_memory(away_before_first_uses_alone(recorded)).nbytes - window
    assert peak_memory(predicted).idle_bytes == peak_memory(recorded).idle_bytes


def test_buckets_of_state_change_nothing_that_lies_on_the_host() -> None:
    request = within(llama, BOTH, 2.0, "adamw")
    whole, parts = record(request), record(request, in_buckets=True)
    assert 0 == whole.largest_bucket_bytes < parts.largest_bucket_bytes
    for budget in (request.hbm_budget_bytes, 1 << 40):
        assert host_bytes_beside(whole, BOTH, budget) == host_bytes_beside(parts, BOTH, budget) > 0
        assert whole.window(budget) == parts.window(budget)


class Askers(TorchFunctionMode):
    """Counts, by module, the library's own code that asks torch something which a mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
            frame = frame.f_back
        name = frame.f_globals.get("__name__", "")
        if name.startswith(("chameleon_mm.record", "chameleon_mm.state", "chameleon_mm.swap", "chameleon_mm.device.operators")):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def test_no_function_mode_sees_what_the_library_asks_in_a_step() -> None:
    """Each question would be a call of Python, in the plan's own mode as in a user's: torch.set_default_device is one."""
    request, seen = within(gpt, BOTH, 2.0), []
    for steps in (2, 4):
        with Askers() as askers:
            run_session(request, steps=range(steps), counted=False)
        del askers.counts["chameleon_mm.state.parameter_watch"]  # it hands on the user's own calls
        seen.append(askers.counts)
    assert seen[0] == seen[1]  # all at the session's begin and end
    assert seen[0]


def test_state_alone_is_smaller_than_all_on_the_device() -> None:
    def least(swapped: Swapped) -> int:
        request = request_for(gpt, swapped, 64 * MIB)
        return least_memory(beside(record(request, in_buckets=True), swapped)).nbytes

    assert least(BOTH) < least(STATE) < least(Swapped())


def test_on_a_slow_link_the_stall_is_all_that_a_step_takes_longer() -> None:
    request = within(llama, BOTH, 2.5)
    request = replace(request, spec=replace(request.spec, d2h_gbps=5.0, h2d_gbps=5.0, duplex_gbps=8.0))
    run = run_session(request)
    longer = run.steps[-1].step_us - record(request, in_buckets=False).trace.duration_us
    assert longer > 0
    assert 0.9 * longer < run.stall_us <= longer  # at these sizes the host's calls take the rest


def test_a_session_that_finds_no_room_is_an_answer() -> None:
    run = run_session(request_for(gpt, BOTH, 256 * KIB))
    assert run.refused is not None
    assert "hbm_budget: expected" in run.refused
    assert not run.holds
    assert run.steps == ()
    limited = run_session(replace(within(gpt, BOTH, 2.0), host_budget_bytes=256 * KIB))
    assert not limited.holds or limited.host_bytes <= 256 * KIB


# --- the command

MODELS = """
import torch

def mlp(batch, layers=4):
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(layers)))
    return model, torch.randn(batch, 256), lambda output, batch: output.square().sum()

def fixed():
    return torch.nn.Linear(256, 256), torch.randn(8, 256), lambda output, batch: output.sum()
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's in the working directory."""
    return write_module("swapped_models_of_a_user", MODELS, tmp_path, monkeypatch)


def test_a_session_that_swaps_both_tells_all(models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    swaps = ["--swap-optimizer", "--swap-parameters", "--hbm-budget", "24MiB"]
    command = ["plan", f"{models}:mlp", "--batch", "4096", *swaps, "--dtype", "float32", "--json", str(path)]
    assert main(command) == 0
    told: dict[str, Any] = json.loads(path.read_text())
    printed = capsys.readouterr().out
    assert told["hbm_budget_bytes"] == 24 * MIB < told["peak_bytes"]
    assert told["session"]["swapped"] == {"optimizer": True, "parameters": True}
    assert told["session"]["holds"] and told["session"]["plans"] > 0
    assert told["predicted"] and told["simulated"]
    assert all(step["peak_bytes"] <= told["hbm_budget_bytes"] for step in told["session"]["steps"])
    assert "in every step, the first included" in printed
    for word in ("later steps", "optimizer state"):
        assert word in printed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--swap-optimizer", "--optimizer", "none"], "--swap-optimizer: expected an optimizer"),
        (["--largest", "seq", "--seq", "8"], "--largest seq: expected no --seq"),
        (["--largest", "batch", "--swap-parameters"], "--largest: expected --swap-optimizer"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_built(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("chameleon_mm.tools.plan_command.source_of", refusing(AssertionError, "built"))
    assert main(["plan", "gpt2", *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1


# --- the largest that fits


def found(command: list[str], path: Path) -> dict[str, Any]:
    assert main([*command, "--json", str(path)]) == 0
    told: dict[str, Any] = json.loads(path.read_text())
    return told


@pytest.mark.parametrize("seed", range(50))
def test_a_search_ends_at_the_last_size_that_fits_whatever_grows(seed: int) -> None:
    """Memory that grows evenly, faster and faster, or not; limits of the host and of the model, which no line foretells."""
    random = Random(seed)
    by, base, slope = random.choice((1, SEQ_STEP)), random.randrange(1000), random.randrange(0, 100)
    bent, left = random.choice((0, 0, 1, 3)), random.randrange(500, 10**5)
    limits = {bound: random.randrange(1, 500) for bound in (Bound.HOST, Bound.MODEL) if random.random() < 0.5}
    tried = []

    def try_(size: int) -> Tried:
        tried.append(size)
        number = size // by
        nbytes = base + slope * number + bent * number**2 // 7
        over = [bound for bound, most in (limits | {Bound.HOST: limits.get(Bound.HOST, 600)}).items() if number > most]
        bound = Bound.DEVICE if nbytes > left else over[0] if over else None
        if Bound.MODEL in over:
            return Tried(size=size, bound=bound)
        return Tried(size=size, bound=bound, device_bytes=nbytes, device_left_bytes=left)

    low, high = _search(try_, by)
    count = len(tried)
    expected = next(size for size in range(by, 1000 * by, by) if try_(size).bound is not None)
    assert (high.size, low.size if low is not None else 0) == (expected, expected - by)
    assert count <= 30


@pytest.mark.ci
@pytest.mark.parametrize("swaps", [[], ["--swap-optimizer"], ["--swap-optimizer", "--swap-parameters"]])
def test_the_largest_batch_fits_and_one_more_does_not(
    swaps: list[str], models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--dtype", "float32", "--hbm-budget", "12MiB", "--min-bytes", "64KiB", "--no-recompute", *swaps]
    told = found(["plan", f"{models}:mlp", "--largest", "batch", *options], tmp_path / "largest.json")
    assert told["bound"] == "device"
    size = told["size"]
    assert told["next"]["size"] == size + 1
    assert told["next"]["device_bytes"] > told["next"]["device_left_bytes"]
    if not swaps:
        unswapped, planned = told["ways"]
        assert planned["peak_bytes"] <= 12 * MIB < unswapped["peak_bytes"]
        assert f"a step at {size} takes {format_us(planned['step_us'])} (predicted)" in capsys.readouterr().out
        source = source_of(f"{models}:mlp", batch=size, seq=None, dtype=torch.float32)
        more = source_of(f"{models}:mlp", batch=size + 1, seq=None, dtype=torch.float32)
        fits, too_large = (
            record(request_for(build, Swapped(), optimizer="adamw"), in_buckets=False) for build in (source, more)
        )
        assert least_memory(fits.trace).nbytes <= 12 * MIB < least_memory(too_large.trace).nbytes
        return
    path = tmp_path / "plan.json"
    ends = [main(["plan", f"{models}:mlp", "--batch", str(n), *options, "--json", str(path)]) for n in (size, size + 1)]
    told_more = json.loads(path.read_text())
    assert ends[0] == 0
    assert ends[1] == 1 or told_more["session"]["plans"] == 0


def test_the_host_may_be_what_binds(models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--batch", "64", "--dtype", "float32", "--hbm-budget", "16MiB", "--host-budget", "12MiB", "--min-bytes", "64KiB"]
    swaps = ["--swap-optimizer", "--swap-parameters"]
    told = found(["plan", f"{models}:mlp", "--largest", "layers", *options, *swaps], tmp_path / "x.json")
    assert told["bound"] == "host"
    assert told["session"]["host_bytes"] <= 12 * MIB
    assert "what binds is pinned host memory" in capsys.readouterr().out


@pytest.mark.parametrize(("what", "expected"), [("batch", "'batch'"), ("seq", "'seq'"), ("layers", "'layers'")])
def test_a_function_without_the_parameter_is_told(
    what: str, expected: str, models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"{models}:fixed", "--largest", what]) == 2
    error = capsys.readouterr().err
    assert f"to have a parameter {expected}" in error
    assert len(error.strip().splitlines()) == 1
