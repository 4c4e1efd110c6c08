"""The part of a plan that is about what is recomputed, and what the steps that followed it have shown of that.

plan.refuse(call)                     # why a call must not run again
plan.note_refusal(number, refusal)    # a storage was not dropped, now or for good
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from chameleon_mm.device.operators import running_statistics
from chameleon_mm.profiler.calls import Call
from chameleon_mm.saved.recipe import Refusal
from chameleon_mm.trace.replayable import base_name
from chameleon_mm.trace.trace import BirthPlace

ATTEMPTS = 4
"""Steps that try to drop a storage where something of the moment is in the way. After them it is not recomputed."""


class Followed(Protocol):
    """Interface of what knows which plan the running step follows."""

    @property
    def recompute(self) -> RecomputePlan | None:
        """The plan's part about recomputation, as far as the step is known by now; None: nothing is recomputed."""

    @property
    def may_recompute(self) -> bool:
        """Whether the step may follow a plan that recomputes something."""


@dataclass(slots=True, kw_only=True, eq=False)
class RecomputePlan:
    """Part of a plan that is about what is recomputed."""

    admitted: frozenset[str]
    """Base names of the operators that may run again."""
    held: Mapping[BirthPlace, int]
    """Numbers of the storages in the trace that nobody saves and that are held, by where in the step they are born."""
    proven: set[int] = field(default_factory=set)
    """Numbers of the storages that a recipe at their place has made bit for bit, beside the original."""
    refused: dict[int, Refusal] = field(default_factory=dict)
    """Numbers of the storages that are not recomputed, and why."""
    is_on_trial: bool = False
    """Whether the step that follows it is to tell how long steps under the plan take."""
    is_typical: bool = True
    """Whether the step that follows it, or did, takes the time that others will: no recipe ran beside its original, and nothing
    was swapped that was to be dropped."""
    attempts: Counter[int] = field(default_factory=Counter)
    """How often something kept a storage from being dropped that another step need not meet, by the storage's number."""
    inner_bytes: int = 0
    """Bytes that an operator which may run again holds inside itself, at most, while it runs."""
    banned: set[str] = field(default_factory=set)
    """Names of the operators of recipes that made other bits than the original had, for the report."""
    module_of: Callable[[int], str] = field(default=lambda number: "")
    """Path of the module in which a storage was saved first, by its number; "": not known."""

    def refuse(self, call: Call) -> Refusal | None:
        """Why `call` must not run again; None: it may."""
        operation = call.operation
        name = base_name(operation.func.name())
        if name not in self.admitted:
            return Refusal("an operator that is not on the list", name)
        if running_statistics(operation.facts, call.args):
            return Refusal("a batch norm with running statistics", name)
        if not operation.grad_enabled:
            return Refusal("made without gradients, as in a custom function", name)
        return None

    def ban(self, number: int, operators: Sequence[str]) -> None:
        """Note that a recipe, of these operators, made other bits than the original had: it is not used any more."""
        self.proven.discard(number)
        self.banned.update(operators)
        self.note_refusal(number, Refusal("other bits than the original", ", ".join(dict.fromkeys(operators))))

    def note_refusal(self, number: int, refusal: Refusal) -> None:
        """Note why a storage was not dropped that was to be."""
        self.attempts[number] += 1
        if refusal.lasts or self.attempts[number] >= ATTEMPTS:
            self.refused[number] = refusal
