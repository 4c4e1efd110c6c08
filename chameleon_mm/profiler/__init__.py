"""Observes the running model: a fingerprint of every step, a trace of one when it is needed, and how a step fits a plan."""

from __future__ import annotations

from chameleon_mm.profiler.light import FIXED_STORAGE, NEW_STORAGE, LightProfiler
from chameleon_mm.profiler.step_record import EARLIER_STEP, NOT_A_USE, Boundary, StepRecord

__all__ = [
    "EARLIER_STEP", "FIXED_STORAGE", "NEW_STORAGE", "NOT_A_USE", "Boundary", "LightProfiler", "StepRecord",
]  # fmt: skip
