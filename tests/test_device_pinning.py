"""Pinning on a machine without a GPU: the pages are real, the driver is played by functions that may refuse."""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import re
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from chameleon_mm.device.pinning import PageLocker, PinningCalls, populated_pages
from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.units import MIB


class FakeDriver:
    """Keeps a list of what it was asked, and refuses what it is told to."""

    def __init__(self, *refuses: str) -> None:
        self.refuses = refuses
        self.log: list[str] = []
        self.registered: dict[int, int] = {}
        self.pending_error = False

    def _asked(self, call: str) -> None:
        self.log.append(call)
        if call in self.refuses:
            self.pending_error = True
            raise RuntimeError(f"{call}: out of memory (2)")

    def register(self, address: int, nbytes: int) -> None:
        self._asked("register")
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        self._asked("unregister")
        del self.registered[address]

    def host_alloc(self, nbytes: int) -> Tensor:
        self._asked("host_alloc")
        return torch.zeros(nbytes, dtype=torch.uint8)

    def host_free(self, memory: Tensor) -> None:
        self._asked("host_free")

    def clear_error(self) -> None:
        self.pending_error = False

    def calls(self, *, can_register: bool = True) -> PinningCalls:
        return PinningCalls(
            register=self.register if can_register else None,
            unregister=self.unregister,
            host_alloc=self.host_alloc,
            host_free=self.host_free,
            clear_error=self.clear_error,
        )


def _write_by_hand(failure: int) -> Callable[[int, int, int], int]:
    return lambda address, nbytes, advice: failure


def _is_mapped(address: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), ctypes.create_string_buffer(1)) == 0)


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 3 * MIB + 5])
def test_pinned_memory_is_whole_aligned_and_writable(nbytes: int) -> None:
    driver = FakeDriver()
    memory = PageLocker(driver.calls()).pin(nbytes)
    assert (memory.dtype, tuple(memory.shape), memory.is_contiguous()) == (torch.uint8, (nbytes,), True)
    assert memory.data_ptr() % mmap.PAGESIZE == 0
    assert driver.registered == {memory.data_ptr(): nbytes}
    memory.fill_(7)
    assert int(memory.long().sum()) == 7 * nbytes


def test_unpinning_unregisters_and_a_view_outlives_it() -> None:
    driver = FakeDriver()
    locker = PageLocker(driver.calls())
    memory = locker.pin(8192)
    view = memory[4096:]
    view.fill_(3)
    locker.unpin(memory)
    del memory
    assert driver.registered == {}
    assert view.eq(3).all()  # the mapping lives as long as any view: late readers see bytes, not a segfault


def test_what_is_pinned_outlives_its_tensor() -> None:
    driver = FakeDriver()
    locker = PageLocker(driver.calls())
    address = locker.pin(4096).data_ptr()
    ctypes.memset(address, 1, 4096)  # a mapping that went with the tensor would fault here
    assert driver.registered == {address: 4096}


def test_only_what_was_pinned_is_unpinned_whole_and_once() -> None:
    driver = FakeDriver()
    locker = PageLocker(driver.calls())
    memory = locker.pin(8192)
    for wrong in (memory[:4096], memory[4096:], torch.zeros(8192, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="whole and not yet freed"):
            locker.unpin(wrong)
    locker.unpin(memory)
    with pytest.raises(ValueError, match="whole and not yet freed"):
        locker.unpin(memory)
    assert driver.log == ["register", "unregister"]


@pytest.mark.parametrize("nbytes", [0, -1])
def test_nothing_is_not_pinned(nbytes: int) -> None:
    with pytest.raises(ValueError, match="expected 1 byte or more"):
        PageLocker(FakeDriver().calls()).pin(nbytes)


def test_a_refused_registration_falls_back_and_leaves_no_error_behind() -> None:
    driver = FakeDriver("register")
    locker = PageLocker(driver.calls())
    memory = locker.pin(4096)
    assert driver.log == ["register", "host_alloc"]
    assert not driver.pending_error
    locker.unpin(memory)
    assert driver.log[2:] == ["host_free"]


def test_refused_pages_are_gone_before_the_fallback_asks_for_as_many(no_gc: None, caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver("register")
    made: list[int] = []
    mapped_at_fallback: list[bool] = []

    def register(address: int, nbytes: int) -> None:
        made.append(address)
        driver.register(address, nbytes)

    def host_alloc(nbytes: int) -> Tensor:
        mapped_at_fallback.append(_is_mapped(made[0]))
        return driver.host_alloc(nbytes)

    PageLocker(replace(driver.calls(), register=register, host_alloc=host_alloc)).pin(64 * MIB)
    assert mapped_at_fallback == [False]
    assert "register: out of memory (2)" in caplog.text


def test_a_device_without_registration_gets_the_drivers_own() -> None:
    driver = FakeDriver()
    locker = PageLocker(driver.calls(can_register=False))
    locker.unpin(locker.pin(4096))
    assert driver.log == ["host_alloc", "host_free"]


def test_refused_twice_says_what_both_said_and_what_there_is() -> None:
    driver = FakeDriver("register", "host_alloc")
    with pytest.raises(HostMemoryExhausted) as caught:
        PageLocker(driver.calls()).pin(5 * MIB)
    said = str(caught.value)
    assert "expected 5.00 MiB (5242880 bytes)" in said
    assert "register: out of memory (2); then host_alloc: out of memory (2)" in said
    assert "Host memory available:" in said
    assert "memlock limit:" in said
    assert "Ask for less" in said
    assert not driver.pending_error
    assert isinstance(caught.value, MemoryError)


def test_more_than_any_machine_has_is_an_error_of_ours() -> None:
    with pytest.raises(HostMemoryExhausted):
        PageLocker(FakeDriver("host_alloc").calls()).pin(1 << 60)


def test_pages_that_cannot_be_unregistered_are_kept() -> None:
    driver = FakeDriver("unregister")
    locker = PageLocker(driver.calls())
    memory = locker.pin(4096)
    address, alive = memory.data_ptr(), weakref.ref(memory)
    locker.unpin(memory)
    del memory
    assert alive() is not None  # unmapped, its address could come back while the driver still holds it
    assert not driver.pending_error
    assert driver.registered == {address: 4096}


@pytest.mark.parametrize("failure", [errno.EINVAL, errno.ENOSYS, errno.EAGAIN])
def test_an_old_kernel_gets_its_pages_written(failure: int) -> None:
    driver = FakeDriver()
    memory = PageLocker(driver.calls(), madvise=_write_by_hand(failure)).pin(3 * MIB + 1)
    assert driver.log == ["register"]
    assert not memory.any()


def test_pages_that_cannot_be_had_fall_back() -> None:
    driver = FakeDriver()
    PageLocker(driver.calls(), madvise=_write_by_hand(errno.ENOMEM)).pin(4096)
    assert driver.log == ["host_alloc"]


def test_threads_populate_disjoint_slices_that_cover_all() -> None:
    seen: list[tuple[int, int]] = []
    workers: set[int] = set()
    all_there = threading.Barrier(3, timeout=60)  # passes only if three slices are populated at the same time

    def madvise(address: int, nbytes: int, advice: int) -> int:
        all_there.wait()
        seen.append((address, nbytes))
        workers.add(threading.get_ident())
        return 0

    nbytes = 96 * MIB - 4096 + 1  # mapped, never touched: costs no memory
    memory = populated_pages(nbytes, threads=3, madvise=madvise)
    seen.sort()
    assert seen[0][0] == memory.data_ptr()
    assert all(start + size == following for (start, size), (following, _) in itertools.pairwise(seen))
    assert sum(size for _, size in seen) == nbytes
    assert len(workers) == 3


def test_the_kernels_own_populate_makes_pages_resident() -> None:
    memory = PageLocker(FakeDriver().calls()).pin(4 * MIB)
    resident = (ctypes.c_ubyte * (4 * MIB // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(4 * MIB), resident) == 0
    assert all(page & 1 for page in resident)


def test_a_forked_child_does_not_copy_the_pages() -> None:
    memory = PageLocker(FakeDriver().calls()).pin(4 * MIB)
    flags: list[str] = []
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        if region := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(region[1], 16) <= memory.data_ptr() < int(region[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line.split()[1:]
    assert "dc" in flags  # "do not copy area on fork"
