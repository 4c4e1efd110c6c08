"""Light profiler: the steps that it distinguishes, those that it must not, and the beginnings of phases."""

from __future__ import annotations

import gc
import threading
import weakref
from array import array
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from chameleon_mm.plan.trace import FIXED_STORAGE, NEW_STORAGE, StepPhase
from chameleon_mm.record.light_profiler import (
    EARLIER_STEP,
    NOT_A_USE,
    Boundary,
    LightProfiler,
    StepRecord,
    feature_hash,
)

FORWARD, BACKWARD = StepPhase.FORWARD, StepPhase.BACKWARD


class Watch:
    """Light profiler in autograd's hooks, as an executor calls it: with the number of a storage's earlier save."""

    def __init__(self) -> None:
        self.light = LightProfiler()
        self.expected: list[bool] = []
        """Per hook of the last step: True if the followed step had the same hook."""
        self._saves: list[tuple[Tensor, int]] = []

    def save(self, t: Tensor) -> tuple[Tensor, int]:
        hook = self.light.num_hooks
        self.expected.append(self.light.saved(t, FIXED_STORAGE if isinstance(t, nn.Parameter) else self._since(t)))
        self._saves.append((t, hook))
        return t, hook

    def use(self, saved: tuple[Tensor, int]) -> Tensor:
        self.expected.append(self.light.used(saved[1]))
        return saved[0]

    def step(self, run: Callable[[], object], known: StepRecord | None = None) -> StepRecord:
        self._saves.clear()
        self.expected.clear()
        self.light.begin_step()
        if known is not None:
            self.light.follow(known)
        with saved_tensors_hooks(self.save, self.use):
            run()
        return self.light.end_step()

    def _since(self, t: Tensor) -> int:
        same = (hook for other, hook in reversed(self._saves) if other.untyped_storage()._cdata == t.untyped_storage()._cdata)
        return next((self.light.num_hooks - hook for hook in same), NEW_STORAGE)


def seen(run: Callable[[], object]) -> StepRecord:
    return Watch().step(run)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape or (4, 6), dtype=dtype, requires_grad=True)


def feature_of_save(light: LightProfiler, t: Tensor, since: int = NEW_STORAGE) -> Hashable:
    light.saved(t, since)
    return light.feature


def saves(record: StepRecord) -> list[Hashable]:
    return [f for f, save in zip(record.features, record.save_of, strict=True) if save == NOT_A_USE]


def facts(record: StepRecord) -> tuple[object, ...]:
    """All of a step's record."""
    return record.fingerprint, record.features, record.save_of.tolist(), record.boundaries


# --- the same step is the same


def micro_batches(record: StepRecord) -> int:
    """Number of forward passes that saved something."""
    return sum(boundary.phase is FORWARD for boundary in record.boundaries)


def test_a_step_that_is_repeated_has_the_same_record() -> None:
    watch, weight = Watch(), nn.Parameter(torch.ones(6, 6))

    def run() -> None:
        x = leaf()
        (x @ weight).tanh().exp().sum().backward()

    first, second = watch.step(run), watch.step(run)
    assert facts(first) == facts(second)
    assert (first.save_of.count(NOT_A_USE), first.num_hooks) == (4, 8)
    assert first.save_of.tolist() == [-1, -1, -1, -1, 3, 2, *first.save_of[6:]]
    assert set(first.save_of[6:]) == {0, 1}
    empty = seen(lambda: None)
    assert facts(empty) == facts(seen(lambda: None)) == (empty.fingerprint, (), [], ())


def test_what_ran_between_steps_and_in_other_threads_does_not_show() -> None:
    def run() -> None:
        x = leaf()
        outcome: list[Tensor] = []
        x.tanh().sum().backward()

        def aside() -> None:
            leaf().exp().exp().sum()  # on this thread there are no hooks
            with saved_tensors_hooks(watch.save, watch.use):
                outcome.append(x.tanh().exp())

        thread = threading.Thread(target=aside)
        thread.start()
        thread.join()
        outcome[0].sin().sum().backward()

    watch = Watch()
    first = watch.step(run)
    leaf().exp().exp().sum().backward()
    assert watch.step(run).features == first.features


def test_threads_in_turn_count_their_own_operators() -> None:
    """A thread's operators are counted from its own last save, not from another thread's."""
    light, turn = LightProfiler(), threading.Barrier(2)
    x = leaf()
    own: list[Hashable] = []

    def other() -> None:
        for _ in range(2):
            turn.wait()
            x.exp()  # one operator of this thread
            light.saved(x, NEW_STORAGE)
            turn.wait()

    thread = threading.Thread(target=other)
    thread.start()
    for _ in range(2):
        x.exp().exp()  # two of this one
        own.append(feature_of_save(light, x))
        turn.wait()
        turn.wait()
    thread.join()
    features = light.end_step().features
    assert own == [features[0], features[2]]
    assert features[0] == features[2]
    assert features[3] != features[2]  # one operator, not two
    assert len({features[1], features[3], features[0]}) == 3  # its first: nobody knows what that thread ran before


# --- different steps are not


def test_features_that_differ_have_unsigned_hashes_that_differ() -> None:
    features: list[Any] = []
    for order in ([3, 2], [3, 1], [1, 2], [1, 3]):  # of steps one back and two back: Python hashes -1 and -2 alike
        light = LightProfiler()
        features += [feature_of_save(light, leaf(n), since) for n in range(10) for since in (NEW_STORAGE, FIXED_STORAGE, 1)]
        for save in order:
            light.used(save)
        features.append(light.feature)
    assert len(set(features)) == 30 + 4
    hashes = {feature_hash(feature) for feature in features}
    assert len(hashes) == len(set(features))
    assert all(0 <= value < 2**64 for value in hashes)


def test_an_operator_that_saves_nothing_shows_and_one_storage_twice_is_not_two() -> None:
    plain = seen(lambda: leaf().exp().exp().exp().sum().backward())
    more = seen(lambda: (leaf().exp() + 1).exp().exp().sum().backward())
    assert plain.num_hooks == more.num_hooks
    assert [a == b for a, b in zip(saves(plain), saves(more), strict=True)] == [True, False, True]
    x, y = leaf(), leaf()
    twice, two = seen(lambda: (x * x).sum().backward()), seen(lambda: (x * y).sum().backward())
    assert twice.num_hooks == two.num_hooks
    assert [a == b for a, b in zip(saves(twice), saves(two), strict=True)] == [True, False]


def test_an_operator_more_changes_the_next_save_of_each_storage_that_is_saved_again() -> None:
    cos, sin = torch.ones(4, 6), torch.ones(4, 6)

    def run(more: bool) -> None:
        x = leaf()
        for i in range(5):
            x = x * cos * sin
            if more and i == 2:
                x = x.tanh()
        x.sum().backward()

    plain, edited = seen(lambda: run(False)), seen(lambda: run(True))
    looks = (Tensor, cos.shape, torch.float32)
    assert saves(plain)[1:] == [(*looks, 1, since) for since in (0, *[2] * 8)]
    # The tanh saves its output. In the hooks after it, cos and sin were saved one hook longer ago, once each.
    assert saves(edited)[:6] == saves(plain)[:6]
    assert saves(edited)[6:9] == [(*looks, 1, since) for since in (0, 3, 3)]
    assert saves(edited)[9:] == saves(plain)[8:]


# --- following a known step


def many_phases() -> None:
    """Two micro-batches, the second with a forward that backward runs again, a function of ours and one storage saved twice."""

    x = leaf()
    (x.tanh() * x.exp()).sum().backward()
    y = checkpoint(lambda t: t.sigmoid().exp(), x.cos(), use_reentrant=True)
    Doubled.of(y * y).sum().backward()


class Doubled(torch.autograd.Function):
    @classmethod
    def of(cls, x: Tensor) -> Tensor:
        out = cls.apply(x)  # type: ignore[no-untyped-call]  # torch annotates no argument of it
        assert isinstance(out, Tensor)
        return out

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> Tensor:
        (_,) = getattr(ctx, "saved_tensors")  # noqa: B009 - no stub knows what contexts have
        return 2 * grads[0]


def test_a_step_that_is_the_followed_one_is_its_record() -> None:
    watch = Watch()
    known = watch.step(many_phases)
    assert not any(watch.expected)
    assert micro_batches(known) == 2
    assert watch.step(many_phases, known) is known
    assert watch.expected == [True] * known.num_hooks
    other = watch.step(many_phases)  # following the step does not change its record
    assert other is not known
    assert facts(other) == facts(known)


@pytest.mark.parametrize("changed", [leaf(6, 4), leaf(24), leaf(4, 7), leaf(dtype=torch.float64)])
def test_a_step_that_leaves_the_followed_one_is_what_it_is(changed: Tensor) -> None:
    watch = Watch()

    def run(x: Tensor) -> None:
        (leaf().tanh().exp().sum() + x.sin().sum()).backward()

    known = watch.step(lambda: run(leaf()))
    found = watch.step(lambda: run(changed), known)
    assert watch.expected[:3] == [True, True, False]
    assert not any(watch.expected[3:])
    assert facts(found) == facts(watch.step(lambda: run(changed)))
    assert found.fingerprint != known.fingerprint


def test_another_operator_or_order_is_seen_where_it_is_used() -> None:
    watch = Watch()

    def run(*outputs: int) -> None:
        made = [leaf().tanh().sum(), leaf().tanh().sum(), leaf().sigmoid().sum()]
        for output in outputs:
            made[output].backward()

    known = watch.step(lambda: run(0, 1, 2))
    for outputs, agree in (((0, 2, 1), 4), ((1, 0, 2), 3), ((0, 1, 2), 6), ((2, 1, 0), 3)):
        found = watch.step(lambda: run(*outputs), known)  # noqa: B023 - it runs before the loop goes on
        assert watch.expected == [True] * agree + [False] * (6 - agree)
        assert (found is known) is (agree == 6)


def test_a_save_of_a_backward_is_none_of_a_forward() -> None:
    watch = Watch()

    def run(inside: bool) -> None:
        def save(_: object) -> None:
            with torch.enable_grad():
                leaf().exp()

        x = leaf()
        if inside:
            x.register_hook(save)
        x.tanh().sum().backward()
        if not inside:
            save(None)
        leaf().sin().sum().backward()

    inside, behind = watch.step(lambda: run(True)), watch.step(lambda: run(False))
    assert inside.save_of == behind.save_of == array("i", [-1, 0, -1, -1, 3])
    assert [phase for _, phase in inside.boundaries] == [phase for _, phase in behind.boundaries]
    for run_inside, own, known in ((True, inside, behind), (False, behind, inside)):
        found = watch.step(lambda: run(run_inside), known)  # noqa: B023 - it runs before the loop goes on
        assert watch.expected == [True, True, False, False, False]
        assert facts(found) == facts(own)
        assert found.fingerprint != known.fingerprint


def test_shorter_and_longer_than_the_followed_one() -> None:
    watch = Watch()

    def run(times: int) -> None:
        for _ in range(times):
            leaf().tanh().exp().sum().backward()

    known = watch.step(lambda: run(2))
    shorter, longer = watch.step(lambda: run(1), known), watch.step(lambda: run(3), known)
    assert shorter.features == known.features[:4]
    assert shorter.save_of.tolist() == [-1, -1, 1, 0]
    assert watch.expected == [True] * 8 + [False] * 4
    assert longer.features[:8] == known.features
    assert longer.save_of.tolist() == [-1, -1, 1, 0, -1, -1, 5, 4, -1, -1, 9, 8]
    assert [micro_batches(record) for record in (shorter, known, longer)] == [1, 2, 3]


def test_another_may_be_followed_from_the_hook_that_told_them_apart() -> None:
    watch = Watch()

    def run(last: Callable[[Tensor], Tensor]) -> None:
        last(leaf().tanh().exp()).sum().backward()

    one, other = watch.step(lambda: run(torch.sin)), watch.step(lambda: run(lambda t: t[:2].cos().cos()))
    light = watch.light
    takes_over: list[int] = []

    def save(t: Tensor) -> tuple[Tensor, int]:
        handle = watch.save(t)
        if not watch.expected[-1]:
            takes_over.append(handle[1])
            light.follow(other)
        return handle

    watch.expected.clear()
    light.begin_step()
    light.follow(one)
    with saved_tensors_hooks(save, watch.use):
        run(lambda t: t[:2].cos().cos())
    assert takes_over == [2]
    assert watch.expected == [True, True, False, *[True] * (other.num_hooks - 3)]
    assert light.end_step() is other


def test_threads_in_turn_are_followed_too() -> None:
    watch, x = Watch(), leaf()

    def run() -> None:
        for _ in range(2):
            x.exp().exp()
            watch.save(x)
            thread = threading.Thread(target=lambda: (x.exp(), watch.save(x)))
            thread.start()
            thread.join()

    known = watch.step(run)
    assert watch.step(run, known) is known


def test_a_class_that_each_step_makes_anew_is_followed_and_not_kept() -> None:
    watch = Watch()
    made: list[weakref.ref[type]] = []

    def run() -> None:
        class Own(Doubled):
            pass

        made.append(weakref.ref(Own))
        Own.of(leaf()).sum().backward()

    known = watch.step(run)
    assert watch.step(run, known) is known
    gc.collect()
    assert [ref() for ref in made] == [None, None]


# --- kinds of tensors


def test_jagged_sizes_do_not_show_but_the_rest_does() -> None:
    light, offsets = LightProfiler(), torch.tensor([0, 2, 5])
    kinds = [torch.nested.nested_tensor_from_jagged(torch.ones(5, width), offsets) for width in (4, 4, 8)]
    features = [feature_of_save(light, t) for t in (*kinds, torch.ones(2, 3, 4))]
    assert features[0] == features[1]
    assert len(set(features)) == 3


# --- phases


def penalised() -> None:
    x = leaf()
    (grad,) = torch.autograd.grad(x.exp().tanh().sum(), x, create_graph=True)
    grad.square().sum().backward()


def recomputed(*, reentrant: bool) -> None:
    x = leaf()
    for _ in range(2):
        x = checkpoint(lambda t: t.tanh().exp(), x, use_reentrant=reentrant)
    x.sin().sum().backward()


@pytest.mark.parametrize(
    ("run", "phases"),
    [
        (lambda: recomputed(reentrant=False), [FORWARD, BACKWARD]),
        (lambda: recomputed(reentrant=True), [FORWARD, BACKWARD]),
        (penalised, [FORWARD, BACKWARD] * 2),  # the penalty is a forward of its own: it saves outside of any backward
    ],
    ids=["checkpoint", "reentrant", "a penalty on gradients"],
)
def test_what_a_backward_runs_is_no_micro_batch(run: Callable[[], None], phases: list[StepPhase]) -> None:
    assert [phase for _, phase in seen(run).boundaries] == phases


def test_a_use_of_an_earlier_step_begins_a_backward_and_a_look_at_the_graph_none() -> None:
    light, watch = LightProfiler(), Watch()
    assert light._phase is None
    with saved_tensors_hooks(lambda t: t, lambda t: (light.used(EARLIER_STEP), t)[1]):
        y = leaf().exp()
    y.sum().backward()
    record = light.end_step()
    assert record.save_of.tolist() == [EARLIER_STEP]
    assert record.boundaries == (Boundary(0, BACKWARD),)

    def looks() -> None:
        y = leaf().exp()
        assert y.grad_fn is not None
        assert torch.equal(getattr(y.grad_fn, "_saved_result"), y)  # noqa: B009 - no stub knows what nodes save
        assert watch.light._phase is FORWARD
        y.tanh().sum().backward()
        assert watch.light._phase is BACKWARD

    record = watch.step(looks)
    assert record.save_of.tolist() == [-1, 0, -1, 2, 0]
    assert record.boundaries == (Boundary(0, FORWARD), Boundary(3, BACKWARD))
