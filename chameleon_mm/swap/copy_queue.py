"""Copy queues of a device's link, one per direction. Moves wait here, so that few copies wait in the device's own queue.

    move = queue.submit(Move(storage, host, [ready, *block.pending_events]))    # queued; at most two pieces are handed over
    queue.submit(move, at_once=True)                            # hand over all of it, after queued moves: a plan's copies
    queue.hand_over()                                           # at every hook: hand over more pieces as others finish
    done = queue.issue(move)                                    # needed now: hand over all of it, before queued moves

A copy engine is one FIFO per direction without priorities: a later copy cannot overtake an earlier one. In a published
measurement, 51 KB waited 12 ms until 200 MB had crossed (docs/transfer.md). So moves are cut into pieces, and at most
`outstanding` pieces are in the engine's queue. If compute or the host is about to wait for a move, all its pieces are handed
over. A plan's copies are handed over at once: the plan has scheduled them, so that none needs to overtake.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from chameleon_mm.device import Device, Event
from chameleon_mm.errors import TransferFailed
from chameleon_mm.plan.timing import PIECE_BYTES
from chameleon_mm.swap.handles import SavedBytes

_log = logging.getLogger(__name__)

OUTSTANDING = 2
"""Maximum number of pieces in the engine's queue: one that runs, and one that follows without a gap."""


class Piece(NamedTuple):
    """Piece of a timed move that was handed to the device: only its copy runs between its two events."""

    start: Event
    end: Event
    nbytes: int


WrittenSince = tuple[Sequence[SavedBytes], Callable[[], Sequence[Event]]]
"""Pair for a copy's source: the saves that it includes, and a function that returns events after all writes so far. The
function is called if a save was written to."""


class Move:
    """Copy across the link, between a storage in device memory, from byte `start` on, and `host`, a flat uint8 host buffer. The
    queue determines the direction. Raises `ValueError` if the storage has too few bytes."""

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
        """`written`: finds writes to the source after its save; pieces are ordered after them."""
        self.nbytes = host.numel()
        if storage.nbytes() < start + self.nbytes:
            raise ValueError(
                f"expected a storage of {start + self.nbytes} bytes or more, for a host buffer of {self.nbytes} from byte "
                f"{start} on, got {storage.nbytes()}; slice the buffer"
            )
        self.storage: torch.UntypedStorage | None = storage
        self.host: Tensor | None = host
        self.start, self.after, self.written, self.timed = start, after, written, timed
        self.next_byte = 0
        self.pieces: deque[Piece] = deque()
        """Pieces of a timed move that were handed to the device and that the metrics have not read yet."""
        self.done: Event | None = None
        """Event after the last piece; None until that is handed over. The caller keeps both buffers until it is complete."""
        self.cancelled = False
        self.failed = False
        """True if the device refused the move. Its earlier pieces are complete, and no more will come."""

    @classmethod
    def known(cls, nbytes: int, done: Event) -> Move:
        """Make the record of a move of `nbytes` that a planned step's loop has handed to the device. `done`: event after it."""
        move = cls.__new__(cls)
        move.storage = move.host = move.written = None
        move.nbytes = move.next_byte = nbytes
        move.start, move.after, move.timed, move.cancelled, move.failed = 0, (), False, False, False
        move.pieces, move.done = deque(), done
        return move

    @property
    def begun(self) -> bool:
        """True if a piece was handed to the device. From then on source and destination must be kept."""
        return self.next_byte > 0 or self.done is not None

    @property
    def ended(self) -> bool:
        """True if no more pieces of the move will be handed over."""
        return self.done is not None or self.cancelled or self.failed


Warn = Callable[..., None]
"""Function of a logger, a message, and its values: `Metrics.warn`, or a function that logs every warning."""
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
        """`name`: name of the stream. `out`: copy to the host. Such a copy is speculative: the model may write to a saved
        tensor during the copy. The tensor's version counter then shows the write, and a use raises eager's error."""
        if piece_bytes < 1 or outstanding < 1:
            raise ValueError(f"expected piece_bytes and outstanding of 1 or more, got {piece_bytes} and {outstanding}")
        self.stream, self._warn = device.new_stream(name), warn
        self._device_synchronize, self._is_out = device.synchronize, out
        self._piece_bytes, self._limit = piece_bytes, outstanding
        self.queued: deque[Move] = deque()
        """Moves that wait to be handed over. Other classes only read this."""
        self._running = deque[Event](maxlen=outstanding)
        """Events after the latest pieces, one per piece that may run. Pieces complete in order: earlier events do not
        matter."""

    def submit(self, move: Move, *, at_once: bool = False) -> Move:
        """Queue a move, and hand over pieces within the limit. `at_once`: hand over the whole move and all moves before it.
        Returns the move."""
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
            while running and running[0].query():
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
        while self._running and self._running[0].query():
            self._running.popleft()
        return not self._running and not self.queued

    def issue(self, move: Move) -> Event:
        """Hand over the whole move, before queued moves. Returns the event after it. Raises `TransferFailed`."""
        if move.failed:
            raise TransferFailed(f"a copy on {self.stream.name} was refused by the device earlier; see the log")
        while move.done is None:
            self._hand_over_piece(move)
        return move.done

    def cancel(self, move: Move) -> bool:
        """Cancel a move if no piece of it was handed over. Returns True if it was cancelled."""
        if move.begun or move.cancelled or move.failed:
            return False
        move.cancelled = True
        self._dequeue(move)
        return True

    def truncate(self, move: Move) -> int:
        """End a move after the pieces already handed over. Returns the number of bytes not handed over."""
        if move.done is not None or move.failed:
            return 0
        unsent = move.nbytes - move.next_byte
        try:
            move.done = self.stream.record()  # orders the reuse of both buffers after these pieces
        except BaseException:
            self._fail(move)
            raise
        self._dequeue(move)
        return unsent

    def _hand_over_front(self) -> None:
        """Hand over a piece of the oldest move. If the device refuses, log that and set the move's `failed`."""
        try:
            self._hand_over_piece(self.queued[0])
        except RuntimeError as error:  # the move has failed, and the tensor stays
            # Log only the text: a log record with the error would keep its frames and their buffers alive.
            self._warn(_log, "chameleon_mm: a copy on %s was refused: %s", self.stream.name, str(error))

    def _hand_over_piece(self, move: Move) -> None:
        """Enqueue the next piece. The move leaves the queue after its last piece, or if a piece is refused."""
        stream = self.stream
        try:
            storage, host = move.storage, move.host
            assert storage is not None and host is not None, "a finished move was handed over again"
            if move.next_byte == 0:
                for event in move.after:
                    stream.wait(event)  # orders the copy after the writes of its source and the last use of its destination
                move.after = ()
            if move.written is not None:
                for saved in move.written[0]:
                    if saved.alias._version != saved.expected:
                        for event in move.written[1]():
                            stream.wait(event)  # orders this piece after the writes since the save
                        break
            begin, end = move.next_byte, min(move.next_byte + self._piece_bytes, move.nbytes)
            # Pieces are timed, not the move: between two pieces the stream may idle, or run another move that was needed first.
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
        # A part may still run, with no event after it. The host waits, so that both buffers may be dropped.
        move.failed = True
        self._dequeue(move)
        self.synchronize()

    def synchronize(self) -> None:
        """Let the host wait for all work of the device, if the device still responds. Buffers may then be reused without an
        event."""
        try:
            self._device_synchronize()
        except RuntimeError as error:  # a device that cannot be synchronised runs nothing
            self._warn(_log, "chameleon_mm: the device could not be synchronised after a failure: %s", str(error))

    def _dequeue(self, move: Move) -> None:
        """Remove a move from the queue and release its buffers. The move's owner keeps them until `done`."""
        move.storage, move.host, move.after, move.written = None, None, (), None
        if move in self.queued:
            self.queued.remove(move)
