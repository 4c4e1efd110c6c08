"""Section of the page about the latest timed step: its copies, and where compute waited.

measured_section(found, simulated=False), measured_columns(found)     # HTML; what the script tells numbers from
"""

from __future__ import annotations

from typing import Any

from chameleon_mm.report_page import drawing
from chameleon_mm.report_page.measured_step import MeasuredStep
from chameleon_mm.units import format_us


def measured_section(found: MeasuredStep | None, *, simulated: bool) -> str:
    """HTML of the section; nothing where no step was timed."""
    if found is None:
        return ""
    badge = "simulated" if simulated else "measured"
    end_us = found.end_us
    rows = (("compute", "waits", found.compute), ("out", "to the host", found.out), ("back", "back", found.back))
    waits = sum(bar.end_us - bar.start_us for bar in found.compute if bar.kind == "stall")
    copies = sum(bar.end_us - bar.start_us for bar in (*found.out, *found.back))
    return (
        f'<section id="measured"><h2>The latest timed step, as it ran <span class="badge">{badge}</span></h2>'
        f'<p class="note">Step {found.number} ({found.kind}): {format_us(found.step_us)}, of which compute waited '
        f"{format_us(waits)}; its {len(found.out) + len(found.back)} copies took {format_us(copies)}.</p>"
        '<ul class="legend"><li><i style="--c:var(--stall)"></i>compute waits</li><li><i style="--c:var(--recompute)"></i>made '
        'again</li><li><i style="--c:var(--swapped)"></i>copy</li></ul>'
        f'<div class="chart" tabindex="0" aria-label="The copies over time; arrow keys move, + and - zoom">'
        f"{drawing.lanes(rows, end_us)}"
        f'<div class="cursor"></div></div>{drawing.below_chart(end_us)}</section>'
    )


def measured_columns(found: MeasuredStep) -> dict[str, Any]:
    """All bars, for the script."""
    return {
        "end_us": found.end_us,
        "compute": drawing.columns(found.compute, kinds=True),
        "out": drawing.columns(found.out),
        "back": drawing.columns(found.back),
    }
