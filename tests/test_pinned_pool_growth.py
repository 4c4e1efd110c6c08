"""Memory of the pinned pool: sizes of chunks, a full pool, and every registration that may fail."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from chameleon_mm.device.sim import SimDevice
from chameleon_mm.errors import HostMemoryExhausted, PoolStateError
from chameleon_mm.pool.block import PageableBlock, PinnedBlock
from chameleon_mm.pool.pool import PinnedPool
from chameleon_mm.units import GIB, KIB, MIB
from tests._fakes import CountingDevice, ManualEvent

PAGE = 4096
CHUNK = 16 * KIB
LIMIT = 4 * CHUNK


class Scripted(CountingDevice):
    """A device that counts its host memory, fails to pin on request, and pins only while the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.pageable: list[weakref.ref[Tensor]] = []
        self.pins = 0
        self.fail_at: set[int] = set()
        self.error: type[BaseException] = HostMemoryExhausted
        self.gate = threading.Event()
        self.gate.set()
        self.pinning = threading.Event()
        self.at_once = 0

    def alloc_pinned(self, nbytes: int) -> Tensor:
        self.pins += 1
        number = self.pins
        self.at_once += 1
        assert self.at_once == 1, "two chunks were pinned at once"
        self.pinning.set()
        try:
            assert self.gate.wait(20)
            if number in self.fail_at:
                raise self.error(f"no pages to lock for chunk {number}")
            return super().alloc_pinned(nbytes)
        finally:
            self.at_once -= 1

    def alloc_pageable(self, nbytes: int) -> Tensor:
        memory = super().alloc_pageable(nbytes)
        self.pageable.append(weakref.ref(memory))
        return memory

    @property
    def held_pageable(self) -> int:
        return sum(memory() is not None for memory in self.pageable)


class Large(SimDevice):
    """Return chunks of any size: addresses alone, without accessible memory."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def alloc_pinned(self, nbytes: int) -> Tensor:
        self.sizes.append(nbytes)
        return torch.empty(1, dtype=torch.uint8).expand(nbytes)

    def free_pinned(self, memory: Tensor) -> None:
        self.sizes.remove(memory.numel())


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    device = Scripted()
    yield device
    device.gate.set()


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def full(device: Scripted) -> tuple[PinnedPool, list[PinnedBlock]]:
    """A pool at its limit, and the blocks that fill it."""
    pool = PinnedPool(LIMIT, device, CHUNK)
    return pool, [pool.allocate(CHUNK) for _ in range(4)]


# --- sizes of chunks


def test_chunks_grow_with_what_is_reserved_up_to_a_gib() -> None:
    device = Large()
    with PinnedPool("200GiB", device) as pool:
        blocks = [pool.allocate(16 * MIB) for _ in range(3000)]
        assert device.sizes[:3] == [16 * MIB] * 3
        for number, nbytes in enumerate(device.sizes):
            before = sum(device.sizes[:number])
            assert nbytes % (16 * MIB) == 0, "whole requests"
            assert nbytes < min(max(before / 16, 16 * MIB), GIB) + 16 * MIB
        assert device.sizes[-1] == GIB
        assert sum(device.sizes) <= 3000 * 16 * MIB * 17 / 16
        blocks.clear()


def test_a_chunk_holds_whole_requests() -> None:
    device = Large()
    with PinnedPool("1GiB", device) as pool:
        blocks = [pool.allocate(9 * MIB) for _ in range(2)]
        assert (device.sizes, pool.stats().largest_free_bytes) == ([18 * MIB], 0)
        blocks.append(pool.allocate(100 * MIB + 1))
        assert device.sizes == [18 * MIB, 100 * MIB + PAGE]
        blocks.clear()


def test_a_small_pool_pins_no_more_than_it_needs() -> None:
    device = Large()
    with PinnedPool("64MiB", device) as pool:
        blocks = [pool.allocate(MIB)]
        assert device.sizes == [16 * MIB]
        blocks += [pool.allocate(9 * MIB) for _ in range(6)]
        assert sum(device.sizes) <= 64 * MIB
        blocks.clear()


def test_unused_chunks_are_merged_into_the_one_that_a_larger_request_needs(scripted: Scripted) -> None:
    with PinnedPool("1MiB", scripted, CHUNK) as pool:
        for block in [pool.allocate(CHUNK) for _ in range(3)]:
            block.release()
        large = pool.allocate(CHUNK + 1)
        assert sorted(scripted.chunks.values()) == [CHUNK, 2 * CHUNK]
        assert pool.stats().peak_reserved_bytes == 3 * CHUNK
        large.release()
        assert pool.allocate(2 * CHUNK).nbytes == 2 * CHUNK
        assert scripted.pins == 4, "the next such request finds it"


def test_chunks_that_the_device_still_uses_are_not_merged(scripted: Scripted) -> None:
    with PinnedPool("1MiB", scripted, CHUNK) as pool:
        event = ManualEvent()
        pool.allocate(CHUNK).release(after=event)
        pool.allocate(CHUNK + 1).release()
        assert (sorted(scripted.chunks.values()), event.complete) == ([CHUNK, CHUNK + PAGE], False)


def test_one_registration_of_512_gib_is_refused_before_it_is_tried() -> None:
    device = Large()
    with PinnedPool("2TiB", device) as pool:
        with pytest.raises(HostMemoryExhausted, match=r"one registration of 512\.0 GiB or more fails"):
            pool.allocate(512 * GIB)
        assert device.sizes == []
        pool.allocate(512 * GIB - PAGE).release()
        with pytest.raises(HostMemoryExhausted, match="several smaller"):
            pool.allocate(512 * GIB - PAGE + 1)
    with pytest.raises(ValueError, match=r"less than 512\.0 GiB"):
        PinnedPool("2TiB", device, "512GiB")


# --- threads


def test_allocations_that_fit_do_not_wait_for_a_chunk_under_way_and_others_are_served_from_it(scripted: Scripted) -> None:
    with PinnedPool(2 * CHUNK, scripted, CHUNK) as pool:
        kept = pool.allocate(PAGE)
        scripted.gate.clear()
        scripted.pinning.clear()
        served: list[PinnedBlock] = []
        other = in_thread(lambda: served.append(pool.allocate(CHUNK)))
        assert scripted.pinning.wait(20)
        fitting = pool.allocate(2 * PAGE)  # would hang here if pinning held the lock
        assert pool.stats().reserved_bytes == CHUNK
        waiting = in_thread(lambda: served.append(pool.allocate(2 * PAGE)))
        fitting.release()
        scripted.gate.set()
        for thread in (other, waiting):
            thread.join(20)
        assert (sorted(block.nbytes for block in served), scripted.pins) == ([2 * PAGE, CHUNK], 2)
        del kept
        served.clear()


def test_threads_that_need_memory_at_once_stay_within_the_limit(scripted: Scripted) -> None:
    """Memory being pinned counts: two threads that each find room for one chunk must not both take it."""
    with PinnedPool(2 * CHUNK, scripted, CHUNK) as pool:
        first = pool.allocate(CHUNK)
        scripted.gate.clear()
        got: list[object] = []

        def work() -> None:
            try:
                got.append(pool.allocate(CHUNK))
            except HostMemoryExhausted as refusal:
                got.append(refusal)

        threads = [in_thread(work) for _ in range(3)]
        scripted.gate.set()
        for thread in threads:
            thread.join(20)
        assert sorted(type(one).__name__ for one in got) == ["HostMemoryExhausted", "HostMemoryExhausted", "PinnedBlock"]
        assert (sum(scripted.chunks.values()), scripted.pins) == (2 * CHUNK, 2)
        del first
        got.clear()
        gc.collect()  # a refusal's traceback holds the frame that holds the list


# --- a full pool


def test_a_pageable_block_is_ordinary_memory_beside_the_limit(scripted: Scripted) -> None:
    pool, blocks = full(scripted)
    block = pool.allocate_pageable(5000)
    assert isinstance(block, PageableBlock)
    assert (type(blocks[0]), block.nbytes, block.buffer.numel()) == (PinnedBlock, 5000, 5000)
    block.numpy((5000,), np.uint8)[:] = 7
    assert torch.equal(block.buffer, torch.full((5000,), 7, dtype=torch.uint8))
    stats = pool.stats()
    assert (scripted.held_pageable, stats.num_live) == (1, 5)
    assert (stats.requested_bytes, stats.live_bytes, stats.reserved_bytes) == (LIMIT, LIMIT, LIMIT)
    with pytest.raises(PoolStateError, match="got 5 of"):
        pool.close()
    block.release()
    assert (pool.stats().num_live, scripted.held_pageable) == (4, 0)
    blocks.pop().release()
    assert type(pool.allocate(5000)) is PinnedBlock
    blocks.clear()
    pool.close()


@pytest.mark.usefixtures("no_gc")
def test_pageable_memory_is_kept_until_its_event_is_complete(scripted: Scripted) -> None:
    with PinnedPool("1MiB", scripted) as pool:
        first, second = ManualEvent(), ManualEvent()
        pool.allocate_pageable(100).release(after=first)
        pool.allocate_pageable(200).release(after=second)
        dropped = pool.allocate_pageable(400)
        del dropped
        assert (pool.stats().num_live, scripted.held_pageable) == (0, 2)
        second.complete = True
        pool.stats()
        assert (scripted.held_pageable, first.complete) == (1, False)
    assert (first.complete, scripted.held_pageable) == (True, 0), "close waits"


@pytest.mark.usefixtures("no_gc")
def test_a_dropped_pool_waits_for_the_device_before_pageable_memory_goes(scripted: Scripted) -> None:
    pool = PinnedPool("1MiB", scripted)
    pool.allocate_pageable(100).release(after=ManualEvent())
    pool.stats()
    assert scripted.held_pageable == 1
    block = pool.allocate_pageable(100)
    del pool
    assert scripted.held_pageable == 2, "the block holds its pool"
    del block
    assert scripted.held_pageable == 0


def test_pageable_memory_is_bounded_by_what_the_machine_has(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, blocks = full(scripted)
    monkeypatch.setattr("chameleon_mm.pool.pool.available_host_bytes", lambda: 5000)
    assert pool.allocate_pageable(5000).nbytes == 5000
    with pytest.raises(HostMemoryExhausted, match=r"asked for 5001 bytes, but 4\.88 KiB of host memory are available"):
        pool.allocate_pageable(5001)
    monkeypatch.setattr("chameleon_mm.pool.pool.available_host_bytes", lambda: 0)
    assert pool.allocate_pageable(5001).nbytes == 5001, "nothing says how much there is: the device decides"
    blocks.clear()


def test_pageable_blocks_of_no_bytes_and_of_a_closed_pool(scripted: Scripted) -> None:
    with PinnedPool("1MiB", scripted) as pool:
        nothing = pool.allocate_pageable(0)
        assert (nothing.nbytes, type(nothing), pool.stats().num_live) == (0, PageableBlock, 1)
        nothing.release()
    with pytest.raises(PoolStateError, match="allocate_pageable"):
        pool.allocate_pageable(1)


# --- every registration may fail

SCENARIO = [CHUNK, PAGE, 2 * CHUNK, CHUNK, 3 * PAGE, PAGE]
"""Sizes that make a pool of chunks of `CHUNK` register five times."""


def serve(pool: PinnedPool) -> list[PinnedBlock]:
    return [pool.allocate(nbytes) for nbytes in SCENARIO]


def check_whole(pool: PinnedPool, device: Scripted) -> None:
    """The books agree with the device, and the same scenario succeeds."""
    assert pool.stats().reserved_bytes == sum(device.chunks.values())
    device.fail_at.clear()
    blocks = serve(pool)
    assert {type(block) for block in blocks} == {PinnedBlock}
    blocks.clear()
    stats = pool.stats()
    assert (stats.num_live, stats.live_bytes, device.held_pageable) == (0, 0, 0)
    assert stats.largest_free_bytes == max(device.chunks.values())
    pool.close()
    assert device.chunks == {}


def registrations() -> int:
    device = Scripted()
    with PinnedPool("1MiB", device, CHUNK) as pool:
        serve(pool).clear()
    return device.pins


REGISTRATIONS = range(1, registrations() + 1)
assert len(REGISTRATIONS) >= 4


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("nth", REGISTRATIONS)
@pytest.mark.parametrize("error", [HostMemoryExhausted, MemoryError, RuntimeError, KeyboardInterrupt])
def test_the_nth_registration_fails_and_raises(scripted: Scripted, nth: int, error: type[BaseException]) -> None:
    """Other errors than that of no memory are passed on as they are."""
    pool = PinnedPool("1MiB", scripted, CHUNK)
    scripted.fail_at, scripted.error = {nth}, error
    own = f"no pages to lock for chunk {nth}"
    said = rf"asked the device for a chunk of \d+ bytes, got: {own}\. \d+ of at most {MIB} bytes"
    no_memory = issubclass(error, MemoryError)
    with pytest.raises(HostMemoryExhausted if no_memory else error, match=said if no_memory else f"^{own}$"):
        serve(pool)
    gc.collect()  # the error that pytest keeps has frames, and they the blocks
    assert pool.stats().num_live == 0, "what the scenario had is back"
    check_whole(pool, scripted)
