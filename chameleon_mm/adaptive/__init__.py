"""Recording, planning and following: which step comes, which plan it follows, and what the steps teach."""

from __future__ import annotations

from chameleon_mm.adaptive.adaptation import Adaptation
from chameleon_mm.adaptive.agreement import plan_digests
from chameleon_mm.adaptive.link_rates import link_cost_for
from chameleon_mm.adaptive.plan_steps import plan_steps

__all__ = ["Adaptation", "link_cost_for", "plan_digests", "plan_steps"]
