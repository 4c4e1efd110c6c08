"""Reads the device's memory counters after every operator of a recorded step: how much the operator held inside itself.

readings = Readings(device)
inner_bytes = readings.take(table, new_storages, tick=..., made_bytes=...)

    allocated since the last reading                   growth of the cumulative count
    - results of the operator                          made_bytes
    - what nobody knows and is still there             a library's workspace: later steps begin with it
    = allocated and gone again                         what the operator held inside itself at its peak, or more

More where it took one thing after another, and where another thread allocates meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chameleon_mm.device import Device
from chameleon_mm.profiler.storages import StorageTable


class Readings:
    """Readings of one step, which begins now. Not thread-safe.

    There is one after each operator: of several nobody could tell which one held what. On a GPU it takes the host 20 us, half
    of what a short operator takes and a fifth of what recording one does, and nothing cheaper tells as much: the time goes into
    the dictionary of all counters that torch makes. A peak would have to be reset before each operator, and is the users'.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last = device.read_memory()
        self._freed_by_then = 0
        """Bytes that the table's storages had freed by the last reading."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated at the last reading."""
        return self._last.allocated_bytes

    def take(
        self,
        table: StorageTable,
        new_storages: Sequence[torch.UntypedStorage] = (),
        *,
        tick: int,
        fresh: bool = False,
        made_bytes: int = 0,
    ) -> int:
        """Read the counters now and pass them to `table`, as `StorageTable.read` takes them. `made_bytes`: bytes of storages of
        the table that were made since the last reading. Returns the bytes of others that were allocated since then and are gone
        again."""
        before, now = self._last, self._device.read_memory()
        freed_bytes = table.freed_bytes - self._freed_by_then
        unknown_bytes = max(0, now.allocated_bytes - before.allocated_bytes + freed_bytes - made_bytes)
        self._last, self._freed_by_then = now, table.freed_bytes
        table.read(now.allocated_bytes, new_storages, fresh=fresh, tick=tick)
        return max(0, now.cumulative_bytes - before.cumulative_bytes - made_bytes - unknown_bytes)
