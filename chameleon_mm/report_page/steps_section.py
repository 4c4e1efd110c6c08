"""Section of the page about all steps: each one's kind, peak against budget, time and stall."""

from __future__ import annotations

from collections.abc import Sequence

from chameleon_mm.report_page import drawing
from chameleon_mm.saved.timed_spans import StepKind
from chameleon_mm.step_figures import StepFigures
from chameleon_mm.units import format_size, format_us

MOST_STEPS = 1_000
"""Steps on the page, the latest ones: a bar for each is a pixel wide."""

_STEP_CLASS = {
    StepKind.PLANNED: "planned-step",
    StepKind.RECORDED: "recorded-step",
    StepKind.PARTLY_PLANNED: "partly-step",
    StepKind.BY_RULE: "rule-step",
    StepKind.FAILED: "failed-step",
}


def steps_section(all_steps: Sequence[StepFigures]) -> str:
    """HTML of the section."""
    steps = all_steps[-MOST_STEPS:]
    if not steps:
        return '<section id="steps"><h2>Steps</h2><p>No step has ended.</p></section>'
    most_bytes = 1.05 * max(max(step.peak_hbm_bytes, step.hbm_budget_bytes) for step in steps)
    most_us = 1.05 * max((step.step_us or 0.0 for step in steps), default=0.0)
    classes = [_STEP_CLASS[step.kind] for step in steps]
    peaks = [(css, float(step.peak_hbm_bytes)) for css, step in zip(classes, steps, strict=True)]
    times = [(css, step.step_us) for css, step in zip(classes, steps, strict=True)]
    stalls = [("stall", step.stall_us) for step in steps]
    most_stall = 1.05 * max((step.stall_us or 0.0 for step in steps), default=0.0)
    budgets = [float(step.hbm_budget_bytes) for step in steps]
    seen = [kind for kind in StepKind if any(step.kind is kind for step in steps)]
    legend = "".join(f'<li><i class="{_STEP_CLASS[kind]}"></i>{kind}</li>' for kind in seen)
    before = len(all_steps) - len(steps)
    older = f" The {before} before them are left out." if before else ""
    return (
        f'<section id="steps"><h2>Steps</h2><p class="note">Steps {steps[0].index} to '
        f"{steps[-1].index}: peak of device memory against the budget, time, and stall. A step that was not timed has no time."
        f'{older}</p><ul class="legend">{legend}<li><i class="rule dash" style="--c:var(--budget)"></i>budget</li></ul>'
        f'<div class="chart" tabindex="0" aria-label="Steps; arrow keys move">'
        f'<div class="lane"><span>peak, to {format_size(most_bytes)}</span>'
        f"{drawing.strip('peak', peaks, most_bytes, 'peak of each step', line=budgets)}</div>"
        f'<div class="lane"><span>time, to {format_us(most_us)}</span>'
        f"{drawing.strip('time', times, most_us, 'time of each step')}</div>"
        f'<div class="lane"><span>stall, to {format_us(most_stall)}</span>'
        f"{drawing.strip('stall', stalls, most_stall, 'stall of each step')}</div></div>"
        f'<p class="readout needs-script" aria-live="polite">Point at a step, or tap it, to read it.</p></section>'
    )
