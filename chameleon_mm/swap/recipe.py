"""Recipes of dropped storages, their sources, and the rules for sources: Note [Relied on], in docs/architecture.md.

A recipe runs operators of forward again at the first use of a dropped storage, and must read the same bytes as in forward. Rule
1: only the session can reach the source (`Source.is_alone`). Rule 2: autograd checks its version (`Source.is_relied_on`,
`Reliance`). One of them holds for each source. Rule 3: each result is compared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from chameleon_mm.device import Stream
from chameleon_mm.device.holders import held_alone
from chameleon_mm.device.operators import without_updates
from chameleon_mm.record.calls import (
    Argument,
    Call,
    Geometry,
    Operation,
    Relied,
    Result,
    Value,
    applied,
    leaves_of,
    map_leaves,
    tensors_of,
    written_tensors,
)
from chameleon_mm.record.light_profiler import HEAP_TYPE
from chameleon_mm.replayable import base_name
from chameleon_mm.swap.handles import SavedBytes
from chameleon_mm.units import allocated_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chameleon_mm.swap.claims import Claim
    from chameleon_mm.swap.forms import Original
    from chameleon_mm.swap.saved_storage import SavedStorage

_NO_NODE: type = type(None)


def node_is_torchs() -> bool:
    """True if the autograd node running on this thread is torch's own. Such a node never writes to its saved tensors. False
    outside of a backward, for a Python function, and for an extension's C++ node."""
    kind: type = type(torch._C._current_autograd_node())  # NoneType outside of a backward, although the stub says otherwise
    return kind is not _NO_NODE and not kind.__flags__ & HEAP_TYPE and kind.__name__ != "CppFunction"


class Source:
    """Source of a recipe: a claimed storage, or a storage that the source holds itself."""

    __slots__ = ("_nbytes", "_probe", "_stream", "claim", "last_swap_in", "relied", "storage")

    def __init__(
        self,
        *,
        nbytes: int,
        relied: Relied | None,
        claim: Claim | None = None,
        storage: torch.UntypedStorage | None = None,
        probe: SavedBytes | None = None,
        stream: Stream | None = None,
    ) -> None:
        """`relied`: handles and dropped storages that depend on the bytes; None: the source is the recipe's own copy. `probe`:
        has the version counter. `stream`: stream that wrote the storage, if the source holds it itself."""
        self.claim, self.storage, self.relied, self._stream = claim, storage, relied, stream
        self.last_swap_in = -1
        """Swap-in number of the storage when the recipe last used it."""
        self._nbytes = nbytes
        self._probe = probe

    @property
    def written_on(self) -> Stream | None:
        """Stream on which the bytes were written."""
        return self._stream if self.claim is None else self.claim.saved.slot.alloc_stream

    @property
    def is_alone(self) -> bool:
        """True if only the session can reach the bytes. Rule 1."""
        if self.relied is None:
            return True
        if self.claim is not None:
            return self.claim.saved.is_private
        return self.storage is not None and held_alone(self, 0 if self._probe is None else 1)

    @property
    def is_relied_on(self) -> bool:
        """True if autograd has an unused handle for the bytes. Rule 2."""
        return self.relied is not None and self.relied.by_autograd

    @property
    def is_secure(self) -> bool:
        """True if no operator of torch can change the bytes before a replay unless eager's error is raised."""
        return self.is_relied_on or self.is_alone

    def check(self, storage: torch.UntypedStorage) -> None:
        """Raise eager's error if autograd needs the bytes and they were written to. Raise `RuntimeError` if their size changed.
        `storage`: has the bytes now. A copy of the saved storage cannot have been written to."""
        saved = None if self.claim is None else self.claim.saved
        if self._probe is not None and self.is_relied_on and (saved is None or saved.slot.storage is storage):
            self._probe.check()
        if storage.nbytes() != self._nbytes:
            raise RuntimeError(
                f"a saved tensor that is recomputed: expected an input of {self._nbytes} bytes, as it was in forward, got one "
                f"of {storage.nbytes()}: it was resized since; make the session SwapSession(recompute=False)"
            )


class Reliance:
    """Watch on autograd's handles of one source, for rule 2. It calls `ended(self)` once the last handle is gone. The call may
    come on any thread at any time, so `ended` must raise nothing and wait for nothing.

    The recipes that read the source hold the watch, which ends with them.
    """

    __slots__ = ("__weakref__", "_ended", "_handles", "source")

    def __init__(self, source: Source, relied: Relied, ended: Callable[[Reliance], None]) -> None:
        self.source = source
        self._ended = ended
        self._handles: list[weakref.ref[object]] = []
        for ref in relied.handles:
            if (handle := ref()) is not None:
                self.watch(handle)

    def watch(self, handle: object) -> None:
        """Watch one more handle."""
        me = weakref.ref(self)

        def gone(ref: weakref.ref[object]) -> None:
            it = me()
            if it is not None and not it.source.is_relied_on:
                it._ended(it)

        self._handles.append(weakref.ref(handle, gone))


# --- Recipes of dropped storages: flat lists of calls. Each tensor of a call is a source or the result of an earlier call
#
# A recipe has the calls of this very step, with their arguments and random state. It holds its sources, but nothing older than
# its calls. A temporary is freed after the last call that reads it.

MOST_CALLS = 256
"""Maximum number of calls in one recipe. A storage that needs more calls is cheaper to swap."""


class Refusal(NamedTuple):
    """Reason why a storage is not recomputed, and the operator that caused it."""

    reason: str
    operator: str = ""
    lasts: bool = True
    """True if the refusal applies to later steps as well."""


class Proof(NamedTuple):
    """Recipe to try at the first use of its original, which was kept for that."""

    recipe: Recipe
    original: Original
    refuse: Callable[[Refusal], None]
    """Function to call with the reason if the recipe cannot be tried."""


class Hole(NamedTuple):
    """Argument of a call: its place among the storages of a replay, instead of a tensor."""

    place: int
    geometry: Geometry


class Step(NamedTuple):
    """Single call of a recipe."""

    operation: Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    makes: list[tuple[Result, int]]
    """Results that are needed: the position of each among the call's tensors, and its index in the replay."""
    dies: list[int]
    """Indexes of the storages that no later call reads."""


class Recomputed(NamedTuple):
    """Storages that a replay made."""

    storage: torch.UntypedStorage
    siblings: list[tuple[weakref.ref[SavedStorage], torch.UntypedStorage]]
    """Other dropped storages that the calls made too."""


class Recipe:
    """Calls that make one storage from its sources."""

    __slots__ = ("_nbytes", "_result", "_source_places", "_steps", "peak_bytes", "reliances", "sources")

    def __init__(
        self, steps: list[Step], sources: list[Source], source_places: list[int], *, result: int, values: Sequence[Value]
    ) -> None:
        """`values`: the value at each index of the replay."""
        self._steps, self.sources, self._source_places, self._result = steps, sources, source_places, result
        self._nbytes = [value.nbytes for value in values]
        self.reliances: list[Reliance] = []
        """Watches of the sources for which rule 2 holds. They are held here and end with the recipe."""
        self.peak_bytes = _peak_bytes(steps, values)
        """Maximum device memory of a replay in bytes: with its result, without its sources and operators' internal memory."""

    @property
    def operators(self) -> list[str]:
        """Names of the operators that run again, in order."""
        return [base_name(step.operation.func.name()) for step in self._steps]

    @property
    def saved_sources(self) -> list[SavedStorage]:
        """Saved storages among the sources, in order."""
        return [source.claim.saved for source in self.sources if source.claim is not None]

    def replay(self, storages: Sequence[torch.UntypedStorage]) -> Recomputed:
        """Run the calls on the current stream and return the storages that they made. `storages`: the storages of `sources`, in
        that order, ready for this stream.

        Gradients, autocast and torch-function modes are off. Each call runs with the random state and settings of forward. Both
        are reset after it. Raises `RuntimeError` if a result has another size than in forward.
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

        def tensor(hole: Hole) -> Tensor:
            storage = at[hole.place]
            assert storage is not None
            return hole.geometry.over(storage)

        args, kwargs = (map_leaves(given, Hole, tensor) for given in (step.args, step.kwargs))
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
    """Context that sets the operator's generator to its state when the operator ran in forward."""
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
"""Function that returns why a call must not run again, or None if it may."""


def build(value: Value, source_of: SourceOf, refuse: Refuse) -> Recipe | Refusal:
    """Return a recipe for `value`, or why there is none.

    source_of: returns the source that has the bytes of a value, or None if the value must be recomputed too.
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
        number, facts = call.operation.number, call.operation.facts
        if (args := without_updates(facts, call.args)) is not call.args:
            if not one.result.returned:
                return Refusal("running statistics of a batch norm", facts.name)
            call = call._replace(args=args)
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
    """Return a refusal if `call` reads memory that no seen operator filled. Something else filled it."""
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
    def hole(argument: Argument) -> Hole:
        return Hole(places[id(argument.value)], argument.geometry)

    args, kwargs = (map_leaves(given, Argument, hole) for given in (call.args, call.kwargs))
    return Step(call.operation, args, kwargs, makes, [])


def _note_last_reads(steps: Sequence[Step], result: int) -> None:
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        named = [place for _, place in step.makes]
        named += [hole.place for hole in leaves_of((step.args, step.kwargs), Hole)]
        for place in named:
            last[place] = number
    for place, number in last.items():
        if place != result:
            steps[number].dies.append(place)


def _peak_bytes(steps: Sequence[Step], values: Sequence[Value]) -> int:
    """Return the maximum bytes that all storages made by the steps take at the same time."""
    places_left: dict[int, int] = {}
    """Number of live indexes of each storage, by the id of its reference. An index dies after its last read."""
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
