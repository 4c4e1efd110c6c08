"""Position of a step in a compiled plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from chameleon_mm.plan.step_program import Op, Row, StepProgram
from chameleon_mm.swap.saved_storage import SavedStorage


class Way:
    """A step that follows a program, whose plan has room for the model and for its own swap-ins, hook for hook.

    Whoever runs the step's hooks moves it on: the loop, or the director and the general executor.
    """

    __slots__ = (
        "_next", "epoch", "first_saves", "growth_bytes", "hook", "late", "margin_bytes", "program", "staying", "storages",
    )  # fmt: skip

    def __init__(
        self, program: StepProgram, epoch: int, *, margin_bytes: int = 0, first_saves: dict[int, SavedStorage] | None = None
    ) -> None:
        """`epoch`: number of the step. `margin_bytes`: bytes that every check leaves free beyond the program's growth.
        `first_saves`: the step's saved storages by the hook of their first save, to which the loop adds."""
        self.program, self.epoch, self.margin_bytes = program, epoch, margin_bytes
        self.first_saves = {} if first_saves is None else first_saves
        self.hook = -1
        """Number of the latest hook."""
        self.growth_bytes = 0
        """Bytes that are allocated at most until the next check, by the plan's own copies back too."""
        self.storages: dict[int, SavedStorage] = {}
        """Saved storages by the plan's number."""
        self.staying: Collection[int] = ()
        """Numbers of the storages that must stay on the device."""
        self.late: list[Op] = []
        """Ops whose hook is past, and whose storages were saved by an operator that was not over then."""
        self._next = 0

    def number(self, saved: SavedStorage, number: int) -> None:
        """Note that `saved` is the plan's storage of that number."""
        saved.number, self.storages[number] = number, saved
        saved.stays |= number in self.staying

    def at(self, hook: int) -> None:
        """Note the latest hook."""
        self.hook = hook
        self.growth_bytes = self.program.rows[hook].growth + self.margin_bytes

    def due(self, reached: int) -> Sequence[Row]:
        """Rows that were not run yet, up to that of hook `reached`, in order: they are run now."""
        since, self._next = self._next, max(self._next, reached + 1)
        return self.program.rows[since : self._next]

    def coming(self, row: Row) -> list[SavedStorage]:
        """Storages whose copies back start after that row's own use."""
        return [self.storages[number] for number in row.ins if number in self.storages]

    def is_up_to(self, hook: int) -> bool:
        """Whether all rows up to that of `hook` were run, and no others."""
        return self._next == hook + 1

    def rejoin(self, hook: int) -> None:
        """Continue after `hook`: the loop has run all rows up to it."""
        self.at(hook)
        self._next = hook + 1
