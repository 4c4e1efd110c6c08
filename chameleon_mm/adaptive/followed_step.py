"""Facts about a step that ended, as the plan follower tells them."""

from __future__ import annotations

from typing import NamedTuple

from chameleon_mm.adaptive.extra_memory import ExtraMemory
from chameleon_mm.adaptive.plan_trial import PlanTrial
from chameleon_mm.profiler.step_record import StepRecord


class FollowedStep(NamedTuple):
    """Facts about a step that ended."""

    record: StepRecord
    followed: PlanTrial | None
    whole: bool
    """Whether a recorder saw all of it."""
    recorded_hooks: int
    """Number of hooks that a recorder saw, from the first one on."""
    extra: ExtraMemory
    """Memory that it took beyond its trace's, as far as it agreed with a cached step."""
    unused: dict[tuple[int, int], int]
    """Bytes that the recorded step allocated between two hooks and this one did not, by the two hooks."""
    exceeded_plan: bool
    """Whether it took so much more memory that its plan was no longer trusted."""
    had_plan: bool
    """Whether some hook of it belonged to a plan; `followed_plan`: all did, to one plan that was trusted to the end."""
    followed_plan: bool
