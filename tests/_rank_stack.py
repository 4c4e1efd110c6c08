"""What people put around a model to tune it on several ranks: peft's adapters under FSDP2, and DeepSpeed. Run by each rank.

    python -m tests._forked_ranks 2 tests._rank_stack FOLDER

Each rank writes FOLDER/rank<number>.json: what differed from the run without us, and what its sessions report.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

import chameleon_mm as cm
from tests._rank_programs import ROWS, Training, batch, blocks, loss_of, meet, sharded
from tests._rank_runs import Seen, digest, run


class Tuned(Training):
    """A model of which the adapters are trained."""

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in super().parameters() if p.requires_grad)


def fsdp_lora() -> Training:
    model: Any = blocks().requires_grad_(False)
    return Tuned(sharded(inject_adapter_in_model(LoraConfig(r=4, target_modules=["up", "down"]), model), reshard=True))


def zero_trained(stage: int, precision: str, hbm_budget: str | None) -> tuple[Seen, cm.SwapReport | None]:
    """Four steps of two micro-batches in DeepSpeed's engine, which has its own optimizer around torch's."""
    torch.manual_seed(0)
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1 << 13, "allgather_bucket_size": 1 << 13},
        "bf16": {"enabled": precision == "bf16"},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    torch.manual_seed(1 + dist.get_rank())
    swap = None
    if hbm_budget is not None:
        device = cm.SimDevice("h200", hbm_bytes="4GiB")
        swap = cm.attach(engine, hbm_budget=hbm_budget, host_budget="64MiB", device=device, min_bytes=1024)
    seen: Seen = {}
    for number in range(8):
        x = batch()
        loss = loss_of(engine(x.bfloat16() if precision == "bf16" else x))
        engine.backward(loss)
        engine.step()
        seen[f"loss {number}"] = digest(loss)
    seen.update({name: digest(p) for name, p in model.named_parameters()})
    seen["generator"] = digest(torch.get_rng_state())
    report = None
    if swap is not None:
        report = swap.report()
        swap.detach()
    return seen, report


def zero(stage: int, precision: str) -> dict[str, Any]:
    """Stage `stage` without us and with: what differs, and what the session reports."""
    plain, _ = zero_trained(stage, precision, None)
    seen, report = zero_trained(stage, precision, "1900KiB" if precision == "fp32" else "1200KiB")
    assert report is not None
    return {
        "different": [name for name, value in plain.items() if seen[name] != value],
        "bytes_swapped_out": report.bytes_swapped_out,
        "plan_cache_hits": report.plan_cache_hits,
        "peak": report.peak_hbm_bytes,
        "problems": list(report.problems),
    }


def main(folder: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    meet(folder)
    outcome = {
        "programs": {"fsdp_lora": run(fsdp_lora, swaps_alone=False)},
        "zero": {f"stage {stage}, {precision}": zero(stage, precision) for stage, precision in ((1, "bf16"), (2, "fp32"))},
    }
    Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(outcome))
    dist.destroy_process_group()
