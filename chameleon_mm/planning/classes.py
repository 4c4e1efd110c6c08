"""Classes of the storages that are idle at the peak, by what a plan makes of them: kept, swapped, recomputed; and the held.

for group in classes_of(trace, plan):
    group.name, group.nbytes, group.recompute_us        "recomputed", bytes at the peak, time of the operators that run again
    group.most                                          operators that made the most of it, with their bytes
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from chameleon_mm.policy import Candidates, SwapPlan, memory_curve
from chameleon_mm.trace import Trace
from chameleon_mm.trace.replayable import VIEWS, base_name
from chameleon_mm.units import allocated_size

KEPT, SWAPPED, RECOMPUTED, HELD = "kept", "swapped", "recomputed", "held"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryClass:
    """Storages of which a plan makes the same."""

    name: str
    nbytes: int
    """Device memory that they would take at the unswapped peak; of what is held, the memory that holding it takes."""
    count: int
    recompute_us: float
    """Time in which they are recomputed, with all that this takes; 0 for the others."""
    most: tuple[tuple[str, int], ...]
    """Names of the operators that made them and bytes, most bytes first, three at most."""


def classes_of(trace: Trace, plan: SwapPlan) -> tuple[MemoryClass, ...]:
    """The four classes, those without a storage as well. A storage that moves in part is in two. Candidates that are idle
    at the unswapped peak count, for these are what a plan chooses among; and what is held beyond its life, whenever that is."""
    candidates, curve = Candidates.of(trace), memory_curve(trace)
    peak = int(curve.argmax()) if len(curve) else -1
    idle = (trace.hook_tick[candidates.first] <= peak) & (peak < trace.hook_tick[candidates.use])
    size = dict(zip(candidates.tensor[idle].tolist(), candidates.size[idle].tolist(), strict=True))
    allocated = allocated_size(trace.tensor_bytes)
    dropped = {action.tensor: size[action.tensor] for action in plan.recomputed if action.tensor in size}
    swapped = {action.tensor: min(size[action.tensor], action.nbytes) for action in plan.swaps if action.tensor in size}
    held_tensors = {action.tensor for action in plan.held}
    swapped |= {action.tensor: action.nbytes for action in plan.swaps if action.tensor in held_tensors}
    held = {
        action.tensor: int(allocated[action.tensor])
        for action in plan.held
        if trace.tensor_dies[action.tensor] < trace.hook_tick[action.use_at]
    }
    kept = {j: size[j] - swapped.get(j, 0) for j in size if j not in dropped}
    makers = _maker_names(trace)
    return tuple(
        _class(name, storages, makers, plan.recompute_us if name == RECOMPUTED else 0.0)
        for name, storages in ((KEPT, kept), (SWAPPED, swapped), (RECOMPUTED, dropped), (HELD, held))
    )


def _class(name: str, storages: Mapping[int, int], makers: Mapping[int, str], recompute_us: float) -> MemoryClass:
    bytes_by_maker = Counter[str]()
    for j, nbytes in storages.items():
        bytes_by_maker[makers.get(j, "there before the step")] += nbytes
    most = sorted(((maker, nbytes) for maker, nbytes in bytes_by_maker.items() if nbytes), key=lambda of: (-of[1], of[0]))
    return MemoryClass(
        name=name,
        nbytes=sum(storages.values()),
        count=sum(nbytes > 0 for nbytes in storages.values()),
        recompute_us=recompute_us,
        most=tuple(most[:3]),
    )


def _maker_names(trace: Trace) -> dict[int, str]:
    """Base name, without its library, of the first operator that wrote each storage."""
    op = np.repeat(np.arange(len(trace.op_us)), np.diff(trace.write_offsets))
    names = [base_name(name) for name in trace.op_names]
    makers: dict[int, str] = {}
    pairs: Iterable[tuple[int, int]] = zip(trace.write_tensors.tolist(), trace.op_name[op].tolist(), strict=True)
    for j, name in pairs:
        if names[name] not in VIEWS:
            makers.setdefault(j, names[name].rpartition("::")[2])
    return makers
