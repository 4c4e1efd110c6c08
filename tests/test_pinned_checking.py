"""`CheckingAllocator`: its blocks are the pool's; it finds blocks still out at close."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from chameleon_mm.device.sim import SimDevice
from chameleon_mm.errors import BlockInUseError, HostMemoryExhausted, PoolStateError
from chameleon_mm.pool.block import PinnedBlock
from chameleon_mm.pool.checking import CheckingAllocator
from chameleon_mm.pool.pool import PinnedPool
from chameleon_mm.units import KIB, MIB


@pytest.fixture
def pool(sim: SimDevice) -> Iterator[PinnedPool]:
    with PinnedPool("1MiB", sim, "1MiB") as pool:
        yield pool


# --- its blocks are the pool's


def test_a_checked_block_is_a_block(pool: PinnedPool) -> None:
    with CheckingAllocator(pool) as checked:
        block = checked.allocate(6000)
        assert (block.nbytes, block.buffer.numel()) == (6000, 6000)
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
def test_a_dropped_block_is_back_and_one_with_a_view_is_out(pool: PinnedPool) -> None:
    checked = CheckingAllocator(pool)
    view = checked.allocate(100).tensor((25,), torch.float32)
    with pytest.raises(PoolStateError, match="got 1 of 100 B in all"):
        checked.close()
    del view
    checked.close()
    assert pool.stats().num_live == 0


def test_exhaustion_goes_through_and_leaves_it_usable(pool: PinnedPool) -> None:
    with CheckingAllocator(pool) as checked:
        with pytest.raises(HostMemoryExhausted):
            checked.allocate(2 * MIB)
        checked.allocate(1000).release()
    assert pool.stats().num_live == 0


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
