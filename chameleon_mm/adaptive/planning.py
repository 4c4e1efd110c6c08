"""Makes plans for a step within a budget, some of which it leaves free where it can."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from chameleon_mm.adaptive.planned_step import PlannedStep
from chameleon_mm.errors import InfeasibleBudget
from chameleon_mm.executor.recomputing import SNAPSHOT_BYTES
from chameleon_mm.policy import LinkCost, SwapPlan, candidate_plans

_log = logging.getLogger(__name__)

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
    """Makes plans.

    `slack_bytes` is the device's `block_slack_bytes`; `host_budget` tells how much pinned memory there may be.
    """

    def __init__(self, slack_bytes: int, host_budget: Callable[[], int]) -> None:
        self.slack_bytes = slack_bytes
        self._host_budget = host_budget

    def spare_bytes(self, hbm_budget_bytes: int) -> int:
        """Bytes of the budget that a plan leaves free, where it can."""
        slack_bytes = min(SLACK_BLOCKS * self.slack_bytes, hbm_budget_bytes // SLACK_PART)
        return max(hbm_budget_bytes // SPARE_PART, slack_bytes)

    def plans_for(
        self,
        planned: PlannedStep,
        hbm_budget_bytes: int,
        link: LinkCost,
        *,
        lead_us: Mapping[int, float] | float = 0.0,
        lag_us: Mapping[int, float] | float = 0.0,
        at_most: int,
    ) -> list[SwapPlan]:
        """Plans for the step, best first. Raises `InfeasibleBudget`, with the smallest budget that has one."""
        for spare_bytes in dict.fromkeys((self.spare_bytes(hbm_budget_bytes), hbm_budget_bytes // SPARE_PART, 0)):
            try:
                return candidate_plans(
                    planned.trace,
                    hbm_budget_bytes - spare_bytes,
                    self._host_budget(),
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


def log_refusal(num_hooks: int, refusal: InfeasibleBudget) -> None:
    """Log that there is no plan for a step of so many hooks."""
    if num_hooks:
        _log.warning("chameleon_mm: no plan for a step of %d hooks, the default rule goes on: %s", num_hooks, str(refusal))
    else:
        _log.warning(
            "chameleon_mm: a step takes more than the budget, and nothing in it can be swapped, as none of the session's hooks "
            "ran: hooks see what autograd saves on the thread that entered the session, with gradients on"
        )
