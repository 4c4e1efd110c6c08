"""Cache of earlier steps, each with its plan. It finds a cached step with which the running step agrees so far.

    cache = StepCache(capacity=16)
    cache.begin_step()             # guesses: the step that followed the latest steps earlier
    cache.follow(hook, feature)    # at each hook, or only where the step differs from `cache.current`. True: `cache.current`,
                                   # the same or another step, agrees. False: none agrees
    cache.end_step(record)         # the entry that equals the step at every hook; None: the step is new
    cache.put(record, plan)        # a full cache evicts the least recently used entry

    A  f f f g h      A and B have 3 hooks in common: a step that follows A and diverges from it at hook 3 may be B,
    B  f f f x y      but no step that differs from A earlier

Features are compared one by one and by value, so hash collisions cannot confuse steps. A caller that knows that a hook agrees
with `cache.current`, such as the light profiler, need not call `follow`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import compress, count
from operator import ne
from typing import Generic, TypeVar

from chameleon_mm.record.light_profiler import StepRecord

_Plan = TypeVar("_Plan")

CONTEXTS_PER_STEP = 4
"""Maximum number of learned contexts per cached step: contexts of one and of two steps, ended runs, some outdated ones."""

_SHORTEST_RUN = 3

_Context = tuple[int, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class CachedStep(Generic[_Plan]):
    """Earlier step with its plan."""

    record: StepRecord
    plan: _Plan
    common: dict[int, int] = field(default_factory=dict, repr=False)
    """Number of leading hooks in common with each other cached step, by that step's fingerprint."""
    repeats: bool = False
    """True if the step was repeated. A step that was not is expected only if there is no other: it may be an outlier."""

    @property
    def fingerprint(self) -> int:
        return self.record.fingerprint


class StepCache(Generic[_Plan]):
    """Cache of the most recently used `capacity` steps. Not thread-safe. Raises `ValueError` for a capacity below 1.

    A call of `follow` costs one comparison, or one per cached step where the step differs from the step that it followed. `put`
    compares the new step with all cached steps.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"StepCache: expected a capacity of 1 or more, got {capacity}; without a plan there is no need")
        self.capacity = capacity
        self._entries: OrderedDict[int, CachedStep[_Plan]] = OrderedDict()
        """Cached steps by fingerprint, least recently used first."""
        self._followed_by: dict[_Context, tuple[int, bool]] = {}
        """By the last two steps or the last step: the step that followed, and True if it did so the last time. Oldest first."""
        self._runs_ended: dict[_Context, tuple[int, bool]] = {}
        """By a number of repetitions of the last step: the step that followed, as above. Example: evaluation every n steps."""
        self._before: _Context = ()
        self._run = 0
        """Number of consecutive repetitions of the last step."""
        self.current: CachedStep[_Plan] | None = None
        """Cached step with which the running step agrees. After a divergence: the step with which it agreed last."""
        self._agreed = 0
        self._diverged = False

    def put(self, record: StepRecord, plan: _Plan) -> None:
        """Store `plan` for steps like `record`, replacing an earlier plan."""
        fingerprint = record.fingerprint
        repeats = fingerprint in self._entries
        self.forget(fingerprint)
        while len(self._entries) >= self.capacity:
            self.forget(next(iter(self._entries)))
        entry = CachedStep(record=record, plan=plan, repeats=repeats)
        for other in self._entries.values():
            other.common[fingerprint] = entry.common[other.fingerprint] = _common(record, other.record)
        self._entries[fingerprint] = entry

    # --- while a step runs

    def begin_step(self) -> CachedStep[_Plan] | None:
        """Begin a step. Returns the expected cached step, or None if the cache is empty."""
        self._agreed = 0
        self._diverged = False
        self.current = self._expected()
        return self.current

    def follow(self, hook: int, feature: Hashable) -> bool:
        """Note that hook number `hook` has this feature. Returns False from the first hook on at which no cached step agrees.

        Hooks between two calls count as agreeing with `current`. After True, `current` agrees up to this hook; it may have
        changed to another step.
        """
        current = self.current
        if current is None or self._diverged:
            return False
        self._agreed = hook
        features = current.record.features
        if hook < len(features) and features[hook] == feature:
            self._agreed = hook + 1
            return True
        for other in reversed(self._entries.values()):
            if other is not current and current.common.get(other.fingerprint, -1) >= hook:
                features = other.record.features
                if hook < len(features) and features[hook] == feature:
                    self.current = other
                    self._agreed = hook + 1
                    return True
        self._diverged = True
        return False

    def adopt(self, hook: int, record: StepRecord, plan: _Plan) -> None:
        """Store a step that agrees with the running one up to hook number `hook`, and follow it."""
        self.put(record, plan)
        self.current = self._entries[record.fingerprint]
        self._agreed = hook + 1
        self._diverged = False

    def entries(self) -> tuple[CachedStep[_Plan], ...]:
        """Return all cached steps, least recently used first."""
        return tuple(self._entries.values())

    def agreeing(self) -> Iterator[CachedStep[_Plan]]:
        """Yield the cached steps that agree with all hooks noted so far, `current` first. After a divergence there are none."""
        current = self.current
        if current is None or self._diverged:
            return
        yield current
        for other in self._entries.values():
            if other is not current and current.common[other.fingerprint] >= self._agreed:
                yield other

    def end_step(self, record: StepRecord) -> CachedStep[_Plan] | None:
        """End the step with this `record`. Returns the cached step that equals it up to the last hook, or None.

        `follow` need not have been called for every hook.
        """
        entry = self._entries.get(record.fingerprint)
        if entry is not None and entry.record.features != record.features:
            entry = None
        if entry is not None:
            self._entries.move_to_end(record.fingerprint)
            entry.repeats = True
        self._learn(record.fingerprint)
        return entry

    def abandon_step(self) -> None:
        """End a step that did not complete. Nothing is learned from it, and the next step has no predecessor."""
        self.current, self._diverged = None, False
        self._before, self._run = (), 0

    # --- learned order of steps

    def _expected(self) -> CachedStep[_Plan] | None:
        run_ended = self._runs_ended.get(self._run_so_far)
        followers = [run_ended if run_ended is not None and run_ended[1] else None]
        followers += map(self._followed_by.get, _contexts(self._before))
        numbers = (*(follower[0] for follower in followers if follower is not None), *reversed(self._entries))
        entries = [entry for entry in map(self._entries.get, numbers) if entry is not None]
        return next((entry for entry in entries if entry.repeats), entries[0] if entries else None)

    @property
    def _run_so_far(self) -> _Context:
        return (*self._before[-1:], self._run)

    def _learn(self, fingerprint: int) -> None:
        goes_on = self._before[-1:] == (fingerprint,)
        # Contexts of two steps cover shorter runs. A running run is noted only if a run of this length ended before.
        if self._run >= _SHORTEST_RUN and (not goes_on or self._run_so_far in self._runs_ended):
            self._note(self._runs_ended, self._run_so_far, fingerprint, sure=False)
        for context in _contexts(self._before):
            self._note(self._followed_by, context, fingerprint, sure=True)
        self._run = self._run + 1 if goes_on else 1
        self._before = (*self._before, fingerprint)[-2:]

    def _note(self, followed_by: dict[_Context, tuple[int, bool]], context: _Context, fingerprint: int, *, sure: bool) -> None:
        """Note that step `fingerprint` followed `context`. `sure`: one observation is enough."""
        if context not in followed_by:
            followed_by[context] = (fingerprint, sure)
        else:  # a prediction must fail twice, as in a branch predictor: one evaluation step changes nothing
            follower, sure = followed_by.pop(context)
            holds = follower == fingerprint
            followed_by[context] = (follower, holds) if holds or sure else (fingerprint, False)
        while len(followed_by) > CONTEXTS_PER_STEP * self.capacity:
            del followed_by[next(iter(followed_by))]

    def forget(self, fingerprint: int) -> None:
        """Forget the step with this fingerprint, if it is cached."""
        if self._entries.pop(fingerprint, None) is not None:
            for other in self._entries.values():
                del other.common[fingerprint]


def _contexts(before: _Context) -> list[_Context]:
    """Return the contexts that predict the next step: the last two steps, then only the last step."""
    return [before[start:] for start in range(len(before))]


def _common(one: StepRecord, other: StepRecord) -> int:
    """Return the number of leading hooks that two steps have in common."""
    different = compress(count(), map(ne, one.features, other.features))
    return next(different, min(one.num_hooks, other.num_hooks))
