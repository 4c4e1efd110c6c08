"""Phases of a session that plans: whether the step that is expected has a plan."""

from __future__ import annotations

import enum


class PlanPhase(enum.Enum):
    """Phases of a session: whether the step that is expected has a plan."""

    PROFILE = "profile"
    """The expected step has no plan. Begins with the first step; ends when that step has a plan."""
    PLAN = "plan"
    """A recorded step has ended. Ends when its plan is made, before the next step begins."""
    STEADY = "steady"
    """The expected step has a plan. Begins with that step; ends before one without a plan."""


FOLLOWED_BY = {
    PlanPhase.PROFILE: (PlanPhase.PROFILE, PlanPhase.PLAN, PlanPhase.STEADY),
    PlanPhase.PLAN: (PlanPhase.PROFILE, PlanPhase.STEADY),
    PlanPhase.STEADY: (PlanPhase.STEADY, PlanPhase.PROFILE, PlanPhase.PLAN),
}
