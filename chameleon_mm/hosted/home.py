"""Home of what one session hosts beside activations: the executor that all of it shares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from chameleon_mm.executor.executor import Executor
from chameleon_mm.process import ThisProcess

if TYPE_CHECKING:
    from chameleon_mm.device import Stream


class Home:
    """The executor whose link, pool and budget hosted memory uses."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._pid = ThisProcess.pid
        self.device, self.budget, self.context = executor.device, executor.budget, executor.parts.context
        self.recording = executor.recording

    @contextmanager
    def entered(self) -> Iterator[Stream]:
        """Context of work on hosted memory: the executor's lock is held, and no recorder sees it. Gives the current compute
        stream."""
        with self.recording.paused(), self._executor.hook_lock.entered():
            yield self.context.streams.current()

    def check_readable(self, what: str, nbytes: int) -> None:
        """Raise `RuntimeError` in a forked child and in the capture of a graph, where nothing can come back."""
        if ThisProcess.pid != self._pid:
            raise RuntimeError(
                f"{what} of {nbytes} bytes: expected to be read in the process of its session ({self._pid}), got a read in a "
                f"forked child ({ThisProcess.pid}), where its device cannot be used; read it in the parent"
            )
        if self.device.capturing():
            raise RuntimeError(
                f"{what} of {nbytes} bytes: expected to be read outside of the capture of a CUDA graph, in which it cannot "
                f"come back from the host; capture the step in a session that does not swap it"
            )
