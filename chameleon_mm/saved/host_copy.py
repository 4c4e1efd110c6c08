"""The copy of a saved storage on the host, from the moment its copy out is queued: its block, and the moves out and back."""

from __future__ import annotations

from chameleon_mm.device import Event, Stream
from chameleon_mm.pinned import PinnedBlock
from chameleon_mm.transfer import Move


class HostCopy:
    """A block of host memory with a saved storage's bytes, or all but those that stay on the device."""

    # No `__init__`: one is made for every storage that moves.
    block: PinnedBlock | None
    """None: the last handle is gone before the copy out is over."""
    out: Move
    back: Move | None = None
    """The latest copy back."""
    read: Event | None = None
    """Event after the latest copy back that was handed over: until then the block is being read."""
    arrived_on: Stream | None = None
    """Stream that was ordered after the latest copy back."""

    def release(self) -> None:
        """Give the block back. Note [Host block]: its next owner's copy out waits for our last copy, on its stream. A copy back
        comes after the copy out, so its event covers both."""
        if self.block is None:
            return
        self.block.release(after=self.out.done if self.read is None else self.read)
        self.block = None
