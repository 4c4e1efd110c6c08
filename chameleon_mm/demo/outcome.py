"""Outcome of the demo: its runs, whether swapping kept its promises, and what each step of the swapped run came to.

promises: not one bit differs, from the run without swapping and from plain PyTorch; the swapped peak is within the HBM budget
passed = all hold

notes(reports, kinds)                # reports of the session: one after each step
by_kind(unswapped, swapped, notes)   # planned against measured, by kind of step
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from chameleon_mm.demo.floor import Floor
from chameleon_mm.demo.program import Numbers, StepKind, TrainConfig
from chameleon_mm.demo.train import RunResult
from chameleon_mm.device.protocols import Device
from chameleon_mm.report import SwapReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All runs of one demo and what comparing them gave."""

    config: TrainConfig
    device: Device
    unswapped: RunResult
    swapped: RunResult
    plain: Numbers
    """The same training in plain PyTorch, with nothing of the library around it."""
    report: Mapping[str, Any]
    """`SwapReport.to_dict()` of the swapped run."""
    notes: tuple[StepNote, ...]
    """Notes on each of its steps."""
    hbm_budget_bytes: int
    difference: str | None
    """The first difference between the runs without swapping and with; None if there is none."""
    reproducible: bool | None
    """Whether a second unswapped run gave the first one's bits; None where nothing differed, so nothing needed asking."""
    plain_difference: str | None
    """The first difference between plain PyTorch and the swapped run; None if there is none."""
    plain_reproducible: bool | None
    """Whether a second run in plain PyTorch gave the first one's bits; None where nothing needed asking."""
    remarks: tuple[str, ...] = ()
    """Warnings of the library in the swapped run: for which steps there is no plan, and what budget one would take."""
    ratio: float | None = None
    """Unswapped peak over the budget, where it was asked for: parameters, gradients and optimizer state were swapped, too."""
    floor: Floor | None = None
    """The least that the training takes, where it was measured."""

    @property
    def budget_held(self) -> bool:
        return self.swapped.peak_bytes <= self.hbm_budget_bytes

    @property
    def passed(self) -> bool:
        return self.difference is None and self.plain_difference is None and self.budget_held

    def by_kind(self) -> list[KindFigures]:
        """Planned against measured, and without swapping, for each kind of step."""
        return by_kind(self.unswapped, self.swapped, self.notes)

    def to_dict(self, environment: Mapping[str, Any]) -> dict[str, Any]:
        """Dictionary of everything as plain data. `environment` comes first: device, simulated, commit, versions."""
        return {
            **environment,
            "schema": "chameleon_mm.demo/4",
            "config": asdict(self.config),
            "hbm_budget_bytes": self.hbm_budget_bytes,
            "budget_held": self.budget_held,
            "ratio": self.ratio,
            "floor": None if self.floor is None else asdict(self.floor),
            "bit_identical": self.difference is None,
            "first_difference": self.difference,
            "unswapped_reproduces_itself": self.reproducible,
            "bit_identical_to_plain": self.plain_difference is None,
            "first_difference_to_plain": self.plain_difference,
            "plain_reproduces_itself": self.plain_reproducible,
            "passed": self.passed,
            "remarks": list(self.remarks),
            "plain": _values(self.plain),
            "unswapped": _figures(self.unswapped),
            "swapped": _figures(self.swapped),
            "kinds": [{**asdict(figures), "kind": figures.kind.name} for figures in self.by_kind()],
            "steps": [{**asdict(note), "kind": note.kind.name} for note in self.notes],
            "report": dict(self.report),
        }


def _figures(run: RunResult) -> dict[str, Any]:
    return {
        "model_bytes": run.model_bytes,
        "peak_bytes": run.peak_bytes,
        "step_us": list(run.step_us),
        "step_peak_bytes": list(run.step_peak_bytes),
        **_values(run),
    }


def _values(run: Numbers) -> dict[str, Any]:
    return {"losses": run.losses.tolist(), "grad_norms": run.grad_norms.tolist()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNote:
    """One step of the swapped run."""

    kind: StepKind
    phase: str
    """Kind of the step: "recorded", "planned" or another of the report's `steps_by_phase`."""
    recorded: bool
    """Whether the step was recorded operator by operator, to its end."""
    plan_known: bool
    """Whether it was, hook for hook, a step that had a plan when it began."""
    planned_us: float | None
    """Predicted time of a step of its kind, by the plan for it that was made last; None: there is none."""
    planned_peak_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KindFigures:
    """Figures of all steps of one kind. Times are medians, peaks the largest; None where there is nothing to take them from."""

    kind: StepKind
    steps: int
    recorded: int
    unswapped_us: float
    planned_us: float | None
    measured_us: float
    """Measured time of steps that followed a plan, where there were any."""
    unswapped_peak_bytes: int
    planned_peak_bytes: int | None
    measured_peak_bytes: int
    """Measured peak of the same steps."""


def notes(reports: Sequence[SwapReport], kinds: Sequence[StepKind]) -> tuple[StepNote, ...]:
    """Notes, one for each step; `reports[i]` is the session's after step i."""
    taken: list[StepNote] = []
    phases: dict[str, int] = {}
    recorded = known = 0
    latest: StepKind | None = None
    planned: dict[StepKind, tuple[float | None, int | None]] = {}
    for report, kind in zip(reports, kinds, strict=True):
        was_recorded = report.detailed_steps > recorded
        if was_recorded:
            latest = kind
        if latest is not None:  # a report speaks of the kind that was recorded last
            planned[latest] = (report.planned_step_us, report.planned_peak_bytes)
        planned_us, planned_peak_bytes = planned.get(kind, (None, None))
        note = StepNote(
            kind=kind,
            phase=next((phase for phase, count in report.steps_by_phase.items() if count > phases.get(phase, 0)), ""),
            recorded=was_recorded,
            plan_known=report.plan_cache_hits > known,
            planned_us=planned_us,
            planned_peak_bytes=planned_peak_bytes,
        )
        taken.append(note)
        phases, recorded, known = report.steps_by_phase, report.detailed_steps, report.plan_cache_hits
    return tuple(taken)


def by_kind(unswapped: RunResult, swapped: RunResult, steps: Sequence[StepNote]) -> list[KindFigures]:
    """A row for each kind of step, in the order in which they came first. `steps` are the notes of the swapped run."""
    return [_figures_of_kind(kind, unswapped, swapped, steps) for kind in dict.fromkeys(note.kind for note in steps)]


def _figures_of_kind(kind: StepKind, unswapped: RunResult, swapped: RunResult, steps: Sequence[StepNote]) -> KindFigures:
    places = [i for i, note in enumerate(steps) if note.kind == kind]
    by_plan = [i for i in places if steps[i].plan_known] or places
    last = steps[places[-1]]
    return KindFigures(
        kind=kind,
        steps=len(places),
        recorded=sum(steps[i].recorded for i in places),
        # The run's first step warms allocators and kernels up.
        unswapped_us=statistics.median(unswapped.step_us[i] for i in ([i for i in places if i] or places)),
        planned_us=last.planned_us,
        measured_us=statistics.median(swapped.step_us[i] for i in by_plan),
        unswapped_peak_bytes=max(unswapped.step_peak_bytes[i] for i in places),
        planned_peak_bytes=last.planned_peak_bytes,
        measured_peak_bytes=max(swapped.step_peak_bytes[i] for i in by_plan),
    )
