"""The demo: its parts, then the whole command on the simulator, with differences forced where none may be."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import chameleon_mm
from chameleon_mm.cli import main
from chameleon_mm.demo import program as program_module
from chameleon_mm.demo import train as train_module
from chameleon_mm.demo.command import SIZES
from chameleon_mm.demo.model import GPT, GPTConfig
from chameleon_mm.demo.outcome import Outcome, StepNote, by_kind, notes
from chameleon_mm.demo.program import (
    NoTextFound,
    Program,
    Rows,
    StepKind,
    TrainConfig,
    draw_batches,
    read_text,
    schedule,
    train_plain,
)
from chameleon_mm.demo.show import kind_rows, show, verdicts
from chameleon_mm.demo.show import rows as table_rows
from chameleon_mm.demo.train import RunResult, first_difference, same_bits, train
from chameleon_mm.device.sim import SimDevice
from chameleon_mm.session import SwapSession
from chameleon_mm.units import format_size_up, parse_size

TINY = GPTConfig(layers=2, width=32, heads=4, context=64)
TINY_ARGS = [
    "--device=sim", "--layers=2", "--width=64", "--heads=4", "--context=64", "--batch=8", "--steps=3", "--min-bytes=16KiB",
]  # fmt: skip
REPORT = {
    "bytes_swapped_out": 3 << 20, "bytes_swapped_in": 2 << 20, "hidden_fraction": 0.5, "stall_us": 1500.0,
    "peak_host_bytes": 1 << 20, "kept_by_reason": {"small": 7}, "steps": 2, "timed_steps": 2,
    "steps_by_phase": {"recorded": 1, "planned": 1}, "detailed_steps": 1, "plans": 3, "planning_us": 2500.0,
    "plan_cache_hits": 1,
}  # fmt: skip


def tiny_rows(steps: int = 2, seed: int = 0) -> Rows:
    return draw_batches(read_text(limit_bytes=1 << 16), steps=steps, batch=4, context=TINY.context, seed=seed)


def tiny_run(device: SimDevice | None = None, *, seed: int = 0) -> RunResult:
    return train(TrainConfig(model=TINY, steps=2, batch=4, seed=seed), tiny_rows(), device or SimDevice())


# --- text


def test_text_is_the_standard_library_in_the_order_of_its_names() -> None:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    whole = b"".join(path.read_bytes() for path in files[:5])
    assert read_text(limit_bytes=len(whole)) == whole


def test_text_is_cut_at_the_limit(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_bytes(b"second")
    (tmp_path / "a.py").write_bytes(b"first ")
    (tmp_path / "c.txt").write_bytes(b"not a source")
    assert read_text(tmp_path) == b"first second"
    assert read_text(tmp_path, limit_bytes=8) == b"first se"


def test_a_folder_without_text_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "empty.py").touch()
    with pytest.raises(NoTextFound, match="found none") as caught:
        read_text(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_row_longer_than_the_text_is_an_error() -> None:
    assert len(draw_batches(b"x" * 9, steps=1, batch=1, context=8, seed=0)) == 1
    with pytest.raises(NoTextFound, match="got 8"):
        draw_batches(b"x" * 8, steps=1, batch=1, context=8, seed=0)


def test_targets_are_the_next_bytes_and_drawing_moves_no_other_random_state() -> None:
    text = bytes(range(256))
    before = torch.get_rng_state()
    batches = draw_batches(text, steps=3, batch=2, context=16, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    for ids, targets in batches:
        assert ids.shape == targets.shape == (2, 16)
        assert ids.dtype == torch.int64
        assert torch.equal(ids + 1, targets)
    again = draw_batches(text, steps=3, batch=2, context=16, seed=5)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(batches, again, strict=True))
    assert not torch.equal(draw_batches(text, steps=1, batch=2, context=16, seed=6)[0][0], batches[0][0])


# --- schedule

WHOLE, HALF, EVALUATION = StepKind(length=64), StepKind(length=32), StepKind(length=64, training=False)


@pytest.mark.parametrize(
    ("steps", "kinds"),
    [
        (1, [WHOLE]),
        (2, [WHOLE, WHOLE]),
        (3, [WHOLE, HALF, WHOLE]),
        (5, [WHOLE, WHOLE, EVALUATION, HALF, WHOLE]),
        (11, [WHOLE] * 5 + [EVALUATION] + [HALF] * 3 + [WHOLE] * 2),
    ],
)
def test_the_sequence_changes_in_the_middle_and_back(steps: int, kinds: list[StepKind]) -> None:
    assert schedule(steps, 64) == tuple(kinds)


def test_rows_of_one_byte_have_no_half() -> None:
    assert {kind.length for kind in schedule(5, 1)} == {1}


@pytest.mark.parametrize("steps", range(1, 30))
def test_a_schedule_has_its_steps_and_begins_and_ends_with_whole_rows(steps: int) -> None:
    kinds = schedule(steps, 64)
    assert len(kinds) == steps
    assert kinds[0] == kinds[-1] == WHOLE


# --- model


def test_no_position_sees_a_later_byte() -> None:
    model = GPT(TINY).eval()
    ids = torch.randint(256, (1, TINY.context))
    later = ids.clone()
    later[0, 40] += 1
    with torch.no_grad():
        one, other = model(ids), model(later)
    assert torch.equal(one[:, :40], other[:, :40])
    assert not torch.equal(one[:, 40:], other[:, 40:])


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_the_embedding_only_where_tied(tied: bool) -> None:
    model = GPT(dataclasses.replace(TINY, tied=tied))
    assert (model.head.weight is model.tokens.weight) is tied


def test_the_model_learns() -> None:
    rows = [*tiny_rows(steps=1)] * 12
    result = train(TrainConfig(model=TINY, steps=12, batch=4, lr=1e-2), rows, SimDevice())
    assert result.losses[-1] < 0.8 * result.losses[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers"),
        ({"heads": 3}, "multiple of heads"),
        ({"dropout": 1.0}, "dropout"),
        ({"context": -1}, "context"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **change)


@pytest.mark.parametrize("change", [{"steps": 0}, {"batch": 0}, {"seed": -1}, {"lr": 0.0}, {"lr": float("nan")}])
def test_a_run_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        TrainConfig(**{"model": TINY, "steps": 1, "batch": 1, **change})


# --- one run


def test_a_run_reproduces_itself_and_another_seed_does_not() -> None:
    first = tiny_run()
    assert first_difference(first, tiny_run()) is None
    other = first_difference(first, tiny_run(seed=1))
    assert other is not None
    assert other.startswith("loss of step 1:")


def test_a_run_leaves_nothing_on_the_device(sim: SimDevice, no_gc: None) -> None:
    rows = tiny_rows()
    result = train(TrainConfig(model=TINY, steps=2, batch=4), rows, sim)
    del rows  # on the simulator the rows count from the moment compute read them
    assert result.peak_bytes > 0
    assert sim.allocated_bytes() == 0


def test_the_model_counts_towards_the_peak() -> None:
    result = tiny_run()
    assert result.model_bytes == sum(p.nbytes for p in GPT(TINY).parameters())
    assert result.peak_bytes > 4 * result.model_bytes  # parameters, gradients and two moments are alive together


def test_activations_dominate_at_the_default_sizes() -> None:
    sizes = SIZES["simulated"]
    config = GPTConfig(layers=sizes["layers"], width=sizes["width"], heads=sizes["heads"], context=sizes["context"])
    rows = draw_batches(read_text(), steps=1, batch=sizes["batch"], context=sizes["context"], seed=0)
    result = train(TrainConfig(model=config, steps=1, batch=sizes["batch"]), rows, SimDevice())
    # In one step the optimizer's state is made after the peak: its place in every later peak is two of the four shares.
    assert 4 * result.model_bytes < (result.peak_bytes + 2 * result.model_bytes) / 5


def test_an_evaluation_has_a_loss_and_trains_nothing() -> None:
    config = TrainConfig(model=TINY, steps=5, batch=4)
    rows = tiny_rows(steps=5)
    result = train(config, rows, SimDevice())
    evaluated = result.kinds.index(EVALUATION)
    assert (len(result.losses), len(result.grad_norms)) == (5, 4)
    # Of no consequence to what follows: another row for it changes its own loss and nothing else.
    others = [*rows[:evaluated], tiny_rows(steps=1, seed=9)[0], *rows[evaluated + 1 :]]
    other = train(config, others, SimDevice())
    assert [same_bits(a, b) for a, b in zip(result.losses, other.losses, strict=True)] == [True, True, False, True, True]
    assert first_difference(dataclasses.replace(other, losses=result.losses), result) is None


def test_a_step_has_its_own_time_and_peak() -> None:
    result = train(TrainConfig(model=TINY, steps=5, batch=4), tiny_rows(steps=5), SimDevice())
    time_of, peak_of = (dict(zip(result.kinds, column, strict=True)) for column in (result.step_us, result.step_peak_bytes))
    assert peak_of[WHOLE] > peak_of[HALF] > peak_of[EVALUATION]
    assert time_of[WHOLE] > time_of[EVALUATION]
    assert result.peak_bytes == max(result.step_peak_bytes)


def test_a_row_for_every_step_is_asked_for() -> None:
    with pytest.raises(ValueError, match="zip"):
        train(TrainConfig(model=TINY, steps=2, batch=4), tiny_rows(steps=1), SimDevice())


def test_the_plain_run_is_the_same_training_with_nothing_of_ours_around_it() -> None:
    def on_step() -> None:
        around.append(torch.utils._python_dispatch._get_current_dispatch_mode_stack())
        around.append(torch._C._autograd._top_saved_tensors_default_hooks(False))

    around: list[object] = []
    config = TrainConfig(model=TINY, steps=5, batch=4)
    plain = train_plain(config, tiny_rows(steps=5), torch.device("cpu"), on_step=on_step)
    assert around == [[], None] * 5
    assert first_difference(plain, train(config, tiny_rows(steps=5), SimDevice())) is None


# --- comparing two runs


def flipped(tensor: Tensor, index: int = 0) -> Tensor:
    """`tensor` with the lowest bit of one value's first byte flipped."""
    changed = tensor.clone()
    changed.view(torch.uint8).view(-1)[index * tensor.element_size()] ^= 1
    return changed


def test_equality_is_of_bits() -> None:
    nan = torch.tensor([float("nan")])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.tensor([1]), torch.tensor([1.0]))
    assert not same_bits(torch.tensor([1.0]), torch.tensor([[1.0]]))


CHANGES: dict[str, tuple[Callable[[RunResult], dict[str, Any]], str]] = {
    "loss": (lambda r: {"losses": flipped(r.losses, 1)}, r"loss of step 2: \S+ \(bits [0-9a-f]{8}\) against"),
    "gradient norm": (lambda r: {"grad_norms": flipped(r.grad_norms, 0)}, "gradient norm of step 1:"),
    "weight": (
        lambda r: {"weights": {**r.weights, "norm.bias": flipped(r.weights["norm.bias"], 3)}},
        "weight norm.bias: 1 of 32 values differ, the first at flat index 3:",
    ),
    "missing weight": (
        lambda r: {"weights": {name: w for name, w in r.weights.items() if name != "norm.bias"}},
        "weight norm.bias: only in the first run",
    ),
    "shape": (lambda r: {"weights": {**r.weights, "norm.bias": torch.zeros(2)}}, r"weight norm.bias: torch.float32 \[32\]"),
    "random state": (lambda r: {"random_states": (flipped(r.random_states[0]),)}, "random state of the CPU's generator"),
    "device's random state": (lambda r: {"random_states": r.random_states * 2}, "random state of the device's generator"),
    "steps": (lambda r: {"losses": r.losses[:1], "grad_norms": r.grad_norms[:1]}, "number of steps: 2 against 1"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_one_bit_is_found_and_named(what: str) -> None:
    change, message = CHANGES[what]
    result = tiny_run()
    changed = dataclasses.replace(result, **change(result))
    difference = first_difference(result, changed)
    assert difference is not None
    assert re.match(message, difference)
    assert first_difference(result, result) is None


def test_the_earliest_difference_is_the_one_named() -> None:
    result = tiny_run()
    changed = dataclasses.replace(result, losses=flipped(result.losses, 1), grad_norms=flipped(result.grad_norms, 0))
    assert str(first_difference(result, changed)).startswith("gradient norm of step 1:")


def test_steps_are_counted_with_evaluations_among_them() -> None:
    result = train(TrainConfig(model=TINY, steps=5, batch=4), tiny_rows(steps=5), SimDevice())
    changed = dataclasses.replace(result, grad_norms=flipped(result.grad_norms, 2))  # the third step is the evaluation
    assert str(first_difference(result, changed)).startswith("gradient norm of step 4:")


# --- what swapping made of each step


def swapped_run(steps: int) -> tuple[RunResult, tuple[StepNote, ...]]:
    device, sessions, reports = SimDevice(), [], []

    def session_of(program: Program) -> SwapSession:
        sessions.append(SwapSession("1GiB", "64MiB", device, "4KiB", model=program.model))
        return sessions[0]

    result = train(
        TrainConfig(model=TINY, steps=steps, batch=4), tiny_rows(steps), device, session_of,
        on_step=lambda: reports.append(sessions[0].report()),
    )  # fmt: skip
    return result, notes(reports, result.kinds)


def test_each_kind_is_recorded_once_and_known_when_it_comes_back() -> None:
    result, taken = swapped_run(7)
    assert [note.kind for note in taken] == list(result.kinds)
    assert taken[0].recorded and taken[0].phase == "recorded"
    for kind in (WHOLE, HALF):
        assert sum(note.recorded for note in taken if note.kind == kind) == 1
    assert taken[-1].kind == WHOLE and taken[-1].plan_known  # as it was before the sequence changed
    assert not any(note.recorded or note.plan_known for note in taken if note.kind == EVALUATION)


def test_a_plan_is_told_with_the_kind_that_it_is_for() -> None:
    _, taken = swapped_run(7)
    planned = {note.kind: note.planned_us for note in taken}
    assert planned[EVALUATION] is None
    assert planned[WHOLE] is not None and planned[HALF] is not None and planned[WHOLE] != planned[HALF]
    assert {note.planned_us for note in taken if note.kind == HALF and note.plan_known} == {planned[HALF]}


def test_by_kind_takes_medians_and_largest_peaks_of_steps_that_had_a_plan() -> None:
    plain = dataclasses.replace(tiny_run(), step_us=(9.0, 2.0, 4.0, 6.0), step_peak_bytes=(50, 10, 40, 20))
    swapped = dataclasses.replace(plain, step_us=(99.0, 3.0, 8.0, 5.0), step_peak_bytes=(90, 7, 8, 9))

    def note(kind: StepKind, *, recorded: bool = False, known: bool = False) -> StepNote:
        return StepNote(
            kind=kind, phase="planned", recorded=recorded, plan_known=known, planned_us=4.5, planned_peak_bytes=30
        )  # fmt: skip

    taken = [note(WHOLE, recorded=True), note(WHOLE, known=True), note(EVALUATION), note(WHOLE, known=True)]
    whole, evaluation = by_kind(plain, swapped, taken)
    assert (whole.kind, whole.steps, whole.recorded) == (WHOLE, 3, 1)
    assert (whole.unswapped_us, whole.planned_us, whole.measured_us) == (4.0, 4.5, 4.0)
    assert (whole.unswapped_peak_bytes, whole.planned_peak_bytes, whole.measured_peak_bytes) == (50, 30, 9)
    assert (evaluation.steps, evaluation.measured_us, evaluation.measured_peak_bytes) == (1, 8.0, 8)


# --- what it says

NOTES = tuple(
    StepNote(kind=WHOLE, phase=phase, recorded=known is False, plan_known=known, planned_us=2500.0, planned_peak_bytes=3 << 20)
    for phase, known in (("recorded", False), ("planned", True))
)


def outcome(**changes: Any) -> Outcome:
    result = tiny_run()
    defaults: dict[str, Any] = {
        "config": TrainConfig(model=TINY, steps=2, batch=4), "device": SimDevice("a100"),
        "unswapped": result, "swapped": result, "plain": result,
        "report": REPORT, "notes": NOTES, "hbm_budget_bytes": result.peak_bytes, "difference": None, "reproducible": None,
        "plain_difference": None, "plain_reproducible": None,
    }  # fmt: skip
    return Outcome(**{**defaults, **changes})


def test_a_passed_outcome_says_yes_and_held() -> None:
    passed = outcome()
    assert passed.passed
    assert verdicts(passed) == [
        "bit-identical: yes (every loss and gradient norm, final weights, random state)",
        "bit-identical to plain PyTorch: yes (same training on cpu, no chameleon_mm)",
    ]
    budget = next(row for row in table_rows(passed) if row[0] == "HBM budget")
    assert budget[2].endswith("held")
    assert "NOT" not in budget[2]


def test_simulated_time_says_so() -> None:
    names = [row[0] for row in table_rows(outcome())]
    assert {
        "stall, all steps (simulated)", "share of copy time hidden (simulated)",
    } <= set(names)  # fmt: skip
    steps = [row[0] for row in kind_rows(outcome()) if row[0].startswith("step,")]
    assert len(steps) == 3 and all(name.endswith("(simulated)") for name in steps)


def test_the_table_tells_phases_and_plans() -> None:
    told = {name: text for name, _, text in table_rows(outcome())}
    assert told["what the steps were"] == "1 recorded, 1 planned"
    assert told["steps recorded in detail"] == "1"
    assert told["plans made, host time"] == "3, 2.50 ms"
    assert told["steps that had a plan already"] == "1"


def test_planned_stands_beside_measured() -> None:
    told = {name: texts for name, *texts in kind_rows(outcome())}
    assert told["steps, of them recorded"] == ["2, 1"]
    assert told["step, planned (simulated)"] == ["2.50 ms"]
    assert told["peak, planned"] == ["3.00 MiB"]
    without = tuple(dataclasses.replace(note, planned_us=None, planned_peak_bytes=None) for note in NOTES)
    told = {name: texts for name, *texts in kind_rows(outcome(notes=without))}
    assert told["step, planned (simulated)"] == told["peak, planned"] == ["no plan"]


def test_what_was_not_timed_says_so() -> None:
    some = {name: text for name, _, text in table_rows(outcome(report={**REPORT, "timed_steps": 1}))}
    assert some["stall, 1 timed steps (simulated)"] == "1.50 ms"
    none = {**REPORT, "timed_steps": 0, "stall_us": None, "hidden_fraction": None}
    assert [text for name, _, text in table_rows(outcome(report=none)) if "stall" in name or "hidden" in name] == [
        "not measured", "not measured",
    ]  # fmt: skip


def test_losses_are_marked_by_their_bits() -> None:
    plain = tiny_run()
    changed = dataclasses.replace(plain, losses=flipped(plain.losses, 1))
    last = {name: text for name, _, text in table_rows(outcome(unswapped=plain, swapped=changed))}
    assert last["loss, first step"].endswith("(same bits)")
    assert last["loss, last step"].endswith("(DIFFERS)")


def test_the_table_fits_80_columns() -> None:
    shown = io.StringIO()
    slow = dataclasses.replace(
        tiny_run(), peak_bytes=999 << 20, step_us=(999_990.0,) * 3, step_peak_bytes=(999 << 20,) * 3
    )  # fmt: skip
    kinds = (StepKind(length=131_072), StepKind(length=65_536), EVALUATION)
    taken = tuple(
        StepNote(
            kind=kind, phase="planned", recorded=False, plan_known=True, planned_us=999_990.0, planned_peak_bytes=999 << 20
        )
        for kind in kinds
    )  # fmt: skip
    long = outcome(unswapped=slow, swapped=slow, notes=taken, hbm_budget_bytes=999 << 20)
    show(long, Console(file=shown, width=80))
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line or line.endswith(" ") for line in lines)


def test_a_broken_budget_fails_and_says_what_stayed() -> None:
    failed = outcome(hbm_budget_bytes=1)
    assert not failed.passed
    assert verdicts(failed)[0].startswith("bit-identical: yes")
    assert "kept on the device: small: 7" in verdicts(failed)[-1]
    assert f"raise --hbm-budget to {format_size_up(failed.swapped.peak_bytes)}, which this run took" in verdicts(failed)[-1]
    assert parse_size(format_size_up(failed.swapped.peak_bytes)) >= failed.swapped.peak_bytes


def test_what_the_library_warned_of_stands_between_bits_and_budget() -> None:
    said = "no plan for a step of 9 hooks: hbm_budget: expected 4096 bytes or more"
    lines = verdicts(outcome(hbm_budget_bytes=1, remarks=(said,)))
    assert [line.partition(":")[0] for line in lines] == [
        "bit-identical", "bit-identical to plain PyTorch", "no plan for a step of 9 hooks", "budget not held",
    ]  # fmt: skip
    assert "what plans take, above" in lines[-1]
    assert outcome(remarks=(said,)).to_dict({})["remarks"] == [said]


def test_warnings_are_heard_and_printed_nowhere_else() -> None:
    program = (
        "import logging\n"
        "from chameleon_mm.demo.command import remarks\n"
        "logger = logging.getLogger('chameleon_mm.somewhere')\n"
        "with remarks() as said:\n"
        "    logger.info('unheard'); logger.warning('no plan: %d', 3)\n"
        "logger.warning('after')\n"
        "print(said)"
    )
    root = Path(chameleon_mm.__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "['no plan: 3']\n"
    assert done.stderr == "after\n"


def test_a_run_that_does_not_reproduce_itself_is_another_finding() -> None:
    differs = outcome(difference="loss of step 1: 1 against 2", reproducible=True)
    shaky = outcome(difference="loss of step 1: 1 against 2", reproducible=False)
    assert not differs.passed
    assert not shaky.passed
    assert verdicts(differs)[0] == "bit-identical: no - loss of step 1: 1 against 2"
    assert not any("does not reproduce itself" in line for line in verdicts(differs))
    assert verdicts(shaky)[1].startswith("the unswapped run does not reproduce itself")
    shaky = outcome(plain_difference="loss of step 1: 1 against 2", plain_reproducible=False)
    assert verdicts(shaky)[1] == "bit-identical to plain PyTorch: no - loss of step 1: 1 against 2"
    assert verdicts(shaky)[2].startswith("plain PyTorch does not reproduce itself")


# --- the command


def test_the_demo_passes_on_the_simulator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "demo.json"
    assert main(["demo", *TINY_ARGS, "--json", str(path)]) == 0
    text = capsys.readouterr().out
    assert "bit-identical: yes" in text
    assert "bit-identical to plain PyTorch: yes" in text
    assert text.endswith(f"written: {path}\n")
    assert "simulated H200" in text
    data = json.loads(path.read_text())
    assert data["schema"] == "chameleon_mm.demo/4"
    assert data["device"] == "simulated H200"
    assert data["simulated"] is True
    assert {"commit", "versions", "date"} <= data.keys()
    assert data["passed"] is data["bit_identical"] is data["bit_identical_to_plain"] is data["budget_held"] is True
    assert data["hbm_budget_bytes"] == data["unswapped"]["peak_bytes"] // 2
    assert data["swapped"]["peak_bytes"] <= data["hbm_budget_bytes"]
    assert data["unswapped"]["losses"] == data["swapped"]["losses"] == data["plain"]["losses"]
    assert len(data["swapped"]["step_us"]) == len(data["swapped"]["step_peak_bytes"]) == 3
    assert max(data["swapped"]["step_peak_bytes"]) == data["report"]["peak_hbm_bytes"] == data["swapped"]["peak_bytes"]
    assert [step["kind"] for step in data["steps"]] == ["64 bytes", "32 bytes", "64 bytes"]
    assert {kind["kind"]: kind["steps"] for kind in data["kinds"]} == {"64 bytes": 2, "32 bytes": 1}
    assert data["report"]["detailed_steps"] == sum(step["recorded"] for step in data["steps"])
    # At the unswapped peak at least half of the bytes had to be elsewhere.
    assert data["report"]["peak_host_bytes"] >= data["unswapped"]["peak_bytes"] - data["hbm_budget_bytes"]
    assert min(data["report"]["bytes_swapped_out"], data["report"]["bytes_swapped_in"]) > 0


def test_a_budget_below_every_plan_is_told_with_the_smallest_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "demo.json"
    assert main(["demo", *TINY_ARGS, "--hbm-budget", "1MiB", "--json", str(path)]) == 1
    captured = capsys.readouterr()
    data = json.loads(path.read_text())
    assert data["report"]["plan_cache_hits"] == 0  # whole rows have come before, but not with a plan
    assert not any(step["plan_known"] for step in data["steps"])
    said = next(remark for remark in data["remarks"] if remark.startswith("no plan for a step"))
    smallest = re.search(r"hbm_budget: expected (\d+) bytes", said)
    assert smallest is not None
    assert int(smallest[1]) > 1 << 20
    assert said in captured.out
    assert "no plan for a step" not in captured.err
    enough = re.search(r"raise --hbm-budget to (.+), which this run took", captured.out)
    assert enough is not None
    assert main(["demo", *TINY_ARGS, "--hbm-budget", enough[1]]) == 0


def test_the_demo_writes_report_and_trace_and_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, trace = tmp_path / "report.html", tmp_path / "trace.json"
    assert main(["demo", *TINY_ARGS, "--report", str(page), "--trace", str(trace)]) == 0
    assert capsys.readouterr().out.endswith(f"written: {page}\nwritten: {trace}\n")
    assert "<html" in page.read_text()
    assert json.loads(trace.read_text())


def tampered(monkeypatch: pytest.MonkeyPatch, change: Callable[[RunResult, bool, int], RunResult]) -> None:
    """Let `change(result, swapped?, which run)` alter what each run gives."""
    real, count = train_module.train, 0

    def fake(*args: Any, **kwargs: Any) -> RunResult:
        nonlocal count
        count += 1
        return change(real(*args, **kwargs), "session_of" in kwargs, count)

    monkeypatch.setattr(train_module, "train", fake)


def test_one_different_bit_fails_the_demo_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tampered(monkeypatch, lambda r, swapped, _: dataclasses.replace(r, losses=flipped(r.losses, 2)) if swapped else r)
    path = tmp_path / "demo.json"
    assert main(["demo", *TINY_ARGS, "--json", str(path)]) == 1
    assert "bit-identical: no - loss of step 3:" in capsys.readouterr().out
    data = json.loads(path.read_text())
    assert data["bit_identical"] is data["passed"] is False
    assert data["first_difference"].startswith("loss of step 3:")
    assert data["unswapped_reproduces_itself"] is True


def test_a_device_that_computes_otherwise_than_plain_pytorch_fails_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With swapping and without alike, so that comparing those two shows nothing."""
    tampered(monkeypatch, lambda r, swapped, _: dataclasses.replace(r, grad_norms=flipped(r.grad_norms, 1)))
    path = tmp_path / "demo.json"
    assert main(["demo", *TINY_ARGS, "--json", str(path)]) == 1
    out = capsys.readouterr().out
    assert "bit-identical: yes" in out
    assert "bit-identical to plain PyTorch: no - gradient norm of step 2:" in out
    data = json.loads(path.read_text())
    assert data["bit_identical"] is data["plain_reproduces_itself"] is True
    assert data["bit_identical_to_plain"] is data["passed"] is False
    assert data["first_difference_to_plain"].startswith("gradient norm of step 2:")


def test_a_machine_that_does_not_reproduce_itself_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tampered(monkeypatch, lambda r, _, n: dataclasses.replace(r, grad_norms=flipped(r.grad_norms, 0)) if n > 1 else r)
    assert main(["demo", *TINY_ARGS]) == 1
    assert "the unswapped run does not reproduce itself" in capsys.readouterr().out


def test_a_peak_above_the_budget_fails_the_demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tampered(monkeypatch, lambda r, swapped, _: dataclasses.replace(r, peak_bytes=r.peak_bytes * (3 if swapped else 1)))
    assert main(["demo", *TINY_ARGS]) == 1
    out = capsys.readouterr().out
    assert "NOT held" in out
    assert "bit-identical: yes" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "marmot"], "marmot"),
        (["--device", "sim:marmot"], "marmot"),
        (["--hbm-budget", "12 parsecs"], "--hbm-budget: expected a number"),
        (["--host-budget", "-1"], "--host-budget"),
        (["--host-budget", "8KiB"], "--host-budget: expected at least 16.0 KiB, one block"),
        (["--min-bytes", "1.5"], "--min-bytes"),
        (["--hbm-budget", "64KiB"], "hbm_budget: expected more than"),  # the model alone is larger
        (["--steps", "0"], "steps: expected 1 or more"),
        (["--heads", "5"], "multiple of heads"),
        (["--dropout", "1"], "dropout"),
        (["--text", "/nonexistent"], "--text"),
        (["--json", "/nonexistent/demo.json"], "--json: expected a file in an existing folder"),
        (["--json", "."], "--json: expected a file to write, got ., a folder"),
        (["--report", "."], "--report: expected a file to write"),
        (["--trace", "/nonexistent/trace.json"], "--trace: expected a file in an existing folder"),
    ],
)
def test_bad_usage_is_told_before_anything_is_trained(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*args: Any, **kwargs: Any) -> RunResult:
        raise AssertionError("trained in spite of bad usage")

    monkeypatch.setattr(train_module, "train", never)
    monkeypatch.setattr(program_module, "train_plain", never)
    assert main(["demo", *TINY_ARGS, *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_gpu_that_is_not_there_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "cuda"]) == 2
    captured = capsys.readouterr()
    assert "expected a CUDA GPU, got none" in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_host_budget_that_cannot_do_is_refused_before_the_swapped_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never_swapped(result: RunResult, swapped: bool, _: int) -> RunResult:
        assert not swapped
        return result

    tampered(monkeypatch, never_swapped)
    assert main(["demo", *TINY_ARGS, "--host-budget", "64KiB"]) == 2
    assert "--host-budget: expected at least" in capsys.readouterr().err


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

SMALL_BUT_DEEP = [
    "--device=sim", "--layers=12", "--width=128", "--heads=4", "--context=32", "--batch=4", "--steps=5", "--min-bytes=16KiB",
]  # fmt: skip


def ratio_of(ratio: float, tmp_path: Path) -> dict[str, Any]:
    target = tmp_path / "ratio.json"
    assert main(["demo", *SMALL_BUT_DEEP, f"--ratio={ratio}", f"--json={target}"]) == 0
    data: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    return data


def test_a_ratio_of_four_trains_within_a_quarter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ratio_of(4, tmp_path)
    assert data["bit_identical_to_plain"] is data["bit_identical"] is data["budget_held"] is True
    budget, unswapped = data["hbm_budget_bytes"], data["unswapped"]["peak_bytes"]
    assert budget == unswapped // 4
    # Each step, the first among them, the building of the model and the beginning of the session.
    assert max(*data["swapped"]["step_peak_bytes"], data["swapped"]["peak_bytes"]) <= budget
    # What it takes unswapped is honest: weights, gradients and two moments are there at once, and so more than the budget.
    assert unswapped > 4 * data["unswapped"]["model_bytes"] > budget
    said = capsys.readouterr().out
    for what in ("activations", "parameters", "gradients", "optimizer state"):
        assert re.search(rf"{what} out / in +│ +- │ +[1-9].* / [1-9]", said), what
    assert "ratio 4: within" in said
    assert "the floor is" in said


def test_the_floor_is_one_on_which_it_trains_and_beyond_it_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    floor = ratio_of(2, tmp_path)["floor"]["smallest_bytes"]
    unswapped = json.loads((tmp_path / "ratio.json").read_text(encoding="utf-8"))["unswapped"]["peak_bytes"]
    most = int(unswapped / floor * 100) / 100
    assert ratio_of(most, tmp_path)["budget_held"] is True
    capsys.readouterr()
    assert main(["demo", *SMALL_BUT_DEEP, f"--ratio={most + 0.2}"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"--ratio: expected at most {most:g} for this model and batch" in said
    assert format_size_up(floor) in said


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ratio=1"], "--ratio: expected more than 1, got 1"),
        (["--ratio=inf"], "--ratio: expected more than 1, got inf"),
        (["--ratio=4", "--hbm-budget=1GiB"], "--ratio: expected none beside --hbm-budget"),
    ],
)
def test_a_ratio_that_says_nothing_is_refused(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device=sim", *args]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
