"""Observer of a simulated device: it is told of the work in the order of issue, and may refuse it or move its bytes later.

    device.attach_observer(observer)      # before the device's first work
    launch(stream); access(...) / move(...)               # work on a stream
    mark = passed(streams); stream_waits(stream, mark)    # an event: recorded, waited for

`SimObserver` itself accuses nobody. The tests' observer, which detects races, is no part of the library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from chameleon_mm.device.sim.machine import Machine
    from chameleon_mm.device.sim.sim_memory import Buffer
    from chameleon_mm.device.sim.sim_stream import SimStream


class SimObserver:
    """Observer that finds nothing, and moves the bytes of a copy when it is issued.

    Methods run under the device's lock, `released` alone in any line of any thread. What they raise, the observed call raises.
    """

    machine: Machine
    """The device's machine, from `attach_observer` on."""

    def seen(self, buffer: Buffer) -> None:
        """A storage is seen for the first time."""

    def launch(self, stream: SimStream) -> None:
        """Work follows on `stream`, after all that the host has done and seen complete."""

    def access(self, stream: SimStream, buffer: Buffer, t: Tensor, *, write: bool, label: str) -> None:
        """An operator or a kernel on `stream` reads or writes `t`, which lies in `buffer`."""

    def host_access(self, buffer: Buffer, t: Tensor, *, write: bool, label: str) -> None:
        """The host reads or writes `t`, which lies in `buffer`, pinned memory."""

    def check_move(self, what: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """The pairs `(dst, src)` are to be moved by one call `what`: "copy", "pack" or "unpack"."""

    def move(self, stream: SimStream, what: str, pairs: Sequence[tuple[Tensor, Tensor]], *, speculative: bool) -> None:
        """Move the bytes of the pairs `(dst, src)`, in any order, by the time that the next work after them begins."""
        if self.machine.moves_bytes:
            for dst, src in pairs:
                ctypes.memmove(dst.data_ptr(), src.data_ptr(), src.numel())

    def passed(self, streams: Sequence[SimStream]) -> object:
        """Return a mark of all work so far on `streams`, and of what the host has seen complete."""

    def stream_waits(self, stream: SimStream, mark: object) -> None:
        """`stream` is ordered after `mark`, which `passed` returned."""

    def host_waits(self, mark: object) -> None:
        """The host has seen the work before `mark` complete."""

    def allocated(self, stream: SimStream, storage: torch.UntypedStorage) -> None:
        """`stream` was handed memory with nothing in it yet: a block that it may still work on."""

    def freed(self, stream: SimStream, tensor: Tensor) -> None:
        """`stream` hands back its memory if the caller alone holds it."""

    def emptied(self, stream: SimStream, storage: torch.UntypedStorage) -> None:
        """`stream` hands back the memory of `storage`, which stays."""

    def host_freed(self, buffer: Buffer) -> None:
        """The host is about to free pinned memory."""

    def released(self, buffer: Buffer) -> None:
        """The memory of a storage that died, or was resized by others, goes back to the stream that it belongs to."""

    def settled(self) -> None:
        """All memory released so far is accounted for."""
