"""Builds a trace tick by tick, as a recorder meets operators and hooks, or a test makes them up.

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
from typing import Any

import numpy as np

from chameleon_mm.trace.trace import COLUMNS, NEVER, StepPhase, TensorKind, Trace

_CODES = {np.float64: "d", np.uint64: "Q", np.bool_: "B", np.uint8: "B"}
"""Codes of the columns' arrays while they grow; of all others: of 64-bit whole numbers."""


class TraceBuilder:
    """A trace that is not finished. Not thread-safe."""

    def __init__(self, *, device: str, simulated: bool, start_bytes: int) -> None:
        self._device = device
        self._simulated = simulated
        self._start_bytes = start_bytes
        self._names: dict[str, int] = {}
        self._columns: dict[str, array[Any]] = {name: array(_CODES.get(dtype, "q")) for name, dtype in COLUMNS.items()}
        self._columns["read_offsets"].append(0)
        self._columns["write_offsets"].append(0)

    @property
    def num_ticks(self) -> int:
        """Number of ticks so far, which is the number of the next one."""
        return len(self._columns["op_tick"]) + len(self._columns["hook_tick"])

    @property
    def num_ops(self) -> int:
        return len(self._columns["op_tick"])

    @property
    def num_hooks(self) -> int:
        return len(self._columns["hook_tick"])

    def tensor(self, nbytes: int, kind: TensorKind = TensorKind.TEMPORARY, *, born: int | None = None) -> int:
        """Add a storage that begins with the next tick, or at tick `born`; -1: before the step. Returns its number."""
        self._columns["tensor_bytes"].append(nbytes)
        self._columns["tensor_kind"].append(kind)
        self._columns["tensor_born"].append(self.num_ticks if born is None else born)
        for event in ("released", "sendable", "dies"):
            self._columns[f"tensor_{event}"].append(NEVER)
        return len(self._columns["tensor_bytes"]) - 1

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
        """Add an operator that runs, and holds `inner_bytes` for itself meanwhile. Returns its number."""
        self._columns["op_tick"].append(self.num_ticks)
        self._columns["op_name"].append(self._names.setdefault(name, len(self._names)))
        self._columns["op_content"].append(content)
        self._columns["op_phase"].append(phase)
        self._columns["op_us"].append(duration_us)
        for kind, tensors in (("read", reads), ("write", writes)):
            column = self._columns[f"{kind}_tensors"]
            column.extend(tensors)
            self._columns[f"{kind}_offsets"].append(len(column))
        self._columns["op_inner_bytes"].append(inner_bytes)
        return self.num_ops - 1

    def set_duration(self, op: int, duration_us: float) -> None:
        """Set the time that operator number `op` took, known later than that it ran."""
        self._columns["op_us"][op] = duration_us

    def save(self, tensor: int, feature: int) -> int:
        """Add a save of a storage; -1: one that nobody may move. Returns the hook's number."""
        return self._hook(tensor, feature, use=False)

    def use(self, tensor: int, feature: int) -> int:
        """Add a use of what autograd saved. Returns the hook's number."""
        return self._hook(tensor, feature, use=True)

    def kind(self, tensor: int, kind: TensorKind) -> None:
        self._columns["tensor_kind"][tensor] = kind

    def released(self, tensor: int, tick: int | None = None) -> None:
        """Note that nobody but a handle of ours holds it since the tick that is the latest now, or since `tick`."""
        self._columns["tensor_released"][tensor] = self.num_ticks - 1 if tick is None else tick

    def released_after(self, hook: int, tick: int | None = None) -> None:
        """Note that nobody but a handle of ours holds what was used at hook number `hook` since the tick that is the latest
        now, or since `tick`."""
        self._columns["hook_released"][hook] = self.num_ticks - 1 if tick is None else tick

    def sendable(self, tensor: int, hook: int) -> None:
        """Note that at hook number `hook` the operator that saved it is over."""
        self._columns["tensor_sendable"][tensor] = hook

    def dies(self, tensor: int) -> None:
        """Note that its memory goes after the tick that is the latest now."""
        self._columns["tensor_dies"][tensor] = max(self.num_ticks - 1, self._columns["tensor_born"][tensor])

    def finish(self, fingerprint: int = 0) -> Trace:
        """The trace: what has not died outlives the step. Raises what `Trace` raises."""
        columns: dict[str, Any] = {name: np.array(self._columns[name], dtype) for name, dtype in COLUMNS.items()}
        dies = columns["tensor_dies"]
        dies[dies == NEVER] = self.num_ticks
        return Trace(
            device=self._device,
            simulated=self._simulated,
            start_bytes=self._start_bytes,
            op_names=tuple(self._names),
            fingerprint=fingerprint,
            **columns,
        )

    def _hook(self, tensor: int, feature: int, *, use: bool) -> int:
        self._columns["hook_tick"].append(self.num_ticks)
        self._columns["hook_use"].append(use)
        self._columns["hook_tensor"].append(tensor)
        self._columns["hook_released"].append(NEVER)
        self._columns["hook_feature"].append(feature)
        return self.num_hooks - 1
