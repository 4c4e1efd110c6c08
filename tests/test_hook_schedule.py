"""A plan as a running step reads it: everything once, at its hook or when that was passed, in the plan's order."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_mm.adaptive.hook_schedule import DueActions, HookSchedule
from chameleon_mm.policy import Action
from tests._traces import chain, plan_of, random_plan, random_step

TRACE = chain(layers=2)
"""Ten saves, then ten uses in reverse order."""


def action(tensor: int, out_at: int, reclaim_at: int, in_at: int, use_at: int = 19, nbytes: int | None = None) -> Action:
    whole = int(TRACE.tensor_bytes[tensor])
    return Action(tensor=tensor, nbytes=nbytes or whole, out_at=out_at, reclaim_at=reclaim_at, in_at=in_at, use_at=use_at)


def tensors(due: DueActions | None) -> tuple[list[int], list[int], list[int]]:
    assert due is not None
    reclaims, outs, ins, drops = ([action.tensor for action in actions] for actions in due)
    assert drops == []
    return reclaims, outs, ins


def saved(hook: int) -> int:
    return int(TRACE.hook_tensor[hook])


def test_each_is_due_at_its_hook() -> None:
    one, two = saved(0), saved(1)
    cursor = HookSchedule.of(TRACE, plan_of(TRACE, [action(one, 1, 4, 12), action(two, 2, 4, 11)])).begin_step()
    assert cursor.advance_to(0) is None
    assert tensors(cursor.advance_to(1)) == ([], [one], [])
    assert tensors(cursor.advance_to(2)) == ([], [two], [])
    assert cursor.advance_to(3) is None
    assert tensors(cursor.advance_to(4)) == ([one, two], [], [])
    assert tensors(cursor.advance_to(11)) == ([], [], [two])
    assert tensors(cursor.advance_to(12)) == ([], [], [one])
    assert cursor.advance_to(19) is None


def test_hooks_that_were_passed_over_are_made_up_for() -> None:
    one, two = saved(0), saved(1)
    cursor = HookSchedule.of(TRACE, plan_of(TRACE, [action(one, 2, 4, 12), action(two, 1, 5, 11)])).begin_step()
    assert tensors(cursor.advance_to(19)) == ([one, two], [two, one], [two, one])


def test_whole_storages_go_before_those_in_part() -> None:
    one, two = saved(0), saved(1)
    schedule = HookSchedule.of(TRACE, plan_of(TRACE, [action(one, 1, 4, 12, nbytes=512), action(two, 2, 4, 11)]))
    reclaims, _, _ = tensors(schedule.begin_step().advance_to(19))
    assert reclaims == [two, one]


def test_what_begins_with_its_wait_is_not_due_before() -> None:
    """A copy out with the reclaim that waits for it, a copy back with its use."""
    one = saved(0)
    cursor = HookSchedule.of(TRACE, plan_of(TRACE, [action(one, 4, 4, 19)])).begin_step()
    assert tensors(cursor.advance_to(19)) == ([one], [], [])


def test_an_action_is_for_the_first_save_of_a_storage_that_may_move() -> None:
    one, two = saved(0), saved(1)
    schedule = HookSchedule.of(TRACE, plan_of(TRACE, [action(one, 1, 4, 12)]))
    storage_action = schedule.storage_actions.get(0)
    assert storage_action is not None
    assert storage_action.tensor == one
    assert storage_action.action == schedule.plan.actions[0]
    stays = schedule.storage_actions.get(1)
    assert stays is not None
    assert (stays.tensor, stays.action) == (two, None)
    assert schedule.storage_actions.get(19) is None  # a use
    assert schedule.storage_actions.get(1_000) is None


def test_a_plan_for_another_trace_is_refused() -> None:
    plan = plan_of(TRACE, [action(saved(0), 1, 4, 12)])
    with pytest.raises(ValueError, match="make a plan for this trace"):
        HookSchedule.of(TRACE, dataclasses.replace(plan, fingerprint=plan.fingerprint + 1))
    with pytest.raises(ValueError, match=r"expected one for fingerprint 0xc4a1 and 20 hooks.*and 21"):
        HookSchedule.of(TRACE, dataclasses.replace(plan, num_hooks=21))


@pytest.mark.parametrize("tensor", [-1, len(TRACE.tensor_bytes)])
def test_a_plan_of_a_storage_that_the_trace_does_not_have_is_refused(tensor: int) -> None:
    wrong = Action(tensor=tensor, nbytes=1, out_at=0, reclaim_at=0, in_at=0, use_at=0)
    with pytest.raises(ValueError, match=f"expected tensors below {len(TRACE.tensor_bytes)}.*got {tensor};"):
        HookSchedule.of(TRACE, plan_of(TRACE, [wrong]))


@given(st.randoms(use_true_random=False))
def test_any_way_through_a_step_gives_each_once_and_none_early(rng: Random) -> None:
    trace = random_step(rng)
    plan = random_plan(rng, trace)
    cursor = HookSchedule.of(trace, plan).begin_step()
    given_out: list[tuple[str, Action]] = []
    hook = -1
    while hook < plan.num_hooks:
        hook += rng.randint(1, 5)
        due = cursor.advance_to(hook)
        if due is None:
            continue
        for name, actions in zip(("reclaim_at", "out_at", "in_at", "reclaim_at"), due, strict=True):
            assert all(getattr(action, name) <= hook for action in actions)
            given_out += [(name, action) for action in actions]
    expected = [("reclaim_at", a) for a in plan.actions]
    expected += [("out_at", a) for a in plan.actions if a.out_at < a.reclaim_at]
    expected += [("in_at", a) for a in plan.actions if a.in_at < a.use_at]
    assert sorted(map(str, given_out)) == sorted(map(str, expected))
