"""The recorder of the running step, if there is one: entered with the step, left with it or before.

    recording.begin(recorder)            # None: this step is not recorded
    with recording.paused(): ...         # what swapping does itself
    recording.leave_if_needed()          # at the end of a hook: where a backward would round otherwise under any dispatch mode
    recorder = recording.end()

Autograd runs each node of a backward with the modes that were active when that backward began, and puts these back when the
backward is over: a recorder that is left within a backward comes back with the next node and after the last. It is left again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from chameleon_mm.profiler.dispatch_state import in_backward
from chameleon_mm.profiler.recorder import Recorder
from chameleon_mm.profiler.storages import TracedStorage


class Recording:
    """Enters and leaves the step's recorder. Not thread-safe but for `paused` and `retired`, which any thread of the step may
    call."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        """The recorder that records the step, or did until it was stopped. Others only read it."""
        self._entered = False
        self._left_within: list[Recorder] = []  # backwards that were not over yet

        self.is_over = True
        """Whether there is no recorder any more, and none that autograd may put back: hooks do nothing about it."""

    def begin(self, recorder: Recorder | None) -> None:
        self.leave_restored()
        self.recorder = recorder
        self._note_whether_over()
        self._entered = recorder is not None
        if recorder is not None:
            recorder.__enter__()

    def paused(self) -> AbstractContextManager[None]:
        """A context whose work is no part of the recorded step, nor is the time that compute takes for it."""
        return nullcontext() if self.recorder is None else _unrecorded(self.recorder)

    def leave_if_needed(self) -> None:
        if self._left_within:
            self.leave_restored()
        if self._entered and self.recorder is not None and self.recorder.must_leave:
            self._leave(self.recorder)

    def leave_restored(self) -> None:
        """Leave the recorders that autograd has put back."""
        for recorder in self._left_within:
            recorder.leave_if_on()
        if not in_backward():
            self._left_within.clear()
        self._note_whether_over()

    def retired(self, traced: TracedStorage | None) -> None:
        """Note that the claim on a traced storage has ended."""
        if self.recorder is not None:
            self.recorder.retired(traced)

    def end(self) -> Recorder | None:
        """Leave the recorder and return it, for what it has recorded."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None and self._entered:
            self._leave(recorder)
        self._note_whether_over()
        return recorder

    def _note_whether_over(self) -> None:
        self.is_over = self.recorder is None and not self._left_within

    def _leave(self, recorder: Recorder) -> None:
        self._entered = False
        recorder.__exit__(None, None, None)
        if in_backward():
            self._left_within.append(recorder)


@contextmanager
def _unrecorded(recorder: Recorder) -> Iterator[None]:
    with recorder.paused(), recorder.untimed():
        yield
