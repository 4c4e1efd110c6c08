"""Picture of a run whose lengths change: length, peak against the budget, and kind of each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from chameleon_mm.bench._figure import svg_of
from chameleon_mm.bench._lengths_run import LengthRun
from chameleon_mm.units import MIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {"recorded": "#c23b22", "partly_planned": "#e0a100", "planned": "#2b6cb0", "by_rule": "#6b7280"}
_LABELS = {
    "recorded": "recorded",
    "partly_planned": "planned in part, the rest by the default rule",
    "planned": "followed a plan",
    "by_rule": "by the default rule",
}


def lengths_svg(session: LengthRun, unswapped: LengthRun, lengths: Sequence[int], hbm_budget_bytes: int, title: str) -> str:
    """SVG of a run in a session, together with the same run without one. Needs matplotlib."""

    def draw(figure: Figure) -> None:
        memory, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.2))
        numbers = range(1, len(session.peaks) + 1)
        without = [peak / MIB for peak in unswapped.peaks]
        memory.plot(numbers, without, color="#b8bec8", linewidth=0.9, label="peak without a session")
        memory.axhline(hbm_budget_bytes / MIB, color="#111827", linewidth=1.1, linestyle="--", label="budget")
        for kind, colour in _COLOURS.items():
            of_kind = [i for i, one in enumerate(session.kinds) if one == kind]
            if of_kind:
                peaks = [session.peaks[i] / MIB for i in of_kind]
                label = f"{_LABELS[kind]} ({len(of_kind)})"
                memory.scatter([i + 1 for i in of_kind], peaks, s=13, color=colour, label=label, zorder=3)
        memory.set_ylabel("peak (MiB)")
        memory.set_ylim(bottom=0)
        memory.legend(loc="upper center", bbox_to_anchor=(0.5, 1.22), ncols=3, fontsize=8, frameon=False)
        below.bar(numbers, lengths, width=0.8, color="#94a3b8")
        below.set_ylabel("length")
        below.set_xlabel("step")
        below.set_xlim(0, len(session.peaks) + 1)

    return svg_of(title, (10, 5.4), draw)
