"""Home of the swapped state of one session: the executor that all of it shares, and how large a tensor has to be to leave."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from chameleon_mm.executor.executor import Executor
from chameleon_mm.optimizer_state.swapped_state import least_holders
from chameleon_mm.process import ThisProcess

if TYPE_CHECKING:
    from chameleon_mm.device import Stream
    from chameleon_mm.optimizer_state.swapped_state import SwappedState


class Home:
    """The executor whose link, pool and budget swapped state uses."""

    def __init__(self, executor: Executor, *, min_bytes: int) -> None:
        self._executor = executor
        self._pid = ThisProcess.pid
        self.min_bytes = min_bytes
        self.device, self.budget, self.context = executor.device, executor.budget, executor.parts.context
        self.least_holders = least_holders()
        self.states: weakref.WeakValueDictionary[int, SwappedState] = weakref.WeakValueDictionary()
        """All swapped state there is, by id: the optimizer's, and what is left of it in a `state_dict` that somebody holds."""

    @contextmanager
    def entered(self) -> Iterator[Stream]:
        """Context of work on state: the executor's lock is held, and no recorder sees it. Gives the current compute stream."""
        with self._executor.recording.paused(), self._executor.hook_lock.entered():
            yield self.context.streams.current()

    def bring_back(self, state: SwappedState) -> None:
        """Have all of `state` on the device, as somebody reads it. Raises `torch.OutOfMemoryError`, and `RuntimeError` in a
        forked child and in the capture of a graph."""
        if ThisProcess.pid != self._pid:
            raise RuntimeError(
                f"optimizer state of {state.away_bytes} bytes: expected to be read in the process of its session "
                f"({self._pid}), got a read in a forked child ({ThisProcess.pid}), where its device cannot be used; read it in "
                f"the parent"
            )
        if self.device.capturing():
            raise RuntimeError(
                f"optimizer state of {state.away_bytes} bytes: expected to be read outside of the capture of a CUDA graph, in "
                f"which it cannot come back from the host; capture the step in a session without optimizer="
            )
        with self.entered() as compute:
            state.arrive(compute)
