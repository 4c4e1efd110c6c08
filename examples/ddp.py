"""Data-parallel training under torchrun: each rank swaps its own.

torchrun --nproc_per_node 2 examples/ddp.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import chameleon_mm as cm

on_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if on_gpu else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")

torch.manual_seed(0)
layers = (nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4))
model = DistributedDataParallel(nn.Sequential(*layers).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(rank)  # other rows on each rank

with cm.attach(model, hbm_budget="96MiB") as swapping:  # a rank's own budget; its part of the host memory by itself
    for _ in range(6):
        batch = torch.randn(1024, 256, device=device)
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

report = swapping.report()
print(f"rank {rank}: {report.steps} steps, {report.bytes_swapped_out >> 20} MiB swapped out, budget held: {report.budget_held}")
dist.destroy_process_group()
