"""Threads over one pinned pool, and interrupts within it: it goes on working, and nothing stays with the device.

Every block carries a cookie, changes hands, and is verified by whoever frees it. The shape is that of mimalloc's stress test:
each thread keeps blocks of its own and exchanges some through slots that all share, so that blocks are freed by other threads
than made them; rounds of new threads find what the last ones left behind.
"""

from __future__ import annotations

import ast
import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from chameleon_mm.device.protocols import Event
from chameleon_mm.device.sim import SimDevice
from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.pool import growth
from chameleon_mm.pool.block import PinnedBlock
from chameleon_mm.pool.chunks import Chunks
from chameleon_mm.pool.pool import PinnedPool
from chameleon_mm.units import KIB, MIB
from tests._fakes import CountingDevice, ManualEvent
from tests._programs import at_once, on_a_thread

THREADS = 4
SLOTS = 64


class PolledEvent(ManualEvent):
    """An event that is complete from the fourth query on."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = 0

    def query(self) -> bool:
        self.queries += 1
        return self.complete or self.queries > 3


def words(block: PinnedBlock) -> npt.NDArray[Any]:
    return block.numpy((block.nbytes // 8,), np.uint64)


def bake(block: PinnedBlock, cookie: int) -> None:
    """Each word its own value: a block that lies over a part of another is seen, whichever part it is."""
    values = words(block)
    values[:] = np.arange(len(values), dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15) + np.uint64(cookie)


def intact(block: PinnedBlock, cookie: int) -> bool:
    values = words(block)
    expected = np.arange(len(values), dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15) + np.uint64(cookie)
    return bool((values == expected).all())


class Stress:
    def __init__(self, pool: PinnedPool) -> None:
        self.pool = pool
        self.slots: list[tuple[PinnedBlock, int] | None] = [None] * SLOTS
        self.exchange = threading.Lock()
        self.wrong: list[str] = []
        self.refused = 0

    def free(self, held: tuple[PinnedBlock, int], after: Event | None) -> None:
        block, cookie = held
        if not intact(block, cookie):
            self.wrong.append(f"{block} lost the cookie {cookie}")
        block.release(after=after)

    def work(self, seed: int, operations: int) -> None:
        generator = np.random.default_rng(seed)
        own: list[tuple[PinnedBlock, int]] = []
        for n in range(operations):
            roll = generator.random()
            if roll < 0.5:
                nbytes = int(generator.choice([64, 5000, 20_000])) << int(generator.integers(0, 3))
                try:
                    block = self.pool.allocate(nbytes)
                except HostMemoryExhausted:
                    self.refused += 1
                    if own:
                        self.free(own.pop(int(generator.integers(len(own)))), None)
                    continue
                cookie = seed << 32 | n
                bake(block, cookie)
                own.append((block, cookie))
            elif own and roll < 0.8:
                self.free(own.pop(int(generator.integers(len(own)))), PolledEvent() if roll < 0.7 else None)
            elif own:
                at, mine = int(generator.integers(SLOTS)), own.pop()
                with self.exchange:
                    theirs, self.slots[at] = self.slots[at], mine
                if theirs is not None:
                    own.append(theirs)
        for at, held in enumerate(own):
            if at % 2:
                self.free(held, PolledEvent())
            # ... and the rest is dropped, as by a thread that died

    def round(self, number: int, operations: int) -> None:
        at_once([*(partial(self.work, number * THREADS + seed, operations) for seed in range(THREADS)), self.pool.take_back])


@pytest.mark.parametrize(
    ("rounds", "operations"), [(3, 250), pytest.param(10, 2000, marks=pytest.mark.slow)], ids=["quick", "long"]
)
def test_cookies_survive_threads(rounds: int, operations: int) -> None:
    pool = PinnedPool(2 * MIB, SimDevice(), 256 * KIB)
    stress = Stress(pool)
    for number in range(rounds):
        stress.round(number, operations)
        stats = pool.stats()
        assert stats.requested_bytes <= stats.live_bytes <= stats.reserved_bytes <= stats.limit_bytes
        assert stats.num_live == sum(held is not None for held in stress.slots)
    assert stress.wrong == []
    assert stress.refused > 0, "the limit was never reached"
    for held in stress.slots:
        if held is not None:
            stress.free(held, None)
    stress.slots.clear()
    held = None
    assert stress.wrong == []
    stats = pool.stats()
    assert (stats.num_live, stats.live_bytes, stats.requested_bytes) == (0, 0, 0)
    pool.close()
    assert (pool.stats().reserved_bytes, pool._ledger.ending) == (0, [])


# --- interrupts: at any line of what gets and gives back chunks


CHUNK = 16 * KIB


WITH_LINES = {node.lineno for node in ast.walk(ast.parse(inspect.getsource(growth))) if isinstance(node, ast.With)}


class Interrupt:
    """Raise `KeyboardInterrupt` before the n-th line that runs in `growth`, or in `Chunks.pin`, which it calls.

    A line `with lock:` is traced twice: before the lock is taken and before it is released. CPython checks for signals after
    calls, on function entry and on backward jumps, so never between the end of the block and the release: the second time does
    not count.
    """

    def __init__(self, n: int) -> None:
        self.left = n
        self._inside: set[tuple[int, int]] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        watched = frame.f_code.co_filename == growth.__file__ or frame.f_code is Chunks.pin.__code__
        return self._line if watched else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        if event == "line":
            at = (id(frame), frame.f_lineno)
            if frame.f_lineno in WITH_LINES and frame.f_code.co_filename == growth.__file__:
                if at in self._inside:
                    self._inside.remove(at)
                    return self._line
                self._inside.add(at)
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._line


def use(pool: PinnedPool) -> None:
    """Chunks come, are merged into a larger one, refused; the limit is four chunks, for a moment one."""
    pool.limit_bytes = 4 * CHUNK  # also where an earlier use was interrupted while it was lower
    blocks = [pool.allocate(CHUNK) for _ in range(3)]
    for block in blocks:
        block.release(after=ManualEvent())
    pool.allocate(2 * CHUNK).release()
    kept = pool.allocate(CHUNK)
    # Not pytest.raises: its record of the error makes a cycle of frames, which only the collector takes apart.
    with suppress(HostMemoryExhausted):
        kept = pool.allocate(4 * CHUNK)
    pool.limit_bytes = CHUNK
    kept.release()
    pool.take_back()
    pool.limit_bytes = 4 * CHUNK


def interrupted(pool: PinnedPool, work: Callable[[PinnedPool], object], n: int) -> bool:
    """True if `work` reached its n-th line and was interrupted there."""
    interrupt, before = Interrupt(n), sys.gettrace()
    sys.settrace(interrupt)
    try:
        work(pool)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    assert interrupt.left > 0
    return False


@pytest.mark.usefixtures("no_gc")
def test_an_interrupt_at_any_line_leaves_a_pool_that_works() -> None:
    for n in range(1, 1000):
        device = CountingDevice()
        pool = PinnedPool(4 * CHUNK, device, CHUNK)
        if not interrupted(pool, use, n):
            break
        assert pool.stats().num_live == 0, f"interrupted at line {n}"
        on_a_thread(partial(use, pool))  # a lock that the interrupted thread kept would stop this one
        assert pool.stats().reserved_bytes == sum(device.chunks.values()), f"interrupted at line {n}"
        pool.close()
        assert device.chunks == {}, f"interrupted at line {n}"
    assert n > 100, "the lines that ran were not seen"
    pool.close()
    assert device.chunks == {}


def test_an_interrupted_close_is_finished_by_the_next() -> None:
    for n in range(1, 1000):
        device = CountingDevice()
        pool = PinnedPool(4 * CHUNK, device, CHUNK)
        for block in [pool.allocate(CHUNK) for _ in range(3)]:
            block.release(after=ManualEvent())
        if not interrupted(pool, PinnedPool.close, n):
            break
        on_a_thread(pool.close)
        assert device.chunks == {}, f"interrupted at line {n}"
    assert n > 5, "the lines that ran were not seen"
    assert device.chunks == {}


@pytest.mark.usefixtures("no_gc")
def test_a_pool_that_was_interrupted_and_dropped_gives_all_back() -> None:
    for n in range(1, 1000):
        device = CountingDevice()
        pool = PinnedPool(4 * CHUNK, device, CHUNK)
        was_interrupted = interrupted(pool, use, n)
        del pool
        assert device.chunks == {}, f"interrupted at line {n}"
        if not was_interrupted:
            break
    assert n > 100, "the lines that ran were not seen"
