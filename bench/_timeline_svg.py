"""The picture of a planned step as SVG text: compute and copies over time, and device memory under the budget line below them.

text = timeline_svg(comparison)

    save  swap-out ...        moments of one saved storage, each above the row where it is
    compute | d2h | h2d       kernels by phase; copies, those of that storage in a darker colour
    device memory             without swapping, by the plan, and the budget

Written by hand, as `_svg` is. Nothing in it is placed by eye but the labels: bars, lines and marks come from the steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import NamedTuple

from chameleon_mm.bench._timeline_run import Comparison
from chameleon_mm.bench._timeline_step import PHASES, Kernel, Reading, Swap
from chameleon_mm.units import MIB, format_size, round_up

WIDTH, HEIGHT = 900, 526
_LEFT, _RIGHT = 104, 84
_MARKS, _ROWS, _ROW, _BAR = 88, 110, 40, 26
"""Baseline of the marks' names; top of the first row; height of a row, and of the bars in it."""
_MEMORY_TOP, _BOTTOM = 288, 472
_PHASE_COLOURS = dict(zip(PHASES, ("#c6dbef", "#7fb5d9", "#2171b5"), strict=True))
_COPY, _OF_THE_STORAGE, _PLANNED, _UNSWAPPED = "#f7c99b", "#d94801", "#2171b5", "#777"
_TEXT, _GREY, _LIGHT = "#222", "#555", "#ddd"
ROWS = ("compute", "d2h", "h2d")
_LETTER = 8.4
"""Width of a letter, at most, on average."""
_MERGED_US = 1.0
"""Kernels less than this apart are one bar."""


class Mark(NamedTuple):
    """A moment of the storage that is followed, and the row in which it lies."""

    name: str
    at_us: float
    row: str


@dataclass(frozen=True, slots=True)
class Frame:
    """Where times and sizes lie in the picture."""

    end_us: float
    most_bytes: int

    def x(self, at_us: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * at_us / self.end_us

    def y(self, nbytes: float) -> float:
        return _BOTTOM - (_BOTTOM - _MEMORY_TOP) * nbytes / self.most_bytes

    @staticmethod
    def top(row: str) -> float:
        """Upper edge of the bars of a row."""
        return _ROWS + _ROW * ROWS.index(row) + (_ROW - _BAR) / 2


def frame_of(found: Comparison) -> Frame:
    """The frame that holds both steps, and memory up to a round number that nothing passes."""
    steps = (found.unswapped, found.planned)
    most = max(found.hbm_budget_bytes, *(step.peak_bytes for step in steps))
    return Frame(max(step.step_us for step in steps), round_up(most, _memory_step(most)))


def followed(swaps: Sequence[Swap]) -> Swap:
    """The storage to follow through the step: of those that moved whole, the one whose moments lie farthest apart.

    Raises `ValueError` where none did.
    """
    whole = [swap for swap in swaps if swap.moved_whole]
    if not whole:
        raise ValueError("expected a storage that moved whole, got none; choose another budget")
    return max(whole, key=_least_gap_us)


def marks(swap: Swap) -> tuple[Mark, ...]:
    """The moments of a storage that moved whole, in order."""
    assert swap.out is not None and swap.back is not None and swap.reclaim_us is not None and swap.use_us is not None
    return (
        Mark("save", swap.save_us, "compute"),
        Mark("swap-out", swap.out.start_us, "d2h"),
        Mark("reclaim", swap.reclaim_us, "compute"),
        Mark("prefetch", swap.back.start_us, "h2d"),
        Mark("use", swap.use_us, "compute"),
    )


def timeline_svg(found: Comparison) -> str:
    """The picture. Raises `ValueError` where no storage moved whole."""
    frame, swap = frame_of(found), followed(found.planned.swaps)
    budget = format_size(found.hbm_budget_bytes)
    title = f"One training step of a small GPT within {budget} of device memory, by a plan"
    how = f"{found.device}: computed on the CPU, times and copy speeds simulated; no GPU took part"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="14">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(16, 26, title, size=17),
        _text(16, 48, how, fill=_GREY),
        *_time_axis(frame),
        *_rows(found, frame, swap),
        *_marks(marks(swap), frame),
        *_memory(found, frame),
    ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _rows(found: Comparison, frame: Frame, swap: Swap) -> Iterator[str]:
    for row, what in zip(ROWS, ("", "to the host", "back"), strict=True):
        middle = frame.top(row) + _BAR / 2
        yield f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{middle:g}" y2="{middle:g}" stroke="{_LIGHT}"/>'
        yield _text(_LEFT - 10, middle + (-2 if what else 5), row, anchor="end")
        if what:
            yield _text(_LEFT - 10, middle + 14, what, anchor="end", size=12, fill=_GREY)
    for kernel in _merged(found.planned.kernels):
        yield _bar(frame, "compute", kernel.start_us, kernel.end_us, _PHASE_COLOURS[kernel.phase], f"kernels {kernel.phase}")
    for copy in found.planned.copies:
        own = copy in (swap.out, swap.back)
        colour = _OF_THE_STORAGE if own else _COPY
        yield _bar(frame, copy.direction, copy.start_us, copy.end_us, colour, "copy followed" if own else "copy")
    yield from _phase_names(found.planned.kernels, frame)
    y = _ROWS + len(ROWS) * _ROW + 17
    for x, colour, words in (
        (_LEFT, _OF_THE_STORAGE, f"copies of one saved storage of {format_size(swap.nbytes)}, marked above"),
        (_LEFT + 430, _COPY, "copies of the others"),
    ):
        yield f'<rect x="{x}" y="{y - 11}" width="14" height="12" fill="{colour}"/>'
        yield _text(x + 20, y, words, size=13)


def _phase_names(kernels: Sequence[Kernel], frame: Frame) -> Iterator[str]:
    """Each phase's name: at the left of its longest bar, or of all its bars, where that is long enough, else behind them."""
    y = frame.top("compute") + _BAR / 2 + 5
    for phase in PHASES:
        bars = [bar for bar in _merged(kernels) if bar.phase == phase]
        longest = max(bars, key=lambda bar: bar.end_us - bar.start_us)
        for start_us, end_us in ((longest.start_us, longest.end_us), (bars[0].start_us, bars[-1].end_us)):
            if frame.x(end_us) - frame.x(start_us) > _LETTER * len(phase) + 16:
                yield _text(frame.x(start_us) + 8, y, phase)
                break
        else:
            yield _text(frame.x(bars[-1].end_us) + 6, y, phase, size=13)


def _marks(found: Sequence[Mark], frame: Frame) -> Iterator[str]:
    xs = [frame.x(mark.at_us) for mark in found]
    for mark, x in zip(found, xs, strict=True):
        top = frame.top(mark.row)
        yield f'<line class="mark {mark.name}" x1="{x:.2f}" x2="{x:.2f}" y1="{_MARKS + 5}" y2="{top:g}" stroke="{_TEXT}"/>'
        if mark.row == "compute":
            yield f'<path d="M{x:.2f} {top:g}l-5 -9h10z" fill="{_TEXT}"/>'
    for mark, x in zip(found, _apart(xs, [len(mark.name) * _LETTER + 10 for mark in found]), strict=True):
        yield _text(x, _MARKS, mark.name, anchor="middle")


def _apart(xs: Sequence[float], widths: Sequence[float]) -> list[float]:
    """Middles of labels as near to `xs`, which ascend, as leaves none on another."""
    placed = list(xs)
    for _ in range(100):  # each pass halves what is left; labels that do not fit at all stay as they are then
        for i, (left, right) in enumerate(pairwise(placed)):
            over = (widths[i] + widths[i + 1]) / 2 - (right - left)
            if over > 0:
                placed[i], placed[i + 1] = left - over / 2, right + over / 2
    return placed


def _memory(found: Comparison, frame: Frame) -> Iterator[str]:
    step = _memory_step(frame.most_bytes)
    for nbytes in range(0, frame.most_bytes + 1, step):
        y = frame.y(nbytes)
        yield f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_LIGHT}"/>'
        yield _text(_LEFT - 10, y + 5, f"{nbytes // MIB}", anchor="end", fill=_GREY)
    yield _text(_LEFT - 88, _MEMORY_TOP - 14, "device memory, MiB", fill=_GREY)
    planned, unswapped = (_steps(step.readings, frame) for step in (found.planned, found.unswapped))
    area = f"{_LEFT},{frame.y(0):.2f} {planned} {frame.x(found.planned.step_us):.2f},{frame.y(0):.2f}"
    yield f'<polygon points="{area}" fill="{_PLANNED}" fill-opacity="0.15"/>'
    yield f'<polyline class="unswapped" points="{unswapped}" fill="none" stroke="{_UNSWAPPED}" stroke-width="1.5"/>'
    yield f'<polyline class="planned" points="{planned}" fill="none" stroke="{_PLANNED}" stroke-width="2"/>'
    y = frame.y(found.hbm_budget_bytes)
    yield (
        f'<line class="budget" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.2f}" y2="{y:.2f}" stroke="{_TEXT}" '
        f'stroke-width="1.5" stroke-dasharray="6 4"/>'
    )
    yield _text(WIDTH - _RIGHT + 6, y + 5, "budget")
    for name, at, colour in (("no swapping", found.unswapped, _UNSWAPPED), ("by the plan", found.planned, _PLANNED)):
        highest = max(at.readings, key=lambda reading: reading.allocated_bytes)
        # Without swapping the label is beside the line, by the plan within the area.
        y = frame.y(at.peak_bytes) + 5 if at is found.unswapped else frame.y(at.peak_bytes / 4)
        yield _text(frame.x(highest.at_us) + 12, y, f"{name}, peak {format_size(at.peak_bytes)}", fill=colour)


def _time_axis(frame: Frame) -> Iterator[str]:
    for ms in range(int(frame.end_us / 1e3) + 1):
        x = frame.x(ms * 1e3)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_BOTTOM}" y2="{_BOTTOM + 5}" stroke="{_GREY}"/>'
        yield _text(x, _BOTTOM + 21, f"{ms}", anchor="middle", fill=_GREY)
    yield _text((_LEFT + WIDTH - _RIGHT) / 2, _BOTTOM + 42, "time in the step, ms (simulated)", anchor="middle", fill=_GREY)


def _bar(frame: Frame, row: str, start_us: float, end_us: float, colour: str, kind: str) -> str:
    x, width = frame.x(start_us), frame.x(end_us) - frame.x(start_us)
    edge = ' stroke="white" stroke-width="0.7"' if kind.startswith("copy") else ""
    return (
        f'<rect class="{kind} {row}" x="{x:.2f}" y="{frame.top(row):g}" width="{width:.2f}" height="{_BAR}" '
        f'fill="{colour}"{edge}/>'
    )


def _merged(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Kernels of one phase that follow each other at once, as one each: nobody can tell them apart."""
    merged: list[Kernel] = []
    for kernel in kernels:
        last = merged[-1] if merged else None
        if last is not None and last.phase == kernel.phase and kernel.start_us - last.end_us < _MERGED_US:
            merged[-1] = last._replace(end_us=kernel.end_us)
        else:
            merged.append(kernel)
    return merged


def _steps(readings: Sequence[Reading], frame: Frame) -> str:
    """Points of a line that keeps each reading's value until the next; readings of one moment are a vertical line."""
    points: list[str] = []
    for reading in readings:
        x = f"{frame.x(reading.at_us):.2f}"
        points += [f"{x},{points[-1].split(',')[1]}"] if points else []
        points.append(f"{x},{frame.y(reading.allocated_bytes):.2f}")
    return " ".join(dict.fromkeys(points))


def _least_gap_us(swap: Swap) -> float:
    out, back = swap.out, swap.back
    assert out is not None and back is not None and None not in (swap.reclaim_us, swap.prefetch_us, swap.use_us)
    at_us = (swap.save_us, out.start_us, out.end_us, swap.reclaim_us, swap.prefetch_us, back.start_us, back.end_us, swap.use_us)
    known = [moment for moment in at_us if moment is not None]
    return min(later - earlier for earlier, later in pairwise(known))


def _memory_step(most_bytes: int) -> int:
    """A round distance between the lines of memory, for at most four of them."""
    return next(step for step in (MIB << power for power in range(1, 40)) if step * 4 >= most_bytes)


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 14, fill: str = "") -> str:
    end = "" if anchor == "start" else f' text-anchor="{anchor}"'
    large = "" if size == 14 else f' font-size="{size}"'
    colour = f' fill="{fill or _TEXT}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{end}{large}{colour}>{escape(words)}</text>'
