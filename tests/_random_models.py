"""Small random models on simulated GPUs that are the bottleneck, and steps of them with and without swapping.

    device = far_ahead()                                            # a slow GPU whose host takes no time
    steps, parameters = train(seed, device)                         # nothing swapped
    steps, parameters = train(seed, device, planning(device, budget))     # the same numbers, bit for bit

A step's peak is the device's own; its time is compute's, from the step's first event to its last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest
import torch
import torch.nn.functional as F
from _pytest.mark import ParameterSet
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.device import SPECS
from chameleon_mm.device.sim import CostModel
from chameleon_mm.device.specs import GpuSpec
from chameleon_mm.follow.adaptation import Adaptation
from chameleon_mm.follow.plan_follower import PlanFollower, plan_steps
from chameleon_mm.plan.rule import Limits
from chameleon_mm.plan.swap_plan import SwapPlan
from chameleon_mm.plan.timing import LinkCost
from chameleon_mm.plan.trace import Trace
from chameleon_mm.swap.executor import Executor
from tests._programs import swapping_executor

SLOW_GPU = dataclasses.replace(
    SPECS["h200"], bf16_tflops=0.5, fp32_tflops=0.5, hbm_gbps=20.0, h2d_gbps=2.0, d2h_gbps=2.0, duplex_gbps=3.0
)
"""GPU so slow that operators of some 10,000 elements take longer than their launch."""

FULL_DUPLEX_GPU = dataclasses.replace(SLOW_GPU, duplex_gbps=4.0)
"""Neither direction takes anything from the other."""


def link_of(spec: GpuSpec) -> LinkCost:
    """Link of such a GPU, unchanged. A copy within device memory reads and writes every byte, at 0.85 of its rate."""
    return LinkCost(
        d2h_gbps=spec.d2h_gbps, h2d_gbps=spec.h2d_gbps, duplex_gbps=spec.duplex_gbps, hbm_gbps=spec.hbm_gbps * 0.85 / 2
    )


NO_LIMIT = 1 << 40
"""Budget far above the memory of all models here."""


def seeds(first: int, *, of: Sequence[int]) -> list[ParameterSet]:
    """Seeds of models, the first of which every run takes; the others are `thorough`."""
    thorough = [pytest.mark.slow, pytest.mark.thorough]
    return [pytest.param(seed, marks=() if number < first else thorough) for number, seed in enumerate(of)]


def far_ahead(spec: GpuSpec = SLOW_GPU) -> cm.SimDevice:
    """Device whose host takes no time at all, so the device never waits for it."""
    free = dict.fromkeys(("launch_us", "view_us", "event_us", "copy_us", "triton_launch_us", "packed_tensor_us"), 0.0)
    return cm.SimDevice(spec, cost=CostModel(spec=spec, matmul_efficiency=1.0, shortest_kernel_us=1e-3, **free))


def planning(
    device: cm.SimDevice,
    hbm_budget: int = NO_LIMIT,
    *,
    link: LinkCost | None = None,
    pool: cm.PinnedPool | None = None,
    pack_below_bytes: int = 0,
) -> Executor:
    """Executor that records its first step and plans the next ones. By default, each move is its own call."""
    pool = pool or cm.PinnedPool(1 << 30, device=device)
    limits = Limits(hbm_budget_bytes=hbm_budget)
    executor = swapping_executor(device, pool, limits, min_bytes=1024, pack_below_bytes=pack_below_bytes)
    plan_steps(executor, pool, link_cost=link or link_of(device.spec))
    return executor


def adaptation_of(executor: Executor) -> Adaptation:
    """Return the adaptation that `planning` gave to `executor`."""
    assert isinstance(executor.director, PlanFollower)
    return executor.director.adaptation


class RandomNet(nn.Module):
    """A random sequence of chains, residuals, branches, views of one storage and far skips; widths and rows from `seed`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = Random(seed)
        self.width = rng.choice((48, 64, 96))
        self.rows = rng.choice((64, 96, 128))
        self.micro_batches = rng.choice((1, 1, 2, 3))
        kinds = ("chain", "norm", "residual", "branch", "views", "skip")
        self.kinds = [rng.choice(kinds) for _ in range(rng.randint(4, 8))]
        self.activations = [rng.choice((F.gelu, torch.tanh, F.silu)) for _ in self.kinds]
        factor = {"views": 2, "norm": 1, "skip": 1}
        self.first = nn.ModuleList(nn.Linear(self.width, self.width * factor.get(kind, 2)) for kind in self.kinds)
        self.second = nn.ModuleList(
            nn.LayerNorm(self.width)
            if kind == "norm"
            else nn.Linear(self.width * (1 if kind in ("views", "skip") else 2), self.width)
            for kind in self.kinds
        )

    def forward(self, x: Tensor) -> Tensor:
        far = x
        for kind, activation, first, second in zip(self.kinds, self.activations, self.first, self.second, strict=True):
            if kind == "views":
                a, b = first(x).chunk(2, -1)
                x = second(a * torch.sigmoid(b))
            elif kind == "branch":
                h = first(x)
                x = second(activation(h) * torch.sigmoid(h))
            elif kind == "skip":
                x, far = second(activation(first(x)) * far), x
            elif kind == "residual":
                x = x + second(activation(first(x)))
            else:
                x = second(activation(first(x)))
        loss: Tensor = x.square().mean()
        return loss

    def batch(self) -> Tensor:
        return torch.randn(self.rows, self.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Training step as the device saw it."""

    loss: float
    peak_bytes: int
    step_us: float
    plan: SwapPlan | None = None
    """Plan that the step followed, hook for hook. None if there was no plan or the step did not follow it."""
    trace: Trace | None = None
    """Trace that the plan is for."""


def train(
    seed: int,
    device: cm.SimDevice,
    executor: Executor | None = None,
    *,
    steps: int = 4,
    backwards: int = 1,
) -> tuple[list[Step], list[Tensor]]:
    """`steps` of plain SGD on the model of `seed`, with so many backwards over each graph. Returns them, and the parameters
    after the last one."""
    torch.manual_seed(seed)
    done: list[Step] = []
    with device.compute():
        model = RandomNet(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(steps):
            batches = [model.batch() for _ in range(model.micro_batches)]
            device.synchronize()
            device.reset_peaks()
            start = device.current_stream().record(timed=True)
            if executor is None:
                loss = _one_step(model, optimizer, batches, backwards)
                followed = None
            else:
                loss, followed = _swapped_step(executor, model, optimizer, batches, backwards)
            end = device.current_stream().record(timed=True)
            device.synchronize()
            plan, trace = followed or (None, None)
            done.append(
                Step(
                    loss=loss.item(),
                    peak_bytes=device.peak_allocated_bytes(),
                    step_us=end.elapsed_us(start),
                    plan=plan,
                    trace=trace,
                )
            )
            del loss, batches
        return done, [p.detach().clone() for p in model.parameters()]


def _one_step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor], backwards: int) -> Tensor:
    for batch in batches:
        loss: Tensor = model(batch)
        for left in reversed(range(backwards)):
            loss.backward(retain_graph=left > 0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _swapped_step(
    executor: Executor, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor], backwards: int
) -> tuple[Tensor, tuple[SwapPlan, Trace] | None]:
    adaptation = adaptation_of(executor)
    executor.begin_step(timed=True)
    hits = adaptation.plan_cache_hits
    planned = adaptation.latest
    with torch.autograd.graph.saved_tensors_hooks(executor.save, executor.use):
        loss = _one_step(model, optimizer, batches, backwards)
    trial = None if planned is None else planned.current
    trace = None if planned is None else planned.trace
    executor.end_step(completed=True)
    if trial is None or trace is None or adaptation.plan_cache_hits == hits:
        return loss, None
    return loss, (trial.program.plan, trace)
