"""Queries and settings of the stand-in for tests. Loads nothing: importable on a machine without CUDA.

if is_loaded():
    count("malloc"), pending(), violations()
"""

from __future__ import annotations

import ctypes
import os

_ROOM = 1 << 16


def is_loaded() -> bool:
    """True if the CUDA runtime in this process is the substitute."""
    try:
        runtime = ctypes.CDLL("libcudart.so.13", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:  # no CUDA runtime is loaded
        return False
    return hasattr(runtime, "standin_count")


def mode() -> str:
    """When queued operations run: `late`, `early` or `threads`."""
    return os.environ.get("CUDA_STAND_IN_MODE", "late")


def count(name: str) -> int:
    """Number of events of one kind: `malloc`, `memcpyAsync`, `executed`, ...; `unchecked` accesses are counted here."""
    from tests.cuda_stand_in import library, memory

    return memory.unchecked if name == "unchecked" else int(library.count(name.encode()))


def pending() -> int:
    """Operations that are queued and have not run yet, over all streams."""
    from tests.cuda_stand_in import library

    return int(library.pending())


def violations() -> list[str]:
    """Return the ordering violations since the last call, one text each that names both sides."""
    from tests.cuda_stand_in import library

    room = _ROOM
    while True:
        into = ctypes.create_string_buffer(room)
        length = int(library.violations(into, room))
        if length < room:
            return into.value.decode().splitlines()
        room = length + 1
