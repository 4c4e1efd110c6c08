"""Snapshot of what a step begins with, and how long its host memory lives.

snapshot = session.snapshot()
write = snapshot.write("run/latest")         # on a thread of its own
session.restore(snapshot)
snapshot.release()                           # or dropped; after the write, where one is going on
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chameleon_mm.arguments import describe
from chameleon_mm.device import Device, Event
from chameleon_mm.profiler.retry import RandomState
from chameleon_mm.snapshots.checkpoint_folder import check_target
from chameleon_mm.snapshots.model_copy import ModelCopy
from chameleon_mm.snapshots.optimizer_copy import OptimizerCopy
from chameleon_mm.snapshots.snapshot_write import SnapshotWrite
from chameleon_mm.snapshots.tensor_copy import TensorCopy
from chameleon_mm.units import format_size


class Snapshot:
    """State of training between two steps, in host memory: made by `session.snapshot()`, for `session.restore()`.

    It holds parameters, buffers, gradients that exist, the state and settings of the session's optimizer, and torch's random
    states. Its memory goes back to the session's pool by `release()`, or when nobody holds it any more.
    """

    def __init__(
        self,
        device: Device,
        model: ModelCopy,
        optimizer: OptimizerCopy | None,
        random: RandomState,
        last: Event,
        turn: threading.Lock,
    ) -> None:
        self.model, self.optimizer, self.random, self.device = model, optimizer, random, device
        self._copies: Sequence[TensorCopy] = [*model.copies, *(() if optimizer is None else optimizer.copies)]
        self._last = last
        """Event behind all device work on the blocks."""
        self._turn = turn
        self._lock = threading.Lock()
        self._writes = 0
        self._released = False
        self.nbytes = sum(copy.nbytes for copy in self._copies)
        """Bytes of host memory that it holds, or held."""

    @property
    def released(self) -> bool:
        """Whether it was released: it can be restored and written no more."""
        return self._released

    def release(self) -> None:
        """Give its host memory back: at once, or when the last write that is going on has ended. A second call does nothing."""
        with self._lock:
            self._released = True
            if not self._writes:
                self._free()

    def write(self, path: str | os.PathLike[str]) -> SnapshotWrite:
        """Write it to the folder `path`, a checkpoint of `torch.distributed.checkpoint`, on a thread of its own, while training
        goes on. Returns a handle to wait for it; a session's writes follow one another.

        An earlier checkpoint at `path` is replaced in one step, once everything is on the disk: Note [Checkpoint folder] says
        what a process that is killed leaves. `dcp.load` and `dcp_to_torch_save` read it: "model" for `model.load_state_dict`,
        "optimizer" for `optimizer.load_state_dict`, by the parameters' names (None where the session has none), "gradients" by
        the parameters' names, "not_in_state_dict" (buffers that are not persistent), and "random": "host" for
        `torch.set_rng_state`, "device" for `torch.cuda.set_rng_state`. Nothing of this package is needed to go on from it.

        Raises `TypeError` for what is no path, `ValueError` for a path that is neither a checkpoint nor free and for a snapshot
        that was released, and `OSError` where nothing can be written. What goes wrong later is raised by the handle's `wait`.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"snapshot.write(): expected the path of a folder, got {describe(path)}; pass a str or a Path")
        folder = Path(path).absolute()
        check_target(Path(os.path.realpath(folder)), "snapshot.write()")
        with self._lock:
            self.check_live("snapshot.write()")
            self._writes += 1
        try:
            return SnapshotWrite(folder, self.for_checkpoint, turn=self._turn, on_end=self._write_ended)
        except BaseException:  # no thread was to be had
            self._write_ended()
            raise

    def check_live(self, what: str) -> None:
        """Raise `ValueError` for one that was released."""
        if self._released:
            raise ValueError(f"{what}: expected a snapshot that holds its memory, got one that was released; take another")

    # --- what restoring and writing ask

    @property
    def last(self) -> Event:
        """Event behind all device work on its memory."""
        return self._last

    def note_read(self, last: Event) -> None:
        """Note that the device reads its memory until `last`, which is behind all earlier work on it."""
        self._last = last

    def for_checkpoint(self) -> dict[str, Any]:
        """What is written to a checkpoint, once the device is done with the copies. The tensors hold the memory."""
        self._last.synchronize()  # the copies that fill the blocks -> the host reads them
        optimizer = None if self.optimizer is None else self.optimizer.for_checkpoint()
        return {**self.model.for_checkpoint(), "optimizer": optimizer, "random": self.random.tensors()}

    def _write_ended(self) -> None:
        with self._lock:
            self._writes -= 1
            if self._released and not self._writes:
                self._free()

    def _free(self) -> None:
        copies, self._copies = self._copies, ()
        for copy in copies:
            copy.block.release(after=self._last)  # Note [Host block]

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._free()  # nobody writes it: a write holds it

    def __repr__(self) -> str:
        return f"<Snapshot of {format_size(self.nbytes)}{', released' if self._released else ''}>"
