"""Outcome of the demo: its runs, and whether swapping kept its promises.

promises: not one bit differs, from the run without swapping and from plain PyTorch; the swapped peak is within the HBM budget
passed = all hold
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from chameleon_mm.demo.notes import KindFigures, StepNote, by_kind
from chameleon_mm.demo.program import Numbers, TrainConfig
from chameleon_mm.demo.train import RunResult
from chameleon_mm.device.protocols import Device


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
            "schema": "chameleon_mm.demo/3",
            "config": asdict(self.config),
            "hbm_budget_bytes": self.hbm_budget_bytes,
            "budget_held": self.budget_held,
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
