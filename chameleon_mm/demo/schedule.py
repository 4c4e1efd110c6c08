"""The steps that a run makes: the sequence changes in the middle, as it does where rows differ in length or a model is
evaluated.

11 steps, rows of 8192 bytes:    5 of 8192 bytes    an evaluation    3 of 4096 bytes    2 of 8192 bytes
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind:
    """Steps of one kind run the same operators on the same shapes."""

    length: int
    """Bytes per row."""
    training: bool = True
    """Whether it trains; else an evaluation: forward alone, without a graph."""

    @property
    def name(self) -> str:
        return f"{self.length:,} bytes" if self.training else "evaluation"


def schedule(steps: int, context: int) -> tuple[StepKind, ...]:
    """The kinds of `steps` steps: half of them on whole rows, an evaluation, half of the rest on half rows, then whole ones.

    Fewer than five leave the evaluation out, fewer than three the half rows too.
    """
    whole, half = StepKind(length=context), StepKind(length=max(1, context // 2))
    first = max(1, steps // 2)
    rest = steps - first
    evaluations = [StepKind(length=context, training=False)] if rest > 2 else []
    halves = rest // 2
    return (*[whole] * first, *evaluations, *[half] * halves, *[whole] * (rest - len(evaluations) - halves))
