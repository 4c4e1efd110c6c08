"""Record a training step of a model without memory: operators run on shapes only, with times by a roofline.

    with ShapesAlone():
        model = Model().to(torch.bfloat16)      # takes no memory: tensors are only shapes
    step = record_step(StepRequest(build=build, spec=spec, optimizer="adamw", dtype=torch.bfloat16, min_bytes=1 << 20))
    step.trace                  like the trace of a recorder on that GPU with a host that is never late

The step is from the middle of a training: the optimizer already has its state, and gradients are made and freed.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from chameleon_mm.device.sim import SimDevice
from chameleon_mm.device.specs import GpuSpec
from chameleon_mm.plan.trace import Int64s, Trace
from chameleon_mm.record.recorder import Recorder, RecordingHooks
from chameleon_mm.record.step_log import PricedTimes
from chameleon_mm.state.optimizer_swap import STATE_PER_PARAMETER, alone, buckets_of, raw_step
from chameleon_mm.state.parameter_swap import charged_sizes, window_for
from chameleon_mm.tools.blocks import Checkpointing, blocks_of, checkpoint_blocks, groups_of
from chameleon_mm.tools.shape_operators import PLANNED_ON, GpuOperators, ShapesAlone, ValuesReadAsZero, gpu_autocast
from chameleon_mm.tools.workload import Build, ModelUnusable, Workload, told_as

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """Trace of a step, with its model, dtypes and optimizer."""

    about: str
    notes: tuple[str, ...]
    parameters_by_dtype: Mapping[str, int]
    """Number of parameters by dtype, the most frequent dtype first."""
    autocast: str | None
    """Dtype of the autocast around forward; None: only the model's own autocast, if any."""
    optimizer: str
    activation_memory_budget: float | None
    """Torch's setting under which the repeated blocks are compiled; None: all runs eagerly."""
    min_bytes: int
    trace: Trace
    gathered: tuple[Int64s, ...]
    """Numbers of the trace's storages whose parameters FSDP gathers together: each block's, then the rest's."""
    window: Callable[[int], int]
    """Function from a budget to the bytes that a session reserves for swapped parameters. Raises `InfeasibleBudget`."""
    largest_bucket_bytes: int
    """Maximum bytes of state that are stepped together; 0: all state, or there is none."""

    @property
    def num_parameters(self) -> int:
        return sum(self.parameters_by_dtype.values())

    @property
    def dtype(self) -> str:
        """Dtype of the parameters; if they have several, all of them."""
        return " and ".join(self.parameters_by_dtype)

    def to_dict(self) -> dict[str, Any]:
        """Dictionary of the recorded figures as plain data, without the trace."""
        return {
            "model": self.about,
            "notes": list(self.notes),
            "num_parameters": self.num_parameters,
            "dtype": self.dtype,
            "parameters_by_dtype": dict(self.parameters_by_dtype),
            "autocast": self.autocast,
            "optimizer": self.optimizer,
            "activation_memory_budget": self.activation_memory_budget,
            "min_bytes": self.min_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """Request for a step on shapes only."""

    build: Build
    spec: GpuSpec
    dtype: torch.dtype
    """Torch's default dtype while the model is built and run."""
    optimizer: str
    """Key of `plan_options.OPTIMIZERS`."""
    min_bytes: int
    """Smaller saved storages never move."""
    autocast: torch.dtype | None = None
    """Dtype of the autocast around forward; None: no autocast. The model's own autocast still acts like CUDA's."""
    compiled: float | None = None
    """`activation_memory_budget` of torch, 0 to 1, under which each repeated block is compiled; None: all runs eagerly."""
    checkpointed: Checkpointing | None = None
    """Repeated blocks that run under torch's checkpointing; None: no block."""


def record_step(request: StepRequest, *, bucket_bytes: int | None = None) -> RecordedStep:
    """Record one step under fake tensors: weights, batch and activations take no memory.

    bucket_bytes: state that the optimizer steps together, as in a session that swaps the state; None: all of it.
    Takes tens of microseconds for each operator. Raises `ModelUnusable` if the model fails.
    """
    device, optimizer, autocast, min_bytes = SimDevice(request.spec), request.optimizer, request.autocast, request.min_bytes
    with ShapesAlone(), default_dtype(request.dtype), GpuOperators(), gpu_autocast(), _uncompiled():
        with ValuesReadAsZero() as values:
            workload = request.build()
        how: Any = {"compiled": request.compiled, "checkpointed": request.checkpointed}
        step = TrainingStep(workload, optimizer, autocast, bucket_bytes=bucket_bytes, **how)
        recorder = Recorder(device, model=workload.model, optimizers=step.optimizers, times=PricedTimes(device.cost.kernel_us))
        with recorder:
            with RecordingHooks(recorder, min_bytes=min_bytes), told_as(f"{workload.about}: a step failed under fake tensors"):
                loss = step.forward_backward()
            step.update()
        numbers = [[recorder.number_of(p.untyped_storage()) for p in group] for group in groups_of(workload.model)]
        trace = recorder.finish()
        del loss  # a training loop also holds it until here
    counts: Counter[str] = Counter()
    for parameter in workload.model.parameters():
        counts[_name(parameter.dtype)] += parameter.numel()
    return RecordedStep(
        about=workload.about,
        notes=(*workload.notes, *values.notes, *step.notes),
        activation_memory_budget=request.compiled,
        parameters_by_dtype=dict(counts.most_common()),
        autocast=None if autocast is None else _name(autocast),
        optimizer=optimizer,
        min_bytes=min_bytes,
        trace=trace,
        gathered=tuple(np.array([n for n in group if n is not None], np.int64) for group in numbers),
        window=partial(window_for, charged_sizes(workload.model.parameters())),
        largest_bucket_bytes=step.largest_bucket_bytes,
    )


def _uncompiled() -> AbstractContextManager[Any]:
    """Context in which functions compiled by the user run eagerly, because `compile_blocks` compiles for shapes only."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class TrainingStep:
    """Step of a training loop. `started`: the optimizer already has its state, as from the second step on.
    `bucket_bytes`: as in `record_step`; `compiled`, `checkpointed`: as in `StepRequest`."""

    def __init__(
        self,
        workload: Workload,
        optimizer: str,
        autocast: torch.dtype | None = None,
        *,
        started: bool = True,
        bucket_bytes: int | None = None,
        compiled: float | None = None,
        checkpointed: Checkpointing | None = None,
    ) -> None:
        trained = [p for p in workload.model.parameters() if p.requires_grad]
        if not trained:
            raise ModelUnusable(f"{workload.about}: expected parameters that require gradients, got none; nothing is trained")
        elsewhere = {str(p.device) for p in workload.model.parameters()} - {"cpu"}
        if elsewhere:
            raise ModelUnusable(
                f"{workload.about}: expected a model on the CPU, got parameters on {', '.join(sorted(elsewhere))}; build it "
                f"there: nothing is computed, and no GPU is needed"
            )
        self._workload, self.model = workload, workload.model
        self._autocast, self._bucket_bytes = autocast, bucket_bytes
        self.largest_bucket_bytes = 0
        self.notes: tuple[str, ...] = ()
        """Sentences about aspects that its compiled blocks ignore."""
        if compiled is not None:
            from chameleon_mm.tools.compiled_blocks import compile_blocks  # imports Inductor, which takes seconds

            self.notes = compile_blocks(self.model, activation_memory_budget=compiled)
        if checkpointed is not None:
            checkpoint_blocks(blocks_of(self.model), checkpointed)
        self.optimizers = _optimizers(optimizer, trained)
        if started and self.optimizers:
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
            self.update()

    def forward_backward(self) -> Tensor:
        with nullcontext() if self._autocast is None else torch.autocast(PLANNED_ON, self._autocast):
            loss = self._workload.loss()
        loss.backward()
        return loss

    def update(self) -> None:
        for optimizer in self.optimizers:
            if self._bucket_bytes is None:
                optimizer.step()
            else:
                self._step_in_buckets(optimizer, self._bucket_bytes)
        self.model.zero_grad(set_to_none=True)

    def _step_in_buckets(self, optimizer: Optimizer, bucket_bytes: int) -> None:
        raw = raw_step(optimizer)
        for bucket in buckets_of(optimizer, partial(_state_bytes, optimizer), bucket_bytes):
            with alone(optimizer, bucket):
                raw(optimizer)
            stepped = sum(_state_bytes(optimizer, p) for p in bucket["params"])
            self.largest_bucket_bytes = max(self.largest_bucket_bytes, stepped)


def _state_bytes(optimizer: Optimizer, p: Tensor) -> int:
    """Return the bytes of the state of `p`. Without state yet, assume `STATE_PER_PARAMETER` tensors."""
    values = [value for value in optimizer.state[p].values() if isinstance(value, Tensor)] if p in optimizer.state else []
    return sum(value.untyped_storage().nbytes() for value in values) or STATE_PER_PARAMETER * p.numel() * p.element_size()


def _optimizers(name: str, parameters: list[nn.Parameter]) -> list[Optimizer]:
    if name == "none":
        return []
    if name == "adamw-fused":
        return [AdamW(parameters, fused=True)]
    if name == "adamw-8bit":
        return [EightBitAdamW(parameters, {})]
    # `foreach` is explicit: torch picks it on CUDA, but a loop over the parameters on the CPU.
    return [AdamW(parameters, foreach=True) if name == "adamw" else SGD(parameters, lr=1e-3, momentum=0.9, foreach=True)]


class EightBitAdamW(Optimizer):
    """State and memory traffic of an AdamW with moments of 8 bits, for shapes only. The values of its step are meaningless.

    Moments of fewer than 4096 elements are float32, as bitsandbytes' are.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no training loop of ours gives a closure
        """Read each parameter, its gradient and its moments once, and write all except the gradient, like one kernel."""
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            for name in ("exp_avg", "exp_avg_sq") if not self.state[p] else ():
                self.state[p][name] = torch.zeros_like(p, dtype=torch.float32 if p.numel() < 4096 else torch.uint8)
                if p.numel() >= 4096:
                    self.state[p][f"{name}_scales"] = torch.zeros(-(-p.numel() // 256), dtype=torch.float32)
            p.add_(p.grad)
            for value in self.state[p].values():
                value.add_(1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype to `dtype` within the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
