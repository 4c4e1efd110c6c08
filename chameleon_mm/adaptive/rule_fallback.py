"""Decides whether steps whose plans keep missing go by the default rule alone, by what both take.

    if fallback.by_rule: ...                                # as a step begins: it follows no plan
    fallback.end_step(took_us, missed=..., hooks=...)

    FOLLOWING   a step that agrees with no cached one from some hook on has missed: what is matched goes by the plan, the rest
       |        by the rule
       | MISSES such steps in a row
    TRYING      TRIED steps by the rule
       | took less for each hook than those that missed      else FOLLOWING, and not tried again for a while
    BY_RULE     for PAUSE steps, twice as many each time; then FOLLOWING

A step that has a plan ends both at once: it is noticed though nobody follows it.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from statistics import fmean

_log = logging.getLogger(__name__)

MISSES = 8
"""Steps in a row that miss before the default rule is tried."""
TRIED = 4
"""Steps by the default rule that tell what it takes."""
PAUSE, LONGEST_PAUSE = 32, 512
"""Steps before it is tried anew which of the two takes less, the first time and at most."""


class _State(enum.Enum):
    FOLLOWING = "following"
    TRYING = "trying"
    BY_RULE = "by_rule"


class RuleFallback:
    """Compares plans that keep missing with the default rule. Not thread-safe."""

    def __init__(self) -> None:
        self._state = _State.FOLLOWING
        self._missed_us: deque[float] = deque(maxlen=MISSES)
        """Time for each hook of the latest steps that missed, since one that did not."""
        self._rule_us: list[float] = []
        """The same of the steps that try the rule."""
        self._pause, self._steps_left = PAUSE, 0
        self._told = False

    @property
    def by_rule(self) -> bool:
        """Whether the step that runs, or comes next, is to follow no plan."""
        return self._state is not _State.FOLLOWING

    def end_step(self, took_us: float, *, missed: bool, hooks: int) -> None:
        """End a step of so many hooks that took so long on the host. `missed`: it was none that has a plan, and was not
        recorded either."""
        self._steps_left = max(0, self._steps_left - 1)
        if not missed:
            self._state, self._pause = _State.FOLLOWING, PAUSE
            self._missed_us.clear()
            return
        us = took_us / max(1, hooks)
        if self._state is _State.TRYING:
            self._rule_us.append(us)
            if len(self._rule_us) == TRIED:
                self._decide()
        elif self._state is _State.BY_RULE:
            if not self._steps_left:
                self._state = _State.FOLLOWING
                self._missed_us.clear()
        else:
            self._missed_us.append(us)
            if len(self._missed_us) == MISSES and not self._steps_left:
                self._state, self._rule_us = _State.TRYING, []

    def _decide(self) -> None:
        rule_us, missed_us = fmean(self._rule_us), fmean(self._missed_us)
        self._state = _State.BY_RULE if rule_us < missed_us else _State.FOLLOWING
        self._steps_left, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        if self._state is _State.BY_RULE and not self._told:
            self._told = True
            _log.warning(
                "chameleon_mm: the last %d steps were like none before them from some hook on, and took %.0f us a hook with "
                "plans for parts of them, %.0f us by the default rule: the rule goes on, and plans are tried again later",
                MISSES + TRIED,
                missed_us,
                rule_us,
            )
