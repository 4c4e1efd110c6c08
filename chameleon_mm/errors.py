"""Errors: each says what was expected, what it got and the way out, and is a built-in a caller would already catch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable


class ChameleonError(Exception):
    """Base of every error that chameleon_mm raises on purpose."""


class InfeasibleBudget(ChameleonError, ValueError):
    """The HBM budget cannot be met by swapping: it is below what never moves (parameters, gradients, optimizer state)."""

    def __init__(self, message: str = "", *, smallest_bytes: int | None = None, smallest_host_bytes: int | None = None) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes
        """The smallest HBM budget for which there is a plan within the host budget; None: not known."""
        self.smallest_host_bytes = smallest_host_bytes
        """The pinned memory that a plan for this HBM budget needs, where that is what is missing."""


class HostMemoryExhausted(ChameleonError, MemoryError):
    """A pinned-host allocation passed its limit, or the machine could not pin that much."""


class BlockReleasedError(ChameleonError, ValueError):
    """A pinned block was used, or a view of it asked for, after its release."""


class BlockInUseError(ChameleonError, BufferError):
    """A pinned block was to be released while a tensor, an array or a memoryview of it was alive."""


class BlockCorruptedError(ChameleonError, RuntimeError):
    """A checking allocator found that somebody wrote beside a block."""


class PoolStateError(ChameleonError, RuntimeError):
    """A pinned pool was closed while blocks of it were live, or used after it was closed."""


class SessionClosedError(ChameleonError, RuntimeError):
    """A session was used outside `with session:`, or after it was closed."""


class TransferFailed(ChameleonError, RuntimeError):
    """A copy between host and device could not be handed to the device."""


class SwapMismatch(ChameleonError, RuntimeError):
    """Verify mode found a saved tensor that came back with other bits than it went out with."""


class RecomputeMismatch(ChameleonError, RuntimeError):
    """A saved tensor that was recomputed has other bits than the original had. Gradients of the step are wrong; later steps do
    not recompute that tensor."""


class DeviceUnavailable(ChameleonError, RuntimeError):
    """The device that was asked for is not on this machine, or not in a state in which it can be used."""


class NativeBuildError(ChameleonError, RuntimeError):
    """An optional C++ helper could not be built."""


class ProgramInterrupted(KeyboardInterrupt):
    """The program that `chameleon-mm run` ran was interrupted, which was told: the process is to end as Python ends then."""


# --- Checks the types of arguments; a wrong one is refused in one line: what was expected, what came, what to do
#
# check_type("pool", pool, PinnedPool, "a PinnedPool, or None for one of its own", "pass PinnedPool('8GiB')")
# check_keywords("install", arguments, save_on_cpu)


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
