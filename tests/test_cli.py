"""Command line: what it accepts, its output, and its exit codes."""

from __future__ import annotations

import argparse
import io
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.table import Column, Table

import chameleon_mm
from chameleon_mm.bench import THEMES
from chameleon_mm.bench._options import OPTIONS
from chameleon_mm.errors import DeviceUnavailable
from chameleon_mm.tools.cli import main
from chameleon_mm.tools.outputs import check_outputs, print_table
from tests._run_scripts import python

Run = Callable[[argparse.Namespace, Console], int]
REPEATING = ("copy", "hooks", "overlap", "pack", "pinned", "profiler")
"""Themes that measure a requested number of times."""
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")


@pytest.fixture
def theme(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], None]:
    """Install a benchmark theme "fake" that runs the given function."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--number", type=int, default=1)
        parser.add_argument("--json")

    def install(run: Run) -> None:
        module = types.ModuleType("fake_theme")
        module.run = run  # type: ignore[attr-defined]  # a module made here
        monkeypatch.setitem(sys.modules, "chameleon_mm.bench.fake", module)
        monkeypatch.setitem(THEMES, "fake", "a theme of a test")
        monkeypatch.setitem(OPTIONS, "fake", add_arguments)

    return install


def raising(error: BaseException) -> Run:
    def run(args: argparse.Namespace, console: Console) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["demo", "doctor", "plan", "bench", "examples:", "Exit codes"]),
        (["demo", "--help"], ["--hbm-budget", "half of what it uses unswapped", "default 4 simulated", "examples:"]),
        (["doctor", "--help"], ["--json"]),
        (
            ["plan", "--help"],
            ["MODEL", "--hbm-budget", "--autocast", "--json", "llama-7b", "loss_fn(model(ids), ids)"],
        ),
        (["bench", "--help"], list(THEMES)),
        *([["bench", theme, "--help"], ["--device", "--json"]] for theme in THEMES),
    ],
)
def test_help_exits_with_0_and_says_what_there_is(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    text = " ".join(capsys.readouterr().out.split())  # argparse wraps to the terminal
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "gpt2", f"--hbm-budget={'9' * 30}GiB"], "chameleon-mm: --hbm-budget: expected less than 8 EiB"),
        (["plan", "./\udcff.json"], "./\\udcff.json"),
        (["bench", "training", "--device=sim", "--layers=2", "--heads=5"], "multiple of"),
        (["bench", "training", "--device=sim", "--steps=0"], "--steps"),
        *([["bench", theme, "--device=sim", "--repeats=0"], "repeats"] for theme in REPEATING),
        *([["bench", theme, "--device=sim", "--saves=0"], "--saves: expected"] for theme in ("hooks", "profiler")),
        *([["bench", theme, "--device=sim", "--sizes=0"], "expected"] for theme in ("copy", "pack")),
    ],
)
def test_what_is_not_understood_exits_with_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("hbm_budget: got nonsense [sic]"), 2),
        (chameleon_mm.InfeasibleBudget("hbm_budget: too low"), 2),
        (FileNotFoundError(2, "No such file", "x.json"), 2),
        (DeviceUnavailable("CudaDevice: expected a CUDA GPU, got none"), 2),
        (chameleon_mm.HostMemoryExhausted("asked for too much"), 1),
        (torch.OutOfMemoryError("CUDA out of memory."), 1),
    ],
)
def test_an_expected_error_is_one_line_without_a_traceback(
    error: BaseException, code: int, theme: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    theme(raising(error))
    assert main(["bench", "fake"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("chameleon-mm: ")
    assert str(error) in captured.err


def test_an_interrupt_and_a_message_of_many_lines_are_one_line_each_and_an_unexpected_error_keeps_its_traceback(
    theme: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    theme(raising(KeyboardInterrupt()))
    assert main(["bench", "fake"]) == 130
    assert capsys.readouterr().err == "chameleon-mm: interrupted\n"
    theme(raising(ValueError("expected this,\n  got that")))
    assert main(["bench", "fake"]) == 2
    assert capsys.readouterr().err == "chameleon-mm: expected this, got that\n"
    theme(raising(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        main(["bench", "fake"])


COMMANDS = (["demo"], *(["bench", name] for name in THEMES))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("marmot", "'marmot'"),
        ("sim:marmot", "'marmot'"),
        ("cuda:first", "'cuda:first'"),
        pytest.param("cuda", "expected a CUDA GPU, got none", marks=without_cuda),
        pytest.param("cuda:7", "expected a CUDA GPU, got none", marks=without_cuda),
    ],
)
def test_a_device_that_is_not_there_is_bad_usage_of_every_command(
    command: list[str], device: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "result.json"
    assert main([*command, "--device", device, "--json", str(target)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not target.exists()


@pytest.mark.parametrize("command", [["doctor"], ["plan", "gpt2"], *COMMANDS], ids=" ".join)
@pytest.mark.parametrize("place", ["n" * 300, "a file/x.json"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    command: list[str], place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a file").write_text("as it was")
    assert main([*command, "--json", str(tmp_path / place)]) == 2
    captured = capsys.readouterr()
    assert "--json: expected a file" in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_trying_whether_a_file_can_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    there, new, deeper = tmp_path / "there", tmp_path / "new", tmp_path / "folder" / "new"
    there.write_text("as it was")
    check_outputs({"--json": there, "--trace": new, "--svg": deeper}, make_folders=True)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert there.read_text() == "as it was"
    with pytest.raises(ValueError, match=r"--svg: expected a file in an existing folder, .*; make .*folder first"):
        check_outputs({"--svg": deeper})


def test_a_benchmark_gets_its_arguments_and_names_the_files_that_it_wrote(
    theme: Callable[[Run], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "figures.json"
    theme(lambda args, console: int(args.number))
    assert main(["bench", "fake", "--number", "7", "--json", str(target)]) == 7
    assert capsys.readouterr().out == ""  # there is none
    theme(lambda args, console: target.write_text("{}") and 1)
    main(["bench", "fake", "--json", str(target)])
    assert capsys.readouterr().out == f"written: {target}\n"


@pytest.mark.parametrize("columns", [10, 40, 80])
def test_no_table_has_a_number_in_two_parts(columns: int) -> None:
    """Piped output has 80 columns; the other widths are those of narrow terminals."""
    numbers = [f"{n}23456.789 ({n}23451.1..{n}23459.9)" for n in range(1, 8)]
    shown = io.StringIO()
    table = Table("name", *(Column(f"column {n}", justify="right") for n in range(7)))
    table.add_row("one", *numbers)
    print_table(Console(file=shown, width=columns), table)
    assert [word for number in numbers for word in number.split() if word not in shown.getvalue()] == []


def test_python_dash_m_is_the_command_and_help_imports_no_benchmark_and_no_demo(tmp_path: Path) -> None:
    program = (
        "import runpy, sys; sys.argv[1:] = ['--help']\n"
        "try: runpy.run_module('chameleon_mm', run_name='__main__')\n"
        "except SystemExit as end: print(end.code, [m for m in sys.modules if m.startswith(tuple(COMMANDS))])"
    )
    commands = [f"chameleon_mm.{name}" for name in ("bench.", "tools.demo", "tools.doctor", "tools.plan_command")]
    done = python(["-c", program.replace("COMMANDS", repr(commands))], tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "usage: chameleon-mm" in done.out
    assert done.out.splitlines()[-1] == "0 []"
