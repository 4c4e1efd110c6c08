"""Notes how storages are made while a forward runs, as `CallWatch` does, in C++: `device/notes.cpp`, where it is built.

    watch = watch_calls(device, before_write)      # a `CallNotes`, or the `CallWatch` that is its reference
    with watch: ...
    watch.value_of(storage).call                   # made of the notes at that moment, for this one chain

An operator costs a microsecond more, in place of fifteen or more under a mode, and no gradient has another formula. Names
are those of what runs below autograd: a few composite operators do otherwise under a mode, and the recorder is one. A storage
that the plan holds by a name that does not come is not held.

The watch stays where the helper is not built or does not load, where dynamo has compiled anything, whose guards compare the
dispatch keys that are on, and where the thread has another session's notes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType, TracebackType
from typing import Any, Self

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
    """What notes the calls of a step, on this thread. `before_write`: as `CallWatch` has it."""
    helper = None if frames_compiled() else native.load("notes")
    return CallWatch(device, before_write) if helper is None or helper.is_taken() else CallNotes(helper, device, before_write)


class NotedValue(Value):
    """A value whose call is read from the notes when it is asked for."""

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
    def is_latest(self) -> bool:  # type: ignore[override]
        return bool(self._notes.noted.is_latest(self._number))


class CallNotes:
    """Notes calls on one thread, and is used as a `CallWatch` is. Not thread-safe but for what another thread's hooks ask."""

    must_leave = False
    """Never: no dispatch mode is on, so that no gradient is computed by another formula."""

    def __init__(self, helper: ModuleType, device: Device, before_write: BeforeWrite) -> None:
        self._helper, self._thread = helper, threading.get_ident()
        self._before_write = before_write
        self._device_type = device.torch_device.type
        self._operators: list[tuple[Any, OpFacts]] = []
        self._random: list[tuple[torch.Generator, Tensor]] = []
        self._settings: list[KernelSettings] = []
        self._values: dict[int, NotedValue] = {}
        self._calls: dict[int, Call] = {}
        self._storages: dict[int, Any] = {}
        me = weakref.ref(self)
        """What the helper has: the collector does not see a reference of its own."""
        self.noted: Any = helper.Notes(partial(_tell, me), device.torch_device.type == "cuda")
        self.births = Births()
        self.after_forward: Callable[[], None] | None = None
        self.is_over = False
        """Whether the step has ended, or has turned out to be one in which nothing is recomputed: it is to be left."""

    def __enter__(self) -> Self:
        torch._C._dispatch_tls_set_dispatch_key_included("Fake", True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.leave_if_on()

    def leave_if_on(self) -> None:
        """Leave it, where autograd has put the dispatch key back, too."""
        if threading.get_ident() == self._thread:  # another one may have notes of its own
            torch._C._dispatch_tls_set_dispatch_key_included("Fake", False)

    def paused(self) -> _Paused:
        """Context in which the operators of this thread are no part of the step. May be nested."""
        return _Paused(self._helper.pause)

    def end(self) -> None:
        """Look at nothing more, and forget what was noted."""
        self.is_over = True
        self.noted.end()
        for kept in (self._values, self._calls, self._storages, self.births.born):
            kept.clear()

    def value_of(self, storage: torch.UntypedStorage) -> Value | None:
        """The latest value of `storage`; None: it is not known."""
        return self._value(self.noted.value_of(storage._cdata))

    def given(self, t: Tensor) -> Value:
        """The latest value of the storage of `t`, a plain tensor: new where it was not known."""
        return self._known(self.noted.given(t))

    def hold(self, places: Mapping[BirthPlace, int]) -> None:
        """Hold storages from their birth on, as `Births` does."""
        self.births.hold(places)
        self.noted.tell_of_births(self.births.are_due)

    def at_hook(self, hooks: int) -> None:
        """Note that there were so many hooks in the step so far."""
        self.births.at_hook(hooks)
        self.noted.tell_of_births(self.births.are_due)

    # --- what values and recipes ask for

    def _value(self, number: int) -> NotedValue | None:
        return None if number == _NONE else self._known(number)

    def _known(self, number: int) -> NotedValue:
        value = self._values.get(number)
        if value is None:
            value = self._values[number] = NotedValue(self, number)
        return value

    def storage_ref(self, number: int, storage: torch.UntypedStorage | None) -> Any:
        """A weak reference to a storage, the same for all of its values."""
        ref = self._storages.get(number)
        if ref is None:
            ref = self._storages[number] = (lambda: None) if storage is None else weakref.ref(storage)
        return ref

    def call(self, number: int) -> Call:
        """The call of that number, as the watch has it."""
        call = self._calls.get(number)
        if call is None:
            call = self._calls[number] = self._read(number)
        return call

    def _read(self, number: int) -> Call:
        operator, given, numbers, opaque, grad_enabled, settings, random, made, made_end = self.noted.call(number)
        func, facts = self._operators[operator]
        operation = Operation(number, func, facts)
        operation.grad_enabled, operation.settings = grad_enabled, self._settings[settings]
        if not is_product(func):
            operation.settings = operation.settings._replace(of_products=None)
        operation.random_state = None if random == _NONE else self._random[random]
        for value in range(made, made_end):
            _, _, returned, _, _, nbytes, *_ = self.noted.value(value)
            operation.made_bytes += allocated_size(nbytes) if returned else 0
        if opaque:
            return Call(operation, None, None)
        self._put_tensors(given, numbers)
        arguments = list(zip(func._schema.arguments, given, strict=True))
        named = {argument.name: one for argument, one in arguments if argument.kwarg_only}
        return Call(operation, tuple(one for argument, one in arguments if not argument.kwarg_only), named)

    def _put_tensors(self, given: list[Any], numbers: Sequence[int]) -> None:
        """Put the tensors that `numbers` tell of at their places in `given`, or into the lists that are there."""
        at = 0
        while at < len(numbers):
            place, in_list, number, dtype, offset, conj, neg, rank = numbers[at : at + 8]
            shape, stride = numbers[at + 8 : at + 8 + rank], numbers[at + 8 + rank : at + 8 + 2 * rank]
            at += 8 + 2 * rank
            value, dtype_ = self._value(number), self._helper.dtype(dtype)
            geometry = Geometry(dtype_, torch.Size(shape), tuple(stride), offset, bool(conj), bool(neg))
            argument = None if value is None else Argument(value, geometry)
            if in_list:
                given[place].append(argument)
            else:
                given[place] = argument

    # --- what the helper asks for, in the middle of an operator

    def _facts_of(self, name: str, overload: str) -> tuple[Any, ...]:
        func, facts, told = _of_torch.get((name, overload, self._device_type)) or _facts(name, overload, self._device_type)
        self._operators.append((func, facts))
        return *told, len(self._operators) - 1

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
        self.births.note(self._operators[operator][0].name(), map(self._known, range(made, made_end)))


_Known = tuple[Any, OpFacts, tuple[Any, ...]]

_of_torch: dict[tuple[str, str, str], _Known] = {}
"""Facts about torch's own operators, which nobody defines anew, by name, overload and type of device."""


def _facts(name: str, overload: str, device_type: str) -> _Known:
    """An operator, facts about it, and what the helper is told of them: whether to skip it, whether it runs in parts, is in
    place, random, a product, whether counters tell of its writes; which arguments it may write to; the numbers of its
    arguments and results."""
    namespace, _, base = name.partition("::")
    try:
        func = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    except (AttributeError, RuntimeError):  # one of `prim` that torch.ops does not have: a question
        return None, OpFacts(base), (True, False, False, False, False, False, [], 0, 0)
    facts, arguments = OpFacts.of(func, device_type), func._schema.arguments
    written = [i for i, one in enumerate(arguments) if one.alias_info is not None and one.alias_info.is_write]
    written.sort(key=lambda i: arguments[i].kwarg_only)
    if facts.hidden_writes:
        written += [3, 4] if facts.name in BATCH_NORMS else [i for i, one in enumerate(arguments) if not one.kwarg_only]
    makes = any("Tensor" in str(one.type) for one in func._schema.returns)
    skip = not (facts.kernel or facts.uninitialised) or not (makes or written)
    kinds = skip, facts.composite, facts.in_place, facts.random, is_product(func), not facts.hidden_writes
    known = func, facts, (*kinds, written, len(arguments), len(func._schema.returns))
    if facts.is_torchs_own:
        _of_torch[name, overload, device_type] = known
    return known


class _Paused:
    """A context without a generator: hooks enter one each."""

    __slots__ = ("_pause",)

    def __init__(self, pause: Callable[[int], None]) -> None:
        self._pause = pause

    def __enter__(self) -> None:
        self._pause(1)

    def __exit__(self, *error: object) -> None:
        self._pause(-1)


AnyWatch = CallNotes | CallWatch
"""What watches the calls of a step."""


def _tell(me: weakref.ref[CallNotes], name: str, *told: Any) -> Any:
    it = me()
    return None if it is None else getattr(it, name)(*told)
