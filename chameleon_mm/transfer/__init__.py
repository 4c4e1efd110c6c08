"""Moves bytes between device and host: which copy is handed to the device when.

Read route (which way by size), calibrate (rates of the link), then copy_queue (one direction, piece by piece; and both
together, for any thread).
"""

from __future__ import annotations

from chameleon_mm.transfer.calibrate import calibrate
from chameleon_mm.transfer.calibration_cache import keep, kept
from chameleon_mm.transfer.copy_queue import OUTSTANDING, PIECE_BYTES, CopyQueue, Move, Piece, Transfer
from chameleon_mm.transfer.route import Path, Thresholds

__all__ = [
    "OUTSTANDING", "PIECE_BYTES", "CopyQueue", "Move", "Path", "Piece", "Thresholds", "Transfer", "calibrate", "keep", "kept",
]  # fmt: skip
