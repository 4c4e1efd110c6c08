"""Makes plans for a step within a budget, some of which it leaves free where it can."""

from __future__ import annotations

from collections.abc import Mapping

from chameleon_mm.adaptive.budgets import Budgets
from chameleon_mm.adaptive.planned_step import PlannedStep
from chameleon_mm.errors import InfeasibleBudget
from chameleon_mm.executor.recomputing import SNAPSHOT_BYTES
from chameleon_mm.policy import LinkCost, SwapPlan, candidate_plans

DRAFTS = 1000
"""Tentative plans that the planner evaluates for a step with few candidates: a fifth of a second between two steps, once."""

SPARE_PART = 256
"""A plan leaves one part in this many of the budget free, where it can: a step of the same fingerprint may differ in what the
hooks do not see, such as a scalar that the loop keeps."""

SLACK_BLOCKS = 4
"""Number of blocks, at a step's peak, that may be larger than what was asked for, each by the device's `block_slack_bytes`. A
plan leaves room for them as well."""

SLACK_PART = 32
"""A plan leaves at most one part in this many of the budget free for the slack of blocks."""


class Planning:
    """Makes plans. `slack_bytes` is the device's `block_slack_bytes`."""

    def __init__(self, slack_bytes: int) -> None:
        self.slack_bytes = slack_bytes

    def spare_bytes(self, hbm_budget_bytes: int) -> int:
        """Bytes of the budget that a plan leaves free, where it can."""
        slack_bytes = min(SLACK_BLOCKS * self.slack_bytes, hbm_budget_bytes // SLACK_PART)
        return max(hbm_budget_bytes // SPARE_PART, slack_bytes)

    def plans_for(
        self,
        planned: PlannedStep,
        budgets: Budgets,
        link: LinkCost,
        *,
        lead_us: Mapping[int, float] | float = 0.0,
        lag_us: Mapping[int, float] | float = 0.0,
        at_most: int,
    ) -> list[SwapPlan]:
        """Plans for the step, best first. Raises `InfeasibleBudget`, with the smallest budget that has one."""
        for spare_bytes in dict.fromkeys((self.spare_bytes(budgets.hbm_bytes), budgets.hbm_bytes // SPARE_PART, 0)):
            try:
                return candidate_plans(
                    planned.trace,
                    budgets.hbm_bytes - spare_bytes,
                    budgets.host_bytes,
                    link,
                    lead_us=lead_us,
                    lag_us=lag_us,
                    at_most=at_most,
                    drafts=DRAFTS,
                    recompute=planned.replayable,
                    refused=planned.refused,
                    copied_up_to=SNAPSHOT_BYTES,
                )
            except InfeasibleBudget:
                if spare_bytes == 0:
                    raise
        raise AssertionError("without spare bytes there is a plan or an error")
