"""The calls of operators that ran, without the tensors: what each was given and made, as values and places in storages.

    value.call                     # the call that made it; None: it was there before
    call.arguments()               # what that was given: values, and the geometry of each tensor over its storage
    call.operation                 # the operator itself, its generator's state and torch's settings at that moment

A value is what a storage holds between two writes. None of them holds a tensor.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from chameleon_mm.device.op_call import collect_tensors
from chameleon_mm.device.operators import BATCH_NORMS, OpFacts, updated_statistics
from chameleon_mm.profiler.kernel_settings import settings_now
from chameleon_mm.trace.replayable import PRODUCTS, base_name
from chameleon_mm.trace.trace import BirthPlace

has_storage: Callable[[Tensor], bool] = torch._C._has_storage

_Leaf = TypeVar("_Leaf")


def has_plain_storage(t: Tensor) -> bool:
    """Whether the bytes of `t` are in one storage of its own, where its strides say."""
    return t.layout is torch.strided and not (t.is_nested or t.is_quantized or t.is_mkldnn) and has_storage(t)


class Births:
    """Storages to hold from their birth on, at the places that a plan has them born at. Not thread-safe."""

    __slots__ = ("_hooks", "_places", "_ran", "_watched", "born")

    def __init__(self) -> None:
        self._places: Mapping[BirthPlace, int] = {}
        self._watched = frozenset[int]()
        """Numbers of hooks behind which one is born."""
        self._ran: Counter[str] = Counter()
        """Operators since the last hook, by name; counted where a storage is to be held."""
        self._hooks = 0
        self.born: list[tuple[int, Value, torch.UntypedStorage]] = []
        """Those that were made since the last hook, each with the plan's number. Taken by whoever holds them."""

    def hold(self, places: Mapping[BirthPlace, int]) -> None:
        """Hold storages that are born at these places; each with the plan's number of the storage. Forgets what was born for
        other ones."""
        self.born.clear()
        self._places, self._watched = places, frozenset(place.hooks for place in places)

    def at_hook(self, hooks: int) -> None:
        """Note that there were so many hooks in the step so far."""
        self._hooks = hooks
        self._ran.clear()

    @property
    def are_due(self) -> bool:
        """Whether one is born before the next hook: operators are to be noted."""
        return self._hooks in self._watched

    def note(self, operator: str, made: Iterable[Value]) -> None:
        """Note an operator that ran, with the values that it made, in order."""
        self._ran[operator] += 1
        for position, value in enumerate(made):
            number = self._places.get(BirthPlace(self._hooks, operator, self._ran[operator], position))
            storage = None if number is None else value.storage()
            if number is not None and storage is not None:
                self.born.append((number, value, storage))

    def take(self) -> list[tuple[int, Value, torch.UntypedStorage]]:
        """Those that were born since this was asked last."""
        born, self.born = self.born, []
        return born


class Geometry(NamedTuple):
    """Place of a tensor in its storage, and the meaning of its bits."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    @classmethod
    def of(cls, t: Tensor) -> Geometry:
        return cls(t.dtype, t.shape, t.stride(), int(t.storage_offset()), t.is_conj(), t.is_neg())

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor at this place of `storage`, with a version counter of its own."""
        flat = torch.empty(0, dtype=self.dtype, device=storage.device)
        t = flat.set_(storage, self.offset, self.shape, self.stride)
        if self.conj:
            t = t.conj()
        return t._neg_view() if self.neg else t


class Result(NamedTuple):
    """Which of a call's tensors a value is in."""

    returned: bool
    """Whether it is in what the call returned; False: in a tensor that it was given and wrote to."""
    position: int


class Relied:
    """What rests on the bytes of a value: autograd's handles, and what was dropped and is made from it. Note [Relied on].

    It knows neither the value nor its call: a recipe that holds it holds no history of the step.
    """

    __slots__ = ("dependents", "handles", "reliance")

    def __init__(self) -> None:
        self.handles: list[weakref.ref[Any]] = []
        """Autograd's handles that were not used yet."""
        self.dependents: list[weakref.ref[Any]] = []
        """Saved storages that were dropped."""
        self.reliance: weakref.ref[Any] | None = None
        """What watches the handles, where a recipe rests on them."""

    @property
    def by_autograd(self) -> bool:
        """True if autograd will check the version of the bytes at a use to come."""
        return any(handle() is not None for handle in self.handles)

    def note_used(self, handle: object) -> None:
        """Note that a node is given the tensor of `handle`."""
        self.handles = [ref for ref in self.handles if ref() is not None and ref() is not handle]


class Value:
    """Bytes that a storage holds from one write to the next."""

    __slots__ = (
        "call", "claim", "is_latest", "nbytes", "relied", "result", "storage", "tensor", "version", "writes",
    )  # fmt: skip

    def __init__(
        self, storage: weakref.ref[torch.UntypedStorage], nbytes: int, call: Call | None, result: Result | None, writes: int
    ) -> None:
        self.storage = storage
        """The storage, by the same reference for all of its values."""
        self.nbytes = nbytes
        self.call = call
        """The call that made it, in its tensor `result`; None: it was there before the watch saw its storage."""
        self.result = result
        self.writes = writes
        """Number of writes to the storage that were seen, this value's own included."""
        self.is_latest = True
        """Whether no operator was seen that wrote to the storage since."""
        self.tensor: weakref.ref[Tensor] | None = None
        """A tensor over the storage by whose counter later writes are known, and its `version` when it was met."""
        self.version = 0
        self.claim: weakref.ref[Any] | None = None
        """The claim on what autograd saved of it."""
        self.relied: Relied | None = None
        """What rests on its bytes; None: nothing does."""

    def relied_on(self) -> Relied:
        """What rests on its bytes."""
        if self.relied is None:
            self.relied = Relied()
        return self.relied

    @property
    def has_dependents(self) -> bool:
        """Whether others are made from its bytes: whoever writes to it has them made first."""
        return self.relied is not None and bool(self.relied.dependents)

    @property
    def is_uninitialised(self) -> bool:
        """Whether it is memory as the allocator gave it, as far as operators tell."""
        return self.call is not None and self.call.operation.facts.uninitialised


class Argument(NamedTuple):
    """A tensor that a call was given."""

    value: Value
    geometry: Geometry


class Operation:
    """One operator that ran, without what it was given."""

    __slots__ = ("dropped", "facts", "func", "grad_enabled", "made_bytes", "number", "random_state", "settings")

    def __init__(self, number: int, func: Any, facts: OpFacts) -> None:
        self.number = number
        self.func = func
        self.facts = facts
        self.grad_enabled = torch.is_grad_enabled()
        """Whether gradients were on: they are off inside a custom function's forward."""
        self.settings = settings_now(is_product=is_product(func))
        self.made_bytes = 0
        """Device memory of the storages that it made."""
        self.random_state: tuple[torch.Generator, Tensor] | None = None
        """The generator that it drew from, and that one's state before."""
        self.dropped: list[tuple[Result, weakref.ref[Any]]] = []
        """What is recomputed by it, with the tensor of the call that it is in: one replay is for all."""


class Call(NamedTuple):
    """An operator that ran, and what it was given."""

    operation: Operation
    args: Any
    """Arguments, with an `Argument` in place of each tensor; None: one of them cannot be noted."""
    kwargs: Any

    def arguments(self) -> list[Argument]:
        """All tensors that it was given."""
        return list(leaves_of((self.args, self.kwargs), Argument))


def leaves_of(nest: Any, kind: type[_Leaf]) -> Iterator[_Leaf]:
    """The instances of `kind` in a nest of arguments or results, in order."""
    if isinstance(nest, kind):
        yield nest
    elif isinstance(nest, (tuple, list)):
        for one in nest:
            yield from leaves_of(one, kind)
    elif isinstance(nest, dict):
        yield from leaves_of(list(nest.values()), kind)


def map_leaves(nest: Any, kind: type[_Leaf], change: Callable[[_Leaf], Any]) -> Any:
    """`nest` with `change(leaf)` in place of each instance of `kind`. What has none in it stays as it is."""
    if isinstance(nest, kind):
        return change(nest)
    if isinstance(nest, (tuple, list)):
        if not any(isinstance(one, (kind, tuple, list)) for one in nest):
            return nest
        return type(nest)([map_leaves(one, kind, change) for one in nest])
    if isinstance(nest, dict):
        return {name: map_leaves(one, kind, change) for name, one in nest.items()}
    return nest


def written_tensors(facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a call writes to, of those that it is given: those too that its schema does not name."""
    given = [args[i] for i in facts.mutated if i < len(args)]
    given += [kwargs[name] for name in facts.mutated_names if name in kwargs]
    if facts.hidden_writes:
        given += updated_statistics(facts, args) if facts.name in BATCH_NORMS else args
    return [part for t in tensors_of(given) for part in with_storages(t)]


def with_storages(t: Tensor) -> Iterable[Tensor]:
    """`t`, if it has a storage, or the tensors that it consists of: a sparse one's indices and values."""
    if t.layout is torch.strided and not t.is_nested:
        return (t,) if has_storage(t) else ()
    found: dict[int, Tensor] = {}
    collect_tensors((t,), t.device.type, found)
    return found.values()


def tensors_of(nest: Any) -> list[Tensor]:
    """The tensors of a nest of arguments or results, in order."""
    return list(leaves_of(nest, Tensor))


@cache
def is_product(func: Any) -> bool:
    return base_name(func.name()) in PRODUCTS


def generator_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator | None:
    """The generator that a random operator draws from."""
    given = (one for one in (*args, *kwargs.values()) if isinstance(one, torch.Generator))
    return next(given, None) or _default_generator(args, kwargs)


def _default_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator | None:
    """The generator that a random operator draws from where it is given none: its device's own."""
    device = next((t.device for t in tensors_of(args)), None)
    if device is None:
        named = kwargs.get("device")
        device = torch.device("cpu") if named is None else torch.device(named)
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    generators: Sequence[torch.Generator] = getattr(module, "default_generators", ())
    index: int | None = device.index
    index = module.current_device() if index is None else index
    return generators[index] if index < len(generators) else None
