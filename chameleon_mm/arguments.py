"""Checks the types of arguments; a wrong one is refused in one line: what was expected, what came, what to do.

check_type("pool", pool, PinnedPool, "a PinnedPool, or None for one of its own", "pass PinnedPool('8GiB')")
check_keywords("install", arguments, save_on_cpu)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable


def check_type(name: str, value: object, kind: type, expected: str, way_out: str) -> None:
    """Raise `TypeError` unless `value` is of `kind`. `name` is the argument's."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected {expected}, got {describe(value)}; {way_out}")


def check_method(name: str, value: object, method: str, expected: str, way_out: str) -> None:
    """Raise `TypeError` unless `value` is an object with that method: of a protocol, which many classes may keep."""
    if isinstance(value, type) or not callable(getattr(value, method, None)):
        raise TypeError(f"{name}: expected {expected}, got {describe(value)}; {way_out}")


def check_keywords(what: str, given: Iterable[str], function: Callable[..., object], *, but: Iterable[str] = ()) -> None:
    """Raise `TypeError` for a keyword among `given` that `function` does not take, or that is one of `but`. `what` is whose
    keywords they are."""
    known = [name for name in inspect.signature(function).parameters if name not in but]
    for name in given:
        if name not in known:
            raise TypeError(
                f"{what}: expected arguments of {function.__name__} ({', '.join(known)}), got {name}=; leave it out"
            )


def describe(value: object) -> str:
    """Text of `value` for an error message, in one line: in full where it is short by its nature, else by its type."""
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    if value is None or isinstance(value, (bool, int, float, str)):
        return f"{value!r} ({type(value).__name__})"
    return f"an object of type {type(value).__name__}"
