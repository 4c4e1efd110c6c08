"""Errors that come up in finalisers, where they cannot be raised: stored, and raised at the next call that can.

errors.add(error)          # in `__del__`: no lock, no device, nothing printed
errors.raise_oldest()      # at the next hook, step end or report: each is raised once, the oldest first

An error that nobody comes for any more is reported by the interpreter as "Exception ignored in", when the store itself goes.
"""

from __future__ import annotations

import sys
import traceback
from collections import deque
from contextlib import suppress
from typing import NoReturn

_NOTE = "Raised late: it came up in a finaliser, as a saved tensor that autograd had let go of was given back, at"


class LateErrors:
    """Errors in the order in which they came up. Thread-safe: appending to a deque and taking from it are atomic."""

    __slots__ = ("_errors",)

    def __init__(self) -> None:
        self._errors: deque[BaseException] = deque()

    def add(self, error: BaseException) -> None:
        """Store `error`, its traceback as a note: frames would keep tensors, blocks and the executor itself alive."""
        frames = traceback.walk_tb(error.__traceback__)
        lines = (f'  File "{frame.f_code.co_filename}", line {line}, in {frame.f_code.co_name}' for frame, line in frames)
        error.add_note("\n".join((_NOTE, *lines)))
        _drop_frames(error)
        self._errors.append(error)

    def raise_oldest(self) -> None:
        """Raise the error that was stored first, if there is any."""
        if self._errors:
            oldest: list[BaseException] = []
            with suppress(IndexError):  # another thread took it
                oldest.append(self._errors.popleft())
            if oldest:
                _raise(oldest)

    def raise_first(self, errors: list[BaseException]) -> NoReturn:
        """Raise the first of `errors` and store the others. Empties the list."""
        first = [errors.pop(0)]
        while errors:
            self.add(errors.pop(0))
        _raise(first)

    def __del__(self) -> None:
        # An error must not vanish: what nobody was told by now the interpreter tells.
        if self._errors and not sys.is_finalizing():
            raise self._errors.popleft()


def _raise(error: list[BaseException]) -> NoReturn:
    """Raise the one in the list, which is empty then: a frame that held it would be in a cycle with its traceback."""
    raise error.pop()


def _drop_frames(error: BaseException) -> None:
    """Drop the frames of `error`, and of the errors that it came from.

    What else was being handled just then is the program's own, and only let go of: a finaliser may run in any `except`.
    """
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = link.__context__ = None
        link = link.__cause__
