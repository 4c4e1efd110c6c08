"""Accumulation under FSDP2's `set_requires_gradient_sync(False)`: plainly, then attached. Run by each rank.

    python -m tests._forked_ranks 2 tests._rank_steps FOLDER

Each rank writes FOLDER/rank<number>.json: by way of ending a step, the steps that `attach` found, and what differs from the
plain run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import chameleon_mm as cm
from tests._rank_programs import batch, blocks, loss_of, meet, sharded
from tests._rank_runs import Seen, digest

STEPS, MICRO_BATCHES = 4, 2

End = Callable[[nn.Module, torch.optim.Optimizer, int], None]
"""Ends a step."""


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.step()
    optimizer.zero_grad()


def skips(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """No step of the optimizer in the first and the third, as where a scaler has found an infinity."""
    if number % 2:
        optimizer.step()
    optimizer.zero_grad()


def writes(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Update by hand. Gradients are zeroed and never freed."""
    for p in model.parameters():
        assert isinstance(p, DTensor) and isinstance(p.grad, DTensor)
        with torch.no_grad():
            p.sub_(p.grad, alpha=1e-2)
        p.grad.zero_()


def trained(end: End, *, keeps: bool, attached: bool) -> tuple[Seen, cm.SwapReport | None]:
    """`keeps`: parameters stay whole after the backward of the first micro-batch."""
    torch.manual_seed(0)
    model: Any = sharded(blocks(), reshard=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    handle = cm.attach(model, hbm_budget="64MiB", host_budget="64MiB", min_bytes=1024) if attached else None
    seen: Seen = {}
    for number in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            is_last = micro_batch == MICRO_BATCHES - 1
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last or not keeps)
            loss = loss_of(model(batch()))
            loss.backward()
            seen[f"loss {number}.{micro_batch}"] = digest(loss)
        end(model, optimizer, number)
    seen |= {f"weight {name}": digest(parameter) for name, parameter in model.named_parameters()}
    if handle is not None:
        handle.detach()
    return seen, None if handle is None else handle.report()


def main(folder: str) -> None:
    torch.set_num_threads(1)
    meet(folder)
    outcomes = {}
    for end in (steps, skips, writes):
        for keeps in (False, True):
            plain, _ = trained(end, keeps=keeps, attached=False)
            seen, report = trained(end, keeps=keeps, attached=True)
            assert report is not None
            outcomes[f"{end.__name__}, {'whole' if keeps else 'resharded'} between"] = {
                "steps": sum(report.steps_by_phase.values()),
                "different": [key for key in plain if seen[key] != plain[key]],
            }
    Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()
