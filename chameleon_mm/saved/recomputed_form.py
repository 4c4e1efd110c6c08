"""`RecomputedForm`: a recipe stands for the bytes of a dropped storage, which are nowhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from chameleon_mm.saved.form import Form

if TYPE_CHECKING:
    from chameleon_mm.saved.checksums import ChecksumSlot
    from chameleon_mm.saved.recipe import Recipe


class Original(NamedTuple):
    """What is known of a storage that was dropped, or whose recipe is to be proved: its checksum, and what an error names."""

    checksum: ChecksumSlot
    nbytes: int
    dtype: str
    module: str
    """Path of the module that saved it; "": not known."""
    operators: list[str]
    """Names of the operators that run again for it, in order."""
    note_proven: Callable[[], None]
    """Has later steps drop it."""
    ban: Callable[[], None]
    """Has later steps keep it."""

    def __str__(self) -> str:
        where = f" in module {self.module!r}" if self.module else ""
        return f"{self.nbytes} bytes of {self.dtype}, result of {self.operators[-1]}{where}"


class RecomputedForm(Form):
    """The form of a storage whose bytes are not kept: its recipe has the calls that make them."""

    __slots__ = ("original", "recipe")

    has_copy = False

    def __init__(self, recipe: Recipe, original: Original) -> None:
        self.recipe: Recipe | None = recipe
        self.original: Original | None = original

    def drop(self) -> None:
        """Let go of what the recipe needs."""
        self.recipe = self.original = None
