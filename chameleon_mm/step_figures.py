"""Figures of one step of a session: what it took, moved and waited for.

figures.peak_hbm_bytes <= figures.hbm_budget_bytes       # did this step fit?
figures.stall_us, figures.copy_us                        # None: the step was not timed; on a GPU one in sixteen is
figures.to_dict()                                        # for JSON
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from chameleon_mm.saved.timed_spans import StepKind, hidden_fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """Figures of a step that ended. Bytes are bytes, `_us` microseconds of the device's clock (virtual on the simulator)."""

    index: int
    """Number of the step, from 0 on; every step that began has one, so that a step that ran again has two."""
    kind: StepKind
    simulated: bool
    """Whether times are those of a simulated device."""
    step_us: float | None = None
    """Time from the step's begin to its end, as the device saw it; None: it was not timed, nor anything else of it."""
    host_us: float
    """Time from the step's begin to its end by the host's clock, maybe far ahead of the device's; virtual on the simulator."""
    peak_hbm_bytes: int
    """The most device memory allocated in the step; where `peak_hbm_at_most_bytes` differs, a lower bound: what hooks saw."""
    peak_hbm_at_most_bytes: int | None
    """Upper bound of it; None: not known. Both are the peak in a step that took more than any before it in the process."""
    hbm_budget_bytes: int
    host_bytes: int
    """The most pinned memory that live blocks of the session's pool held in the step."""
    bytes_out: int
    """Bytes of saved tensors that left the device in the step: of `bytes_swapped_out`. `bytes_in`: that came back."""
    bytes_in: int
    stall_us: float | None = None
    """Time that compute waited for copies."""
    copy_us: float | None = None
    """Time that the step's copies ran, both directions added up."""
    recompute_us: float | None = None
    """Time in which compute recomputed dropped storages."""

    @property
    def hidden_fraction(self) -> float | None:
        """Share of the copies' time during which compute did not wait for them; None where none was timed."""
        return None if self.copy_us is None or self.stall_us is None else hidden_fraction(self.stall_us, self.copy_us)

    def to_dict(self) -> dict[str, Any]:
        """Dictionary of every figure, ready for JSON."""
        return {**dataclasses.asdict(self), "kind": self.kind.value, "hidden_fraction": self.hidden_fraction}
