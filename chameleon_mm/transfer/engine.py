"""Moves of both directions of one device's link, for any thread.

move = transfer.swap_out(host, hbm, after)      # queued behind earlier ones
transfer.hand_over()                            # at every hook: hand over as much as may be outstanding
done = transfer.issue_out(move)                 # needed now: all of it, ahead of what is queued
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from chameleon_mm.device import Device, Event
from chameleon_mm.transfer.copy_queue import OUTSTANDING, PIECE_BYTES, CopyQueue, Move
from chameleon_mm.transfer.route import Thresholds


class Transfer:
    """The two copy queues of one device. Thread-safe: forward and backward may run on different threads.

    Waiting moves of less than `batch_below_bytes` share one call.
    """

    def __init__(
        self,
        device: Device,
        *,
        piece_bytes: int = PIECE_BYTES,
        outstanding: int = OUTSTANDING,
        batch_below_bytes: int = Thresholds().batch_below_bytes,
    ) -> None:
        if piece_bytes < 1 or outstanding < 1:
            raise ValueError(f"expected piece_bytes and outstanding of 1 or more, got {piece_bytes} and {outstanding}")
        self._lock = threading.Lock()  # not re-entrant: a finalizer that interrupts its owner leaves the work to the owner
        queue = partial(
            CopyQueue,
            piece_bytes=piece_bytes,
            outstanding=outstanding,
            batch_below_bytes=batch_below_bytes,
            synchronize=device.synchronize,
        )
        self._out = queue(device.new_stream("d2h"), speculative=True)
        self._in = queue(device.new_stream("h2d"), speculative=False)

    # A copy out is speculative: the model may write a saved tensor while it runs. Its version counter then says so, and
    # whoever uses it gets eager's error instead of the bytes.

    def swap_out(self, host: Tensor, hbm: Tensor, after: Sequence[Event], *, timed: bool = False) -> Move:
        """Queue a copy from device to host. The caller keeps `hbm` until the move's `done` is waited on or complete."""
        return self._submit(self._out, Move(host, hbm, after, timed))

    def swap_in(self, hbm: Tensor, host: Tensor, after: Sequence[Event], *, timed: bool = False) -> Move:
        """Queue a copy from host to device, behind earlier ones; `issue_in` brings it forward."""
        return self._submit(self._in, Move(hbm, host, after, timed))

    def issue_out(self, move: Move) -> Event:
        """Hand all of a swap-out over now and return the event after it."""
        with self._lock:
            return self._out.issue(move)

    def issue_out_in_order(self, move: Move) -> Event:
        """Hand all of a swap-out over now, behind all that was queued before it, and return the event after it."""
        with self._lock:
            return self._out.issue_in_order(move)

    def issue_in(self, move: Move) -> Event:
        """Hand all of a swap-in over now, ahead of queued ones, and return the event after it."""
        with self._lock:
            return self._in.issue(move)

    def cancel_out(self, move: Move) -> bool:
        """Cancel a swap-out if none of it was handed over. Returns whether it was cancelled."""
        with self._lock:
            return self._out.cancel(move)

    def truncate_out(self, move: Move) -> int:
        """End a swap-out that nobody needs any more after the pieces already handed over. Returns the bytes never sent."""
        with self._lock:
            return self._out.truncate(move)

    def cancel_in(self, move: Move) -> bool:
        """Cancel a swap-in if none of it was handed over. Returns whether it was cancelled."""
        with self._lock:
            return self._in.cancel(move)

    def synchronize(self) -> None:
        """Make the host wait for the device, as far as it still answers: what follows a failure needs no event then."""
        self._out.synchronize()

    def out_is_idle(self) -> bool:
        """Whether all swap-outs that were submitted are complete: one more would start at once."""
        with self._lock:
            return self._out.is_idle()

    def hand_over(self) -> None:
        """Hand over what the outstanding limit allows now, both ways."""
        with self._lock:
            self._out.hand_over()
            self._in.hand_over()

    def _submit(self, queue: CopyQueue, move: Move) -> Move:
        with self._lock:
            queue.submit(move)
        return move
