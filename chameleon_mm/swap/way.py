"""Position of a step in a compiled plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from chameleon_mm.plan.step_program import Op, Row, StepProgram
from chameleon_mm.swap.saved_storage import SavedStorage


class Way:
    """Position of a step in a program. The plan has room for the model and for its own swap-ins at each hook.

    The loop advances the position, or else the director and the general executor.
    """

    __slots__ = (
        "_next", "dropped", "epoch", "first_saves", "growth_bytes", "hook", "late", "margin_bytes", "program", "staying",
        "storages",
    )  # fmt: skip

    def __init__(
        self, program: StepProgram, epoch: int, *, margin_bytes: int = 0, first_saves: dict[int, SavedStorage] | None = None
    ) -> None:
        """`epoch`: number of the step. `margin_bytes`: bytes that every check leaves free besides the program's growth.
        `first_saves`: the step's saved storages by the hook of their first save. The loop adds to it."""
        self.program, self.epoch, self.margin_bytes = program, epoch, margin_bytes
        self.first_saves = {} if first_saves is None else first_saves
        self.hook = -1
        self.growth_bytes = 0
        """Maximum bytes allocated until the next check, including the plan's own copies back."""
        self.storages: dict[int, SavedStorage] = {}
        """Saved storages by the plan's number."""
        self.staying: Collection[int] = ()
        """Numbers of the storages that must stay on the device."""
        self.late: list[Op] = []
        """Ops whose hook has passed, because the operator that saves the storage was not over then."""
        self.dropped: set[int] = set()
        """Numbers of the storages whose drop was tried: a row that the loop began may begin again."""
        self._next = 0

    def number(self, saved: SavedStorage, number: int) -> None:
        """Note that `saved` is storage `number` of the plan."""
        saved.number, self.storages[number] = number, saved
        saved.stays |= number in self.staying

    def at(self, hook: int) -> None:
        """Note the latest hook."""
        self.hook = hook
        self.growth_bytes = self.program.rows[hook].growth + self.margin_bytes

    def due(self, reached: int) -> Sequence[Row]:
        """Return the rows not run yet, up to the row of hook `reached`, in order. The caller runs them now."""
        since, self._next = self._next, max(self._next, reached + 1)
        return self.program.rows[since : self._next]

    def coming(self, row: Row) -> list[SavedStorage]:
        """Return the storages whose copies back begin after the use of `row`."""
        return [self.storages[number] for number in row.ins if number in self.storages]

    def is_up_to(self, hook: int) -> bool:
        """True if exactly the rows up to that of `hook` were run."""
        return self._next == hook + 1

    def rejoin(self, hook: int) -> None:
        """Continue after `hook`: the loop has run all rows up to it."""
        self.at(hook)
        self._next = hook + 1
