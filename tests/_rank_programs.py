"""Programs that several ranks train together, with the common engines: built here, and run by `tests/_rank_runs.py`.

    training = ON_TWO["ddp_views"]()  # the same weights on each rank
    losses = training.step()         # forward and backward, micro-batches included; the optimizer is the caller's

There is nothing of ours in here: it is what plain PyTorch runs, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

gather_rows = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd
scatter_sum = getattr(functional, "reduce_scatter_single_autograd", None) or functional.reduce_scatter_tensor_autograd
"""Collectives under the names that torch has for them since 2.13; before, under others."""

PATIENCE = timedelta(hours=2)
"""Time after which gloo gives up on an absent rank: more than any test has, so that a slow machine is no failure."""


def meet(folder: str) -> None:
    """Join the other ranks at a file in `folder`."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=count, timeout=PATIENCE)


WIDTH, ROWS, LAYERS, MICRO_BATCHES = 32, 256, 4, 4


class Block(nn.Module):
    """A feed-forward block with a norm and dropout around its residual."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
        return x + F.dropout(y, 0.1, self.training)

    def inner(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return out


class Talking(nn.Module):
    """Block whose forward talks to the other ranks, functionally and in place, and saves the results."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        x, everyone = self.block(x), dist.group.WORLD
        assert everyone is not None
        rows = gather_rows(x.tanh(), 0, everyone)
        parts = scatter_sum(torch.cat([x.sigmoid()] * dist.get_world_size()), "sum", 0, everyone)
        total = x.cos().detach()
        dist.all_reduce(total)
        out: Tensor = x + parts.sin() * 0.1 + rows.exp()[: x.shape[0]] * 0.1 + (x * total).square() * 0.1
        return out


class Scaled(nn.Module):
    """A block whose result is scaled by the local part of a parameter, which is saved under FSDP2 as a plain view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.scale = nn.Parameter(torch.ones(ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale
        return self.block(x) * (scale.to_local() if isinstance(scale, DTensor) else scale)  # type: ignore[no-any-return]  # nn.Module


def blocks(count: int = LAYERS, kind: Callable[[], nn.Module] = Block) -> nn.Sequential:
    return nn.Sequential(*(kind() for _ in range(count)))


def checkpointed_blocks() -> nn.Sequential:
    """Blocks, every other one of which torch's own checkpoint recomputes."""
    return nn.Sequential(*(Block(checkpointed=bool(number % 2)) for number in range(LAYERS)))


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH)


def loss_of(out: Tensor) -> Tensor:
    return F.mse_loss(out, torch.ones_like(out))


class Training:
    """Model and its forward and backward, one batch a step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def step(self) -> list[Tensor]:
        """Forward and backward. Returns the losses that this rank knows."""
        loss = loss_of(self.model(batch()))
        loss.backward()
        return [loss.detach()]

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()


class Accumulating(Training):
    """Micro-batches, the last of which alone exchanges gradients (`no_sync`)."""

    def step(self) -> list[Tensor]:
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        losses = []
        for number in range(3):
            with model.no_sync() if number < 2 else nullcontext():
                loss = loss_of(model(batch())) / 3
                loss.backward()
            losses.append(loss.detach())
        return losses


class Pipelined(Training):
    """Pipeline stage whose micro-batches run one forward, one backward."""

    def __init__(self, stage_model: nn.Module, number: int, count: int, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(stage_model)
        stage = PipelineStage(stage_model, number, count, torch.device("cpu"), group=group)
        self._first, self._last = number == 0, number == count - 1
        self._schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=F.mse_loss)

    def step(self) -> list[Tensor]:
        given, target = batch(), torch.ones(ROWS, WIDTH)
        losses: list[Tensor] = []
        if self._first:
            self._schedule.step(given)
        elif self._last:
            self._schedule.step(target=target, losses=losses)
        else:
            self._schedule.step()
        return [loss.detach() for loss in losses]


def sharded(model: nn.Module, *, reshard: bool, mesh: DeviceMesh | None = None) -> nn.Module:
    for block in model.children():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model


def tensor_parallel(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def tensor_parallel_throughout(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """Variant of `tensor_parallel`: the value between the two products stays a `DTensor`, and is saved as one."""
    for block in model:
        parallelize_module(
            block,
            mesh,
            {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=True)},
        )
    return model


def ddp() -> Training:
    return Training(DistributedDataParallel(blocks()))


def ddp_no_sync() -> Training:
    return Accumulating(DistributedDataParallel(blocks()))


def ddp_views() -> Training:
    """Gradients that are views of the buckets, in buckets of 16 KB, so that several are exchanged while backward runs."""
    return Training(DistributedDataParallel(blocks(), bucket_cap_mb=0.016, gradient_as_bucket_view=True))


def ddp_checkpointed() -> Training:
    return Training(DistributedDataParallel(checkpointed_blocks()))


def fsdp_resharding() -> Training:
    return Training(sharded(blocks(), reshard=True))


def fsdp_whole() -> Training:
    return Training(sharded(blocks(), reshard=False))


def fsdp_checkpointed() -> Training:
    return Training(sharded(checkpointed_blocks(), reshard=True))


def tp() -> Training:
    return Training(tensor_parallel(blocks(), init_device_mesh("cpu", (dist.get_world_size(),))))


def tp_dtensors() -> Training:
    return Training(tensor_parallel_throughout(blocks(), init_device_mesh("cpu", (dist.get_world_size(),))))


def pipeline() -> Training:
    rank, count = dist.get_rank(), dist.get_world_size()
    stages = blocks(2 * count)  # the same on each rank: one seed
    return Pipelined(stages[2 * rank : 2 * rank + 2], rank, count)


def collectives_in_forward() -> Training:
    return Training(DistributedDataParallel(blocks(2, Talking)))


def fsdp_and_tp() -> Training:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    return Training(sharded(tensor_parallel(blocks(), mesh["model"]), reshard=True, mesh=mesh["data"]))


def ddp_and_pipeline() -> Training:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
    number = mesh["stage"].get_local_rank()
    part = blocks(4)[2 * number : 2 * number + 2]
    model = DistributedDataParallel(part, process_group=mesh["data"].get_group())
    return Pipelined(model, number, 2, mesh["stage"].get_group())


def fsdp_and_tp_locally() -> Training:
    """Variant of `fsdp_and_tp` with a parameter of which the model takes the local part."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model = blocks(kind=Scaled)
    for layer in model:
        assert isinstance(layer, Scaled)
        layer.scale = nn.Parameter(distribute_tensor(layer.scale.detach(), mesh["model"], [Replicate()]))
        parallelize_module(layer.block, mesh["model"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return Training(sharded(model, reshard=True, mesh=mesh["data"]))


def hybrid_sharded() -> Training:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    return Training(sharded(blocks(), reshard=True, mesh=mesh))


ON_TWO = {
    build.__name__: build
    for build in (
        ddp_no_sync, ddp_views, ddp_checkpointed, fsdp_resharding, fsdp_whole, fsdp_checkpointed, tp, tp_dtensors,
        pipeline, collectives_in_forward,
    )
}  # fmt: skip
"""Programs for two ranks, by name."""

ON_FOUR = {
    build.__name__: build
    for build in (pipeline, fsdp_and_tp, fsdp_and_tp_locally, hybrid_sharded, ddp_and_pipeline)
}  # fmt: skip
"""Programs for four ranks: mixtures, and programs that differ with more than one neighbour."""
