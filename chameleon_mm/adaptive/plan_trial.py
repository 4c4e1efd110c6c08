"""A plan on trial: what it foresees, and how long the steps that followed it took."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from chameleon_mm.adaptive.hook_schedule import HookSchedule
from chameleon_mm.executor.recompute_plan import RecomputePlan
from chameleon_mm.policy.step_program import StepProgram
from chameleon_mm.saved.metrics import StepTime


class PlanTrial:
    """A plan, and the times of the steps that followed it. `predicted_out_us`, `predicted_in_us`: its simulated stalls, by
    storage."""

    __slots__ = ("busy_us", "predicted_in_us", "predicted_out_us", "programs", "recompute", "schedule", "time", "times_us")

    def __init__(
        self,
        schedule: HookSchedule,
        predicted_out_us: Mapping[int, float],
        predicted_in_us: Mapping[int, float],
        recompute: RecomputePlan | None,
    ) -> None:
        self.schedule = schedule
        self.recompute = recompute
        """The plan's part about recomputation, for the executor; None: nothing is recomputed."""
        self.predicted_out_us = predicted_out_us
        self.predicted_in_us = predicted_in_us
        self.programs: list[StepProgram | None] = []
        """The plan compiled, once it was asked for; None: the loop cannot run it."""
        self.times_us: list[float] = []
        self.busy_us: list[float] = []
        """Time of each of these steps in which compute was not waiting for copies."""
        self.time: StepTime | None = None
        """Times of the latest step."""

    @property
    def step_us(self) -> float:
        """Median of the measured step times; before there are any, the plan's prediction."""
        return median(self.times_us) if self.times_us else self.schedule.plan.step_us

    @property
    def excess_out_us(self) -> dict[int, float]:
        """Stalls at reclaims beyond the plan's prediction in the latest step, by storage."""
        return {} if self.time is None else _beyond(self.time.out_stalls_us, self.predicted_out_us)

    @property
    def excess_in_us(self) -> dict[int, float]:
        """Stalls for copies back beyond the plan's prediction in the latest step, by storage."""
        return {} if self.time is None else _beyond(self.time.in_stalls_us, self.predicted_in_us)


def _beyond(measured: Mapping[int, float], predicted: Mapping[int, float]) -> dict[int, float]:
    more = {tensor: us - predicted.get(tensor, 0.0) for tensor, us in measured.items()}
    return {tensor: us for tensor, us in more.items() if us > 0}
