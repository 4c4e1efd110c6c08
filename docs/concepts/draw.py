"""Draws the two pictures of predicted figures in this folder: link_predicted.svg and budget_predicted.svg.

    python docs/concepts/draw.py        # from the root of the repository; needs neither a GPU nor the memory

The other pictures are drawings, edited by hand. All have the classes of `STYLE`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from chameleon_mm.device.specs import SPECS
from chameleon_mm.plan.simulate import Timeline, simulate
from chameleon_mm.plan.trace import StepPhase, Trace
from chameleon_mm.plan.unswapped_memory import memory_curve
from chameleon_mm.tools.prediction import Prediction, link_of, predict
from chameleon_mm.tools.step_on_shapes import StepRequest, record_step
from chameleon_mm.tools.workload import built_in
from chameleon_mm.units import GIB

FOLDER = Path(__file__).parent
SPEC, BUDGET_GIB, WIDTH, NEVER_MOVES = SPECS["h100"], 72, 720, ("parameters", "optimizer state")
STEP = f"Llama 7B, 4 x 4,096 tokens, {SPEC.name}"
STYLE = (FOLDER / "stall.svg").read_text(encoding="utf-8").partition("<style>")[2].partition("</style>")[0]


def svg(title: str, description: str, height: int, parts: Iterable[str]) -> str:
    """SVG of `parts`, which is `height` high, with a title and a description in words."""
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" aria-labelledby="title desc"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        f'<title id="title">{title}</title>',
        f'<desc id="desc">{description}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}"/>',
    ]
    return "\n".join([*head, *parts, "</svg>\n"])


def text(x: float, y: float, words: str, style: str = "small") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{words}</text>'


def line(points: Iterable[tuple[float, float]], style: str = "line") -> str:
    return f'<path class="{style}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>'


def bars(spans: Iterable[tuple[float, float]], y: float, height: float, style: str, gap_us: float = 2500) -> list[str]:
    """Bars of `spans` (begin and end, us). Spans with less than `gap_us` between them are one bar, as they look like one."""
    joined: list[tuple[float, float]] = []
    for begin, end in spans:
        follows = joined and begin - joined[-1][1] < gap_us
        joined.append((joined.pop()[0] if follows else begin, end))
    places = [(across(begin), max(across(end) - across(begin), 0.5)) for begin, end in joined]
    return [f'<rect class="{style}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}"/>' for x, width in places]


def across(us: float) -> float:
    return 112 + us * 594 / 2.55e6


def said(name: str, found: Timeline) -> str:
    moved = sum(span.nbytes for span in found.out_spans) / GIB
    ran_again = f", {found.recompute_us / 1e3:.0f} ms of operators that run again" if found.recompute_us else ""
    return f"{name}: {moved:.1f} GiB each way{ran_again}, {found.step_us / 1e6:.2f} s"


def rows(trace: Trace, found: Timeline, y: float, name: str) -> list[str]:
    """Rows of a step: compute with its waits and recomputations, copies out, copies back."""
    at, takes = [*found.tick_us.tolist(), found.step_us], np.zeros(trace.num_ticks)
    takes[trace.op_tick] = trace.op_us
    waits = [(at[tick], at[tick] + stall.us) for stall in found.stalls for tick in (int(trace.hook_tick[stall.hook]),)]
    again = [
        (a, b - us) for (a, b), us in zip(pairwise(at), takes.tolist(), strict=True) if b - us - a > 1 and found.recompute_us
    ]
    backward = across(at[trace.op_tick[np.argmax(trace.op_phase == StepPhase.BACKWARD)]])
    return [
        text(8, y - 12, said(name, found), "bold"),
        *(text(8, y + 17 + 30 * row, words) for row, words in enumerate(("compute", "to the host", "back"))),
        *bars([(0, found.step_us)], y, 22, "device"),
        *bars(waits, y, 22, "wait", gap_us=200),
        *bars(again, y + 12, 10, "again", gap_us=150),
        *bars([span[1:3] for span in found.out_spans], y + 30, 22, "link"),
        *bars([span[1:3] for span in found.in_spans], y + 60, 22, "link"),
        line([(backward, y - 4), (backward, y + 84)], "line dash"),
    ]


def link_picture(trace: Trace, copies: Timeline, planned: Timeline, peak_bytes: int) -> str:
    about = (
        f"{STEP}, budget {BUDGET_GIB} GiB, predicted; unswapped: {trace.duration_us / 1e6:.2f} s and {peak_bytes / GIB:.1f} GiB"
    )
    seconds = [(across(half * 5e5), f"{half / 2:g} s") for half in range(6)]
    legend = (
        (24, "device", "computes"),
        (130, "wait", "waits for a copy"),
        (270, "again", "recomputes"),
        (390, "link", "copies"),
    )
    parts = [
        text(112, 20, about, "small muted"),
        *rows(trace, copies, 62, "Copies alone"),
        *rows(trace, planned, 196, "The plan"),
        line([(112, 296), (706, 296)]),
        *(mark for x, words in seconds for mark in (line([(x, 296), (x, 301)]), text(x, 315, words, "mid small"))),
        *(
            f'<rect class="{style}" x="{x}" y="336" width="14" height="14"/>{text(x + 20, 348, words)}'
            for x, style, words in legend
        ),
        line([(490, 336), (490, 350)], "line dash"),
        text(498, 348, "forward ends, backward begins"),
    ]
    return svg(about, f"{said('Copies alone', copies)}. {said('The plan', planned)}.", 366, parts)


def budget_picture(prediction: Prediction, planned: Timeline) -> str:
    def at(us: float, nbytes: float) -> tuple[float, float]:
        return 60 + us * 500 / 1.65e6, 320 - nbytes * 284 / (145 * GIB)

    def curve(times: list[float], sizes: list[float], style: str) -> str:
        chunks = [range(i, min(i + 46, len(sizes))) for i in range(0, len(sizes), 46)]
        return line([*(at(times[chunk[0]], max(sizes[i] for i in chunk)) for chunk in chunks), at(times[-1], sizes[-1])], style)

    trace, least = prediction.step.trace, prediction.smallest_budget_bytes / GIB
    still = sum(need.at_peak_bytes for need in prediction.needs if need.name in NEVER_MOVES) / GIB
    limits = (
        (SPEC.hbm_bytes / GIB, "the card", "line", 4),
        (BUDGET_GIB, "the budget", "l-wait", 8),
        (least, "least with a plan", "line", 4),
    )
    about = f"{STEP}: allocated memory over the step, predicted"
    parts = [
        *(line([at(0, gib * GIB), at(1.65e6, gib * GIB)], "thin") for gib in range(0, 141, 20)),
        *(text(52, at(0, gib * GIB)[1] + 4, str(gib), "end small muted") for gib in range(0, 141, 20)),
        text(52, 22, "GiB", "end small muted"),
        *(text(at(half * 5e5, 0)[0], 338, f"{half / 2:g} s", "mid small muted") for half in range(4)),
        curve(trace.clock_us().tolist(), memory_curve(trace).tolist(), "curve l-host"),
        curve([*planned.tick_us.tolist(), planned.step_us], planned.allocated_bytes.tolist(), "curve l-device"),
        *(line([at(0, gib * GIB), (566, at(0, gib * GIB)[1])], f"{style} dash") for gib, _, style, _ in limits),
        *(text(572, at(0, gib * GIB)[1] + below, f"{name}: {gib:.3g} GiB") for gib, name, _, below in limits),
        text(*at(0.54e6, 132 * GIB), f"unswapped: {prediction.peak.nbytes / GIB:.1f} GiB"),
        text(*at(0.62e6, 44 * GIB), f"by the plan: at most {planned.peak_bytes / GIB:.1f} GiB"),
        text(66, at(0, 26 * GIB)[1], f"weights and optimizer state: {still:.1f} GiB, never moved", "small muted"),
        text(60, 358, about, "small muted"),
    ]
    peaks = f"Unswapped {prediction.peak.nbytes / GIB:.1f} GiB, planned {planned.peak_bytes / GIB:.1f}, least {least:.1f}."
    return svg(about, peaks, 372, parts)


def main() -> None:
    """Record the step on shapes, plan it twice, and write both pictures."""
    build = built_in("llama-7b", batch=4, seq=None)
    step = record_step(StepRequest(build=build, spec=SPEC, dtype=torch.bfloat16, optimizer="adamw-fused", min_bytes=1 << 20))
    both = [predict(step, SPEC, BUDGET_GIB * GIB, None, *recompute) for recompute in ([()], [])]
    copies, planned = (simulate(step.trace, found.plan, link_of(SPEC)) for found in both if found.plan is not None)
    pictures = {
        "link": link_picture(step.trace, copies, planned, both[1].peak.nbytes),
        "budget": budget_picture(both[1], planned),
    }
    for name, picture in pictures.items():
        (FOLDER / f"{name}_predicted.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
