"""Snapshots of one session: take them, write them on a separate thread, and restore them.

snapshots = Snapshots(executor, model, optimizer)
snapshot = snapshots.take()           # the latest snapshot from now on
snapshots.restore(None)               # None: the latest snapshot
del snapshots                         # at the session's end: frees snapshots that no other code holds
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from chameleon_mm.device import Device, Event
from chameleon_mm.errors import check_type
from chameleon_mm.record.retry import RandomState
from chameleon_mm.state.checkpoint_folder import check_target
from chameleon_mm.state.hosted import Home
from chameleon_mm.state.tensor_copy import Copier, TensorCopy
from chameleon_mm.state.training_copy import ModelCopy, OptimizerCopy, check_model
from chameleon_mm.swap.executor import Executor

if TYPE_CHECKING:
    from chameleon_mm.state.optimizer_swap import OptimizerSwap
    from chameleon_mm.state.parameter_swap import ParameterSwap

# --- Write of a snapshot on a separate thread
#
# `torch.distributed.checkpoint.async_save` is not used for three reasons: it copies everything once more in host memory before
# it returns; it refuses a process group without a CPU backend; folders could be exchanged only after it.

_log = logging.getLogger(__name__)


class SnapshotWrite:
    """Write of one snapshot to one checkpoint folder. At exit the interpreter waits for its end."""

    def __init__(
        self, path: Path, contents: Callable[[], dict[str, Any]], *, turn: threading.Lock, on_end: Callable[[], None]
    ) -> None:
        """`contents()` is called on the thread, and may wait for the device. `turn`: lock that orders writes."""
        self.path = path
        """Folder. It exists, complete and on disk, once `wait` has returned."""
        # Import here, not on the thread: the module registers exit handlers, and the interpreter's exit may begin meanwhile.
        from chameleon_mm.state.checkpoint import write_checkpoint

        self._write = write_checkpoint
        self._error: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, args=([contents], turn, [on_end]), name="chameleon-snapshot", daemon=False).start()

    @property
    def done(self) -> bool:
        """True if the write has ended, successfully or not. Never waits."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> Path:
        """Wait until the checkpoint is complete, and return its path. Raises the error of the write (usually `OSError`), or
        `TimeoutError` after `timeout_s` seconds; then the write continues. Raises `TypeError` and `ValueError` for an invalid
        `timeout_s`."""
        if timeout_s is not None:
            check_type("timeout_s", timeout_s, Real, "a number of seconds or None", "leave it out to wait until the end")
            if not 0 <= timeout_s <= threading.TIMEOUT_MAX:
                raise ValueError(f"timeout_s: expected 0 s or more, got {timeout_s}; leave it out to wait until the end")
        if not self._ended.wait(timeout_s if timeout_s is None else float(timeout_s)):
            raise TimeoutError(
                f"the write of {self.path}: expected it to end within {timeout_s} s, it is still going on; wait longer"
            )
        if self._error is not None:
            raise self._error
        return self.path

    def _run(
        self, contents: list[Callable[[], dict[str, Any]]], turn: threading.Lock, on_end: list[Callable[[], None]]
    ) -> None:
        """Write, and record the result. Empties the lists, so that nothing holds the contents when `wait` returns."""
        try:
            with turn:
                self._write(self.path, contents.pop())
        except BaseException as error:  # noqa: BLE001 - lost on this thread: `wait` raises it
            traceback.clear_frames(error.__traceback__)  # frames hold views of the blocks
            self._error = error
            _log.warning("chameleon_mm: a snapshot was not written to %s: %s", self.path, str(error))
        finally:
            try:
                on_end.pop()()
            finally:
                self._ended.set()


# --- Snapshot of the state between two steps, and the lifetime of its host memory


class Snapshot:
    """State of training between two steps, in host memory. Made by `session.snapshot()`, for `session.restore()`.

    It holds parameters, buffers, gradients that exist, the state and settings of the session's optimizer, and torch's random
    states. `release()`, or the end of the last reference, returns its memory to the session's pool.
    """

    def __init__(
        self,
        device: Device,
        model: ModelCopy,
        optimizer: OptimizerCopy | None,
        copies: Sequence[TensorCopy],
        random: RandomState,
        last: Event,
        turn: threading.Lock,
    ) -> None:
        self.model, self.optimizer, self.random, self.device = model, optimizer, random, device
        self._copies = copies
        self.last = last
        """Event after all device work on the snapshot's memory."""
        self._turn = turn
        self._lock = threading.Lock()
        self._writes = 0
        self.released = False
        """True if the snapshot was released. Then it can no longer be restored or written."""
        self.nbytes = sum(copy.nbytes for copy in self._copies)
        """Bytes of host memory of the snapshot, also after its release."""

    def release(self) -> None:
        """Free the snapshot's host memory, at once or when the last running write has ended. A second call does nothing."""
        with self._lock:
            self.released = True
            if not self._writes:
                self._free()

    def write(self, path: str | os.PathLike[str]) -> SnapshotWrite:
        """Write the snapshot to the folder `path` as a `torch.distributed.checkpoint`, on a separate thread, during training.
        Returns a handle to wait for the write. The writes of a session run one after another. Once everything is on disk, it
        replaces an earlier checkpoint at `path` in one step. Note [Checkpoint folder]: what a killed process leaves.

        Training can continue from it without this package: `dcp.load` and `dcp_to_torch_save` read it. "model" is for
        `model.load_state_dict`, "optimizer" for `optimizer.load_state_dict` with the parameters' names as keys (None if the
        session has no optimizer). "gradients" has the parameters' names as keys. "not_in_state_dict" has the buffers that are
        not persistent. "random" has "host" for `torch.set_rng_state` and "device" for `torch.cuda.set_rng_state`.

        Raises `TypeError` if `path` is not a path, and `ValueError` if it is neither a checkpoint nor free, or if the snapshot
        was released. Raises `OSError` if `path` cannot be written. The handle's `wait` raises later errors.
        """
        check_type("snapshot.write()", path, (str, os.PathLike), "the path of a folder", "pass a str or a Path")
        folder = Path(path).absolute()
        check_target(Path(os.path.realpath(folder)), "snapshot.write()")
        with self._lock:
            self.check_live("snapshot.write()")
            self._writes += 1
        try:
            return SnapshotWrite(folder, self.for_checkpoint, turn=self._turn, on_end=self._write_ended)
        except BaseException:  # no thread could be started
            self._write_ended()
            raise

    def check_live(self, what: str) -> None:
        """Raise `ValueError` if the snapshot was released. `what`: the caller's name."""
        if self.released:
            raise ValueError(f"{what}: expected a snapshot that holds its memory, got one that was released; take another")

    # --- for restoring and writing

    def for_checkpoint(self) -> dict[str, Any]:
        """Return the contents of a checkpoint, once the device has finished the copies. The tensors hold the host memory."""
        self.last.synchronize()  # the copies that fill the blocks -> the host reads them
        optimizer = None if self.optimizer is None else self.optimizer.for_checkpoint()
        return {**self.model.for_checkpoint(), "optimizer": optimizer, "random": self.random.tensors()}

    def _write_ended(self) -> None:
        with self._lock:
            self._writes -= 1
            if self.released and not self._writes:
                self._free()

    def _free(self) -> None:
        copies, self._copies = self._copies, ()
        for copy in copies:
            copy.block.release(after=self.last)  # Note [Host block]

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ends():
            self._free()  # no write runs: a write holds the snapshot


class Snapshots:
    """Snapshots of one session's model and optimizer. Not thread-safe; use it between steps."""

    def __init__(
        self,
        executor: Executor,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        parameters: ParameterSwap | None,
        state: OptimizerSwap | None,
    ) -> None:
        """`parameters`, `state`: swap of the model's parameters and of the optimizer's state; None: they stay."""
        self.latest: Snapshot | None = None
        self._home = Home(executor)
        self._device = self._home.context.pool.device
        self._counters = executor.metrics.totals
        self._model, self._optimizer = model, optimizer
        self._copier = Copier(self._home, parameters, state)
        self._parameters = parameters
        self._note_gradient = parameters.note_gradient if parameters is not None else lambda p: None
        self._leave: Callable[[list[Tensor]], object] = state.leave if state is not None else lambda params: None
        self._turn = threading.Lock()

    def take(self) -> Snapshot:
        """Take a snapshot, in order on the compute stream. The host waits only for copies that it makes itself. Raises
        `HostMemoryExhausted`, with all copies released."""
        with torch._C.DisableTorchFunction():
            check_model(self._model, self._parameters)
        self._home.check_readable("the model for a snapshot", 0)
        copies: list[TensorCopy] = []
        model = ModelCopy(copies)
        optimizer = None if self._optimizer is None else OptimizerCopy(copies, self._optimizer, self._model)
        self._join_streams()
        random = RandomState(self._device)
        try:
            model.take(self._copier, self._model)
            if optimizer is not None and self._optimizer is not None:
                optimizer.take(self._copier, self._optimizer)
        except BaseException:
            last = self._join_streams()
            for copy in copies:
                copy.block.release(after=last)
            raise
        last = self._join_streams()
        snapshot = self.latest = Snapshot(self._device, model, optimizer, copies, random, last, self._turn)
        self._counters.snapshots += 1
        self._counters.snapshot_bytes += snapshot.nbytes
        return snapshot

    def _join_streams(self) -> Event:
        """Order all streams: later reads see all earlier writes, and later writes follow them. Returns an event of the compute
        stream."""
        with self._home.entered() as compute:
            self._home.context.streams.join_all(compute)
            return compute.record()

    def restore(self, snapshot: Snapshot | None) -> None:
        """Restore `snapshot`; None: the latest. Raises `TypeError` and `ValueError` before any change. Raises
        `torch.OutOfMemoryError` if an allocation fails: free some memory, and restore again."""
        snapshot = self._checked(snapshot)
        self._home.check_readable("the model, for a snapshot to be restored,", snapshot.nbytes)
        with self._home.entered() as compute:
            self._home.context.streams.join_all(compute)
        snapshot.last.synchronize()  # the copies that fill the blocks -> the host's reads and later copies
        try:
            snapshot.model.restore(self._copier, self._model, self._note_gradient)
            if snapshot.optimizer is not None and self._optimizer is not None:
                snapshot.optimizer.restore(self._copier, self._optimizer, self._leave)
        finally:
            snapshot.last = self._join_streams()
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


def _refuse(difference: str) -> NoReturn:
    raise ValueError(
        f"session.restore(): expected a snapshot of this session's model and optimizer, {difference}; restore what "
        f"session.snapshot() returned for them"
    )
