"""Memory that a step needs beside the window of parameters and the optimizer's state on the host, by arithmetic over its trace.

    trace = beside(step, swapped)                       what a session's recorder sees, and so what its plans are made of
    left_beside_window(step, swapped, hbm_budget)       what a budget leaves for it

parameters, gradients, state from MIN_BYTES on   -> no part of it; a gradient is, from its product to its accumulation
each of the optimizer's operators                -> holds three buckets of state: one comes, one is stepped, one leaves
budget                                           -> less the window, which grows with the budget
"""

from __future__ import annotations

import dataclasses

import numpy as np

from chameleon_mm.errors import InfeasibleBudget
from chameleon_mm.parameters.window_size import MIN_BYTES
from chameleon_mm.planning.record import RecordedStep
from chameleon_mm.planning.session_run import Swapped
from chameleon_mm.trace import StepPhase, TensorKind, Trace
from chameleon_mm.trace.trace import Int64s
from chameleon_mm.units import allocated_size

BUCKETS_AT_ONCE = 3

_NO_LIMIT = 1 << 62


def beside(step: RecordedStep, swapped: Swapped) -> Trace:
    """Trace of `step` without what is elsewhere. Times are those of all of it."""
    trace = step.trace
    size = allocated_size(trace.tensor_bytes)
    large, kind = trace.tensor_bytes >= MIN_BYTES, trace.tensor_kind
    gone = np.zeros(len(size), np.bool_)
    dies, inner = trace.tensor_dies, trace.op_inner_bytes
    if swapped.optimizer:
        gone |= large & (kind == TensorKind.OPTIMIZER)
        in_optimizer = trace.op_phase == StepPhase.OPTIMIZER
        inner = inner + np.where(in_optimizer, BUCKETS_AT_ONCE * step.largest_bucket_bytes, 0)
    if swapped.parameters:
        gone |= large & (kind == TensorKind.PARAMETER)
        gradients = large & (kind == TensorKind.GRADIENT)
        gone |= gradients & (trace.tensor_born < 0)
        dies = np.where(gradients & (trace.tensor_born >= 0), np.minimum(dies, _last_backward_write(trace)), dies)
    there_before = int(size[gone & (trace.tensor_born < 0)].sum())
    return dataclasses.replace(
        trace,
        start_bytes=trace.start_bytes - there_before,
        tensor_bytes=np.where(gone, 0, trace.tensor_bytes),
        tensor_dies=dies.astype(np.int32),
        op_inner_bytes=inner,
    )


def _last_backward_write(trace: Trace) -> Int64s:
    """(tensors,) tick of the last operator of a backward that wrote each; the tick of its birth where none did."""
    last = trace.tensor_born.astype(np.int64)
    op = np.repeat(np.arange(len(trace.op_us)), np.diff(trace.write_offsets))
    within = trace.op_phase[op] == StepPhase.BACKWARD
    np.maximum.at(last, trace.write_tensors[within], trace.op_tick[op[within]].astype(np.int64))
    return last


def left_beside_window(step: RecordedStep, swapped: Swapped, hbm_budget: int) -> int:
    """Bytes of a budget beside its window; below 0 where the window has no room."""
    if not swapped.parameters:
        return hbm_budget
    try:
        return hbm_budget - step.window(hbm_budget)
    except InfeasibleBudget:
        return -1


def host_bytes_beside(step: RecordedStep, swapped: Swapped, hbm_budget: int) -> int:
    """Bytes of pinned memory that parameters, gradients and state take at most, as far as they leave."""
    trace = step.trace
    kinds = [TensorKind.OPTIMIZER] * swapped.optimizer + [TensorKind.PARAMETER] * swapped.parameters
    if swapped.parameters and hbm_budget - left_beside_window(step, swapped, hbm_budget) < step.window(_NO_LIMIT):
        kinds.append(TensorKind.GRADIENT)  # where all fit the window together, gradients stay there
    leaves = np.isin(trace.tensor_kind, kinds) & (trace.tensor_bytes >= MIN_BYTES)
    return int(trace.tensor_bytes[leaves].sum())
