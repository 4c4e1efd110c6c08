"""Device memory that a step needs, by class of storages.

for need in needs_of(trace, peak): need.name, need.most_bytes, need.at_peak_bytes
peak_phase(trace, peak)         forward, backward or optimizer
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chameleon_mm.policy import Peak
from chameleon_mm.policy.memory import sum_over_time
from chameleon_mm.trace import StepPhase, TensorKind, Trace
from chameleon_mm.units import allocated_size

_CLASSES = {
    "parameters": (TensorKind.PARAMETER,),
    "gradients": (TensorKind.GRADIENT,),
    "optimizer state": (TensorKind.OPTIMIZER,),
    "activations": (TensorKind.ACTIVATION,),
    "temporaries": (TensorKind.TEMPORARY,),
    "inputs and buffers": (TensorKind.INPUT, TensorKind.BUFFER),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Storages of one class."""

    name: str
    most_bytes: int
    """The most bytes of this class at any time of the step."""
    at_peak_bytes: int
    """Bytes of this class while the step as a whole needs the most."""


def needs_of(trace: Trace, peak: Peak) -> tuple[MemoryNeed, ...]:
    """The classes that `trace` has. `peak`: its peak. O(operators + storages)."""
    size = allocated_size(trace.tensor_bytes)
    since, until = np.maximum(trace.tensor_born, 0), trace.tensor_dies + 1
    needs = []
    for name, kinds in _CLASSES.items():
        which = np.isin(trace.tensor_kind, kinds)
        if which.any():
            most = int(sum_over_time(trace.num_ticks, size[which], since[which], until[which]).max(initial=0))
            at_peak = sum(peak.by_kind.get(kind, 0) for kind in kinds)
            needs.append(MemoryNeed(name=name, most_bytes=most, at_peak_bytes=at_peak))
    if trace.op_inner_bytes.any():
        needs.append(
            MemoryNeed(name="inside operators", most_bytes=int(trace.op_inner_bytes.max()), at_peak_bytes=peak.inner_bytes)
        )
    return tuple(needs)


def peak_phase(trace: Trace, peak: Peak) -> StepPhase:
    """The phase of the last operator before the peak, or of it."""
    op = int(np.searchsorted(trace.op_tick, peak.tick, side="right")) - 1
    return StepPhase(int(trace.op_phase[max(op, 0)])) if len(trace.op_phase) else StepPhase.FORWARD
