"""A step's memory, nothing swapped: the curve, its peak by kind, and what swapping can reach at the least."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chameleon_mm.plan.trace import NEVER, StepPhase, TensorKind, Trace, TraceBuilder
from chameleon_mm.plan.unswapped_memory import Candidates, least_memory, memory_curve, peak_memory, smallest_budget
from chameleon_mm.units import KIB, round_up
from tests._trace_records import hooks_of, ops_of, tensors_of
from tests._traces import chain, random_step

FORWARD, BACKWARD = StepPhase.FORWARD, StepPhase.BACKWARD


def small() -> Trace:
    """Ticks: 0 op, 1 save x, 2 op, 3 save, 4 op, 5 use x, 6 op. Before the step: 10 KiB, of which it touches 3.

    A parameter of 2000 bytes (2 KiB) stays, an input of 1 KiB goes after tick 2. x has 4 KiB and is there in ticks 0 to 6; a
    temporary of 100 bytes (512) in tick 2, one of 3 KiB in tick 4.
    """
    b = TraceBuilder(device="simulated h200", simulated=True, start_bytes=10 * KIB)
    w = b.tensor(2000, TensorKind.PARAMETER, born=-1)
    i = b.tensor(KIB, TensorKind.INPUT, born=-1)
    x = b.tensor(4 * KIB, TensorKind.ACTIVATION)
    b.op("aten::mm", 1, FORWARD, 1.0, reads=(w, i), writes=(x,))
    b.save(x, 1)
    t = b.tensor(100)
    b.op("aten::add", 2, FORWARD, 1.0, reads=(x, i), writes=(t,))
    b.dies(t)
    b.dies(i)
    b.released(x)
    b.sendable(x, b.save(-1, 2))
    u = b.tensor(3 * KIB)
    b.op("aten::mm", 3, BACKWARD, 1.0, reads=(w,), writes=(u,))
    b.dies(u)
    b.use(x, 3)
    b.op("aten::mm", 4, BACKWARD, 1.0, reads=(x,))
    b.dies(x)
    return b.finish()


def test_the_peak_by_kind() -> None:
    peak = peak_memory(small())
    assert (peak.tick, peak.nbytes, peak.untouched_bytes, peak.idle_bytes) == (4, 16 * KIB, 7 * KIB, 4 * KIB)
    assert peak.by_kind == {
        TensorKind.PARAMETER: 2 * KIB,
        TensorKind.ACTIVATION: 4 * KIB,
        TensorKind.TEMPORARY: 3 * KIB,
    }


def test_the_least_memory() -> None:
    # x is idle from hook 1 (tick 3) until its use (tick 5): 9 and 9 + 3 KiB in ticks 3 and 4. The most is in tick 2 then.
    least = least_memory(small())
    assert (least.tick, least.nbytes, least.idle_bytes) == (2, 14 * KIB + 512, 0)
    assert least.by_kind[TensorKind.ACTIVATION] == 4 * KIB
    assert smallest_budget(small()) == 14 * KIB + 512


def test_a_peak_that_is_not_in_activations() -> None:
    b = TraceBuilder(device="d", simulated=True, start_bytes=0)
    x = b.tensor(KIB, TensorKind.ACTIVATION)
    b.op("aten::mm", 1, FORWARD, 1.0, writes=(x,))
    b.save(x, 1)
    b.released(x)
    b.sendable(x, b.save(-1, 1))
    b.use(x, 1)
    b.dies(x)
    big = b.tensor(100 * KIB)
    b.op("aten::_foreach_add_", 2, StepPhase.OPTIMIZER, 1.0, writes=(big,))
    b.dies(big)
    trace = b.finish()
    assert len(Candidates.of(trace)) == 1
    assert peak_memory(trace).idle_bytes == 0
    assert smallest_budget(trace) == peak_memory(trace).nbytes == 100 * KIB


def test_an_idle_input_counts_with_the_inputs() -> None:
    b = TraceBuilder(device="d", simulated=True, start_bytes=2 * KIB)
    x = b.tensor(2 * KIB, TensorKind.INPUT, born=-1)
    b.save(x, 1)
    b.released(x)
    b.sendable(x, b.save(-1, 1))
    t = b.tensor(4 * KIB)
    b.op("aten::mm", 1, FORWARD, 1.0, writes=(t,))
    b.dies(t)
    b.use(x, 1)
    b.dies(x)
    trace = b.finish()
    assert peak_memory(trace).by_kind == {TensorKind.INPUT: 2 * KIB, TensorKind.TEMPORARY: 4 * KIB}
    assert least_memory(trace).by_kind == {TensorKind.TEMPORARY: 4 * KIB}


def test_a_step_in_which_nothing_happens() -> None:
    b = TraceBuilder(device="d", simulated=True, start_bytes=3 * KIB)
    b.tensor(KIB, TensorKind.PARAMETER, born=-1)
    trace = b.finish()
    peak = peak_memory(trace)
    assert (peak.tick, peak.nbytes, peak.untouched_bytes, peak.by_kind) == (-1, 3 * KIB, 2 * KIB, {TensorKind.PARAMETER: KIB})
    assert smallest_budget(trace) == 3 * KIB
    assert len(memory_curve(trace)) == 0


def test_storages_that_the_allocator_did_not_count_at_the_start_are_counted() -> None:
    b = TraceBuilder(device="d", simulated=True, start_bytes=0)
    b.tensor(KIB, TensorKind.PARAMETER, born=-1)
    b.op("aten::mm", 1, FORWARD, 1.0)
    assert memory_curve(b.finish()).tolist() == [KIB]


@given(st.randoms(use_true_random=False))
def test_the_curve_is_the_sum_of_what_is_there(random: Random) -> None:
    trace = random_step(random)
    before = sum(round_up(t.nbytes, 512) for t in tensors_of(trace) if t.born < 0)
    expected = [
        trace.start_bytes
        - before
        + sum(round_up(t.nbytes, 512) for t in tensors_of(trace) if t.born <= tick <= t.dies)
        + sum(op.inner_bytes for op in ops_of(trace) if op.tick == tick)
        for tick in range(trace.num_ticks)
    ]
    assert memory_curve(trace).tolist() == expected
    peak = peak_memory(trace)
    assert peak.nbytes == max(expected, default=trace.start_bytes)
    assert sum(peak.by_kind.values()) + peak.inner_bytes + peak.untouched_bytes == peak.nbytes
    least = least_memory(trace)
    assert sum(least.by_kind.values()) + least.inner_bytes + least.untouched_bytes == least.nbytes <= peak.nbytes
    assert min(least.by_kind.values(), default=1) > 0


@given(st.randoms(use_true_random=False))
def test_candidates_are_the_saved_storages_with_an_idle_window(random: Random) -> None:
    trace = random_step(random)
    expected = []
    for number, tensor in enumerate(tensors_of(trace)):
        uses = [k for k, hook in enumerate(hooks_of(trace)) if hook.use and hook.tensor == number]
        if tensor.nbytes == 0 or NEVER in (tensor.released, tensor.sendable) or not uses:
            continue
        later = [k for k, hook in enumerate(hooks_of(trace)) if hook.tick > tensor.released and k >= tensor.sendable]
        if later and later[0] < uses[0]:
            expected.append((number, tensor.nbytes, round_up(tensor.nbytes, 512), tensor.sendable, later[0], uses[0]))
    c = Candidates.of(trace)
    columns = (c.tensor, c.nbytes, c.size, c.sendable, c.first, c.use)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected


def test_every_micro_batch_has_its_own_candidates() -> None:
    one, three = chain(layers=2), chain(layers=2, micro_batches=3)
    assert len(Candidates.of(three)) == 3 * len(Candidates.of(one))
    assert peak_memory(three).nbytes == peak_memory(one).nbytes
    assert np.array_equal(memory_curve(one)[:60], memory_curve(three)[:60])


@given(st.randoms(use_true_random=False))
def test_the_clock_has_every_tick(random: Random) -> None:
    trace = random_step(random)
    clock_us = trace.clock_us()
    assert len(clock_us) == trace.num_ticks + 1
    assert all(clock_us[op.tick + 1] - clock_us[op.tick] >= 0 for op in ops_of(trace))
