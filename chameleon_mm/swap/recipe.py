"""Recipes of dropped storages, their sources, and the rule that says what they may rely on: Note [Relied on].

A recipe runs operators of forward again at the first use of a storage that was dropped. Its result has the right bits only if
everything that the operators read has the bytes of the first time. Three rules see to that. A storage is dropped only if rule 1
or rule 2 holds for each source of its recipe. Rule 3 holds for each result.

1. ALONE. Only the session can reach the source, from the drop until the replay.

   True if the use count of the storage says that no tensor but the session's holds it; if its bytes are on the host; or if the
   recipe has a copy of its own, which it makes of inputs of up to 64 KiB. Until then the drop waits.

       h = block(x)              # autograd does not save h: the session holds it, for y
       y = h.float()             # y waits: the model still has h, and may write to it
       x = h + f(y)
       del h                     # y is dropped at the next hook

2. RELIED ON. Autograd has a handle for the source, and checks its version: a write raises eager's error, in both.

   This ends with the last handle, and when a node that is not torch's own is given the tensor, since such a node may write to
   it. If somebody else holds the storage then, what was made from it and dropped is recomputed at that moment.

       feature = encoder(x)                    # made from the encoder's weight, which autograd saves; dropped
       loss, other = f(feature), g(feature.detach())
       loss.backward()                         # lets go of the weight: feature is recomputed now
       optimizer.step()                        # writes the weight
       other.backward()                        # uses feature

3. COMPARED. The result is compared with what was dropped, in the same step, by a checksum of 64 bits (`kernels/checksum.py`).

   The first time at its place in a step nothing is dropped: the original is used, and the recipe is tried beside it (a proof).
   After that the host compares both checksums before `backward` returns. It raises `RecomputeMismatch` if they differ, and that
   recipe is not used again.

       h = block(x); y = h.float(); kernel(h.data_ptr())       # in each step: the proof fails, y is never dropped
       if step % 4 == 3: kernel(h.data_ptr())                  # in some steps: RecomputeMismatch in those

One case is left to eager's error: a write to what autograd relies on, while a node that saved it is still to run, if no
backward comes to that node after all. Eager never checks it there, and the recipe cannot know.

Rules 1 and 2 are decided by counters and use counts, before the drop. So writes by torch's operators, in forward, in backward
or on another thread, change no bit and raise no error. Rule 3 finds what no counter shows: a write through a pointer or
`.data`, an extension with a wrong schema, an operator that is not reproducible. It compares results and not sources, because
such a write may also hit a tensor between two operators of a recipe, or the result itself before autograd saves it.
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
    """True if the node of autograd that runs on this thread is one of torch's own, which writes to nothing that it saved. False
    outside of a backward, for a function in Python, and for an extension's node in C++."""
    kind: type = type(torch._C._current_autograd_node())  # of None outside of a backward, whatever its stub says
    return kind is not _NO_NODE and not kind.__flags__ & HEAP_TYPE and kind.__name__ != "CppFunction"


class Source:
    """A storage that a recipe is given: a claim's, or one that it holds itself."""

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
        """`relied`: what rests on its bytes; None: it is a copy of the recipe's own. `probe`: has its version counter.
        `stream`: the one on which a storage that it holds itself was written."""
        self.claim = claim
        self.storage = storage
        self.relied = relied
        self._stream = stream
        self.last_swap_in = -1
        """Swap-in of the claim's storage for which the recipe used it last."""
        self._nbytes = nbytes
        self._probe = probe

    @property
    def written_on(self) -> Stream | None:
        """The stream that its bytes are ordered on."""
        return self._stream if self.claim is None else self.claim.saved.slot.alloc_stream

    @property
    def is_alone(self) -> bool:
        """Rule 1: only the session can reach its bytes."""
        if self.relied is None:
            return True
        if self.claim is not None:
            return self.claim.saved.is_private
        return self.storage is not None and held_alone(self, 0 if self._probe is None else 1)

    @property
    def is_relied_on(self) -> bool:
        """Rule 2: autograd has a handle for its bytes that it has not used."""
        return self.relied is not None and self.relied.by_autograd

    @property
    def is_secure(self) -> bool:
        """True if no operator of torch's can change its bytes before a replay without an error of eager's."""
        return self.is_relied_on or self.is_alone

    def check(self, storage: torch.UntypedStorage) -> None:
        """Raise what eager raises for a saved tensor that was written to, where `storage`, its bytes now, may have been and
        eager checks them too."""
        saved = None if self.claim is None else self.claim.saved
        if self._probe is not None and self.is_relied_on and (saved is None or saved.slot.storage is storage):
            self._probe.check()
        if storage.nbytes() != self._nbytes:
            raise RuntimeError(
                f"a saved tensor that is recomputed: expected an input of {self._nbytes} bytes, as it was in forward, got one "
                f"of {storage.nbytes()}: it was resized since; make the session SwapSession(recompute=False)"
            )


class Reliance:
    """Watches autograd's handles of one source, for rule 2. `ended(self)` is called once the last of them is gone: on any
    thread, in the middle of anything, so it must raise nothing and wait for nothing.

    The recipes that rest on the source hold it: it ends with them.
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


# --- Recipes of dropped storages: flat lists of calls, each of whose tensors is a source or an earlier call's result
#
# It is what ran in this step, arguments and random state included, not what a step like it ran. It holds its sources, and no
# operator that is older than its calls. A temporary dies with the last call that reads it.

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
