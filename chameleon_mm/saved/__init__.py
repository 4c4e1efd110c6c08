"""Saved storages: the record of each, its states and forms, the handles that autograd holds, and counters of it all."""

from __future__ import annotations

from chameleon_mm.saved.classify import ProtectedStorages
from chameleon_mm.saved.handles import KeptTensor, SwappedView
from chameleon_mm.saved.metrics import Totals
from chameleon_mm.saved.timed_spans import CopySpan

__all__ = ["CopySpan", "KeptTensor", "ProtectedStorages", "SwappedView", "Totals"]
