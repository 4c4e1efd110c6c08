"""What moves and when, as pure arithmetic: no torch, no device."""

from __future__ import annotations

from chameleon_mm.policy.cost import LinkCost
from chameleon_mm.policy.learned import Headroom, UseOrder
from chameleon_mm.policy.plan import Action, ActionKind, SwapPlan
from chameleon_mm.policy.rule import CodecRule, DefaultRule, Limits, SaveFacts

__all__ = [
    "Action",
    "ActionKind",
    "CodecRule",
    "DefaultRule",
    "Headroom",
    "Limits",
    "LinkCost",
    "SaveFacts",
    "SwapPlan",
    "UseOrder",
]
