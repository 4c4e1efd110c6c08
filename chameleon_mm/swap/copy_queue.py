"""Copy queues of a device's link, one per direction: moves wait here, and few copies are outstanding in the device's own queue.

    move = queue.submit(Move(storage, host, [ready, *block.pending_events]))    # queued; at most two pieces are handed over
    queue.submit(move, at_once=True)                            # all of it, behind queued moves: a plan's copies
    queue.hand_over()                                           # at every hook: hand over more as they finish
    done = queue.issue(move)                                    # needed now: all of it, ahead of queued moves

A copy engine is one FIFO per direction without priorities: a later copy cannot overtake one that was handed over. Published:
51 KB waited 12 ms until 200 MB had crossed (docs/transfer.md). So moves are cut into pieces, and at most `outstanding` of them
are in the engine's queue. More are handed over if compute or the host is about to wait for them: holding them back would
prolong the wait. A plan has the time of each of its copies, so that nothing has to overtake them: they are handed over at once.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from chameleon_mm.device import Device, Event
from chameleon_mm.errors import TransferFailed
from chameleon_mm.plan.timing import PIECE_BYTES
from chameleon_mm.swap.handles import SavedBytes
from chameleon_mm.units import KIB, MIB

# --- Size from which a buffer crosses alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Size in bytes from which a buffer is copied alone, and the memory that packing may take.

    Raises `ValueError` if the size is negative, or if staging has no room for two packed tensors.
    """

    pack_below_bytes: int = 128 * KIB
    """Size at which a copy takes as long on the link as its call on the host: 2.4 us at the 55 GB/s published for an H200,
    against 2.3-7 us for cudaMemcpyAsync."""

    staging_bytes: int = 64 * MIB
    """Device memory for packed groups on their way out and back together: sixteen groups of 4 MiB. If it is used up, compute is
    ordered after the oldest group's copy. That group's memory is freed before another group is made."""

    def __post_init__(self) -> None:
        if self.pack_below_bytes < 0:
            raise ValueError(f"pack_below_bytes: expected 0 bytes or more, got {self.pack_below_bytes}")
        if self.staging_bytes < 2 * self.pack_below_bytes:
            raise ValueError(
                f"staging_bytes: expected room for two tensors of pack_below_bytes ({self.pack_below_bytes} each), got "
                f"{self.staging_bytes}; raise it, or lower pack_below_bytes"
            )

    @classmethod
    def direct(cls) -> Thresholds:
        """Thresholds with which every buffer moves alone, at any size."""
        return cls(pack_below_bytes=0)

    def packs(self, nbytes: int) -> bool:
        """True if a buffer of `nbytes` is packed with others: one kernel packs them, one copy moves them."""
        return nbytes < self.pack_below_bytes


# --- copy queue

_log = logging.getLogger(__name__)

OUTSTANDING = 2
"""Pieces in the engine's queue: one that runs, and one that follows it without a gap."""


class Piece(NamedTuple):
    """Part of a timed move, or all of it, handed over: between its two events lies its copy and nothing else."""

    start: Event
    end: Event
    nbytes: int


WrittenSince = tuple[Sequence[SavedBytes], Callable[[], Sequence[Event]]]
"""Pair for a copy's source: what was saved of it; and a function that returns events after all writes so far, called if one of
their counters has moved."""


class Move:
    """A copy across the link, between a storage in device memory, from byte `start` on, and the host buffer `host`, flat and
    uint8. The queue has the direction. Raises `ValueError` if the storage has fewer bytes than that."""

    __slots__ = (
        "after", "cancelled", "done", "failed", "host", "nbytes", "next_byte", "pieces", "start", "storage", "timed", "written"
    )  # fmt: skip

    def __init__(
        self,
        storage: torch.UntypedStorage,
        host: Tensor,
        after: Sequence[Event],
        *,
        start: int = 0,
        timed: bool = False,
        written: WrittenSince | None = None,
    ) -> None:
        """`written`: orders a piece after later writes to the source."""
        self.nbytes = host.numel()
        if storage.nbytes() < start + self.nbytes:
            raise ValueError(
                f"expected a storage of {start + self.nbytes} bytes or more, for a host buffer of {self.nbytes} from byte "
                f"{start} on, got {storage.nbytes()}; slice the buffer"
            )
        self.storage: torch.UntypedStorage | None = storage
        self.host: Tensor | None = host
        self.start = start
        self.after = after
        self.written = written
        self.next_byte = 0
        self.timed = timed
        self.pieces: deque[Piece] = deque()
        """Pieces of a timed move that were handed over, until the metrics take them."""
        self.done: Event | None = None
        """Event after the last piece, set once no piece is left. The caller keeps both buffers until it is complete."""
        self.cancelled = False
        self.failed = False
        """True if the device refused it. Pieces handed over before are complete, and no more will come."""

    @classmethod
    def known(cls, nbytes: int, done: Event) -> Move:
        """Move of `nbytes` that a planned step's loop has handed to the device, and that ends at `done`."""
        move = cls.__new__(cls)
        move.storage = move.host = move.written = None
        move.nbytes = move.next_byte = nbytes
        move.start, move.after, move.timed, move.cancelled, move.failed = 0, (), False, False, False
        move.pieces, move.done = deque(), done
        return move

    @property
    def begun(self) -> bool:
        """True if any piece was handed to the device: from then on source and destination must be kept."""
        return self.next_byte > 0 or self.done is not None

    @property
    def ended(self) -> bool:
        """True if no more pieces of it will be handed over."""
        return self.done is not None or self.cancelled or self.failed


Warn = Callable[..., None]
"""Called with a logger, a message, and its values: `Metrics.warn`, or what logs each one."""
LOG_EACH: Warn = logging.Logger.warning


class CopyQueue:
    """Moves of one direction, on a stream of its own. Not thread-safe: the executor holds its lock."""

    def __init__(
        self,
        device: Device,
        name: str,
        *,
        out: bool,
        piece_bytes: int = PIECE_BYTES,
        outstanding: int = OUTSTANDING,
        warn: Warn = LOG_EACH,
    ) -> None:
        """`name`: of its stream. `out`: to the host. Such a copy is speculative: the model may write to a saved tensor while it
        runs. The tensor's version counter then shows the write, and a use raises eager's error instead of returning the
        bytes."""
        if piece_bytes < 1 or outstanding < 1:
            raise ValueError(f"expected piece_bytes and outstanding of 1 or more, got {piece_bytes} and {outstanding}")
        self.stream, self._warn = device.new_stream(name), warn
        self._device_synchronize = device.synchronize
        self._is_out = out
        self._piece_bytes = piece_bytes
        self._limit = outstanding
        self.queued: deque[Move] = deque()
        """Moves that wait to be handed over. Others only read it."""
        self._running = deque[Event](maxlen=outstanding)
        """Events after the latest pieces, as many as may run: pieces complete in order, so no earlier one matters."""

    def submit(self, move: Move, *, at_once: bool = False) -> Move:
        """Queue a move, and hand over pieces within the limit. `at_once`: hand over all of it and all moves before it. Returns
        the move."""
        self.queued.append(move)
        try:
            if not at_once:
                self.hand_over()
            while at_once and self.queued:
                self._hand_over_front()
        except BaseException:
            self._fail(move)  # the caller never gets the move, and reuses both buffers
            raise
        return move

    def hand_over(self) -> None:
        """Hand over pieces until the limit of outstanding pieces is reached."""
        running = self._running
        while self.queued:
            while running and running[0].query():  # inlines `_forget_complete`, which saves a call
                running.popleft()
            if len(running) >= self._limit:
                return
            self._hand_over_front()

    def hand_over_all(self) -> None:
        """Hand over all queued moves."""
        while self.queued:
            self._hand_over_front()

    def is_idle(self) -> bool:
        """True if all submitted moves are complete."""
        self._forget_complete()
        return not self._running and not self.queued

    def issue(self, move: Move) -> Event:
        """Hand over all of a move, ahead of queued moves. Returns the event after it. Raises `TransferFailed`."""
        if move.failed:
            raise TransferFailed(f"a copy on {self.stream.name} was refused by the device earlier; see the log")
        while move.done is None:
            self._hand_over_piece(move)
        return move.done

    def cancel(self, move: Move) -> bool:
        """Cancel a move if none of it was handed over. Returns True if it was cancelled."""
        if move.begun or move.cancelled or move.failed:
            return False
        move.cancelled = True
        self._dequeue(move)
        return True

    def truncate(self, move: Move) -> int:
        """End a move after the pieces that were handed over. Returns the bytes that were not handed over."""
        if move.done is not None or move.failed:
            return 0
        unsent = move.nbytes - move.next_byte
        try:
            move.done = self.stream.record()  # orders the reuse of both buffers after the pieces that were handed over
        except BaseException:
            self._fail(move)
            raise
        self._dequeue(move)
        return unsent

    def _forget_complete(self) -> None:
        while self._running and self._running[0].query():
            self._running.popleft()

    def _hand_over_front(self) -> None:
        """Hand over a piece of the oldest move. A refused copy is logged, and its owner sees `failed`."""
        try:
            self._hand_over_piece(self.queued[0])
        except RuntimeError as error:  # the move's owner finds it failed, and the tensor stays
            # Only the text: a log record with the error would keep its frames, and the buffers that they hold.
            self._warn(_log, "chameleon_mm: a copy on %s was refused: %s", self.stream.name, str(error))

    def _hand_over_piece(self, move: Move) -> None:
        """Enqueue the next piece. The move leaves the queue after its last piece, or if a piece is refused."""
        stream = self.stream
        try:
            storage, host = move.storage, move.host
            assert storage is not None and host is not None, "a finished move was handed over again"
            if move.next_byte == 0:
                for event in move.after:
                    stream.wait(event)  # orders the copy after its source was written and its destination's last use
                move.after = ()
            if move.written is not None:
                for saved in move.written[0]:
                    if saved.alias._version != saved.expected:
                        for event in move.written[1]():
                            stream.wait(event)  # orders this piece after the writes since the save
                        break
            begin, end = move.next_byte, min(move.next_byte + self._piece_bytes, move.nbytes)
            # Pieces are timed, not the move: between two pieces the stream may idle, or carry another move that was needed
            # first.
            start = stream.record(timed=True) if move.timed else None
            part = None if end - begin == move.nbytes else slice(begin, end)
            stream.copy_storage(storage, host, start=move.start + begin, part=part, out=self._is_out)
            move.next_byte = end
            done = stream.record(timed=move.timed)  # orders the reuse of both buffers after this piece
        except BaseException:
            self._fail(move)
            raise
        self._running.append(done)
        if start is not None:
            move.pieces.append(Piece(start, done, end - begin))
        if end == move.nbytes:
            move.done = done
            if self.queued and self.queued[0] is move:  # the usual case; inlines `_dequeue`, which saves a call
                move.storage = move.host = move.written = None
                self.queued.popleft()
            else:
                self._dequeue(move)

    def _fail(self, move: Move) -> None:
        # Some of it may still run, with no event after it: the host waits, so that both buffers may be dropped.
        move.failed = True
        self._dequeue(move)
        self.synchronize()

    def synchronize(self) -> None:
        """Make the host wait for all of the device's work, if the device still answers. Buffers may then be reused without an
        event."""
        try:
            self._device_synchronize()
        except RuntimeError as error:  # a device that cannot be synchronised runs nothing any more
            self._warn(_log, "chameleon_mm: the device could not be synchronised after a failure: %s", str(error))

    def _dequeue(self, move: Move) -> None:
        """Take a move out of the queue and release its buffers here: the move's owner keeps them until `done`."""
        move.storage, move.host, move.after, move.written = None, None, (), None
        if move in self.queued:
            self.queued.remove(move)
