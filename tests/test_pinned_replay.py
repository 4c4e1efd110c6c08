"""Replay of planned offsets: what matches the plan lies where it says, what deviates comes from the pool, nothing overlaps."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chameleon_mm.device.protocols import Device
from chameleon_mm.device.sim import SimDevice
from chameleon_mm.errors import HostMemoryExhausted, PoolStateError
from chameleon_mm.pinned import PinnedBlock, PinnedPool
from chameleon_mm.pinned.plan_offsets import OffsetPlan, plan_offsets
from chameleon_mm.pinned.replay import RESYNC_WINDOW, ReplayPool
from chameleon_mm.units import KIB, MIB
from tests._fakes import ManualEvent, RecordingStream
from tests.observed import SimRaceError

PAGE = 4096


class UnwaitedEvent(ManualEvent):
    """An event that is complete when the test says so; until then the host must not wait for it."""

    def synchronize(self) -> None:
        assert self.complete, "the host waited"


def together(*pages: int) -> OffsetPlan:
    """A plan for blocks that all live at once."""
    return plan_offsets([(count * PAGE, at, len(pages) + at) for at, count in enumerate(pages)])


@pytest.fixture
def pool() -> Iterator[PinnedPool]:
    with PinnedPool("4MiB", SimDevice(), "64KiB") as pool:
        yield pool
        gc.collect()  # an expected error's traceback and its frame, with the blocks there, hold each other
        assert pool.stats().num_live == 0


def place(replay: ReplayPool, block: PinnedBlock) -> int | None:
    """Where in the arena a block lies; None for one of the pool."""
    start = block.buffer.data_ptr() - replay._memory.data_ptr()
    return start if 0 <= start < replay.plan.arena_bytes else None


def places(replay: ReplayPool, pages: Sequence[int]) -> list[int | None]:
    """Allocate all of `pages`, and say which planned request each one got; None for those of the pool."""
    blocks = [replay.allocate(count * PAGE) for count in pages]
    starts = [place(replay, block) for block in blocks]
    return [None if start is None else replay.plan.offsets.index(start) for start in starts]


# --- what is served


def test_a_step_like_the_plan_lies_where_it_says(pool: PinnedPool) -> None:
    plan = plan_offsets([(3 * PAGE, 0, 1), (5000, 2, 5), (PAGE, 3, 4)])
    with ReplayPool(pool, plan) as replay:
        reserved = pool.stats().live_bytes
        assert reserved == plan.arena_bytes == 3 * PAGE
        for _ in range(3):
            replay.begin_step()
            first = replay.allocate(3 * PAGE)
            assert place(replay, first) == plan.offsets[0]
            first.release()
            second, third = replay.allocate(5000), replay.allocate(PAGE)
            assert [place(replay, second), place(replay, third)] == list(plan.offsets[1:])
            assert (second.nbytes, second.buffer.numel()) == (5000, 5000)
            second.release()
            third.release()
        stats = replay.stats()
        assert (stats.served, stats.deviated, stats.occupied, stats.num_live, stats.live_bytes) == (9, 0, 0, 0, 0)
        assert pool.stats().live_bytes == reserved
        del first, second, third


@pytest.mark.parametrize(
    ("asked", "served"),
    [
        ([1, 2, 3, 4, 5], [0, 1, 2, 3, 4]),
        ([1, 9, 2, 3, 4, 5], [0, None, 1, 2, 3, 4]),  # one more, of a size of its own
        ([1, 3, 4, 5], [0, 2, 3, 4]),  # one is missing
        ([1, 9, 3, 4, 5], [0, None, 2, 3, 4]),  # one is of another size
        ([2, 1, 3, 5, 4], [1, 0, 2, 4, 3]),  # two came in another order
        ([1, 4, 2, 3, 5], [0, 3, 1, 2, 4]),  # one came early
        ([1, 2, 3, 4, 5, 5, 1], [0, 1, 2, 3, 4, None, None]),  # more than planned
        ([9, 8, 7], [None, None, None]),
    ],
)
def test_matches_after_a_deviation(pool: PinnedPool, asked: list[int], served: list[int | None]) -> None:
    with ReplayPool(pool, together(1, 2, 3, 4, 5)) as replay:
        assert places(replay, asked) == served
        stats = replay.stats()
        assert (stats.served, stats.deviated) == (len(asked) - served.count(None), served.count(None))


def test_a_match_is_found_behind_a_stretch_as_long_as_the_one_that_changed(pool: PinnedPool) -> None:
    changed = 2 * RESYNC_WINDOW
    plan = plan_offsets([(PAGE * (2 + at % 2), 2 * at, 2 * at + 1) for at in range(changed)] + [(PAGE, 10**6, 10**6)])
    with ReplayPool(pool, plan) as replay:
        for _ in range(changed):
            replay.allocate(7 * PAGE).release()
        assert place(replay, replay.allocate(PAGE)) == plan.offsets[-1]
        replay.begin_step()
        for _ in range(changed - RESYNC_WINDOW):
            replay.allocate(7 * PAGE).release()
        assert place(replay, replay.allocate(PAGE)) is None  # still too far ahead to be taken for the planned one


def test_bytes_that_a_block_still_has_are_not_given_twice(pool: PinnedPool) -> None:
    plan = plan_offsets([(2 * PAGE, 0, 1), (PAGE, 2, 3), (PAGE, 2, 3)])
    with ReplayPool(pool, plan) as replay:
        kept = replay.allocate(2 * PAGE)
        kept.numpy((2 * PAGE,), np.uint8)[:] = 7
        others = [replay.allocate(PAGE) for _ in range(2)]
        for block in others:
            assert place(replay, block) is None
            block.numpy((PAGE,), np.uint8)[:] = 1
        assert bool((kept.numpy((2 * PAGE,), np.uint8) == 7).all())
        assert (replay.stats().occupied, replay.stats().served) == (2, 1)
        replay.begin_step()
        again = replay.allocate(2 * PAGE)
        assert place(replay, again) is None
        del kept, others, again, block
        replay.begin_step()
        assert place(replay, replay.allocate(2 * PAGE)) == 0


def test_zero_bytes_need_no_place_and_disturb_nothing(pool: PinnedPool) -> None:
    plan = plan_offsets([(PAGE, 0, 9), (0, 1, 9), (2 * PAGE, 2, 9)])
    with ReplayPool(pool, plan) as replay:
        blocks = [replay.allocate(nbytes) for nbytes in (PAGE, 0, f"{2 * PAGE}B")]
        assert [block.nbytes for block in blocks] == [PAGE, 0, 2 * PAGE]
        assert (replay.stats().served, replay.stats().deviated) == (2, 0)
        blocks.clear()
    with ReplayPool(pool, plan_offsets([])) as replay:
        assert place(replay, replay.allocate(PAGE)) is None


@pytest.mark.parametrize(("nbytes", "error"), [(-1, ValueError), (4096.0, TypeError), (True, TypeError), (None, TypeError)])
def test_a_size_that_is_none_is_refused_as_the_pool_does(pool: PinnedPool, nbytes: Any, error: type[Exception]) -> None:
    with ReplayPool(pool, plan_offsets([(1, 0, 1), (4096, 0, 1)])) as replay:
        with pytest.raises(error, match="allocate: expected"):
            replay.allocate(nbytes)
        assert (replay.stats().served, replay.stats().num_live) == (0, 0)


# --- events


def test_the_next_user_of_the_bytes_waits_for_the_last_one(pool: PinnedPool) -> None:
    plan = plan_offsets([(2 * PAGE, 0, 1), (PAGE, 2, 3), (PAGE, 2, 3)])
    with ReplayPool(pool, plan) as replay:
        event = UnwaitedEvent()
        replay.allocate(2 * PAGE).release(after=event)
        streams: list[Any] = [RecordingStream(), RecordingStream()]
        blocks = [replay.allocate(PAGE, stream=stream) for stream in streams]
        assert [stream.waited for stream in streams] == [[event], [event]]
        for block in blocks:
            block.release()  # no event of its own: the earlier one is handed on, once
        replay.begin_step()
        assert replay.allocate(2 * PAGE).pending_events == (event,)
        event.complete = True
        replay.begin_step()
        assert replay.allocate(2 * PAGE).pending_events == ()


def test_events_come_with_the_arena_and_go_with_it(pool: PinnedPool) -> None:
    before, after, never = UnwaitedEvent(), UnwaitedEvent(), UnwaitedEvent()
    pool.allocate(4 * PAGE).release(after=before)
    with ReplayPool(pool, together(1, 3)) as replay:
        first, second = replay.allocate(PAGE), replay.allocate(3 * PAGE)
        assert first.pending_events == second.pending_events == (before,)
        first.release(after=after)
        second.release(after=never)
        never.complete = True
    assert set(pool.allocate(4 * PAGE).pending_events) == {before, after}  # the host waited for none of them
    before.complete = after.complete = True  # the pool's own end may wait for them


def test_a_replay_that_is_dropped_gives_its_arena_back_with_its_events(pool: PinnedPool, no_gc: None) -> None:
    event = UnwaitedEvent()
    replay = ReplayPool(pool, together(1, 3))
    block = replay.allocate(PAGE)
    replay.allocate(3 * PAGE).release(after=event)
    del replay
    assert pool.stats().num_live == 1  # its block holds it
    del block
    assert pool.stats().num_live == 0
    assert pool.allocate(4 * PAGE).pending_events == (event,)
    event.complete = True


def swap_through_the_same_bytes(device: Device, *, forget: bool = False) -> None:
    """Out of the arena and into it again, while the first copy may still be under way."""
    plan = plan_offsets([(MIB, 0, 1), (MIB, 2, 3)])
    h2d, d2h = device.new_stream("h2d"), device.new_stream("d2h")
    compute = device.current_stream()
    with device.compute():
        source, target = compute.alloc(MIB), compute.alloc(MIB)
        source.fill_(2)
        target.fill_(0)
    for stream in (h2d, d2h):
        stream.wait(compute.record())
    with PinnedPool("8MiB", device) as pool, ReplayPool(pool, plan) as replay:
        first = replay.allocate(MIB)
        first.numpy((MIB,), np.uint8)[:] = 1
        h2d.copy(target, first.buffer)
        first.release(after=None if forget else h2d.record())
        second = replay.allocate(MIB, stream=d2h)
        assert place(replay, second) == 0
        try:
            d2h.copy(second.buffer, source)
        finally:
            device.synchronize()  # whatever went wrong, nothing is under way when the memory goes
        assert torch.equal(target.cpu(), torch.full((MIB,), 1, dtype=torch.uint8))
        assert bool((second.numpy((MIB,), np.uint8) == 2).all())
        del first, second


def test_copies_through_planned_bytes_are_exact(device: Device) -> None:
    swap_through_the_same_bytes(device)


def test_a_forgotten_event_is_seen(sim: SimDevice) -> None:
    with pytest.raises(SimRaceError):
        swap_through_the_same_bytes(sim, forget=True)


# --- life


def test_close_refuses_while_its_blocks_live_and_a_second_one_does_nothing(pool: PinnedPool) -> None:
    replay = ReplayPool(pool, together(1, 3))
    block = replay.allocate(PAGE)
    with pytest.raises(PoolStateError, match=r"no live block in the arena, got 1 of 4.00 KiB"):
        replay.close()
    fallback = replay.allocate(9 * PAGE)
    block.release()
    replay.close()
    replay.close()
    assert pool.stats().num_live == 1  # the block that the pool served outlives the replay
    fallback.release()
    with pytest.raises(PoolStateError, match="expected an open replay"):
        replay.allocate(PAGE)


def test_an_error_in_the_body_is_what_the_caller_sees(pool: PinnedPool) -> None:
    with pytest.raises(KeyError, match="the body"), ReplayPool(pool, together(1)) as replay:
        held = replay.allocate(PAGE)
        raise KeyError("the body")
    held.release()
    replay.close()


def test_a_pool_without_room_for_the_arena_stays_as_it_was(pool: PinnedPool) -> None:
    before = pool.stats()
    with pytest.raises(HostMemoryExhausted):
        ReplayPool(pool, plan_offsets([(5 * MIB, 0, 1)]))
    assert pool.stats() == before


def test_an_arena_of_ordinary_memory_is_refused() -> None:
    with PinnedPool("64KiB", SimDevice(), on_full="pageable") as pool:
        with pytest.raises(HostMemoryExhausted, match=r"replay: expected 1.00 MiB of pinned memory"):
            pool.replay(plan_offsets([(MIB, 0, 1)]))
        assert pool.stats().num_live == 0


def test_a_fallback_that_fails_leaves_the_plan_usable(pool: PinnedPool) -> None:
    with ReplayPool(pool, together(1, 2)) as replay:
        with pytest.raises(HostMemoryExhausted):
            replay.allocate(5 * MIB)
        assert places(replay, [1, 2]) == [0, 1]


def test_threads_share_a_replay() -> None:
    plan = together(*range(1, 9))
    with PinnedPool("16MiB", SimDevice()) as pool, ReplayPool(pool, plan) as replay:
        wrong: list[int] = []

        def work(cookie: int) -> None:
            for turn in range(200):
                block = replay.allocate((1 + (cookie + turn) % 8) * PAGE)
                view = block.numpy((block.nbytes,), np.uint8)
                view[:] = cookie
                if turn % 7 == 0:
                    replay.begin_step()
                if not (view == cookie).all():
                    wrong.append(cookie)
                del view
                block.release()

        threads = [threading.Thread(target=work, args=(cookie,)) for cookie in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = replay.stats()
        assert wrong == []
        assert stats.served + stats.deviated + stats.occupied == 800
        assert (stats.num_live, stats.served > 0) == (0, True)


# --- anything at all, against a list of what is live


class ReplayMachine(RuleBasedStateMachine):
    """Steps that follow the plan more or less; the oracle is a list of live address ranges, and of what each holds."""

    @initialize(pages=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 12), st.integers(0, 4)), max_size=12))
    def start(self, pages: list[tuple[int, int, int]]) -> None:
        self.pool = PinnedPool("1MiB", SimDevice(), 64 * KIB)
        requests = sorted(((count * PAGE, first, first + span) for count, first, span in pages), key=lambda r: r[1])
        self.replay = ReplayPool(self.pool, plan_offsets(requests))
        self.planned = [nbytes for nbytes, _, _ in requests]
        self.live: list[tuple[PinnedBlock, int]] = []
        self.asked = self.cookie = 0

    @rule(data=st.data(), follow=st.integers(0, 3))
    def allocate(self, data: st.DataObject, follow: int) -> None:
        as_planned = follow and self.asked < len(self.planned)
        nbytes = self.planned[self.asked] if as_planned else data.draw(st.integers(0, 4 * PAGE))
        self.asked += 1
        try:
            block = self.replay.allocate(nbytes)
        except HostMemoryExhausted:
            return
        assert block.nbytes == nbytes
        self.cookie = (self.cookie + 1) % 251
        block.buffer.fill_(self.cookie)
        self.live.append((block, self.cookie))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), dropped=st.booleans())
    def release(self, data: st.DataObject, dropped: bool) -> None:
        block, cookie = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        assert bool((block.buffer == cookie).all())
        if not dropped:
            block.release()

    @rule()
    def begin_step(self) -> None:
        self.replay.begin_step()
        self.asked = 0

    @invariant()
    def nothing_overlaps(self) -> None:
        ranges = sorted((block.buffer.data_ptr(), block.nbytes) for block, _ in self.live if block.nbytes)
        for (start, nbytes), (following, _) in pairwise(ranges):
            assert start + nbytes <= following
        arena = [block for block, _ in self.live if block.nbytes and place(self.replay, block) is not None]
        stats = self.replay.stats()
        assert stats.num_live == len(arena)
        assert stats.live_bytes == sum(-(-block.nbytes // PAGE) * PAGE for block in arena)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.live.clear()
            self.replay.close()
            self.pool.close()


TestReplayMachine = ReplayMachine.TestCase
TestReplayMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
