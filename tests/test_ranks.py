"""Ranks that torchrun starts, with the engines people have: each has the bits that it has without a session.

What the ranks run is in `_rank_programs.py`, and how in `_rank_runs.py`; a test is one launch, as starting ranks takes seconds.
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

REPOSITORY = Path(__file__).parents[1]
PATIENCE_S = 280


def launched(ranks: int, module: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What `torchrun` gives that runs `module` on so many ranks. It and they are gone when this returns."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", module,
        str(folder), *arguments,
    ]  # fmt: skip
    torchrun = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, error = torchrun.communicate(timeout=PATIENCE_S)
    finally:
        if torchrun.poll() is None:
            os.killpg(torchrun.pid, signal.SIGKILL)
            torchrun.communicate()
    return subprocess.CompletedProcess(command, torchrun.returncode, out, error)


def outcomes(ranks: int, folder: Path, *names: str) -> list[dict[str, Any]]:
    done = launched(ranks, "tests._rank_runs", folder, *names)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def wrong(programs: dict[str, Any]) -> list[str]:
    """What is wrong with the sessions of one rank."""
    found = []
    for name, ways in programs.items():
        for way, outcome in ways.items():
            report = outcome["report"]
            checks = {
                f"differs in {outcome['different'][:3]}": not outcome["different"],
                f"{outcome['num_live']} live blocks": outcome["num_live"] == 0,
                "nothing moved": report["bytes_swapped_out"] > 0,
                "no step followed a plan": way == "by rule" or report["steps_by_phase"].keys() & {"planned", "partly planned"},
                "the budget was exceeded": way != "tight" or report["peak_hbm_bytes"] <= report["hbm_budget_bytes"],
            }
            found += [f"{name}, {way}: {what}" for what, holds in checks.items() if not holds]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_has_the_bits_that_it_has_without_a_session(ranks: int, tmp_path: Path) -> None:
    """DDP, `no_sync`, FSDP2, tensor parallel layers, pipelines and mixtures: losses, gradients and weights of seven steps."""
    for rank, outcome in enumerate(outcomes(ranks, tmp_path)):
        assert wrong(outcome["programs"]) == [], f"rank {rank}"
