"""The pinned pool: limits, statistics, the life of a block. Events and their order are in test_pinned_events.py."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from torch import Tensor

from chameleon_mm.device.sim import SimDevice
from chameleon_mm.errors import BlockReleasedError, HostMemoryExhausted, PoolStateError
from chameleon_mm.pool.arena import Arena
from chameleon_mm.pool.block import PageableBlock, PinnedBlock
from chameleon_mm.pool.checking import CheckingAllocator
from chameleon_mm.pool.free_list import FreeList
from chameleon_mm.pool.pool import PinnedPool
from chameleon_mm.units import KIB
from tests._fakes import CountingDevice, ManualEvent
from tests._programs import at_once

PAGE = 4096


class Ledgered(CountingDevice):
    """A device that counts its chunks and the waits of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs = 0
        self.before_free: Callable[[int, int], None] = lambda address, nbytes: None

    def free_pinned(self, memory: Tensor) -> None:
        self.before_free(memory.data_ptr(), memory.numel())
        super().free_pinned(memory)

    def synchronize(self) -> None:
        self.syncs += 1
        super().synchronize()


@pytest.fixture
def ledgered() -> Ledgered:
    return Ledgered()


@pytest.fixture
def pool(ledgered: Ledgered) -> Iterator[PinnedPool]:
    with PinnedPool("64KiB", ledgered, "16KiB") as pool:
        yield pool
        gc.collect()  # an expected error's traceback and its frame, with the blocks there, hold each other
    assert ledgered.chunks == {}


def fill(block: PinnedBlock, value: int) -> None:
    block.numpy((block.nbytes,), np.uint8)[:] = value


def holds(block: PinnedBlock, value: int) -> bool:
    return bool((block.numpy((block.nbytes,), np.uint8) == value).all())


# --- sizes, chunks, the limit


def test_nothing_is_reserved_before_the_first_block_and_chunks_come_as_needed(pool: PinnedPool, ledgered: Ledgered) -> None:
    assert pool.stats().reserved_bytes == 0
    first = pool.allocate(5000)
    assert list(ledgered.chunks.values()) == [16 * KIB]
    second = pool.allocate(3 * PAGE)  # two pages are left in the first chunk
    assert list(ledgered.chunks.values()) == [16 * KIB, 16 * KIB]
    third = pool.allocate(2 * PAGE)  # fits the first chunk exactly, best of the two
    assert third.buffer.data_ptr() == first.buffer.data_ptr() + 2 * PAGE
    stats = pool.stats()
    assert (stats.requested_bytes, stats.live_bytes, stats.num_live) == (5000 + 5 * PAGE, 7 * PAGE, 3)
    assert (stats.reserved_bytes, stats.largest_free_bytes) == (32 * KIB, PAGE)
    for block in (first, second, third):
        block.release()
    stats = pool.stats()
    assert (stats.requested_bytes, stats.live_bytes, stats.num_live, stats.peak_live_bytes) == (0, 0, 0, 7 * PAGE)
    assert dataclasses.asdict(stats) == {
        "limit_bytes": 64 * KIB,
        "reserved_bytes": 32 * KIB,
        "live_bytes": 0,
        "requested_bytes": 0,
        "peak_live_bytes": 7 * PAGE,
        "peak_reserved_bytes": 32 * KIB,
        "largest_free_bytes": 16 * KIB,
        "num_live": 0,
    }


def test_past_the_limit_the_error_says_what_and_the_pool_stays_usable(pool: PinnedPool) -> None:
    blocks = [pool.allocate(12 * KIB) for _ in range(4)]  # one in each chunk, with a page left over
    before = pool.stats()
    with pytest.raises(HostMemoryExhausted) as caught:
        pool.allocate(5000)
    said = str(caught.value)
    for figure in (
        "asked for 5000 bytes",
        "limit is 65536",
        "49152 live in 4 blocks",
        "largest free block 4096",
        "limit_bytes",
    ):
        assert figure in said
    assert isinstance(caught.value, MemoryError)
    assert pool.stats() == before
    assert pool.allocate(4096).nbytes == 4096
    blocks.pop().release()
    assert pool.allocate(5000).nbytes == 5000


def test_a_size_may_be_text(pool: PinnedPool) -> None:
    assert pool.allocate("4KiB").nbytes == pool.allocate_pageable("4KiB").nbytes == 4096


# --- giving chunks back


def test_unused_chunks_make_room_for_a_large_request(pool: PinnedPool, ledgered: Ledgered) -> None:
    events = [ManualEvent() for _ in range(4)]
    for block, event in zip([pool.allocate(16 * KIB) for _ in range(4)], events, strict=True):
        block.release(after=event)
    events[2].complete = True
    large = pool.allocate(20 * KIB)
    assert sum(event.syncs for event in events) == 1, "one complete chunk and one more make room for 20 KiB"
    assert events[2].syncs == 0
    assert sorted(ledgered.chunks.values()) == [16 * KIB, 16 * KIB, 32 * KIB], "as large as those it took the place of"
    assert (pool.stats().reserved_bytes, large.pending_events) == (64 * KIB, ())


def test_unused_chunks_are_kept_where_they_would_not_make_room(pool: PinnedPool, ledgered: Ledgered) -> None:
    kept = [pool.allocate(16 * KIB) for _ in range(3)]
    event = ManualEvent()
    pool.allocate(16 * KIB).release(after=event)
    with pytest.raises(HostMemoryExhausted):
        pool.allocate(20 * KIB)
    assert (len(ledgered.chunks), event.syncs, len(kept)) == (4, 0, 3)


def test_close_waits_for_the_device_gives_all_back_and_ends_the_pool(ledgered: Ledgered) -> None:
    pool = PinnedPool("64KiB", ledgered, "16KiB")
    event = ManualEvent()
    pool.allocate(100).release(after=event)
    pool.close()
    pool.close()
    assert (event.syncs, ledgered.chunks, pool.stats().reserved_bytes) == (1, {}, 0)
    with pytest.raises(PoolStateError, match="closed"):
        pool.allocate(1)
    with pytest.raises(PoolStateError, match=r"limit_bytes: .* closed by close\(\); .* close sessions that were given"):
        pool.limit_bytes = 1
    with pytest.raises(ValueError, match="chunk_bytes"):
        PinnedPool("64KiB", ledgered, 0)


def test_close_refuses_while_blocks_live_and_says_which(pool: PinnedPool) -> None:
    blocks = [pool.allocate(nbytes) for nbytes in (3 * KIB, 12 * KIB, 0)]
    with pytest.raises(PoolStateError, match=r"3 of 15\.0 KiB in all \(the largest: 12\.0 KiB, 3\.00 KiB, 0 B\)"):
        pool.close()
    fill(blocks[1], 3)
    assert holds(blocks[1], 3)


def test_an_error_inside_the_with_statement_is_the_one_that_is_seen(ledgered: Ledgered) -> None:
    with pytest.raises(KeyError), PinnedPool("64KiB", ledgered) as pool:
        block = pool.allocate(100)
        raise KeyError("the user's own")
    assert pool.stats().num_live == 1
    block.release()
    pool.close()
    assert ledgered.chunks == {}


@pytest.mark.usefixtures("no_gc")
def test_a_dropped_pool_gives_its_chunks_back_once_its_blocks_are_gone(ledgered: Ledgered) -> None:
    pool = PinnedPool("64KiB", ledgered, "16KiB")
    first, second = pool.allocate(9000), pool.allocate(9000)
    h2d, target = ledgered.new_stream("h2d"), ledgered.current_stream().alloc(9000)
    h2d.wait(ledgered.current_stream().record())
    h2d.copy(target, second.buffer)
    del pool, first
    assert (len(ledgered.chunks), ledgered.syncs) == (2, 0)
    del second  # without the copy's event: the device is waited for all the same
    assert (ledgered.chunks, ledgered.syncs) == ({}, 1)


def test_no_device_call_comes_from_a_fork_or_from_the_end_of_the_interpreter() -> None:
    script = """
        import gc, os, sys, torch, warnings
        from chameleon_mm.device.sim import SimDevice
        from chameleon_mm.pool.pool import PinnedPool

        class Loud(SimDevice):
            def free_pinned(self, memory):
                os.write(1, b"freed ")
                super().free_pinned(memory)

        class Event:
            def query(self):
                return False

            def synchronize(self):
                os.write(1, b"waited ")

        class Asked:
            def query(self):
                os.write(1, b"asked ")
                return True
            synchronize = query

        def leave(pool):
            pool.allocate_pageable(100).release(after=Event())
            pool.stats()
            loop = [pool.allocate(100), pool.allocate(100), pool.allocate_pageable(100)]
            loop.append(loop)  # only the collector, or nobody, takes these away

        forked, normal, last = (PinnedPool("1MiB", Loud()) for _ in range(3))
        leave(forked)
        leave(normal)
        leave(last)
        # Python 3.12 and later warn of other threads: they are NumPy's and torch's, and the child needs no lock of theirs.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        held = PinnedPool("1MiB", Loud())
        held.allocate(100).release(after=Event())
        # The child's copy of the lock is never given back. It asks for nothing that is behind it.
        held._ledger.lock.acquire()
        blocks = [last.allocate(100) for _ in range(4)]
        tensor = last.empty((3,), torch.float32)
        child = os.fork()
        if child == 0:
            held.close()
            for use in (
                lambda: held.allocate(100),  # says so without the lock
                lambda: last.empty((3,), torch.float32),
                lambda: last.allocate_pageable(100),
                lambda: setattr(last, "limit_bytes", 0),
                lambda: blocks[0].buffer,
                lambda: blocks[0].tensor((3,), torch.uint8),
                lambda: blocks[0].__dlpack__(),
            ):
                try:
                    use()
                except RuntimeError as error:
                    expected = f"made the pool ({os.getppid()}), got one in a forked child ({os.getpid()})"
                    os.write(1, b"told " if expected in str(error) else str(error).encode())
            del forked, held
            blocks.pop().release(after=Asked())
            blocks.clear()
            del tensor
            gc.collect()
            os._exit(0)
        held._ledger.lock.release()
        assert os.waitpid(child, 0)[1] == 0
        blocks.pop().release(after=Asked())
        kept = [blocks, tensor]
        kept.append(kept)
        del blocks, tensor
        os.write(1, b"parent ")
        del normal
        gc.collect()
    """
    # `forked` and `last` live to the end of the parent's interpreter, where their chunks go with the process.
    script = textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "told " * 7 + "parent freed "
    assert done.stderr == ""


# --- who may hold them


def test_nothing_that_gives_memory_back_can_be_copied_or_pickled(pool: PinnedPool) -> None:
    block, pageable = pool.allocate(100), pool.allocate_pageable(100)
    arena, raw = Arena(block, tuple), cast(Any, np.asarray(block).base)
    owners = (block, pageable, pool, CheckingAllocator(pool), arena, arena.part(0, 10), raw.obj.base)
    address = block.buffer.data_ptr()
    for owner in owners:
        for way in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=rf"{type(owner).__name__}: expected one object in one process, got a copy"):
                way(owner)
    assert pool.allocate(100).buffer.data_ptr() != address, "the copy gave the bytes back"
    assert pickle.loads(pickle.dumps(block.tensor((100,), torch.uint8))).shape == (100,)  # the bytes can be


# --- the life of a block


def test_release_is_idempotent_and_ends_the_views(pool: PinnedPool) -> None:
    block = pool.allocate(100)
    block.release()
    block.release(after=ManualEvent())
    assert block.released
    again = pool.allocate(100)
    block.release()
    assert (pool.stats().num_live, again.pending_events) == (1, ())
    for use in (lambda: block.buffer, lambda: block.wait_on(SimDevice().new_stream("d2h"))):
        with pytest.raises(BlockReleasedError, match="expected a live block, got one of 100 bytes"):
            use()


@pytest.mark.parametrize("checked", [False, True])
def test_the_collector_may_run_at_any_line(checked: bool, ledgered: Ledgered) -> None:
    before = gc.get_threshold()
    with PinnedPool("16MiB", ledgered, "64KiB") as pool:
        allocator = CheckingAllocator(pool) if checked else pool
        gc.set_threshold(1)
        try:
            for n in range(500):
                loop: list[Any] = [allocator.allocate(1 + 37 * n % 5000)]
                loop.append(loop)
        finally:
            gc.set_threshold(*before)
        del loop
        assert checked or pool.stats().num_live < 500, "the collector never ran"
        gc.collect()
        if isinstance(allocator, CheckingAllocator):
            allocator.close()
        assert pool.stats().num_live == 0


def test_two_threads_releasing_one_block_return_it_once(pool: PinnedPool) -> None:
    for _ in range(50):
        at_once([pool.allocate(100).release] * 2)
        assert pool.stats().num_live == 0


# --- views


def test_a_block_born_in_inference_mode_can_be_written_and_saved_for_backward_outside_of_it(pool: PinnedPool) -> None:
    with torch.inference_mode():
        block = pool.allocate(16)
        values, raw = block.tensor((4,), torch.float32), block.buffer
    values.fill_(1)
    raw.zero_()
    weight = torch.ones(4, requires_grad=True)
    (weight * values).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros(4))


# --- a limit that changes


def test_a_lowered_limit_gives_back_as_few_unused_chunks_as_will_do(pool: PinnedPool, ledgered: Ledgered) -> None:
    kept, waiting, *idle = (pool.allocate(16 * KIB) for _ in range(4))
    event = ManualEvent()
    waiting.release(after=event)
    idle.clear()
    pool.limit_bytes = "50KiB"
    assert (pool.limit_bytes, pool.stats().reserved_bytes, event.syncs) == (50 * KIB, 48 * KIB, 0)
    pool.limit_bytes = 16 * KIB
    assert event.syncs == 1, "the device still used the last chunk that had to go"
    assert list(ledgered.chunks) == [kept.buffer.data_ptr()]
    with pytest.raises(HostMemoryExhausted, match=r"limit is 16384 bytes.*raise limit_bytes"):
        pool.allocate(1)
    pool.limit_bytes = 32 * KIB
    assert pool.allocate(16 * KIB).buffer.data_ptr() != kept.buffer.data_ptr()


def test_while_live_blocks_hold_more_than_a_lowered_limit_new_ones_are_refused(pool: PinnedPool, ledgered: Ledgered) -> None:
    first, second, third = (pool.allocate(3 * PAGE) for _ in range(3))
    fill(first, 7)
    pool.limit_bytes = 32 * KIB
    assert pool.stats().reserved_bytes == 48 * KIB
    for nbytes in (PAGE, 16 * KIB):
        with pytest.raises(HostMemoryExhausted, match=r"lowered to 32768 bytes and 49152 are still reserved"):
            pool.allocate(nbytes)
    assert (pool.allocate(0).nbytes, holds(first, 7)) == (0, True)
    event = ManualEvent()
    third.release(after=event)
    pool.take_back()
    assert (len(ledgered.chunks), event.syncs) == (3, 0), "the device has not done with it, and nobody waits"
    event.complete = True
    pool.take_back()
    assert len(ledgered.chunks) == 2
    block = pool.allocate(PAGE)
    assert block.buffer.data_ptr() in {first.buffer.data_ptr() + 3 * PAGE, second.buffer.data_ptr() + 3 * PAGE}


# --- everything at once, against an oracle


class PoolMachine(RuleBasedStateMachine):
    """Random programs over a small pool. Every block has its own byte pattern; every page knows which events it waits for."""

    LIMIT, CHUNK = 24 * PAGE, 8 * PAGE
    steps = 0
    started = False  # the invariants are checked once before the first step, too

    def __init__(self) -> None:
        super().__init__()
        self.device = Ledgered()
        self.device.before_free = self.chunk_goes
        self.limit = self.highest_limit = self.LIMIT
        self.pool = PinnedPool(self.LIMIT, self.device, self.CHUNK)
        self.blocks: list[tuple[PinnedBlock, int]] = []
        self.waits: dict[int, set[Any]] = {}  # page's address -> events of its last owners
        self.events: list[ManualEvent] = []
        self.value = 0
        self.peak_live = 0

    def pages(self, block: PinnedBlock) -> range:
        first = block.buffer.data_ptr()
        return range(first, first + block.nbytes, PAGE)

    def live_pages(self) -> list[int]:
        return sorted(page for block, _ in self.blocks if not isinstance(block, PageableBlock) for page in self.pages(block))

    def holes(self, chunks: dict[int, int] | None = None) -> list[int]:
        """Sizes of the free blocks in `chunks`, None: in all, worked out from the chunks and the live blocks alone."""
        sizes, live = [], set(self.live_pages())
        for base, nbytes in (self.device.chunks if chunks is None else chunks).items():
            run = 0
            for page in range(base, base + nbytes, PAGE):
                run = 0 if page in live else run + PAGE
                if page + PAGE == base + nbytes or page + PAGE in live:
                    sizes.append(run)
        return sizes

    def used(self) -> dict[int, int]:
        """The chunks that hold a block."""
        live = self.live_pages()
        return {base: n for base, n in self.device.chunks.items() if any(base <= page < base + n for page in live)}

    def could_be_served(self) -> int:
        """Size of the largest block that there is room for, unused chunks given back."""
        used = self.used()
        room = self.limit - sum(used.values())
        must_shrink = sum(self.device.chunks.values()) > self.limit
        return max([room, *self.holes(used if must_shrink else None)]) if room >= 0 else 0

    def chunk_goes(self, address: int, nbytes: int) -> None:
        assert not any(address <= page < address + nbytes for page in self.live_pages()), "a chunk went under a live block"
        for page in range(address, address + nbytes, PAGE):
            assert all(event.complete for event in self.waits.pop(page, set())), "a chunk went while the device used it"

    def note(self, block: PinnedBlock, write: bool) -> None:
        self.value = (self.value + 1) % 256
        if write:
            fill(block, self.value)
        self.blocks.append((block, self.value if write else -1))
        self.peak_live = max(self.peak_live, len(self.live_pages()) * PAGE)

    @rule(nbytes=st.integers(0, 12 * PAGE), write=st.booleans())
    def allocate(self, nbytes: int, write: bool) -> None:
        need = -(-nbytes // PAGE) * PAGE
        served = need <= self.could_be_served()
        before, is_within = Counter(self.holes()), sum(self.device.chunks.values()) <= self.limit
        try:
            block = self.pool.allocate(nbytes)
        except HostMemoryExhausted:
            assert not served
            return
        assert served
        assert block.nbytes == nbytes
        assert not set(self.pages(block)) & set(self.live_pages()), "two blocks overlap"
        assert block.buffer.data_ptr() % PAGE == 0
        expected = {event for page in self.pages(block) for event in self.waits.get(page, ()) if not event.complete}
        assert set(block.pending_events) == expected
        assert len(block.pending_events) == len(expected), "each event once"
        self.note(block, write)
        assert not write or all(event.complete for event in expected), "the host wrote while the device read"
        fitting = [size for size in before if size >= need]
        if need and fitting and is_within:
            before[min(fitting)] -= 1
            before[min(fitting) - need] += 1
            assert +Counter(filter(None, self.holes())) == +Counter({size: n for size, n in before.items() if size}), "best fit"

    @rule(nbytes=st.integers(1, 12 * PAGE), write=st.booleans())
    def allocate_pageable(self, nbytes: int, write: bool) -> None:
        block = self.pool.allocate_pageable(nbytes)
        assert (type(block), block.nbytes, block.pending_events) == (PageableBlock, nbytes, ())
        self.note(block, write)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), how=st.sampled_from(["event", "bare", "drop"]))
    def release(self, data: st.DataObject, how: str) -> None:
        block, value = self.blocks.pop(data.draw(st.integers(0, len(self.blocks) - 1)))
        carried: set[Any] = set(block.pending_events)
        if value >= 0:
            assert holds(block, value)
            carried = set()
        pages = () if isinstance(block, PageableBlock) else self.pages(block)
        if how == "event":
            self.events.append(ManualEvent())
            carried.add(self.events[-1])
            block.release(after=self.events[-1])
            block.release()  # a second one changes nothing
        elif how == "bare":
            block.release()
        for page in pages:
            self.waits[page] = carried

    @precondition(lambda self: self.events)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        self.events.pop(data.draw(st.integers(0, len(self.events) - 1))).complete = True

    @rule(pages=st.integers(0, 32))
    def set_limit(self, pages: int) -> None:
        before = sum(self.device.chunks.values())
        self.limit = self.pool.limit_bytes = pages * PAGE
        self.highest_limit = max(self.highest_limit, self.limit)
        reserved = sum(self.device.chunks.values())
        assert reserved <= max(self.limit, sum(self.used().values()))
        assert reserved == before or before > self.limit, "nothing goes that need not"

    @rule()
    def take_back(self) -> None:
        syncs = [event.syncs for event in self.events]
        self.pool.take_back()
        assert [event.syncs for event in self.events] == syncs

    @invariant()
    def stats_agree(self) -> None:
        if self.started:
            PoolMachine.steps += 1
        self.started = True
        stats = self.pool.stats()
        pinned = [block.nbytes for block, _ in self.blocks if not isinstance(block, PageableBlock)]
        assert (stats.num_live, stats.requested_bytes) == (len(self.blocks), sum(pinned))
        assert stats.live_bytes == len(self.live_pages()) * PAGE
        assert stats.peak_live_bytes == self.peak_live
        assert stats.reserved_bytes == sum(self.device.chunks.values())
        holes = self.holes()
        assert stats.largest_free_bytes == max(holes, default=0)
        assert sum(holes) + stats.live_bytes == stats.reserved_bytes, "free + live = capacity"
        assert stats.live_bytes <= stats.peak_live_bytes <= stats.peak_reserved_bytes <= self.highest_limit
        assert stats.limit_bytes == self.limit

    def teardown(self) -> None:
        assert all(holds(block, value) for block, value in self.blocks if value >= 0)
        self.blocks.clear()
        assert all(run == nbytes for run, nbytes in zip(sorted(self.holes()), sorted(self.device.chunks.values()), strict=True))
        assert self.pool.stats().largest_free_bytes == max(self.device.chunks.values(), default=0), "all coalesced"
        self.pool.close()
        assert (self.device.chunks, self.pool._ledger.ending) == ({}, [])


@pytest.mark.ci
def test_the_machine_for_30_000_steps() -> None:
    """Steps are rules that ran and were followed by a check of the invariants, counted one by one where those are checked:
    the settings alone would overstate them, for hypothesis ends many a program early."""
    before = PoolMachine.steps
    while PoolMachine.steps - before < 30_000:
        run_state_machine_as_test(PoolMachine, settings=settings(max_examples=300, stateful_step_count=60, deadline=None))


# --- the free list itself: what it refuses, and which of equal blocks it takes


def observed(units: FreeList) -> tuple[int, ...]:
    return (units.capacity, units.live_bytes, units.largest_free, units.num_live)


def test_what_is_not_live_is_not_freed_and_a_region_with_a_block_stays() -> None:
    units = FreeList(4096)
    block, base = units.allocate(4096), units.add_region(8192)
    assert base > 4096, "regions must never be adjacent"
    before = observed(units)
    for offset in (-4096, 1, 4096, base):
        with pytest.raises(ValueError, match="expected the offset of a live block"):
            units.free(offset)
    assert (units.is_region_free(0), units.is_region_free(base)) == (False, True)
    with pytest.raises(ValueError, match="without live blocks"):
        units.remove_region(0)
    assert observed(units) == before
    assert (units.remove_region(base), units.free(block or 0)) == (8192, 4096)
    with pytest.raises(ValueError, match="expected the offset of a live block"):
        units.free(block or 0)
    with pytest.raises(ValueError, match="add_region"):
        units.remove_region(base)


@pytest.mark.parametrize(
    ("capacity", "alignment", "said"),
    [
        *((capacity, 4096, "4096") for capacity in (-4096, 1, 4095, 4097)),  # no multiple of the alignment
        *((12_000, alignment, "alignment: expected a power of two") for alignment in (0, -4096, 3, 6000)),
    ],
)
def test_a_capacity_or_an_alignment_that_cannot_be_is_refused(capacity: int, alignment: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FreeList(capacity, alignment=alignment)


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


def test_among_equal_sizes_the_last_one_freed_is_taken() -> None:
    units = FreeList(7 * 4096)
    offsets = [units.allocate(4096) or 0 for _ in range(7)]
    for at in (1, 5, 3):
        units.free(offsets[at])
    assert [units.allocate(4096) for _ in range(3)] == [offsets[at] for at in (3, 5, 1)]
