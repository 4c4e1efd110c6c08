"""Makes a trace tick by tick, as a recorder meets operators and hooks, or a test makes them up.

b = TraceBuilder(device="simulated h200", simulated=True, start_bytes=0)
w = b.tensor(nbytes, TensorKind.PARAMETER, born=-1)
x = b.tensor(nbytes)                          # born at the next tick
b.op("aten::mm", content, phase, us, reads=(w,), writes=(x,))
b.save(x, feature); ...; b.use(x, feature); ...
b.dies(x)                                     # after the last tick so far
trace = b.finish(fingerprint)
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from chameleon_mm.trace.records import StepPhase, TensorKind
from chameleon_mm.trace.trace import NEVER, Trace


class TraceBuilder:
    """A trace that is not finished. Not thread-safe."""

    def __init__(self, *, device: str, simulated: bool, start_bytes: int) -> None:
        self._device = device
        self._simulated = simulated
        self._start_bytes = start_bytes
        self._names: dict[str, int] = {}
        self._op_name, self._op_content, self._op_phase = array("i"), array("Q"), array("B")
        self._op_us, self._op_tick = array("d"), array("i")
        self._reads, self._writes = _Ragged(), _Ragged()
        self._op_inner_bytes = array("q")
        self._bytes, self._kind = array("q"), array("B")
        self._born, self._released, self._sendable, self._dies = array("i"), array("i"), array("i"), array("i")
        self._hook_tick, self._hook_use, self._hook_tensor, self._hook_feature = array("i"), array("B"), array("i"), array("Q")

    @property
    def num_ticks(self) -> int:
        """Of the ticks so far; the next one has this number."""
        return len(self._op_tick) + len(self._hook_tick)

    @property
    def num_ops(self) -> int:
        return len(self._op_tick)

    @property
    def num_hooks(self) -> int:
        return len(self._hook_tick)

    def tensor(self, nbytes: int, kind: TensorKind = TensorKind.TEMPORARY, *, born: int | None = None) -> int:
        """A storage that begins with the next tick, or at tick `born`; -1: before the step. Returns its number."""
        self._bytes.append(nbytes)
        self._kind.append(kind)
        self._born.append(self.num_ticks if born is None else born)
        for column in (self._released, self._sendable, self._dies):
            column.append(NEVER)
        return len(self._bytes) - 1

    def op(
        self,
        name: str,
        content: int,
        phase: StepPhase,
        duration_us: float,
        *,
        reads: Sequence[int] = (),
        writes: Sequence[int] = (),
        inner_bytes: int = 0,
    ) -> int:
        """An operator runs, and holds `inner_bytes` for itself meanwhile. Returns its number."""
        self._op_tick.append(self.num_ticks)
        self._op_name.append(self._names.setdefault(name, len(self._names)))
        self._op_content.append(content)
        self._op_phase.append(phase)
        self._op_us.append(duration_us)
        self._reads.append(reads)
        self._writes.append(writes)
        self._op_inner_bytes.append(inner_bytes)
        return self.num_ops - 1

    def set_duration(self, op: int, duration_us: float) -> None:
        """What operator number `op` took, known later than that it ran."""
        self._op_us[op] = duration_us

    def save(self, tensor: int, feature: int) -> int:
        """Autograd saves a storage; -1: one that nobody may move. Returns the hook's number."""
        return self._hook(tensor, feature, use=False)

    def use(self, tensor: int, feature: int) -> int:
        """Autograd uses what it saved. Returns the hook's number."""
        return self._hook(tensor, feature, use=True)

    def kind(self, tensor: int, kind: TensorKind) -> None:
        self._kind[tensor] = kind

    def released(self, tensor: int, tick: int | None = None) -> None:
        """Nobody but a handle of ours holds it since the tick that is the latest now, or since `tick`."""
        self._released[tensor] = self.num_ticks - 1 if tick is None else tick

    def sendable(self, tensor: int, hook: int) -> None:
        """At hook number `hook` the operator that saved it is over."""
        self._sendable[tensor] = hook

    def dies(self, tensor: int) -> None:
        """Its memory goes after the tick that is the latest now."""
        self._dies[tensor] = max(self.num_ticks - 1, self._born[tensor])

    def finish(self, fingerprint: int = 0) -> Trace:
        """The trace: what has not died outlives the step. Raises what `Trace` raises."""
        dies = np.array(self._dies, np.int32)
        dies[dies == NEVER] = self.num_ticks
        return Trace(
            device=self._device,
            simulated=self._simulated,
            start_bytes=self._start_bytes,
            op_names=tuple(self._names),
            op_name=np.array(self._op_name, np.int32),
            op_content=np.array(self._op_content, np.uint64),
            op_phase=np.array(self._op_phase, np.uint8),
            op_us=np.array(self._op_us, np.float64),
            op_tick=np.array(self._op_tick, np.int32),
            read_offsets=np.array(self._reads.offsets, np.int64),
            read_tensors=np.array(self._reads.values, np.int32),
            write_offsets=np.array(self._writes.offsets, np.int64),
            write_tensors=np.array(self._writes.values, np.int32),
            op_inner_bytes=np.array(self._op_inner_bytes, np.int64),
            tensor_bytes=np.array(self._bytes, np.int64),
            tensor_kind=np.array(self._kind, np.uint8),
            tensor_born=np.array(self._born, np.int32),
            tensor_released=np.array(self._released, np.int32),
            tensor_sendable=np.array(self._sendable, np.int32),
            tensor_dies=dies,
            hook_tick=np.array(self._hook_tick, np.int32),
            hook_use=np.array(self._hook_use, np.bool_),
            hook_tensor=np.array(self._hook_tensor, np.int32),
            hook_feature=np.array(self._hook_feature, np.uint64),
            fingerprint=fingerprint,
        )

    def _hook(self, tensor: int, feature: int, *, use: bool) -> int:
        self._hook_tick.append(self.num_ticks)
        self._hook_use.append(use)
        self._hook_tensor.append(tensor)
        self._hook_feature.append(feature)
        return self.num_hooks - 1


class _Ragged:
    """Lists of different lengths, one after the other."""

    __slots__ = ("offsets", "values")

    def __init__(self) -> None:
        self.offsets = array("q", [0])
        self.values = array("i")

    def append(self, values: Sequence[int]) -> None:
        self.values.extend(values)
        self.offsets.append(len(self.values))
