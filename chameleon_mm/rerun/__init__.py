"""Steps that ran out of memory, run again from what they began with."""

from __future__ import annotations

from chameleon_mm.rerun.step_retry import Repair, StepRunner

__all__ = ["Repair", "StepRunner"]
