"""Storage that moves in part, at every point of its life: its head stays, both parts are whole again, and no memory leaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.plan.swap_plan import Action, SwapPlan
from chameleon_mm.plan.timing import LinkCost
from chameleon_mm.plan.trace import Trace
from chameleon_mm.swap.calling_thread import ComputeStreams
from chameleon_mm.swap.copy_queue import CopyQueue, Move
from chameleon_mm.swap.forms import PartialForm
from chameleon_mm.swap.handles import SavedBytes
from chameleon_mm.swap.host_copy import State, SwapContext
from chameleon_mm.swap.metrics import Metrics
from chameleon_mm.swap.saved_storage import SavedStorage
from tests._programs import deep
from tests._random_models import adaptation_of, far_ahead, planning, seeds, train
from tests._traces import plan_of, random_plan
from tests.observed import SimLifetimeError, SimRaceError, poison

pytestmark = pytest.mark.usefixtures("no_gc")

broken_on_purpose = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""A mutant also breaks code that runs when its storage is dropped, where an error can only be reported."""

NBYTES, LAST = 64 << 10, 40 << 10
HEAD = NBYTES - LAST


class Life:
    """Saved storage on its way, in a device of its own."""

    def __init__(self, *, hbm_bytes: int | None = None) -> None:
        self.device = cm.SimDevice("h200", hbm_bytes=hbm_bytes)
        self.pool = cm.PinnedPool(1 << 20, device=self.device)
        self.streams = ComputeStreams(self.device)
        self.compute = self.streams.current()
        self.bytes_before = self.device.allocated_bytes()
        out, back = CopyQueue(self.device, "d2h", out=True), CopyQueue(self.device, "h2d", out=False)
        context = SwapContext(self.pool, out, back, Metrics(), self.streams)
        with self.device.compute():
            t = torch.randn(NBYTES // 4)
        self.expected = t.clone()
        self.saved = SavedStorage(t, SavedBytes(t), self.compute, context, epoch=0, index=0)
        del t

    def go(self, *places: str) -> None:
        for place in places:
            getattr(self, place)()

    def leave(self) -> None:
        self.saved.swap_out(PartialForm(HEAD, self.streams))

    def reclaim(self) -> None:
        self.saved.reclaim()

    def arrive(self) -> None:
        self.saved.swap_in(self.compute)

    def use(self) -> None:
        assert torch.equal(self.got(), self.expected)

    def got(self) -> Tensor:
        storage = self.saved.arrive(self.compute)
        with self.device.compute():
            return torch.empty(0).set_(storage, 0, (NBYTES // 4,), (1,)) + 0

    def drop(self) -> None:
        self.saved.drop_restored()

    def assert_nothing_left(self) -> None:
        self.device.synchronize()
        assert self.saved.state in (State.RETIRED, State.SWAPPING_OUT)
        if self.saved.state is State.SWAPPING_OUT:  # its copy still reads it: the reclaim queue ends it
            self.saved.reclaim()
        assert self.saved.state is State.RETIRED
        assert self.device.allocated_bytes() == self.bytes_before
        assert self.pool.stats().live_bytes == 0


WAYS: dict[str, tuple[str, ...]] = {
    "leaving": ("leave",),
    "on the host": ("leave", "reclaim"),
    "arriving": ("leave", "reclaim", "arrive"),
    "restored": ("leave", "reclaim", "arrive", "use"),
    "dropped while arriving": ("leave", "reclaim", "arrive", "drop"),
    "dropped while restored": ("leave", "reclaim", "arrive", "use", "drop"),
    "back again": ("leave", "reclaim", "arrive", "drop", "arrive", "use", "drop", "arrive", "use"),
}


@pytest.mark.ci
@pytest.mark.parametrize("way", WAYS)
def test_it_is_whole_again_from_everywhere(way: str) -> None:
    life = Life()
    life.go(*WAYS[way])
    if life.saved.state is State.SWAPPING_OUT:
        life.reclaim()
    if life.saved.state is State.ON_HOST:
        life.arrive()
    life.use()
    life.saved.retire()
    life.assert_nothing_left()


@pytest.mark.ci
@pytest.mark.parametrize("way", WAYS)
def test_it_ends_anywhere_with_nothing_left(way: str) -> None:
    life = Life()
    life.go(*WAYS[way])
    life.saved.retire()
    life.assert_nothing_left()


def test_what_it_takes_at_each_place() -> None:
    life = Life()
    device = life.device
    assert device.allocated_bytes() == NBYTES
    life.leave()
    assert device.allocated_bytes() == NBYTES
    assert life.saved.transfer_bytes == LAST
    device.reset_peaks()
    life.reclaim()
    assert device.allocated_bytes() == life.saved.form.device_bytes == HEAD
    assert device.peak_allocated_bytes() == NBYTES + HEAD  # a moment in which both are there
    device.reset_peaks()
    life.arrive()
    assert device.allocated_bytes() == life.saved.nbytes == NBYTES
    assert device.peak_allocated_bytes() == NBYTES + HEAD
    life.use()
    life.saved.drop_used()
    assert life.saved.state is State.RESTORED  # its head is nowhere else
    assert device.allocated_bytes() == NBYTES
    life.drop()
    assert device.allocated_bytes() == HEAD


def test_without_memory_for_the_head_all_of_it_stays() -> None:
    life = Life(hbm_bytes=NBYTES + HEAD - 1024)
    life.go("leave", "reclaim")
    assert life.saved.state is State.ON_DEVICE
    assert life.saved.form.device_bytes == 0
    assert life.pool.stats().live_bytes == 0
    assert life.saved.device is not None
    life.saved.retire()
    life.assert_nothing_left()


def test_without_memory_for_the_head_it_is_not_dropped_under_pressure() -> None:
    life = Life(hbm_bytes=2 * NBYTES + HEAD)
    life.go("leave", "reclaim", "arrive", "use")
    others = life.compute.alloc(NBYTES + HEAD)
    with pytest.raises(torch.OutOfMemoryError):
        life.drop()
    assert life.saved.state is State.RESTORED
    life.compute.free(others)
    del others
    life.go("use", "drop", "arrive", "use")
    life.saved.retire()
    life.assert_nothing_left()


# --- two streams


def used_on_another_stream() -> None:
    """Its head is kept on the stream that saved it and put back on another, which knows nothing of the first one's work."""
    life = Life()
    other = life.device.new_compute_stream("other")
    with life.device.compute():
        with life.device.stream(other):
            life.streams.current()  # seen by a hook
        life.go("leave", "reclaim")
        with life.device.stream(other):
            storage = life.saved.swap_in(other)
            assert life.saved.arrive(other) is storage
            got = torch.empty(0).set_(storage, 0, (NBYTES // 4,), (1,)) + 0
            del storage
        reused = life.compute.alloc(HEAD)  # the block that the head was in
        life.device.synchronize()
        assert torch.equal(got, life.expected)
        del reused, got
    life.saved.retire()


def test_two_streams() -> None:
    used_on_another_stream()


@broken_on_purpose
def test_without_the_streams_meeting_the_race_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of the copies within device memory, each way."""

    class Strangers(ComputeStreams):
        def join_all(self, alloc_stream: Any) -> None:
            pass

    init = PartialForm.__init__
    monkeypatch.setattr(PartialForm, "__init__", lambda self, nbytes, streams: init(self, nbytes, Strangers(streams._device)))
    with pytest.raises(SimRaceError, match="not ordered after"):
        used_on_another_stream()


# --- broken on purpose


def one_way_there_and_back() -> None:
    life = Life()
    life.go("leave", "reclaim", "arrive", "use")
    life.saved.retire()
    life.assert_nothing_left()


def forgets_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartialForm, "put_back", lambda self, storage, compute: self.drop())


def keeps_it_after_the_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the memory is given back first, so the copy reads the next owner's bytes."""
    keep = PartialForm.keep

    def late(self: PartialForm, storage: torch.UntypedStorage, alloc_stream: Any) -> None:
        alloc_stream.free(torch.empty(0, dtype=torch.uint8).set_(storage))
        poison(storage)
        keep(self, storage, alloc_stream)

    monkeypatch.setattr(PartialForm, "keep", late)


def sends_the_first_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = CopyQueue.submit

    def first_bytes(self: CopyQueue, move: Move, **how: Any) -> Move:
        move.start = 0 if self.stream.name == "d2h" else move.start
        return submit(self, move, **how)

    monkeypatch.setattr(CopyQueue, "submit", first_bytes)


def leaks_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[object] = []
    put_back = PartialForm.put_back

    def leaking(self: PartialForm, storage: torch.UntypedStorage, compute: Any) -> None:
        held.append(self._buffer)
        put_back(self, storage, compute)

    monkeypatch.setattr(PartialForm, "put_back", leaking)


MUTANTS = [forgets_the_head, keeps_it_after_the_drop, sends_the_first_bytes, leaks_the_head]


@broken_on_purpose
@pytest.mark.parametrize("mutant", MUTANTS)
def test_broken_on_purpose_it_goes_red(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises((SimRaceError, SimLifetimeError, AssertionError)):
        one_way_there_and_back()


# --- in training


def in_part(rng: Random) -> Callable[..., Sequence[SwapPlan]]:
    """Plans in which every storage moves in part."""

    def plans(trace: Trace, hbm_budget: int, host_budget: int, link: LinkCost, **_: Any) -> Sequence[SwapPlan]:
        def some(action: Action) -> int:
            return rng.randint(1, max(1, int(trace.tensor_bytes[action.tensor]) - 1))

        plan = random_plan(rng, trace, share=1.0)
        return [plan_of(trace, [replace(action, nbytes=some(action)) for action in plan.actions])]

    return plans


@pytest.mark.parametrize("seed", seeds(1, of=range(3)))
def test_training_in_which_all_move_in_part_is_exact(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chameleon_mm.follow.adaptation.candidate_plans", in_part(Random(seed)))
    device = far_ahead()
    pool = cm.PinnedPool("64MiB", device=device)
    expected, parameters = train(seed, far_ahead())
    got, swapped = train(seed, device, planning(device, pool=pool))
    assert [step.loss for step in got] == [step.loss for step in expected]
    assert all(torch.equal(a, b) for a, b in zip(swapped, parameters, strict=True))
    assert pool.stats().live_bytes == 0


def test_a_graph_kept_for_a_second_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chameleon_mm.follow.adaptation.candidate_plans", in_part(Random(1)))
    device = far_ahead()
    pool = cm.PinnedPool("64MiB", device=device)
    executor = planning(device, pool=pool)
    with device.compute():
        for _ in range(3):
            x = torch.randn(64, 64, requires_grad=True)
            expected = torch.autograd.grad(deep(x).sum(), x)[0]
            executor.begin_step(timed=True)
            with torch.autograd.graph.saved_tensors_hooks(executor.save, executor.use):
                out = deep(x).sum()
            for retain in (True, True, False):
                assert torch.equal(torch.autograd.grad(out, x, retain_graph=retain)[0], expected)
            del out
            executor.end_step(completed=True)
    assert adaptation_of(executor).plan_cache_hits == 2
    assert pool.stats().live_bytes == 0
