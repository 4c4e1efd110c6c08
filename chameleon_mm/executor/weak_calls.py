"""Calls of an executor by what must not keep it alive: what it holds itself, and what watches a step.

ended = partial(weak_reliance_ended, weakref.ref(executor))
at_end = partial(weak_settle, weakref.ref(executor))
before_write = partial(weak_before_write, weakref.ref(executor))
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from chameleon_mm.profiler.calls import Value
from chameleon_mm.saved.source import Reliance

if TYPE_CHECKING:
    from chameleon_mm.executor.executor import Executor


def weak_before_write(executor: weakref.ref[Executor], value: Value) -> None:
    """Call `before_write` of an executor, while there is one."""
    it = executor()
    if it is not None:
        it.before_write(value)


def weak_reliance_ended(executor: weakref.ref[Executor], reliance: Reliance) -> None:
    """Tell an executor's lock, while there is one."""
    it = executor()
    if it is not None:
        it.hook_lock.has_ended(reliance)


def weak_settle(executor: weakref.ref[Executor], task: int) -> None:
    """Have an executor compare what was recomputed in the backward that ends. Raises `RecomputeMismatch`."""
    it = executor()
    if it is not None:
        it.settle(task)
