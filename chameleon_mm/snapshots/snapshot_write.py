"""Write of a snapshot on a thread of its own.

write = SnapshotWrite(path, contents, turn=lock, on_end=...)
training goes on
write.wait()                            # raises what went wrong

Why not `torch.distributed.checkpoint.async_save`: before it returns it copies everything once more in host memory, where a
snapshot is already; it refuses a process group without a CPU backend; and folders are exchanged only after it.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)


class SnapshotWrite:
    """Write of one snapshot to one checkpoint folder. The interpreter does not end before it has."""

    def __init__(
        self, path: Path, contents: Callable[[], dict[str, Any]], *, turn: threading.Lock, on_end: Callable[[], None]
    ) -> None:
        """`contents()`, called on the thread, may wait for the device. `turn`: writes with the same one follow each other."""
        self.path = path
        """The folder. It is there, whole and on the disk, once `wait` has returned."""
        # Here, not on the thread: what it imports registers for the interpreter's end, which may have begun by then.
        from chameleon_mm.snapshots.checkpoint import write_checkpoint

        self._write = write_checkpoint
        self._error: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, args=([contents], turn, [on_end]), name="chameleon-snapshot", daemon=False).start()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not. Never waits."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> Path:
        """Wait until the checkpoint is there. Returns its path. Raises what the write raised (`OSError`, as a rule), and
        `TimeoutError` after `timeout_s` seconds; the write goes on then."""
        if not self._ended.wait(timeout_s):
            raise TimeoutError(
                f"the write of {self.path}: expected it to end within {timeout_s} s, it is still going on; wait longer"
            )
        if self._error is not None:
            raise self._error
        return self.path

    def _run(
        self, contents: list[Callable[[], dict[str, Any]]], turn: threading.Lock, on_end: list[Callable[[], None]]
    ) -> None:
        """The lists give away what they hold: what is written is nobody's any more when `wait` returns."""
        try:
            with turn:
                self._write(self.path, contents.pop())
        except BaseException as error:  # noqa: BLE001 - on this thread nobody would see it: `wait` raises it
            traceback.clear_frames(error.__traceback__)  # which hold views of the blocks
            self._error = error
            _log.warning("chameleon_mm: a snapshot was not written to %s: %s", self.path, str(error))
        finally:
            try:
                on_end.pop()()
            finally:
                self._ended.set()

    def __repr__(self) -> str:
        state = "going on" if not self.done else "done" if self._error is None else f"failed: {self._error}"
        return f"<SnapshotWrite to {self.path}, {state}>"
