"""Makes plans for steps within budgets; of device memory it leaves some free where it can."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from chameleon_mm.adaptive.planned_step import PlannedStep
from chameleon_mm.errors import InfeasibleBudget
from chameleon_mm.policy import LinkCost, SwapPlan, candidate_plans

_log = logging.getLogger(__name__)

TRIAL_PLANS = 2
"""Plans that are tried for one step, where their simulated times are close. Of a mixture of experts the second was up to 8 %
faster than the one that was foreseen to be."""

DRAFTS = 1000
"""Tentative plans that the planner evaluates for a step with few candidates: a fifth of a second between two steps, once."""

SPARE_PART = 256
"""A plan leaves one part in this many of the budget free, where it can: a step of the same fingerprint may differ in what the
hooks do not see, such as a scalar that the loop keeps."""

SLACK_BLOCKS = 4
"""Blocks, at a step's peak, for which plans leave room to be larger than asked for, each by `block_slack_bytes`."""

SLACK_PART = 32
"""A plan leaves at most one part in this many of the budget free for the slack of blocks, which matters below 128 MiB alone."""


class Budgets(NamedTuple):
    """Bytes that a plan may take."""

    hbm_bytes: int
    host_bytes: int


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
                    recompute=planned.admitted,
                    refused=planned.refused,
                )
            except InfeasibleBudget:
                if spare_bytes == 0:
                    raise
        raise AssertionError("without spare bytes there is a plan or an error")

    def plans_within(
        self, budgets: Budgets, planned_steps: Iterable[PlannedStep], link: LinkCost, *, before: Budgets
    ) -> dict[int, list[SwapPlan]]:
        """Plans of these steps within other budgets than those of `before`, by the `id` of each step.

        Raises `InfeasibleBudget` where a step that has a plan now would have none; of several the one that asks for the most,
        so that what it names is enough for all.
        """
        made = dict[int, list[SwapPlan]]()
        refusals = list[InfeasibleBudget]()
        for planned in planned_steps:
            at_most = TRIAL_PLANS if planned.predicted_by is None else 1
            try:
                made[id(planned)] = self.plans_for(planned, budgets, link, at_most=at_most)
            except InfeasibleBudget as refusal:
                if planned.trials:
                    refusals.append(refusal)
                else:
                    log_refusal(planned.record.num_hooks, refusal)
                    made[id(planned)] = []
        if refusals:
            asked = "smallest_bytes" if budgets.host_bytes == before.host_bytes else "smallest_host_bytes"
            try:
                raise max(refusals, key=lambda refusal: getattr(refusal, asked) or 0)
            finally:
                refusals.clear()  # whose tracebacks hold this frame: a cycle
        return made


def log_refusal(num_hooks: int, refusal: InfeasibleBudget) -> None:
    """Log that there is no plan for a step of so many hooks."""
    if num_hooks:
        _log.warning("chameleon_mm: no plan for a step of %d hooks, the default rule goes on: %s", num_hooks, str(refusal))
    else:
        _log.warning(
            "chameleon_mm: a step takes more than the budget, and nothing in it can be swapped, as none of the session's hooks "
            "ran: hooks see what autograd saves on the thread that entered the session, with gradients on"
        )
