"""A first step as those after it will be: what it made and kept is there when the next one begins."""

from __future__ import annotations

import numpy as np
import pytest

from chameleon_mm.policy import memory_curve
from chameleon_mm.trace import StepPhase, TensorKind, Trace, TraceBuilder
from chameleon_mm.trace.recurring import outliving_bytes, there_before, with_extra, with_spikes, with_times, without_making
from chameleon_mm.trace.trace import COLUMNS
from tests._trace_records import hooks_of, ops_of, tensors_of

STATE = {TensorKind.OPTIMIZER}


def first_step() -> Trace:
    """A gradient and two moments are made and kept, a temporary is not; a parameter and a moment were there."""
    b = TraceBuilder(device="simulated h200", simulated=True, start_bytes=8192)
    parameter, old = b.tensor(4000, TensorKind.PARAMETER, born=-1), b.tensor(100, TensorKind.OPTIMIZER, born=-1)
    t = b.tensor(3000)
    b.op("aten::mm", 1, StepPhase.FORWARD, 1.0, reads=(parameter,), writes=(t,))
    gradient = b.tensor(4000, TensorKind.GRADIENT)
    b.op("aten::mm", 2, StepPhase.BACKWARD, 1.0, reads=(t,), writes=(gradient,))
    b.dies(t)
    moments = [b.tensor(nbytes, TensorKind.OPTIMIZER) for nbytes in (4000, 1)]
    b.op("aten::add_", 3, StepPhase.OPTIMIZER, 1.0, reads=(old, gradient), writes=moments, inner_bytes=2048)
    short = b.tensor(700, TensorKind.OPTIMIZER)
    b.op("aten::sqrt", 4, StepPhase.OPTIMIZER, 1.0, writes=(short,), inner_bytes=512)
    b.dies(short)
    b.op("aten::add_", 5, StepPhase.OPTIMIZER, 1.0, writes=(parameter,))
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
    assert again.op_inner_bytes.tolist() == [0, 0, 0, 512, 0]  # what made moments and nothing else will not run again
    assert again.fingerprint == trace.fingerprint
    assert [t.born for t in tensors_of(again)] == [
        -1 if t.kind is TensorKind.OPTIMIZER and t.dies > 4 else t.born for t in tensors_of(trace)
    ]


def test_what_only_made_state_is_not_in_later_steps() -> None:
    b = TraceBuilder(device="simulated h200", simulated=True, start_bytes=8192 + 4096 + 512)
    parameter, _ = b.tensor(4000, TensorKind.PARAMETER, born=-1), b.tensor(100, TensorKind.OPTIMIZER, born=-1)
    t = b.tensor(3000)
    b.op("aten::mm", 1, StepPhase.FORWARD, 1.0, reads=(parameter,), writes=(t,))
    gradient = b.tensor(4000, TensorKind.GRADIENT)
    b.op("aten::mm", 2, StepPhase.BACKWARD, 1.0, reads=(t,), writes=(gradient,))
    b.dies(t)
    for nbytes in (4000, 1):
        b.tensor(nbytes, TensorKind.OPTIMIZER, born=-1)
    short = b.tensor(700, TensorKind.OPTIMIZER)
    b.op("aten::sqrt", 4, StepPhase.OPTIMIZER, 1.0, writes=(short,), inner_bytes=512)
    b.dies(short)
    b.op("aten::add_", 5, StepPhase.OPTIMIZER, 1.0, writes=(parameter,))
    later, made = b.finish(1), without_making(first_step(), STATE)
    assert ops_of(made) == ops_of(later)
    for name in COLUMNS.keys() - {"op_name"}:
        assert list(getattr(made, name)) == list(getattr(later, name)), name
    assert (made.start_bytes, made.num_ticks) == (later.start_bytes, later.num_ticks)
    assert without_making(made, STATE) is made


def test_what_a_dropped_operator_used_last_dies_before_it() -> None:
    b = TraceBuilder(device="simulated h200", simulated=True, start_bytes=0)
    t = b.tensor(1000, TensorKind.ACTIVATION)
    b.op("aten::mm", 1, StepPhase.FORWARD, 1.0, writes=(t,))
    b.save(t, 7)
    moment = b.tensor(1000, TensorKind.OPTIMIZER)
    b.op("aten::zeros_like", 2, StepPhase.OPTIMIZER, 1.0, reads=(t,), writes=(moment,))
    b.dies(t)
    b.op("aten::add_", 3, StepPhase.OPTIMIZER, 1.0, writes=(moment,))
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
    with pytest.raises(ValueError, match="trace: expected tensor_born from -1 to"):
        with_spikes(trace, {trace.num_ticks + 5: 1})


def test_other_times_change_nothing_else() -> None:
    trace = first_step()
    slower = with_times(trace, 2.5)
    assert slower.op_us.tolist() == [2.5 * us for us in trace.op_us.tolist()]
    for column in set(COLUMNS) - {"op_us"}:
        assert np.array_equal(getattr(slower, column), getattr(trace, column)), column
