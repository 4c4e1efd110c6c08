"""Budgets as callers give them: whole numbers of bytes, or an error that says so.

hbm_budget = whole_bytes("hbm_budget", hbm_budget)
"""

from __future__ import annotations

from operator import index


def whole_bytes(name: str, nbytes: int) -> int:
    """`nbytes` as an int. `name` is the argument's. Raises `TypeError` for what is no whole number, NaN among it."""
    try:
        return index(nbytes)
    except TypeError:
        raise TypeError(
            f"{name}: expected a whole number of bytes, got {nbytes!r} ({type(nbytes).__name__}); give an int"
        ) from None
