"""Where blocks lie: the free list against an oracle that keeps nothing but a list of live blocks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from chameleon_mm.pool.free_list import FreeList, units_bytes

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
