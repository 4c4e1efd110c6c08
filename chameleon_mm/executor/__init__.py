"""Saved tensors on their way between device and host: decides per hook, orders the streams, keeps the budget."""

from __future__ import annotations

from chameleon_mm.executor.adaptation import Adaptation, PlanPhase
from chameleon_mm.executor.classify import ProtectedStorages
from chameleon_mm.executor.encoding import codecs_by_name
from chameleon_mm.executor.executor import Executor
from chameleon_mm.executor.handles import KeptTensor, SwappedView
from chameleon_mm.executor.link_rates import link_cost_for
from chameleon_mm.executor.metrics import CopySpan, Totals
from chameleon_mm.executor.plan_follower import plan_steps
from chameleon_mm.executor.step_retry import StepRunner

__all__ = [
    "Adaptation",
    "CopySpan",
    "Executor",
    "KeptTensor",
    "PlanPhase",
    "ProtectedStorages",
    "StepRunner",
    "SwappedView",
    "Totals",
    "codecs_by_name",
    "link_cost_for",
    "plan_steps",
]
