"""A trace's columns and records, what it refuses, and the builder that makes one."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest

from chameleon_mm.trace import NEVER, StepPhase, TensorKind, Trace, TraceBuilder
from tests._trace_records import HookRecord, OpRecord, TensorRecord, hooks_of, ops_of, tensors_of
from tests._traces import chain, random_step


def small() -> Trace:
    """Ticks: 0 op, 1 save, 2 op, 3 use, 4 op."""
    b = TraceBuilder(device="simulated h200", simulated=True, start_bytes=512)
    w = b.tensor(100, TensorKind.PARAMETER, born=-1)
    x = b.tensor(1000, TensorKind.ACTIVATION)
    b.op("aten::mm", 7, StepPhase.FORWARD, 10.0, reads=(w,), writes=(x,))
    b.save(x, 70)
    y = b.tensor(2000)
    op = b.op("aten::add", 8, StepPhase.FORWARD, 0.0, reads=(x, w), writes=(y,), inner_bytes=1024)
    b.set_duration(op, 20.0)
    b.released(x)
    b.dies(y)
    b.sendable(x, b.use(x, 71))
    b.op("aten::mm", 7, StepPhase.BACKWARD, 30.0, reads=(x,), writes=())
    b.dies(x)
    return b.finish(0xF1)


def test_records_are_what_the_builder_was_told() -> None:
    trace = small()
    assert ops_of(trace) == [
        OpRecord(
            tick=tick, name=name, content=content, phase=phase, duration_us=us, reads=reads, writes=writes, inner_bytes=inner
        )
        for tick, name, content, phase, us, reads, writes, inner in (
            (0, "aten::mm", 7, StepPhase.FORWARD, 10.0, (0,), (1,), 0),
            (2, "aten::add", 8, StepPhase.FORWARD, 20.0, (1, 0), (2,), 1024),
            (4, "aten::mm", 7, StepPhase.BACKWARD, 30.0, (1,), (), 0),
        )
    ]
    assert tensors_of(trace) == [
        TensorRecord(nbytes=100, kind=TensorKind.PARAMETER, born=-1, released=NEVER, sendable=NEVER, dies=5),
        TensorRecord(nbytes=1000, kind=TensorKind.ACTIVATION, born=0, released=2, sendable=1, dies=4),
        TensorRecord(nbytes=2000, kind=TensorKind.TEMPORARY, born=2, released=NEVER, sendable=NEVER, dies=2),
    ]
    assert hooks_of(trace) == [
        HookRecord(tick=1, use=False, tensor=1, feature=70),
        HookRecord(tick=3, use=True, tensor=1, feature=71),
    ]
    assert trace.op_names == ("aten::mm", "aten::add")
    assert (trace.num_ticks, trace.duration_us, trace.fingerprint) == (5, 60.0, 0xF1)


def test_columns_are_read_only() -> None:
    trace = small()
    for column in fields(trace):
        values = getattr(trace, column.name)
        if isinstance(values, np.ndarray):
            with pytest.raises(ValueError, match="read-only"):
                values[...] = 0


def test_a_step_in_which_nothing_happens() -> None:
    trace = TraceBuilder(device="cpu", simulated=False, start_bytes=9).finish()
    assert (trace.num_ticks, trace.duration_us, ops_of(trace), list(hooks_of(trace))) == (0, 0.0, [], [])


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("op_us", np.array([1.0, np.nan, 1.0]), "finite times of 0 us or more, got nan for operator 1"),
        ("op_us", np.array([-1.0, 1.0, 1.0]), "got -1.0 for operator 0"),
        ("op_us", np.array([1.0, 1.0]), "expected 2 values in op_name, got 3; record the step again"),
        ("op_tick", np.array([0, 2, 3], np.int32), "each tick from 0 to 4 once and in order"),
        ("op_name", np.array([0, 2, 0], np.int32), "op_name from 0 to 1"),
        ("op_names", ("aten::mm", "aten::mm"), "distinct op_names"),
        ("op_phase", np.array([0, 0, 3], np.uint8), "op_phase from 0 to 2"),
        ("tensor_kind", np.array([0, 0, 7], np.uint8), "tensor_kind from 0 to 6"),
        ("read_offsets", np.array([0, 1, 3, 5]), "read_offsets to divide read_tensors among 3 operators"),
        ("write_tensors", np.array([1, 3], np.int32), "numbers below 3"),
        ("tensor_bytes", np.array([1, -1, 1]), "sizes of 0 bytes or more"),
        ("op_inner_bytes", np.array([0, -1, 0]), "sizes of 0 bytes or more"),
        ("start_bytes", -1, "sizes of 0 bytes or more"),
        ("tensor_dies", np.array([5, -1, 2], np.int32), "born, then to die"),
        ("tensor_born", np.array([-2, 0, 2], np.int32), "tensor_born from -1 to 5"),
        ("tensor_released", np.array([-2, 5, -2], np.int32), "tensor_released from -2 to 4"),
        ("tensor_sendable", np.array([-2, 2, -2], np.int32), "tensor_sendable from -2 to 1"),
        ("hook_tensor", np.array([1, 3], np.int32), "hook_tensor from -1 to 2"),
        ("hook_released", np.array([-2, 5], np.int32), "hook_released from -2 to 4"),
        ("hook_released", np.array([1, -2], np.int32), "hook_released of uses alone"),
    ],
)
def test_columns_that_contradict_each_other_are_refused(column: str, values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(small(), **{column: values})


def test_made_up_steps_are_of_the_kinds_that_tests_need() -> None:
    trace = chain(layers=3, micro_batches=2)
    phases = [op.phase for op in ops_of(trace)]
    changes = [phases[0]] + [b for a, b in pairwise(phases) if a != b]
    forward, backward = StepPhase.FORWARD, StepPhase.BACKWARD
    assert changes == [forward, backward, forward, backward, StepPhase.OPTIMIZER]
    assert sum(hook.use for hook in hooks_of(trace)) * 2 == len(hooks_of(trace)) == 60
    steps = [random_step(Random(seed)) for seed in range(50)]
    assert any(tensor.released == NEVER for step in steps for tensor in tensors_of(step))
    assert any(hook.tensor < 0 for step in steps for hook in hooks_of(step))
    assert any(tensor.nbytes % 512 for step in steps for tensor in tensors_of(step))
