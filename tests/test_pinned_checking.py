"""`CheckingAllocator`: its blocks are blocks; it finds writes beside one, second releases and blocks still out at close."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from chameleon_mm.device.sim import SimDevice
from chameleon_mm.errors import BlockCorruptedError, BlockInUseError, BlockReleasedError, HostMemoryExhausted, PoolStateError
from chameleon_mm.pool.block import PinnedBlock
from chameleon_mm.pool.checking import POISON_BYTE, ZONE_BYTES, CheckingAllocator
from chameleon_mm.pool.pool import PinnedPool
from chameleon_mm.units import KIB, MIB
from tests._fakes import BrokenStream, ManualEvent, RecordingStream


@pytest.fixture
def pool(sim: SimDevice) -> Iterator[PinnedPool]:
    with PinnedPool("1MiB", sim, "1MiB") as pool:
        yield pool


# --- its blocks are blocks


def test_a_checked_block_is_a_block(pool: PinnedPool) -> None:
    with CheckingAllocator(pool) as checked:
        assert (checked.pool, checked.device) == (pool, pool.device)
        block = checked.allocate(6000)
        assert (block.nbytes, block.buffer.numel(), block.buffer.data_ptr() % 4096, block.pageable) == (6000, 6000, 0, False)
        view = block.tensor((1500,), torch.float32)
        view.fill_(2)
        with pytest.raises(BlockInUseError):
            block.release()
        assert pool.stats().num_live == 1
        del view
        block.release()
        assert block.released
        zero, text = checked.allocate(0), checked.allocate("4KiB")
        assert (zero.buffer.numel(), text.buffer.numel()) == (0, 4096)
        zero.release()
        text.release()
        checked.close()
        assert pool.stats().num_live == 0


@pytest.mark.usefixtures("no_gc")
def test_a_dropped_block_returns_and_holds_its_allocator(pool: PinnedPool) -> None:
    checked = CheckingAllocator(pool)
    block = checked.allocate(100)
    del checked  # the block holds it
    assert pool.stats().num_live == 1
    del block
    assert pool.stats().num_live == 0


def test_the_host_waits_for_the_earlier_user_and_the_pool_gets_no_event(pool: PinnedPool) -> None:
    event, later = ManualEvent(), ManualEvent()
    pool.allocate(MIB).release(after=event)
    with CheckingAllocator(pool) as checked:
        stream: Any = RecordingStream()
        block = checked.allocate(MIB - 2 * ZONE_BYTES, stream)
        assert event.complete, "it writes the block, so the host has waited"
        block.release(after=later)
        assert pool.stats().num_live == 1, "the device may still write into it"
        later.complete = True
        checked.stats()
        assert pool.allocate(MIB).pending_events == ()


def test_exhaustion_goes_through_and_leaves_it_usable(pool: PinnedPool) -> None:
    with CheckingAllocator(pool) as checked:
        with pytest.raises(HostMemoryExhausted):
            checked.allocate(2 * MIB)
        checked.allocate(1000).release()
    assert pool.stats().num_live == 0


def test_a_stream_that_cannot_wait_leaves_nothing_behind(pool: PinnedPool) -> None:
    event = ManualEvent()
    pool.allocate(MIB).release(after=event)
    broken: Any = BrokenStream()
    with CheckingAllocator(pool) as checked:
        with pytest.raises(RuntimeError, match="gone"):
            checked.allocate(4096, broken)
        gc.collect()
        event.complete = True
        checked.allocate(4096).release()
    assert pool.stats().num_live == 0


# --- what it finds


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
        BlockCorruptedError, match=rf"5000 bytes, allocated at test_pinned_checking.*1 bytes, the first {where} \(0x17\)"
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


# --- blocks that are still out


def test_close_lists_what_is_out_with_the_stack_that_took_each(pool: PinnedPool) -> None:
    checked = CheckingAllocator(pool)

    def loads() -> list[PinnedBlock]:
        return [checked.allocate(1000) for _ in range(2)]

    def caches() -> PinnedBlock:
        return checked.allocate(5 * KIB)

    blocks = [*loads(), caches()]
    checked.allocate(10).release()
    with pytest.raises(
        PoolStateError, match=r"close: expected no live block, got 3 of 6\.95 KiB in all; release them.*close again: "
    ) as caught:
        checked.close()
    first, second = str(caught.value).split("close again: ")[1].split("; ")
    here = "test_close_lists_what_is_out_with_the_stack_that_took_each"
    assert (
        first.startswith("1 of 5120 bytes allocated at test_pinned_checking.py:")
        and "in caches < test_pinned_checking.py:" in first
    )
    assert second.startswith("2 of 2000 bytes allocated at test_pinned_checking.py:") and f"in {here}" in second
    blocks.pop().release()
    blocks.clear()
    checked.close()
    checked.close()


def test_an_error_inside_with_is_what_the_caller_sees(pool: PinnedPool, caplog: pytest.LogCaptureFixture) -> None:
    checked = CheckingAllocator(pool)
    with caplog.at_level(logging.WARNING), pytest.raises(ZeroDivisionError), checked:
        block = checked.allocate(100)
        _ = 1 / 0
    assert "got 1 of 100 B in all" in caplog.text
    block.release()
    with pytest.raises(PoolStateError), checked:
        block = checked.allocate(100)
    block.release()
    checked.close()
