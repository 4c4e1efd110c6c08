"""The hooks: they swap out, prefetch, restore and reclaim within the budget, as a director or the default rule says."""

from __future__ import annotations

from chameleon_mm.executor.autograd_hooks import autograd_hooks
from chameleon_mm.executor.director import Director
from chameleon_mm.executor.executor import Executor

__all__ = ["Director", "Executor", "autograd_hooks"]
