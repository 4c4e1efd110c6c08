"""States of a saved storage, and its copy on the host.

copy = HostCopy.begin(block, source, start, saves, after, context, at_once=False)   # queues the copy out
copy.issue_out(nbytes); copy.is_complete
copy.begin_back(destination, start, compute, at_once=False)                         # queues the copy back
copy.arrive(compute); copy.settle_back(stream, nbytes); copy.release()
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chameleon_mm.device import Event, Stream
from chameleon_mm.errors import TransferFailed
from chameleon_mm.pool.arena import ArenaPart
from chameleon_mm.pool.block import PinnedBlock
from chameleon_mm.pool.pool import PinnedPool
from chameleon_mm.swap.calling_thread import ComputeStreams, annotation
from chameleon_mm.swap.copy_queue import CopyQueue, Move
from chameleon_mm.swap.handles import SavedBytes
from chameleon_mm.swap.metrics import Metrics

if TYPE_CHECKING:
    from chameleon_mm.swap.saved_storage import SavedStorage

# --- States of a saved storage, their transitions, and objects shared by all storages of one executor


class State(enum.Enum):
    """State of a saved storage: where its bytes are."""

    ON_DEVICE = "on_device"
    """On the device only. Begins at the save. Ends when a copy out is queued, or when the storage is packed or dropped."""
    SWAPPING_OUT = "swapping_out"
    """On the device, with a copy out queued or running. Ends once compute waits for that copy and the memory is freed."""
    ON_HOST = "on_host"
    """On the host, in a packed group, or nowhere if a recipe recomputes it. Begins when its device memory is freed. Ends when a
    copy back is queued, or the storage is unpacked from its group or recomputed."""
    SWAPPING_IN = "swapping_in"
    """On the host, with a copy back queued or running. Ends at the first use, which makes compute wait for that copy."""
    RESTORED = "restored"
    """On host and device. Begins at the first use after a swap-in, or after the copy out if others still refer to the storage.
    Ends when its device memory is freed: once only we refer to it, under pressure, or by a plan."""
    RETIRED = "retired"
    """Released: the last handle and all memory are gone."""


NEXT = {
    State.ON_DEVICE: (State.SWAPPING_OUT, State.ON_HOST, State.RESTORED, State.RETIRED),
    State.SWAPPING_OUT: (State.ON_HOST, State.RESTORED, State.ON_DEVICE, State.RETIRED),
    State.ON_HOST: (State.SWAPPING_IN, State.RESTORED, State.RETIRED),
    State.SWAPPING_IN: (State.RESTORED, State.ON_HOST, State.RETIRED),
    State.RESTORED: (State.RESTORED, State.ON_HOST, State.ON_DEVICE, State.RETIRED),
    State.RETIRED: (),
}
"""States that may follow each state. A storage changes from ON_DEVICE to ON_HOST at once, in stream order, if it is packed into
a group or dropped for recomputation. It changes from RESTORED to ON_DEVICE in two cases: its recipe's source is about to
change, or a new save has bytes that the copy lacks."""


@dataclass(frozen=True, slots=True)
class SwapContext:
    """Objects that are needed to swap a storage: one set per executor."""

    pool: PinnedPool
    out_queue: CopyQueue
    back_queue: CopyQueue
    metrics: Metrics
    streams: ComputeStreams
    held: dict[SavedStorage, None] = field(default_factory=dict)
    """Storages whose bytes also exist elsewhere. Each hook frees the memory of those that only we refer to."""


# --- host copy

_log = logging.getLogger(__name__)


class HostCopy:
    """Host block with the bytes of a saved storage, except those that stay on the device."""

    # No `__init__`: it would cost one more call for every storage that moves.
    block: PinnedBlock | ArenaPart | None
    """Host block; None once it is released, which may happen before the copy out ends."""
    buffer: Tensor | None
    """Tensor over the block; None if `block` is None. Made once, because making it takes as long as issuing a copy."""
    out: Move
    back: Move | None = None
    """Latest copy back."""
    read: Event | None = None
    """Event after the latest copy back handed to the device. The copy reads the block until then."""
    arrived_on: Stream | None = None
    """Stream that waits for the latest copy back; None: no stream does."""
    context: SwapContext

    @classmethod
    def begin(
        cls,
        block: PinnedBlock,
        source: torch.UntypedStorage,
        start: int,
        saves: Sequence[SavedBytes],
        after: list[Event],
        context: SwapContext,
        *,
        at_once: bool,
    ) -> HostCopy:
        """Queue the copy of `source`, from byte `start` on, to `block`, after the events `after`. Releases the block and raises
        `TransferFailed` if the device refuses."""
        buffer = block.buffer
        with annotation("chameleon::swap_out"):
            written, timed = (saves, context.streams.record_each), context.metrics.timed
            move = Move(source, buffer, after, start=start, timed=timed, written=written)
            out = context.out_queue.submit(move, at_once=at_once)
        if out.failed:
            block.release()
            raise TransferFailed(f"a saved tensor of {out.nbytes} bytes could not be swapped out; it stays on the device")
        copy = cls()
        copy.block, copy.buffer, copy.out, copy.context = block, buffer, out, context
        context.metrics.moved(out, "out", out.nbytes)
        return copy

    @classmethod
    def known(
        cls, block: ArenaPart, out: Event, back: Event | None, arrived_on: Stream | None, context: SwapContext
    ) -> HostCopy:
        """Make the record of copies that the loop has handed to the device. `out`, `back`: events after the copy out and the
        copy back. None: no copy back, or no stream waited for it. The bytes are counted elsewhere."""
        copy = cls()
        copy.block, copy.buffer, copy.context, copy.read, copy.arrived_on = block, block.buffer, context, back, arrived_on
        copy.out = Move.known(block.nbytes, out)
        copy.back = None if back is None else Move.known(block.nbytes, back)
        return copy

    # --- out

    @property
    def is_complete(self) -> bool:
        """True if the host sees that the copy out is complete."""
        return self.out.done is not None and self.out.done.query()

    def issue_out(self, nbytes: int) -> Event | None:
        """Hand the rest of the copy out of a storage of `nbytes` to the device. Returns the event after it; None: refused."""
        try:
            return self.context.out_queue.issue(self.out)
        except RuntimeError as error:  # the tensor stays on the device
            refused = "chameleon_mm: %d bytes stay on the device, their copy out was refused: %s"
            self.context.metrics.warn(_log, refused, nbytes, str(error))
            return None

    # --- back

    def begin_back(self, destination: torch.UntypedStorage, start: int, compute: Stream, *, at_once: bool) -> bool:
        """Queue the copy back to `destination`, from byte `start` on. Its memory was just allocated on `compute`. Returns False
        if the device refuses."""
        context = self.context
        assert self.buffer is not None
        assert self.out.done is not None, "device memory was reclaimed before its copy out was issued"
        # Note [Swap-in]: compute may still use the device memory for its earlier owner. The copy out must end before the host
        # copy is read.
        after = [compute.record(), self.out.done]
        with annotation("chameleon::swap_in"):
            move = Move(destination, self.buffer, after, start=start, timed=context.metrics.timed)
            back = context.back_queue.submit(move, at_once=at_once)
        if back.failed:
            return False
        self.back, self.arrived_on = back, None
        context.metrics.moved(back, "in", back.nbytes)
        return True

    def arrive(self, compute: Stream) -> None:
        """Order `compute` after the copy back, for a use."""
        assert self.back is not None
        arrived = self.read = self.context.back_queue.issue(self.back)
        if self.arrived_on is compute:
            return
        if not arrived.query():
            with annotation("chameleon::wait"):  # Note [Swap-in]: the use must come after the copy back
                self.context.metrics.wait(compute, arrived, "in")
        self.arrived_on = compute

    def settle_back(self, owner: Stream, nbytes: int) -> None:
        """Cancel the copy back of `nbytes`, else order `owner`, the stream that owns the destination, after it."""
        assert self.back is not None
        context = self.context
        if self.back.failed:
            self.back = None
            return
        if context.back_queue.cancel(self.back):
            context.metrics.totals.bytes_swapped_in -= nbytes
            self.back = None
            return
        arrived = self.read = context.back_queue.issue(self.back)
        if not arrived.query():
            context.metrics.wait(owner, arrived, "in")  # Note [Reclaim]: the copy must end before the memory is reused

    # --- release

    def release(self) -> None:
        """Release the block. Note [Host block]: the copy out of its next owner waits for our last copy, on its stream. A copy
        back follows the copy out, so the event after it covers both."""
        if self.block is None:
            return
        self.block.release(after=self.out.done if self.read is None else self.read)
        self.block = self.buffer = None
