"""Budgets and reports of two ranks that torchrun started: run as a program, once for each rank.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests._rank_checks FOLDER

Each rank writes FOLDER/rank<number>.json. Barriers are the program's own, and make the order certain; sessions need none.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import chameleon_mm as cm
from chameleon_mm.units import GIB, MIB
from tests._rank_programs import PATIENCE, ddp
from tests.observed import observe_all

AVAILABLE_BYTES = 4 * GIB
"""Host memory that this machine is said to have."""


def session(hbm_budget: int, host_budget: int | None) -> cm.SwapSession:
    return cm.SwapSession(hbm_budget, host_budget, cm.SimDevice("h200", hbm_bytes="4GiB"), min_bytes=1024)


def problems(hbm_budget: int, host_budget: int | None) -> list[str]:
    """Return the problems reported before the first step. Rank 0 enters first."""
    if dist.get_rank() == 1:
        dist.barrier()
    with session(hbm_budget, host_budget) as entered:
        said = list(entered.report().problems)
    if dist.get_rank() == 0:
        dist.barrier()
    return said


def trained(hbm_budget: int) -> cm.SwapReport:
    torch.manual_seed(0)
    training, swapping = ddp(), session(hbm_budget, 64 * MIB)
    with swapping:
        for _ in range(3):
            with swapping.step():
                training.step()
                training.model.zero_grad()
    return swapping.report()


def budgets(rank: int) -> dict[str, Any]:
    seen: dict[str, Any] = {
        "same budgets": problems(64 * MIB, 64 * MIB),
        "other budgets": problems((64 - 16 * rank) * MIB, 64 * MIB),
        "a host too small": problems(64 * MIB, 3 * GIB),
        "host budget": session(64 * MIB, None).host_budget,
    }
    for name, budget in (("agreeing", MIB), ("differing", (1 + rank) * MIB)):
        report = trained(budget)
        seen[name] = rank, report.plan_digests
    if rank == 1:
        with session(MIB, MIB) as alone:  # rank 0 never enters this one
            seen["alone"] = list(alone.report().problems)
    return seen


def main(folder: str) -> None:
    torch.set_num_threads(1)
    for module in ("pool.host_memory", "report.report"):
        patch(f"chameleon_mm.{module}.available_host_bytes", return_value=AVAILABLE_BYTES).start()
    dist.init_process_group("gloo", timeout=PATIENCE)
    rank = dist.get_rank()
    Path(folder, f"rank{rank}.json").write_text(json.dumps(budgets(rank)))
    dist.destroy_process_group()


if __name__ == "__main__":
    observe_all()
    main(sys.argv[1])
