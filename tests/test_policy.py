"""Default rule, limits, and learned memory and order: arithmetic, tested without a tensor."""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

import chameleon_mm
from chameleon_mm.plan.rule import Headroom, UseOrder


def test_the_policy_imports_no_torch() -> None:
    """Read, not run: `import chameleon_mm` loads torch for others."""
    imported = set()
    for file in (Path(chameleon_mm.__file__).parent / "plan").glob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "dataclasses" in imported  # the test does see imports
    ours = {".".join(name.split(".")[:2]) for name in imported if name.startswith("chameleon_mm")}
    # errors, replayable and units import the standard library alone: the layers hold that
    assert ours <= {"chameleon_mm.errors", "chameleon_mm.plan", "chameleon_mm.replayable", "chameleon_mm.units"}
    assert not {name for name in imported if name.partition(".")[0] in {"torch", "cupy", "triton"}}


# --- headroom


def learned(*growth: int) -> Headroom:
    """A headroom that has seen one step."""
    headroom = Headroom()
    for nbytes in growth:
        headroom.record(nbytes)
    headroom.end_step()
    return headroom


def test_the_need_is_the_most_of_the_neighbours() -> None:
    headroom = learned(10, 1, 2, 3, 4, 50)
    needs = []
    for _ in range(6):
        needs.append(headroom.need())
        headroom.record(0)
    # windows:   10 1 2 | 10 1 2 3 | 10 1 2 3 4 | 1 2 3 4 50 | 2 3 4 50 | 3 4 50
    assert needs == [10, 10, 10, 50, 50, 50]


def test_looking_ahead_widens_the_window_forwards_only() -> None:
    headroom = learned(90, 0, 0, 0, 5, 0, 7, 0, 80)
    for _ in range(3):
        headroom.record(0)
    assert headroom.need() == 5
    assert headroom.need(ahead=1) == 7
    assert headroom.need(ahead=3) == 80
    assert headroom.need(ahead=100) == 80


def test_a_step_of_another_length_is_what_the_next_one_is_measured_by() -> None:
    headroom = learned(1, 2, 3, 4, 5)
    headroom.record(9)
    headroom.end_step()
    assert headroom.need() == 9
    headroom.record(0)
    assert headroom.need() is None


def test_a_larger_step_is_noticed_and_answered_in_proportion() -> None:
    headroom = learned(10, 10, 10, 10, 10, 90)
    headroom.record(15)  # half as much again
    assert headroom.need() == 15
    headroom.record(9)  # less than foreseen takes nothing back
    assert headroom.need() == 15
    headroom.record(30)  # twice as much again
    assert headroom.need() == 270
    headroom.end_step()
    assert headroom.need() == 30  # the next step uses this step's measurements as they were


def test_proportions_are_rounded_up() -> None:
    headroom = learned(3, 3)
    headroom.record(4)
    assert headroom.need() == 4
    headroom = learned(3, 3, 5)
    headroom.record(6)
    assert headroom.need() == 6  # foreseen were 5 already, not 3


def test_a_climb_where_none_was_foreseen_leaves_the_rest_unknown() -> None:
    headroom = learned(0, 0, 0, 0, 0, 7)
    headroom.record(1)
    assert headroom.need() is None
    headroom.record(0)
    assert headroom.need() is None
    headroom.end_step()
    assert headroom.need() == 1


@given(climb=st.integers(1, 1 << 40), looks=st.integers(2, 30), times=st.integers(1, 8))
def test_a_step_larger_throughout_is_covered_from_its_second_look_on(climb: int, looks: int, times: int) -> None:
    """A longer batch scales a sequence of equal climbs."""
    headroom = learned(*[climb] * looks)
    headroom.record(times * climb)
    for _ in range(looks - 1):
        assert headroom.need() == times * climb
        headroom.record(times * climb)


def test_a_step_that_did_not_end_teaches_nothing() -> None:
    headroom = learned(1, 2, 3)
    headroom.record(7)
    headroom.end_step(completed=False)
    assert headroom.position == 0
    assert headroom.need() is None
    headroom.record(4)
    headroom.end_step()
    assert headroom.need() == 4


@given(growth=st.lists(st.integers(0, 1 << 40), min_size=1, max_size=30), shift=st.integers(-2, 2), ahead=st.integers(0, 8))
def test_a_repeated_step_is_covered_even_when_shifted(growth: list[int], shift: int, ahead: int) -> None:
    headroom = learned(*growth)
    for position in range(len(growth)):
        need = headroom.need(ahead)
        assert need is not None
        then = range(position + shift, position + shift + 1 + ahead)
        assert need >= max((growth[k] for k in then if 0 <= k < len(growth)), default=0)
        assert need in growth
        headroom.record(growth[position])


# --- the order of uses


STEPS = st.lists(st.tuples(st.lists(st.integers(0, 12)), st.booleans()), max_size=4)
"""Numbers that each step used, and whether it ended."""


@example([([0, 1, 2], True), ([], True)])
@example([([2, 0, 2, 1, 0], True), ([5], False)])
@given(STEPS)
def test_the_next_step_uses_what_the_latest_that_ended_did_and_else_last_saved_first(
    steps: list[tuple[list[int], bool]],
) -> None:
    order = UseOrder()
    for used, completed in steps:
        for index in used:
            order.used(index)
        order.end_step(completed=completed)
    latest = next((used for used, completed in reversed(steps) if completed), [])
    known = list(dict.fromkeys(latest))  # a second use changes nothing
    unknown = [index for index in reversed(range(15)) if index not in known]
    for at_most in (0, 1, 2, 15):
        for place, index in enumerate(known):
            assert list(order.upcoming(index, at_most)) == known[place + 1 : place + 1 + at_most]
        for index in unknown:
            assert list(order.upcoming(index, at_most)) == list(reversed(range(index)))[:at_most]
    for sooner, later in (*pairwise(known), *pairwise(unknown), *((one, other) for one in unknown if one for other in known)):
        assert order.rank(sooner) < order.rank(later)  # unknown ones rank as sooner: kept longest
