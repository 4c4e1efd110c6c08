"""Snapshots of what a step begins with, in pinned host memory: to begin it again, and to write it to a checkpoint meanwhile."""

from __future__ import annotations

from chameleon_mm.snapshots.snapshot import Snapshot
from chameleon_mm.snapshots.snapshot_write import SnapshotWrite
from chameleon_mm.snapshots.snapshots import Snapshots

__all__ = ["Snapshot", "SnapshotWrite", "Snapshots"]
