"""Trains programs on several ranks: plainly, then in sessions. Run by each rank.

    python -m tests._forked_ranks 2 tests._rank_runs FOLDER ddp_views fsdp_whole ...

Each rank writes FOLDER/rank<number>.json: by program what differed from the plain run, and what its sessions report.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import chameleon_mm as cm
from tests._rank_programs import ON_FOUR, ON_TWO, Training, meet

STEPS = 4

ROOM = 0.3
"""Share of the memory saved by the default rule that a tight budget leaves."""

SWAPS_ALONE = ("ddp", "tp", "pipeline")
"""Programs that run with plans that recompute nothing as well."""

Seen = dict[str, str]
"""Hashes of the bits of everything that is compared, by name."""


def digest(t: Tensor) -> str:
    local: Any = t.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    raw = local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{local.dtype} {tuple(local.shape)} {hashlib.sha256(raw).hexdigest()}"


def trained(build: Callable[[], Training], make_session: Callable[[Training], cm.SwapSession] | None) -> tuple[Seen, Any]:
    """Losses and gradients of each step and the weights at the end, and the session."""
    torch.manual_seed(0)  # the same weights on each rank
    training = build()
    optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())  # other rows on each, other masks
    seen: Seen = {}
    session = make_session(training) if make_session else None
    with session or nullcontext():
        for number in range(STEPS):
            with session.step() if session else nullcontext():
                losses = training.step()
                optimizer.step()
            seen.update({f"loss {number}.{i}": digest(loss) for i, loss in enumerate(losses)})
            del losses
            for name, parameter in training.parameters():
                assert parameter.grad is not None, name
                seen[f"gradient {number} {name}"] = digest(parameter.grad)
            optimizer.zero_grad()
    seen.update({f"weight {name}": digest(parameter) for name, parameter in training.parameters()})
    seen["generator"] = digest(torch.get_rng_state())
    return seen, session


def run(build: Callable[[], Training], *, swaps_alone: bool) -> dict[str, Any]:
    """Run a program plainly, with room for everything, by the default rule with no room, and by plans with little."""
    plain, _ = trained(build, None)
    outcome: dict[str, Any] = {}
    peaks: dict[str, int] = {}

    def again(way: str, hbm_budget: int | str, **more: Any) -> None:
        seen, session = trained(
            build,
            lambda _: cm.SwapSession(hbm_budget, "64MiB", cm.SimDevice("h200", hbm_bytes="4GiB"), min_bytes=1024, **more),
        )
        report = session.report()
        peaks[way] = report.peak_hbm_bytes
        outcome[way] = {
            "different": [key for key in {**plain, **seen} if seen.get(key) != plain.get(key)],
            "report": report.to_dict(),
            "num_live": session.pool.stats().num_live,
        }

    again("roomy", "4GiB")
    again("by rule", peaks["roomy"] // 2, plans=False)
    little = peaks["by rule"] + int(ROOM * (peaks["roomy"] - peaks["by rule"]))
    again("tight", little)
    if swaps_alone:
        again("swapping", little, recompute=False)
    return outcome


def main(folder: str, *names: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    meet(folder)
    rank, count = dist.get_rank(), dist.get_world_size()
    programs = ON_TWO if count == 2 else ON_FOUR
    outcomes: dict[str, Any] = {"local_world_size": os.environ["LOCAL_WORLD_SIZE"]}
    outcomes["programs"] = {
        name: run(programs[name], swaps_alone=count == 2 and name in SWAPS_ALONE) for name in names or programs
    }
    Path(folder, f"rank{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()
