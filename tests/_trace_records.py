"""Records of a trace, made of its columns, for comparison in tests: one operator, storage or hook each.

ops_of(trace)[0].name, tensors_of(trace)[3].nbytes, hooks_of(trace)[-1].use
"""

from __future__ import annotations

from dataclasses import dataclass

from chameleon_mm.plan.trace import NEVER, StepPhase, TensorKind, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRecord:
    """Operator that ran. Fields are the columns `op_*` of a `Trace`."""

    tick: int
    name: str
    phase: StepPhase
    duration_us: float
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    inner_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """Storage of a step. Fields are the columns `tensor_*` of a `Trace`."""

    nbytes: int
    kind: TensorKind
    born: int
    released: int
    sendable: int
    dies: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HookRecord:
    """Call of one of autograd's two hooks. Fields are the columns `hook_*` of a `Trace`."""

    tick: int
    use: bool
    tensor: int
    released: int = NEVER


def ops_of(trace: Trace) -> list[OpRecord]:
    """All operators, in order."""
    return [
        OpRecord(
            tick=int(trace.op_tick[i]),
            name=trace.op_names[trace.op_name[i]],
            phase=StepPhase(int(trace.op_phase[i])),
            duration_us=float(trace.op_us[i]),
            reads=tuple(trace.read_tensors[trace.read_offsets[i] : trace.read_offsets[i + 1]].tolist()),
            writes=tuple(trace.write_tensors[trace.write_offsets[i] : trace.write_offsets[i + 1]].tolist()),
            inner_bytes=int(trace.op_inner_bytes[i]),
        )
        for i in range(len(trace.op_us))
    ]


def tensors_of(trace: Trace) -> list[TensorRecord]:
    """All storages, by their numbers."""
    columns = (trace.tensor_bytes, trace.tensor_born, trace.tensor_released, trace.tensor_sendable, trace.tensor_dies)
    rows = zip(trace.tensor_kind.tolist(), *(column.tolist() for column in columns), strict=True)
    return [
        TensorRecord(nbytes=nbytes, kind=TensorKind(kind), born=born, released=released, sendable=sendable, dies=dies)
        for kind, nbytes, born, released, sendable, dies in rows
    ]


def hooks_of(trace: Trace) -> list[HookRecord]:
    """All hooks, in order."""
    columns = (trace.hook_tick, trace.hook_use, trace.hook_tensor, trace.hook_released)
    return [
        HookRecord(tick=tick, use=bool(use), tensor=tensor, released=released)
        for tick, use, tensor, released in zip(*(column.tolist() for column in columns), strict=True)
    ]
