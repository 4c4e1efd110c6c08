"""Memory of a step without swapping: the curve, its peak by kind, and the least that swapping can reach."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from chameleon_mm.plan.trace import NEVER, StepPhase, TensorKind, TraceBuilder
from chameleon_mm.plan.unswapped_memory import Candidates, least_memory, memory_curve, peak_memory, smallest_budget
from chameleon_mm.units import KIB, round_up
from tests._trace_records import hooks_of, ops_of, tensors_of
from tests._traces import random_step

FORWARD, BACKWARD = StepPhase.FORWARD, StepPhase.BACKWARD


def test_an_idle_input_counts_with_the_inputs() -> None:
    b = TraceBuilder(start_bytes=2 * KIB)
    x = b.tensor(2 * KIB, TensorKind.INPUT, born=-1)
    b.save(x)
    b.released(x)
    b.sendable(x, b.save(-1))
    t = b.tensor(4 * KIB)
    b.op("aten::mm", FORWARD, 1.0, writes=(t,))
    b.dies(t)
    b.use(x)
    b.dies(x)
    trace = b.finish()
    assert peak_memory(trace).by_kind == {TensorKind.INPUT: 2 * KIB, TensorKind.TEMPORARY: 4 * KIB}
    assert least_memory(trace).by_kind == {TensorKind.TEMPORARY: 4 * KIB}


def test_a_step_in_which_nothing_happens() -> None:
    b = TraceBuilder(start_bytes=3 * KIB)
    b.tensor(KIB, TensorKind.PARAMETER, born=-1)
    trace = b.finish()
    peak = peak_memory(trace)
    assert (peak.tick, peak.nbytes, peak.untouched_bytes, peak.by_kind) == (-1, 3 * KIB, 2 * KIB, {TensorKind.PARAMETER: KIB})
    assert smallest_budget(trace) == 3 * KIB
    assert len(memory_curve(trace)) == 0


def test_storages_that_the_allocator_did_not_count_at_the_start_are_counted() -> None:
    b = TraceBuilder(start_bytes=0)
    b.tensor(KIB, TensorKind.PARAMETER, born=-1)
    b.op("aten::mm", FORWARD, 1.0)
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
    c = Candidates.of(trace)
    rows = zip(c.tensor.tolist(), c.size.tolist(), c.first.tolist(), c.use.tolist(), strict=True)
    windows = [(number, size, trace.hook_tick[first], trace.hook_tick[use]) for number, size, first, use in rows]
    idle = [{j: size for j, size, begins, ends in windows if begins <= tick < ends} for tick in range(trace.num_ticks)]
    lowest = [nbytes - sum(away.values()) for nbytes, away in zip(expected, idle, strict=True)]
    for peak, levels, moved in ((peak_memory(trace), expected, False), (least_memory(trace), lowest, True)):
        assert peak.nbytes == max(levels, default=trace.start_bytes)
        assert sum(peak.by_kind.values()) + peak.inner_bytes + peak.untouched_bytes == peak.nbytes
        assert peak.untouched_bytes == trace.start_bytes - before
        if levels:
            away = idle[peak.tick]
            by_kind = Counter[TensorKind]()
            for number, t in enumerate(tensors_of(trace)):
                if t.born <= peak.tick <= t.dies and not (moved and number in away):
                    by_kind[t.kind] += round_up(t.nbytes, 512)
            assert peak.by_kind == +by_kind
            assert peak.idle_bytes == (0 if moved else sum(away.values()))
    assert smallest_budget(trace) == least_memory(trace).nbytes


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
