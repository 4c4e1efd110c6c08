"""Folder of a checkpoint, filled under another name and then renamed.

with new_folder(target) as part:         # .NAME.part; raises `BlockingIOError` during another write
    ...                                  # write files in it, each synced to disk

.NAME.lock held: .NAME.part <- files; fsync; exchanged with NAME in one step; fsync of the parent; the earlier one removed

Note [Checkpoint folder]: a process killed at any moment leaves a whole checkpoint under NAME, the earlier or the new one. The
next write of NAME replaces a leftover `.NAME.part` and `.NAME.lock`. If a file system cannot exchange two folders (`renameat2`;
NFS cannot), NAME is renamed to `.NAME.earlier`, then `.NAME.part` to NAME. If the process is killed between the two, there is
no NAME: the earlier checkpoint is whole under `.NAME.earlier`, and the next write first renames it back. Without file locks, an
existing `.NAME.part` counts as a running write: the next write is refused until it is removed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_METADATA, _DATA = ".metadata", ".distcp"
"""Metadata file of a `torch.distributed.checkpoint` checkpoint, and suffix of its other files."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2

_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS)
"""Error numbers of calls that a file system does not support."""


def check_target(target: Path, what: str) -> None:
    """Raise `ValueError` unless the path is free or a checkpoint, and `OSError` if it cannot be written."""
    if target.exists() and not target.is_dir():
        raise ValueError(f"{what}: expected the folder of a checkpoint, or a free name, got {target}, a file; choose another")
    names = sorted(file.name for file in target.iterdir()) if target.is_dir() else []
    if others := names if _METADATA not in names else [n for n in names if n != _METADATA and not n.endswith(_DATA)]:
        raise ValueError(
            f"{what}: expected the folder of a checkpoint, which is replaced, or a free name, got {target} with {others[0]} in "
            f"it; choose another"
        )
    if not target.parent.is_dir():
        raise ValueError(f"{what}: expected a name in an existing folder, got {target}; make {target.parent} first")
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise OSError(
            error.errno,
            f"{what}: expected a folder that may be written, got {target.parent} ({error.strerror}); choose another, or change "
            f"its rights",
        ) from error


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder, and rename it to `target` after the block succeeds. Note [Checkpoint folder]."""
    lock, part, earlier = (target.with_name(f".{target.name}.{what}") for what in ("lock", "part", "earlier"))
    held, is_locked = _lock(lock, target)
    try:
        if is_locked and part.exists():
            shutil.rmtree(part)  # left by a killed write
        try:
            part.mkdir()
        except FileExistsError:
            raise _busy(target, f", or remove {part} if no write runs, as there are no locks here") from None
        try:
            _put_back(earlier, target)
            yield part
            _sync(part)
            check_target(target, "snapshot.write()")  # other programs may have written into it meanwhile
            _put_in_place(part, target, earlier)
            _sync(target.parent)
        except BaseException:
            _put_back(earlier, target)
            shutil.rmtree(part, ignore_errors=True)
            raise
        shutil.rmtree(part, ignore_errors=True)  # now the earlier folder; if this fails, the next write retries
        shutil.rmtree(earlier, ignore_errors=True)
    finally:
        lock.unlink(missing_ok=True)
        os.close(held)


def _put_in_place(part: Path, target: Path, earlier: Path) -> None:
    if not target.exists():
        part.rename(target)
    elif not exchange(part, target):
        target.rename(earlier)
        part.rename(target)


def _put_back(earlier: Path, target: Path) -> None:
    if earlier.exists() and not target.exists():
        earlier.rename(target)


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two paths in one step. Returns False, and does nothing, if the system has no such call. Raises
    `OSError`."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def _lock(lock: Path, target: Path) -> tuple[int, bool]:
    """Lock `target` by the file `lock`. Returns its descriptor, and False if the file system has no locks. Closing the
    descriptor unlocks, and so does the end of the process."""
    while True:
        held, is_locked = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), False
        try:
            with _where_supported():
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_locked = True
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(held), lock.lstat()):  # else its holder has just removed the file
                    return held, is_locked
        except BlockingIOError:
            os.close(held)
            raise _busy(target, "") from None
        except BaseException:
            os.close(held)
            raise
        os.close(held)


def _busy(target: Path, why: str) -> BlockingIOError:
    what = f"{target}: expected a checkpoint that nobody else writes, got one that another write is at; choose another{why}"
    return BlockingIOError(errno.EAGAIN, what)


def _sync(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        with _where_supported():
            os.fsync(opened)
    finally:
        os.close(opened)


@contextmanager
def _where_supported() -> Iterator[None]:
    """Ignore errors of calls that the file system does not support."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
