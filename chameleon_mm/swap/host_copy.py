"""States of a saved storage, and its copy on the host from the moment its copy out is queued.

copy = HostCopy.begin(block, source, saves, after, context, at_once=False)      # queues the copy out
copy.hand_over(); copy.is_complete; copy.cancel_out(); copy.undo(nbytes)        # or it was refused, and the storage stays
copy.begin_back(destination, compute); copy.arrive(compute, tensor); copy.settle_back(stream, nbytes)
copy.release()
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from chameleon_mm.device import Event, Stream
from chameleon_mm.errors import TransferFailed
from chameleon_mm.pool.block import PinnedBlock
from chameleon_mm.pool.pool import PinnedPool
from chameleon_mm.swap.calling_thread import ComputeStreams, annotation
from chameleon_mm.swap.checksums import Checksums
from chameleon_mm.swap.copy_queue import Move, Transfer
from chameleon_mm.swap.handles import SavedBytes
from chameleon_mm.swap.metrics import Metrics

if TYPE_CHECKING:
    from chameleon_mm.swap.saved_storage import SavedStorage

# --- States of a saved storage, which may follow which, and what all storages of one executor share


class State(enum.Enum):
    """State of a saved storage: where its bytes are."""

    ON_DEVICE = "on_device"
    """On the device alone. Begins when it is saved; ends when its copy out is queued."""
    SWAPPING_OUT = "swapping_out"
    """On the device, with a copy out queued or running. Ends when compute is ordered after that copy and the HBM is dropped."""
    ON_HOST = "on_host"
    """On the host, or nowhere: a recipe stands for it. Begins when its HBM is dropped; ends when a copy back is queued, it is
    unpacked from its group, wherever that is, or it is recomputed."""
    SWAPPING_IN = "swapping_in"
    """On the host, with a copy back queued or running. Ends at the first use, which orders compute after that copy."""
    RESTORED = "restored"
    """On both. Begins at the first use after a swap-in, or when the copy out is over and others still refer to the storage.
    Ends when its HBM is dropped: once nobody else has it, under pressure, or by a plan that brings it back for a later use."""
    RETIRED = "retired"
    """Nowhere: the last handle is gone, and nothing is held any more."""


NEXT = {
    State.ON_DEVICE: (State.SWAPPING_OUT, State.ON_HOST, State.RESTORED, State.RETIRED),
    State.SWAPPING_OUT: (State.ON_HOST, State.RESTORED, State.ON_DEVICE, State.RETIRED),
    State.ON_HOST: (State.SWAPPING_IN, State.RESTORED, State.RETIRED),
    State.SWAPPING_IN: (State.RESTORED, State.ON_HOST, State.RETIRED),
    State.RESTORED: (State.RESTORED, State.ON_HOST, State.ON_DEVICE, State.RETIRED),
    State.RETIRED: (),
}
"""States that may follow each. From ON_DEVICE to ON_HOST at once goes what was packed into a group, in stream order, and what
is dropped to be recomputed; from RESTORED to ON_DEVICE what was recomputed, as what it is made from is about to change, and
what is saved again with bytes that its copy lacks."""


@dataclass(frozen=True, slots=True)
class SwapContext:
    """Everything that a storage needs to be swapped: one set per executor."""

    pool: PinnedPool
    transfer: Transfer
    metrics: Metrics
    streams: ComputeStreams
    checksums: Checksums | None = None
    """Checksums of what goes out, compared with what comes back; None: not checked."""
    held: dict[SavedStorage, None] = field(default_factory=dict)
    """Storages whose bytes are elsewhere too, and whose memory goes once nobody else refers to them. Each hook tries."""


# --- host copy

_log = logging.getLogger(__name__)


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
    context: SwapContext

    @classmethod
    def begin(
        cls,
        block: PinnedBlock,
        source: Tensor,
        saves: Sequence[SavedBytes],
        after: list[Event],
        context: SwapContext,
        *,
        at_once: bool,
    ) -> HostCopy:
        """Queue the copy of `source` to `block`, behind `after`. Raises `TransferFailed`, the block released."""
        versions: list[tuple[Tensor, int]] = []
        for saved in saves:
            versions.append((saved.alias, saved.expected))  # noqa: PERF401 - a comprehension is one more call
        with annotation("chameleon::swap_out"):
            written, timed = (versions, context.streams.record_each), context.metrics.timed
            out = context.transfer.swap_out(block.buffer, source, after, timed=timed, written=written, at_once=at_once)
        if out.failed:
            block.release()
            raise TransferFailed(f"a saved tensor of {source.numel()} bytes could not be swapped out; it stays on the device")
        return cls.issued(block, out, context)

    @classmethod
    def issued(cls, block: PinnedBlock, out: Move, context: SwapContext) -> HostCopy:
        """A copy whose move out its caller has handed to the device."""
        copy = cls()
        copy.block, copy.out, copy.context = block, out, context
        context.metrics.moved(out, "out", out.nbytes)
        return copy

    # --- out

    @property
    def is_complete(self) -> bool:
        """Whether the host sees the copy out complete."""
        return self.out.done is not None and self.out.done.query()

    def hand_over(self, nbytes: int, *, in_plan_order: bool = False) -> Event | None:
        """Hand over what is still queued of the copy out of a storage of `nbytes`. Returns the event after it; None: it was
        refused. `in_plan_order`: copies cross the link in the order of the plan."""
        if self.out.done is not None and not self.out.failed:
            return self.out.done
        transfer = self.context.transfer
        try:
            return (transfer.issue_out_in_order if in_plan_order else transfer.issue_out)(self.out)
        except RuntimeError as error:  # the tensor stays: a use finds it on the device
            _log.warning("chameleon_mm: %d bytes stay on the device, their copy out was refused: %s", nbytes, str(error))
            return None

    def cancel_out(self) -> bool:
        """Cancel the copy out, if nothing of it was handed over. Returns whether there is none now."""
        return self.out.failed or self.context.transfer.cancel_out(self.out)

    def truncate_out(self) -> None:
        """Have what was not handed over of the copy out not be copied: nobody wants the bytes any more."""
        self.context.metrics.totals.bytes_swapped_out -= self.context.transfer.truncate_out(self.out)

    # --- back

    def begin_back(self, destination: Tensor, compute: Stream) -> Move | None:
        """Queue the copy back to `destination`, which lies in memory that `compute` has just given. Returns None if the device
        refuses it."""
        context = self.context
        assert self.block is not None
        assert self.out.done is not None, "device memory was reclaimed before its copy out was issued"
        # Note [Swap-in]: an earlier owner of the device memory may still be running on compute; and the copy out must be
        # complete before the host copy is read.
        after = [compute.record(), self.out.done]
        with annotation("chameleon::swap_in"):
            back = context.transfer.swap_in(destination, self.block.buffer, after, timed=context.metrics.timed)
        return None if back.failed else back

    @property
    def back_failed(self) -> bool:
        """Whether the copy back was refused after it was queued."""
        return self.back is not None and self.back.failed

    def arrive(self, compute: Stream, tensor: int | None, *, prefetched: bool) -> None:
        """Order `compute` after the copy back, for a use of that tensor of a plan. `prefetched`: it began before this use."""
        assert self.back is not None
        metrics = self.context.metrics
        arrived = self.read = self.context.transfer.issue_in(self.back)
        if self.arrived_on is compute:
            return
        if not arrived.query():
            with annotation("chameleon::wait"):  # Note [Swap-in]: use after the bytes are there
                metrics.wait(compute, arrived, "in", tensor, prefetched=prefetched)
        elif prefetched:
            metrics.on_time()
        self.arrived_on = compute

    def settle_back(self, owner: Stream, nbytes: int) -> None:
        """Cancel the copy back of `nbytes`, or order `owner`, of whose memory it writes, after it."""
        assert self.back is not None
        context = self.context
        if self.back.failed:
            self.back = None
            return
        if context.transfer.cancel_in(self.back):
            context.metrics.totals.bytes_swapped_in -= nbytes
            self.back = None
            return
        arrived = self.read = context.transfer.issue_in(self.back)
        if not arrived.query():
            context.metrics.wait(owner, arrived, "in")  # Note [Reclaim]: it must be done before the memory is reused

    # --- the end

    def release(self) -> None:
        """Give the block back. Note [Host block]: its next owner's copy out waits for our last copy, on its stream. A copy back
        comes after the copy out, so its event covers both."""
        if self.block is None:
            return
        self.block.release(after=self.out.done if self.read is None else self.read)
        self.block = None
