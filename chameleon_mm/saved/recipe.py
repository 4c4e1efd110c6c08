"""Recipes of dropped storages: flat lists of calls, each of whose tensors is a source or an earlier call's result.

    recipe = build(value, source_of, refuse)     # or a `Refusal`, with the reason
    recipe.sources                               # what it needs: claims, held storages, parameters
    storage = recipe.replay([storage of each source])

It is what ran in this step, arguments and random state included, not what a step like it ran. It holds its sources, and no
operator that is older than its calls. A temporary dies with the last call that reads it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from chameleon_mm.profiler.calls import (
    Argument,
    Call,
    Geometry,
    Operation,
    Result,
    Value,
    leaves_of,
    map_leaves,
    tensors_of,
    written_tensors,
)
from chameleon_mm.profiler.kernel_settings import applied
from chameleon_mm.saved.source import Reliance, Source
from chameleon_mm.trace.replayable import base_name
from chameleon_mm.units import allocated_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chameleon_mm.saved.recomputed_form import Original
    from chameleon_mm.saved.saved_storage import SavedStorage

MOST_CALLS = 256
"""Number of calls in one recipe at most: what is that far from anything that is kept is cheaper to swap."""


class Refusal(NamedTuple):
    """Reason why a storage is not recomputed, and the operator that it is about."""

    reason: str
    operator: str = ""
    lasts: bool = True
    """Whether it holds for the same place of later steps, too."""


class Proof(NamedTuple):
    """A recipe that is tried at the first use of its original, which is kept for that use."""

    recipe: Recipe
    original: Original
    refuse: Callable[[Refusal], None]
    """Told why it could not be tried."""


class Slot(NamedTuple):
    """Place of an argument among the storages of a replay, in place of a tensor."""

    place: int
    geometry: Geometry


class Step(NamedTuple):
    """One call of a recipe."""

    operation: Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    makes: list[tuple[Result, int]]
    """Values that are needed, by the tensor of the call that each is in, and their places."""
    dies: list[int]
    """Places that no later call reads."""


class Recomputed(NamedTuple):
    """Storages that a replay made."""

    storage: torch.UntypedStorage
    siblings: list[tuple[weakref.ref[SavedStorage], torch.UntypedStorage]]
    """Others that were dropped and that one of its calls makes, too."""


class Recipe:
    """The calls that make one storage from its sources."""

    __slots__ = ("_nbytes", "_result", "_source_places", "_steps", "peak_bytes", "reliances", "sources")

    def __init__(
        self, steps: list[Step], sources: list[Source], source_places: list[int], *, result: int, values: Sequence[Value]
    ) -> None:
        """`values`: those whose bytes are at each place."""
        self._steps = steps
        self.sources = sources
        self._source_places = source_places
        self._result = result
        self._nbytes = [value.nbytes for value in values]
        self.reliances: list[Reliance] = []
        """Watches of the sources that it may rely on by rule 2 alone. Held here: they end with the recipe."""
        self.peak_bytes = _peak_bytes(steps, values)
        """Device memory at most while it is replayed, its result included, its sources and what operators hold inside not."""

    @property
    def operators(self) -> list[str]:
        """Names of the operators that run again, in order."""
        return [base_name(step.operation.func.name()) for step in self._steps]

    @property
    def saved_sources(self) -> list[SavedStorage]:
        """Saved storages among its sources, in order."""
        return [source.claim.saved for source in self.sources if source.claim is not None]

    def replay(self, storages: Sequence[torch.UntypedStorage]) -> Recomputed:
        """Run the calls on the current stream and return what they made. `storages`: those of `sources`, in that order, ready
        for it.

        Without gradients, autocast and modes of torch functions, with the random state and the settings that each call had;
        generators and settings are put back. Raises `RuntimeError` where a call makes another size than it did.
        """
        at: list[torch.UntypedStorage | None] = [None] * len(self._nbytes)
        for place, storage in zip(self._source_places, storages, strict=True):
            at[place] = storage
        siblings: list[tuple[weakref.ref[SavedStorage], torch.UntypedStorage]] = []
        with torch.no_grad(), torch._C._DisableAutocast(), torch._C.DisableTorchFunction():
            for step in self._steps:
                self._run(step, at, siblings)
        made = at[self._result]
        assert made is not None
        return Recomputed(made, siblings)

    def _run(
        self,
        step: Step,
        at: list[torch.UntypedStorage | None],
        siblings: list[tuple[weakref.ref[SavedStorage], torch.UntypedStorage]],
    ) -> None:
        operation = step.operation

        def tensor(slot: Slot) -> Tensor:
            storage = at[slot.place]
            assert storage is not None
            return slot.geometry.over(storage)

        args, kwargs = (map_leaves(given, Slot, tensor) for given in (step.args, step.kwargs))
        with applied(operation.settings), _random_state(operation):
            out = operation.func(*args, **kwargs)
        tensors = {True: tensors_of(out), False: written_tensors(operation.facts, args, kwargs)}
        for t in tensors[False]:
            overwritten = t.untyped_storage()
            siblings[:] = [one for one in siblings if one[1] is not overwritten]
        for result, place in step.makes:
            made = at[place] = tensors[result.returned][result.position].untyped_storage()
            if made.nbytes() != self._nbytes[place]:
                raise RuntimeError(
                    f"a saved tensor that is recomputed: expected {self._nbytes[place]} bytes from {operation.func.name()}, as "
                    f"in forward, got {made.nbytes()}; make the session SwapSession(recompute=False) and report this"
                )
        for result, saved in operation.dropped:
            siblings.append((saved, tensors[result.returned][result.position].untyped_storage()))
        for place in step.dies:
            at[place] = None


@contextmanager
def _random_state(operation: Operation) -> Iterator[None]:
    """Context in which the operator's generator has the state that it had when it ran."""
    if operation.random_state is None:
        yield
        return
    generator, state = operation.random_state
    now = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(now)


SourceOf = Callable[[Value], Source | None]


Refuse = Callable[[Call], Refusal | None]
"""Tells why a call must not run again; None: it may."""


def build(value: Value, source_of: SourceOf, refuse: Refuse) -> Recipe | Refusal:
    """Recipe for `value`, from what `source_of` knows to be there; or why there is none.

    source_of: the source with a value's bytes; None: it has to be recomputed, too.
    """
    calls: dict[int, Call] = {}
    places: dict[int, int] = {}
    sources: list[Source] = []
    source_places: list[int] = []
    values: list[Value] = []
    made: dict[int, list[tuple[Result, int]]] = {}
    stack = [value]
    while stack:
        one = stack.pop()
        if id(one) in places:
            continue
        place = places[id(one)] = len(values)
        values.append(one)
        source = None if one is value else source_of(one)
        if source is not None:
            sources.append(source)
            source_places.append(place)
            continue
        call = one.call
        refusal = _refusal(one, refuse, is_result=one is value)
        if refusal is not None or call is None or one.result is None:
            return refusal or Refusal("an input that is gone")
        number = call.operation.number
        made.setdefault(number, []).append((one.result, place))
        if number not in calls:
            calls[number] = call
            if len(calls) > MOST_CALLS:
                return Refusal("too long a chain", call.operation.facts.name)
            refusal = _reads_uninitialised(call)
            if refusal is not None:
                return refusal
            stack.extend(argument.value for argument in call.arguments())
    steps = [_step(calls[number], places, made[number]) for number in sorted(calls)]
    _note_last_reads(steps, places[id(value)])
    return Recipe(steps, sources, source_places, result=places[id(value)], values=values)


def _reads_uninitialised(call: Call) -> Refusal | None:
    """Why `call` cannot run again: it reads memory that no operator was seen to fill, so something else has."""
    facts = call.operation.facts
    fills = bool(facts.mutated_names) and (facts.overwrites or not facts.in_place)
    if not fills and any(argument.value.is_uninitialised for argument in call.arguments()):
        return Refusal("an input that nobody was seen to fill", facts.name)
    return None


def _refusal(value: Value, refuse: Refuse, *, is_result: bool) -> Refusal | None:
    call = value.call
    if call is None:
        return Refusal("it was there before" if is_result else "an input that is gone")
    if is_result and value.is_uninitialised:
        return Refusal("nobody was seen to fill it", call.operation.facts.name)
    if call.args is None:
        return Refusal("an argument that is no plain tensor", call.operation.facts.name)
    return refuse(call)


def _step(call: Call, places: dict[int, int], makes: list[tuple[Result, int]]) -> Step:
    def slot(argument: Argument) -> Slot:
        return Slot(places[id(argument.value)], argument.geometry)

    args, kwargs = (map_leaves(given, Argument, slot) for given in (call.args, call.kwargs))
    return Step(call.operation, args, kwargs, makes, [])


def _note_last_reads(steps: Sequence[Step], result: int) -> None:
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        named = [place for _, place in step.makes]
        named += [slot.place for slot in leaves_of((step.args, step.kwargs), Slot)]
        for place in named:
            last[place] = number
    for place, number in last.items():
        if place != result:
            steps[number].dies.append(place)


def _peak_bytes(steps: Sequence[Step], values: Sequence[Value]) -> int:
    """Bytes of the storages that are there at most at once, of those that the steps make, needed or not."""
    places_left: dict[int, int] = {}
    """Places of each storage that are not read any more, by the storage's reference."""
    now = most = 0
    for step in steps:
        most = max(most, now + step.operation.made_bytes)
        for _, place in step.makes:
            storage = id(values[place].storage)
            now += 0 if storage in places_left else allocated_size(values[place].nbytes)
            places_left[storage] = places_left.get(storage, 0) + 1
        most = max(most, now)
        for place in step.dies:
            storage = id(values[place].storage)
            if storage in places_left:
                places_left[storage] -= 1
                now -= 0 if places_left[storage] else allocated_size(values[place].nbytes)
                if not places_left[storage]:
                    del places_left[storage]
    return most
