"""Checks the types of arguments; a wrong one is refused in one line: what was expected, what came, what to do.

check_type("pool", pool, PinnedPool, "a PinnedPool, or None for one of its own", "pass PinnedPool('8GiB')")
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def uncompiled(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Hide `method` from dynamo, which after a graph break compiles whatever is called next, and knows no streams."""

    @functools.wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        import torch  # here: `torch.compiler.disable` as a decorator would import dynamo with the package

        hidden: Callable[_P, _R] = torch.compiler.disable(method)
        return hidden(*args, **kwargs)

    return run


def check_type(name: str, value: object, kind: type, expected: str, way_out: str) -> None:
    """Raise `TypeError` unless `value` is of `kind`. `name` is the argument's."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected {expected}, got {describe(value)}; {way_out}")


def describe(value: object) -> str:
    """Text of `value` for an error message, in one line: in full where it is short by its nature, else by its type."""
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    if value is None or isinstance(value, (bool, int, float, str)):
        return f"{value!r} ({type(value).__name__})"
    return f"an object of type {type(value).__name__}"
