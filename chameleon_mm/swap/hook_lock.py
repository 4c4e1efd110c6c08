"""The executor's one lock, and what waits for it: storages whose last handle is gone, errors that came up in finalisers.

    lock.run(work, *arguments)             # in a hook: one thread at a time
    with lock.entered(): ...               # the same, where a few calls more do not matter
    lock.has_ended(saved)                  # on any thread, in the middle of any line: waits for nothing and raises nothing

An error in a finaliser could be told to nobody. It is stored and raised at the next hook, step end or report, each once, the
oldest first; one that comes up while somebody enters or leaves is raised at once. Where nobody enters any more, the interpreter
reports the oldest as "Exception ignored in", when the lock goes.
"""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn, TypeVar

from chameleon_mm.device import Device
from chameleon_mm.record.calls import Value
from chameleon_mm.swap.calling_thread import ThisProcess
from chameleon_mm.swap.recipe import Reliance
from chameleon_mm.swap.saved_storage import SavedStorage

if TYPE_CHECKING:
    from chameleon_mm.swap.executor import Executor

# --- Calls of an executor by what must not keep it alive: what it holds itself, and what watches a step
#
# ended = partial(weak_reliance_ended, weakref.ref(executor)) at_end = partial(weak_settle, weakref.ref(executor)) before_write
# = partial(weak_before_write, weakref.ref(executor))


def weak_before_write(executor: weakref.ref[Executor], value: Value) -> None:
    """Call `before_write` of an executor, while there is one."""
    it = executor()
    if it is not None:
        it.before_write(value)


def weak_reliance_ended(executor: weakref.ref[Executor], reliance: Reliance) -> None:
    """Tell an executor's lock, while there is one."""
    it = executor()
    if it is not None:
        it.hook_lock.has_ended(reliance)


def weak_settle(executor: weakref.ref[Executor], task: int) -> None:
    """Have an executor compare what was recomputed in the backward that ends. Raises `RecomputeMismatch`."""
    it = executor()
    if it is not None:
        it.settle(task)


# --- hook lock

_NOTE = "Raised late: it came up in a finaliser, as a saved tensor that autograd had let go of was given back, at"

_Result = TypeVar("_Result")

Ended = SavedStorage | Reliance
"""A storage whose last handle is gone, or a source that autograd does not rely on any more."""


class HookLock:
    """Lets one thread in at a time. Storages whose claims ended meanwhile are retired before, after, and once the lock is free
    again."""

    def __init__(self, device: Device, retire: Callable[[], Callable[[deque[Ended]], list[BaseException]] | None]) -> None:
        """`retire()` returns the function that retires all storages of a queue and returns its errors; None once it is gone."""
        self._device = device
        self._retire = retire
        self.lock = threading.Lock()
        """Taken alone by what asks nothing of the device."""
        self.ended: deque[Ended] = deque()
        """Storages to be retired, and sources to be let go of, by whoever enters. Others only read it, and the next."""
        self.errors: deque[BaseException] = deque()
        self.pid = ThisProcess.pid
        """The process whose device and blocks these are: compared before the lock, which a thread lost in a fork may hold."""

    def run(self, work: Callable[..., _Result], *arguments: object) -> _Result:
        """Call `work` while no other thread is in, and return its result.

        Raises what `work` raises, and what retiring storages raised: before `work` it is not called, after it its result, or
        its own error, gives way. Errors of finalisers are raised last of all.
        """
        with self.lock:  # the lock itself: no interrupt comes between taking it and the block that gives it back
            if self.ended:
                self._retire_ended()
            try:
                result = work(*arguments)
            finally:
                if self.ended:
                    self._retire_ended()
        if self.ended or self.errors:
            self.retire_if_idle()
            self.raise_oldest()
        return result

    def may_ask_device(self) -> bool:
        """Whether the device may be asked for anything: not inside a graph's capture, nor in a forked child."""
        return ThisProcess.pid == self.pid and not self._device.capturing()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run a block as `run` calls a function."""
        with self.lock:
            if self.ended:
                self._retire_ended()
            try:
                yield
            finally:
                if self.ended:
                    self._retire_ended()
        if self.ended or self.errors:
            self.retire_if_idle()
            self.raise_oldest()

    def has_ended(self, ended: Ended) -> None:
        """Queue it, and retire it if nobody is in. Raises nothing."""
        if ThisProcess.pid != self.pid:  # the parent's blocks and its device: neither is the child's to give back
            return
        self.ended.append(ended)
        try:
            self.retire_if_idle()
        except BaseException as error:  # noqa: BLE001 - raised by whoever enters next: a finaliser's own would only be printed
            self._store(error)

    def retire_if_idle(self) -> None:
        """Retire what is queued, unless somebody is in."""
        # Whoever holds the lock retires what is queued when it leaves; not waiting here is what rules a deadlock out.
        # While a graph is captured nothing may be asked of the device: whoever enters after it retires them.
        while self.ended and not self._device.capturing() and self.lock.acquire(blocking=False):
            try:
                self._retire_ended()
            finally:
                self.lock.release()

    def raise_oldest(self) -> None:
        """Raise the error that was stored first, if there is any."""
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
        """Store `error`, its traceback as a note: frames would keep tensors, blocks and the executor itself alive."""
        frames = traceback.walk_tb(error.__traceback__)
        lines = (f'  File "{frame.f_code.co_filename}", line {line}, in {frame.f_code.co_name}' for frame, line in frames)
        error.add_note("\n".join((_NOTE, *lines)))
        _drop_frames(error)
        self.errors.append(error)

    def __del__(self) -> None:
        # The interpreter reports it, as nobody was told.
        if self.errors and not sys.is_finalizing():
            raise self.errors.popleft()


def _raise(error: list[BaseException]) -> NoReturn:
    """Raise the one in the list, which is empty then: a frame that held it would be in a cycle with its traceback."""
    raise error.pop()


def _drop_frames(error: BaseException) -> None:
    """Drop the frames of `error`, and of the errors that it came from.

    `__context__` is unlinked and left as it is: a finaliser may run in any `except`, and what that handles is the program's.
    """
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = link.__context__ = None
        link = link.__cause__
