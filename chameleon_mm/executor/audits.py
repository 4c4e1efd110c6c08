"""Compares now and then what a recipe makes with the storage that it stands for: a proof holds for its own step alone.

    audits.begin_step(is_measured=...)
    audits.next_is_due()             # at each storage whose operator is over: whether a recipe of it is to be tried
    audits.compare(recipe, saved, restore)
    audits.read()                    # names of operators that gave other bits; each once, with a warning

Which storage it is changes from step to step, evenly over all of them. What is found is read at the beginning of the next step,
when the device has it: no step waits for it.
"""

from __future__ import annotations

import logging

from torch import Tensor

from chameleon_mm.executor.rebuilds import Rebuilds, Restore
from chameleon_mm.policy.selection import GOLDEN
from chameleon_mm.saved.calling_thread import ComputeStreams
from chameleon_mm.saved.metrics import Totals
from chameleon_mm.saved.recipe import Recipe, Refusal
from chameleon_mm.saved.saved_storage import SavedStorage

_log = logging.getLogger(__name__)

FORCED_EVERY = 16
"""Audits of which one makes room for itself. The others compare where there is room: deep in a forward there may never be."""


class Audits:
    """Compares recipes with originals. Not thread-safe: the executor holds its lock."""

    def __init__(self, rebuilds: Rebuilds, streams: ComputeStreams, totals: Totals) -> None:
        self._rebuilds = rebuilds
        self._streams = streams
        self._totals = totals
        self.every = 1
        """Steps of which one is audited; 0: none is."""
        self._steps = self._asked = 0
        """Steps, and those that were to be audited."""
        self._seen = self._seen_last = 0
        """Storages whose operators were over in this step so far, and in the last one."""
        self._from = 0
        """Number of the first storage that this step may compare."""
        self._due = False
        self.is_on_trial = False
        """Whether the plan that the step follows is on trial: no step compares for it."""
        self._compared: list[tuple[Tensor, list[str]]] = []
        """Whether any bit differed, on the device, and the operators that ran."""
        self._failed: list[str] = []
        """Operators that raised an error."""
        self._warned: set[str] = set()

    def begin_step(self, *, is_measured: bool) -> None:
        """Begin a step. Of audits in steps whose time is measured every second one is left out: those times count in which
        nothing was compared."""
        self._steps += 1
        self._seen_last, self._seen = self._seen, 0
        self._due = self.every > 0 and self._steps % self.every == 0
        if self._due:
            self._asked += 1
            self._from = int(self._asked * GOLDEN % 1 * self._seen_last)
            self._due = not is_measured or self._asked % 2 == 0
        self.is_on_trial = False

    def next_is_due(self) -> bool:
        """Whether the next storage whose operator is over is to be compared, if it has a recipe."""
        self._seen += 1
        return self._due and not self.is_on_trial and self._seen > self._from

    def compare(self, recipe: Recipe, saved: SavedStorage, restore: Restore) -> bool:
        """Compare what `recipe` makes with `saved`, if there is room for it. Returns whether it took a part of the step's
        time."""
        if self._asked % FORCED_EVERY and not self._rebuilds.fits_beside(recipe, saved):
            return False
        self._due = False
        differs = self._rebuilds.differs(recipe, saved, self._streams.current(), restore)
        if isinstance(differs, Refusal):
            self._failed += recipe.operators if differs.lasts else []
            return True
        self._totals.proofs += 1
        self._compared.append((differs, recipe.operators))
        return True

    def read(self) -> list[str]:
        """Operators that have given other bits and were not told of before; waits for the device."""
        compared, self._compared = self._compared, []
        differing, self._failed = self._failed, []
        differing += [operator for differs, operators in compared if bool(differs.item()) for operator in operators]
        new = [operator for operator in dict.fromkeys(differing) if operator not in self._warned]
        self._warned.update(new)
        for operator in new:
            _log.warning(
                "chameleon_mm: %s is not run again any more: with the same inputs it failed or gave other bits, or something "
                "that nobody told of had written to its result",
                operator,
            )
        return new
