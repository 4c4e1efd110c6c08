"""The picture of device memory over one step, by each way of giving it back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from chameleon_mm.bench._figure import svg_of
from chameleon_mm.bench.probe.reclaim_steps import Curve
from chameleon_mm.units import MIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {"no swapping": "#9aa3af", "record_stream": "#c23b22", "Python": "#e0a100", "allocator": "#2b6cb0"}
_LABELS = {
    "no swapping": "no swapping",
    "record_stream": "copied out, record_stream",
    "Python": "session, reclaimed at hooks",
    "allocator": "session, reclaimed in the allocator, too",
}


def reclaim_svg(curves: Sequence[Curve], budget_bytes: int, title: str) -> str:
    """SVG of all curves: active above, reserved below. Needs matplotlib."""

    def draw(figure: Figure) -> None:
        above, below = figure.subplots(2, 1, sharex=True, sharey=True)
        for axes, name in ((above, "active"), (below, "reserved")):
            axes.axhline(budget_bytes / MIB, color="#111827", linewidth=1.1, linestyle="--", label="budget of the sessions")
            for curve in curves:
                line = [(nbytes - curve.start_bytes) / MIB for nbytes in getattr(curve, name)]
                axes.plot(range(len(line)), line, color=_COLOURS[curve.way], linewidth=1.5, label=_LABELS[curve.way])
            axes.set_ylabel(f"{name} (MiB above the start)")
        above.set_ylim(bottom=0)
        above.legend(loc="upper center", bbox_to_anchor=(0.5, 1.3), ncols=3, fontsize=8, frameon=False)
        below.set_xlabel("allocations of the model, forward and then backward")

    return svg_of(title, (10, 6), draw)
