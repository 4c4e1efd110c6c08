"""Lock of an executor, with two queues: storages whose last handle is gone, and errors of finalisers.

    lock.run(work, *arguments)             # in a hook: one thread at a time
    with lock.entered(): ...               # the same as a context, for code that is not called at every hook
    lock.has_ended(saved)                  # on any thread, at any time: never waits and never raises

An error in a finaliser cannot reach a caller. It is stored, and raised at the next hook, step end or report: each error once,
oldest first. An error raised while a thread enters or leaves is not stored. If no thread enters again, the interpreter reports
the oldest error as "Exception ignored in" when the lock is deleted.
"""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import get_ident
from typing import Any, NoReturn, TypeVar

from chameleon_mm.device import Device
from chameleon_mm.device.process import ThisProcess
from chameleon_mm.swap.recipe import Reliance
from chameleon_mm.swap.saved_storage import SavedStorage


def call_if_alive(method: weakref.WeakMethod[Any], *arguments: object) -> Any:
    """Call a method of an object that the caller must not keep alive. Do nothing once that object is freed. The executor holds
    the callers, and the watch of a step."""
    call = method()
    return None if call is None else call(*arguments)


# --- hook lock

_NOTE = "Raised late: it came up in a finaliser, as a saved tensor that autograd had let go of was given back, at"

_Result = TypeVar("_Result")

Ended = SavedStorage | Reliance
"""Storage whose last handle is gone, or source that autograd no longer needs."""


class HookLock:
    """Lock for one thread at a time. Storages whose claims end meanwhile are retired before a thread's work, after it, and once
    the lock is free."""

    def __init__(self, device: Device, retire: Callable[[], Callable[[deque[Ended]], list[BaseException]] | None]) -> None:
        """`retire()` returns a function that retires the storages of a queue and returns errors; None once that is freed."""
        self._device = device
        self._retire = retire
        self.lock = threading.Lock()
        """The lock. Code that does not call the device takes it directly."""
        self.thread: int | None = None
        """Thread that is in `run` or `entered`. All torch functions that it calls are this library's own."""
        self.ended: deque[Ended] = deque()
        """Storages to retire and sources to release, by the next thread that enters. Others only read this and `errors`."""
        self.errors: deque[BaseException] = deque()
        self.first: Callable[[], Callable[[], None] | None] | None = None
        """Weak reference to the function that `run` and `entered` call first. Code that takes `lock` itself, and
        `retire_if_idle`, do not call it."""
        self.pid = ThisProcess.pid
        """Process that owns the device and the blocks. Compared before the lock, which a thread lost in a fork may hold."""

    def run(self, work: Callable[..., _Result], *arguments: object) -> _Result:
        """Call `work` under the lock, and return its result.

        Raises the errors of `work` and of retiring storages. If retiring fails before `work`, `work` is not called. If it fails
        afterwards, its error replaces the result or the error of `work`. Errors of finalisers are raised last of all.
        """
        with self.lock:  # the lock's own context: no interrupt can come before the block that releases it
            try:
                self.thread = get_ident()
                if self.ended or self.first is not None:
                    self._begin()
                result = work(*arguments)
            finally:
                try:
                    if self.ended:
                        self._retire_ended()
                finally:
                    self.thread = None
        if self.ended or self.errors:
            self.settle()
        return result

    def may_ask_device(self) -> bool:
        """True if the device may be called: not inside a graph's capture, nor in a forked child."""
        return ThisProcess.pid == self.pid and not self._device.capturing()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Context for a block under the lock, like `run` for a function. As a generator it costs ten times as much as `run`."""
        with self.lock:
            try:
                self.thread = get_ident()
                if self.ended or self.first is not None:
                    self._begin()
                yield
            finally:
                try:
                    if self.ended:
                        self._retire_ended()
                finally:
                    self.thread = None
        if self.ended or self.errors:
            self.settle()

    def _begin(self) -> None:
        """Do the work that precedes a thread's own work, under the lock."""
        if self.first is not None and (first := self.first()) is not None:
            first()
        if self.ended:
            self._retire_ended()

    def settle(self) -> None:
        """Retire storages that ended while the thread left, and raise the oldest error."""
        self.retire_if_idle()
        self.raise_oldest()

    def has_ended(self, ended: Ended) -> None:
        """Queue `ended`, and retire it if no thread holds the lock. Raises nothing."""
        if ThisProcess.pid != self.pid:  # the parent owns blocks and device: a child must not release them
            return
        self.ended.append(ended)
        try:
            self.retire_if_idle()
        except BaseException as error:  # noqa: BLE001 - the next thread that enters raises it: here it would only be printed
            self._store(error)

    def retire_if_idle(self) -> None:
        """Retire the queued storages and sources, unless a thread holds the lock."""
        # The holder of the lock retires the queue when it leaves. Not waiting here rules out a deadlock. During a graph's
        # capture the device may not be called. The next thread that enters after the capture retires the queue.
        while self.ended and not self._device.capturing() and self.lock.acquire(blocking=False):
            try:
                self._retire_ended()
            finally:
                self.lock.release()

    def raise_oldest(self) -> None:
        """Raise the error that was stored first, if there is one."""
        if self.errors:
            oldest: list[BaseException] = []
            with suppress(IndexError):  # another thread took it
                oldest.append(self.errors.popleft())
            if oldest:
                _raise(oldest)

    def _retire_ended(self) -> None:
        retire = self._retire()
        if retire is None:
            self.ended.clear()
            return
        errors = retire(self.ended)
        if errors:
            first = [errors.pop(0)]
            while errors:
                self._store(errors.pop(0))
            _raise(first)

    def _store(self, error: BaseException) -> None:
        """Store `error` with its traceback as text: frames would keep tensors, blocks and the executor itself alive."""
        frames = traceback.walk_tb(error.__traceback__)
        lines = (f'  File "{frame.f_code.co_filename}", line {line}, in {frame.f_code.co_name}' for frame, line in frames)
        error.add_note("\n".join((_NOTE, *lines)))
        _drop_frames(error)
        self.errors.append(error)

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        # No thread raised the error, so the interpreter reports it.
        if self.errors and not ends():
            raise self.errors.popleft()


def _raise(error: list[BaseException]) -> NoReturn:
    """Raise the error in the list and empty the list: a frame that holds the error makes a cycle with its traceback."""
    raise error.pop()


def _drop_frames(error: BaseException) -> None:
    """Drop the frames of `error`, and of the errors that caused it.

    `__context__` is unlinked but keeps its frames: a finaliser may run in any `except`, whose error belongs to the program.
    """
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = link.__context__ = None
        link = link.__cause__
