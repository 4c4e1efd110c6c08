"""A pool in the shape of CuPy's: the behaviour that CuPy tests of its own pointers and pool, as cases of ours."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from chameleon_mm.device.protocols import Device
from chameleon_mm.device.sim import SimDevice
from chameleon_mm.errors import BlockInUseError, HostMemoryExhausted
from chameleon_mm.pinned import PinnedPool
from chameleon_mm.pinned.malloc import MallocPointer, PinnedMalloc
from chameleon_mm.units import MIB


@pytest.fixture
def memory(sim: SimDevice) -> Iterator[PinnedMalloc]:
    with PinnedPool("1MiB", sim, "256KiB") as pool:
        yield PinnedMalloc(pool)


# --- pointers


def test_a_pointer_is_its_address(memory: PinnedMalloc) -> None:
    pointer = memory.malloc(1)
    assert int(pointer) == pointer.ptr == pointer.mem.ptr == int(pointer.mem) > 0
    assert (pointer.size(), pointer.mem.size) == (1, 1)


def test_pointers_move_forward_from_either_side_and_in_place(memory: PinnedMalloc) -> None:
    pointer = memory.malloc(8)
    start = int(pointer)
    for moved in (pointer + 4, 4 + pointer):
        assert isinstance(moved, MallocPointer)
        assert (int(moved), moved.size(), moved.mem) == (start + 4, 4, pointer.mem)
    pointer += 4
    assert isinstance(pointer, MallocPointer)
    assert (int(pointer), pointer.size()) == (start + 4, 4)


def test_pointers_move_back(memory: PinnedMalloc) -> None:
    pointer = memory.malloc(8) + 4
    start = int(pointer) - 4
    assert isinstance(pointer - 4, MallocPointer)
    assert int(pointer - 4) == start
    pointer -= 4
    assert (int(pointer), pointer.size()) == (start, 8)


def test_a_pointer_gives_the_bytes_from_where_it_points(memory: PinnedMalloc) -> None:
    pointer = memory.malloc(16)
    array = np.frombuffer((pointer + 8).as_memoryview(), np.int32)
    assert (array.ctypes.data, array.size, array.flags.writeable) == (int(pointer) + 8, 2, True)
    array[:] = [5, 6]
    assert bytes(pointer.as_memoryview()[8:]) == b"\5\0\0\0\6\0\0\0"


# --- the pool


def test_live_memory_is_nobody_elses(memory: PinnedMalloc) -> None:
    pointers = [memory.malloc(nbytes) for nbytes in (1000, 1000, 2000)]
    assert len({pointer.ptr for pointer in pointers}) == 3


@pytest.mark.usefixtures("no_gc")
def test_dropped_memory_is_given_again(memory: PinnedMalloc) -> None:
    pointer = memory.malloc(1000)
    address = pointer.ptr
    del pointer
    assert memory.malloc(1000).ptr == address


@pytest.mark.usefixtures("no_gc")
def test_a_pointer_into_the_middle_keeps_all_of_it(memory: PinnedMalloc) -> None:
    pointer = memory.malloc(1000)
    inside = pointer + 500
    address = pointer.ptr
    del pointer
    assert memory.malloc(1000).ptr != address
    del inside
    assert memory.malloc(1000).ptr == address


@pytest.mark.usefixtures("no_gc")
def test_dropped_memory_serves_another_size_too(memory: PinnedMalloc) -> None:
    """CuPy's pool keeps a list for each power of two, and would reserve more here."""
    pointer = memory.malloc(1000)
    reserved = memory.stats().to_dict()["reserved_bytes"]
    del pointer
    assert memory.malloc(200_000).size() == 200_000
    assert memory.stats().to_dict()["reserved_bytes"] == reserved


@pytest.mark.usefixtures("no_gc")
def test_free_all_blocks_gives_back_what_nobody_uses(memory: PinnedMalloc) -> None:
    kept, dropped = memory.malloc(200_000), memory.malloc(200_000)
    del dropped
    assert (memory.stats().to_dict()["num_chunks"], memory.n_free_blocks()) == (2, 1)
    memory.free_all_blocks()
    assert (memory.stats().to_dict()["num_chunks"], memory.n_free_blocks()) == (1, 0)
    assert kept.size() == 200_000


def test_memory_is_freed_by_hand_through_its_mem(memory: PinnedMalloc) -> None:
    mem = memory.malloc(1).mem
    assert memory.n_free_blocks() == 0
    mem.free()
    assert (memory.n_free_blocks(), mem.ptr, mem.size) == (1, 0, 0)
    memory.free_all_blocks()
    assert memory.n_free_blocks() == 0


def test_freeing_twice_frees_once(memory: PinnedMalloc) -> None:
    mem = memory.malloc(1).mem
    mem.free()
    mem.free()
    assert memory.n_free_blocks() == 1
    again = memory.malloc(1)
    mem.free()
    assert (memory.n_free_blocks(), again.size()) == (0, 1)


def test_no_bytes_have_no_address_and_are_no_free_block(memory: PinnedMalloc) -> None:
    pointer = memory.malloc(0)
    assert (pointer.ptr, pointer.size(), pointer.as_memoryview().nbytes) == (0, 0, 0)
    pointer.mem.free()
    assert memory.n_free_blocks() == 0


def test_an_unused_pool_has_nothing_to_free(memory: PinnedMalloc) -> None:
    assert memory.n_free_blocks() == 0
    memory.free_all_blocks()
    assert memory.n_free_blocks() == 0


def test_free_blocks_are_those_that_no_byte_was_given_of(memory: PinnedMalloc) -> None:
    parts = [memory.malloc(4096) for _ in range(4)]
    starts = [part.ptr for part in parts]
    parts.clear()
    assert memory.n_free_blocks() == 4
    two = memory.malloc(2 * 4096)
    touched = sum(two.ptr < start + 4096 and start < two.ptr + 2 * 4096 for start in starts)
    assert memory.n_free_blocks() == 4 - touched
    del two
    assert memory.n_free_blocks() == 4 - touched + 1


def test_memory_with_a_view_is_not_freed_by_hand_and_outlives_its_pointer(memory: PinnedMalloc) -> None:
    pointer = memory.malloc(100)
    view = pointer.as_memoryview()
    with pytest.raises(BlockInUseError):
        pointer.mem.free()
    assert pointer.mem.size == 100
    address = pointer.ptr
    del pointer
    assert memory.malloc(100).ptr != address
    del view
    assert memory.n_free_blocks() == 2


def test_past_the_limit_it_refuses_and_goes_on(memory: PinnedMalloc) -> None:
    with pytest.raises(HostMemoryExhausted):
        memory.malloc(2 * MIB)
    assert memory.malloc(100).size() == 100


def test_memory_freed_under_a_copy_is_written_only_after_it(device: Device) -> None:
    nbytes = 64 << 10
    with PinnedPool(nbytes, device) as pool:
        memory, compute = PinnedMalloc(pool), device.current_stream()
        pointer = memory.malloc(nbytes)
        pointer.as_memoryview()[:] = b"\7" * nbytes
        target = compute.alloc(nbytes)
        compute.copy(target, pointer.mem.block.buffer)
        address = pointer.ptr
        del pointer
        again = memory.malloc(nbytes)  # the host waits here, for it is about to write
        assert (again.ptr, again.mem.block.pending_events) == (address, ())
        again.as_memoryview()[:] = b"\0" * nbytes
        device.synchronize()
        assert bool((target.cpu() == 7).all())
        del again


def test_a_free_by_the_collector_calls_no_device(sim: SimDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    with PinnedPool("1MiB", sim) as pool:
        memory = PinnedMalloc(pool)
        loop: list[Any] = [memory.malloc(100)]
        loop.append(loop)
        recorded: list[str] = []
        current = sim.current_stream

        def asked() -> Any:
            recorded.append("asked")
            return current()

        monkeypatch.setattr(sim, "current_stream", asked)
        del loop
        gc.collect()
        assert recorded == []
        assert memory.malloc(MIB).size() == MIB
        assert recorded == ["asked"]


def test_threads_share_it(sim: SimDevice) -> None:
    with PinnedPool("8MiB", sim) as pool:
        memory = PinnedMalloc(pool)
        wrong: list[str] = []

        def work(value: int) -> None:
            for n in range(100):
                pointer = memory.malloc(1 + 777 * n % 9000)
                pointer.as_memoryview()[:] = bytes([value]) * pointer.size()
                if set(bytes(pointer.as_memoryview())) != {value}:
                    wrong.append(f"{value}s were overwritten")

        threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        memory.free_all_blocks()
        assert (memory.n_free_blocks(), pool.stats().reserved_bytes) == (0, 0)
