"""Forecasts of how far the model's own allocation will grow until memory is checked again: what a budget leaves free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from chameleon_mm.policy import Headroom

PREFETCH_HORIZON = 8
"""Checks ahead whose growth a prefetch leaves free: what is prefetched stays on the device at least until the next uses."""


class Forecast(ABC):
    """Growth of the model's allocation, in bytes."""

    __slots__ = ()

    follows_plan = False
    """Whether a plan has room for what comes, hook for hook."""

    @abstractmethod
    def growth(self, checks: int = 0) -> int | None:
        """The most that is allocated until the next check, or until any of the next `checks`; None: not known."""

    def has(self, number: int) -> bool:
        """Whether the copy back of the plan's storage of that number, at this hook, is in the growth."""
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
    """Forecast of a step that is known hook for hook, while nobody can say what of it is on the device."""

    def __init__(self) -> None:
        self.hook = -1
        """Number of the latest hook at which something may be due; -1: none yet."""
        self._growth_after: Callable[[int, int], int] | None = None

    def follow(self, growth_after: Callable[[int, int], int], hook: int) -> None:
        """Follow the step of which `growth_after` tells how many bytes allocation grows at most from one hook until so many
        checks of memory behind the next one. `hook`: the latest."""
        self._growth_after, self.hook = growth_after, hook

    def forget(self) -> None:
        """Forget the step."""
        self._growth_after = None

    def growth(self, checks: int = 0) -> int | None:
        return None if self._growth_after is None else self._growth_after(self.hook, checks)
