"""Each obstacle to the stand-in is reported in one sentence, before anything is made. No CUDA is needed here."""

from __future__ import annotations

import pytest
import torch

from tests.cuda_stand_in import control, run
from tests.cuda_stand_in.install import needed_by_tests
from tests.cuda_stand_in.versions import NOT_NEEDED


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
