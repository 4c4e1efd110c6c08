"""Takes the snapshots of one session, and restores them.

snapshots = Snapshots(executor, model, optimizer)
snapshot = snapshots.take()           # the latest from now on
snapshots.restore(None)               # the latest, or one that is given
snapshots.end()                       # the session's end: it holds none any more
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NoReturn, Protocol

import torch
from torch import Tensor, nn

from chameleon_mm.arguments import check_type
from chameleon_mm.device import Event
from chameleon_mm.executor.executor import Executor
from chameleon_mm.hosted import Home
from chameleon_mm.profiler.retry import RandomState
from chameleon_mm.snapshots.model_copy import ModelCopy, check_model
from chameleon_mm.snapshots.optimizer_copy import OptimizerCopy
from chameleon_mm.snapshots.snapshot import Snapshot
from chameleon_mm.snapshots.tensor_copy import Copier, Hosts, TensorCopy


class HostedParameters(Hosts, Protocol):
    """Whoever swaps parameters and gradients."""

    def note_gradient(self, p: Tensor) -> None:
        """Have the gradient of `p`, which is new, leave."""


class Snapshots:
    """Snapshots of one session's model and optimizer. Not thread-safe; it is used between steps."""

    def __init__(
        self,
        executor: Executor,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        parameters: HostedParameters | None = None,
        leave: Callable[[list[Tensor]], None] | None = None,
    ) -> None:
        """`leave(params)`: has the state of `params`, which is new, leave."""
        self.latest: Snapshot | None = None
        self._home = Home(executor)
        pool = self._home.context.pool
        self._device = pool.device
        self._counters = executor.metrics.totals
        self._model, self._optimizer = model, optimizer
        self._copier = Copier(self._home, pool, parameters)
        self._parameters, self._leave = parameters, leave
        self._turn = threading.Lock()

    def take(self) -> Snapshot:
        """Take a snapshot, in order on the compute stream; the host waits for what it copies itself. Raises
        `HostMemoryExhausted`, with nothing left behind."""
        with torch._C.DisableTorchFunction():
            check_model(self._model, self._parameters)
        self._home.check_readable("the model for a snapshot", 0)
        model, optimizer = ModelCopy(), None if self._optimizer is None else OptimizerCopy(self._optimizer, self._model)
        self._join_streams()
        random = RandomState(self._device)
        try:
            model.take(self._copier, self._model)
            if optimizer is not None and self._optimizer is not None:
                optimizer.take(self._copier, self._optimizer)
        except BaseException:
            self._release([*model.copies, *(() if optimizer is None else optimizer.copies)])
            raise
        last = self._join_streams()
        snapshot = self.latest = Snapshot(self._device, model, optimizer, random, last, self._turn)
        self._counters.snapshots += 1
        self._counters.snapshot_bytes += snapshot.nbytes
        return snapshot

    def _join_streams(self) -> Event:
        """Order the streams, so that what any has written is read, and what any writes next comes after that. Returns an event
        of the compute stream."""
        with self._home.entered() as compute:
            self._home.context.streams.join_all(compute)
            return compute.record()

    def _release(self, copies: list[TensorCopy]) -> None:
        last = self._join_streams()
        for copy in copies:
            copy.block.release(after=last)

    def restore(self, snapshot: Snapshot | None) -> None:
        """Restore `snapshot`, or the latest. Raises `TypeError` and `ValueError` before anything is changed;
        `torch.OutOfMemoryError` where what is to be allocated finds no room: free some, and restore again."""
        snapshot = self._checked(snapshot)
        self._home.check_readable("the model, for a snapshot to be restored,", snapshot.nbytes)
        with self._home.entered() as compute:
            self._home.context.streams.join_all(compute)
        snapshot.last.synchronize()  # the copies that fill the blocks -> the host, which may read them, and what it queues now
        try:
            snapshot.model.restore(self._copier, self._model, self._note_gradient)
            if snapshot.optimizer is not None and self._optimizer is not None:
                snapshot.optimizer.restore(self._copier, self._optimizer, self._note_state)
        finally:
            snapshot.note_read(self._join_streams())
        snapshot.random.restore()

    def _checked(self, snapshot: Snapshot | None) -> Snapshot:
        if snapshot is None:
            snapshot = self.latest
        if snapshot is None:
            raise ValueError(
                "session.restore(): expected a snapshot, the session has taken none; call session.snapshot() first"
            )
        check_type("snapshot", snapshot, Snapshot, "a Snapshot or None", "pass what session.snapshot() returned")
        snapshot.check_live("session.restore()")
        if snapshot.device is not self._device:
            _refuse(f"got one of another device, {snapshot.device.name}")
        if (difference := snapshot.model.difference(self._model)) is not None:
            _refuse(difference)
        if (snapshot.optimizer is None) != (self._optimizer is None):
            _refuse(f"got one {'without an' if snapshot.optimizer is None else 'with an'} optimizer's state")
        if snapshot.optimizer is not None and self._optimizer is not None:
            difference = snapshot.optimizer.difference(self._optimizer, self._model)
            if difference is not None:
                _refuse(difference)
        return snapshot

    def _note_gradient(self, p: Tensor) -> None:
        if self._parameters is not None:
            self._parameters.note_gradient(p)

    def _note_state(self, params: list[Tensor]) -> None:
        if self._leave is not None:
            self._leave(params)


def _refuse(difference: str) -> NoReturn:
    raise ValueError(
        f"session.restore(): expected a snapshot of this session's model and optimizer, {difference}; restore what "
        f"session.snapshot() returned for them"
    )
