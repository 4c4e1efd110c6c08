"""Plans of the cached steps for other budgets, made from the traces that there are.

made = plans_within(budgets, planned_steps, make_plans, before=before)      # or `InfeasibleBudget`
host_bytes_wanted(entries)          # what the plans that are followed now need of the host
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from chameleon_mm.errors import InfeasibleBudget
from chameleon_mm.policy import SwapPlan

if TYPE_CHECKING:
    from chameleon_mm.adaptive.planned_step import PlannedStep
    from chameleon_mm.adaptive.step_cache import CachedStep

_log = logging.getLogger(__name__)


class Budgets(NamedTuple):
    """Bytes that a plan may take."""

    hbm_bytes: int
    host_bytes: int
    """Pinned memory."""


def plans_within(
    budgets: Budgets,
    planned_steps: Iterable[PlannedStep],
    make_plans: Callable[[PlannedStep, Budgets], list[SwapPlan]],
    *,
    before: Budgets,
) -> dict[int, list[SwapPlan]]:
    """Plans of these steps within `budgets`, by the `id` of each step that keeps none for them already. `before`: the budgets
    of now.

    Raises the `InfeasibleBudget` of `make_plans` where a step that has a plan now would have none; of several the one that asks
    for the most, so that what it names is enough for all.
    """
    made = dict[int, list[SwapPlan]]()
    refusals = list[InfeasibleBudget]()
    for planned in planned_steps:
        if planned.has_plans_for(budgets):
            continue
        try:
            made[id(planned)] = make_plans(planned, budgets)
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


def host_bytes_wanted(entries: Iterable[CachedStep[PlannedStep | None]]) -> int | None:
    """The most pinned memory that one of the cached steps needs by the plan that it would follow; None: none has a plan."""
    followed = (entry.plan.current for entry in entries if entry.plan is not None)
    return max((trial.schedule.plan.host_bytes for trial in followed if trial is not None), default=None)


def log_refusal(num_hooks: int, refusal: InfeasibleBudget) -> None:
    """Log that there is no plan for a step of so many hooks."""
    if num_hooks:
        _log.warning("chameleon_mm: no plan for a step of %d hooks, the default rule goes on: %s", num_hooks, str(refusal))
    else:
        _log.warning(
            "chameleon_mm: a step takes more than the budget, and nothing in it can be swapped, as none of the session's hooks "
            "ran: hooks see what autograd saves on the thread that entered the session, with gradients on"
        )
