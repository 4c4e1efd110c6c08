"""Dispatch mode of a step, if any: a recorder (all operators, for a trace) or a watch (the calls for recomputation).

    recording.begin(recorder, watch)     # None, None: this step is neither recorded nor watched
    with recording.paused(): ...         # the session's own work
    recording.leave_if_needed()          # at the end of a hook: exit a mode under which a backward would round differently
    recorder = recording.end()

A recorder is entered and exited with the step. A watch is on only in forward: each backward exits it, the next save enters it.

Autograd runs each node of a backward with the modes that were active when that backward began. It restores them after the
backward. So a mode exited within a backward is active again at the next node, and after the last one. The next hook, or the end
of the step, exits it again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from chameleon_mm.record.call_notes import AnyWatch, CallNotes
from chameleon_mm.record.dispatch_state import in_backward, is_on
from chameleon_mm.record.recorder import Recorder
from chameleon_mm.record.storages import TracedStorage


class Recording:
    """Owner of the step's recorder or watch, which it enters and exits. Not thread-safe, except for `paused` and `retired`,
    which any thread of the step may call."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        """Recorder of the step, also after it was stopped. Other classes only read it."""
        self.watch: AnyWatch | None = None
        self._thread = 0
        """Thread that began the step. A watch is on only there."""
        self._entered = False
        self._left_within: list[Recorder | AnyWatch] = []  # modes exited in backwards that still ran

        self.is_over = True
        """True if no mode is on and autograd cannot restore one. Hooks then ignore modes."""

    def begin(self, recorder: Recorder | None, watch: AnyWatch | None = None) -> None:
        """Enter `recorder` or `watch`, at most one of the two."""
        mode = recorder or watch
        if not self.is_over:
            self.leave_restored()
        self.recorder, self.watch, self._thread = recorder, watch, threading.get_ident()
        self._entered = mode is not None
        if mode is not None:
            self._note_whether_over()
            mode.__enter__()

    def paused(self) -> AbstractContextManager[None]:
        """Return a context whose work and compute time are not recorded. May be nested."""
        if self.recorder is not None:
            return nullcontext() if self.recorder.is_paused else _unrecorded(self.recorder)
        return nullcontext() if self.watch is None else self.watch.paused()

    def leave_if_needed(self) -> None:
        if self._left_within:
            self.leave_restored()
        if self._entered and self.recorder is not None and self.recorder.must_leave:
            self._leave(self.recorder)
        if self.watch is not None:
            if threading.get_ident() == self._thread:
                self._enter_or_leave(self.watch)
            if in_backward() and self.watch.after_forward is not None:
                self.watch.after_forward()
            if self.watch.is_over and not self._entered:
                self.watch = None
                self._note_whether_over()

    def _enter_or_leave(self, watch: AnyWatch) -> None:
        wanted = not (watch.must_leave or watch.is_over or in_backward())
        if self._entered and not wanted:
            self._leave(watch)
        elif wanted and not self._entered:
            self._entered = True
            watch.__enter__()

    def leave_all(self) -> None:
        """Leave all modes of the step, also of one that has not ended, that are on this thread's stack, before an earlier one
        is left. torch stores for each mode what was on when it was entered, and restores that when the mode is left."""
        mode = self.recorder or self.watch
        if mode is not None and self._entered and (isinstance(mode, CallNotes) or is_on(mode)):
            self._leave(mode)
        self.leave_restored()

    def leave_restored(self) -> None:
        """Exit the modes that autograd has restored."""
        for mode in self._left_within:
            mode.leave_if_on()
        if not in_backward() and threading.get_ident() == self._thread:  # a backward on another thread does not matter
            self._left_within.clear()
        self._note_whether_over()

    def retired(self, traced: TracedStorage | None) -> None:
        """Note that the claim on a traced storage has ended."""
        if self.recorder is not None:
            self.recorder.retired(traced)

    def hide(self, storage: torch.UntypedStorage) -> None:
        """Exclude a storage from the recorded step from now on."""
        if self.recorder is not None:
            self.recorder.hide(storage)

    def end(self) -> Recorder | None:
        """Exit the mode. Returns the recorder with its records, or None if there is none."""
        if self.is_over:
            return None
        recorder, watch, self.recorder, self.watch = self.recorder, self.watch, None, None
        mode = recorder or watch
        if mode is not None and self._entered:
            self._leave(mode)
        self.leave_restored()  # after the step's last backward, which restored the mode
        return recorder

    def _note_whether_over(self) -> None:
        self.is_over = self.recorder is None and self.watch is None and not self._left_within

    def _leave(self, mode: Recorder | AnyWatch) -> None:
        self._entered = False
        mode.__exit__(None, None, None)
        if in_backward():
            self._left_within.append(mode)


@contextmanager
def _unrecorded(recorder: Recorder) -> Iterator[None]:
    with recorder.paused(), recorder.untimed():
        yield
