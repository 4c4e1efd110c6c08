"""Note how storages are made during a forward, like `CallWatch`, but in C++: `device/notes.cpp`, an optional helper.

    watch = watch_calls(device, before_write)      # a `CallNotes`, or the `CallWatch` that is its reference
    with watch: ...
    watch.value_of(storage).call                   # read from the notes at that moment, for this chain only

An operator costs 1 us more, instead of at least 15 us under a mode, and no gradient formula changes. Names are those of the
operators below autograd. Under a mode, such as the recorder, a few composite operators run others instead. A storage that a
plan names by such an operator is not held.

`CallWatch` is used instead if the helper is not built or does not load, or if the thread has another session's notes. It is
also used if dynamo has compiled a frame, because dynamo's guards compare the active dispatch keys.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from chameleon_mm.device import Device, native
from chameleon_mm.device.operators import BATCH_NORMS, OpFacts
from chameleon_mm.plan.trace import BirthPlace
from chameleon_mm.record.calls import (
    Argument,
    Births,
    Call,
    CallWatch,
    Geometry,
    KernelSettings,
    Operation,
    Result,
    Value,
    generator_of,
    is_product,
    settings_now,
    with_storages,
)
from chameleon_mm.record.dispatch_state import frames_compiled
from chameleon_mm.units import allocated_size

_NONE = -1

BeforeWrite = Callable[[Value], None]


def watch_calls(device: Device, before_write: BeforeWrite) -> AnyWatch:
    """Return an object that notes the calls of a step on this thread. `before_write`: as in `CallWatch`."""
    helper = None if frames_compiled() else native.load("notes")
    return CallWatch(device, before_write) if helper is None or helper.is_taken() else CallNotes(helper, device, before_write)


class NotedValue(Value):
    """Value whose call is read from the notes when it is first needed."""

    __slots__ = ("_call", "_notes", "_number")

    def __init__(self, notes: CallNotes, number: int) -> None:
        told = notes.noted.value(number)
        storage, call, returned, position, self.writes, self.nbytes, self.version, it, tensor = told
        self._call: Call | int | None = None if call == _NONE else call
        self._notes, self._number = notes, number
        self.storage = notes.storage_ref(storage, it)
        self.result = None if call == _NONE else Result(returned, position)
        self.tensor = None if tensor is None else weakref.ref(tensor)
        self.claim = self.relied = None

    @property
    def call(self) -> Call | None:  # type: ignore[override]  # read, not stored
        if isinstance(self._call, int):
            self._call = self._notes.call(self._call)
        return self._call

    @property
    def is_uninitialised(self) -> bool:
        return self._call is not None and self._notes.facts(self._call).uninitialised

    @property
    def is_latest(self) -> bool:  # type: ignore[override]  # asked of the notes, in place of an attribute
        return bool(self._notes.noted.is_latest(self._number))


class CallNotes:
    """Notes of the calls on one thread, like `CallWatch`. Not thread-safe, except for calls by hooks on other threads."""

    must_leave = False
    """Always False: no dispatch mode is on, so no gradient is computed by another formula."""

    def __init__(self, helper: ModuleType, device: Device, before_write: BeforeWrite) -> None:
        self._helper, self._thread, self._paused = helper, threading.get_ident(), _Paused(helper.pause)
        self._before_write = before_write
        self._device_type = device.torch_device.type
        self._operators: list[_Known] = []
        self._random: list[tuple[torch.Generator, Tensor]] = []
        self._settings: list[KernelSettings] = []
        self._values: dict[int, NotedValue] = {}
        self._calls: dict[int, Call] = {}
        self._storages: dict[int, Any] = {}
        me = weakref.ref(self)
        """Weak reference for the helper, because the garbage collector does not see the helper's references."""
        self.noted: Any = helper.Notes(partial(_tell, me), not device.simulated)
        self.births = Births()
        self.after_forward: Callable[[], None] | None = None
        self.is_over = False
        """True if the step has ended or recomputes nothing. Then the watch must be exited."""

    def __enter__(self) -> Self:
        torch._C._dispatch_tls_set_dispatch_key_included("Fake", True)
        return self

    def __exit__(self, *error: object) -> None:
        self.leave_if_on()

    def leave_if_on(self) -> None:
        """Exit the watch, also if autograd has restored the dispatch key."""
        if threading.get_ident() == self._thread:  # another thread may have notes of its own
            torch._C._dispatch_tls_set_dispatch_key_included("Fake", False)

    def paused(self) -> _Paused:
        return self._paused

    def end(self) -> None:
        self.is_over = True
        self.noted.end()
        for kept in (self._values, self._calls, self._storages, self.births.born):
            kept.clear()

    def value_of(self, storage: torch.UntypedStorage) -> Value | None:
        number = self.noted.value_of(storage._cdata)
        return None if number == _NONE else self._known(number)

    def given(self, t: Tensor) -> Value:
        """Return the latest value of the storage of `t`, a plain tensor; a new value if none is known."""
        return self._known(self.noted.given(t))

    def hold(self, places: Mapping[BirthPlace, int]) -> None:
        self.births.hold(places)
        self.noted.tell_of_births(self.births.are_due)

    def at_hook(self, hooks: int) -> None:
        self.births.at_hook(hooks)
        self.noted.tell_of_births(self.births.are_due)

    # --- called by values and recipes

    def _known(self, number: int) -> NotedValue:
        return self._values.get(number) or self._values.setdefault(number, NotedValue(self, number))

    def storage_ref(self, number: int, storage: torch.UntypedStorage | None) -> Any:
        if number not in self._storages:
            self._storages[number] = (lambda: None) if storage is None else weakref.ref(storage)
        return self._storages[number]

    def facts(self, call: Call | int) -> OpFacts:
        """Return the facts about the operator of a call, which is not read for that."""
        return self._operators[self.noted.operator_of(call)].facts if isinstance(call, int) else call.operation.facts

    def call(self, number: int) -> Call:
        """Return the call with that number, as `CallWatch` would note it."""
        return self._calls.get(number) or self._calls.setdefault(number, self._read(number))

    def _read(self, number: int) -> Call:
        operator, given, numbers, opaque, grad_enabled, settings, random, made = self.noted.call(number)
        known = self._operators[operator]
        noted = self._settings[settings]
        of_call = noted if known.is_product else noted._replace(of_products=None)
        operation = Operation(number, known.func, known.facts, of_call, grad_enabled=grad_enabled)
        operation.random_state = None if random == _NONE else self._random[random]
        operation.made_bytes = sum(map(allocated_size, made))
        if opaque:
            return Call(operation, None, None)
        self._put_tensors(given, numbers)
        positional = len(given) - len(known.names)
        return Call(operation, tuple(given[:positional]), dict(zip(known.names, given[positional:], strict=True)))

    def _put_tensors(self, given: list[Any], numbers: Sequence[int]) -> None:
        """Decode the tensors in `numbers`, and put them at their indexes in `given` or into lists there."""
        at = 0
        while at < len(numbers):
            place, in_list, number, dtype, offset, conj, neg, rank = numbers[at : at + 8]
            shape, stride = numbers[at + 8 : at + 8 + rank], numbers[at + 8 + rank : at + 8 + 2 * rank]
            at += 8 + 2 * rank
            geometry = Geometry(self._helper.dtype(dtype), torch.Size(shape), tuple(stride), offset, bool(conj), bool(neg))
            argument = None if number == _NONE else Argument(self._known(number), geometry)
            if in_list:
                given[place].append(argument)
            else:
                given[place] = argument

    # --- called by the helper, in the middle of an operator

    def _facts_of(self, name: str, overload: str) -> tuple[Any, ...]:
        known = _of_torch.get((name, overload, self._device_type)) or _facts(name, overload, self._device_type)
        self._operators.append(known)
        return *known.told, len(self._operators) - 1

    def _note_settings(self) -> int:
        self._settings.append(settings_now(is_product=True))
        return len(self._settings) - 1

    def _note_random(self, given: list[Any]) -> int:
        drawn_from = generator_of(tuple(given), {"device": next((one for one in given if isinstance(one, torch.device)), None)})
        if drawn_from is None:
            return _NONE
        self._random.append((drawn_from, drawn_from.get_state()))
        return len(self._random) - 1

    def _parts(self, t: Tensor) -> list[Tensor]:
        return list(with_storages(t))

    def _write(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            value = self._values.get(number)
            if value is not None and value.has_dependents:
                self._before_write(value)

    def _note_born(self, operator: int, made: int, made_end: int) -> None:
        self.births.note(self._operators[operator].func.name(), map(self._known, range(made, made_end)))


class _Known(NamedTuple):
    """Operator, with facts that do not depend on the call."""

    func: Any
    facts: OpFacts
    is_product: bool
    told: tuple[Any, ...]
    """Flags and numbers for the helper."""
    names: tuple[str, ...]
    """Names of the arguments that are passed by name. They come last."""


_of_torch: dict[tuple[str, str, str], _Known] = {}
"""Facts about torch's own operators, by name, overload and device type. Torch's operators are never redefined."""


def _facts(name: str, overload: str, device_type: str) -> _Known:
    """Return what is known of an operator. The helper is told flags: skip it; it runs in parts; it is in place, random, a
    product; version counters show its writes. Then: indices of arguments that it may write, number of arguments, number of
    results."""
    namespace, _, base = name.partition("::")
    try:
        func = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    except (AttributeError, RuntimeError):  # a query of `prim` that torch.ops lacks
        return _Known(None, OpFacts(base), False, (True, False, False, False, False, False, [], 0, 0), ())
    facts, arguments = OpFacts.of(func, device_type), func._schema.arguments
    written = [i for i, one in enumerate(arguments) if one.alias_info is not None and one.alias_info.is_write]
    written.sort(key=lambda i: arguments[i].kwarg_only)
    if facts.hidden_writes:
        written += [3, 4] if facts.name in BATCH_NORMS else [i for i, one in enumerate(arguments) if not one.kwarg_only]
    makes = any("Tensor" in str(one.type) for one in func._schema.returns)
    skip = not (facts.kernel or facts.uninitialised) or not (makes or written)
    kinds = skip, facts.composite, facts.in_place, facts.random, is_product(func), not facts.hidden_writes
    told = *kinds, written, len(arguments), len(func._schema.returns)
    known = _Known(func, facts, is_product(func), told, tuple(one.name for one in arguments if one.kwarg_only))
    if facts.is_torchs_own:
        _of_torch[name, overload, device_type] = known
    return known


class _Paused:
    """Context manager without a generator, because each hook enters one."""

    __slots__ = ("_pause",)

    def __init__(self, pause: Callable[[int], None]) -> None:
        self._pause = pause

    def __enter__(self) -> None:
        self._pause(1)

    def __exit__(self, *error: object) -> None:
        self._pause(-1)


AnyWatch = CallNotes | CallWatch


def _tell(me: weakref.ref[CallNotes], name: str, *told: Any) -> Any:
    it = me()
    return None if it is None else getattr(it, name)(*told)
