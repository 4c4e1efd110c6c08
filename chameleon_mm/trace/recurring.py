"""Turns the trace of a first step into that of the later ones: what it made and kept is there when the next one begins.

again = there_before(trace, {TensorKind.OPTIMIZER})      # made at the first optimizer step, kept ever since
again = without_making(trace, {TensorKind.OPTIMIZER})    # ... and without the operators that made it
again = with_extra(trace, nbytes)                        # something else is there too, all the time
again = with_spikes(trace, {tick: nbytes})               # ... or for one tick
again = with_times(trace, 0.8)                           # operators take less than they did
again = renumbered(trace)                                # storages in the order of the operators
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import numpy as np

from chameleon_mm.trace.trace import COLUMNS, NEVER, Bools, TensorKind, Trace
from chameleon_mm.units import allocated_size


def outliving_bytes(trace: Trace, kinds: Collection[TensorKind]) -> int:
    """Device memory of the storages of `kinds` that were made in the step and outlive it."""
    return int(allocated_size(trace.tensor_bytes[_outliving(trace, kinds)]).sum())


def there_before(trace: Trace, kinds: Collection[TensorKind]) -> Trace:
    """`trace` with the storages of `kinds` that were made in it and outlive it there from the beginning.

    Operators that made such storages and wrote nothing else take no time and no memory: they will not run again.
    """
    outliving = _outliving(trace, kinds)
    if not outliving.any():
        return trace
    born = np.where(outliving, np.int32(-1), trace.tensor_born).astype(np.int32)
    over = _only_make(trace, outliving)
    op_us, inner_bytes = np.where(over, 0.0, trace.op_us), np.where(over, 0, trace.op_inner_bytes)
    start_bytes = trace.start_bytes + outliving_bytes(trace, kinds)
    return dataclasses.replace(trace, tensor_born=born, op_us=op_us, op_inner_bytes=inner_bytes, start_bytes=start_bytes)


def without_making(trace: Trace, kinds: Collection[TensorKind]) -> Trace:
    """`trace` as that of a later step: `there_before`, without the operators that made such storages and wrote nothing else.
    Ticks are numbered anew."""
    over = _only_make(trace, _outliving(trace, kinds))
    trace = there_before(trace, kinds)
    if not over.any():
        return trace
    gone = trace.op_tick[over]  # in order
    columns = {
        name: (column - np.searchsorted(gone, column, side="right")).astype(np.int32)
        for name in ("op_tick", "tensor_born", "tensor_released", "tensor_dies", "hook_tick", "hook_released")
        for column in (getattr(trace, name),)
    }
    for what in ("read", "write"):
        counts = np.diff(getattr(trace, f"{what}_offsets"))
        columns[f"{what}_tensors"] = getattr(trace, f"{what}_tensors")[np.repeat(~over, counts)]
        columns[f"{what}_offsets"] = np.concatenate([[0], np.cumsum(counts[~over])]).astype(np.int64)
    columns |= {name: columns.get(name, getattr(trace, name))[~over] for name in COLUMNS if name.startswith("op_")}
    return dataclasses.replace(trace, **columns)


def with_extra(trace: Trace, nbytes: int) -> Trace:
    """`trace` with `nbytes` more allocated, all the time."""
    return dataclasses.replace(trace, start_bytes=trace.start_bytes + nbytes)


def with_spikes(trace: Trace, spikes: Mapping[int, int]) -> Trace:
    """`trace` with that many bytes more allocated during each of these ticks, and freed again. Raises `ValueError` for a tick
    that it does not have."""
    new = len(spikes)
    ticks = np.fromiter(spikes.keys(), np.int32, new)
    return dataclasses.replace(
        trace,
        tensor_bytes=np.append(trace.tensor_bytes, np.fromiter(spikes.values(), np.int64, new)),
        tensor_kind=np.append(trace.tensor_kind, np.full(new, TensorKind.TEMPORARY, np.uint8)),
        tensor_born=np.append(trace.tensor_born, ticks),
        tensor_released=np.append(trace.tensor_released, np.full(new, NEVER, np.int32)),
        tensor_sendable=np.append(trace.tensor_sendable, np.full(new, NEVER, np.int32)),
        tensor_dies=np.append(trace.tensor_dies, ticks),
    )


def with_times(trace: Trace, factor: float) -> Trace:
    """`trace` with each operator's time multiplied by `factor`."""
    return dataclasses.replace(trace, op_us=trace.op_us * factor)


def renumbered(trace: Trace) -> Trace:
    """`trace` with its storages numbered in the order in which operators use them, by the first use, then by the next ones: a
    number then says the same in every step of these operators. Those that none uses come last."""
    ops = np.arange(len(trace.op_us))
    used_by: list[list[int]] = [[] for _ in trace.tensor_bytes]
    reads = zip(np.repeat(2 * ops, np.diff(trace.read_offsets)).tolist(), trace.read_tensors.tolist(), strict=True)
    writes = zip(np.repeat(2 * ops + 1, np.diff(trace.write_offsets)).tolist(), trace.write_tensors.tolist(), strict=True)
    for use, tensor in sorted((*reads, *writes)):
        used_by[tensor].append(use)
    old = np.array(sorted(range(len(used_by)), key=lambda tensor: (not used_by[tensor], used_by[tensor])), np.int64)
    new = np.empty(len(old) + 1, np.int32)
    new[old], new[-1] = np.arange(len(old)), -1
    columns = {name: getattr(trace, name)[old] for name in COLUMNS if name.startswith("tensor_")}
    numbers = {name: new[getattr(trace, name)] for name in ("read_tensors", "write_tensors", "hook_tensor")}
    return dataclasses.replace(trace, **columns, **numbers)


def _only_make(trace: Trace, outliving: Bools) -> Bools:
    """(operators,): whether an operator makes some of the storages `outliving`, and writes nothing else."""
    op = np.repeat(np.arange(len(trace.op_us)), np.diff(trace.write_offsets))
    writes = trace.write_tensors
    makes = outliving[writes] & (trace.tensor_born[writes] == trace.op_tick[op])
    made, written = (np.bincount(some, minlength=len(trace.op_us)) for some in (op[makes], op))
    return np.asarray((made > 0) & (made == written))


def _outliving(trace: Trace, kinds: Collection[TensorKind]) -> Bools:
    of_kind = np.isin(trace.tensor_kind, [int(kind) for kind in kinds])
    return np.asarray(of_kind & (trace.tensor_born >= 0) & (trace.tensor_dies >= trace.num_ticks))
