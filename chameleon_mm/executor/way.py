"""Position of a step in a compiled plan, and the storages that the step has saved so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from chameleon_mm.executor.forecasts import PlanForecast
from chameleon_mm.policy import StorageAction
from chameleon_mm.policy.step_program import StepProgram
from chameleon_mm.saved.saved_storage import SavedStorage


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Position of a step in a program. The loop adds the storages that the step saves."""

    program: StepProgram
    epoch: int
    """Number of the step."""
    hook: int
    """Number of the latest hook, which is done."""
    numbers: dict[int, int]
    """Autograd's number of operators at the latest save of each thread."""
    storages: dict[int, SavedStorage]
    """Saved storages by the plan's number."""
    first_saves: dict[int, SavedStorage]
    """Saved storages by the hook of their first save."""
    actions: Mapping[int, StorageAction]
    """Action of each storage, by the hook that saves it first."""
    forecast: PlanForecast
    margin_bytes: int
    """Bytes that every check leaves free, in addition to the row's growth."""
