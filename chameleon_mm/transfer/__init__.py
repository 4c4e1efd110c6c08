"""Moves bytes between device and host: which copy is handed to the device when.

Read lane (one direction, piece by piece), then engine (both, for any thread).
"""

from __future__ import annotations

from chameleon_mm.transfer.engine import Transfer
from chameleon_mm.transfer.lane import OUTSTANDING, PIECE_BYTES, Lane, Move, Piece

__all__ = ["OUTSTANDING", "PIECE_BYTES", "Lane", "Move", "Piece", "Transfer"]
