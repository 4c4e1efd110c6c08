"""Writes a file on a thread of its own, so that whoever is killed meanwhile has the old file or the whole new one.

write = SnapshotWrite(path, contents, turn=lock, on_end=...)
training goes on
write.wait()                            # raises what went wrong

thread:  .NAME.part <- torch.save; fsync; renamed to NAME; fsync of the folder
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_log = logging.getLogger(__name__)


class SnapshotWrite:
    """Write of one snapshot to one file. The interpreter does not end before it has."""

    def __init__(
        self, path: Path, contents: Callable[[], dict[str, Any]], *, turn: threading.Lock, on_end: Callable[[], None]
    ) -> None:
        """`contents()`, called on the thread, may wait for the device. `turn`: writes with the same one follow each other."""
        self.path = path
        """The file. It is there, whole and on the disk, once `wait` has returned."""
        self._error: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, args=([contents], turn, [on_end]), name="chameleon-snapshot", daemon=False).start()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not. Never waits."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> Path:
        """Wait until the file is there. Returns its path. Raises what the write raised (`OSError`, as a rule), and
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
                write_file(self.path, contents.pop())
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


def check_file(path: Path, what: str) -> None:
    """Raise `ValueError` for a file that cannot be written. The file itself is not touched: somebody may read it, and a write
    may be about to end."""
    if path.is_dir():
        raise ValueError(f"{what}: expected a file to write, got {path}, a folder; add the name of a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"{what}: expected a file in an existing folder, got {path}; make {path.parent} first")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(
            f"{what}: expected a file in a folder that may be written, got {path} ({error.strerror}); choose another, or "
            f"change its rights"
        ) from error


def write_file(path: Path, contents: Callable[[], dict[str, Any]]) -> None:
    """Write what `contents()` returns to `path`, by `torch.save`, in one step as far as any reader sees. Raises `OSError`."""
    part = path.with_name(
        f".{path.name}.part"
    )  # in the same folder, and so on the same disk; what was killed left one is reused
    held = os.open(part, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(held, path)
        try:
            torch.save(contents(), part)
            os.fsync(held)
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    finally:
        os.close(held)  # and with it the lock
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with _where_supported():
            os.fsync(folder)
    finally:
        os.close(folder)


def _lock(held: int, path: Path) -> None:
    """Refuse a file that somebody else writes: the system lets go of the lock when that process ends, however it does."""
    try:
        with _where_supported():
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BlockingIOError(
            error.errno, f"{path}: expected a file that nobody else writes, got one that another write is at; choose another"
        ) from None


@contextmanager
def _where_supported() -> Iterator[None]:
    """Context that passes over what a file system has not."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):
            raise
