"""Observer that makes the simulated device strict, for the tests: where a GPU is lenient, this finds the bug each time.

    observe_all()                                         # every SimDevice from now on; conftest.py calls it
    python -m tests.observed PROGRAM [ARGS]               # a script (or -m MODULE), with every SimDevice observed
    device = unchecked(SimDevice())                       # poison and late copies alone: a missing wait gives wrong bytes

* A copy's bytes move as late as the ordering allows; until then its destination holds poison.
* Memory that is handed out or given back is filled with poison.
* Every access carries a vector clock: two that conflict with no happens-before between them raise `SimRaceError`.
* Freeing memory is a write by the stream that it belongs to, because the caching allocator gives the block to that stream's
  next allocation. So is allocating it: the block had an earlier owner.
* A pending copy holds both ends weakly. A lost end, or a use of memory that was given back, raises `SimLifetimeError`.
"""

from __future__ import annotations

import functools
from typing import Any

from chameleon_mm.device.sim import SimDevice
from tests.observed.errors import SimError, SimLifetimeError, SimRaceError
from tests.observed.late_copy import POISON_BYTE, poison
from tests.observed.observer import StrictObserver

__all__ = [
    "POISON_BYTE", "SimError", "SimLifetimeError", "SimRaceError", "StrictObserver", "observe_all", "poison", "unchecked",
]  # fmt: skip


def observe_all() -> None:
    """Have every `SimDevice` that this process makes from now on observed."""
    make = SimDevice.__init__
    if hasattr(make, "__wrapped__"):
        return

    @functools.wraps(make)
    def observed(self: SimDevice, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        # Planning of large models writes no bytes: it has too many accesses to compare.
        self.attach_observer(StrictObserver(check_races=kwargs.get("moves_bytes", True)))

    SimDevice.__init__ = observed  # type: ignore[method-assign]  # that no test can forget it


def unchecked(device: SimDevice) -> SimDevice:
    """`device`, observed without vector clocks."""
    device.attach_observer(StrictObserver(check_races=False))
    return device
