"""Records of a trace, made of its columns: what tests compare, one operator, storage or hook at a time.

ops_of(trace)[0].name, tensors_of(trace)[3].nbytes, hooks_of(trace)[-1].use
"""

from __future__ import annotations

from dataclasses import dataclass

from chameleon_mm.trace import NEVER, StepPhase, TensorKind, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRecord:
    """One operator that ran. Fields are the columns `op_*` of a `Trace`."""

    tick: int
    name: str
    content: int
    phase: StepPhase
    duration_us: float
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    inner_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """One storage. Fields are the columns `tensor_*` of a `Trace`."""

    nbytes: int
    kind: TensorKind
    born: int
    released: int
    sendable: int
    dies: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HookRecord:
    """One call of autograd's two hooks. Fields are the columns `hook_*` of a `Trace`."""

    tick: int
    use: bool
    tensor: int
    feature: int
    released: int = NEVER


def ops_of(trace: Trace) -> list[OpRecord]:
    """All operators, in order."""
    return [
        OpRecord(
            tick=int(trace.op_tick[i]),
            name=trace.op_names[trace.op_name[i]],
            content=int(trace.op_content[i]),
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
    return [
        TensorRecord(
            nbytes=int(trace.tensor_bytes[j]),
            kind=TensorKind(int(trace.tensor_kind[j])),
            born=int(trace.tensor_born[j]),
            released=int(trace.tensor_released[j]),
            sendable=int(trace.tensor_sendable[j]),
            dies=int(trace.tensor_dies[j]),
        )
        for j in range(len(trace.tensor_bytes))
    ]


def hooks_of(trace: Trace) -> list[HookRecord]:
    """All hooks, in order."""
    return [
        HookRecord(
            tick=int(trace.hook_tick[k]),
            use=bool(trace.hook_use[k]),
            tensor=int(trace.hook_tensor[k]),
            released=int(trace.hook_released[k]),
            feature=int(trace.hook_feature[k]),
        )
        for k in range(len(trace.hook_tick))
    ]
