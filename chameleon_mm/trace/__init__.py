"""One training step as data: its operators, its tensors, and what autograd saved and used. No torch here."""

from __future__ import annotations

from chameleon_mm.trace.builder import TraceBuilder
from chameleon_mm.trace.trace import NEVER, StepPhase, TensorKind, Trace

__all__ = ["NEVER", "StepPhase", "TensorKind", "Trace", "TraceBuilder"]
