"""Two ranks that train one model together on CUDA, with swapping and without: run as a program, once for each rank.

    python -m tests._ranks RANK FILE ddp|fsdp|fsdp_offload            # FILE: where the ranks meet

Prints `same bits` where losses and weights are those of the run without swapping, and how many bytes moved.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import chameleon_mm as cm
from tests._rank_programs import PATIENCE
from tests.cuda_stand_in import control

WIDTH, LAYERS, STEPS = 64, 4, 3


def wrapped(model: nn.Module, way: str) -> nn.Module:
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    mesh, policy = init_device_mesh("cuda", (2,)), CPUOffloadPolicy() if way == "fsdp_offload" else OffloadPolicy()
    for layer in model.children():
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return model


def trained(way: str, rank: int, session: cm.SwapSession | None) -> list[Tensor]:
    """The losses of this rank, and its weights (or its shards of them) at the end."""
    torch.manual_seed(0)  # the same weights on each rank
    layers = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)]
    model = wrapped(nn.Sequential(*layers).to("cpu" if way == "fsdp_offload" else "cuda"), way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + rank)  # other rows on each
    seen = []
    with session or nullcontext():
        for _ in range(STEPS):
            with session.step() if session else nullcontext():
                loss = F.mse_loss(model(torch.randn(32, WIDTH, device="cuda")), torch.zeros(32, WIDTH, device="cuda"))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            seen.append(loss.detach().cpu())
    local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return seen + [p.detach().cpu() for p in local]


def main(rank: int, meeting_place: str, way: str) -> None:
    torch.cuda.set_device(rank)
    meeting = f"file://{meeting_place}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=PATIENCE)
    plain = trained(way, rank, None)
    session = cm.SwapSession(hbm_budget="64MiB", host_budget="64MiB", device=f"cuda:{rank}", min_bytes=1024)
    swapped = trained(way, rank, session)
    assert all(torch.equal(a, b) for a, b in zip(plain, swapped, strict=True))
    torch.cuda.synchronize()
    violations = control.violations() if control.is_loaded() else []
    sys.stderr.write("\n".join(violations))
    report = session.report()
    own = f"{report.program_bytes_out} bytes out by itself, {report.program_bytes_back} back"
    sys.stdout.write(f"same bits, {report.bytes_swapped_out} bytes swapped out, {len(violations)} violations, {own}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
