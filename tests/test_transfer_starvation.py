"""Whatever was asked for before, an urgent copy waits for the pieces that are outstanding, and for no others."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device import SPECS
from chameleon_mm.device.protocols import Event
from chameleon_mm.swap.copy_queue import OUTSTANDING, Move, Transfer

PIECE = 1000
# So slow that a piece takes the link many times as long as the host needs to ask for it: queues build up.
SLOW_LINK = dataclasses.replace(SPECS["h200"], h2d_gbps=0.005, d2h_gbps=0.005, duplex_gbps=0.008)


class Asked(NamedTuple):
    """An urgent copy, when it was asked for, and what it may have to wait for."""

    move: Move
    at: Event
    pieces: int
    """Outstanding before it: two, and those of earlier urgent copies that are still under way."""
    host_us: float
    """What the host took to ask."""


def pieces_of(nbytes: int) -> int:
    return math.ceil(nbytes / PIECE)


class Link:
    """A device with a slow link, a transfer over it, and both ends of every move."""

    def __init__(self) -> None:
        self.device = cm.SimDevice(SLOW_LINK)
        self.transfer = Transfer(self.device, piece_bytes=PIECE)
        self.clock = self.device.new_stream("clock")  # idle: an event of it tells when it was recorded
        self.moves: list[Move] = []
        self.ends: list[tuple[Tensor, Tensor]] = []

    def swap_in(self, nbytes: int) -> Move:
        compute = self.device.current_stream()
        host, hbm = self.device.alloc_pinned(nbytes), compute.alloc(nbytes)
        host.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8))
        self.ends.append((hbm, host))
        self.moves.append(self.transfer.swap_in(hbm, host, [compute.record()], timed=True))
        return self.moves[-1]

    def finish(self) -> None:
        while not all(move.ended for move in self.moves):
            self.device.synchronize()
            self.transfer.hand_over()
        self.device.synchronize()


def alone_us(nbytes: int) -> float:
    """How long the link takes for a move of `nbytes` that nothing else runs beside."""
    link = Link()
    move = link.swap_in(nbytes)
    link.transfer.issue_in(move)
    link.finish()
    return sum(piece.end.elapsed_us(piece.start) for piece in move.pieces)


CALLS = st.lists(
    st.tuples(st.sampled_from(["prefetch", "prefetch", "prefetch", "urgent", "promote", "pump"]), st.integers(1, 4 * PIECE)),
    max_size=30,
)


@settings(max_examples=60)
@given(calls=CALLS)
def test_an_urgent_copy_waits_for_what_is_outstanding_alone(calls: list[tuple[str, int]]) -> None:
    link = Link()
    urgent: list[Asked] = []
    for what, number in calls:
        if what == "pump":
            link.transfer.hand_over()
        elif what == "prefetch":
            link.swap_in(number)
        elif what == "urgent" or link.moves:
            before = sum(pieces_of(asked.move.nbytes) for asked in urgent if not is_complete(asked.move))
            at, host_us = link.clock.record(timed=True), link.device.host_us
            move = link.swap_in(number) if what == "urgent" else link.moves[number % len(link.moves)]
            link.transfer.issue_in(move)
            urgent.append(Asked(move, at, OUTSTANDING + before, link.device.host_us - host_us))
    link.finish()
    for asked in urgent:
        most_us = asked.pieces * alone_us(PIECE) + alone_us(asked.move.nbytes) + asked.host_us
        assert asked.move.pieces[-1].end.elapsed_us(asked.at) <= most_us
    assert all(torch.equal(hbm, host) for hbm, host in link.ends)


def is_complete(move: Move) -> bool:
    return move.done is not None and move.done.query()


def test_a_copy_in_turn_would_wait_for_longer() -> None:
    """The bound above is none that any queue keeps."""
    link = Link()
    at = link.clock.record(timed=True)
    for _ in range(3):
        last = link.swap_in(4 * PIECE)
    link.finish()
    assert last.pieces[-1].end.elapsed_us(at) > OUTSTANDING * alone_us(PIECE) + alone_us(4 * PIECE)
