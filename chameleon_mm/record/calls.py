"""Calls of operators without their tensors, the settings with which they ran, and the mode that notes them.

    value.call                     # the call that made the value; None: it was made earlier
    call.arguments()               # the call's tensors: the value of each, and its geometry over the storage
    call.operation                 # the operator, its generator's state and torch's settings at that time

A value is the content of a storage between two writes. None of these objects holds a tensor.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from chameleon_mm.device import Device
from chameleon_mm.device.operators import (
    BATCH_NORMS,
    OpCall,
    OpFacts,
    OpFactsCache,
    collect_tensors,
    lazy_bits_resolved,
    may_have_lazy_bits,
    run_in_parts,
    runs_in_parts,
    updated_statistics,
)
from chameleon_mm.plan.trace import BirthPlace
from chameleon_mm.record.dispatch_state import (
    PLAIN_DISPATCH,
    DispatchState,
    StepMode,
    has_other_formula,
    in_backward,
    is_on,
    leave,
    may_have_other_formula,
)
from chameleon_mm.replayable import PRODUCTS, base_name
from chameleon_mm.units import allocated_size

# --- Global settings of torch that influence the bits of an operator's result: read when it runs, applied when it is replayed.
#
# The default dtype matters for all operators: it is the dtype of `zeros(3)` and of a quotient of integers. The precisions and
# kernels of products and convolutions are read only for these. All settings are global to the process, so other threads see
# applied settings. They are applied only if the user changed one between an operator and its replay.

_C: Any = torch._C


class _Setting(NamedTuple):
    read: Callable[[], Any]
    setter: Callable[..., object]

    def write(self, value: Any) -> None:
        self.setter(*value) if isinstance(value, tuple) else self.setter(value)


_PRECISIONS = "generic all", "cuda all", "mkldnn all", "cuda matmul", "cuda conv", "mkldnn matmul", "mkldnn conv"
"""Backends, each with a kind of operator. Widest first, because writing one may change the narrower ones."""

_NAMES = (
    "cublas_allow_fp16_reduced_precision_reduction", "cublas_allow_bf16_reduced_precision_reduction",
    "cublas_allow_fp16_accumulation", "cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "mkldnn_enabled",
    "mkldnn_deterministic", "deterministic_algorithms", "blas_preferred_backend",
)  # fmt: skip

_OF_PRODUCTS = (
    *(_Setting(*(partial(call, *at.split()) for call in (_C._get_fp32_precision_getter, _C._set_fp32_precision_setter)))
      for at in _PRECISIONS),
    *(_Setting(getattr(_C, f"_get_{name}"), getattr(_C, f"_set_{name}")) for name in _NAMES),
)  # fmt: skip


class KernelSettings(NamedTuple):
    default_dtype: torch.dtype
    of_products: tuple[Any, ...] | None
    """Values of `_OF_PRODUCTS`; None: the operator is not a product, so they do not matter."""


def settings_now(*, is_product: bool) -> KernelSettings:
    of_products = tuple([setting.read() for setting in _OF_PRODUCTS]) if is_product else None
    return KernelSettings(torch.get_default_dtype(), of_products)


@contextmanager
def applied(settings: KernelSettings) -> Iterator[None]:
    """Context in which the settings are `settings`."""
    now = settings_now(is_product=settings.of_products is not None)
    if now == settings:
        yield
        return
    try:
        _apply(settings)
        yield
    finally:
        _apply(now)


def _apply(settings: KernelSettings) -> None:
    if settings.default_dtype is not torch.get_default_dtype():
        torch.set_default_dtype(settings.default_dtype)
    if settings.of_products is not None:
        for setting, value in zip(_OF_PRODUCTS, settings.of_products, strict=True):
            if setting.read() != value:
                setting.write(value)


# --- calls

has_storage: Callable[[Tensor], bool] = torch._C._has_storage

_Leaf = TypeVar("_Leaf")


def has_plain_storage(t: Tensor) -> bool:
    """True if the bytes of `t` are in one storage, at the offsets given by its strides."""
    return t.layout is torch.strided and not (t.is_nested or t.is_quantized or t.is_mkldnn) and has_storage(t)


class Births:
    """Storages to hold from their birth on, recognized by the plan's places of birth. Not thread-safe."""

    __slots__ = ("_hooks", "_places", "_ran", "_watched", "born")

    def __init__(self) -> None:
        self._places: Mapping[BirthPlace, int] = {}
        self._watched = frozenset[int]()
        """Numbers of hooks in the step before each of these births."""
        self._ran: Counter[str] = Counter()
        """Number of operators since the last hook, by name. Counted only if storages should be held."""
        self._hooks = 0
        self.born: list[tuple[int, Value, torch.UntypedStorage]] = []
        """Born storages that `take` has not returned yet, each with the plan's number and its value."""

    def hold(self, places: Mapping[BirthPlace, int]) -> None:
        """Hold the storages born at `places`, a mapping to the plan's numbers. Forgets storages born at earlier places."""
        self.born.clear()
        self._places, self._watched = places, frozenset(place.hooks for place in places)

    def at_hook(self, hooks: int) -> None:
        self._hooks = hooks
        self._ran.clear()

    @property
    def are_due(self) -> bool:
        """True if a storage to hold is born before the next hook. Then operators must be noted."""
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
        """Return the storages born since the last call, and forget them."""
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
        """Return a tensor at this place of `storage`, with a new version counter."""
        flat = torch.empty(0, dtype=self.dtype, device=storage.device)
        t = flat.set_(storage, self.offset, self.shape, self.stride)
        if self.conj:
            t = t.conj()
        return t._neg_view() if self.neg else t


class Result(NamedTuple):
    returned: bool
    """True: in a tensor that the call returned. False: in an argument that the call wrote."""
    position: int


@dataclass(slots=True, eq=False)
class Relied:
    """Dependents of a value's bytes: autograd's handles, and dropped storages recomputed from it. Note [Relied on].

    It refers neither to the value nor to its call. So a recipe that holds it does not hold the step's history.
    """

    handles: list[weakref.ref[Any]] = field(default_factory=list)
    """Handles of autograd that are not used yet."""
    dependents: list[weakref.ref[Any]] = field(default_factory=list)
    """Dropped saved storages that are recomputed from the bytes."""
    reliance: weakref.ref[Any] | None = None
    """Watch of the handles, if a recipe relies on them."""

    @property
    def by_autograd(self) -> bool:
        """True if autograd will check the version of the bytes at a later use."""
        return any(handle() is not None for handle in self.handles)

    def note_used(self, handle: object) -> None:
        """Note that a node gets the tensor of `handle`."""
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
        """Weak reference to the storage, the same one for all of its values."""
        self.nbytes = nbytes
        self.call = call
        """Call that made the value, in its tensor `result`. None: it was made before the watch began, or unseen."""
        self.result = result
        self.writes = writes
        """Number of seen writes to the storage, including the one that made this value."""
        self.is_latest = True
        """True if no later write to the storage was noticed."""
        self.tensor: weakref.ref[Tensor] | None = None
        """Tensor over the storage whose version counter shows later writes. `version`: the counter without such writes."""
        self.version = 0
        self.claim: weakref.ref[Any] | None = None
        """Holder of the value's bytes: a claim, or the handle of a kept tensor. None: no holder is known."""
        self.relied: Relied | None = None
        """Dependents of the value's bytes; None: there are none."""

    def relied_on(self) -> Relied:
        """Return the dependents of the value's bytes. Makes an empty `Relied` if there is none."""
        if self.relied is None:
            self.relied = Relied()
        return self.relied

    @property
    def has_dependents(self) -> bool:
        """True if dropped storages are recomputed from the value's bytes. That must happen before a write to them."""
        return self.relied is not None and bool(self.relied.dependents)

    @property
    def is_uninitialised(self) -> bool:
        """True if the value is uninitialised memory: the call that made it wrote nothing."""
        return self.call is not None and self.call.operation.facts.uninitialised


class Argument(NamedTuple):
    value: Value
    geometry: Geometry


class Operation:
    __slots__ = ("dropped", "facts", "func", "grad_enabled", "made_bytes", "number", "random_state", "settings")

    def __init__(self, number: int, func: Any, facts: OpFacts, settings: KernelSettings, *, grad_enabled: bool) -> None:
        """`grad_enabled`: True if gradients were enabled. They are disabled inside a custom function's forward."""
        self.number, self.func, self.facts, self.settings, self.grad_enabled = number, func, facts, settings, grad_enabled
        self.made_bytes = 0
        """Device memory, in bytes, of the storages that the operator made."""
        self.random_state: tuple[torch.Generator, Tensor] | None = None
        """Generator from which the operator drew, and the generator's state before."""
        self.dropped: list[tuple[Result, weakref.ref[Any]]] = []
        """Dropped storages that the operator recomputes, each with its position in the call. One replay makes all."""


class Call(NamedTuple):
    operation: Operation
    args: Any
    """Arguments, with an `Argument` in place of each tensor; None: an argument cannot be noted."""
    kwargs: Any

    def arguments(self) -> list[Argument]:
        """All tensor arguments of the call."""
        return list(leaves_of((self.args, self.kwargs), Argument))


def leaves_of(nest: Any, kind: type[_Leaf]) -> Iterator[_Leaf]:
    """Yield the instances of `kind` in a nest of arguments or results, in order."""
    if isinstance(nest, kind):
        yield nest
    elif isinstance(nest, (tuple, list)):
        for one in nest:
            yield from leaves_of(one, kind)
    elif isinstance(nest, dict):
        yield from leaves_of(list(nest.values()), kind)


def map_leaves(nest: Any, kind: type[_Leaf], change: Callable[[_Leaf], Any]) -> Any:
    """Return `nest` with `change(leaf)` in place of each instance of `kind`. A flat tuple or list without any is not copied."""
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
    """Return the tensor arguments that a call writes, including those that its schema does not declare as written."""
    given = [args[i] for i in facts.mutated if i < len(args)]
    given += [kwargs[name] for name in facts.mutated_names if name in kwargs]
    if facts.hidden_writes:
        given += updated_statistics(facts, args) if facts.name in BATCH_NORMS else args
    return [part for t in tensors_of(given) for part in with_storages(t)]


def with_storages(t: Tensor) -> Iterable[Tensor]:
    """Return `t` if it has a storage, else the tensors of which it consists, such as a sparse tensor's indices and values."""
    if t.layout is torch.strided and not t.is_nested:
        return (t,) if has_storage(t) else ()
    found: dict[int, Tensor] = {}
    collect_tensors((t,), t.device.type, found)
    return found.values()


def tensors_of(nest: Any) -> list[Tensor]:
    """Return the tensors in a nest of arguments or results, in order."""
    return list(leaves_of(nest, Tensor))


@cache
def is_product(func: Any) -> bool:
    return base_name(func.name()) in PRODUCTS


def generator_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator | None:
    """Return the generator from which a random operator draws: the given one, or the default generator of its device."""
    for one in (*args, *kwargs.values()):
        if isinstance(one, torch.Generator):
            return one
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


# --- Watch of how storages are made during a forward: for each value of a storage, the call that made it, with arguments.
#
# A value is the content of a storage between two writes. An in-place operator makes a new value of a storage from the old one.
# A view makes no value: each argument is noted as a value and its geometry over the storage. Values and calls hold only
# numbers, no tensors. They are dropped with the watch, at the latest at the end of the step.


class _Opaque(Exception):
    """Raised for a tensor whose bytes are not in a plain storage."""


class CallWatch(StepMode):
    """Watch of the calls on one thread. It calls `before_write` before an operator writes to a value with dependents.

    Operators run unchanged. But under any dispatch mode, autograd computes a few gradients by another formula. `must_leave` is
    True after such an operator: exit the mode before its backward begins. Calls in a backward, under a tracer, in a captured
    graph and in a forked child are not noted. Not thread-safe.
    """

    def __init__(self, device: Device, before_write: Callable[[Value], None]) -> None:
        super().__init__()
        self._before_write = before_write
        self._dispatch = DispatchState(device)
        self._device_type = device.torch_device.type
        self._facts = OpFactsCache(self._device_type)
        self._latest: dict[int, Value] = {}
        self._number = 0
        self.births = Births()
        self.after_forward: Callable[[], None] | None = None
        """Function that hooks of a backward call, to free storages held only during the forward."""
        self.is_over = False
        """True if the step has ended or recomputes nothing. Then no more calls are noted."""
        self.must_leave = False
        """True if the mode must be exited before the step's backward, because bits would change."""

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]  # torch annotates no method of it
        return self

    def __exit__(self, *error: object) -> None:
        """Exit the mode, even if other modes are above it. Does nothing if autograd has removed it."""
        if is_on(self):
            leave(self)

    def value_of(self, storage: torch.UntypedStorage) -> Value | None:
        """Return the latest value of `storage`; None: unknown."""
        value = self._latest.get(id(storage))
        return value if value is not None and value.storage() is storage and value.nbytes == storage.nbytes() else None

    def end(self) -> None:
        """Stop noting calls, and forget the notes."""
        self.is_over = True
        self._latest.clear()
        self.births.born.clear()

    def hold(self, places: Mapping[BirthPlace, int]) -> None:
        self.births.hold(places)

    def at_hook(self, hooks: int) -> None:
        self.births.at_hook(hooks)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        dispatch = self._dispatch
        if self.is_over or self.is_paused or in_backward() or dispatch.forked or dispatch.tracing or dispatch.capturing:
            return func(*args, **kwargs)
        for kind in types:
            if kind.__torch_dispatch__ is not PLAIN_DISPATCH:
                return NotImplemented  # torch then calls the subclass, with this mode active for its inner tensors
        facts = self._facts[func]
        if runs_in_parts(facts, args, kwargs):
            return run_in_parts(func, args, kwargs, self)
        if facts.question or not (facts.kernel or facts.uninitialised):
            return func(*args, **kwargs)  # a view or a query makes no bytes
        if may_have_other_formula(facts):
            call = OpCall(facts, func, args, kwargs, device_type=self._device_type)
            self.must_leave = self.must_leave or has_other_formula(call)
        return self._run(func, facts, args, kwargs)

    def _run(self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._call(func, facts, args, kwargs)
        written = written_tensors(facts, args, kwargs)
        for t in written:
            value = self._latest.get(id(t.untyped_storage()))
            if value is not None and value.has_dependents:
                self._before_write(value)
        tensors = [one for one in args if isinstance(one, Tensor)]
        with lazy_bits_resolved() if may_have_lazy_bits(tensors) else nullcontext():
            out = func(*args, **kwargs)
        self._note(call, written, out)
        return out

    # --- arguments of a call

    def _call(self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        self._number += 1
        try:
            noted, named = (map_leaves(given, Tensor, self._noted) for given in (args, kwargs))
        except _Opaque:
            noted = named = None
        settings = settings_now(is_product=is_product(func))
        operation = Operation(self._number, func, facts, settings, grad_enabled=torch.is_grad_enabled())
        if facts.random and noted is not None:
            generator = generator_of(args, kwargs)
            if generator is not None:
                operation.random_state = generator, generator.get_state()
        return Call(operation, noted, named)

    def _noted(self, t: Tensor) -> Argument:
        return Argument(self.given(t), Geometry.of(t))

    def given(self, t: Tensor) -> Value:
        """Latest value of the storage of `t`, a plain tensor; a new value if none was known."""
        if not has_plain_storage(t):
            raise _Opaque
        storage = t.untyped_storage()
        value = self.value_of(storage)
        root = None if value is None or value.tensor is None else value.tensor()
        if value is None or (root is not None and root._version != value.version):
            if value is not None:
                value.is_latest = False  # an unseen write
            value = self._latest[id(storage)] = Value(weakref.ref(storage), storage.nbytes(), None, None, 0)
            self._note_counter(value, t, writes=0)
        return value

    @staticmethod
    def _note_counter(value: Value, t: Tensor, *, writes: int) -> None:
        """Note the version counter of `t`, which the running call increases by `writes` at its end."""
        if not t.is_inference():
            root = t if (base := t._base) is None else base
            value.tensor, value.version = weakref.ref(root), root._version + writes

    # --- values that a call made

    def _note(self, call: Call, written: Sequence[Tensor], out: Any) -> None:
        made = []
        for position, t in enumerate(written):
            before = self.value_of(t.untyped_storage())
            if before is not None:
                before.is_latest = False
            made.append(self._made(call, Result(False, position), t, before))
        if not call.operation.facts.in_place:
            for position, t in enumerate(tensors_of(out)):
                if has_storage(t) and self.value_of(t.untyped_storage()) is None:
                    made.append(self._made(call, Result(True, position), t, None))
                    call.operation.made_bytes += allocated_size(t.untyped_storage().nbytes())
        if self.births.are_due:
            self.births.note(call.operation.func.name(), made)

    def _made(self, call: Call, result: Result, t: Tensor, before: Value | None) -> Value:
        """Note a new value of the storage of `t`, written by `call`. `before`: the storage's previous value."""
        storage = t.untyped_storage()
        reference, writes = (weakref.ref(storage), 0) if before is None else (before.storage, before.writes + 1)
        value = self._latest[id(storage)] = Value(reference, storage.nbytes(), call, result, writes)
        self._note_counter(value, t, writes=0 if result.returned or call.operation.facts.hidden_writes else 1)
        return value
