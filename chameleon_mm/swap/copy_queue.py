"""Copy queues of a device's link, one for each direction: moves wait here, and few copies are outstanding in the device's own.

    move = Move(dst, src, [ready, *block.pending_events], timed=False)
    queue.submit(move)                                                      # queued; at most two pieces are handed over
    queue.hand_over()                                                       # at every hook: hand over more as they finish
    done = queue.issue(move)                                                # needed now: all of it, before what is queued
    move = transfer.swap_out(host, hbm, after)                              # `Transfer`: both directions, for any thread

A copy engine is one FIFO per direction, blind to priority: what was handed to it cannot be overtaken (51 KB waited 12 ms
behind 200 MB, published: docs/transfer.md). So moves are cut into pieces, and at most `outstanding` of them are in the engine's
queue, unless somebody is about to wait for more: then holding back would only make them wait longer. Small moves that wait in a
row make one piece together: one call for all of them, and one event.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from chameleon_mm.device import Device, Event, Stream
from chameleon_mm.errors import TransferFailed
from chameleon_mm.units import KIB, MIB

# --- Chooses the way of a buffer across the link, by its size


class Path(enum.Enum):
    """Ways of a buffer across the link."""

    STAY = "stay"
    """The buffer stays: below `stay_below_bytes` moving costs more than the memory is worth."""
    PACK = "pack"
    """Packed with others of its kind: one kernel packs them, one copy moves them. Below `pack_below_bytes`."""
    DIRECT = "direct"
    """A copy of its own, in pieces. From `pack_below_bytes` on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Sizes at which one path ends and the next begins, in bytes, and how much memory packing may take.

    Raises `ValueError` for limits that are not in order, and for less staging than two packed tensors need.
    """

    stay_below_bytes: int = 4 * KIB
    """One page: less is not worth a launch's share, and hardly any memory. Not measured: nothing that is measured tells it."""

    pack_below_bytes: int = 128 * KIB
    """Size from which a copy takes the link about as long as it takes the host to ask for it: 2.4 us at the 55 GB/s published
    for an H200, against 2.3-7 us for cudaMemcpyAsync."""

    staging_bytes: int = 64 * MIB
    """Device memory that packed groups may take, on their way out and back together: sixteen groups of 4 MiB. Where it is used
    up, compute is ordered after the oldest group's copy, whose memory goes, before another is made."""

    def __post_init__(self) -> None:
        previous = 0
        for name in ("stay_below_bytes", "pack_below_bytes"):
            nbytes = getattr(self, name)
            if nbytes < previous:
                raise ValueError(f"{name}: expected {previous} bytes or more, as the paths follow each other, got {nbytes}")
            previous = nbytes
        if self.staging_bytes < 2 * self.pack_below_bytes:
            raise ValueError(
                f"staging_bytes: expected room for two tensors of pack_below_bytes ({self.pack_below_bytes} each), got "
                f"{self.staging_bytes}; raise it, or lower pack_below_bytes"
            )

    @classmethod
    def direct(cls) -> Thresholds:
        """Thresholds by which every buffer moves alone, whatever its size."""
        return cls(stay_below_bytes=0, pack_below_bytes=0)

    def path(self, nbytes: int) -> Path:
        """Path of a buffer of `nbytes`."""
        if nbytes < self.stay_below_bytes:
            return Path.STAY
        return Path.PACK if nbytes < self.pack_below_bytes else Path.DIRECT


# --- copy queue

_log = logging.getLogger(__name__)

PIECE_BYTES = 32 * MIB
"""Size of a piece. A copy of 17 MB reaches 99 % of the link's rate, by the model of docs/transfer.md; 32 MiB take 0.6 ms at
55 GB/s: the longest an urgent copy waits is two of them."""

OUTSTANDING = 2
"""Pieces in the engine's queue: one running, one to follow it without a gap."""


class Piece(NamedTuple):
    """A part of a timed move, or several small moves, handed over: between its two events lie its copies and nothing else."""

    start: Event
    end: Event
    nbytes: int


WrittenSince = tuple[Sequence[tuple[Tensor, int]], Callable[[], Sequence[Event]]]
"""Tensors with the version counters of a copy's source, each with its version when the copy was queued; and a function that
gives events after all writes so far, called where a counter has moved."""


class Move:
    """A copy of one buffer across the link. Raises `ValueError` for unequal sizes."""

    __slots__ = (
        "after", "cancelled", "done", "dst", "failed", "nbytes", "next_byte", "pieces", "src", "timed", "written"
    )  # fmt: skip

    def __init__(
        self, dst: Tensor, src: Tensor, after: Sequence[Event], timed: bool, written: WrittenSince | None = None
    ) -> None:
        if dst.numel() != src.numel():  # pieces are slices, and slices of unequal buffers can be of equal size
            raise ValueError(f"expected a destination of the source's {src.numel()} bytes, got {dst.numel()}; slice the larger")
        self.dst: Tensor | None = dst
        self.src: Tensor | None = src
        self.nbytes = src.numel()
        self.after = tuple(after)
        self.written = written
        self.next_byte = 0
        self.timed = timed
        self.pieces: deque[Piece] = deque()
        """Pieces of a timed move that were handed over, until the metrics take them."""
        self.done: Event | None = None
        """Event after the last piece, set once no more comes. Until it is complete the caller keeps source and destination."""
        self.cancelled = False
        self.failed = False
        """Whether the device refused it. What was handed over before is complete, and nothing more will come."""

    @classmethod
    def issued(cls, nbytes: int, done: Event, start: Event | None) -> Move:
        """A copy that its caller has handed to the device, whole; `start`: event before it, where it is timed."""
        move = cls.__new__(cls)
        move.dst = move.src = move.written = None
        move.nbytes = move.next_byte = nbytes
        move.after, move.done, move.timed, move.cancelled, move.failed = (), done, start is not None, False, False
        move.pieces = deque() if start is None else deque([Piece(start, done, nbytes)])
        return move

    @property
    def begun(self) -> bool:
        """Whether any piece was handed to the device: from then on source and destination must be kept."""
        return self.next_byte > 0 or self.done is not None

    @property
    def ended(self) -> bool:
        """Whether no piece of it will be handed over any more."""
        return self.done is not None or self.cancelled or self.failed


class CopyQueue:
    """The moves of one direction, on a stream of its own. Not thread-safe: `Transfer` holds the lock."""

    def __init__(
        self,
        stream: Stream,
        piece_bytes: int,
        outstanding: int,
        *,
        speculative: bool,
        synchronize: Callable[[], None],
    ) -> None:
        self.stream = stream
        self._synchronize = synchronize
        self._speculative = speculative
        self._piece_bytes = piece_bytes
        self._limit = outstanding
        self.queued: deque[Move] = deque()
        """Moves that wait to be handed over. Others only read it."""
        self._running: deque[Event] = deque()

    def submit(self, move: Move, *, at_once: bool = False) -> None:
        """Queue a move, and hand over what may be outstanding. `at_once`: all of it and of what waits before it."""
        self.queued.append(move)
        try:
            (self.hand_over_all if at_once else self.hand_over)()
        except BaseException:
            self._fail(move)  # the caller never learns of it, and gives both buffers to others
            raise

    def hand_over(self) -> None:
        """Hand over pieces until as many are outstanding as may be."""
        running = self._running
        while self.queued:
            while running and running[0].query():  # as `_forget_complete` does, without the call
                running.popleft()
            if len(running) >= self._limit:
                return
            self._hand_over_front()

    def hand_over_all(self) -> None:
        """Hand over everything that is queued."""
        while self.queued:
            self._hand_over_front()

    def is_idle(self) -> bool:
        """Whether everything that was submitted is complete."""
        self._forget_complete()
        return not self._running and not self.queued

    def issue_in_order(self, move: Move) -> Event:
        """Hand over all of a move, behind all that was queued before it. Returns the event after it."""
        while not move.ended and self.queued[0] is not move:
            self._hand_over_front()
        return self.issue(move)

    def issue(self, move: Move) -> Event:
        """Hand over all of a move, ahead of what is queued. Returns the event after it. Raises `TransferFailed`."""
        if move.failed:
            raise TransferFailed(f"a copy on {self.stream.name} was refused by the device earlier; see the log")
        while move.done is None:
            self._hand_over_piece(move)
        return move.done

    def cancel(self, move: Move) -> bool:
        """Cancel a move if none of it was handed over. Returns whether it was cancelled."""
        if move.begun or move.cancelled or move.failed:
            return False
        move.cancelled = True
        self._dequeue(move)
        return True

    def truncate(self, move: Move) -> int:
        """End a move after the pieces that were handed over. Returns the bytes that were not."""
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
        except RuntimeError as error:  # whoever owns the move finds it failed, and the tensor stays where it is
            # The text alone: a log record that kept the error would keep its frames, and the buffers that they hold.
            _log.warning("chameleon_mm: a copy on %s was refused: %s", self.stream.name, str(error))

    def _hand_over_piece(self, move: Move) -> None:
        """Enqueue the next piece. After the last, or when it is refused, the move is in the queue no more."""
        stream = self.stream
        try:
            assert move.dst is not None and move.src is not None, "a finished move was handed over again"
            if move.next_byte == 0:
                for event in move.after:
                    stream.wait(event)  # orders the copy after its source was written and its destination's last use
                move.after = ()
            if move.written is not None:
                for counter, version in move.written[0]:
                    if counter._version != version:
                        for event in move.written[1]():
                            stream.wait(event)  # orders this piece after what was written since the move was queued
                        break
            begin, end = move.next_byte, min(move.next_byte + self._piece_bytes, move.nbytes)
            # A piece's own time, not the move's: between two pieces the stream may idle, or carry another move that was needed
            # first.
            start = stream.record(timed=True) if move.timed else None
            stream.copy(move.dst[begin:end], move.src[begin:end], speculative=self._speculative)
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
            if self.queued and self.queued[0] is move:  # as a rule; as `_dequeue` does, without the call
                move.dst = move.src = move.written = None
                self.queued.popleft()
            else:
                self._dequeue(move)

    def _fail(self, move: Move) -> None:
        # Some of it may be running with no event to tell when it ends: the host waits, so that both buffers may be dropped.
        move.failed = True
        self._dequeue(move)
        self.synchronize()

    def synchronize(self) -> None:
        """Make the host wait for the device."""
        try:
            self._synchronize()
        except RuntimeError as error:  # a device that cannot even be waited for runs nothing any more
            _log.warning("chameleon_mm: the device could not be synchronised after a failure: %s", str(error))

    def _dequeue(self, move: Move) -> None:
        """Take a move out of the queue, which holds its buffers no longer: its owner does, until `done`."""
        move.dst, move.src, move.after, move.written = None, None, (), None
        if move in self.queued:
            self.queued.remove(move)


class Transfer:
    """The two copy queues of one device. Thread-safe: forward and backward may run on different threads."""

    def __init__(self, device: Device, *, piece_bytes: int = PIECE_BYTES, outstanding: int = OUTSTANDING) -> None:
        if piece_bytes < 1 or outstanding < 1:
            raise ValueError(f"expected piece_bytes and outstanding of 1 or more, got {piece_bytes} and {outstanding}")
        self._lock = threading.Lock()  # not re-entrant: nothing that a finaliser does takes it
        queue = partial(CopyQueue, piece_bytes=piece_bytes, outstanding=outstanding, synchronize=device.synchronize)
        self._out = queue(device.new_stream("d2h"), speculative=True)
        self._in = queue(device.new_stream("h2d"), speculative=False)
        self.streams = self._out.stream, self._in.stream
        """The streams of copies out and back."""
        self.queued = self._out.queued, self._in.queued
        """Moves that wait to be handed over, out and in. Others only read it."""

    # A copy out is speculative: the model may write a saved tensor while it runs. Its version counter then says so, and
    # whoever uses it gets eager's error instead of the bytes.

    def swap_out(
        self, host: Tensor, hbm: Tensor, after: Sequence[Event], *, timed: bool = False,
        written: WrittenSince | None = None, at_once: bool = False,
    ) -> Move:  # fmt: skip
        """Queue a copy from device to host. The caller keeps `hbm` until the move's `done` is waited on or complete.

        `written` orders a piece after what was written since. `at_once`: hand all of it over now, behind what waits.
        """
        move = Move(host, hbm, after, timed, written)
        with self._lock:
            self._out.submit(move, at_once=at_once)
        return move

    def swap_in(self, hbm: Tensor, host: Tensor, after: Sequence[Event], *, timed: bool = False) -> Move:
        """Queue a copy from host to device, behind earlier ones; `issue_in` brings it forward."""
        move = Move(hbm, host, after, timed)
        with self._lock:
            self._in.submit(move)
        return move

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
        """Make the host wait for all of the device's work, as far as it still answers: buffers may be reused without an event
        then."""
        self._out.synchronize()

    def out_is_idle(self) -> bool:
        """Whether all swap-outs that were submitted are complete: one more would start at once."""
        with self._lock:
            return self._out.is_idle()

    def hand_over_all_out(self) -> None:
        """Hand over all queued swap-outs, whatever is outstanding."""
        if self._out.queued:
            with self._lock:
                self._out.hand_over_all()

    def hand_over(self) -> None:
        """Hand over what the outstanding limit allows now, both ways."""
        with self._lock:
            self._out.hand_over()
            self._in.hand_over()
