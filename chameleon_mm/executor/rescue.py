"""Makes dropped storages again before what they are made from may be overwritten. Note [Relied on].

rescue = Rescue(ins, budget, streams)
rescue.run(value)             # under the executor's lock, outside of hooks, before the operator runs
rescue.run_all(dependents)    # before others may write to a source, of which autograd does not check the version any more
"""

from __future__ import annotations

import weakref
from contextlib import suppress

import torch

from chameleon_mm.device import Stream
from chameleon_mm.errors import ChameleonError, HostMemoryExhausted, TransferFailed
from chameleon_mm.executor.budget import Budget
from chameleon_mm.executor.memory_limit import swap_out_now
from chameleon_mm.executor.swap_ins import SwapIns
from chameleon_mm.profiler.calls import Value
from chameleon_mm.saved.calling_thread import ComputeStreams
from chameleon_mm.saved.saved_storage import SavedStorage
from chameleon_mm.saved.state import State


class Rescue:
    """Rescues what is made from a value. Not thread-safe: the executor holds its lock."""

    def __init__(self, ins: SwapIns, budget: Budget, streams: ComputeStreams) -> None:
        self._ins = ins
        self._budget = budget
        self._streams = streams

    def run(self, value: Value) -> None:
        """Make again all that is made from `value`, which is about to change, and have it stay or go to the host."""
        self.run_all(value.dependents)

    def run_all(self, dependents: list[weakref.ref[SavedStorage]]) -> None:
        """The same for `dependents`, the list of a value, which is empty afterwards."""
        compute = self._streams.current()
        refs = dependents.copy()
        dependents.clear()
        for ref in refs:
            saved = ref()
            if saved is not None and saved.form.recipe is not None and saved.state in (State.ON_HOST, State.RESTORED):
                self._rescue(saved, compute)

    def _rescue(self, saved: SavedStorage, compute: Stream) -> None:
        home = saved.alloc_stream
        try:
            storage = self._ins.restore(saved, compute)
        except RuntimeError as error:
            if isinstance(error, (ChameleonError, torch.OutOfMemoryError)):
                raise
            return  # it raises the same at its use, if there is one
        if saved.state is State.ON_HOST:
            saved.restored_in(storage, compute)  # somebody else holds it
        if saved.state is State.RESTORED:
            saved.stay_on_device()
        self._budget.note_on_device(saved)
        if home is not compute:  # another stream's memory now, while its users are ordered after its home alone
            with suppress(HostMemoryExhausted, TransferFailed):
                swap_out_now(saved)
