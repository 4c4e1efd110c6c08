"""Columns and records of a trace, the inputs that it refuses, and its builder."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from chameleon_mm.plan.trace import (
    COLUMNS,
    NEVER,
    StepPhase,
    TensorKind,
    Trace,
    TraceBuilder,
    outliving_bytes,
    there_before,
    with_extra,
    with_spikes,
    with_times,
    without_making,
)
from chameleon_mm.plan.unswapped_memory import memory_curve
from tests._trace_records import HookRecord, OpRecord, TensorRecord, hooks_of, ops_of, tensors_of


def small() -> Trace:
    """Ticks: 0 op, 1 save, 2 op, 3 use, 4 op."""
    b = TraceBuilder(start_bytes=512)
    w = b.tensor(100, TensorKind.PARAMETER, born=-1)
    x = b.tensor(1000, TensorKind.ACTIVATION)
    b.op("aten::mm", StepPhase.FORWARD, 10.0, reads=(w,), writes=(x,))
    b.save(x)
    y = b.tensor(2000)
    op = b.op("aten::add", StepPhase.FORWARD, 0.0, reads=(x, w), writes=(y,), inner_bytes=1024)
    b.set_duration(op, 20.0)
    b.released(x)
    b.dies(y)
    b.sendable(x, b.use(x))
    b.op("aten::mm", StepPhase.BACKWARD, 30.0, reads=(x,), writes=())
    b.dies(x)
    return b.finish(0xF1)


def test_records_are_what_the_builder_was_told() -> None:
    trace = small()
    assert ops_of(trace) == [
        OpRecord(tick=tick, name=name, phase=phase, duration_us=us, reads=reads, writes=writes, inner_bytes=inner)
        for tick, name, phase, us, reads, writes, inner in (
            (0, "aten::mm", StepPhase.FORWARD, 10.0, (0,), (1,), 0),
            (2, "aten::add", StepPhase.FORWARD, 20.0, (1, 0), (2,), 1024),
            (4, "aten::mm", StepPhase.BACKWARD, 30.0, (1,), (), 0),
        )
    ]
    assert tensors_of(trace) == [
        TensorRecord(nbytes=100, kind=TensorKind.PARAMETER, born=-1, released=NEVER, sendable=NEVER, dies=5),
        TensorRecord(nbytes=1000, kind=TensorKind.ACTIVATION, born=0, released=2, sendable=1, dies=4),
        TensorRecord(nbytes=2000, kind=TensorKind.TEMPORARY, born=2, released=NEVER, sendable=NEVER, dies=2),
    ]
    assert hooks_of(trace) == [
        HookRecord(tick=1, use=False, tensor=1),
        HookRecord(tick=3, use=True, tensor=1),
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


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("op_us", np.array([1.0, np.nan, 1.0]), "finite times of 0 us or more, got nan for operator 1"),
        ("op_us", np.array([-1.0, 1.0, 1.0]), "got -1.0 for operator 0"),
    ],
)
def test_times_that_no_operator_takes_are_refused(column: str, values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(small(), **{column: values})


# --- a first step as those after it will be: what it made and kept is there when the next one begins


STATE = {TensorKind.OPTIMIZER}


def first_step(*, made: bool = True) -> Trace:
    """A gradient and two moments are made and kept, a temporary is not; a parameter and a moment were there.

    `made` False: as in later steps, where nothing makes the moments, which are there from the beginning.
    """
    b = TraceBuilder(start_bytes=8192 + (0 if made else 4096 + 512))
    parameter, old = b.tensor(4000, TensorKind.PARAMETER, born=-1), b.tensor(100, TensorKind.OPTIMIZER, born=-1)
    t = b.tensor(3000)
    b.op("aten::mm", StepPhase.FORWARD, 1.0, reads=(parameter,), writes=(t,))
    gradient = b.tensor(4000, TensorKind.GRADIENT)
    b.op("aten::mm", StepPhase.BACKWARD, 1.0, reads=(t,), writes=(gradient,))
    b.dies(t)
    moments = [b.tensor(nbytes, TensorKind.OPTIMIZER, born=None if made else -1) for nbytes in (4000, 1)]
    if made:
        b.op("aten::add_", StepPhase.OPTIMIZER, 1.0, reads=(old, gradient), writes=moments, inner_bytes=2048)
    short = b.tensor(700, TensorKind.OPTIMIZER)
    b.op("aten::sqrt", StepPhase.OPTIMIZER, 1.0, writes=(short,), inner_bytes=512)
    b.dies(short)
    b.op("aten::add_", StepPhase.OPTIMIZER, 1.0, writes=(parameter,))
    return b.finish(1)


def test_what_is_kept_counts_as_the_allocator_does() -> None:
    assert outliving_bytes(first_step(), STATE) == 4096 + 512
    assert outliving_bytes(first_step(), {TensorKind.GRADIENT}) == 4096
    assert outliving_bytes(first_step(), {*STATE, TensorKind.GRADIENT}) == 8192 + 512
    assert outliving_bytes(first_step(), {TensorKind.TEMPORARY}) == 0


def test_state_is_there_from_the_beginning() -> None:
    trace = first_step()
    again = there_before(trace, STATE)
    before, after = memory_curve(trace), memory_curve(again)
    assert after[0] - before[0] == outliving_bytes(trace, STATE)
    assert after[-1] == before[-1]
    assert (after >= before - trace.op_inner_bytes).all()
    assert again.op_inner_bytes.tolist() == [0, 0, 0, 512, 0]  # operators that made moments and nothing else will not run again
    assert again.fingerprint == trace.fingerprint
    assert [t.born for t in tensors_of(again)] == [
        -1 if t.kind is TensorKind.OPTIMIZER and t.dies > 4 else t.born for t in tensors_of(trace)
    ]


def test_what_only_made_state_is_not_in_later_steps() -> None:
    later, made = first_step(made=False), without_making(first_step(), STATE)
    assert ops_of(made) == ops_of(later)
    for name in COLUMNS.keys() - {"op_name"}:
        assert list(getattr(made, name)) == list(getattr(later, name)), name
    assert (made.start_bytes, made.num_ticks) == (later.start_bytes, later.num_ticks)
    assert without_making(made, STATE) is made


def test_what_a_dropped_operator_used_last_dies_before_it() -> None:
    b = TraceBuilder(start_bytes=0)
    t = b.tensor(1000, TensorKind.ACTIVATION)
    b.op("aten::mm", StepPhase.FORWARD, 1.0, writes=(t,))
    b.save(t)
    moment = b.tensor(1000, TensorKind.OPTIMIZER)
    b.op("aten::zeros_like", StepPhase.OPTIMIZER, 1.0, reads=(t,), writes=(moment,))
    b.dies(t)
    b.op("aten::add_", StepPhase.OPTIMIZER, 1.0, writes=(moment,))
    made = without_making(b.finish(1), STATE)
    assert [op.name for op in ops_of(made)] == ["aten::mm", "aten::add_"]
    assert [op.tick for op in ops_of(made)] == [0, 2]
    assert [(tensor.born, tensor.dies) for tensor in tensors_of(made)] == [(0, 1), (-1, 3)]
    assert [hook.tick for hook in hooks_of(made)] == [1]


def test_once_it_is_there_nothing_changes_any_more() -> None:
    again = there_before(first_step(), STATE)
    assert there_before(again, STATE) is again
    assert outliving_bytes(again, STATE) == 0


@pytest.mark.parametrize("nbytes", [0, 1, 10_000])
def test_something_else_is_there_all_the_time(nbytes: int) -> None:
    trace = first_step()
    assert (memory_curve(with_extra(trace, nbytes)) == memory_curve(trace) + np.int64(nbytes)).all()


def test_spikes_are_there_for_one_tick_each() -> None:
    trace = first_step()
    more = memory_curve(trace)
    more[[1, 4]] += [1024, 512]
    spiked = with_spikes(trace, {4: 100, 1: 1000})
    assert memory_curve(spiked).tolist() == more.tolist()
    assert spiked.tensor_bytes[: len(trace.tensor_bytes)].tolist() == trace.tensor_bytes.tolist()


def test_other_times_change_nothing_else() -> None:
    trace = first_step()
    slower = with_times(trace, 2.5)
    assert slower.op_us.tolist() == [2.5 * us for us in trace.op_us.tolist()]
    for column in set(COLUMNS) - {"op_us"}:
        assert np.array_equal(getattr(slower, column), getattr(trace, column)), column
