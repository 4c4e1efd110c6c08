"""Files that the library writes, and reads again if they are its own.

    write_file(path, text)                                         # a user's file: whole or not at all
    write_file(cache_folder() / name, text, private=True)
    read_file(cache_folder() / name, limit_bytes)

Note [Own files]: a file of a cache may be cut short, foreign, huge, a link or a FIFO. It is read only if it is a regular file,
and if only this user and root can change it and its folder. It is written under another name, synced, and renamed.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from secrets import token_hex

from chameleon_mm.errors import check_type
from chameleon_mm.units import printable


def cache_folder() -> Path:
    """Folder of this user's caches. Raises `FileNotFoundError` or `RuntimeError` if there is none."""
    try:
        import platformdirs  # imported here: a bare checkout runs without it, and has no cache
    except ImportError as error:
        raise FileNotFoundError("cache: expected the package platformdirs, got none; install it") from error
    folder = platformdirs.user_cache_path("chameleon_mm")
    if not folder.is_absolute():
        raise FileNotFoundError(f"cache: expected a folder in the user's home, got {folder}; set HOME")
    return folder


def read_file(path: Path, limit_bytes: int) -> bytes:
    """Return the content of a private file: Note [Own files]. Raises `OSError`, also above `limit_bytes`."""
    _check_private(path.parent, path.parent.stat())
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(opened)
        _check_private(path, found)
        if not stat.S_ISREG(found.st_mode) or found.st_size > limit_bytes:
            what = f"expected a regular file of {limit_bytes} bytes at most, got another kind or {found.st_size}; remove it"
            raise OSError(errno.EINVAL, what, str(path))
        with open(opened, "rb", closefd=False) as file:
            return file.read(limit_bytes)
    finally:
        os.close(opened)


def write_file(path: str | os.PathLike[str], content: str | bytes, *, private: bool = False) -> None:
    """Write a file, whole or not at all; lone surrogates are escaped. Raises `OSError`; an earlier file is unchanged then.

    `private`: a file of a cache. Missing folders are made, for this user alone, and a link at `path` is replaced. Otherwise a
    path that a rename would change is written in place: a link, a device, another user's file.
    """
    check_type("path", path, (str, os.PathLike), "the path of a file", "pass a str or a Path")
    path = Path(path)
    data = printable(content).encode() if isinstance(content, str) else content
    if private:
        make_private(path.parent)
    elif not path.parent.is_dir():
        what = f"expected a file in an existing folder, got {path}; make {path.parent} first"
        raise FileNotFoundError(errno.ENOENT, what)
    found = path.lstat() if not private and os.path.lexists(path) else None
    if found is not None and not (
        stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1 and os.access(path.parent, os.W_OK)
    ):
        path.write_bytes(data)
        return
    new = path.with_name(f".{token_hex(8)}.tmp")
    try:
        with open(new, "xb", opener=lambda name, flags: os.open(name, flags, 0o600 if private else 0o666)) as file:
            if found is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(found.st_mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # before the rename: a crash must not leave the name on an empty file
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def make_private(folder: Path) -> None:
    """Make `folder` for this user alone, or check that no other user can change it. Raises `OSError`."""
    for each in (*reversed([parent for parent in folder.parents if not parent.exists()]), folder):
        each.mkdir(mode=0o700, exist_ok=True)
    _check_private(folder, folder.stat())


def _check_private(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o022:
        mode = oct(stat.S_IMODE(found.st_mode))
        what = f"expected a path that only this user can change, got owner {found.st_uid} and mode {mode}; remove it"
        raise PermissionError(errno.EPERM, what, str(path))
