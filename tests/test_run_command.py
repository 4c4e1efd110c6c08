"""`chameleon-mm run`: an unchanged script has the output, files and exit code that it has by Python alone, and is swapped."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from chameleon_mm.tools.cli import main
from chameleon_mm.tools.run_command import LaunchedRank
from tests import _run_scripts as scripts
from tests._run_scripts import Ended, python, runs

OBSERVED = ("-m", "tests.observed", "-m", "chameleon_mm", "run")
BUDGET = ("--hbm-budget", "10MiB", "--min-bytes", "64KiB")
SWAPPED = ("plain", "gan", "thread", "functional", "checkpointed", "compiled_in_place", "in_backward", "traced", "transforms",
           "own_session_later")  # fmt: skip


@pytest.mark.slow
def test_a_script_finds_what_python_gives_it_and_leaves_the_same_files_and_output(tmp_path: Path) -> None:
    ended = {}
    run = [*OBSERVED, "--hbm-budget", "5MiB", "--min-bytes", "64KiB"]
    files = ["--report", "../report.json", "--html", "../page.html", "--trace", "../trace.json"]
    for name, command in (("alone", []), ("swapped", run + files)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "script.py").write_text(scripts.EVERYTHING, encoding="utf-8")
        (folder / "beside.py").write_text("NAME = 'found'", encoding="utf-8")
        ended[name] = python([*command, "./script.py", "--out", "out.pt", "--", "--help"], folder, stdin="typed")
    alone, swapped = ended["alone"], ended["swapped"]

    assert alone.code == 7, alone.err
    assert (swapped.code, swapped.out) == (alone.code, alone.out.replace("/alone", "/swapped")), swapped.err
    assert swapped.own_err == alone.err.replace("/alone", "/swapped")
    for file in ("out.pt", "out.pt.state", "unclosed.txt"):
        assert (tmp_path / "swapped" / file).read_bytes() == (tmp_path / "alone" / file).read_bytes(), file
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["steps"] == 8
    assert report["bytes_swapped_out"] > 0
    assert "steps " in swapped.err
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert swapped.err.count("written: ") == 3


@pytest.mark.ci
def test_each_ending_is_pythons(tmp_path: Path) -> None:
    cases = {}
    for number, (name, text) in enumerate(scripts.ENDINGS.items()):
        (tmp_path / f"ending{number}.py").write_text(text, encoding="utf-8")
        cases[name] = [f"ending{number}.py"]
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    shown = "part.__name__, __name__, __package__, __spec__.name, sys.argv, sys.path[0]"
    (package / "__main__.py").write_text(f"import sys\nfrom . import part\nprint({shown})\n1 / 0", encoding="utf-8")
    (package / "part.py").write_text("import sys\nprint(sys.argv[0])", encoding="utf-8")
    cases |= {"package": ["-m", "package", "-m", "x"], "module": ["-m", "package.part"], "no module": ["-m", "package.sing"]}
    ended = runs(cases, tmp_path, tmp_path / "notes", train=False)
    for name, arguments in cases.items():
        alone, ours = python(arguments, tmp_path), ended[name]
        assert (ours.code, ours.out) == (alone.code, alone.out), (name, ours.err)
        assert ours.own_err == alone.err, name
        if name not in ("at once", "signal"):
            assert ours.err.count("no training was seen") == 1, name
    assert (tmp_path / "left.txt").read_text() == "x"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


Trained = tuple[Path, dict[str, Ended], dict[str, Any]]
"""Folder with the files of each way to train, alone and swapped; how the swapped ones ended; their reports."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("ways")
    (folder / "ways.py").write_text(scripts.VARIANTS, encoding="utf-8")
    alone = python(["ways.py", "alone", *SWAPPED, "own_session", "foreign_hooks"], folder)
    assert alone.code == 0, alone.err
    others = ("own_session", "foreign_hooks", "interrupted", "failing", "no_training")
    cases = {
        name: [
            *BUDGET,
            *(("--hbm-budget", "6MiB") if name in ("plain", "thread", "interrupted", "failing") else ()),
            "--report",
            f"{name}.json",
            "ways.py",
            "swapped",
            name,
        ]
        for name in (*SWAPPED, *others)
    }
    cases["too_small"] = ["--hbm-budget", "400KiB", "--report", "too_small.json", "ways.py", "swapped", "plain"]
    by_rule = ("--no-plans", "--no-recompute", "--report=by_rule.json")
    cases["by_rule"] = [*BUDGET, *by_rule, "ways.py", "by_rule", "plain"]
    ended = runs(cases, folder, folder / "notes")
    reports = {name: json.loads((folder / f"{name}.json").read_text()) for name in cases if (folder / f"{name}.json").exists()}
    return folder, ended, reports


@pytest.mark.slow
@pytest.mark.parametrize("name", SWAPPED)
def test_each_way_to_train_is_swapped_and_has_the_same_bits(name: str, trained: Trained) -> None:
    folder, ended, reports = trained
    assert ended[name].code == 0, ended[name].err
    alone, ours = (torch.load(folder / f"{who}_{name}.pt") for who in ("alone", "swapped"))
    assert len(ours) == len(alone) > 0
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(ours, alone, strict=True))
    assert reports[name]["bytes_swapped_out"] > 0
    steps = {"gan": 10, "compiled_in_place": 7, "checkpointed": 3, "traced": 6, "own_session_later": 2}
    assert reports[name]["steps"] == steps.get(name, 5), ended[name].err
    assert reports[name]["steps_by_phase"].get("planned", 0) > 0
    told = [line for line in ended[name].own_err.splitlines() if "memory outside of steps" not in line]
    assert told == []  # transforms alone take memory there, which no hook sees


@pytest.mark.slow
def test_what_is_not_swapped_is_told_in_one_sentence(trained: Trained) -> None:
    folder, ended, reports = trained
    for name, words in {
        "own_session": "the program swaps by itself",
        "foreign_hooks": "saved-tensor hooks of the program's own",
        "no_training": "no training was seen",
    }.items():
        assert ended[name].code == 0, ended[name].err
        assert words in ended[name].err
        assert ended[name].err.count("chameleon-mm run: ") == 1
        assert name not in reports
    for name in ("own_session", "foreign_hooks"):
        alone, ours = (torch.load(folder / f"{who}_{name}.pt") for who in ("alone", "swapped"))
        assert all(torch.equal(a, b) for a, b in zip(ours, alone, strict=True))
    assert ended["own_session"].out.startswith("True\n")


@pytest.mark.slow
def test_an_interrupt_inside_of_a_step_ends_the_script_as_python_would_and_is_reported(trained: Trained) -> None:
    _, ended, reports = trained
    assert ended["interrupted"].code == -2
    assert "KeyboardInterrupt" in ended["interrupted"].own_err
    assert "chameleon_mm" not in ended["interrupted"].own_err
    assert reports["interrupted"]["steps"] == 3
    assert reports["interrupted"]["steps_by_phase"]["failed"] == 1
    assert "swapped out / in" in ended["interrupted"].err


@pytest.mark.slow
def test_options_reach_the_session(trained: Trained) -> None:
    folder, ended, reports = trained
    assert (ended["by_rule"].code, ended["by_rule"].own_err) == (0, "")
    assert reports["by_rule"]["steps_by_phase"] == {"by_rule": 5}
    assert reports["by_rule"]["hbm_budget_bytes"] == 10 << 20
    alone, ours = (torch.load(folder / f"{who}_plain.pt") for who in ("alone", "by_rule"))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(ours, alone, strict=True))


@pytest.mark.slow
def test_an_error_inside_of_training_is_reported_too(trained: Trained) -> None:
    _, ended, reports = trained
    assert ended["failing"].code == 1
    assert ended["failing"].own_err.startswith("Traceback")
    assert "tools/" not in ended["failing"].own_err
    assert reports["failing"]["steps"] == 5


@pytest.mark.slow
def test_a_budget_that_is_too_small_stops_the_script_before_its_first_step(trained: Trained) -> None:
    _, ended, reports = trained
    assert ended["too_small"].code == 1
    assert ended["too_small"].out == ""
    assert "stopped before its first step: " in ended["too_small"].err
    assert "400.0 KiB" in ended["too_small"].err
    assert (ended["too_small"].own_err, ended["too_small"].err.count("chameleon-mm run: ")) == ("", 1)
    assert "too_small" not in reports


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "expected a script or -m MODULE"),
        (["--hbm-budget", "1GiB"], "expected a script or -m MODULE"),
        (["-m"], "expected a script or -m MODULE"),
        (["-"], "write the program to a file"),
        (["-c", "1"], "write the program to a file"),
        (["missing.py"], "missing.py, which does not exist"),
        (["."], "a folder"),
        (["--hbm-budget", "much", __file__], "--hbm-budget"),
        (["--device", "sim:abacus", __file__], "abacus"),
        (["--report", "no/folder/report.json", __file__], "--report"),
        (["--marmot", __file__], "--marmot"),
        (["--budget", "1GiB", __file__], "got --budget; did you mean --hbm-budget?"),
        (["--hbm_budget=1GiB", __file__], "got --hbm_budget; did you mean --hbm-budget?"),
        (["--html", "x.html", "--progres", __file__], "got --progres; did you mean --progress?"),
        (["a\udcff.py"], "a\\udcff.py, which does not exist"),
        (["--report", "no/\udcff.json", __file__], "no/\\udcff.json"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_began(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["run", *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""


def test_help_says_where_options_stand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for word in ("(script.py | -m MODULE) [args ...]", "--hbm-budget", "torchrun", "accelerate launch", "exit code 1"):
        assert word in text


@pytest.mark.slow
def test_hugging_faces_trainer_as_accelerate_launches_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(scripts.TRAINER, encoding="utf-8")
    alone = python(["script.py", "alone"], tmp_path)
    assert alone.code == 0, alone.err
    launch = ["-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes", "1", "--num_machines", "1"]
    command = [*OBSERVED, "--hbm-budget", "8MiB", "--min-bytes", "4KiB", "--report", "report.json"]
    swapped = python([*launch, *command, "script.py", "swapped"], tmp_path)
    assert swapped.code == 0, swapped.err
    # Without lines of times: the Trainer's own record, and DeepSpeed's log where it is installed.
    losses = [[line for line in ended.out.splitlines() if not line.startswith(("{", "[20"))] for ended in (swapped, alone)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2
    ours, theirs = (torch.load(tmp_path / f"{name}.pt") for name in ("swapped", "alone"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(bits(ours[name]), bits(theirs[name])) for name in ours)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["steps"] == 6
    assert report["bytes_swapped_out"] > 0


@pytest.mark.slow
def test_ranks_that_torchrun_starts_are_each_swapped_and_the_first_tells(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(scripts.RANKS, encoding="utf-8")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    alone = python([*launch, "script.py", "alone"], tmp_path)
    assert alone.code == 0, alone.err
    swapped = python([*launch, *OBSERVED, *BUDGET, "--report", "report.json", "script.py", "swapped"], tmp_path)
    assert swapped.code == 0, swapped.err
    assert sorted(swapped.out.splitlines()) == sorted(alone.out.splitlines())
    for rank in range(2):
        ours, theirs = (torch.load(tmp_path / f"{name}{rank}.pt") for name in ("swapped", "alone"))
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(ours, theirs, strict=True))
        report = json.loads((tmp_path / f"report.rank{rank}.json").read_text())
        assert report["steps"] == 4
        assert report["bytes_swapped_out"] > 0
        assert (report["rank"], report["world_size"]) == (rank, 2)
    assert swapped.err.count("report of rank 0 of 2") == 1
    assert "report of rank 1" not in swapped.err
    assert re.findall(r"written: (\S+)", swapped.err) == ["report.rank0.json"]


def test_ranks_are_what_torchruns_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"RANK": "5", "WORLD_SIZE": "8"}
    monkeypatch.setattr("os.environ", environ)
    ranks = LaunchedRank.started_by_launcher()
    assert (ranks.rank, ranks.count) == (5, 8)
    assert ranks.own(Path("a/report.json")) == Path("a/report.rank5.json")
    for odd in ({}, {"RANK": "1"}, {**environ, "RANK": "first"}):
        monkeypatch.setattr("os.environ", odd)
        assert LaunchedRank.started_by_launcher() == LaunchedRank()
    assert LaunchedRank().own(Path("report.json")) == Path("report.json")
