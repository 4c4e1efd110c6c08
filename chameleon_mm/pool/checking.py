"""Find blocks that are never released. For tests and debugging: it walks the stack at every allocation.

checked = CheckingAllocator(PinnedPool("1GiB"))
block = checked.allocate(nbytes)      # a block of the pool
checked.close()                       # PoolStateError: the live blocks, and the stack of each allocation
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from chameleon_mm.device.protocols import Stream
from chameleon_mm.errors import PoolStateError
from chameleon_mm.pool.block import PinnedBlock, Uncopied
from chameleon_mm.pool.pool import PinnedPool, close_at_exit
from chameleon_mm.units import format_size

_FRAMES = 8
"""Number of stack frames to store: enough to include the frames above a framework's own, few enough to read."""


class CheckingAllocator(Uncopied):
    """Allocator of blocks of `pool` that stores the stack of each allocation. Thread-safe.

    `close`, or the end of `with`, ends only the check. The maker of the pool closes the pool.
    """

    def __init__(self, pool: PinnedPool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._taken: weakref.WeakKeyDictionary[PinnedBlock, str] = weakref.WeakKeyDictionary()

    def allocate(self, nbytes: int | str, stream: Stream | None = None) -> PinnedBlock:
        """Allocate as `PinnedPool.allocate` does."""
        block = self._pool.allocate(nbytes, stream)
        with self._lock:
            self._taken[block] = _where()
        return block

    def close(self) -> None:
        """Raise `PoolStateError` while blocks are live, with a list of them and the stack of each allocation."""
        with self._lock:
            live = [(where, block.nbytes) for block, where in self._taken.items() if not block.released]
        if not live:
            return
        blocks, nbytes = Counter(where for where, _ in live), Counter[str]()
        for where, size in live:
            nbytes[where] += size
        places = "; ".join(f"{blocks[where]} of {total} bytes allocated at {where}" for where, total in nbytes.most_common())
        raise PoolStateError(
            f"close: expected no live block, got {len(live)} of {format_size(nbytes.total())} in all; release them, or drop "
            f"what holds them, and close again: {places}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        close_at_exit(self.close, error, "checking allocator")


def _where() -> str:
    """Return the text of the frames outside of this module, innermost first. A stored frame would keep its objects alive."""
    frame: FrameType | None = sys._getframe(2)
    places: list[str] = []
    while frame is not None and len(places) < _FRAMES:
        code = frame.f_code
        places.append(f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return " < ".join(places)
