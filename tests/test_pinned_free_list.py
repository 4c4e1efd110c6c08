"""Where blocks lie: the free list against an oracle that keeps nothing but a list of live blocks, and offsets planned ahead."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from chameleon_mm.bench.pinned import TRACES, read_trace
from chameleon_mm.pool.free_list import FreeList, OffsetPlan, plan_offsets, units_bytes

UNIT = 64  # small, so that a few hundred steps fill, split and join regions


class Oracle:
    """Regions and live blocks as plain lists; what is free is what is left."""

    def __init__(self) -> None:
        self.regions: list[tuple[int, int]] = []
        self.live: list[tuple[int, int]] = []

    def free_blocks(self) -> list[tuple[int, int]]:
        gaps = []
        for base, nbytes in self.regions:
            at = base
            for start, size in sorted(self.live):
                if base <= start < base + nbytes:
                    gaps.append((at, start - at))
                    at = start + size
            gaps.append((at, base + nbytes - at))
        return [(start, size) for start, size in gaps if size]


def observed(units: FreeList) -> tuple[int, ...]:
    return (units.capacity, units.live_bytes, units.largest_free, units.num_live)


class FreeListMachine(RuleBasedStateMachine):
    """Random programs over a free list, against the oracle."""

    steps = 0
    started = False  # the invariants are checked once before the first step, too

    @initialize(capacity=st.integers(0, 40).map(lambda n: n * UNIT))
    def start(self, capacity: int) -> None:
        self.units = FreeList(capacity, alignment=UNIT)
        self.oracle = Oracle()
        if capacity:
            self.oracle.regions.append((0, capacity))

    @rule(nbytes=st.integers(1, 12 * UNIT))
    def allocate(self, nbytes: int) -> None:
        need = -(-nbytes // UNIT) * UNIT
        fitting = [(size, start) for start, size in self.oracle.free_blocks() if size >= need]
        offset = self.units.allocate(nbytes)
        if not fitting:
            assert offset is None
            return
        best = min(fitting)[0]
        assert offset in [start for size, start in fitting if size == best]
        self.oracle.live.append((offset, need))

    @precondition(lambda self: self.oracle.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.oracle.live) - 1))
        offset, size = self.oracle.live.pop(at)
        assert self.units.free(offset) == size
        self.free_of_nothing(offset)

    @rule(offset=st.integers(-UNIT, 60 * UNIT))
    def free_of_nothing(self, offset: int) -> None:
        if offset in dict(self.oracle.live):
            return
        before = observed(self.units)
        with pytest.raises(ValueError, match="expected the offset of a live block"):
            self.units.free(offset)
        assert observed(self.units) == before

    @rule(units=st.integers(1, 20))
    def add_region(self, units: int) -> None:
        base = self.units.add_region(units * UNIT)
        assert all(base > start + nbytes for start, nbytes in self.oracle.regions), "regions must never be adjacent"
        self.oracle.regions.append((base, units * UNIT))

    @precondition(lambda self: self.oracle.regions)
    @rule(data=st.data())
    def remove_region(self, data: st.DataObject) -> None:
        region = data.draw(st.sampled_from(self.oracle.regions))
        base, nbytes = region
        before = observed(self.units)
        assert self.units.is_region_free(base) == (region in self.oracle.free_blocks())
        if self.units.is_region_free(base):
            assert self.units.remove_region(base) == nbytes
            self.oracle.regions.remove(region)
            with pytest.raises(ValueError, match="add_region"):
                self.units.remove_region(base)
        else:
            with pytest.raises(ValueError, match="without live blocks"):
                self.units.remove_region(base)
            assert observed(self.units) == before

    @rule()
    def free_everything(self) -> None:
        while self.oracle.live:
            self.units.free(self.oracle.live.pop()[0])
        assert self.units.num_live == 0
        assert all(self.units.is_region_free(base) for base, _ in self.oracle.regions), "all coalesced"

    @invariant()
    def agrees_with_the_oracle(self) -> None:
        if self.started:
            FreeListMachine.steps += 1
        self.started = True
        live = sorted(self.oracle.live)
        for (start, size), (following, _) in pairwise(live):
            assert start + size <= following, "two blocks overlap"
        assert all(start % UNIT == 0 for start, _ in live)
        gaps = [size for _, size in self.oracle.free_blocks()]
        capacity, used = sum(nbytes for _, nbytes in self.oracle.regions), sum(size for _, size in live)
        assert observed(self.units) == (capacity, used, max(gaps, default=0), len(live))
        assert (self.units.num_live == 0) == (not live)


def test_the_machine_for_30_000_steps() -> None:
    """Steps are rules that ran and were followed by a check of the invariants, counted one by one where those are checked:
    the settings alone would overstate them, for hypothesis ends many a program early."""
    before = FreeListMachine.steps
    while FreeListMachine.steps - before < 30_000:
        run_state_machine_as_test(FreeListMachine, settings=settings(max_examples=300, stateful_step_count=60, deadline=None))


@pytest.mark.parametrize("capacity", [-4096, 1, 4095, 4097])
def test_a_capacity_that_is_no_multiple_of_the_alignment_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match="4096"):
        FreeList(capacity)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_block_of_nothing_has_no_address(nbytes: int) -> None:
    units = FreeList(4096)
    with pytest.raises(ValueError, match="1 byte or more"):
        units.allocate(nbytes)
    assert units.allocate(4096) == 0


@pytest.mark.parametrize("bad", [4096.0, "4096", None])
def test_an_offset_or_size_that_is_no_integer_changes_nothing(bad: Any) -> None:
    units = FreeList(8192)
    assert units.allocate(1) == 0
    before = observed(units)
    with pytest.raises(TypeError):
        units.allocate(bad)
    with pytest.raises(TypeError):
        units.free(bad)
    assert observed(units) == before


@pytest.mark.parametrize("alignment", [0, -4096, 3, 6000])
def test_an_alignment_that_is_no_power_of_two_is_refused(alignment: int) -> None:
    with pytest.raises(ValueError, match="alignment: expected a power of two"):
        FreeList(12_000, alignment=alignment)


def test_among_equal_sizes_the_last_one_freed_is_taken() -> None:
    units = FreeList(7 * 4096)
    offsets = [units.allocate(4096) or 0 for _ in range(7)]
    for at in (1, 5, 3):
        units.free(offsets[at])
    assert [units.allocate(4096) for _ in range(3)] == [offsets[at] for at in (3, 5, 1)]


def test_a_reader_tells_what_is_live_now() -> None:
    units = FreeList(1 << 16, 1 << 8)
    read = units.units_reader()
    assert units_bytes(read()) == units.live_bytes == 0
    offset = units.allocate(1000)
    assert offset is not None and units_bytes(read()) == units.live_bytes == 1024
    units.add_region(1 << 12)
    assert units_bytes(read()) == units.live_bytes == 1024
    units.free(offset)
    assert units_bytes(read()) == units.live_bytes == 0


# --- planned offsets: nothing overlaps, and no arena is below the most that lives at once


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
