"""Host blocks and device work: a block's bytes are used again only after the event that it was released with.

Every scenario swaps bytes over blocks that are used again while copies may be outstanding, and checks what arrived. With the
pool as it is they pass, on the simulator and on CUDA. With a pool that forgets one thing, the simulator shows it: a
`SimRaceError`, or wrong bytes, every time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # the first dispatch mode imports it, and cycles left by that import hold its callers
from torch import Tensor

from chameleon_mm.api.save_on_cpu import save_on_cpu
from chameleon_mm.bench._stand_in import is_stand_in
from chameleon_mm.device.protocols import Device, Event, Stream
from chameleon_mm.device.sim import SimDevice
from chameleon_mm.pool.block import PinnedBlock, Ticket
from chameleon_mm.pool.chunks import LateEvent, PendingRanges
from chameleon_mm.pool.pool import PinnedPool
from chameleon_mm.units import MIB
from tests._fakes import BrokenStream, ManualEvent, RecordingStream
from tests.observed import SimRaceError

SIZE = 1 * MIB


class Machine:
    """A pool of two blocks of `SIZE` on a device, a stream per direction, and device memory with a known content."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.pool = PinnedPool(2 * SIZE, device)
        self.h2d = device.new_stream("h2d")
        self.d2h = device.new_stream("d2h")
        self.other = device.new_stream("d2h")
        self.held: list[Tensor] = []  # memory that copies may use until the machine goes

    def hbm(self, value: int, nbytes: int = SIZE) -> Tensor:
        """Device memory full of `value`, as every stream sees it from now on."""
        compute = self.device.current_stream()
        with self.device.compute():
            memory = compute.alloc(nbytes)
            memory.fill_(value)
        self.held.append(memory)
        ready = compute.record()
        for stream in (self.h2d, self.d2h, self.other):
            stream.wait(ready)
        return memory

    def outbound(self, nbytes: int, value: int) -> PinnedBlock:
        """A block full of `value`, complete on the host."""
        block = self.pool.allocate(nbytes)
        block.numpy((nbytes,), np.uint8)[:] = value
        return block

    def load(self, block: PinnedBlock, stream: Stream) -> tuple[Tensor, Event]:
        """The block's bytes into fresh device memory, still under way when this returns; and when they will be there."""
        target = self.hbm(0, block.nbytes)
        stream.copy(target, block.buffer)
        return target, stream.record()

    def released(self) -> tuple[Tensor, Event]:
        """Target of a copy of ones, under way out of a block of twice `SIZE`, and the event the block was released with."""
        block = self.outbound(2 * SIZE, 1)
        target, event = self.load(block, self.h2d)
        block.release(after=event)
        return target, event

    def check_ones_and(self, target: Tensor, block: PinnedBlock) -> None:
        """Ones have arrived in `target`, and twos in `block`."""
        self.check(target, 1)
        self.check_host(block, 2)

    def check(self, memory: Tensor, value: int) -> None:
        self.device.synchronize()
        assert torch.equal(memory.cpu(), torch.full((memory.numel(),), value, dtype=torch.uint8))

    def check_host(self, block: PinnedBlock, value: int) -> None:
        self.device.synchronize()
        assert bool((block.numpy((block.nbytes,), np.uint8) == value).all())


def reused(m: Machine) -> None:
    """H2D from a block, then D2H into the next block over the same bytes."""
    source, (target, _) = m.hbm(2), m.released()
    second = m.pool.allocate(SIZE, stream=m.d2h)
    m.d2h.copy(second.buffer, source)
    m.check_ones_and(target, second)


def reused_and_waited_for_later(m: Machine) -> None:
    """Variant in which the block is allocated before the stream that will use it is known."""
    source, (target, event) = m.hbm(2), m.released()
    second = m.pool.allocate(SIZE)
    assert second.pending_events == (event,) or event.query()
    second.wait_on(m.d2h)
    assert second.pending_events == ()
    m.d2h.copy(second.buffer, source)
    m.check_ones_and(target, second)


def reused_after_a_late_event(m: Machine) -> None:
    """Variant of `reused` in which the first owner's last use is an event that is recorded only on request."""
    source, first = m.hbm(2), m.outbound(2 * SIZE, 1)
    target, event = m.load(first, m.h2d)
    first.release(after=LateEvent(lambda: (event,)))
    second = m.pool.allocate(SIZE)
    for pending in second.pending_events:
        m.d2h.wait(pending)  # as a queue of copies does: a stream takes real events alone
    m.d2h.copy(second.buffer, source)
    m.check_ones_and(target, second)


def split(m: Machine) -> None:
    """Split a released block in two. Both halves wait for its event."""
    source, (target, _) = m.hbm(2), m.released()
    halves = [m.pool.allocate(SIZE, stream=stream) for stream in (m.d2h, m.other)]
    for half, stream in zip(halves, (m.d2h, m.other), strict=True):
        stream.copy(half.buffer, source)
    m.check(target, 1)
    for half in halves:
        m.check_host(half, 2)


def coalesced(m: Machine) -> None:
    """Merge two released blocks into one, which waits for both events, each of a stream of its own."""
    source = m.hbm(3, 2 * SIZE)
    first, second = m.outbound(SIZE, 1), m.outbound(SIZE, 2)
    loaded = [m.load(first, m.h2d), m.load(second, m.other)]
    for block, (_, event) in zip((first, second), loaded, strict=True):
        block.release(after=event)
    both = m.pool.allocate(2 * SIZE, stream=m.d2h)
    m.d2h.copy(both.buffer, source)
    for value, (target, _) in enumerate(loaded, start=1):
        m.check(target, value)
    m.check_host(both, 3)


def passed_on_unused(m: Machine) -> None:
    """An owner in between, which waited and then never used the block, hands the event on."""
    source, (target, _) = m.hbm(2), m.released()
    between = m.pool.allocate(2 * SIZE, stream=m.other)
    between.release()  # a block that is dropped waits for all there is
    second = m.pool.allocate(SIZE, stream=m.d2h)
    m.d2h.copy(second.buffer, source)
    m.check_ones_and(target, second)


def passed_on_unmet(m: Machine) -> None:
    """An owner in between, which never waited for anything, hands the event on together with its own."""
    source, (target, _) = m.hbm(2), m.released()
    between = m.pool.allocate(2 * SIZE)
    between.release(after=m.other.record())
    second = m.pool.allocate(SIZE, stream=m.d2h)
    m.d2h.copy(second.buffer, source)
    m.check_ones_and(target, second)


def two_first_streams(m: Machine) -> None:
    """Two streams use the halves of one block; each has to wait."""
    source, (target, _) = m.hbm(2), m.released()
    second = m.pool.allocate(2 * SIZE, stream=m.d2h)
    second.wait_on(m.other)
    m.d2h.copy(second.buffer[:SIZE], source)
    m.other.copy(second.buffer[SIZE:], source)
    m.check_ones_and(target, second)


def touched_by_the_host(m: Machine) -> None:
    """The host writes into a block that the device may still be reading for its earlier owner."""
    target, _ = m.released()
    second = m.pool.allocate(SIZE)
    second.tensor((SIZE,), torch.uint8).fill_(2)
    m.check_ones_and(target, second)


def touched_by_the_host_after_a_streams_wait(m: Machine) -> None:
    """A stream's wait orders the stream, not the host."""
    target, _ = m.released()
    second = m.pool.allocate(SIZE, stream=m.d2h)
    second.numpy((SIZE,), np.uint8)[:] = 2
    m.check_ones_and(target, second)


def closed(m: Machine) -> None:
    """Free the memory while a copy may still read it."""
    target, _ = m.released()
    m.pool.close()
    m.check(target, 1)


Scenario = Callable[[Machine], None]
SCENARIOS: list[Scenario] = [
    reused,
    reused_and_waited_for_later,
    reused_after_a_late_event,
    split,
    coalesced,
    passed_on_unused,
    passed_on_unmet,
    two_first_streams,
    touched_by_the_host,
    touched_by_the_host_after_a_streams_wait,
    closed,
]


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_bytes_arrive_whoever_used_the_block_before(device: Device, scenario: Scenario) -> None:
    machine = Machine(device)
    scenario(machine)
    assert machine.pool.stats().num_live == 0
    machine.pool.close()


# --- each rule removed in turn


def forget_the_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PendingRanges, "add", lambda self, start, end, events: None)


def forget_the_rest_of_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    take = PendingRanges.take

    def faulty(self: PendingRanges, start: int, end: int) -> tuple[Event, ...]:
        events = take(self, start, end)
        take(self, 0, 1 << 62)
        return events

    monkeypatch.setattr(PendingRanges, "take", faulty)


def take_the_first_event_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    take = PendingRanges.take
    monkeypatch.setattr(PendingRanges, "take", lambda self, start, end: take(self, start, end)[:1])


def never_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(self: PinnedBlock, stream: Stream) -> None:
        self._met, self.pending_events = self._met + self.pending_events, ()

    monkeypatch.setattr(PinnedBlock, "wait_on", faulty)


def forget_late_events(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(self: PinnedBlock) -> None:
        self.pending_events = tuple(event for event in self.pending_events if not isinstance(event, LateEvent))

    monkeypatch.setattr(PinnedBlock, "forget_complete", faulty)


def wait_on_one_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_on = PinnedBlock.wait_on

    def faulty(self: PinnedBlock, stream: Stream) -> None:
        if self.pending_events:
            wait_on(self, stream)

    monkeypatch.setattr(PinnedBlock, "wait_on", faulty)


def forget(*names: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A mutant whose blocks forget some events when they return."""

    def apply(monkeypatch: pytest.MonkeyPatch) -> None:
        really_return = PinnedBlock._return

        def faulty(self: PinnedBlock, ticket: Ticket, events: tuple[Event, ...]) -> None:
            forgotten = {id(event) for name in names for event in getattr(self, name)}
            really_return(self, ticket, tuple(event for event in events if id(event) not in forgotten))

        monkeypatch.setattr(PinnedBlock, "_return", faulty)

    return apply


def let_the_host_touch_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PinnedBlock, "synchronize", lambda self: None)


def let_the_host_skip_what_a_stream_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(self: PinnedBlock) -> None:
        for event in self.pending_events:
            event.synchronize()
        self.pending_events = ()

    monkeypatch.setattr(PinnedBlock, "synchronize", faulty)


def free_chunks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PendingRanges, "synchronize", lambda self: None)


@pytest.mark.parametrize(
    ("mutant", "scenario"),
    [
        (forget_the_event, reused),
        (forget_the_event, split),
        (forget_the_rest_of_a_range, split),
        (take_the_first_event_alone, coalesced),
        (never_wait, reused),
        (never_wait, reused_and_waited_for_later),
        (forget_late_events, reused_after_a_late_event),
        (wait_on_one_stream_alone, two_first_streams),
        (forget("_met"), passed_on_unused),
        (forget("pending_events"), passed_on_unmet),
        (let_the_host_touch_at_once, touched_by_the_host),
        (let_the_host_skip_what_a_stream_waited_for, touched_by_the_host_after_a_streams_wait),
        (free_chunks_at_once, closed),
    ],
    ids=lambda function: function.__name__,
)
def test_a_pool_that_forgets_one_rule_is_caught(
    sim: SimDevice, monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None], scenario: Scenario
) -> None:
    mutant(monkeypatch)
    host_side = scenario in (touched_by_the_host, touched_by_the_host_after_a_streams_wait)
    expected = AssertionError if host_side else SimRaceError  # the simulator sees the device's accesses, not the host's
    machine = Machine(sim)
    with pytest.raises(expected):
        scenario(machine)
    sim.synchronize()  # ends the work that the mutant left, before the memory goes


# --- what a block knows of its events


@pytest.fixture
def pool() -> PinnedPool:
    return PinnedPool(8 * 4096, SimDevice())


def test_complete_events_are_dropped_and_the_host_never_waits_in_allocate(pool: PinnedPool) -> None:
    done, open_ = ManualEvent(), ManualEvent()
    first, second = pool.allocate(4 * 4096), pool.allocate(4 * 4096)
    first.release(after=done)
    second.release(after=open_)
    done.complete = True
    stream: Any = RecordingStream()
    block = pool.allocate(8 * 4096, stream=stream)
    assert (stream.waited, block.pending_events, open_.complete) == ([open_], (), False)


def test_a_stream_that_cannot_wait_leaves_the_block_to_return_itself_with_its_events(pool: PinnedPool) -> None:
    event, broken = ManualEvent(), BrokenStream()
    pool.allocate(8 * 4096).release(after=event)
    stream: Any = broken

    def fails() -> None:
        pool.allocate(4096, stream=stream)

    with pytest.raises(RuntimeError, match="gone"):
        fails()
    assert pool.stats().num_live == 0
    assert pool.allocate(8 * 4096).pending_events == (event,)


def test_a_release_event_stands_for_what_its_stream_waited_for(pool: PinnedPool) -> None:
    first, second = ManualEvent(), ManualEvent()
    stream: Any = RecordingStream()
    pool.allocate(4096).release(after=first)
    pool.allocate(4096, stream=stream).release(after=second)
    assert (stream.waited, pool.allocate(4096).pending_events) == ([first], (second,))


# --- the ranges themselves


def test_random_ranges_agree_with_one_entry_per_byte() -> None:
    generator = np.random.default_rng(0)
    ranges, events = PendingRanges(), [ManualEvent() for _ in range(5)]
    per_byte: dict[int, set[ManualEvent]] = {}
    for _ in range(3000):
        start, end = sorted(int(n) for n in generator.integers(0, 60, 2))
        if generator.random() < 0.5:
            if start < end and not per_byte.keys() & set(range(start, end)):
                chosen = tuple(events[int(n)] for n in sorted({int(n) for n in generator.integers(0, 5, 2)}))
                ranges.add(start, end, chosen)
                per_byte.update((byte, set(chosen)) for byte in range(start, end))
        elif start < end:
            expected = set().union(*(per_byte.pop(byte, set()) for byte in range(start, end)))
            taken = ranges.take(start, end)
            assert (set(taken), len(taken)) == (expected, len(expected))
    assert set(ranges) == set().union(*per_byte.values())


def test_complete_ranges_do_not_pile_up() -> None:
    ranges = PendingRanges()
    for n in range(10_000):
        event = ManualEvent()
        event.complete = n % 100 != 0
        ranges.add(2 * n, 2 * n + 1, (event,))
        assert len(ranges.starts) <= 2 * (n // 100 + 1) + 64
    assert not ranges.drop_complete()
    assert len(ranges.starts) == 100
    ranges.synchronize()
    assert (len(ranges.starts), ranges.drop_complete()) == (0, True)


def test_a_late_event_is_a_real_one_once_the_bytes_are_given_out_again(pool: PinnedPool) -> None:
    done, pending = ManualEvent(), ManualEvent()
    done.complete = True
    pool.allocate(4096).release(after=LateEvent(lambda: (done, pending)))
    assert pool.allocate(4096).pending_events == (pending,)


def test_saved_tensors_go_where_batches_were_that_the_device_may_still_be_reading(device: Device) -> None:
    """Batches are copied from tensors of the pool that the session has, and dropped before the copy is known to be done."""
    torch.manual_seed(0)
    batches, weight = [torch.randn(512, 512) for _ in range(3)], torch.randn(512, 512, requires_grad=True)
    plain = [torch.autograd.grad((batch @ weight).sin().sin().sum(), weight)[0] for batch in batches]
    with PinnedPool("16MiB", device) as pool:
        with device.compute():
            moved = weight.detach().to(device.torch_device).requires_grad_()
        for batch, expected in zip(batches, plain, strict=True):
            with save_on_cpu(device=device, pool=pool, min_bytes=1), device.compute():
                staged = pool.empty(batch.shape, batch.dtype)
                staged.copy_(batch)
                x = staged.to(device.torch_device, non_blocking=True)
                del staged
                (x @ moved).sin().sin().sum().backward()
            device.synchronize()
            assert moved.grad is not None
            if device.simulated or is_stand_in(device.name):  # a GPU's own kernels round otherwise
                assert torch.equal(moved.grad.cpu(), expected)
            moved.grad = None
            del x
