"""The hook in torch's caching allocator on a GPU: the C++ helper `reclaim`, where it is built.

The allocator calls it inside malloc on every miss of its pools, before it asks the driver for more: `native/reclaim.cpp`.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from chameleon_mm import native
from chameleon_mm.device.cuda.cuda_stream import CudaEvent, CudaStream
from chameleon_mm.device.holders import REFERENCES_AT_REST
from chameleon_mm.device.protocols import Event, Stream
from chameleon_mm.units import MIB

if TYPE_CHECKING:
    from chameleon_mm.device.allocator_hook import HeldStorage

SEGMENT_BYTES = 20 * MIB
"""Bytes by which torch's allocator grows for a small request (`kLargeBuffer` in c10/core/AllocatorConfig.h)."""


def helper() -> ModuleType | None:
    """The C++ helper, or None where it is not built or not for this torch."""
    return None if torch.version.cuda is None else native.load("reclaim")


class CudaAllocatorHook:
    """Hook in the caching allocator of one GPU, for one session."""

    __slots__ = ("_asked", "_history", "_hook", "_index", "_set", "_total_bytes")

    def __init__(self, module: ModuleType, index: int) -> None:
        self._hook: Any = module.Hook(index)
        self._index = index
        self._total_bytes = int(torch.cuda.get_device_properties(index).total_memory)
        self._asked: tuple[int, int | None] | None = None
        self._set = (1 << 62, 0)
        self._history = False

    @property
    def reclaimed(self) -> int:
        return int(self._hook.reclaimed)

    @property
    def waits(self) -> int:
        """Number of storages among them whose copies were not complete: their streams were made to wait."""
        return int(self._hook.waits)

    def hold(self, storage: torch.UntypedStorage, done: Event, owner: Stream, tensors: int) -> HeldStorage | None:
        """Hold as `AllocatorHook.hold` does; not what another allocator than torch's own made."""
        if not isinstance(done, CudaEvent) or not isinstance(owner, CudaStream):
            raise TypeError(f"hold: expected an event and a stream of CUDA, got {type(done).__name__}, {type(owner).__name__}")
        self._note_history()
        event, stream = done.raw, owner.raw
        held: HeldStorage | None = self._hook.hold(
            storage, event, event.cuda_event, stream.cuda_stream, stream.stream_id, tensors, REFERENCES_AT_REST
        )
        return held

    def set_limits(self, limit_bytes: int, growth_bytes: int | None) -> None:
        """Set limits as `AllocatorHook.set_limits` does, within the process's share of the device. Growth that is not known is
        taken to be half of the limit."""
        self._note_history()
        if (limit_bytes, growth_bytes) == self._asked:
            return
        self._asked = limit_bytes, growth_bytes
        share = torch.cuda.get_per_process_memory_fraction(self._index)
        limit = min(limit_bytes, int(share * self._total_bytes))
        growth = max(SEGMENT_BYTES, limit // 2 if growth_bytes is None else growth_bytes)
        self._set = limit, growth
        self._hook.set_limits(limit, growth, self._history)

    def _note_history(self) -> None:
        """Note whether torch records memory history: with that the allocator may want Python's stack for every free, and for it
        the GIL, which whoever waits for the allocator may hold. Then only threads that hold it themselves reclaim."""
        history = bool(torch._C._cuda_isHistoryEnabled())
        if history != self._history:
            self._history = history
            self._hook.set_limits(*self._set, history)
