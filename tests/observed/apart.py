"""Check that the ends of copies or of a pack share no bytes. By address, not by storage: two storages may share memory.

check_apart("pack", pairs)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class _Range(NamedTuple):
    """Bytes of memory, [begin, end), that are read or written, and whose they are."""

    begin: int
    end: int
    write: bool
    name: str


_NAMES = {
    "copy": ("dst", "src"),
    "pack": ("the place of buffer {}", "buffer {}"),
    "unpack": ("buffer {}", "the place of buffer {}"),
}


def check_apart(what: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Raise `ValueError` unless all pairs `(dst, src)` can be moved in any order, with the same result."""
    dst_name, src_name = _NAMES[what]
    ranges = []
    for i, (dst, src) in enumerate(pairs):
        ranges.append(_range(dst, True, dst_name.format(i)))
        # Sources count as writes in unpacking: buffers that overlap were overwritten when they were packed.
        ranges.append(_range(src, what == "unpack", src_name.format(i)))
    _check_apart(what, ranges)


def _range(t: Tensor, write: bool, name: str) -> _Range:
    begin = t.data_ptr()
    return _Range(begin, begin + t.numel(), write, name)


def _check_apart(what: str, ranges: list[_Range]) -> None:
    """Raise `ValueError` where a range that is written shares bytes with another one."""
    furthest: dict[bool, _Range] = {}  # of the ranges begun so far, read and written, the one that ends last
    for new in sorted(r for r in ranges if r.begin < r.end):
        for old in furthest.values():
            if (old.write or new.write) and new.begin < old.end:
                raise ValueError(
                    f"{what}: expected ends that share no bytes, but {old.name} and {new.name} share "
                    f"{min(old.end, new.end) - new.begin}: give each its own, or make two calls"
                )
        if new.write not in furthest or new.end > furthest[new.write].end:
            furthest[new.write] = new
