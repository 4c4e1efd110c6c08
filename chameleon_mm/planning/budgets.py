"""Budgets of device memory that a step could be given: what a session takes by default, and the smallest two worth naming.

    smallest_within(trace, ...)     there is a plan, whatever it costs in time
    hidden_budget(trace, ...)       there is a plan whose copies cost next to none

What is found can be said: `format_size_up` makes a text of it, and what the text stands for has such a plan too. A budget that
is a little larger need not have one as good.
"""

from __future__ import annotations

from chameleon_mm.device.specs import GpuSpec
from chameleon_mm.errors import InfeasibleBudget
from chameleon_mm.policy import LinkCost, Simulator, SwapPlan, generate_plan, hides_copies, smallest_hidden_budget
from chameleon_mm.session import DEFAULT_BUDGET_SHARE
from chameleon_mm.trace import Trace
from chameleon_mm.units import format_size_up, parse_size

HIDDEN_WITHIN = 1e-3
"""Share of the step by which it may take longer and still count as one with all copies hidden."""

_TRIES = 64
"""Number of steps from a budget that does not hide all copies to the unswapped peak, while one that does is sought."""


def default_budget(spec: GpuSpec) -> int:
    """Bytes of device memory that a session takes where nobody says how many."""
    return int(spec.hbm_bytes * DEFAULT_BUDGET_SHARE)


def smallest_within(trace: Trace, budget: int, peak_bytes: int, host_budget: int, cost: LinkCost) -> int:
    """The smallest budget, from `budget` on, for which there is a plan within `host_budget` bytes of pinned memory."""
    while True:
        budget = min(_said(budget), peak_bytes)
        try:
            generate_plan(trace, budget, host_budget, cost)
        except InfeasibleBudget as error:  # names a larger one; the unswapped peak, at the latest, needs no host memory
            budget = error.smallest_bytes or peak_bytes
        else:
            return budget


def hidden_budget(trace: Trace, peak_bytes: int, host_budget: int | None, cost: LinkCost) -> int:
    """The smallest budget whose plan takes at most `HIDDEN_WITHIN` of the step longer: at the most `peak_bytes`, that of
    `trace`."""

    def plan_for(budget: int) -> SwapPlan:
        return generate_plan(trace, budget, host_budget, cost)

    simulator = Simulator(trace, cost)
    budget = _said(smallest_hidden_budget(trace, cost, plan_for, tolerance=HIDDEN_WITHIN))
    while budget < peak_bytes and not hides_copies(simulator, plan_for, budget, HIDDEN_WITHIN):
        budget = _said(budget + (peak_bytes - budget) // _TRIES + 1)
    return min(budget, peak_bytes)


def _said(budget: int) -> int:
    """The budget that results when somebody reads the text of `budget` and gives it back."""
    return parse_size(format_size_up(budget))
