"""Compiled regions of a trace, and the same trace with another partition of them.

    regions_of(trace)                       # the storages that each forward saved, and the backward that uses them
    with_partition(trace, share)            # each region saves `share` of them, and recomputes the rest in its backward

A region's backward reads everything that its forward saved at the same time. So its saves may be on the host between forward
and backward, but not while either runs. If the region is the whole model, swapping does not lower the peak. A partition does:
the compiler splits the graph so that forward saves less, and backward recomputes more.

A share is torch's `activation_memory_budget`. The estimate has two parts: saved bytes are in proportion to the share, and
recomputation takes the same part of the forward's time. The compiler's real choice is recorded after compilation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from chameleon_mm.plan.trace import Trace
from chameleon_mm.units import format_us

FORWARD, BACKWARD = "compiled::forward", "compiled::backward"

SHARES = (0.75, 0.5, 0.25, 0.1, 0.0)
"""Shares to try besides torch's own, which is 1."""

MISSED = 0.1
"""Part of the bytes to recompute that a partition is assumed to save nevertheless: it saves whole storages, and recomputes some
long before their use."""

WORTH_COMPILING = 0.02
"""Minimum share of the step's time that another partition must gain before regions are compiled once more."""


@dataclasses.dataclass(frozen=True, slots=True)
class TracedRegion:
    """Call of a compiled region in a step."""

    forward: int
    """Number of the forward operator."""
    backward: int
    """Number of the backward operator; -1: no operator used the saves."""
    saved: tuple[int, ...]
    """Numbers of the storages that the region made and saved."""


def regions_of(trace: Trace) -> list[TracedRegion]:
    """Return the calls of regions that saved any storage."""
    forward, backward = (trace.op_names.index(name) if name in trace.op_names else -1 for name in (FORWARD, BACKWARD))
    ends = [*trace.op_tick[1:].tolist(), trace.num_ticks]
    found = []
    for op in np.flatnonzero(trace.op_name == forward).tolist():
        hooks = np.flatnonzero((trace.hook_tick > trace.op_tick[op]) & (trace.hook_tick < ends[op]) & ~trace.hook_use)
        saved = np.unique(trace.hook_tensor[hooks])
        saved = saved[saved >= 0]
        saved = saved[trace.tensor_born[saved] == trace.op_tick[op]]
        if len(saved):
            readers = np.unique(trace.op_of_read()[np.isin(trace.read_tensors, saved)])
            users = readers[(trace.op_name[readers] == backward) & (readers > op)]
            found.append(TracedRegion(op, int(users[0]) if len(users) else -1, tuple(saved.tolist())))
    return found


def with_partition(trace: Trace, share: float) -> Trace:
    """Return `trace` with regions that save `share` of their bytes, plus `MISSED` of the rest."""
    kept_share = share + MISSED * (1 - share)
    nbytes, op_us = trace.tensor_bytes.copy(), trace.op_us.copy()
    for region in regions_of(trace):
        if region.backward >= 0:
            saved = list(region.saved)
            nbytes[saved] = np.ceil(nbytes[saved] * kept_share).astype(np.int64)
            op_us[region.backward] += (1 - share) * op_us[region.forward]
    return dataclasses.replace(trace, tensor_bytes=nbytes, op_us=op_us)


class PartitionChoice:
    """Choice of one partition for all regions of a program. Made once, from a step with the regions as first compiled."""

    def __init__(self) -> None:
        self.is_made = False
        self.share: float | None = None
        """Torch's `activation_memory_budget` for the regions; None: torch's own partition stays."""
        self.text = ""
        """Text about the choice and the alternatives. Empty: no region was recorded."""

    def make(self, trace: Trace, own: float | None, step_us: Callable[[Trace], float | None], *, present: float = 1.0) -> None:
        """Choose for the step of `trace`, if it has regions. `step_us(trace)`: time of a step with its best plan; None: there
        is no plan. `own`: this time for `trace` itself. `present`: minimum share with which its regions were compiled."""
        if not regions_of(trace):
            return
        self.is_made = True
        stays = "torch's own" if present == 1 else "as first compiled"
        if own is not None and own <= (1 + WORTH_COMPILING) * trace.duration_us:
            self.text = f"{stays}: by plan the step takes {format_us(own)}, {format_us(trace.duration_us)} unswapped"
            return
        tried = {present * share: step_us(with_partition(trace, share)) for share in SHARES if present}
        times = {share: us for share, us in tried.items() if us is not None}
        told = {share: "no plan fits" if us is None else format_us(us) for share, us in {present: own, **tried}.items()}
        all_of_them = ", ".join(f"{share:g}: {text}" for share, text in told.items())
        best = min(times, key=times.__getitem__, default=None)
        if best is None or (own is not None and times[best] > (1 - WORTH_COMPILING) * own):
            self.text = f"{stays}; estimates by activation_memory_budget: {all_of_them}"
            return
        self.share = best
        self.text = f"activation_memory_budget {best:g}, compiled once more for it; estimates by that value: {all_of_them}"
