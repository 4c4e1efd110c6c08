"""Position of a step in a compiled plan, and forecasts of how far allocation grows until memory is checked again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

from chameleon_mm.plan.rule import Headroom
from chameleon_mm.plan.step_program import Op, Row, StepProgram
from chameleon_mm.swap.saved_storage import SavedStorage

# --- Forecasts of how far the model's own allocation will grow until memory is checked again: what a budget leaves free

PREFETCH_HORIZON = 8
"""Checks ahead whose growth a prefetch leaves free: what is prefetched stays on the device at least until the next uses."""


class Forecast(ABC):
    """Growth of the model's allocation, in bytes."""

    __slots__ = ()

    follows_plan = False
    """True if a plan has room for what comes, hook for hook."""

    @abstractmethod
    def growth(self, checks: int = 0) -> int | None:
        """The most that is allocated until the next check, or until any of the next `checks`; None: not known."""

    def has(self, number: int) -> bool:
        """True if the growth includes the copy back of the plan's storage of that number, at this hook."""
        return False

    def until_next_check(self) -> int | None:
        """The most that is allocated until the next check, what a plan itself brings back included; None: not known."""
        return self.growth()


class LearnedForecast(Forecast):
    """Forecast from the same checks of the step before."""

    def __init__(self, headroom: Headroom) -> None:
        self._headroom = headroom

    def growth(self, checks: int = 0) -> int | None:
        return self._headroom.need(checks)


class HighestForecast(Forecast):
    """Forecast of the most that the step before took between any two checks."""

    def __init__(self, headroom: Headroom) -> None:
        self._headroom = headroom

    def growth(self, checks: int = 0) -> int | None:
        return self._headroom.most()


class TraceForecast(Forecast):
    """Forecast of a step that is known hook for hook, while it is unknown which of its storages are on the device."""

    def __init__(self) -> None:
        self.hook = -1
        """Number of the latest hook at which something may be due; -1: none yet."""
        self._growth_after: Callable[[int, int], int] | None = None

    def follow(self, growth_after: Callable[[int, int], int], hook: int) -> None:
        """Use `growth_after(hook, checks)` as the forecast: the maximum growth in bytes from that hook until `checks` checks of
        memory after the next one. `hook`: the latest."""
        self._growth_after, self.hook = growth_after, hook

    def forget(self) -> None:
        """Forget the step."""
        self._growth_after = None

    def growth(self, checks: int = 0) -> int | None:
        return None if self._growth_after is None else self._growth_after(self.hook, checks)


# --- way


class Way(Forecast):
    """A step that follows a program, and the forecast of its memory: the plan has room for the model and for its own swap-ins.

    Whoever runs the step's hooks moves it on: the loop, or the director and the general executor.
    """

    __slots__ = (
        "_next", "epoch", "first_saves", "growth_bytes", "hook", "late", "margin_bytes", "program", "staying", "storages",
    )  # fmt: skip

    follows_plan = True

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

    def has(self, number: int) -> bool:
        return (self.hook, number) in self.program.backs

    def growth(self, checks: int = 0) -> int:
        return 0

    def until_next_check(self) -> int:
        return self.growth_bytes
