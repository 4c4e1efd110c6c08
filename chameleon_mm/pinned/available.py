"""Host memory that is left, as of a moment ago, for whoever asks often.

    memory = AvailableMemory()
    memory.read(taking=nbytes)      # reads the files again after 10 ms, or once 1/16 of the last answer has been taken

`available_host_bytes` opens a dozen files and takes a third to half of a millisecond, as long as pinning 4 MiB. Where a pool is
full it would be asked for every block.
"""

from __future__ import annotations

import time

from chameleon_mm.pinned.host_memory import available_host_bytes

FRESH_S = 0.01
"""Seconds for which an answer is good. Reading then costs a twentieth of one processor at most, and other processes, writing
memory at some 10 GB/s, have taken 100 MB that this does not know of: well below what a machine keeps as a reserve."""

TRUSTED_SHARE = 16
"""Share of an answer that may be taken before it is asked for again: what the asker itself takes is known at once only so."""


class AvailableMemory:
    """`available_host_bytes`, read again when it may have changed. Threads may share it: the worst is one reading more."""

    def __init__(self) -> None:
        self._available_bytes = 0
        self._trusted_bytes = 0
        self._good_until = 0.0

    def read(self, taking: int = 0) -> int:
        """Bytes that this process may still take, 0 where nothing says so. The caller is about to take `taking` of them."""
        now = time.monotonic()
        if taking > self._trusted_bytes or now >= self._good_until:
            self._available_bytes = available_host_bytes()
            self._trusted_bytes = self._available_bytes // TRUSTED_SHARE
            self._good_until = now + FRESH_S
        self._trusted_bytes -= taking
        return self._available_bytes
