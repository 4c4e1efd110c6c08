"""Copy that was issued and not yet carried out: its bytes move when something ordered after it must see them.

late = LateCopy(dst, src, label, before)       # `before`: copies that it was ordered after
carry_out([late])                              # before first, then late; a buffer that is gone by then is an error
poison(storage)                                # what memory holds that nothing was written to yet
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tests.observed.errors import SimLifetimeError

POISON_BYTE = 0xFB
"""Value of the byte, as float32 and bfloat16 -2.6e36, as int64 a large negative, as bool neither 0 nor 1."""

Bytes = npt.NDArray[np.bool_]
"""Flags for bytes that lie side by side."""


def poison(storage: torch.UntypedStorage, start: int = 0, nbytes: int | None = None) -> None:
    """Fill bytes of a storage with `POISON_BYTE`, past every dispatcher."""
    size = storage.nbytes() - start if nbytes is None else nbytes
    if size > 0:
        ctypes.memset(storage.data_ptr() + start, POISON_BYTE, size)


class _End:
    """Source or destination: some bytes of a storage, held weakly."""

    __slots__ = ("address", "nbytes", "ref", "start")

    def __init__(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        self.ref = weakref.ref(storage)
        self.address = storage.data_ptr()
        self.start = int(t.storage_offset())
        self.nbytes = t.numel()

    def touches(self, address: int, nbytes: int) -> bool:
        start = self.address + self.start
        return self.ref() is not None and start < address + nbytes and address < start + self.nbytes

    def lost(self) -> str:
        """Return the reason why the memory is gone, or "" while it exists."""
        storage = self.ref()
        if storage is None:
            return "dropped"
        # resize_(0), as FSDP does, frees the memory and leaves the storage; a swapped data pointer does the same.
        if storage.nbytes() < self.start + self.nbytes or storage.data_ptr() != self.address:
            return "resized or given other memory"
        return ""


class LateCopy:
    """Copy that was issued and not carried out yet. Holds both ends weakly: dropping one too early is an error, not luck."""

    __slots__ = ("_dst", "_moves_bytes", "_spoilt", "_src", "before", "done", "label")

    def __init__(self, dst: Tensor, src: Tensor, label: str, before: tuple[LateCopy, ...], *, moves_bytes: bool = True) -> None:
        self._dst = _End(dst)
        self._src = _End(src)
        self.label = label
        self.before = before
        self.done = False
        self._moves_bytes = moves_bytes
        self._spoilt: list[tuple[int, Bytes]] = []

    def spoil(self, start: int, written: Bytes) -> None:
        """Note a write of the source during the copy, from byte `start` on where `written` is set: these bytes of the copy are
        undefined. The others arrive."""
        self._spoilt.append((start, written))
        if self.done and self._moves_bytes and self._dst.ref() is not None:
            self._poison_spoilt()

    def _poison_spoilt(self) -> None:
        for start, written in self._spoilt:
            first = self._dst.address + self._dst.start + start
            arrived = np.ctypeslib.as_array((ctypes.c_uint8 * len(written)).from_address(first))
            arrived[written] = POISON_BYTE

    def touches(self, address: int, nbytes: int) -> bool:
        """True if the copy has yet to read or write any of these bytes. Compares addresses: two storages may share them."""
        return not self.done and (self._dst.touches(address, nbytes) or self._src.touches(address, nbytes))

    def move(self) -> None:
        """Move the bytes. Raises `SimLifetimeError` if either end has lost its memory."""
        self.done, self.before = True, ()
        for name, end in (("source", self._src), ("destination", self._dst)):
            lost = end.lost()
            if lost:
                raise SimLifetimeError(
                    f"{self.label}: its {name} was {lost} while the copy was pending; expected the buffer kept as it is until "
                    f"an event after the copy is waited on or complete"
                )
        if not self._moves_bytes:
            return
        src, dst = self._src, self._dst
        ctypes.memmove(dst.address + dst.start, src.address + src.start, src.nbytes)
        self._poison_spoilt()


def carry_out(copies: Iterable[LateCopy]) -> None:
    """Move the bytes of `copies`, and first of everything each was ordered after."""
    stack = [copy for copy in copies if not copy.done]
    while stack:
        copy = stack[-1]
        missing = [earlier for earlier in copy.before if not earlier.done]
        if missing:
            stack.extend(missing)  # not recursion: chains are as long as a step has copies
            continue
        stack.pop()
        if not copy.done:
            copy.move()


def all_pending(copies: Iterable[LateCopy]) -> list[LateCopy]:
    """Copies among `copies` not carried out, and all that each was ordered after."""
    stack = list(copies)
    seen: dict[int, LateCopy] = {}
    while stack:
        copy = stack.pop()
        if id(copy) not in seen and not copy.done:
            seen[id(copy)] = copy
            stack.extend(copy.before)
    return list(seen.values())
