"""Traces rewritten for dropped and held storages: the recomputations, their times, their sources and their memory."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_mm.plan.recipes import Recipes
from chameleon_mm.plan.rewrite import RewrittenTrace, choice_actions
from chameleon_mm.plan.simulate import simulate
from chameleon_mm.plan.step_program import DROP, OUT, StepProgram
from chameleon_mm.plan.swap_plan import Action, ActionKind
from chameleon_mm.plan.trace import BirthPlace, StepPhase, TensorKind, Trace, TraceBuilder
from chameleon_mm.plan.unswapped_memory import Candidates, memory_curve
from chameleon_mm.units import KIB
from tests._hybrid_traces import (
    carried_out_recomputing,
    levels_after_reclaims,
    random_choice,
    random_hybrid_plan,
    random_hybrid_step,
)
from tests._trace_records import hooks_of, ops_of, tensors_of
from tests._traces import H200_LINK, plan_of

FORWARD, BACKWARD = StepPhase.FORWARD, StepPhase.BACKWARD


class Step:
    """Step of a few operators of 10 us: saves and uses hold nothing else, and dead storages die at once."""

    def __init__(self) -> None:
        self.b = TraceBuilder(start_bytes=0)
        self.w = self.b.tensor(4 * KIB, TensorKind.PARAMETER, born=-1)

    def op(self, name: str, *reads: int, kib: int = 4, writes: tuple[int, ...] | None = None, us: float = 10.0) -> int:
        """Add an operator with one result of `kib` KiB, unless it writes storages. Return its first written storage."""
        out = writes if writes is not None else (self.b.tensor(kib * KIB),)
        self.b.op(f"aten::{name}", FORWARD, us, reads=reads, writes=out)
        return out[0]

    def save(self, x: int) -> int:
        """Save `x`. At the next hook, for something else, it is sendable and has no other holder."""
        self.b.kind(x, TensorKind.ACTIVATION)
        self.b.save(x)
        self.b.released(x)
        self.b.sendable(x, self.b.save(-1))
        return x

    def use(self, x: int, *, dies: bool = True) -> int:
        """Use `x` in an operator of backward. Returns the hook's number."""
        hook = self.b.use(x)
        self.b.op("aten::mul_backward", BACKWARD, 10.0, reads=(x,))
        if dies:
            self.b.dies(x)
        return hook

    def finish(self) -> Trace:
        return self.b.finish(1)


def recomputed(trace: Trace, dropped: list[int], held: list[int] | None = None) -> RewrittenTrace:
    recipes = Recipes.of(trace, None)
    assert recipes.can_drop[dropped].all()
    rewritten = RewrittenTrace.of(recipes, dropped, held or [])
    plan = plan_of(trace, choice_actions(recipes, rewritten))
    assert simulate(trace, plan, H200_LINK).allocated_bytes.tolist() == carried_out_recomputing(trace, plan)
    return rewritten


def ran(rewritten: RewrittenTrace) -> list[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Hook, operators, made storages and sources of each recomputation."""
    return [(r.hook, r.ops, r.made, r.sources) for r in rewritten.recomputations.by_hook]


def test_a_dropped_storage_is_recomputed_at_its_use() -> None:
    s = Step()
    x = s.save(s.op("mm", s.w))
    y = s.save(s.op("gelu", x, kib=8))
    hook = s.use(y)
    s.use(x)
    trace = s.finish()
    rewritten = recomputed(trace, [y])
    assert ran(rewritten) == [(hook, (1,), (y,), (x,))]
    assert rewritten.recompute_us == 10.0
    # x is read before its use: a hook of its own follows that of y's use, and then the operator.
    new = rewritten.trace
    assert len(new.hook_tick) == len(trace.hook_tick) + 1
    early = int(rewritten.hook_of[hook]) + 1
    assert (hooks_of(new)[early].tensor, hooks_of(new)[early].use) == (x, True)
    again = next(op for op in ops_of(new) if op.tick == new.hook_tick[early] + 1)
    assert (again.name, again.phase, again.duration_us) == ("aten::gelu", BACKWARD, 10.0)
    assert Candidates.of(new).use.tolist() == [early]
    # Its first life ends before the first hook at which it is idle, its second begins with the operator.
    first = int(Recipes.of(trace, None).candidates.first[1])
    assert tensors_of(new)[y].dies == new.hook_tick[rewritten.hook_of[first]] - 1
    second = tensors_of(new)[len(trace.tensor_bytes)]
    assert (second.nbytes, second.born, second.dies) == (8 * KIB, again.tick, again.tick + 1)
    curve = rewritten.by_tick(memory_curve(new))
    assert curve[trace.hook_tick[first]] == 4 * KIB + 4 * KIB
    assert curve[trace.hook_tick[hook]] == 4 * KIB + 4 * KIB + 8 * KIB


def test_a_nested_recomputation_stays_until_its_own_use() -> None:
    s = Step()
    x = s.save(s.op("mm", s.w))
    y = s.save(s.op("gelu", x))
    z = s.save(s.op("silu", y))
    at_z, _, at_x = s.use(z), s.use(y), s.use(x)
    rewritten = recomputed(s.finish(), [y, z])
    assert ran(rewritten) == [(at_z, (1, 2), (y, z), (x,))]
    assert rewritten.recompute_us == 20.0
    everything = recomputed(s.b.finish(1), [x, y, z])
    assert ran(everything) == [(at_z, (0, 1, 2), (x, y, z), ())]
    assert (
        tensors_of(everything.trace)[len(s.b.finish(1).tensor_bytes)].dies
        > everything.trace.hook_tick[everything.hook_of[at_x]]
    )


def test_results_of_one_operator_are_made_together() -> None:
    s = Step()
    x = s.save(s.op("mm", s.w))
    y, mask = s.b.tensor(8 * KIB), s.b.tensor(2 * KIB)
    s.op("native_dropout", x, writes=(y, mask))
    for z in (y, mask):
        s.save(z)
    at_mask = s.use(mask)
    at_y = s.use(y)
    s.use(x)
    trace = s.finish()
    assert ran(recomputed(trace, [y, mask])) == [(at_mask, (1,), (y, mask), (x,))]
    # Only `y`: the second copy of `mask` dies with the operator.
    alone = recomputed(trace, [y])
    assert ran(alone) == [(at_y, (1,), (y,), (x,))]
    copies = [t.nbytes for t in tensors_of(alone.trace)[len(trace.tensor_bytes) :]]
    assert copies == [8 * KIB, 2 * KIB]
    assert (
        tensors_of(alone.trace)[len(trace.tensor_bytes) + 1].dies == tensors_of(alone.trace)[len(trace.tensor_bytes) + 1].born
    )


@pytest.mark.parametrize("when", ["before", "after the use"])
def test_what_is_written_before_the_recomputation_is_no_input(when: str) -> None:
    s = Step()
    x = s.op("mm", s.w)
    y = s.save(s.op("gelu", x, s.w))
    s.b.dies(x)
    if when == "before":
        s.op("add_", s.w, writes=(s.w,))
    s.use(y)
    s.b.op("aten::add_", StepPhase.OPTIMIZER, 1.0, reads=(s.w,), writes=(s.w,))
    assert bool(Recipes.of(s.finish(), None).can_drop[y]) is (when == "after the use")


def test_an_input_that_is_changed_after_it_was_read_is_none() -> None:
    s = Step()
    x = s.op("mm", s.w)
    y = s.save(s.op("gelu", x))
    s.op("add_", x, s.w, writes=(x,))
    z = s.save(s.op("silu", x))
    s.b.dies(x)
    s.use(z)
    s.use(y)
    recipes = Recipes.of(s.finish(), None)
    assert (bool(recipes.can_drop[y]), bool(recipes.can_drop[z])) == (False, True)
    assert recipes.makers[x] == (0, 2)


@pytest.mark.parametrize(
    ("name", "admitted"), [("gelu", True), ("native_batch_norm", True), ("_scaled_dot_product_flash_attention", False)]
)
def test_operators_have_to_be_admitted(name: str, *, admitted: bool) -> None:
    from chameleon_mm.replayable import DEFAULT

    s = Step()
    x = s.save(s.op("mm", s.w))
    y = s.save(s.op(f"{name}.default", x))
    s.use(y)
    s.use(x)
    recipes = Recipes.of(s.finish(), DEFAULT)
    assert bool(recipes.can_drop[y]) is admitted
    assert not recipes.can_drop[x]
    assert not Recipes.of(s.finish(), DEFAULT, [y]).can_drop.any()


@pytest.mark.parametrize("updates", [True, False])
def test_a_batch_norm_runs_again_unless_it_only_reads_running_statistics(*, updates: bool) -> None:
    from chameleon_mm.replayable import DEFAULT

    s = Step()
    statistics = s.b.tensor(KIB, TensorKind.BUFFER, born=-1)
    x = s.save(s.op("mm", s.w))
    y = s.b.tensor(4 * KIB)
    s.op("native_batch_norm.default", x, statistics, writes=(y, statistics) if updates else (y,))
    s.save(y)
    s.use(y)
    s.use(x)
    assert bool(Recipes.of(s.finish(), DEFAULT).can_drop[y]) is updates


def test_an_operator_of_forward_that_also_writes_elsewhere_recomputes_nothing() -> None:
    s = Step()
    state = s.b.tensor(KIB, TensorKind.BUFFER, born=-1)
    x = s.b.tensor(4 * KIB)
    s.op("cat", s.w, state, writes=(x, state))
    s.save(x)
    s.use(x)
    assert not Recipes.of(s.finish(), None).can_drop.any()


def held_step() -> tuple[Trace, int, int, int, int]:
    """Step with x, unsaved, and y, made of x and twice its size. x is released after a hook. Of two uses, the second is y's."""
    s = Step()
    x = s.op("attention", s.w, kib=16)
    y = s.save(s.op("_to_copy", x, kib=32))
    s.op("add", x)
    s.b.dies(x)
    s.save(s.op("mm", s.w))
    last = s.b.num_hooks - 2
    first_use = s.use(int(s.b._columns["hook_tensor"][last]))
    hook = s.use(y)
    return s.finish(), x, y, hook, first_use


def test_a_held_storage_lives_until_the_recomputation_and_may_be_swapped() -> None:
    trace, x, y, hook, first_use = held_step()
    recipes = Recipes.of(trace, ["aten::_to_copy"])
    assert bool(recipes.can_drop[y]) and bool(recipes.can_hold[x]) and not recipes.can_recompute[x]
    with pytest.raises(ValueError, match="is none of it; hold it"):
        RewrittenTrace.of(recipes, [y], [])
    rewritten = recomputed(trace, [y], [x])
    assert ran(rewritten) == [(hook, (1,), (y,), (x,))]
    actions = choice_actions(recipes, rewritten)
    assert [(a.kind, a.tensor, a.nbytes) for a in actions] == [
        (ActionKind.RECOMPUTE, y, 32 * KIB),
        (ActionKind.HOLD, x, 16 * KIB),
    ]
    assert (actions[1].out_at, actions[1].reclaim_at, actions[1].in_at, actions[1].use_at) == (0, 0, hook, hook)
    assert (actions[0].out_at, actions[0].use_at) == (2, hook)  # once only the session has x
    # Only the session holds x from hook 2 on: it may be copied and swapped from there to the recomputation.
    candidates = Candidates.of(rewritten.trace)
    row = candidates.tensor.tolist().index(x)
    assert rewritten.origin[[candidates.sendable[row], candidates.first[row], candidates.use[row]]].tolist() == [2, 2, hook]
    swap = Action(tensor=x, nbytes=16 * KIB, out_at=2, reclaim_at=2, in_at=first_use, use_at=hook)
    plan = plan_of(trace, (swap, *actions))
    timeline = simulate(trace, plan, H200_LINK)
    assert timeline.allocated_bytes.tolist() == carried_out_recomputing(trace, plan)
    assert timeline.allocated_bytes[trace.hook_tick[2] + 1] == 12 * KIB  # w, the sum and the last saved storage
    assert (plan.swaps, plan.recomputed, plan.held) == ((swap,), actions[:1], actions[1:])
    assert plan.moved_bytes == 16 * KIB


def test_a_held_storage_is_known_by_its_last_write_even_if_nobody_can_recompute_it() -> None:
    """The operator that made `x` reads a storage that is written later, so that `x` has to be held."""
    b = TraceBuilder(start_bytes=0)
    b.save(-1)
    changed = b.tensor(512)
    b.op("aten::mul.Tensor", StepPhase.FORWARD, 1.0, writes=(changed,))
    x = b.tensor(512)
    b.op("aten::mul.Tensor", StepPhase.FORWARD, 1.0, reads=(changed,), writes=(x,))
    b.op("aten::add_.Tensor", StepPhase.FORWARD, 1.0, reads=(changed,), writes=(changed,))
    y = b.tensor(4096, TensorKind.ACTIVATION)
    b.op("aten::gelu", StepPhase.FORWARD, 1.0, reads=(x,), writes=(y,))
    b.save(y)
    b.released(y)
    b.save(-1)
    b.sendable(y, 2)
    b.dies(x)
    b.save(-1)
    b.use(y)
    b.op("aten::gelu_backward", StepPhase.BACKWARD, 1.0, reads=(y,))
    b.dies(y)
    trace = b.finish()
    recipes = Recipes.of(trace, None)
    assert recipes.makers[x] == ()
    rewritten = RewrittenTrace.of(recipes, [y], [x])
    program = StepProgram.of(trace, plan_of(trace, choice_actions(recipes, rewritten)))
    assert program.held == {BirthPlace(hooks=1, operator="aten::mul.Tensor", same_name=2, position=0): x}


def test_what_is_not_held_is_recomputed_though_it_is_there() -> None:
    s = Step()
    x = s.op("mul", s.w)
    y = s.save(s.op("gelu", x))
    s.b.dies(x)
    s.b.save(-1)
    hook = s.use(y)
    trace = s.finish()
    assert ran(recomputed(trace, [y])) == [(hook, (0, 1), (y,), ())]
    assert ran(recomputed(trace, [y], [x])) == [(hook, (1,), (y,), (x,))]


def test_what_is_held_must_be_the_sessions_alone_before_anything_is_dropped_for_it() -> None:
    """Note [Relied on], rule 1: while the model holds x, it may write to it. Autograd's own hold is another matter."""
    s = Step()
    x = s.op("mul", s.w)
    y = s.save(s.op("gelu", x))
    s.b.save(-1)
    s.b.dies(x)
    alone = s.b.save(-1)
    hook = s.use(y)
    trace = s.finish()
    recipes = Recipes.of(trace, None)
    assert recipes.alone_hook[x] == alone
    drop, _ = choice_actions(recipes, recomputed(trace, [y], [x]))
    assert (drop.out_at, drop.use_at) == (alone, hook)
    assert recomputed(trace, [y], [x]).recomputations.first == {y: alone}

    s = Step()
    x = s.op("mul", s.w)
    y = s.save(s.op("gelu", x))
    s.use(y)
    s.b.dies(x)  # the model has it until then
    trace = s.finish()
    assert ran(recomputed(trace, [y], [x])) == []

    s = Step()
    x = s.op("mul", s.w)
    y = s.save(s.op("gelu", x))
    hook = s.use(y)
    s.b.op(
        "aten::mul_backward", BACKWARD, 10.0, reads=(x,)
    )  # no hook saved it, and backward reads it: it was too small to move
    s.b.dies(x)
    trace = s.finish()
    assert Recipes.of(trace, None).is_kept[x]
    assert ran(recomputed(trace, [y], [x])) == [(hook, (1,), (y,), (x,))]


def test_a_large_input_that_others_may_write_is_no_source() -> None:
    """A parameter or a buffer of more than 64 KiB that autograd does not save: an operator that reads it is not recomputed."""
    for nbytes, in_backward, expected in ((64 * KIB, False, True), (65 * KIB, False, False), (65 * KIB, True, True)):
        s = Step()
        book = s.b.tensor(nbytes, TensorKind.BUFFER, born=-1)
        y = s.save(s.op("mul", s.w, book))
        s.use(y)
        if in_backward:
            s.b.op("aten::mul_backward", BACKWARD, 10.0, reads=(book,))
        assert bool(Recipes.of(s.finish(), None).can_drop[y]) is expected


def test_what_was_used_before_the_recomputation_that_reads_it_lives_on() -> None:
    s = Step()
    x = s.save(s.op("mm", s.w))
    y = s.save(s.op("gelu", x))
    at_x, at_y = s.use(x), s.use(y)
    trace = s.finish()
    for dropped in ([y], [x, y]):
        rewritten = recomputed(trace, dropped)
        assert ran(rewritten)[-1] == (at_y, (1,), (y,), (x,))
        level = rewritten.by_tick(memory_curve(rewritten.trace))
        assert level[trace.hook_tick[at_y]] == 12 * KIB > level[trace.hook_tick[at_y] - 1] == 8 * KIB
    assert ran(rewritten)[0] == (at_x, (0,), (x,), ())


def test_what_is_needed_before_it_could_be_dropped_is_not() -> None:
    """Its only recomputation would be at the hook after which nothing else holds it."""
    s = Step()
    x = s.op("mm", s.w)
    s.b.save(x)
    y = s.save(s.op("gelu", x))
    s.b.sendable(x, 1)
    hook = s.use(y)
    s.b.released(x)
    s.b.save(-1)
    s.use(x)
    recipes = Recipes.of(s.finish(), None)
    rewritten = RewrittenTrace.of(recipes, [x, y], [])
    assert rewritten.recomputations.dropped == (y,)
    assert ran(rewritten) == [(hook, (1,), (y,), (x,))]


@given(st.randoms(use_true_random=False))
def test_memory_is_that_of_a_walk_without_rewritten_traces(random: Random) -> None:
    trace = random_hybrid_step(random)
    plan = random_hybrid_plan(random, trace, Recipes.of(trace, None))
    timeline = simulate(trace, plan, H200_LINK)
    assert timeline.allocated_bytes.tolist() == carried_out_recomputing(trace, plan)
    assert timeline.peak_bytes == max(timeline.allocated_bytes.tolist(), default=0)
    waits = timeline.stall_us + timeline.head_copy_us + timeline.recompute_us
    assert timeline.step_us == pytest.approx(trace.duration_us + waits)
    assert timeline.tick_us.shape == (trace.num_ticks,)
    assert (np.diff(timeline.tick_us) >= 0).all()


@given(st.randoms(use_true_random=False))
def test_growth_covers_what_recomputations_take(random: Random) -> None:
    """From the end of any hook's reclaims memory never grows by more than is said until the next check."""
    trace = random_hybrid_step(random)
    plan = random_hybrid_plan(random, trace, Recipes.of(trace, None))
    program = StepProgram.of(trace, plan)
    rows = program.rows[:-1]
    allocated = carried_out_recomputing(trace, plan)
    assert program.allocated_bytes.tolist() == allocated
    assert len(rows) == len(trace.hook_tick)
    ticks, checks = trace.hook_tick.tolist(), {0, *np.flatnonzero(trace.hook_tensor >= 0).tolist()}
    checks |= {action.reclaim_at for action in plan.swaps + plan.recomputed}
    levels = levels_after_reclaims(trace, plan)
    for hook in sorted(checks) if ticks else ():
        until = min((ticks[k] for k in checks if k > hook), default=trace.num_ticks)
        most = levels[hook] + rows[hook].growth
        assert max(allocated[ticks[hook] : until]) <= most <= max(allocated[ticks[hook] : until + 1])
    freed = [(hook, op, number) for hook, row in enumerate(rows) for op, number, _ in row.ops if op != OUT]
    assert sorted(number for _, op, number in freed if op != DROP) == sorted(action.tensor for action in plan.swaps)
    assert sorted((hook, number) for hook, op, number in freed if op == DROP) == sorted(
        (action.reclaim_at, action.tensor) for action in plan.recomputed
    )
    assert all(row.is_checked for row in rows if any(op != OUT for op, _, _ in row.ops))


@given(st.randoms(use_true_random=False))
def test_hooks_keep_their_order(random: Random) -> None:
    trace = random_hybrid_step(random)
    recipes = Recipes.of(trace, None)
    rewritten = RewrittenTrace.of(recipes, *random_choice(random, recipes))
    assert (np.diff(rewritten.origin) >= 0).all()
    assert rewritten.origin[rewritten.hook_of].tolist() == list(range(len(trace.hook_tick)))
    new = rewritten.trace
    assert new.hook_tick[rewritten.hook_of].tolist() == rewritten.tick_of[trace.hook_tick].tolist()
    assert new.hook_tensor[rewritten.hook_of].tolist() == trace.hook_tensor.tolist()
    assert new.duration_us == pytest.approx(trace.duration_us + rewritten.recompute_us)
    original = [op.name for op in ops_of(new) if op.tick in set(rewritten.tick_of.tolist())]
    assert original == [op.name for op in ops_of(trace)]
