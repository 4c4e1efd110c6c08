"""Budgets and reports of two ranks that torchrun started, and rates of two or four: run as a program, once for each rank.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests._rank_checks FOLDER

Each rank writes FOLDER/rank<number>.json. Barriers are the program's own, and make the order certain; sessions need none.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import chameleon_mm as cm
from chameleon_mm.device import SPECS
from chameleon_mm.follow.link_rates import UNMEASURED_LINK, rates_of
from chameleon_mm.plan.timing import LINK_RATES
from chameleon_mm.units import GIB, MIB
from tests._rank_programs import PATIENCE, ddp
from tests.observed import observe_all

AVAILABLE_BYTES = 4 * GIB
"""Host memory that this machine is said to have."""

LINKS = (1.0, 0.5, 0.8, 0.65)
"""Share of an H200's link that each rank has."""


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


def link_of_plans(rank: int) -> list[list[float]]:
    """Rates that a new session measures on its own link, and those that its plans are for, after four steps by itself."""
    spec = replace(SPECS["h200"], **{name: LINKS[rank] * getattr(SPECS["h200"], name) for name in LINK_RATES})
    device = cm.SimDevice(spec, hbm_bytes="4GiB")
    with device.compute():
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(5)))
        swapping = cm.SwapSession(18 * MIB, 64 * MIB, device, model=model, min_bytes="64KiB")
        with swapping:
            for _ in range(4):
                with swapping.step():
                    model(torch.randn(2048, 256)).square().mean().backward()
                    model.zero_grad()
    planned = swapping._adaptation.latest if swapping._adaptation is not None else None
    assert planned is not None and planned.link is not None and planned.trials
    return [list(rates_of(swapping.report().spans, UNMEASURED_LINK).rates), list(planned.link.rates)]


def rates(rank: int) -> dict[str, list[list[float]]]:
    """What each rank plans for once all have told their rates, and, of four, what with two machines of two."""
    link_of_plans(rank)
    dist.barrier()
    seen = {"one machine": link_of_plans(rank)}
    if dist.get_world_size() == 4:
        with patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
            seen["two machines"] = link_of_plans(rank)
    return seen


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
    seen = {**rates(rank), **(budgets(rank) if dist.get_world_size() == 2 else {})}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    observe_all()
    main(sys.argv[1])
