"""How much one pool may reserve: what it was told, or what the machine leaves for it.

limit = MemoryLimit("8GiB");  limit.nbytes           # 8 GiB, and stays
limit = MemoryLimit("auto");  limit.grow(held)       # the most that `auto_limit_bytes` has said so far
"""

from __future__ import annotations

from chameleon_mm.pinned.available import AvailableMemory
from chameleon_mm.pinned.host_memory import auto_limit_bytes
from chameleon_mm.units import parse_size


class MemoryLimit:
    """`max_bytes` as `PinnedPool` takes it. Raises `ValueError` and `TypeError` for what is no size, and where "auto" finds
    nothing that says how much memory there is."""

    def __init__(self, max_bytes: int | str | None) -> None:
        self._memory = AvailableMemory()
        self._auto = max_bytes is None or max_bytes == "auto"
        self._nbytes = 0 if max_bytes is None or max_bytes == "auto" else parse_size(max_bytes, what="max_bytes")
        self.grow(0)
        if self._auto and not self._nbytes:
            raise ValueError(
                'max_bytes: expected the available host memory, which "auto" takes a share of, got nothing that says how much '
                'that is; give a size, such as "8GiB"'
            )

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def grow(self, held_bytes: int) -> None:
        """Look again, where the limit follows the machine: a virtual one's memory may grow as it is used, so what was available
        at the start says too little. `held_bytes` is what the pool has reserved. Never shrinks: see `auto_limit_bytes`."""
        if self._auto:
            found = auto_limit_bytes(available_bytes=self._memory.read(), held_bytes=held_bytes)
            self._nbytes = max(self._nbytes, found)
