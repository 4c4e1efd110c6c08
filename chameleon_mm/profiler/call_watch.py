"""Notes how storages are made while a forward runs: for each value of a storage, the call that made it and what that was given.

    watch = CallWatch(device, before_write)        # a dispatch mode: it sees operators below autograd, those in place too
    with watch: ...
    value = watch.value_of(storage)                # the latest value; None: no operator was given or has made the storage
    value.call                                     # the call that made it; None: it was there before

A value is what a storage holds between two writes. An operator in place makes a new value of a storage from its old one. A view
makes none: each argument is noted as a value and its geometry over the storage. Values and calls hold no tensor, only numbers:
they go with the watch, at the end of the step at the latest.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from chameleon_mm.device import Device
from chameleon_mm.device.op_call import OpCall, lazy_bits_resolved, may_have_lazy_bits
from chameleon_mm.device.operators import OpFacts, OpFactsCache, run_in_parts, runs_in_parts
from chameleon_mm.profiler.calls import (
    Argument,
    Births,
    Call,
    Geometry,
    Operation,
    Result,
    Value,
    generator_of,
    has_plain_storage,
    has_storage,
    map_leaves,
    tensors_of,
    written_tensors,
)
from chameleon_mm.profiler.dispatch_state import (
    PLAIN_DISPATCH,
    DispatchState,
    StepMode,
    has_other_formula,
    in_backward,
    is_on,
    leave,
    may_have_other_formula,
)
from chameleon_mm.trace.trace import BirthPlace
from chameleon_mm.units import allocated_size


class _Opaque(Exception):
    """Raised for a tensor whose bytes are in no storage of its own."""


class CallWatch(StepMode):
    """Notes calls on one thread. `before_write` is called before an operator writes to a value that others are made from.

    Changes no bit: operators run as they are, but that under any dispatch mode autograd computes a few gradients by another
    formula; it must be left before the backward of such an operator begins, which `must_leave` tells. It looks at nothing in a
    backward, under a tracer, in a captured graph and in a forked child; what ran there it does not know. Not thread-safe.
    """

    def __init__(
        self,
        device: Device,
        before_write: Callable[[Value], None],
    ) -> None:
        super().__init__()
        self._before_write = before_write
        self._dispatch = DispatchState(device)
        self._device_type = device.torch_device.type
        self._facts = OpFactsCache(self._device_type)
        self._latest: dict[int, Value] = {}
        self._number = 0
        self.births = Births()
        self.after_forward: Callable[[], None] | None = None
        """Called by hooks of a backward: what was noted for its forward alone may go."""
        self.is_over = False
        """Whether the step has ended, or has turned out to be one in which nothing is recomputed: it looks at nothing more."""
        self.must_leave = False
        """Whether it must be left before the step's backward: bits would change."""

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]  # torch annotates no method of it
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave it, whoever is above it. Does nothing where autograd has taken it away."""
        if is_on(self):
            leave(self, kind, error, trace)

    def value_of(self, storage: torch.UntypedStorage) -> Value | None:
        """The latest value of `storage`; None: it is not known."""
        value = self._latest.get(id(storage))
        return value if value is not None and value.storage() is storage and value.nbytes == storage.nbytes() else None

    def end(self) -> None:
        """Look at nothing more, and forget what was noted."""
        self.is_over = True
        self._latest.clear()
        self.births.born.clear()

    def hold(self, places: Mapping[BirthPlace, int]) -> None:
        """Hold storages from their birth on, as `Births` does."""
        self.births.hold(places)

    def at_hook(self, hooks: int) -> None:
        """Note that there were so many hooks in the step so far."""
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
                return NotImplemented  # asks the subclass, with this mode still active for what it is made of
        facts = self._facts[func]
        if runs_in_parts(facts, func, args, kwargs):
            return run_in_parts(func, args, kwargs, self)
        if facts.question or not (facts.kernel or facts.uninitialised):
            return func(*args, **kwargs)  # a view, or a question: no bytes are made
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

    # --- what a call was given

    def _call(self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        self._number += 1
        try:
            noted, named = (map_leaves(given, Tensor, self._noted) for given in (args, kwargs))
        except _Opaque:
            noted = named = None
        operation = Operation(self._number, func, facts)
        if facts.random and noted is not None:
            generator = generator_of(args, kwargs)
            if generator is not None:
                operation.random_state = generator, generator.get_state()
        return Call(operation, noted, named)

    def _noted(self, t: Tensor) -> Argument:
        return Argument(self.given(t), Geometry.of(t))

    def given(self, t: Tensor) -> Value:
        """The latest value of the storage of `t`, a plain tensor: new where it was not known."""
        if not has_plain_storage(t):
            raise _Opaque
        storage = t.untyped_storage()
        value = self.value_of(storage)
        if value is None or not self._is_as_seen(value, t):
            if value is not None:
                value.is_latest = False  # something wrote to it where nobody looks
            value = self._latest[id(storage)] = Value(weakref.ref(storage), storage.nbytes(), None, None, 0)
            self._note_counter(value, t, writes=0)
        return value

    @staticmethod
    def _note_counter(value: Value, t: Tensor, *, writes: int) -> None:
        """Note the counter of `t`, which the call that is running moves by `writes` when it is over."""
        if not t.is_inference():
            root = t if (base := t._base) is None else base
            value.tensor, value.version = weakref.ref(root), root._version + writes

    @staticmethod
    def _is_as_seen(value: Value, t: Tensor) -> bool:
        """Whether the counter that is known tells of no other write than those that were seen."""
        root = None if value.tensor is None else value.tensor()
        return root is None or root._version == value.version

    # --- what it made

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
        """Note a new value of the storage of `t`, the next that `call` wrote; `before`: the one that it had."""
        storage = t.untyped_storage()
        reference, writes = (weakref.ref(storage), 0) if before is None else (before.storage, before.writes + 1)
        value = self._latest[id(storage)] = Value(reference, storage.nbytes(), call, result, writes)
        self._note_counter(value, t, writes=0 if result.returned or call.operation.facts.hidden_writes else 1)
        return value
