"""Error classes, each derived from a built-in error. A message says what was expected, what was found and what to do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches


class ChameleonError(Exception):
    """Base of every error that chameleon_mm raises on purpose."""


class InfeasibleBudget(ChameleonError, ValueError):
    """No plan meets the budgets. The HBM budget is too small, because some memory never moves (parameters, gradients, optimizer
    state); or the host budget is too small for it."""

    def __init__(self, message: str = "", *, smallest_bytes: int | None = None, smallest_host_bytes: int | None = None) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes
        """Smallest HBM budget that has a plan within the host budget; None if unknown."""
        self.smallest_host_bytes = smallest_host_bytes
        """Pinned memory that a plan for this HBM budget needs; None unless the host budget is too small."""


class HostMemoryExhausted(ChameleonError, MemoryError):
    """A host allocation exceeded its limit, or the machine could not allocate or pin that much memory."""


class BlockReleasedError(ChameleonError, ValueError):
    """A pinned block was used, or a view of it was requested, after its release."""


class BlockInUseError(ChameleonError, BufferError):
    """A pinned block cannot be released while a tensor, an array or a memoryview of it is alive."""


class PoolStateError(ChameleonError, RuntimeError):
    """A pinned pool was closed while blocks of it were live, or used after it was closed."""


class SessionClosedError(ChameleonError, RuntimeError):
    """A session was used outside `with session:`, or after it was closed."""


class TransferFailed(ChameleonError, RuntimeError):
    """A copy between host and device could not be enqueued."""


class RecomputeMismatch(ChameleonError, RuntimeError):
    """The bits of a recomputed saved tensor differ from the original's. The step's gradients are wrong. Later steps do not
    recompute that tensor."""


class DeviceUnavailable(ChameleonError, RuntimeError):
    """The requested device is not on this machine, or is not in a usable state."""


class NativeBuildError(ChameleonError, RuntimeError):
    """An optional C++ helper could not be built."""


class ProgramInterrupted(KeyboardInterrupt):
    """An interrupt ended the program of `chameleon-mm run` and was reported. The process must end as Python does after one."""


# --- Checks of argument types. The error is one line: what was expected, what was found, what to do
#
# check_type("pool", pool, PinnedPool, "a PinnedPool, or None for one of its own", "pass PinnedPool('8GiB')")
# check_keywords("install", arguments, save_on_cpu)


def check_type(name: str, value: object, kind: type | tuple[type, ...], expected: str, way_out: str) -> None:
    """Raise `TypeError` unless `value` is an instance of `kind`. `name` is the argument's name."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected {expected}, got {describe(value)}; {way_out}")


def check_method(name: str, value: object, method: str, expected: str, way_out: str) -> None:
    """Raise `TypeError` unless `value` is an instance with that method. For arguments of a protocol's type."""
    if isinstance(value, type) or not callable(getattr(value, method, None)):
        raise TypeError(f"{name}: expected {expected}, got {describe(value)}; {way_out}")


def check_keywords(what: str, given: Iterable[str], function: Callable[..., object], *, but: Iterable[str] = ()) -> None:
    """Raise `TypeError` for a keyword of `given` that `function` does not take, or that is in `but`. `what` begins the text."""
    known = [name for name in inspect.signature(function).parameters if name not in but]
    for name in given:
        if name not in known:
            way_out = "".join(f"did you mean {near}=?" for near in get_close_matches(name, known, 1)) or "leave it out"
            raise TypeError(f"{what}: expected arguments of {function.__name__} ({', '.join(known)}), got {name}=; {way_out}")


def describe(value: object) -> str:
    """Describe `value` for an error message in one line: None, numbers and strings in full, other objects by their type."""
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    if value is None or isinstance(value, (bool, int, float, str)):
        return f"{value!r} ({type(value).__name__})"
    return f"an object of type {type(value).__name__}"
