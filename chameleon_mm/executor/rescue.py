"""Recomputes dropped storages before what they are made from may be overwritten. Note [Relied on].

rescue = Rescue(ins, budget, streams)
rescue.run(value.relied)      # under the executor's lock, outside of hooks, before an operator writes to the value
rescue.hand_out(relied, ...)  # before a node is given a source
rescue.let_go(reliance)       # autograd has let go of a source
"""

from __future__ import annotations

from contextlib import nullcontext, suppress

import torch
from torch.utils._python_dispatch import _disable_current_modes

from chameleon_mm.device import Stream
from chameleon_mm.errors import ChameleonError, HostMemoryExhausted, TransferFailed
from chameleon_mm.executor.budget import Budget, swap_out_now
from chameleon_mm.executor.swap_ins import SwapIns
from chameleon_mm.profiler.calls import Relied
from chameleon_mm.profiler.dispatch_state import tracer_is_on
from chameleon_mm.saved.calling_thread import ComputeStreams
from chameleon_mm.saved.handles import Handle
from chameleon_mm.saved.saved_storage import SavedStorage
from chameleon_mm.saved.source import Reliance, node_is_torchs
from chameleon_mm.saved.state import State


class Rescue:
    """Rescues what is made from a value. Not thread-safe: the executor holds its lock."""

    def __init__(self, ins: SwapIns, budget: Budget, streams: ComputeStreams) -> None:
        self._ins = ins
        self._budget = budget
        self._streams = streams

    def run(self, relied: Relied) -> None:
        """Recompute all that was dropped and rests on `relied`, and have it stay or go to the host."""
        compute, dependents = self._streams.current(), relied.dependents
        with _disable_current_modes() if tracer_is_on() else nullcontext():
            while dependents:
                saved = dependents[0]()
                if saved is not None and saved.form.recipe is not None and saved.state in (State.ON_HOST, State.RESTORED):
                    self._rescue(saved, compute)
                del dependents[0]  # an error leaves it: the next write asks again

    def let_go(self, reliance: Reliance) -> None:
        """The same for a source that autograd does not rely on any more, if others hold it."""
        relied = reliance.source.relied
        if relied is not None and relied.dependents and not reliance.source.is_alone:
            self.run(relied)

    def hand_out(self, relied: Relied, handle: Handle, saved: SavedStorage | None) -> None:
        """The same before a node is given the tensor of `handle`, of the storage `saved`, or of one that stays (None): where
        that is autograd's last use of it and others hold it, or where the node may write to it."""
        relied.note_used(handle)
        if not node_is_torchs() or not (relied.by_autograd or (saved is not None and saved.is_private)):
            self.run(relied)

    def _rescue(self, saved: SavedStorage, compute: Stream) -> None:
        home = saved.slot.alloc_stream
        try:
            self._ins.restore(saved, compute)
        except RuntimeError as error:
            if isinstance(error, (ChameleonError, torch.OutOfMemoryError)):
                raise
            return  # it raises the same at its use, if there is one
        if saved.state is State.RESTORED:
            saved.stay_on_device()
        if home is not compute:  # another stream's memory now, while its users are ordered after its home alone
            with suppress(HostMemoryExhausted, TransferFailed):
                swap_out_now(saved)
