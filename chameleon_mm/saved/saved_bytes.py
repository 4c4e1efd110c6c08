"""The bytes of a storage that one saved tensor covers, and the version counter that tells of writes to them.

    saved = SavedBytes(t)                       # at save
    earlier.copy_includes(saved)                # at a later save of the same storage: a copy of the earlier bytes has these

Version numbers of different counters say nothing about each other: outputs of `unsafe_chunk` and `unsafe_split`, `.data`,
`set_` and memory that a kernel fills behind autograd's back share a storage and no counter. So a copy that began before a
tensor was saved has that tensor's bytes only where the same bytes were saved before it began, under the same counter, at the
same version. Note [Identity].
"""

from __future__ import annotations

import weakref

from torch import Tensor

from chameleon_mm.saved.handles import VersionProbe


class SavedBytes:
    """The bytes of its storage that a saved tensor covers, under the version counter that it had."""

    __slots__ = ("_begin", "_counter", "_end", "_geometry", "_solid", "probe")

    def __init__(self, t: Tensor) -> None:
        self.probe = VersionProbe(t)
        """Probe of the tensor's version counter, at the version that it had."""
        # A view has its base's counter. Autograd's node keeps neither alive, so a reference that is gone vouches for nothing.
        self._counter = weakref.ref(_counter_of(t))
        element_bytes = t.element_size()
        shape, stride, offset = t.shape, t.stride(), t.storage_offset()
        self._geometry = (element_bytes, shape, stride, offset)
        self._solid = t.is_contiguous()
        """Whether it covers all bytes from its first to its last."""
        last = t.numel() - 1
        if not self._solid:
            dims = sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1)
            last = sum(step * (size - 1) for step, size in dims)
            self._solid = _without_holes(dims)
        self._begin = int(offset) * element_bytes
        self._end = self._begin + (last + 1) * element_bytes

    def copy_includes(self, later: SavedBytes, *, same_bytes: bool = False) -> bool:
        """Whether a copy of these bytes, begun after they were saved, has those of `later`, saved since then.

        `same_bytes`: both are known to cover the same ones.
        """
        if self.probe.moved or self.probe.expected != later.probe.expected:
            return False
        counter = self._counter()
        return counter is not None and counter is later._counter() and (same_bytes or self.covers(later))

    def covers(self, other: SavedBytes) -> bool:
        """Whether all bytes of `other` are among these."""
        if self._solid and self._begin <= other._begin and other._end <= self._end:
            return True
        return self._geometry == other._geometry


def _counter_of(t: Tensor) -> Tensor:
    """A tensor that stands for the version counter of `t`: its base, which every view of it names, else `t` itself."""
    base = t._base
    return t if base is None else base


def _without_holes(dims: list[tuple[int, int]]) -> bool:
    """Whether (stride, size) sorted by stride leave no byte out."""
    reach = 1
    for stride, size in dims:
        if stride > reach:
            return False
        reach += stride * (size - 1)
    return True
