"""Planned offsets against what any plan must obey: nothing overlaps, and no arena is below the most that lives at once."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_mm.bench.pinned import TRACES, read_trace
from chameleon_mm.pinned.plan_offsets import OffsetPlan, plan_offsets

Request = tuple[int, int, int]

uses = st.integers(-20, 20)
requests = st.lists(
    st.tuples(st.integers(0, 300), uses, uses).map(lambda r: (r[0], min(r[1:]), max(r[1:]))), max_size=25
)  # fmt: skip


@st.composite
def nested(draw: st.DrawFn) -> list[Request]:
    """Blocks of a stack: what was allocated last is released first. In the order of allocation."""
    open_blocks: list[int] = []
    found: list[list[int]] = []
    for time, push in enumerate(draw(st.lists(st.booleans(), max_size=60))):
        if push:
            open_blocks.append(len(found))
            found.append([draw(st.integers(1, 300)), time, -1])
        elif open_blocks:
            found[open_blocks.pop()][2] = time
    end = 60
    while open_blocks:
        found[open_blocks.pop()][2] = end
        end += 1
    return [(nbytes, first, last) for nbytes, first, last in found]


def most_live(asked: list[Request], alignment: int) -> int:
    """The most bytes live at any use, by trying every one."""
    return max(
        (sum(-(-n // alignment) * alignment for n, first, last in asked if first <= at <= last) for _, at, _ in asked),
        default=0,
    )


def check(plan: OffsetPlan, asked: list[Request], alignment: int) -> None:
    assert plan.sizes == tuple(nbytes for nbytes, _, _ in asked)
    assert plan.lower_bound_bytes == most_live(asked, alignment) <= plan.arena_bytes
    extents = [plan.extent(position) for position in range(len(asked))]
    assert all(start % alignment == 0 and end - start >= plan.sizes[i] for i, (start, end) in enumerate(extents))
    assert max((end for start, end in extents if start < end), default=0) == plan.arena_bytes
    for a, b in combinations(range(len(asked)), 2):
        if asked[a][1] <= asked[b][2] and asked[b][1] <= asked[a][2] and asked[a][0] and asked[b][0]:
            assert extents[a][1] <= extents[b][0] or extents[b][1] <= extents[a][0], (a, b)


@given(requests, st.sampled_from([1, 8, 96]))
def test_nothing_that_lives_together_overlaps(asked: list[Request], alignment: int) -> None:
    check(plan_offsets(asked, alignment=alignment), asked, alignment)


@given(nested(), st.sampled_from([1, 64]))
def test_blocks_of_a_stack_waste_nothing(asked: list[Request], alignment: int) -> None:
    plan = plan_offsets(asked, alignment=alignment)
    check(plan, asked, alignment)
    assert plan.arena_bytes == plan.lower_bound_bytes


def test_bytes_are_used_again_after_the_last_use_and_not_at_it() -> None:
    assert plan_offsets([(100, 0, 1), (100, 2, 3)], alignment=1).arena_bytes == 100
    assert plan_offsets([(100, 0, 1), (100, 1, 3)], alignment=1).arena_bytes == 200


def test_the_smallest_gap_that_holds_it_is_taken() -> None:
    # 100, 90, 60 and 50 lie above one another; the first and the third go, and 40 comes: into the hole of 60, not of 100.
    plan = plan_offsets([(100, 0, 4), (90, 0, 9), (60, 0, 4), (50, 0, 9), (40, 5, 9)], alignment=1)
    assert plan.offsets == (0, 100, 190, 250, 190)


def test_uses_may_be_times_in_nanoseconds() -> None:
    asked = [(1, 10**30, 10**31), (1, 10**31 + 1, 10**32)]
    assert plan_offsets(asked, alignment=1).arena_bytes == 1


@pytest.mark.parametrize(
    ("bad", "error", "said"),
    [
        ([(1, 0, 1), (-1, 0, 1)], ValueError, "request 1: expected 0 bytes or more, got -1"),
        ([(1, 2, 1)], ValueError, "request 0: expected a last use at or after its first, 2, got 1"),
        ([(1, 2)], ValueError, r"request 0: expected \(nbytes, first_use, last_use\), got \(1, 2\)"),
        ([(1 << 61, 0, 1)] * 3, ValueError, "bytes in all"),
        ([(1.5, 0, 1)], TypeError, "float"),
        ([(1, "0", 1)], TypeError, "str"),
    ],
)
def test_bad_requests_are_refused(bad: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        plan_offsets(bad)


@pytest.mark.parametrize("alignment", [0, -4096])
def test_a_bad_alignment_is_refused(alignment: int) -> None:
    with pytest.raises(ValueError, match="alignment: expected 1 byte or more"):
        plan_offsets([], alignment=alignment)


@pytest.mark.parametrize("path", sorted(TRACES.glob("*.jsonl.gz")), ids=lambda path: path.name.partition(".")[0])
def test_a_plan_of_recorded_steps_is_as_small_as_a_plan_can_be(path: Path) -> None:
    trace = read_trace(path)
    dies = {block: place for place, (block, nbytes) in enumerate(trace) if nbytes < 0}
    plan = plan_offsets([(nbytes, place, dies[block]) for place, (block, nbytes) in enumerate(trace) if nbytes > 0])
    assert plan.arena_bytes == plan.lower_bound_bytes
