"""Small saved tensors travel together: one kernel packs them, one copy carries them, and each comes back exact.

The link is so slow that nothing saved later finds it idle: the first small one goes alone, the others wait for a group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo  # imported late, by an operator, it leaves frames in cycles, and handles in those
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device import SPECS, Stream
from chameleon_mm.device.sim import SimStream
from chameleon_mm.plan.rule import Limits
from chameleon_mm.swap import swap_outs
from chameleon_mm.swap.budget import Budget
from chameleon_mm.swap.calling_thread import ComputeStreams
from chameleon_mm.swap.handles import SwappedView
from chameleon_mm.swap.host_copy import State
from chameleon_mm.swap.packed_group import PackedGroup
from chameleon_mm.units import KIB, MIB
from tests._fakes import refusing
from tests._programs import swapping_executor
from tests.observed import SimRaceError

pytestmark = [
    pytest.mark.usefixtures("no_gc"),
    # The mutants also break code that runs when a handle is dropped, where an error can only be reported.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SLOW_LINK = dataclasses.replace(SPECS["h200"], h2d_gbps=0.01, d2h_gbps=0.01, duplex_gbps=0.015)
SMALL = 8 * KIB
LARGEST = 12_000
"""Bytes of the largest storage that travels packed."""
GROUP_BYTES = 64 * KIB


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_outs, "GROUP_BYTES", GROUP_BYTES)


@pytest.fixture
def slow() -> cm.SimDevice:
    return cm.SimDevice(SLOW_LINK)


class Swapping:
    """An executor over a slow link, with a large storage on its way out, so that small ones have something to wait for."""

    def __init__(self, device: cm.SimDevice, *, limits: Limits | None = None) -> None:
        self.device = device
        self.pool = cm.PinnedPool("16MiB", device=device)
        limits = limits or Limits(ahead_bytes=0)
        self.executor = swapping_executor(device, self.pool, limits, min_bytes=1, pack_below_bytes=LARGEST + 1)

    @property
    def totals(self) -> dict[str, int]:
        totals = self.executor.metrics.totals
        return {"packed_groups": totals.packed_groups, "out": totals.bytes_swapped_out, "in": totals.bytes_swapped_in}

    def keep_the_link_busy(self) -> SwappedView:
        handle = self.save(torch.randn(MIB // 4))
        self.next_op()
        return handle

    def save(self, t: Tensor) -> SwappedView:
        handle = self.executor.save(t)
        assert isinstance(handle, SwappedView)
        return handle

    def next_op(self) -> None:
        torch.ones(1, requires_grad=True).exp()
        self.executor.save(torch.nn.Parameter(torch.ones(1)))

    def save_small(self, count: int, nbytes: int = SMALL) -> tuple[list[SwappedView], list[Tensor]]:
        """Save small tensors that nothing else holds. Return their handles and expected values."""
        saved = [torch.randn(nbytes // 4) for _ in range(count)]
        expected = [t.clone() for t in saved]
        handles = [self.save(t) for t in saved]
        del saved
        self.next_op()
        return handles, expected

    def assert_exact(self, handles: list[SwappedView], expected: list[Tensor]) -> None:
        for handle, t in zip(handles, expected, strict=True):
            assert torch.equal(self.executor.use(handle), t)

    def assert_nothing_left(self) -> None:
        self.device.synchronize()
        self.next_op()
        assert not self.executor.registry.all()
        assert not self.executor.registry.packed_groups
        assert self.pool.stats().num_live == 0


@pytest.fixture
def swapping(slow: cm.SimDevice) -> Iterator[Swapping]:
    """Its link is busy. Nothing is left of it when the test's own references are gone."""
    with slow.compute():
        made = Swapping(slow)
        large = made.keep_the_link_busy()
        yield made
        del large
        made.assert_nothing_left()


def places(handles: list[SwappedView]) -> list[State]:
    return [handle.claim.saved.state for handle in handles]


def test_one_carrier_for_all_and_their_memory_goes_at_once(swapping: Swapping, slow: cm.SimDevice) -> None:
    before = slow.allocated_bytes()
    handles, expected = swapping.save_small(16)
    # Left: the expected values and the group, whose copy has not even begun.
    assert slow.allocated_bytes() == before + 2 * 16 * SMALL
    assert places(handles) == [State.ON_HOST] * 16
    assert swapping.totals == {"packed_groups": 1, "out": MIB + 16 * SMALL, "in": 0}
    swapping.executor.end_step(completed=False)
    assert slow.allocated_bytes() == before - MIB + 16 * SMALL
    swapping.assert_exact(handles, expected)
    assert swapping.totals["in"] == 16 * SMALL  # all by one copy, at the first use
    assert places(handles) == [State.ON_HOST] * 15 + [State.RESTORED]  # and each let go at the hook after its own


def test_fewer_than_a_carrier_wait_while_the_link_is_busy(swapping: Swapping, slow: cm.SimDevice) -> None:
    handles, expected = swapping.save_small(3)
    assert places(handles) == [State.ON_DEVICE] * 3
    slow.synchronize()
    swapping.next_op()  # nothing else is under way: they go
    assert places(handles) == [State.ON_HOST] * 3
    swapping.assert_exact(handles, expected)


def test_one_alone_on_an_idle_link_travels_by_itself(slow: cm.SimDevice) -> None:
    with slow.compute():
        swapping = Swapping(slow)
        handles, expected = swapping.save_small(1)
        assert swapping.totals == {"packed_groups": 0, "out": SMALL, "in": 0}
        swapping.assert_exact(handles, expected)


def test_a_carrier_lives_as_long_as_its_last_member(swapping: Swapping) -> None:
    handles, expected = swapping.save_small(10)
    swapping.executor.end_step(completed=False)
    group = handles[0].claim.saved.form.group
    assert isinstance(group, PackedGroup)
    del handles[:9]
    assert group.members_left == 1
    assert swapping.pool.stats().num_live == 2  # the large one's and the group's
    swapping.assert_exact(handles, expected[9:])
    handles.clear()
    assert group.packed.state is State.RETIRED


def test_a_written_or_dropped_tensor_is_left_behind(swapping: Swapping) -> None:
    handles, expected = swapping.save_small(4)
    written = torch.randn(SMALL // 4)
    handle = swapping.save(written)
    written.add_(1)
    dropped = swapping.save(torch.randn(SMALL // 4))
    swapping.next_op()
    del dropped
    more, more_expected = swapping.save_small(8)
    assert swapping.totals["packed_groups"] == 1
    assert swapping.totals["out"] == MIB + 12 * SMALL
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        swapping.executor.use(handle)
    swapping.assert_exact(handles + more, expected + more_expected)


def test_a_member_that_lives_on_is_used_itself(swapping: Swapping) -> None:
    held = torch.randn(SMALL // 4)
    handle = swapping.save(held)
    _others, _ = swapping.save_small(10)
    assert swapping.executor.use(handle).untyped_storage() is held.untyped_storage()
    assert swapping.totals["in"] == 0


def test_without_memory_for_a_carrier_they_stay(swapping: Swapping, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as full:
        full.setattr(SimStream, "alloc", refusing(torch.OutOfMemoryError, "no room"))
        handles, expected = swapping.save_small(10)
    assert places(handles) == [State.ON_DEVICE] * 10
    swapping.assert_exact(handles, expected)


def test_a_refused_kernel_leaves_everything_as_it_was(swapping: Swapping, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = [torch.randn(SMALL // 4) for _ in range(10)]
    expected = [t.clone() for t in saved]
    handles = [swapping.save(t) for t in saved]
    del saved
    with monkeypatch.context() as broken:
        broken.setattr(SimStream, "pack", refusing(RuntimeError, "no kernel"))
        with pytest.raises(RuntimeError, match="no kernel"):
            swapping.next_op()
    swapping.assert_exact(handles, expected)


def test_a_full_pool_keeps_the_carrier_on_the_device(swapping: Swapping) -> None:
    hog = swapping.pool.allocate(swapping.pool.limit_bytes - swapping.pool.stats().live_bytes)
    handles, expected = swapping.save_small(10)
    assert swapping.executor.metrics.totals.fallbacks == 1
    swapping.assert_exact(handles, expected)
    hog.release()


def test_the_next_steps_prefetch_the_carrier(slow: cm.SimDevice) -> None:
    with slow.compute():
        swapping = Swapping(slow, limits=Limits(ahead_bytes=MIB))
        large, whole = swapping.keep_the_link_busy(), torch.randn(MIB // 8)
        handles, expected = swapping.save_small(10)
        after = swapping.save(whole.clone())
        swapping.next_op()
        swapping.executor.end_step(completed=False)
        assert torch.equal(swapping.executor.use(after), whole)  # saved last, used first: the group comes next
        group = handles[0].claim.saved.form.group
        assert group is not None and group.packed.state is State.SWAPPING_IN
        swapping.assert_exact(handles[::-1], expected[::-1])
        del handles, large, after
        swapping.assert_nothing_left()


def packed_and_used(device: cm.SimDevice, *, packed_on_side: bool, used_on_side: bool) -> None:
    """On one stream or two, under the race detector: a missing wait raises."""
    side = device.new_compute_stream("side")
    with device.compute():
        swapping = Swapping(device)
        large = swapping.keep_the_link_busy()
        saved = [torch.randn(SMALL // 4) for _ in range(10)]
        expected = [t.clone() for t in saved]
        handles = [swapping.save(t) for t in saved]
        del saved
        with device.stream(side) if packed_on_side else nullcontext():
            swapping.next_op()
        again = [torch.randn(SMALL // 4) for _ in range(10)]  # the members' memory, perhaps
        if used_on_side:
            side.wait(device.current_stream().record())
            with device.stream(side):
                swapping.assert_exact(handles[:5], expected[:5])
        swapping.assert_exact(handles, expected)
        del again, handles, large
        swapping.assert_nothing_left()


@pytest.mark.parametrize("used_on_side", [False, True])
@pytest.mark.parametrize("packed_on_side", [False, True])
def test_streams_are_ordered_around_a_carrier(packed_on_side: bool, used_on_side: bool, slow: cm.SimDevice) -> None:
    packed_and_used(slow, packed_on_side=packed_on_side, used_on_side=used_on_side)


@pytest.mark.parametrize("left_out", [1, 2], ids=["before it", "after it"])
def test_without_the_streams_meeting_a_carrier_is_a_race(
    left_out: int, slow: cm.SimDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    init, join_all = PackedGroup.__init__, ComputeStreams.join_all

    def counting(self: PackedGroup, *args: object, **kwargs: object) -> None:
        calls = iter(range(1, 100))

        def meets_but_once(streams: ComputeStreams, home: Stream) -> None:
            number = next(calls)  # of the joins after it one would do
            if number < left_out or (left_out == 1 and number > 1):
                join_all(streams, home)

        with monkeypatch.context() as during:
            during.setattr(ComputeStreams, "join_all", meets_but_once)
            init(self, *args, **kwargs)  # type: ignore[arg-type]  # handed on as they came

    monkeypatch.setattr(PackedGroup, "__init__", counting)
    with pytest.raises(SimRaceError):
        packed_and_used(slow, packed_on_side=True, used_on_side=False)


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["save", "save", "save", "op", "use", "drop", "squeeze", "wait"]), st.integers(1, LARGEST)),
    max_size=60,
)


def live(swapping: Swapping, alive: list[tuple[SwappedView, Tensor]], what: str, number: int) -> None:
    """Apply one event to small storages."""
    if what == "save":
        t = torch.randint(0, 256, (number,), dtype=torch.uint8)
        alive.append((swapping.save(t), t.clone()))
    elif what == "op":
        swapping.next_op()
    elif what == "squeeze":
        swapping.executor.budget._reclaim_until(lambda: False, ())
    elif what == "wait":
        swapping.device.synchronize()
    elif alive and what == "use":
        handle, expected = alive[number % len(alive)]
        assert torch.equal(swapping.executor.use(handle), expected)
    elif alive:
        del alive[number % len(alive)]


@pytest.mark.parametrize("ahead_bytes", [0, None])
@settings(max_examples=40)
@given(ACTIONS)
def test_any_life_of_small_storages_is_exact_and_leaves_nothing(
    ahead_bytes: int | None, actions: list[tuple[str, int]]
) -> None:
    device = cm.SimDevice(SLOW_LINK)
    with device.compute():
        limits = Limits() if ahead_bytes is None else Limits(ahead_bytes=ahead_bytes)
        swapping = Swapping(device, limits=limits)
        alive: list[tuple[SwappedView, Tensor]] = []
        for what, number in actions:
            live(swapping, alive, what, number)
        for handle, expected in alive:
            assert torch.equal(swapping.executor.use(handle), expected)
        handle = None  # type: ignore[assignment]  # the loop's last one
        alive.clear()
        swapping.assert_nothing_left()


def test_a_group_ends_though_its_members_are_saved_again(swapping: Swapping) -> None:
    """A double backward saves its members again: the copy of each begins again, and the group has one member less."""
    handles, expected = swapping.save_small(4)
    used = [swapping.executor.use(handle) for handle in handles]
    again = [swapping.save(t) for t in used]
    assert not swapping.executor.registry.packed_groups
    del used, handles
    swapping.assert_exact(again, expected)


def test_room_for_what_is_unpacked_is_made_in_blocks_of_the_allocator(
    slow: cm.SimDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storages of 64 bytes take 512 each: the room made for them is no less than that."""
    swapping = Swapping(slow, limits=Limits(hbm_budget_bytes=8 * MIB))
    asked, taken = list[int](), list[int]()
    make_room, unpack = Budget.make_room, PackedGroup.unpack

    def asks(budget: Budget, nbytes: int, **how: Any) -> None:
        asked.append(nbytes)
        make_room(budget, nbytes, **how)

    def takes(group: PackedGroup, *members: Any) -> int:
        before = slow.allocated_bytes()
        count = unpack(group, *members)
        taken.append(slow.allocated_bytes() - before)
        assert taken[-1] <= asked[-1]
        return count

    monkeypatch.setattr(Budget, "make_room", asks)
    monkeypatch.setattr(PackedGroup, "unpack", takes)
    busy = swapping.keep_the_link_busy()
    handles, expected = swapping.save_small(40, nbytes=64)
    swapping.executor.outs.pack_small()
    swapping.next_op()
    swapping.executor.budget.reclaim_pending()
    swapping.assert_exact(handles, expected)
    assert sum(taken) >= 40 * 512 and swapping.totals["packed_groups"] >= 1
    del busy, handles
