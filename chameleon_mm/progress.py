"""Tells whoever wants to know what each step of a session took: lines on stderr, or a function.

progress = Progress(True)         # `SwapSession(progress=...)`: False, True, or a function of `StepFigures`
progress.tell(figures)
    step 12  planned  HBM 14.20 of 16.00 GiB  host 3.10 GiB  hidden 98 %  stall 1.20 ms
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from chameleon_mm.arguments import describe
from chameleon_mm.saved.timed_spans import StepKind
from chameleon_mm.step_figures import StepFigures
from chameleon_mm.units import format_size, format_us

if TYPE_CHECKING:
    from rich.console import Console

_log = logging.getLogger(__name__)

_STYLES = {
    StepKind.PLANNED: "green",
    StepKind.PARTLY_PLANNED: "yellow",
    StepKind.RECORDED: "cyan",
    StepKind.BY_RULE: "yellow",
    StepKind.FAILED: "bold red",
}
_KIND_WIDTH = max(len(str(kind)) for kind in StepKind)


class Progress:
    """Tells the figures of steps. An error in whatever it calls is logged, does not stop the training, and ends the telling."""

    def __init__(self, progress: object = False) -> None:
        """Raises `TypeError` for what is neither True nor False nor a function."""
        self._tell: Callable[[StepFigures], object] | None = None
        if progress is True:
            self._tell = StepLines()
        elif callable(progress) and not isinstance(progress, type):
            self._tell = progress
        elif progress is not False:
            raise TypeError(
                f"progress: expected True, False or a function, got {describe(progress)}; pass True for a line a step on "
                f"stderr, or a function that is called with each step's StepFigures"
            )

    @property
    def is_listened_to(self) -> bool:
        """Whether anybody would be told."""
        return self._tell is not None

    def tell(self, figures: StepFigures) -> None:
        """Tell the figures of a step."""
        if self._tell is None:
            return
        try:
            self._tell(figures)
        except Exception:  # noqa: BLE001 - somebody else's function: a mistake in it must not end a long training
            self._tell = None
            # The text alone: a log record that kept the error would keep its frames, and the tensors that they hold.
            said = traceback.format_exc()
            _log.warning("chameleon_mm: progress: telling step %d raised; it is not told again:\n%s", figures.index, said)


class StepLines:
    """Writes a line for each step: in colour where stderr is a terminal, as plain text elsewhere.

    Lines, and no live display: a program has one of those at most, and it may be the user's own.
    """

    def __init__(self, console: Console | None = None) -> None:
        """`console`: one to write to instead of stderr."""
        from rich.console import Console

        self._console = console or Console(stderr=True, highlight=False, force_jupyter=False)

    def __call__(self, figures: StepFigures) -> None:
        from rich.text import Text

        line = Text("  ").join(Text(text, style) for text, style in parts_of(figures))
        self._console.print(line, soft_wrap=True)


def parts_of(figures: StepFigures) -> list[tuple[str, str]]:
    """Parts of the line of a step, each with rich's style for it."""
    peak_bytes, budget_bytes = figures.peak_hbm_bytes, figures.hbm_budget_bytes
    peak, budget = format_size(peak_bytes), format_size(budget_bytes)
    if peak.split()[-1] == budget.split()[-1]:
        peak = peak.split()[0]
    over = peak_bytes > budget_bytes
    parts = [
        (f"step {figures.index}", "bold"),
        (f"{figures.kind!s:<{_KIND_WIDTH}}", _STYLES[figures.kind]),
        (f"HBM {peak} of {budget}{' EXCEEDED' if over else ''}", "bold red" if over else ""),
        (f"host {format_size(figures.host_bytes)}", ""),
    ]
    if figures.hidden_fraction is not None:
        parts.append((f"hidden {100 * figures.hidden_fraction:.0f} %", ""))
    if figures.stall_us is not None:
        parts.append((f"stall {format_us(figures.stall_us)}", ""))
        if figures.simulated:
            parts.append(("simulated", "dim"))
    return parts
