"""Our own queue per direction: pieces, what is outstanding, who may overtake, taking back, cutting short, letting go."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device.protocols import Device, Event, Stream
from chameleon_mm.swap.copy_queue import CopyQueue, Move
from chameleon_mm.units import KIB, MIB

PIECE = 1000
"""A piece in these tests: small, and no power of two."""


# --- a stream whose copies end when the test says so


class HeldEvent:
    """Complete once as many copies of its stream have ended as were issued before it."""

    def __init__(self, stream: HeldStream, *, timed: bool) -> None:
        self.stream = stream
        self.copies_before = len(stream.log_of("copy"))
        self.timed = timed

    def query(self) -> bool:
        return self.stream.ended >= self.copies_before

    def synchronize(self) -> None:
        raise AssertionError("a transfer never makes the host wait")

    def elapsed_us(self, since: Event) -> float:
        raise AssertionError("a transfer reads no clock")


class HeldStream:
    """Stream that copies at once; its log has the calls in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ended = 0
        self.log: list[tuple[str, object]] = []
        self.speculative: set[bool] = set()

    def log_of(self, what: str) -> list[object]:
        return [about for kind, about in self.log if kind == what]

    def copy_storage(
        self, storage: torch.UntypedStorage, host: Tensor, *, start: int = 0, part: slice | None = None, out: bool
    ) -> None:
        host = host if part is None else host[part]
        self.log.append(("copy", host.numel()))
        self.speculative.add(out)
        on_device = torch.empty(0, dtype=torch.uint8).set_(storage)[start : start + host.numel()]
        (host if out else on_device).copy_(on_device if out else host)

    def record(self, *, timed: bool = False) -> HeldEvent:
        return HeldEvent(self, timed=timed)

    def wait(self, event: Event) -> None:
        self.log.append(("wait", event))


class Lanes:
    """As much of a device as a queue needs: something that makes streams."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        self.new_stream = make

    def synchronize(self) -> None:
        raise AssertionError("a transfer waits for the device only after a copy was refused")

    def queues(self, *, outstanding: int = 2) -> Queues:
        return queues_of(cast(Device, self), outstanding=outstanding)


class Queues(NamedTuple):
    """A queue of each direction."""

    out: CopyQueue
    back: CopyQueue

    def hand_over(self) -> None:
        self.out.hand_over()
        self.back.hand_over()


def queues_of(device: Device, *, outstanding: int = 2) -> Queues:
    out = CopyQueue(device, "d2h", out=True, piece_bytes=PIECE, outstanding=outstanding)
    return Queues(out, CopyQueue(device, "h2d", out=False, piece_bytes=PIECE, outstanding=outstanding))


@dataclass
class Held:
    """Queues over held streams, and those streams."""

    queues: Queues
    out: HeldStream
    back: HeldStream

    def submit(self, nbytes: int, *after: Event, timed: bool = False) -> tuple[Move, Tensor, Tensor]:
        src, dst = random_bytes(nbytes), torch.zeros(nbytes, dtype=torch.uint8)
        return self.queues.out.submit(Move(src.untyped_storage(), dst, after, timed=timed)), dst, src


def held(*, outstanding: int = 2) -> Held:
    streams = {name: HeldStream(name) for name in ("d2h", "h2d")}
    return Held(Lanes(streams.__getitem__).queues(outstanding=outstanding), streams["d2h"], streams["h2d"])


def is_done(move: Move) -> bool:
    """True if all of the move was handed over."""
    return move.done is not None


def is_complete(move: Move) -> bool:
    """True if the device has finished the move."""
    assert move.done is not None
    return move.done.query()


def random_bytes(nbytes: int) -> Tensor:
    return torch.randint(1, 256, (nbytes,), dtype=torch.uint8)  # no zeros: an untouched destination is all zeros


def test_at_most_two_pieces_are_handed_over_until_one_ends() -> None:
    lane = held()
    move, dst, src = lane.submit(3 * PIECE + 1)
    assert lane.out.log_of("copy") == [PIECE, PIECE]
    assert not is_done(move)
    lane.queues.hand_over()
    assert lane.out.log_of("copy") == [PIECE, PIECE]  # none has ended
    lane.out.ended = 1
    lane.queues.hand_over()
    assert lane.out.log_of("copy") == [PIECE] * 3
    assert not is_done(move)
    lane.out.ended = 2
    lane.queues.hand_over()
    assert lane.out.log_of("copy") == [PIECE, PIECE, PIECE, 1]
    assert is_done(move) and not is_complete(move)
    lane.out.ended = 4
    assert is_complete(move)
    assert torch.equal(dst, src)


def test_one_pump_fills_every_place_that_became_free() -> None:
    lane = held()
    lane.submit(6 * PIECE)
    lane.out.ended = 2
    lane.queues.hand_over()
    assert len(lane.out.log_of("copy")) == 4


def test_issue_hands_over_one_whole_move_ahead_of_others_and_no_other() -> None:
    lane = held()
    first, _, _ = lane.submit(3 * PIECE)
    second, _, _ = lane.submit(7)
    urgent, dst, src = lane.submit(2 * PIECE + 5)
    done = lane.queues.out.issue(urgent)
    assert lane.out.log_of("copy") == [PIECE, PIECE, PIECE, PIECE, 5]
    assert done is urgent.done
    assert torch.equal(dst, src)
    assert first.next_byte == 2 * PIECE and not is_done(first)
    assert not second.begun
    lane.queues.hand_over()
    assert len(lane.out.log_of("copy")) == 5  # the bound counts the urgent pieces too
    lane.out.ended = 5
    lane.queues.hand_over()
    assert lane.out.log_of("copy")[5:] == [PIECE, 7]  # the others go on where they were
    assert is_done(first) and is_done(second)


def test_what_a_move_comes_after_is_waited_for_once_before_its_first_piece() -> None:
    lane = held()
    before = [lane.back.record(), lane.back.record()]
    lane.submit(2 * PIECE, *before)
    assert lane.out.log == [("wait", before[0]), ("wait", before[1]), ("copy", PIECE), ("copy", PIECE)]


def test_nothing_is_waited_for_while_a_move_is_queued() -> None:
    lane = held()
    lane.submit(2 * PIECE)
    later = lane.back.record()
    move, _, _ = lane.submit(10, later)
    assert lane.out.log_of("wait") == []
    lane.queues.out.issue(move)
    assert lane.out.log[-2:] == [("wait", later), ("copy", 10)]


def test_pieces_of_a_timed_move_are_timed_each() -> None:
    lane = held(outstanding=8)
    move, _, _ = lane.submit(2 * PIECE + 3, timed=True)
    assert [piece.nbytes for piece in move.pieces] == [PIECE, PIECE, 3]
    for piece in move.pieces:
        assert isinstance(piece.start, HeldEvent) and isinstance(piece.end, HeldEvent)
        assert piece.start.timed and piece.end.timed
        assert piece.end.copies_before == piece.start.copies_before + 1  # its own copy lies between them, and no other
    untimed, _, _ = lane.submit(10)
    assert not untimed.pieces
    assert isinstance(untimed.done, HeldEvent) and not untimed.done.timed


@pytest.mark.parametrize("end", ["issue", "cancel", "curtail"])
def test_the_lane_lets_go_of_both_ends_and_of_the_events(end: str) -> None:
    lane = held()
    lane.submit(PIECE if end == "curtail" else 2 * PIECE)
    event = lane.back.record()
    move, dst, src = lane.submit(3 * PIECE, event)
    both, before = [weakref.ref(t.untyped_storage()) for t in (dst, src)], weakref.ref(event)
    del dst, src, event
    assert all(ref() is not None for ref in both)
    {"issue": lane.queues.out.issue, "cancel": lane.queues.out.cancel, "curtail": lane.queues.out.truncate}[end](move)
    lane.out.log.clear()  # the test's own references
    assert [ref() for ref in both] == [None, None]
    assert before() is None


def test_lanes_do_not_count_each_others_pieces() -> None:
    lane = held()
    lane.submit(4 * PIECE)
    src, dst = random_bytes(4 * PIECE), torch.zeros(4 * PIECE, dtype=torch.uint8)
    back = lane.queues.back.submit(Move(dst.untyped_storage(), src, []))
    assert len(lane.out.log_of("copy")) == len(lane.back.log_of("copy")) == 2
    lane.queues.back.issue(back)
    assert (len(lane.out.log_of("copy")), len(lane.back.log_of("copy"))) == (2, 4)


def test_only_what_leaves_may_be_written_meanwhile() -> None:
    lane = held()
    lane.submit(3 * PIECE)
    back = Move(torch.zeros(2 * PIECE, dtype=torch.uint8).untyped_storage(), random_bytes(2 * PIECE), [])
    lane.queues.back.issue(lane.queues.back.submit(back))
    assert (lane.out.speculative, lane.back.speculative) == ({True}, {False})


def test_a_storage_of_fewer_bytes_is_refused_before_anything_is_queued() -> None:
    lane = held()
    host, storage = torch.zeros(2 * PIECE, dtype=torch.uint8), random_bytes(2 * PIECE - 1).untyped_storage()
    with pytest.raises(ValueError, match=f"expected a storage of {2 * PIECE} bytes or more, .* got {2 * PIECE - 1}"):
        lane.queues.out.submit(Move(storage, host, []))
    with pytest.raises(ValueError, match=f"{PIECE} from byte {PIECE} on, got {2 * PIECE - 1}"):
        lane.queues.out.submit(Move(storage, host[PIECE:], [], start=PIECE))
    lane.queues.hand_over()
    assert lane.out.log == []


def test_bytes_from_another_one_on() -> None:
    lane = held()
    src, dst = random_bytes(3 * PIECE), torch.zeros(2 * PIECE + 7, dtype=torch.uint8)
    lane.queues.out.issue(lane.queues.out.submit(Move(src.untyped_storage(), dst, [], start=PIECE - 7)))
    assert torch.equal(dst, src[PIECE - 7 :])


@pytest.mark.parametrize("wrong", [{"piece_bytes": 0}, {"outstanding": 0}, {"piece_bytes": -1}])
def test_a_queue_of_nothing_at_a_time_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="of 1 or more"):
        CopyQueue(cm.SimDevice(), "d2h", out=True, **wrong)


# --- real bytes over a device


class Ends:
    """Buffers on a device and in its pinned memory, with known content."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.compute = device.current_stream()
        self._pinned: list[Tensor] = []

    def on_device(self, content: Tensor) -> Tensor:
        """Fill a buffer by a copy on the compute stream, without a wait."""
        buffer = self.compute.alloc(content.numel())
        host = self.on_host(content)
        self.compute.copy(buffer, host)
        return buffer

    def on_host(self, content: Tensor) -> Tensor:
        memory = self.device.alloc_pinned(content.numel())
        self._pinned.append(memory)
        memory.copy_(content)
        return memory

    def close(self) -> None:
        self.device.synchronize()
        for memory in self._pinned:
            self.device.free_pinned(memory)


@pytest.fixture
def ends(device: Device) -> Iterator[Ends]:
    made = Ends(device)
    yield made
    made.close()


def test_an_urgent_copy_waits_for_two_pieces_at_most() -> None:
    """64 KiB asked for every 40 us while 256 MiB come back: the 99th percentile is 1.2 ms at most, on a link of 55 GB/s."""
    sim = cm.SimDevice()
    queue, clock = CopyQueue(sim, "h2d", out=False), sim.new_stream("clock")
    with sim.compute():
        block, small = torch.empty(64 * MIB, dtype=torch.uint8), torch.empty(64 * KIB, dtype=torch.uint8)
        hosts = [sim.alloc_pinned(t.nbytes) for t in (block, small)]
        made = sim.current_stream().record()
        reload = [queue.submit(Move(block.untyped_storage(), hosts[0], [made])) for _ in range(4)]
        waits, asked_us = [], sim.host_us
        while reload[-1].done is None:
            queue.hand_over()  # takes time of the host
            if sim.host_us - asked_us >= 40:
                asked_us, asked = sim.host_us, clock.record(timed=True)
                urgent = queue.submit(Move(small.untyped_storage(), hosts[1], [made], timed=True))
                queue.issue(urgent)
                waits.append((asked, urgent))
        sim.synchronize()
    took_us = sorted(urgent.pieces[-1].end.elapsed_us(asked) for asked, urgent in waits)
    assert len(took_us) > 100
    assert took_us[len(took_us) * 99 // 100] <= 1200


def test_the_lanes_overlap_in_simulated_time(sim: cm.SimDevice) -> None:
    ends = Ends(sim)
    queues = Queues(CopyQueue(sim, "d2h", out=True), CopyQueue(sim, "h2d", out=False))
    content = random_bytes(4 * MIB)
    host, src = ends.on_host(content), ends.on_device(content)
    dst, other = ends.compute.alloc(4 * MIB), ends.on_host(content)
    sim.synchronize()
    out = queues.out.submit(Move(src.untyped_storage(), host, [], timed=True))
    back = queues.back.submit(Move(dst.untyped_storage(), other, [], timed=True))
    sim.synchronize()
    (left,), (came,) = out.pieces, back.pieces
    alone_us = left.end.elapsed_us(left.start)
    assert came.start.elapsed_us(left.start) < alone_us  # the second began before the first had ended
    ends.close()


def test_a_curtailed_moves_event_orders_the_reuse_of_both_ends(ends: Ends) -> None:
    """On the simulator an early reuse is a race error, on a GPU wrong bytes."""
    queues = queues_of(ends.device)
    nbytes = 5 * PIECE
    content = random_bytes(nbytes)
    src, host = ends.on_device(content), ends.on_host(torch.zeros(nbytes, dtype=torch.uint8))
    move = queues.out.submit(Move(src.untyped_storage(), host, [ends.compute.record()]))
    unsent = queues.out.truncate(move)
    moved = nbytes - unsent
    assert moved in (2 * PIECE, 3 * PIECE, 4 * PIECE, nbytes)  # two at once, more where a piece ended in between
    assert move.done is not None
    ends.compute.wait(move.done)
    ends.compute.copy(src, ends.on_host(torch.zeros(nbytes, dtype=torch.uint8)))
    ends.device.synchronize()
    assert torch.equal(host[:moved], content[:moved])
    assert not host[moved:].any()


# --- any sequence of calls


class SeenEvent:
    """An event that remembers whether the host saw it complete."""

    def __init__(self, inner: Event) -> None:
        self.inner = inner
        self.seen = False

    def query(self) -> bool:
        self.seen = self.seen or self.inner.query()
        return self.seen

    def synchronize(self) -> None:
        self.inner.synchronize()

    def elapsed_us(self, since: Event) -> float:
        assert isinstance(since, SeenEvent)
        return self.inner.elapsed_us(since.inner)


class CountingStream:
    """Counts the copies that were issued and not seen complete; refuses one too many unless it is `urgent`."""

    def __init__(self, inner: Stream, limit: int) -> None:
        self.inner = inner
        self.name = inner.name
        self.urgent = False
        self._limit = limit
        self._after_copy: list[SeenEvent] = []
        self._copied = False

    def copy_storage(self, storage: torch.UntypedStorage, host: Tensor, **options: Any) -> None:
        # Copies of a stream complete in order: those before one that was seen complete are complete, too.
        latest_first = enumerate(reversed(self._after_copy))
        outstanding = next((number for number, event in latest_first if event.seen), len(self._after_copy))
        assert self.urgent or outstanding < self._limit, f"{outstanding} copies outstanding, and one more"
        self.inner.copy_storage(storage, host, **options)
        self._copied = True

    def record(self, *, timed: bool = False) -> SeenEvent:
        event = SeenEvent(self.inner.record(timed=timed))
        if self._copied:
            self._after_copy.append(event)
            self._copied = False
        return event

    def wait(self, event: Event) -> None:
        self.inner.wait(event.inner if isinstance(event, SeenEvent) else event)


@dataclass
class Tracked:
    """Submitted move, with the content that its destination must hold in the end."""

    move: Move
    outward: bool
    dst: Tensor
    content: Tensor
    src: Tensor
    unsent: int = 0

    @property
    def ended(self) -> bool:
        return self.move.done is not None or self.move.cancelled


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "pump", "wait", "issue", "cancel", "curtail"]),
        st.integers(0, 3 * PIECE + 2),
        st.booleans(),
    ),
    max_size=40,
)


@settings(max_examples=60)
@given(calls=CALLS, limit=st.integers(1, 3))
def test_any_sequence_ends_every_move_with_the_right_bytes(calls: list[tuple[str, int, bool]], limit: int) -> None:
    device = cm.SimDevice()
    ends = Ends(device)
    streams = {name: CountingStream(device.new_stream(name), limit) for name in ("d2h", "h2d")}
    queues = Lanes(streams.__getitem__).queues(outstanding=limit)
    everything: list[Tracked] = []
    for what, number, outward in calls:
        if what == "submit":
            everything.append(submit(ends, queues, max(1, number), outward))
        elif what == "pump":
            queues.hand_over()
        elif what == "wait":
            device.synchronize()
        elif everything:
            tracked = everything[number % len(everything)]
            act(what, tracked, queues[not tracked.outward], streams["d2h" if tracked.outward else "h2d"])
    in_plan_order = {lane: [t for t in everything if t.outward is lane and not t.ended] for lane in (True, False)}
    for lane in in_plan_order.values():  # nobody starves: the oldest of each lane ends first
        while waiting := [t for t in lane if not t.ended]:
            assert lane[-len(waiting) :] == waiting
            sent = waiting[0].move.next_byte
            device.synchronize()
            queues.hand_over()
            assert waiting[0].ended or waiting[0].move.next_byte > sent
    device.synchronize()
    for tracked in everything:
        whole = 0 if tracked.move.cancelled else tracked.content.numel() - tracked.unsent
        assert torch.equal(tracked.dst[:whole], tracked.content[:whole])
        assert not tracked.dst[whole:].any()
        assert tracked.move.storage is None and tracked.move.host is None
    ends.close()


def submit(ends: Ends, queues: Queues, nbytes: int, outward: bool) -> Tracked:
    content, blank = random_bytes(nbytes), torch.zeros(nbytes, dtype=torch.uint8)
    if outward:
        dst, src = ends.on_host(blank), ends.on_device(content)
        move = queues.out.submit(Move(src.untyped_storage(), dst, [ends.compute.record()]))
    else:
        dst, src = ends.on_device(blank), ends.on_host(content)
        move = queues.back.submit(Move(dst.untyped_storage(), src, [ends.compute.record()]))
    return Tracked(move, outward, dst, content, src)


def act(what: str, tracked: Tracked, queue: CopyQueue, stream: CountingStream) -> None:
    move = tracked.move
    if what == "cancel":
        was_ended, was_begun = tracked.ended, move.begun
        taken_back = queue.cancel(move)
        assert taken_back is not (was_ended or was_begun)
    elif what == "issue" and not move.cancelled:
        stream.urgent = True
        done = queue.issue(move)
        stream.urgent = False
        assert done is move.done
    elif what == "curtail" and tracked.outward and not move.cancelled:
        tracked.unsent += queue.truncate(move)
