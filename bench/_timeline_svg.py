"""Picture of a planned step: compute and copies over time, and below them device memory and the budget. Needs matplotlib.

text = timeline_svg(comparison)

    save  swap-out ...        moments of one saved storage, above the rows
    compute | d2h | h2d       kernels by phase; copies, those of that storage in a darker colour
    device memory             without swapping, by the plan, and the budget
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from chameleon_mm.bench._figure import svg_of
from chameleon_mm.bench._timeline_run import Comparison, Swap
from chameleon_mm.bench._timeline_step import PHASES, Kernel
from chameleon_mm.units import MIB, format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROWS = ("compute", "d2h", "h2d")
_NAMES = ("compute", "d2h\nto the host", "h2d\nback")
_MERGED_MS = 1e-3
_PHASE_COLOURS = dict(zip(PHASES, ("#c6dbef", "#7fb5d9", "#2171b5"), strict=True))
_COPY, _OF_THE_STORAGE, _PLANNED, _UNSWAPPED, _TEXT = "#f7c99b", "#d94801", "#2171b5", "#777777", "#222222"


class Mark(NamedTuple):
    """Time of one event in the life of the followed storage."""

    name: str
    at_us: float


def followed(swaps: Sequence[Swap]) -> Swap:
    """Storage to follow: the one whose marks are farthest apart. Raises `ValueError` if none moved."""
    if not swaps:
        raise ValueError("expected a storage that moved, got none; choose another budget")
    return max(swaps, key=lambda swap: min(b.at_us - a.at_us for a, b in pairwise(marks(swap))))


def marks(swap: Swap) -> tuple[Mark, ...]:
    """Marks of a storage, in order."""
    return (
        Mark("save", swap.save_us),
        Mark("swap-out", swap.out.start_us),
        Mark("reclaim", swap.reclaim_us),
        Mark("prefetch", swap.back.start_us),
        Mark("use", swap.use_us),
    )


def timeline_svg(found: Comparison) -> str:
    """SVG of the picture. Raises `ValueError` if no storage moved."""
    swap = followed(found.swaps())
    budget = format_size(found.hbm_budget_bytes)
    title = (
        f"One training step of a small GPT within {budget} of device memory, by a plan\n"
        f"{found.device}: computed on the CPU, times and copy speeds simulated; no GPU took part"
    )

    def draw(figure: Figure) -> None:
        rows, memory = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.5))
        _draw_rows(rows, found, swap)
        _draw_memory(memory, found)

    return svg_of(title, (10, 6), draw)


def _draw_rows(axes: Axes, found: Comparison, swap: Swap) -> None:
    own = (swap.out, swap.back)
    for phase, colour in _PHASE_COLOURS.items():
        bars = _merged([kernel for kernel in found.planned.kernels if kernel.phase == phase])
        axes.broken_barh(bars, (-0.35, 0.7), color=colour, label=f"kernels, {phase}")
    for row, direction in enumerate(ROWS[1:], 1):
        for colour, is_own in ((_COPY, False), (_OF_THE_STORAGE, True)):
            copies = [c for c in found.planned.copies if c.direction == direction and (c in own) == is_own]
            what = f"copies of one storage of {format_size(swap.out.nbytes)}" if is_own else "copies of the others"
            bars = [(copy.start_us / 1e3, (copy.end_us - copy.start_us) / 1e3) for copy in copies]
            axes.broken_barh(bars, (row - 0.35, 0.7), color=colour, edgecolor="white", label=what if row == 1 else None)
    axes.set_yticks(range(len(ROWS)), _NAMES)
    axes.set_ylim(len(ROWS) - 0.5, -0.5)
    above = axes.secondary_xaxis("top")
    named = marks(swap)
    above.set_xticks([mark.at_us / 1e3 for mark in named], [mark.name for mark in named])
    for mark in named:
        axes.axvline(mark.at_us / 1e3, color=_TEXT, linewidth=0.8, linestyle=":")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.5), ncols=5, fontsize=8, frameon=False)


def _merged(kernels: Sequence[Kernel]) -> list[tuple[float, float]]:
    """Begin and length in ms. Kernels without a gap between them are one bar, since they look like one."""
    bars: list[tuple[float, float]] = []
    for kernel in kernels:
        if bars and kernel.start_us / 1e3 - sum(bars[-1]) < _MERGED_MS:
            bars[-1] = bars[-1][0], kernel.end_us / 1e3 - bars[-1][0]
        else:
            bars.append((kernel.start_us / 1e3, (kernel.end_us - kernel.start_us) / 1e3))
    return bars


def _draw_memory(axes: Axes, found: Comparison) -> None:
    for name, step, colour in (("no swapping", found.unswapped, _UNSWAPPED), ("by the plan", found.planned, _PLANNED)):
        changes = [b for a, b in pairwise((step.readings[0], *step.readings)) if a.allocated_bytes != b.allocated_bytes]
        readings = (step.readings[0], *changes, step.readings[-1])
        times, sizes = [r.at_us / 1e3 for r in readings], [r.allocated_bytes / MIB for r in readings]
        axes.step(times, sizes, where="post", color=colour, label=f"{name}, peak {format_size(step.peak_bytes)}")
        if step is found.planned:
            axes.fill_between(times, sizes, step="post", color=colour, alpha=0.15)
    axes.axhline(found.hbm_budget_bytes / MIB, color=_TEXT, linestyle="--", linewidth=1.2, label="budget")
    axes.set_ylabel("device memory, MiB")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("time in the step, ms (simulated)")
    axes.margins(x=0.01)
    axes.legend(loc="lower center", fontsize=8, frameon=False)
