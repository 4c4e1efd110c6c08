"""What stands in the way of the stand-in is said in one sentence, before anything is made. No CUDA is needed here."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.cuda_stand_in import control, install, run
from tests.cuda_stand_in.install import InstallError, check_machine, needed_by_tests
from tests.cuda_stand_in.versions import NOT_NEEDED


@pytest.fixture(autouse=True)
def _fit_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever machine this is: one on which the environment can be made."""
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(install, "driver", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda tool: f"/usr/bin/{tool}")
    monkeypatch.setattr(shutil, "disk_usage", lambda at: shutil._ntuple_diskusage(10**12, 0, 10**12))


def test_a_machine_that_has_all_of_it(tmp_path: Path) -> None:
    check_machine(tmp_path / "venv")


def test_another_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(InstallError, match=r"expected Linux on x86_64, .* got Linux on aarch64"):
        check_machine(tmp_path / "venv")


def test_a_real_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "driver", lambda: "libcuda.so.1")
    with pytest.raises(InstallError, match=r"found libcuda.so.1; run `make gpu`"):
        check_machine(tmp_path / "venv")


@pytest.mark.parametrize(("tool", "package"), install.TOOLS.items())
def test_a_missing_program(tool: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda asked: None if asked == tool else asked)
    with pytest.raises(InstallError, match=rf"expected the program {tool}, .*\({package}\)".replace("+", r"\+")):
        check_machine(tmp_path / "venv")


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda at: shutil._ntuple_diskusage(10**12, 0, 10**9))
    monkeypatch.setattr(sys, "argv", ["install", str(tmp_path / "venv")])
    assert install.main() == 1
    said = capsys.readouterr().err
    assert said.startswith("test-cuda: expected 4.3 GB free at ") and "found 1.0 GB" in said and said.count("\n") == 1
    assert not (tmp_path / "venv").exists()


def test_the_tests_requirements_are_the_projects_own_without_torch() -> None:
    names = {requirement.split(">")[0] for requirement in needed_by_tests()}
    assert {"numpy", "psutil", "rich", "pytest", "hypothesis", "scipy"} <= names
    assert not names & {"torch", "triton", *NOT_NEEDED}


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is the CUDA build")
def test_without_the_cuda_build_nothing_passes_for_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([]) == 1
    assert "expected torch's CUDA build, got" in capsys.readouterr().err


def test_without_the_stand_in_nothing_passes_for_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(control, "is_loaded", lambda: False)
    assert run.main([]) == 1
    assert "expected the stand-in as torch's CUDA runtime, found another" in capsys.readouterr().err


def test_a_run_in_which_nothing_ran_has_failed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(run, "problem", lambda: None)
    monkeypatch.setattr(run, "run_mode", lambda mode, words, *, thorough: 5 if mode == "early" and not thorough else 0)
    assert run.main([]) == 1
    assert "early: failed: no test ran" in capsys.readouterr().out
