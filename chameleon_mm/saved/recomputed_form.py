"""`RecomputedForm`: a recipe stands for the bytes of a dropped storage, which are nowhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chameleon_mm.saved.form import Form

if TYPE_CHECKING:
    from chameleon_mm.saved.recipe import Recipe


class RecomputedForm(Form):
    """The form of a storage whose bytes are not kept: its recipe has the calls that make them."""

    __slots__ = ("recipe",)

    has_copy = False

    def __init__(self, recipe: Recipe) -> None:
        self.recipe: Recipe | None = recipe

    def host_bytes(self, nbytes: int) -> int:
        return 0

    def drop(self) -> None:
        """Let go of what the recipe needs."""
        self.recipe = None
