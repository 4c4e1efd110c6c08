"""Decides what moves and when, as pure arithmetic: no torch, no device."""

from __future__ import annotations

from chameleon_mm.policy.bounds import Ideal, hidden_budget_bound, hides_copies, ideal, smallest_hidden_budget
from chameleon_mm.policy.checkpointing import FullRecomputation, full_recomputation
from chameleon_mm.policy.link_cost import LinkCost
from chameleon_mm.policy.plan import Action, ActionKind, SwapPlan
from chameleon_mm.policy.planner import candidate_plans, generate_plan
from chameleon_mm.policy.rule import DEFAULT_BUDGET_SHARE, DefaultRule, Headroom, Limits, SaveFacts, UseOrder
from chameleon_mm.policy.simulate import Simulator, Timeline, simulate
from chameleon_mm.policy.swap_all import swap_all
from chameleon_mm.policy.timing import EngineSpan
from chameleon_mm.policy.unswapped_memory import Candidates, Peak, least_memory, memory_curve, peak_memory, smallest_budget

__all__ = [
    "DEFAULT_BUDGET_SHARE", "Action", "ActionKind", "Candidates", "DefaultRule", "EngineSpan", "FullRecomputation", "Headroom",
    "Ideal", "Limits", "LinkCost", "Peak", "SaveFacts", "Simulator", "SwapPlan", "Timeline", "UseOrder",
    "candidate_plans", "full_recomputation", "generate_plan", "hidden_budget_bound", "hides_copies", "ideal", "least_memory",
    "memory_curve", "peak_memory", "simulate", "smallest_budget", "smallest_hidden_budget", "swap_all",
]  # fmt: skip
