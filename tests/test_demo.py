"""Demo: its parts, then the whole command on the simulator, with forced differences where none are allowed."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from chameleon_mm.api.session import SwapSession
from chameleon_mm.device.sim import SimDevice
from chameleon_mm.tools import demo as training
from chameleon_mm.tools.cli import main
from chameleon_mm.tools.demo import GPT, GPTConfig, Rows, RunResult, draw_rows, first_difference, read_text, train, train_plain
from chameleon_mm.tools.demo_command import SIZES, show, table_rows
from chameleon_mm.units import parse_size
from tests._fakes import refusing

TINY = GPTConfig(layers=2, width=32, heads=4, context=64)
TINY_ARGS = ["--device=sim", "--layers=2", "--width=64", "--heads=2", "--context=1024", "--batch=4", "--steps=3"]


def tiny_rows(steps: int = 2) -> Rows:
    return draw_rows(read_text(), steps=steps, batch=4, context=TINY.context)


def tiny_run() -> RunResult:
    return train(TINY, tiny_rows(), SimDevice())


# --- text


def test_targets_are_the_next_bytes_and_drawing_moves_no_other_random_state() -> None:
    text = bytes(range(256))
    before = torch.get_rng_state()
    rows = draw_rows(text, steps=3, batch=2, context=16)
    assert torch.equal(torch.get_rng_state(), before)
    for ids, targets in rows:
        assert ids.shape == targets.shape == (2, 16)
        assert ids.dtype == torch.int64
        assert torch.equal(ids + 1, targets)
    again = draw_rows(text, steps=3, batch=2, context=16)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(rows, again, strict=True))
    assert not torch.equal(rows[0][0], rows[1][0])
    assert len(draw_rows(b"x" * 9, steps=1, batch=1, context=8)) == 1
    with pytest.raises(ValueError, match="--context: expected less than the 8 bytes"):
        draw_rows(b"x" * 8, steps=1, batch=1, context=8)


# --- model


def test_no_position_sees_a_later_byte() -> None:
    model = GPT(TINY).eval()
    ids = torch.randint(256, (1, TINY.context))
    later = ids.clone()
    later[0, 40] += 1
    with torch.no_grad():
        one, other = model(ids), model(later)
    assert model.head.weight is model.tokens.weight
    assert torch.equal(one[:, :40], other[:, :40])
    assert not torch.equal(one[:, 40:], other[:, 40:])


def test_the_model_learns() -> None:
    result = train(TINY, [*tiny_rows(steps=1)] * 40, SimDevice())
    losses = result.to_dict()["losses"]
    assert losses[-1] < 0.8 * losses[0]


# --- one run


def test_a_run_leaves_nothing_on_the_device(sim: SimDevice, no_gc: None) -> None:
    rows = tiny_rows()
    result = train(TINY, rows, sim)
    del rows  # on the simulator the rows count from the moment compute read them
    # Parameters, gradients and two moments are alive together.
    assert result.peak_bytes > 4 * sum(p.nbytes for p in GPT(TINY).parameters())
    assert sim.allocated_bytes() == 0


def test_activations_dominate_at_the_default_sizes() -> None:
    sizes = SIZES["simulated"]
    config = GPTConfig(**{name: sizes[name] for name in ("layers", "width", "heads", "context")})
    result = train(config, draw_rows(read_text(), steps=1, batch=sizes["batch"], context=sizes["context"]), SimDevice())
    model_bytes = sum(p.nbytes for p in GPT(config).parameters())
    # In one step the optimizer's state is made after the peak: its place in every later peak is two of the four shares.
    assert 4 * model_bytes < (result.peak_bytes + 2 * model_bytes) / 5


def test_the_plain_run_is_the_same_training_with_nothing_of_ours_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    around: list[object] = []
    real = training.Program.step

    def step(self: training.Program, number: int) -> None:
        around.append(torch.utils._python_dispatch._get_current_dispatch_mode_stack())
        around.append(torch._C._autograd._top_saved_tensors_default_hooks(False))
        real(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(training.Program, "step", step)
        plain = train_plain(TINY, tiny_rows(), torch.device("cpu"))
    assert around == [[], None] * 2
    assert first_difference(plain, tiny_run().values) is None


# --- comparing two runs


def flipped(tensor: Tensor, index: int = 0) -> Tensor:
    """`tensor` with the lowest bit of one value's first byte flipped."""
    changed = tensor.clone()
    changed.view(-1).view(torch.uint8)[index * tensor.element_size()] ^= 1
    return changed


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([1]), torch.tensor([1.0]), False),
        (torch.tensor([1.0]), torch.tensor([[1.0]]), False),
        (torch.tensor(1.0), torch.tensor(1.0), True),
    ],
)
def test_equality_is_of_bits(a: Tensor, b: Tensor, same: bool) -> None:
    assert (first_difference({"it": a}, {"it": b}) is None) is same


def with_flipped(name: str, index: int = 0) -> Callable[[RunResult], Mapping[str, Tensor]]:
    return lambda result: {**result.values, name: flipped(result.values[name], index)}


CHANGES: dict[str, tuple[Callable[[RunResult], Mapping[str, Tensor]], str]] = {
    "loss": (with_flipped("loss of step 2"), "loss of step 2: 1 of 1 values differ"),
    "gradient norm": (with_flipped("gradient norm of step 1"), "gradient norm of step 1:"),
    "weight": (
        with_flipped("weight norm.bias", 3),
        "weight norm.bias: 1 of 32 values differ, the first at flat index 3",
    ),
    "missing weight": (
        lambda r: {name: value for name, value in r.values.items() if name != "weight norm.bias"},
        "weight norm.bias: only in the first run",
    ),
    "shape": (lambda r: {**r.values, "weight norm.bias": torch.zeros(2)}, r"weight norm.bias: torch.float32 \[32\]"),
    "random state": (with_flipped("random state of the CPU's generator"), "random state of the CPU's generator"),
    "device's random state": (
        lambda r: {**r.values, "random state of the device's generator": torch.zeros(2)},
        "random state of the device's generator: only in the second run",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_one_bit_is_found_and_named(what: str) -> None:
    change, message = CHANGES[what]
    result = tiny_run()
    difference = first_difference(result.values, change(result))
    assert difference is not None
    assert re.match(message, difference)
    # The earliest difference is the one named.
    changed = {**change(result), "loss of step 1": flipped(result.values["loss of step 1"])}
    assert str(first_difference(result.values, changed)).startswith("loss of step 1:")


# --- what it says


def figures(**changes: Any) -> dict[str, Any]:
    run = {"peak_bytes": 999 << 20, "step_us": [9e6, 999_990.0, 999_990.0], "losses": [2.0, 1.0]}
    defaults: dict[str, Any] = {
        "config": SIZES["simulated"], "hbm_budget_bytes": 999 << 20, "budget_held": True, "passed": True,
        "first_difference": None, "first_difference_to_plain": None, "unswapped": run, "swapped": run,
    }  # fmt: skip
    return {**defaults, **changes}


def test_the_table_fits_80_columns_and_simulated_time_says_so_and_leaves_the_first_step_out() -> None:
    shown = io.StringIO()
    with SwapSession("1GiB", "64MiB", SimDevice(), "4KiB") as session:
        pass
    show(figures(), session.report(), SimDevice(), Console(file=shown, width=80))
    table = [line for line in shown.getvalue().splitlines() if line[:1] in "┏┃┡│└"]
    assert max(map(len, table)) <= 80
    assert not any("…" in line for line in table)
    assert ("step, median (simulated)", "999.99 ms", "999.99 ms") in table_rows(figures(), SimDevice())


# --- the command


def test_the_demo_passes_on_the_simulator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "demo.json"
    assert main(["demo", *TINY_ARGS, "--json", str(path)]) == 0
    text = capsys.readouterr().out
    assert "bit-identical: yes (every loss and gradient norm, final weights, random state)" in text
    assert "bit-identical to plain PyTorch: yes (same training on cpu, no chameleon_mm)" in text
    assert text.endswith(f"written: {path}\n")
    assert "simulated H200" in text
    data = json.loads(path.read_text())
    assert {row[0]: row[2] for row in table_rows(data, SimDevice())}["HBM budget"].endswith("MiB, held")
    assert data["schema"] == "chameleon_mm.tools/6"
    assert data["device"] == "simulated H200"
    assert data["simulated"] is True
    assert {"commit", "versions", "date"} <= data.keys()
    assert data["passed"] is data["budget_held"] is True
    assert data["first_difference"] is data["first_difference_to_plain"] is None
    assert data["hbm_budget_bytes"] == data["unswapped"]["peak_bytes"] // 2
    assert data["swapped"]["peak_bytes"] <= data["hbm_budget_bytes"]
    assert data["unswapped"]["losses"] == data["swapped"]["losses"]
    assert len(data["swapped"]["step_us"]) == 3
    assert data["report"]["steps_by_phase"] == {"recorded": 1, "planned": 2}  # steps alike are recorded once
    assert data["report"]["peak_hbm_bytes"] == data["swapped"]["peak_bytes"]
    # At the unswapped peak at least half of the bytes had to be elsewhere.
    assert data["report"]["peak_host_bytes"] >= data["unswapped"]["peak_bytes"] - data["hbm_budget_bytes"]
    assert min(data["report"]["bytes_swapped_out"], data["report"]["bytes_swapped_in"]) > 0


@pytest.mark.ci
def test_the_budget_that_the_demo_asks_for_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *TINY_ARGS, "--hbm-budget", "2MiB"]) == 1
    out = capsys.readouterr().out
    assert "bit-identical: yes" in out
    enough = re.search(r"raise --hbm-budget to (.+)", out)
    assert enough is not None
    assert parse_size(enough[1]) > 2 << 20
    assert main(["demo", *TINY_ARGS, "--hbm-budget", enough[1]]) == 0
    assert main(["demo", *TINY_ARGS, "--hbm-budget", "64KiB"]) == 2  # below the model
    assert "hbm_budget: expected more than" in capsys.readouterr().err
    assert main(["demo", "--device=sim", "--hbm-budget=1GiB", "--ratio=4"]) == 2
    assert "not allowed with" in capsys.readouterr().err


def tampered(monkeypatch: pytest.MonkeyPatch, change: Callable[[RunResult, bool], RunResult]) -> None:
    """Let `change(result, swapped?)` alter each run's result."""
    real = training.train

    def fake(config: GPTConfig, rows: Rows, device: Any, *more: Any, **kwargs: Any) -> RunResult:
        return change(real(config, rows, device, *more, **kwargs), bool(more))

    monkeypatch.setattr(training, "train", fake)


def with_bit(result: RunResult, name: str) -> RunResult:
    return dataclasses.replace(result, values=with_flipped(name)(result))


TAMPERED: dict[str, tuple[Callable[[RunResult, bool], RunResult], tuple[str, ...]]] = {
    "one bit": (
        lambda r, swapped: with_bit(r, "loss of step 3") if swapped else r,
        ("bit-identical: no - loss of step 3:",),
    ),
    # With swapping and without alike, so that comparing those two shows nothing.
    "the device computes otherwise than plain PyTorch": (
        lambda r, swapped: with_bit(r, "gradient norm of step 2"),
        ("bit-identical: yes", "bit-identical to plain PyTorch: no - gradient norm of step 2:"),
    ),
    "a peak above the budget": (
        lambda r, swapped: dataclasses.replace(r, peak_bytes=r.peak_bytes * (3 if swapped else 1)),
        ("bit-identical: yes", "NOT held"),
    ),
}


@pytest.mark.ci
@pytest.mark.parametrize("what", TAMPERED)
def test_what_is_not_as_promised_fails_the_demo_and_is_named(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change, said = TAMPERED[what]
    tampered(monkeypatch, change)
    path = tmp_path / "demo.json"
    assert main(["demo", *TINY_ARGS, "--json", str(path)]) == 1
    out = capsys.readouterr().out
    assert [words for words in said if words not in out] == []
    data = json.loads(path.read_text())
    assert data["passed"] is False
    assert what != "one bit" or data["first_difference"].startswith("loss of step 3:")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hbm-budget", "12 parsecs"], "--hbm-budget: expected a number"),
        (["--steps", "0"], "--steps, --batch: expected 1 or more"),
        (["--heads", "5"], "multiple of heads"),
        (["--layers", "0"], "layers"),
        (["--context", "-1"], "context"),
        (["--json", "."], "--json: expected a file to write, got ., a folder"),
        (["--ratio=1"], "--ratio: expected more than 1, got 1"),
        (["--ratio=inf"], "--ratio: expected more than 1, got inf"),
    ],
)
def test_bad_usage_is_told_before_anything_is_trained(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "train", refusing(AssertionError, "trained in spite of bad usage"))
    assert main(["demo", *TINY_ARGS, *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_device_that_is_too_small_fails_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("chameleon_mm.device.resolve_device", lambda _: SimDevice(hbm_bytes="1MiB"))
    assert main(["demo", *TINY_ARGS]) == 1
    err = capsys.readouterr().err
    assert "out of memory" in err
    assert "smaller sizes" in err
    assert err.count("\n") == 1


# --- within a part of its memory


@pytest.mark.ci
def test_a_ratio_of_four_trains_within_a_quarter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ratio.json"
    args = ["--device=sim", "--layers=8", "--width=512", "--heads=4", "--context=32", "--batch=4", "--steps=3", "--ratio=4"]
    assert main(["demo", *args, f"--json={path}"]) == 0
    data = json.loads(path.read_text(encoding="utf-8"))
    budget, unswapped = data["hbm_budget_bytes"], data["unswapped"]["peak_bytes"]
    assert budget == unswapped // 4
    assert data["swapped"]["peak_bytes"] <= budget  # also in the first step, and as the session begins
    # What it takes unswapped is honest: weights, gradients and two moments are there at once, and so more than the budget.
    model = GPT(GPTConfig(layers=8, width=512, heads=4, context=32))
    model_bytes = sum(p.nbytes for p in model.parameters())
    assert unswapped > 4 * model_bytes > budget
    said = capsys.readouterr().out
    for what in ("parameters", "gradients", "optimizer state"):
        assert re.search(rf"{what} out / in +[1-9].* / [1-9]", said), what
