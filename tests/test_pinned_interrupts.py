"""An interrupt at any line of what gets and gives back chunks leaves a pool that works, and nothing with the device."""

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

import pytest

from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.pinned import PinnedPool, growth
from chameleon_mm.pinned.chunks import Chunks
from chameleon_mm.units import KIB
from tests._fakes import CountingDevice, ManualEvent

CHUNK = 16 * KIB


WITH_LINES = {node.lineno for node in ast.walk(ast.parse(inspect.getsource(growth))) if isinstance(node, ast.With)}


class Interrupt:
    """Raises `KeyboardInterrupt` before the n-th line that runs in `growth`, or in `Chunks.pin`, which it calls.

    A line `with lock:` is told of twice, before the lock is taken and before it is given back. CPython looks for signals after
    calls, on entry to functions and on jumps back, so never between the end of the block and the call that gives the lock
    back: the second time does not count.
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
    """Chunks come, are merged into a larger one, refused, trimmed; the limit is four chunks, for a moment one."""
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
    pool.trim()


def interrupted(pool: PinnedPool, work: Callable[[PinnedPool], object], n: int) -> bool:
    """Whether `work` came to its n-th line, and was interrupted there."""
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


def on_another_thread(work: Callable[[], object]) -> None:
    """A lock that the interrupted thread kept would stop this one."""
    done: list[bool] = []

    def carry_out() -> None:
        work()
        done.append(True)

    thread = threading.Thread(target=carry_out, daemon=True)
    thread.start()
    thread.join(20)
    assert done == [True]


@pytest.mark.usefixtures("no_gc")
def test_an_interrupt_at_any_line_leaves_a_pool_that_works() -> None:
    for n in range(1, 1000):
        device = CountingDevice()
        pool = PinnedPool(4 * CHUNK, device, CHUNK)
        if not interrupted(pool, use, n):
            break
        assert pool.stats().num_live == 0, f"interrupted at line {n}"
        on_another_thread(partial(use, pool))
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
        on_another_thread(pool.close)
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
