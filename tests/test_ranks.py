"""Ranks, with the engines people have: each has the bits that it has without a session.

What the ranks run is in `_rank_programs.py`, and how in `_rank_runs.py`; a test is one launch, as starting ranks takes seconds.
They are forks of one process (`_forked_ranks.py`), but for one test that starts them by torchrun.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests._failing_ranks import FATAL_STEP
from tests._rank_checks import AVAILABLE_BYTES

pytestmark = pytest.mark.timeout(3000)  # of a test that hangs: how fast the machine is decides nothing

GLOOS = "RuntimeError"
"""Error that gloo raises where another rank's connection is closed."""

REPOSITORY = Path(__file__).parents[1]


def run(*arguments: str) -> str:
    """Run Python with these arguments and return its output. The process and its children have ended on return."""
    command = [sys.executable, *arguments]
    parent = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, error = parent.communicate()  # what started them ends the others once a rank has failed
    finally:
        if parent.poll() is None:
            os.killpg(parent.pid, signal.SIGKILL)
            parent.communicate()
    assert parent.returncode == 0, error
    return out


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")


def outcomes(ranks: int, module: str, folder: Path, by: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Run `module` on `ranks` ranks: `by` torchrun, or forks of one process. Return what each rank wrote."""
    run(*(by or ("-m", "tests._forked_ranks", str(ranks))), module, str(folder))
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def wrong(programs: dict[str, Any]) -> list[str]:
    """Return the faults of one rank's sessions."""
    found = []
    for name, ways in programs.items():
        for way, outcome in ways.items():
            report = outcome["report"]
            checks = {
                f"differs in {outcome['different'][:3]}": not outcome["different"],
                f"{outcome['num_live']} live blocks": outcome["num_live"] == 0,
                "nothing moved": report["bytes_swapped_out"] > 0,
                "no step followed a plan": way == "by rule" or report["steps_by_phase"].keys() & {"planned", "partly_planned"},
                "the budget was exceeded": way != "tight" or report["peak_hbm_bytes"] <= report["hbm_budget_bytes"],
            }
            found += [f"{name}, {way}: {what}" for what, holds in checks.items() if not holds]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_each_rank_has_the_bits_that_it_has_without_a_session(ranks: int, tmp_path: Path) -> None:
    """DDP, `no_sync`, FSDP2, tensor parallel layers, pipelines and mixtures: losses, gradients and weights of four steps."""
    for rank, outcome in enumerate(outcomes(ranks, "tests._rank_runs", tmp_path)):
        programs = outcome["programs"]
        assert wrong(programs) == [], f"rank {rank}"
        for name in {"tp", "tp_dtensors", "fsdp_and_tp"} & programs.keys():
            # Torch treats the contents of a `DTensor` as a leaf, but they move all the same: nearly half of the peak is left.
            peaks = {way: programs[name][way]["report"]["peak_hbm_bytes"] for way in ("roomy", "by rule")}
            assert peaks["by rule"] < peaks["roomy"] // 2, name
            assert programs[name]["tight"]["report"]["kept_by_reason"].keys() == {"parameter"}
        if "fsdp_and_tp_locally" in programs:  # FSDP2 frees the memory of its parameters: nothing of it is copied
            assert programs["fsdp_and_tp_locally"]["by rule"]["report"]["kept_by_reason"].keys() == {"parameter"}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_micro_batches_without_gradient_sync_are_no_steps_of_their_own(ranks: int, tmp_path: Path) -> None:
    """FSDP2 keeps their gradients unsharded, where no parameter shows them: four steps of two micro-batches each."""
    for rank, outcome in enumerate(outcomes(ranks, "tests._rank_steps", tmp_path)):
        assert len(outcome) == 6
        assert set(map(str, outcome.values())) == {str({"steps": 4, "different": []})}, f"rank {rank}: {outcome}"


@pytest.mark.ci
def test_what_ranks_say_before_the_first_step_and_after_the_last(tmp_path: Path) -> None:
    """Budgets that differ, a machine too small for both, the share of it that each gets, and whether their plans agree."""
    zero, one = outcomes(2, "tests._rank_checks", tmp_path, TORCHRUN)
    assert zero["same budgets"] == one["same budgets"] == zero["other budgets"] == one["alone"] == []
    (other,) = one["other budgets"]
    assert "rank 1 was given other budgets than rank 0: hbm_budget is 48.0 MiB here and 64.0 MiB there" in other
    for rank in (zero, one):
        (small,) = rank["a host too small"]
        assert "2 ranks on this machine" in small and "6.00 GiB together, where 4.00 GiB are available" in small
        assert rank["host budget"] == AVAILABLE_BYTES // 2 // 2  # a half of it, divided among both
    for name, differing in (("agreeing", set()), ("differing", {"plan"})):
        (first, digests), (second, others) = zero[name], one[name]
        assert (first, second) == (0, 1)
        assert {what for what in digests if digests[what] != others[what]} == differing


@pytest.mark.slow
def test_a_rank_that_fails_leaves_no_other_waiting(tmp_path: Path) -> None:
    """One rank raises, leaves or is killed in the middle of forward or backward. The other ends with the error that it has
    without us, and its session has no live block. Neither waits for gloo's timeout, which is longer than the test's."""
    endings = json.loads(run("-m", "tests._failing_ranks", str(tmp_path)))
    assert len(endings) == (3 + 1) * 2 * 2
    for without, with_session in zip(endings[::2], endings[1::2], strict=True):
        assert not without["case"]["with_session"] and with_session["case"]["with_session"]
        assert len(without["ranks"]) == len(with_session["ranks"])
        for plain, swapped in zip(without["ranks"], with_session["ranks"], strict=True):
            assert swapped["rank"] == plain["rank"]
            assert swapped["steps"] == swapped["steps_reported"] == plain["steps"] == FATAL_STEP
            assert kind(swapped) == kind(plain) == (GLOOS if swapped["rank"] == 0 else "RankFailed"), swapped
            assert swapped["bytes_swapped_out"] > 0
            assert swapped["num_live"] == 0


def kind(ending: dict[str, Any]) -> str:
    """The class of the error that a rank ended with."""
    return str(ending["error"]).partition(":")[0]
