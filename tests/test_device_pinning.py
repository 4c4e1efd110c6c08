"""Pinning on a machine without a GPU: the pages are real, the driver is played by functions that may refuse."""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import json
import logging
import mmap
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from chameleon_mm.device.pinning import PageLocker, PinningCalls, populated_pages
from chameleon_mm.errors import DeviceUnavailable, HostMemoryExhausted
from chameleon_mm.units import MIB
from tests._run_scripts import python


class FakeDriver:
    """Driver that records its calls and refuses those that the test selects."""

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

    def clear_error(self) -> None:
        self.pending_error = False

    def calls(self) -> PinningCalls:
        return PinningCalls(
            register=self.register,
            unregister=self.unregister,
            host_alloc=self.host_alloc,
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


def test_only_what_was_pinned_is_unpinned_whole_and_once() -> None:
    driver = FakeDriver()
    locker = PageLocker(driver.calls())
    memory = locker.pin(8192)
    for wrong in (memory[:4096], memory[4096:], torch.zeros(8192, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="whole and not yet freed"):
            locker.unpin(wrong)
    view = memory[4096:]
    view.fill_(3)
    locker.unpin(memory)
    with pytest.raises(ValueError, match="whole and not yet freed"):
        locker.unpin(memory)
    for nbytes in (0, -1):
        with pytest.raises(ValueError, match="expected 1 byte or more"):
            locker.pin(nbytes)
    del memory
    assert driver.log == ["register", "unregister"]
    assert driver.registered == {}
    assert view.eq(3).all()  # the mapping lives as long as any view: late readers see bytes, not a segfault


@pytest.mark.parametrize("why", ["refused", "no pages"])
def test_without_a_registration_the_drivers_own_is_taken_and_no_error_left_behind(why: str) -> None:
    driver = FakeDriver(*["register"] * (why == "refused"))
    options: dict[str, Any] = {"madvise": _write_by_hand(errno.ENOMEM)} if why == "no pages" else {}
    locker = PageLocker(driver.calls(), **options)
    memory = locker.pin(4096)
    asked = ["register"] * (why == "refused")
    assert driver.log == [*asked, "host_alloc"]
    assert not driver.pending_error
    locker.unpin(memory)
    assert driver.log == [*asked, "host_alloc"]


def test_pages_stay_mapped_where_an_interrupt_came_right_after_the_driver_took_them(no_gc: None) -> None:
    driver = FakeDriver()
    register = driver.register

    def register_and_interrupt(address: int, nbytes: int) -> None:
        register(address, nbytes)
        raise KeyboardInterrupt

    driver.register = register_and_interrupt  # type: ignore[method-assign]  # one call of this one driver
    with pytest.raises(KeyboardInterrupt):
        PageLocker(driver.calls()).pin(4096)
    gc.collect()  # the frames of the error that pytest kept
    (address,) = driver.registered
    assert _is_mapped(address), "the driver holds these pages: their addresses must not come back"


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

    PageLocker(driver.calls()._replace(register=register, host_alloc=host_alloc)).pin(64 * MIB)
    assert mapped_at_fallback == [False]
    assert "register: out of memory (2)" in caplog.text


def test_refusals_are_warned_of_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    locker = PageLocker(FakeDriver("register", "unregister").calls())
    with caplog.at_level(logging.INFO, "chameleon_mm"):
        for nbytes in (4096, 8192, 12288):
            locker.pin(nbytes)
    refused = "chameleon_mm: {} KiB of pinned memory refused: register: out of memory (2) ({} of its kind)"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", refused.format("4.00", 1)),
        ("INFO", refused.format("8.00", 2)),
        ("INFO", refused.format("12.0", 3)),
    ]


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


# --- Note [Mapped while registered]


@pytest.mark.parametrize(
    ("refuses", "unpins", "stays"),
    [((), True, False), (("unregister",), True, True), ((), False, True)],
    ids=["unpinned", "refused", "nobody said that the device is done with it"],
)
def test_pages_are_unmapped_once_they_are_unregistered(refuses: tuple[str], unpins: bool, stays: bool, no_gc: None) -> None:
    """Else their address could come back while the driver still holds it."""
    driver = FakeDriver(*refuses)
    locker = PageLocker(driver.calls())
    memory = locker.pin(64 * MIB)
    address = memory.data_ptr()
    if unpins:
        locker.unpin(memory)
        assert _is_mapped(address)
    del memory, locker
    gc.collect()
    assert _is_mapped(address) == stays
    assert driver.log == ["register", "unregister"][: 1 + unpins]
    assert driver.registered == ({address: 64 * MIB} if stays else {})
    assert not driver.pending_error


def test_the_driver_is_called_in_the_scope_and_nothing_is_left_in_it() -> None:
    driver = FakeDriver("host_alloc")
    depth = 0
    depths: list[tuple[str, int]] = []

    @contextmanager
    def scope() -> Iterator[None]:
        nonlocal depth
        depth += 1
        yield
        depth -= 1

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any) -> Any:
            depths.append((name, depth))
            return call(*args)

        return asked

    names = ("register", "host_alloc", "clear_error", "unregister")
    calls = driver.calls()
    locker = PageLocker(calls._replace(**{name: noted(name, getattr(calls, name)) for name in names}), scope=scope)
    locker.unpin(locker.pin(4096))
    driver.refuses = ("register", "host_alloc")
    with pytest.raises(HostMemoryExhausted):
        locker.pin(4096)
    refused = [("register", 1), ("clear_error", 1), ("host_alloc", 1), ("clear_error", 1)]
    assert depths == [("register", 1), ("unregister", 1), *refused]
    assert depth == 0


@pytest.mark.parametrize("failure", [errno.EINVAL, errno.ENOSYS, errno.EAGAIN])
def test_an_old_kernel_gets_its_pages_written(failure: int) -> None:
    driver = FakeDriver()
    memory = PageLocker(driver.calls(), madvise=_write_by_hand(failure)).pin(3 * MIB + 1)
    assert driver.log == ["register"]
    assert not memory.any()


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


# --- a forked child, and the end of the interpreter. Each runs this file as a script, in a process of its own.


def _say(answer: dict[str, Any]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


class TellingDriver(FakeDriver):
    """Write each call to stderr at once: the interpreter's end leaves no code to read a log."""

    def _asked(self, call: str) -> None:
        os.write(2, f"{call} in {'parent' if os.getpid() == PARENT else 'child'}\n".encode())
        super()._asked(call)


PARENT = os.getpid()
KEPT: list[object] = []
"""Objects that are alive until the interpreter clears this module."""


def _reserve(address: int, nbytes: int) -> bool:
    """Map other memory exactly there. Return True if that worked."""
    map_fixed_noreplace = 0x100000
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | map_fixed_noreplace
    size = ctypes.c_size_t(nbytes)
    return bool(
        libc.mmap(ctypes.c_void_p(address), size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, ctypes.c_long(0)) == address
    )


def _in_a_child() -> None:
    """Drop pinned memory in a forked child, where its address may hold other data. Also drop a view of memory unpinned
    before."""
    locker = PageLocker(TellingDriver().calls())
    memory, unpinned = locker.pin(64 * MIB), locker.pin(64 * MIB)
    address = unpinned.data_ptr()
    freed = locker.pin(64 * MIB)
    late_reader = freed[4096:]
    locker.unpin(freed)
    freed_address = freed.data_ptr()
    del freed
    with locker._lock:  # as if another thread of the parent were pinning
        child = os.fork()
        if not child:
            answer: dict[str, Any] = {"holes": [_reserve(address, 64 * MIB), _reserve(freed_address, 64 * MIB)]}
            thread = threading.Thread(target=locker.unpin, args=(unpinned,), daemon=True)  # another one: the lock is re-entrant
            thread.start()
            thread.join(timeout=30)
            answer["unpins without the lock"] = not thread.is_alive()
            try:
                locker.pin(4096)
            except DeviceUnavailable as error:
                answer["pin"] = str(error)
            del thread, unpinned, memory, late_reader
            answer["calls"] = len(locker._calls.register.__self__.log)  # type: ignore[attr-defined]  # a method of TellingDriver
            locker._live.clear()
            gc.collect()
            answer["mapped"] = [_is_mapped(address), _is_mapped(freed_address)]
            _say(answer)
            os._exit(0)
    os.waitpid(child, 0)
    assert _is_mapped(address)
    locker.unpin(unpinned)
    locker.unpin(memory)


def _at_exit() -> None:
    """Pinned memory is alive in every way: in a module, in a cycle, in a freed locker."""
    locker = PageLocker(TellingDriver().calls())
    KEPT.append((locker, locker.pin(4096)))
    cycle: list[object] = [PageLocker(TellingDriver().calls())]
    cycle.append(cycle)
    KEPT.append(PageLocker(TellingDriver().calls()).pin(4096))
    gc.disable()
    alone = PageLocker(TellingDriver("register").calls())
    cycle.append(alone.pin(4096))


def test_a_forked_child_calls_no_driver_and_unmaps_nothing(tmp_path: Path) -> None:
    done = python(["-W", "error", __file__, "child"], tmp_path)
    assert done.code == 0, done.err
    answer = json.loads(done.out)
    assert "got its forked child" in answer.pop("pin")
    assert answer == {"holes": [True, True], "unpins without the lock": True, "calls": 4, "mapped": [True, True]}
    assert done.err.splitlines() == ["register in parent"] * 3 + ["unregister in parent"] * 3


def test_the_end_of_the_interpreter_calls_no_driver(tmp_path: Path) -> None:
    done = python(["-W", "error", __file__, "exit"], tmp_path)
    assert (done.code, done.out) == (0, ""), done.err
    calls = [line for line in done.err.splitlines() if not line.startswith("chameleon_mm: ")]  # not the log's
    assert calls == ["register in parent"] * 3 + ["host_alloc in parent"]


if __name__ == "__main__":
    {"child": _in_a_child, "exit": _at_exit}[sys.argv[1]]()
