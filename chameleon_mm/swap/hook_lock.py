"""Lock of an executor, with the objects that wait for it: storages whose last handle is gone, and errors of finalisers.

    lock.run(work, *arguments)             # in a hook: one thread at a time
    with lock.entered(): ...               # the same, where a few calls more do not matter
    lock.has_ended(saved)                  # on any thread, in the middle of any line: waits for nothing and raises nothing

An error in a finaliser cannot reach a caller. It is stored and raised at the next hook, step end or report: each error once,
the oldest first. An error that comes up while a thread enters or leaves is raised at once. If no thread enters any more, the
interpreter reports the oldest as "Exception ignored in" when the lock is deleted.
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


def call_if_alive(method: weakref.WeakMethod[Any], *arguments: object) -> None:
    """Call a method of an object that the caller must not keep alive; do nothing once that is gone. The executor holds those
    that call it so, and the watch of a step."""
    call = method()
    if call is not None:
        call(*arguments)


# --- hook lock

_NOTE = "Raised late: it came up in a finaliser, as a saved tensor that autograd had let go of was given back, at"

_Result = TypeVar("_Result")

Ended = SavedStorage | Reliance
"""A storage whose last handle is gone, or a source that autograd no longer relies on."""


class HookLock:
    """Lock for one thread at a time. Storages whose claims ended meanwhile are retired before a thread's work, after it, and
    once the lock is free again."""

    def __init__(self, device: Device, retire: Callable[[], Callable[[deque[Ended]], list[BaseException]] | None]) -> None:
        """`retire()` returns the function that retires all storages of a queue and returns its errors; None once it is gone."""
        self._device = device
        self._retire = retire
        self.lock = threading.Lock()
        """Lock itself, taken directly by code that does not call the device."""
        self.thread: int | None = None
        """Thread in `run` or `entered`: torch functions that it calls are this library's, whatever modes they pass through."""
        self.ended: deque[Ended] = deque()
        """Storages to retire, and sources to release, by the next thread that enters. Others only read this and `errors`."""
        self.errors: deque[BaseException] = deque()
        self.first: Callable[[], None] | None = None
        """Called first by `run` and `entered`; not by code that takes `lock` itself, nor by `retire_if_idle`."""
        self.pid = ThisProcess.pid
        """Process that owns the device and the blocks. Compared before the lock, which a thread lost in a fork may hold."""

    def run(self, work: Callable[..., _Result], *arguments: object) -> _Result:
        """Call `work` while no other thread is in, and return its result.

        Raises the errors of `work` and of retiring storages. If retiring fails before `work`, `work` is not called. If it fails
        afterwards, its error replaces the result or the error of `work`. Errors of finalisers are raised last of all.
        """
        with self.lock:  # the lock itself: no interrupt comes between taking it and the block that releases it
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
        """Context that runs a block as `run` calls a function. As a generator it costs a hook ten times what `run` does."""
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
        """Do what comes before a thread's work, in the lock."""
        if self.first is not None:
            self.first()
        if self.ended:
            self._retire_ended()

    def settle(self) -> None:
        """Retire what ended as the thread left, and raise the oldest error."""
        self.retire_if_idle()
        self.raise_oldest()

    def has_ended(self, ended: Ended) -> None:
        """Queue `ended`, and retire it if no thread is in. Raises nothing."""
        if ThisProcess.pid != self.pid:  # the blocks and the device are the parent's: not the child's to give back
            return
        self.ended.append(ended)
        try:
            self.retire_if_idle()
        except BaseException as error:  # noqa: BLE001 - raised by the next thread to enter: a finaliser's would only be printed
            self._store(error)

    def retire_if_idle(self) -> None:
        """Retire the queued storages and sources, unless a thread is in."""
        # The holder of the lock retires what is queued when it leaves. Not waiting here rules out a deadlock.
        # During a graph's capture the device may not be called: the next thread that enters after it retires them.
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
        """Store `error` with its traceback as a note: frames would keep tensors, blocks and the executor itself alive."""
        frames = traceback.walk_tb(error.__traceback__)
        lines = (f'  File "{frame.f_code.co_filename}", line {line}, in {frame.f_code.co_name}' for frame, line in frames)
        error.add_note("\n".join((_NOTE, *lines)))
        _drop_frames(error)
        self.errors.append(error)

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        # No thread has raised it, so the interpreter reports it.
        if self.errors and not ends():
            raise self.errors.popleft()


def _raise(error: list[BaseException]) -> NoReturn:
    """Raise the error in the list and empty the list: a frame that held the error would be in a cycle with its traceback."""
    raise error.pop()


def _drop_frames(error: BaseException) -> None:
    """Drop the frames of `error`, and of the errors that caused it.

    `__context__` is unlinked and keeps its frames: a finaliser may run in any `except`, whose error is the program's.
    """
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = link.__context__ = None
        link = link.__cause__
