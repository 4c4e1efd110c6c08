"""Wrappers around an allocator: what each adds, and that they nest in any order without changing what is allocated."""

from __future__ import annotations

import gc
import itertools
import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chameleon_mm.device.protocols import Event, Stream
from chameleon_mm.device.sim import SimDevice
from chameleon_mm.errors import BlockCorruptedError, BlockInUseError, BlockReleasedError, HostMemoryExhausted, PoolStateError
from chameleon_mm.pinned import PinnedBlock, PinnedPool
from chameleon_mm.pinned.allocator import Allocator, AllocatorWrapper
from chameleon_mm.pinned.block import Ticket
from chameleon_mm.pinned.checking import POISON_BYTE, ZONE_BYTES, CheckingAllocator
from chameleon_mm.pinned.counting import LimitedAllocator, StatisticsAllocator
from chameleon_mm.pinned.recording import LogReplay, RecordingAllocator, replay_log
from chameleon_mm.units import KIB, MIB
from tests._fakes import BrokenStream, ManualEvent, RecordingStream
from tests.observed import SimRaceError


@pytest.fixture
def pool(sim: SimDevice) -> Iterator[PinnedPool]:
    with PinnedPool("1MiB", sim, "1MiB") as pool:
        yield pool


WRAPPERS: dict[str, Callable[[Allocator, Path], AllocatorWrapper]] = {
    "plain": lambda inner, folder: AllocatorWrapper(inner),
    "statistics": lambda inner, folder: StatisticsAllocator(inner),
    "limit": lambda inner, folder: LimitedAllocator(inner, "1MiB"),
    "recording": lambda inner, folder: RecordingAllocator(inner, folder / "calls.jsonl"),
    "checking": lambda inner, folder: CheckingAllocator(inner),
}
any_wrapper = pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS.keys())


# --- what holds for all of them


@any_wrapper
def test_a_block_of_a_wrapper_is_a_block(pool: PinnedPool, tmp_path: Path, make: Any) -> None:
    with make(pool, tmp_path) as wrapper:
        assert (wrapper.inner, wrapper.device) == (pool, pool.device)
        block = wrapper.allocate(6000)
        assert (block.nbytes, block.buffer.numel(), block.buffer.data_ptr() % 4096, block.pageable) == (6000, 6000, 0, False)
        view = block.tensor((1500,), torch.float32)
        view.fill_(2)
        with pytest.raises(BlockInUseError):
            block.release()
        assert pool.stats().num_live == 1
        del view
        block.release()
        assert block.released
        zero, text = wrapper.allocate(0), wrapper.allocate("4KiB")
        assert (zero.buffer.numel(), text.buffer.numel()) == (0, 4096)
        zero.release()
        text.release()
        wrapper.close()
        assert pool.stats().num_live == 0


@any_wrapper
@pytest.mark.usefixtures("no_gc")
def test_a_dropped_block_returns_and_holds_its_wrapper(pool: PinnedPool, tmp_path: Path, make: Any) -> None:
    with make(pool, tmp_path) as wrapper:
        block = wrapper.allocate(100)
    del wrapper  # the block holds it
    assert pool.stats().num_live == 1
    del block
    assert pool.stats().num_live == 0


@any_wrapper
def test_events_go_through_a_wrapper_both_ways(pool: PinnedPool, tmp_path: Path, make: Any) -> None:
    event, later = ManualEvent(), ManualEvent()
    pool.allocate(MIB).release(after=event)
    with make(pool, tmp_path) as wrapper:
        nbytes = MIB - 2 * ZONE_BYTES
        stream: Any = RecordingStream()
        block = wrapper.allocate(nbytes, stream)
        if isinstance(wrapper, CheckingAllocator):
            assert event.complete, "it writes the block, so the host has waited"
        else:
            assert (stream.waited, event.complete, block.pending_events) == ([event], False, ())
        event.complete = True
        block.release(after=later)
        if isinstance(wrapper, CheckingAllocator):
            assert pool.stats().num_live == 1, "the device may still write into it"
            later.complete = True
            wrapper.stats()
            assert pool.allocate(MIB).pending_events == ()
        else:
            assert pool.allocate(MIB).pending_events == (later,)


@any_wrapper
def test_an_unused_block_passes_on_what_its_stream_waited_for(pool: PinnedPool, tmp_path: Path, make: Any) -> None:
    if make is WRAPPERS["checking"]:
        pytest.skip("the host itself has waited by then")
    event = ManualEvent()
    pool.allocate(MIB).release(after=event)
    with make(pool, tmp_path) as wrapper:
        stream: Any = RecordingStream()
        wrapper.allocate(4096, stream).release()
        wrapper.close()
    assert pool.allocate(4096).pending_events == (event,)


@any_wrapper
@pytest.mark.parametrize("nbytes", [-1, True, 1.5, "4 pages", None])
def test_what_is_no_size_is_refused(pool: PinnedPool, tmp_path: Path, make: Any, nbytes: Any) -> None:
    with make(pool, tmp_path) as wrapper, pytest.raises((TypeError, ValueError), match="allocate: expected"):
        wrapper.allocate(nbytes)
    assert pool.stats().num_live == 0


@any_wrapper
def test_exhaustion_goes_through_and_leaves_the_wrapper_usable(pool: PinnedPool, tmp_path: Path, make: Any) -> None:
    with make(pool, tmp_path) as wrapper:
        with pytest.raises(HostMemoryExhausted):
            wrapper.allocate(2 * MIB)
        wrapper.allocate(1000).release()
        wrapper.close()
    assert pool.stats().num_live == 0


@any_wrapper
def test_a_stream_that_cannot_wait_leaves_nothing_behind(pool: PinnedPool, tmp_path: Path, make: Any) -> None:
    event = ManualEvent()
    pool.allocate(MIB).release(after=event)
    broken: Any = BrokenStream()
    with make(pool, tmp_path) as wrapper:
        with pytest.raises(RuntimeError, match="gone"):
            wrapper.allocate(4096, broken)
        gc.collect()
        event.complete = True
        wrapper.allocate(4096).release()
        wrapper.close()
    assert pool.stats().num_live == 0


@pytest.mark.parametrize("order", list(itertools.permutations(["statistics", "limit", "recording", "checking"]))[::2])
def test_they_nest_in_any_order(pool: PinnedPool, tmp_path: Path, order: tuple[str, ...]) -> None:
    top: Allocator = pool
    layers: list[AllocatorWrapper] = []
    for name in order:
        top = WRAPPERS[name](top, tmp_path)
        layers.append(top)
    blocks = [top.allocate(1000 * n) for n in range(1, 6)]
    for value, block in enumerate(blocks):
        block.numpy((block.nbytes,), np.uint8)[:] = value
    assert all(bool((block.numpy((block.nbytes,), np.uint8) == value).all()) for value, block in enumerate(blocks))
    events = [ManualEvent() for _ in blocks]
    for block, event in zip(blocks, events, strict=True):
        block.release(after=event)
    for event in events:
        event.complete = True
    for layer in reversed(layers):  # outermost first: what one holds back it holds of the next
        layer.close()
    assert pool.stats().num_live == 0
    (statistics,) = (layer for layer in layers if isinstance(layer, StatisticsAllocator))
    booked = statistics.stats()
    assert (booked.allocations, booked.releases, booked.live_bytes) == (5, 5, 0)
    (recording,) = tmp_path.iterdir()
    assert len(recording.read_text().splitlines()) == 1 + 10


def test_threads_share_a_nest_of_wrappers(sim: SimDevice, tmp_path: Path) -> None:
    with PinnedPool("16MiB", sim) as pool:
        limit = LimitedAllocator(pool, "8MiB")
        top = StatisticsAllocator(RecordingAllocator(CheckingAllocator(limit), tmp_path / "calls.jsonl"))
        wrong: list[str] = []
        handed: list[tuple[PinnedBlock, int]] = []

        def work(seed: int) -> None:
            for n in range(60):
                value = (seed * 60 + n) % 256
                block = top.allocate(1 + (seed * 7919 + n * 104_729) % 20_000)
                block.numpy((block.nbytes,), np.uint8)[:] = value
                handed.append((block, value))
                try:
                    other, expected = handed.pop(0)
                except IndexError:  # the other threads were faster
                    continue
                if not bool((other.numpy((other.nbytes,), np.uint8) == expected).all()):
                    wrong.append(f"a block of {other.nbytes} bytes lost its {expected}s")
                other.release()

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        handed.clear()
        assert wrong == []
        stats = top.stats()
        assert (stats.allocations, stats.releases, stats.num_live, stats.live_bytes) == (240, 240, 0, 0)
        recording: Any = top.inner
        recording.close()
        recording.inner.close()
        assert (limit.live_bytes, pool.stats().num_live) == (0, 0)
        with StatisticsAllocator(pool) as again:
            assert replay_log(tmp_path / "calls.jsonl", again).allocations == 240
            assert again.stats().total_bytes == stats.total_bytes


@any_wrapper
def test_a_block_released_by_the_collector_at_any_line_does_not_deadlock(sim: SimDevice, tmp_path: Path, make: Any) -> None:
    before = gc.get_threshold()
    with PinnedPool("8MiB", sim) as pool, make(LimitedAllocator(pool, "8MiB"), tmp_path) as wrapper:
        gc.set_threshold(1)
        try:
            for n in range(60):
                loop: list[Any] = [wrapper.allocate(1 + 37 * n % 5000)]
                loop.append(loop)
        finally:
            gc.set_threshold(*before)
        del loop
        gc.collect()
        wrapper.close()
        assert pool.stats().num_live == 0


def test_no_device_call_and_no_line_comes_from_a_fork_or_from_the_end_of_the_interpreter(tmp_path: Path) -> None:
    script = f"""
        import gc, os, sys, warnings
        from chameleon_mm.device.sim import SimDevice
        from chameleon_mm.pinned import PinnedPool
        from chameleon_mm.pinned.checking import CheckingAllocator
        from chameleon_mm.pinned.counting import LimitedAllocator
        from chameleon_mm.pinned.recording import RecordingAllocator

        class Loud(SimDevice):
            def free_pinned(self, memory):
                os.write(1, b"freed ")

        class Event:
            def query(self):
                os.write(1, b"asked ")
                return True
            synchronize = query

        pool = PinnedPool("1MiB", Loud())
        top = LimitedAllocator(CheckingAllocator(RecordingAllocator(pool, {str(tmp_path / "calls.jsonl")!r})), "1MiB")
        blocks = [top.allocate(100) for _ in range(4)]
        tensor = pool.empty((3,), __import__("torch").float32)
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        child = os.fork()
        if child == 0:
            blocks.pop().release(after=Event())
            blocks.clear()
            del tensor
            gc.collect()
            top.inner.inner.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        blocks.pop().release(after=Event())
        loop = [blocks, tensor]
        loop.append(loop)
        del blocks, tensor
        warnings.filterwarnings("ignore", category=ResourceWarning)  # the log was left open, on purpose
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    lines = (tmp_path / "calls.jsonl").read_text().splitlines()
    assert [json.loads(line).get("op") for line in lines] == [None, "allocate", "allocate", "allocate", "allocate"]


# --- statistics


def test_statistics_count_calls_bytes_peaks_and_sizes(pool: PinnedPool) -> None:
    counting = StatisticsAllocator(pool)
    first, second = counting.allocate(4096), counting.allocate(4097)
    first.release()
    third, empty, one = counting.allocate(3000), counting.allocate(0), counting.allocate(1)
    second.release()
    with pytest.raises(HostMemoryExhausted):
        counting.allocate(2 * MIB)
    assert counting.stats().to_dict() == {
        "allocations": 5,
        "releases": 2,
        "refusals": 1,
        "num_live": 3,
        "live_bytes": 3001,
        "total_bytes": 4096 + 4097 + 3000 + 1,
        "peak_num_live": 4,
        "peak_live_bytes": 4096 + 4097,
        "sizes": {0: 1, 1: 1, 4096: 2, 8192: 1},
    }
    for block in (third, empty, one):
        block.release()
    assert (counting.stats().num_live, counting.stats().live_bytes) == (0, 0)


# --- a limit


def test_a_limit_refuses_past_it_and_asks_the_inner_allocator_for_nothing(pool: PinnedPool) -> None:
    limited = LimitedAllocator(pool, "10KiB")
    kept = [limited.allocate(4 * KIB), limited.allocate(6 * KIB)]
    before = pool.stats()
    with pytest.raises(HostMemoryExhausted, match=r"at most 10240 bytes \(10\.0 KiB\).*request for 1 beside 10240 live"):
        limited.allocate(1)
    assert pool.stats() == before
    assert limited.allocate(0).nbytes == 0
    kept.pop().release()
    assert limited.allocate(6 * KIB).nbytes == 6 * KIB
    assert (limited.limit_bytes, limited.live_bytes) == (10 * KIB, 4 * KIB)


def test_a_refusal_of_the_inner_allocator_does_not_count(pool: PinnedPool) -> None:
    limited = LimitedAllocator(pool, "8MiB")
    with pytest.raises(HostMemoryExhausted, match="pinned pool"):
        limited.allocate(2 * MIB)
    assert limited.live_bytes == 0


def test_two_threads_do_not_pass_a_limit_together(pool: PinnedPool) -> None:
    both = threading.Barrier(2)

    class Slow(AllocatorWrapper):
        def allocate(self, nbytes: int | str, stream: Stream | None = None) -> PinnedBlock:
            # The other thread is refused before it gets here: then it breaks the barrier.
            both.wait()
            return super().allocate(nbytes, stream)

    limited = LimitedAllocator(Slow(pool), 1000)
    outcomes: list[str] = []

    def ask() -> None:
        try:
            limited.allocate(600)
        except HostMemoryExhausted:
            outcomes.append("refused")
            both.abort()
        except threading.BrokenBarrierError:
            outcomes.append("served")

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["refused", "served"]


@pytest.mark.parametrize(("size", "error"), [(-1, ValueError), ("much", ValueError), (1.5, TypeError)])
def test_a_limit_that_is_no_size_is_refused(pool: PinnedPool, size: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="max_bytes"):
        LimitedAllocator(pool, size)


# --- recording and replay


def test_every_call_is_a_line_and_a_replay_does_them_again(pool: PinnedPool, sim: SimDevice, tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    with RecordingAllocator(pool, path) as recorded:
        first = recorded.allocate(5000, sim.new_stream("d2h"))
        second = recorded.allocate(300)
        other = threading.Thread(target=first.release)
        other.start()
        other.join()
        with pytest.raises(HostMemoryExhausted):
            recorded.allocate(2 * MIB)
        third = recorded.allocate(0)
        del second
        gc.collect()
    header, *calls = [json.loads(line) for line in path.read_text().splitlines()]
    assert header == {"log": "chameleon_mm.allocations.v1"}
    assert [tuple(call[key] for key in ("op", "serial", "nbytes", "stream", "thread")) for call in calls] == [
        ("allocate", 1, 5000, "d2h", 0),
        ("allocate", 2, 300, None, 0),
        ("release", 1, 5000, None, 1),
        ("refuse", None, 2 * MIB, None, 0),
        ("allocate", 3, 0, None, 0),
        ("release", 2, 300, None, 0),
    ]
    times = [call["time_us"] for call in calls]
    assert times == sorted(times) and times[0] > 0
    third.release()
    with StatisticsAllocator(pool) as counting:
        assert replay_log(path, counting) == LogReplay(allocations=3, releases=2, refusals=1, peak_bytes=5300)
        stats = counting.stats()
    assert (stats.allocations, stats.num_live, stats.peak_live_bytes, stats.total_bytes) == (3, 0, 5300, 5300)


def test_a_release_is_written_no_later_than_the_next_call(pool: PinnedPool, tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    with RecordingAllocator(pool, path) as recorded:
        recorded.allocate(100).release()
        assert len(path.read_text().splitlines()) == 2
        block = recorded.allocate(100)
        assert [json.loads(line).get("op") for line in path.read_text().splitlines()] == [
            None,
            "allocate",
            "release",
            "allocate",
        ]
        block.release()
    assert len(path.read_text().splitlines()) == 5


def test_a_closed_recording_gives_nothing_and_lets_its_blocks_return(pool: PinnedPool, tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    recorded = RecordingAllocator(pool, path)
    block = recorded.allocate(100)
    recorded.close()
    recorded.close()
    with pytest.raises(PoolStateError, match="expected an open recording"):
        recorded.allocate(1)
    block.release()
    assert pool.stats().num_live == 0
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that cannot be written")
def test_a_full_disk_is_the_callers_to_know_and_leaks_no_block(pool: PinnedPool, tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    recorded = RecordingAllocator(pool, path)
    recorded._file.close()
    recorded._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115 - stands in for the recording's own file
    with pytest.raises(OSError, match="No space left"):
        recorded.allocate(100)
    gc.collect()
    assert pool.stats().num_live == 0
    recorded.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", None),
        ("nonsense\n", "line 1: expected a JSON object, got 'nonsense'"),
        ("[1]\n", "line 1: expected a JSON object"),
        ('{"log": "another"}\n', "expected a log of 'chameleon_mm.allocations.v1'"),
        ('{"log": "chameleon_mm.allocations.v1"}\n{"op": "allo', "line 2: expected a JSON object.*cut short"),
        ('{"log": "chameleon_mm.allocations.v1"}\n{"op": "release", "serial": 7}\n', "line 2: expected a call.*7 is unknown"),
        ('{"log": "chameleon_mm.allocations.v1"}\n{"op": "borrow", "serial": 7}\n', "line 2: expected a call"),
        ('{"log": "chameleon_mm.allocations.v1"}\n{"op": "allocate", "serial": 7}\n', "line 2: expected a call"),
    ],
)
def test_what_is_no_log_is_refused_by_its_line(pool: PinnedPool, tmp_path: Path, text: str, said: str | None) -> None:
    path = tmp_path / "calls.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=said or "is empty"):
        replay_log(path, pool)
    assert pool.stats().num_live == 0


# --- checking


def write(block: PinnedBlock, at: int, value: int = 0) -> None:
    """One byte relative to the block's start, past what it may."""
    whole = np.asarray(block._memory.numpy())
    whole[block._start + at] = value


def test_an_intact_block_is_poison_until_written_and_again_after_its_release(pool: PinnedPool) -> None:
    checked = CheckingAllocator(pool)
    block = checked.allocate(5000)
    assert block.buffer.tolist() == [POISON_BYTE] * 5000
    assert bool(block.tensor((1250,), torch.float32).isnan().all())
    assert bool(block.tensor((2500,), torch.bfloat16).isnan().all())
    block.tensor((5000,), torch.uint8).zero_()
    raw = block.buffer
    block.release()
    checked.check()
    assert raw.tolist() == [POISON_BYTE] * 5000
    assert pool.stats().num_live == 0


@pytest.mark.parametrize(
    ("at", "where"),
    [
        (-1, "1 bytes before its start"),
        (-ZONE_BYTES, "4096 bytes before its start"),
        (5000, "0 bytes past its end"),
        (5000 + ZONE_BYTES - 1, "4095 bytes past its end"),
    ],
)
def test_a_byte_written_beside_a_block_is_found(pool: PinnedPool, at: int, where: str) -> None:
    checked = CheckingAllocator(pool)
    block = checked.allocate(5000)
    write(block, at, 0x17)
    block.release()
    with pytest.raises(
        BlockCorruptedError, match=rf"5000 bytes, allocated at test_pinned_wrappers.*1 bytes, the first {where} \(0x17\)"
    ):
        checked.allocate(10)
    checked.allocate(10).release()  # said once
    checked.check()
    assert pool.stats().num_live == 0


def test_all_that_was_found_is_said(pool: PinnedPool) -> None:
    checked = CheckingAllocator(pool)
    blocks = [checked.allocate(nbytes) for nbytes in (100, 200, 300)]
    write(blocks[0], -3)
    write(blocks[2], 300)
    blocks.clear()
    gc.collect()
    with pytest.raises(BlockCorruptedError, match="expected nothing written beside it") as caught:
        checked.check()
    assert [f"a block of {nbytes} bytes" in str(caught.value) for nbytes in (100, 200, 300)] == [True, False, True]


def test_a_block_is_not_looked_at_before_its_last_event(pool: PinnedPool) -> None:
    checked = CheckingAllocator(pool)
    block, event = checked.allocate(5000), ManualEvent()
    memory, start = block._memory, block._start
    block.release(after=event)
    checked.allocate(100).release()
    assert (event.syncs, pool.stats().num_live) == (0, 2), "the device may still write"
    memory[start + 5000] = 1  # and it writes too far
    event.complete = True
    with pytest.raises(BlockCorruptedError, match="0 bytes past its end"):
        checked.stats()
    assert pool.stats().num_live == 0


def test_check_waits_for_the_device_and_allocate_does_so_before_it_gives_up(pool: PinnedPool) -> None:
    checked = CheckingAllocator(pool)
    first, second = ManualEvent(), ManualEvent()
    checked.allocate(900 * KIB).release(after=first)
    checked.allocate(10)
    assert first.syncs == 0
    checked.allocate(900 * KIB).release(after=second)
    assert first.syncs == 1, "the pool was full"
    checked.check()
    assert (second.syncs, pool.stats().num_live) == (1, 0)


def test_a_second_release_says_where_the_block_was_allocated_and_released(pool: PinnedPool) -> None:
    checked = CheckingAllocator(pool)

    def makes() -> PinnedBlock:
        return checked.allocate(100)

    def ends(block: PinnedBlock) -> None:
        block.release()

    block = makes()
    ends(block)
    with pytest.raises(BlockReleasedError, match=r"allocated at .*in makes.*released before at .*in ends"):
        block.release()
    del block  # dropping it afterwards is no release
    checked.check()
    assert pool.stats().num_live == 0


def test_foreign_and_repeated_tickets_are_refused_and_change_nothing(pool: PinnedPool) -> None:
    checked, other = CheckingAllocator(pool), CheckingAllocator(pool)
    block = checked.allocate(100)
    for allocator, ticket in ((other, block._take_turn[0]), (checked, (99, 0))):
        with pytest.raises(BlockReleasedError, match="ticket of a live block"):
            allocator.note_released(ticket, ())
    assert pool.stats().num_live == 1
    ticket = block._take_turn[0]
    block.release()
    with pytest.raises(BlockReleasedError, match="given back before"):
        checked.note_released(ticket, ())
    checked.check()
    assert pool.stats().num_live == 0


def test_checking_does_not_race_with_the_device(sim: SimDevice) -> None:
    with PinnedPool("1MiB", sim) as pool, CheckingAllocator(pool) as checked:
        h2d, target = sim.new_stream("h2d"), sim.current_stream().alloc(100_000)
        h2d.wait(sim.current_stream().record())
        for value in range(3):
            block = checked.allocate(100_000, h2d)
            block.numpy((100_000,), np.uint8)[:] = value
            h2d.copy(target, block.buffer)
            block.release(after=h2d.record())
        sim.synchronize()
        assert bool((target == 2).all())


# --- a lock


class Forgetful(AllocatorWrapper):
    """Does not pass the events on: the simulator must notice, or the tests of events above prove nothing."""

    def note_released(self, ticket: Ticket, events: tuple[Event, ...]) -> None:
        super().note_released(ticket, ())


@pytest.mark.parametrize("kind", [*(name for name in WRAPPERS if name != "checking"), "forgetful"])
def test_the_next_copy_into_a_block_of_a_wrapper_waits_for_the_last_one_out_of_it(
    sim: SimDevice, tmp_path: Path, kind: str
) -> None:
    pool = PinnedPool(MIB, sim)
    with Forgetful(pool) if kind == "forgetful" else WRAPPERS[kind](pool, tmp_path) as top:
        h2d, d2h = sim.new_stream("h2d"), sim.new_stream("d2h")
        target, source = sim.current_stream().alloc(MIB), sim.current_stream().alloc(MIB)
        for stream in (h2d, d2h):
            stream.wait(sim.current_stream().record())
        block = top.allocate(MIB, h2d)
        h2d.copy(target, block.buffer)
        block.release(after=h2d.record())
        again = top.allocate(MIB, d2h)
        if kind == "forgetful":
            with pytest.raises(SimRaceError):
                d2h.copy(again.buffer, source)
        else:
            d2h.copy(again.buffer, source)
        sim.synchronize()
