"""Change a recorded step to the step of one of several ranks, with parameters sharded as by FSDP2.

step = sharded(step, Shards(ranks=8, dtype=torch.float32))

shards      parameters, gradients, optimizer state and the optimizer's temporaries: 1/ranks of each, in the dtype of the shards
a block     is gathered whole, in its compute dtype, from the start of the previous block until its own end
the rest    of the model, as by `fully_shard(model)`: gathered from its first use in forward until backward ends
gradients   of a block are whole until its backward ends; a copy in the shards' dtype exists while they are reduced,
            until the next block's are

The optimizer takes 1/ranks of its time. Collectives take no time, because their overlap depends on links that are unknown here.
A note gives their bytes. Gathered and reduced bytes count as inner memory of operators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from chameleon_mm.plan.trace import Int64s, StepPhase, TensorKind, Trace
from chameleon_mm.tools.step_on_shapes import RecordedStep
from chameleon_mm.tools.workload import Build, ModelUnusable, Workload
from chameleon_mm.units import allocated_size, format_size

_SHARDED = (TensorKind.PARAMETER, TensorKind.GRADIENT, TensorKind.OPTIMIZER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    ranks: int
    """2 or more."""
    dtype: torch.dtype | None = None
    """Dtype of the shards; None: the model's compute dtype."""


def shardable(build: Build, shards: Shards) -> Build:
    """Return a builder of the same model. It raises `ModelUnusable` if the ranks do not divide a parameter's rows, or if the
    shards have a dtype and the model has several."""

    def build_shardable() -> Workload:
        workload = build()
        for name, p in workload.model.named_parameters():
            if p.dim() and p.shape[0] % shards.ranks:
                raise ModelUnusable(
                    f"--fsdp: expected a number of ranks that divides the rows of every parameter, got {shards.ranks} and "
                    f"{name} of {p.shape[0]} rows; FSDP would pad its shards, which is not predicted: choose another number"
                )
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in workload.model.parameters()})
        if shards.dtype is not None and len(dtypes) > 1:
            raise ModelUnusable(
                f"--fsdp: expected a model of one dtype, got {' and '.join(dtypes)}; leave out the shards' dtype"
            )
        return workload

    return build_shardable


def sharded(step: RecordedStep, shards: Shards) -> RecordedStep:
    """Return `step`, of a model built by `shardable`, as the step of one of `shards.ranks` ranks. O(operators + storages)."""
    computed: torch.dtype = getattr(torch, next(iter(step.parameters_by_dtype)))
    wider = 1.0 if shards.dtype is None else shards.dtype.itemsize / computed.itemsize
    trace, kind = step.trace, step.trace.tensor_kind
    of_optimizer = trace.op_phase == StepPhase.OPTIMIZER
    began = int(trace.op_tick[of_optimizer].min(initial=trace.num_ticks))
    smaller = np.isin(kind, _SHARDED) | ((kind == TensorKind.TEMPORARY) & (trace.tensor_born >= began))
    nbytes = np.ceil(trace.tensor_bytes * np.where(smaller, wider / shards.ranks, 1.0)).astype(np.int64)
    share = np.where(of_optimizer, wider / shards.ranks, 1.0)
    fewer = (allocated_size(trace.tensor_bytes) - allocated_size(nbytes))[trace.tensor_born < 0].sum()
    crossing = 1 - 1 / shards.ranks
    received = 2 * crossing * sum(int(trace.tensor_bytes[group].sum()) for group in step.gathered)
    reduced = crossing * wider * int(trace.tensor_bytes[kind == TensorKind.GRADIENT].sum())
    dtype = "" if shards.dtype is None else f" in {str(shards.dtype).removeprefix('torch.')}"
    crosses = f"receives {format_size(received)} of parameters and reduces {format_size(reduced)} of gradients"
    notes = (
        f"one of {shards.ranks} ranks, which keep shards{dtype} of parameters, gradients and optimizer state, as FSDP2 does",
        f"collectives take no time: a rank {crosses} in a step; what is gathered and reduced is memory inside operators",
    )
    return dataclasses.replace(
        step,
        notes=(*step.notes, *notes),
        trace=dataclasses.replace(
            trace,
            tensor_bytes=nbytes,
            start_bytes=trace.start_bytes - int(fewer),
            op_us=trace.op_us * share,
            op_inner_bytes=(trace.op_inner_bytes * share).astype(np.int64) + _gathered(trace, step.gathered, wider),
        ),
    )


def _gathered(trace: Trace, groups: tuple[Int64s, ...], wider: float) -> Int64s:
    """Return (operators,): bytes of gathered parameters and of gradients not reduced yet, while each operator runs."""
    change = np.zeros(len(trace.op_us) + 1, np.int64)

    def add(nbytes: int, first: int, last: int) -> None:
        change[first] += nbytes
        change[last + 1] -= nbytes

    rest, end = len(groups) - 1, int(np.flatnonzero(trace.op_phase == StepPhase.BACKWARD).max(initial=0))
    forward, backward = (_spans(trace, groups, phase) for phase in (StepPhase.FORWARD, StepPhase.BACKWARD))
    for spans in (forward, backward):
        blocks = [span for span in spans if span[2] != rest]
        for before, (_, last, group) in zip([*blocks[:1], *blocks], blocks, strict=False):
            add(int(allocated_size(trace.tensor_bytes[groups[group]]).sum()), before[0], last)
    if of_rest := [span for span in (*forward, *backward) if span[2] == rest]:
        add(int(allocated_size(trace.tensor_bytes[groups[rest]]).sum()), of_rest[0][0], max(end, of_rest[-1][1]))
    _add_gradients(trace, [span for span in backward if span[2] != rest], end, wider, add)
    return np.cumsum(change)[:-1]


def _spans(trace: Trace, groups: tuple[Int64s, ...], phase: StepPhase) -> list[tuple[int, int, int]]:
    """Return first and last operator of `phase` that read a group's parameters, and the group's number, in order of the
    first."""
    op = trace.op_of_read()
    in_phase = trace.op_phase[op] == phase
    reads = [(op[in_phase & np.isin(trace.read_tensors, group)], i) for i, group in enumerate(groups)]
    return sorted((int(ops.min()), int(ops.max()), i) for ops, i in reads if len(ops))


def _add_gradients(
    trace: Trace, blocks: list[tuple[int, int, int]], end: int, wider: float, add: Callable[[int, int, int], None]
) -> None:
    """Add whole gradients: those of a block until it has run, then the copy that is reduced; the others until backward ends."""
    gradients = np.flatnonzero((trace.tensor_kind == TensorKind.GRADIENT) & (trace.tensor_born >= 0))
    born, size = np.searchsorted(trace.op_tick, trace.tensor_born[gradients]), allocated_size(trace.tensor_bytes[gradients])
    firsts, lasts = [span[0] for span in blocks], [span[1] for span in blocks]
    of_block = np.where(born > max(lasts, default=-1), -1, np.searchsorted(firsts, born, side="right") - 1)
    for at, nbytes, i in zip(born.tolist(), size.tolist(), of_block.tolist(), strict=True):
        add(nbytes, at, max(at, lasts[i] if i >= 0 else end))
    for i, (now, later) in enumerate(pairwise([*lasts, end])):
        add(int(size[of_block == i].sum() * wider), now, max(now, later))
