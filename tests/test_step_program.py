"""A plan as a running step reads it: each action at its hook, each hook by its key, and all of it once on any way."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from chameleon_mm.plan.step_program import AGAIN, END, FIRST, KEPT, OUT, RECLAIM, RELEASE, USE, Keys, Row, StepProgram
from chameleon_mm.plan.swap_plan import Action
from chameleon_mm.plan.trace import Trace
from chameleon_mm.swap.way import Way
from tests._traces import chain, plan_of, random_plan, random_step

TRACE = chain(layers=2)
"""Ten saves, then ten uses in reverse order."""


def action(tensor: int, out_at: int, reclaim_at: int, in_at: int, use_at: int = 19, nbytes: int | None = None) -> Action:
    whole = int(TRACE.tensor_bytes[tensor])
    return Action(tensor=tensor, nbytes=nbytes or whole, out_at=out_at, reclaim_at=reclaim_at, in_at=in_at, use_at=use_at)


def saved(hook: int) -> int:
    return int(TRACE.hook_tensor[hook])


def ops(row: Row) -> list[tuple[int, int]]:
    return [(op, number) for op, number, _ in row.ops]


def test_each_is_due_at_its_hook() -> None:
    one, two = saved(0), saved(1)
    rows = StepProgram.of(TRACE, plan_of(TRACE, [action(one, 1, 4, 12), action(two, 2, 4, 11)])).rows
    assert {hook: ops(row) for hook, row in enumerate(rows) if row.ops} == {
        1: [(OUT, one)], 2: [(OUT, two)], 4: [(RECLAIM, one), (RECLAIM, two)],
    }  # fmt: skip
    assert {hook: row.ins for hook, row in enumerate(rows) if row.ins} == {11: (two,), 12: (one,)}


def test_whole_storages_go_before_those_in_part() -> None:
    one, two = saved(0), saved(1)
    rows = StepProgram.of(TRACE, plan_of(TRACE, [action(one, 1, 4, 12, nbytes=512), action(two, 2, 4, 11)])).rows
    assert ops(rows[4]) == [(RECLAIM, two), (RECLAIM, one)]


def test_a_storage_is_numbered_at_its_first_save() -> None:
    program = StepProgram.of(TRACE, plan_of(TRACE, [action(saved(0), 1, 4, 12)]))
    assert [program.number_at(hook) for hook in (0, 1)] == [saved(0), saved(1)]
    assert program.number_at(19) is None  # a use
    assert program.number_at(20) is None
    assert program.number_at(1_000) is None


def test_a_plan_for_another_trace_is_refused() -> None:
    plan = plan_of(TRACE, [action(saved(0), 1, 4, 12)])
    with pytest.raises(ValueError, match="make a plan for this trace"):
        StepProgram.of(TRACE, dataclasses.replace(plan, fingerprint=plan.fingerprint + 1))
    with pytest.raises(ValueError, match=r"expected one for fingerprint 0xc4a1 and 20 hooks.*and 21"):
        StepProgram.of(TRACE, dataclasses.replace(plan, num_hooks=21))


@given(st.randoms(use_true_random=False))
def test_any_way_through_a_step_has_the_plans_events_once_each_and_none_early(rng: Random) -> None:
    trace = random_step(rng)
    plan = random_plan(rng, trace)
    program = StepProgram.of(trace, plan)
    assert len(program.rows) == plan.num_hooks + 1
    assert program.rows[-1] == Row(kind=END)
    way, hook = Way(program, epoch=0), -1
    found: list[tuple[Any, int, int]] = []
    while hook < plan.num_hooks - 1:
        hook = min(hook + rng.randint(1, 5), plan.num_hooks - 1)
        since = len(found)
        for row in way.due(hook):
            found += [(op, number, nbytes) for op, number, nbytes in row.ops] + [("back", number, 0) for number in row.ins]
        early = {(OUT, a.tensor): a.out_at for a in plan.actions} | {(RECLAIM, a.tensor): a.reclaim_at for a in plan.actions}
        assert all(early.get((op, number), -1) <= hook for op, number, _ in found[since:])
        assert way.is_up_to(hook)
        assert not way.due(hook)
    expected: list[Any] = [(RELEASE if a.again else RECLAIM, a.tensor, a.nbytes) for a in plan.actions]
    expected += [(OUT, a.tensor, a.nbytes) for a in plan.actions if a.out_at < a.reclaim_at and not a.again]
    expected += [("back", a.tensor, 0) for a in plan.actions]
    assert sorted(map(str, found)) == sorted(map(str, expected))


@given(st.randoms(use_true_random=False))
def test_rows_have_their_places(rng: Random) -> None:
    trace = random_step(rng)
    rows = StepProgram.of(trace, random_plan(rng, trace)).rows[:-1]
    for row, use in zip(rows, trace.hook_use.tolist(), strict=True):
        order = [op == OUT for op, _, _ in row.ops]
        assert order == sorted(order)  # memory goes first
        assert row.is_checked == (row.number >= 0 or any(op != OUT for op, _, _ in row.ops))
        assert (row.kind == USE) == use
        assert use or (row.kind == KEPT) == (row.number < 0)
        assert row.number < 0 or row.number not in row.ins[1:]  # a copy back that its own use waits for is the first
        assert row.key is None
    firsts = [row.number for row in rows if row.kind == FIRST]
    assert len(firsts) == len(set(firsts))
    assert all(row.number in firsts for row in rows if row.kind == AGAIN)


# --- keys


def keys_of(trace: Trace, feature: tuple[Any, ...] | None = None) -> Keys:
    """Features as a model's would be; `feature` in place of each save's."""
    features: list[tuple[Any, ...]] = []
    saves: list[int] = []
    latest: dict[int, int] = {}
    for hook, (tensor, use) in enumerate(zip(trace.hook_tensor.tolist(), trace.hook_use.tolist(), strict=True)):
        if use:
            features.append(("node", hook - latest.get(tensor, hook)))
            saves.append(latest.get(tensor, -2))
            continue
        since = -1 if tensor < 0 else hook - latest[tensor] if tensor in latest else 0
        features.append(feature or (Tensor, (tensor,), torch.float32, 1, since))
        saves.append(-1)
        latest[tensor] = hook
    return Keys(features, saves, frozenset({Tensor}))


def keys(trace: Trace, feature: tuple[Any, ...] | None = None) -> Sequence[tuple[int, object]]:
    return [(row.kind, row.key) for row in StepProgram.of(trace, plan_of(trace), keys_of(trace, feature)).rows[:-1]]


@given(st.randoms(use_true_random=False))
def test_a_save_is_known_by_its_tensor_and_a_use_by_its_save(rng: Random) -> None:
    trace = random_step(rng)
    known = keys_of(trace)
    for hook, (kind, key) in enumerate(keys(trace)):
        save = known.save_of[hook]
        assert key == (known.features[hook][:4] if kind != USE else save if save >= 0 else None)


@pytest.mark.parametrize(
    "feature",
    [
        ("DTensor", (8,), torch.float32, 1, 0),  # a wrapper class
        (Tensor, (8,), torch.float32, 1, -1),  # it stays, and the trace says that it may move
        (Tensor, (8,), torch.float32, 1, object()),  # any number of hooks since its last save
    ],
)
def test_counting_alone_does_not_know_any_save(feature: tuple[Any, ...]) -> None:
    assert {key for kind, key in keys(TRACE, feature) if kind != USE} == {None}


def test_a_save_in_backward_is_known_as_one_in_forward() -> None:
    assert {key for kind, key in keys(TRACE, (Tensor, (8,), torch.float32, 1, 0, "backward")) if kind != USE} == {
        (Tensor, (8,), torch.float32, 1)
    }
