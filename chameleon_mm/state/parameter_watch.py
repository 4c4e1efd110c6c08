"""Watch the arguments of torch's functions before they run, and bring swapped-out tensors to the device.

    with ParameterWatch(swap): ...      # a torch function mode: it changes no operator and no gradient formula

Functions that read a shape or make a view need no bytes and run unchanged. The watch records functions that expose the memory
without its version counter, and functions that write without increasing the counter. A function of a list of tensors is called
part by part if the list does not fit on the device as a whole.

The watch does not see C++ code. Autograd's own uses come through saved-tensor hooks. If these hooks belong to other code, such
as a checkpoint, the autograd nodes made by a function bring its arguments to the device. Arguments of an extension within a
module's forward are on the device since that forward began.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from chameleon_mm.state.hosted import HostedStorage

if TYPE_CHECKING:
    from chameleon_mm.state.parameter_swap import ParameterSwap

_NEEDS_NO_BYTES = frozenset((
    "__hash__", "__len__", "_is_view", "can_cast", "detach", "dim", "element_size", "empty_like", "full_like", "get_device",
    "has_names", "is_complex", "is_conj", "is_contiguous", "is_distributed", "is_floating_point", "is_inference", "is_neg",
    "is_pinned", "is_same_size", "is_shared", "is_signed", "is_tensor", "ndimension", "nelement", "new_empty",
    "new_empty_strided", "new_full", "new_ones", "new_zeros", "numel", "ones_like", "rand_like", "randn_like",
    "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "result_type", "retain_grad", "size",
    "storage_offset", "stride", "view", "view_as", "zeros_like",
))  # fmt: skip
"""Names of functions that read no element of their arguments. Most views are not listed: torch checks that memory exists."""

_MAKES_TENSORS = frozenset(
    name for name in _NEEDS_NO_BYTES if name.endswith("_like") or name.startswith(("new_", "detach", "view"))
)
"""Names among these for which a subclass may have a version that reads elements."""

_GIVES_MEMORY = frozenset((
    "untyped_storage", "_typed_storage", "storage", "data_ptr", "numpy", "__array__", "set_", "share_memory_",
))  # fmt: skip
"""Names of functions after which other code may write the memory without increasing its version counter."""

_OWN = (
    "chameleon_mm.api.session", "chameleon_mm.device", "chameleon_mm.follow", "chameleon_mm.pool", "chameleon_mm.record",
    "chameleon_mm.state.hosted", "chameleon_mm.state.optimizer_swap", "chameleon_mm.state.parameter_swap",
    "chameleon_mm.state.parameter_watch", "chameleon_mm.state.swapped_state", "chameleon_mm.state.window", "chameleon_mm.swap",
)  # fmt: skip
"""Modules that inspect tensors, and access a parameter's bytes only through its entry."""

_DESCRIPTORS: Any = Tensor
_DATA = _DESCRIPTORS.data.__get__
_ARRAY_INTERFACE = _DESCRIPTORS.__cuda_array_interface__.__get__
_ELEMENTS = frozenset((
    *(getattr(_DESCRIPTORS, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")),
    *(getattr(_DESCRIPTORS, name).__set__ for name in ("real", "imag")),
    _DESCRIPTORS.__cuda_array_interface__.__get__,
))  # fmt: skip
"""Attributes that are views, or whose setters write elements. Other attributes need no bytes."""

_WRITES_SELF = frozenset((
    "__iadd__", "__iand__", "__ifloordiv__", "__ilshift__", "__imod__", "__imul__", "__ior__", "__ipow__", "__irshift__",
    "__isub__", "__itruediv__", "__ixor__", "__set__", "__setitem__",
))  # fmt: skip
"""Functions that write their first argument, although their names do not end with an underscore."""

_TYPED_STORAGE = Tensor._typed_storage.__code__
_REDUCE = Tensor._reduce_ex_internal.__code__

_CONVERSIONS = (torch.nn.Module._apply.__code__, torch.nn.Module._load_from_state_dict.__code__)

_LISTS = "_foreach_"
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"


class ParameterWatch(TorchFunctionMode):
    """Brings a torch function's arguments to the device before it runs."""

    def __init__(self, swap: ParameterSwap) -> None:
        super().__init__()
        self._swap = swap

    def __torch_function__(
        self, func: Callable[..., Any], kinds: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        caller = sys._getframe().f_back  # autograd's own thread has no caller, in a double backward
        while caller is not None and caller.f_code.co_name == "__torch_function__":  # a mode or subclass of the user
            caller = caller.f_back
        if caller is not None and caller.f_globals.get("__name__", "").startswith(_OWN):
            return func(*args, **kwargs)
        if caller is not None and caller.f_code in _CONVERSIONS and args:
            self._swap.refuse_swap_of(args[0])
        name = getattr(func, "__name__", "")
        if func in _BACKWARD:
            with self:  # Python code within a backward is seen
                return _BACKWARD[func](*args, **kwargs)
        needs_none = name in _NEEDS_NO_BYTES and not (kinds and name in _MAKES_TENSORS)
        if needs_none or (name in ("__get__", "__set__") and func not in _ELEMENTS):
            if func == _DATA:
                self._note_hidden(args)
            return func(*args, **kwargs)
        entries = self._entries_of((args, kwargs))
        if not entries or self._swap.is_at_work():  # at work: called through a user's mode
            return func(*args, **kwargs)
        if name == "untyped_storage" and caller is not None and _is_pickled(caller):
            return self._swap.pickled(args[0], entries[0]).untyped_storage()
        if name in _GIVES_MEMORY:
            self._note_hidden(args)
        if name == "__dlpack__" or func == _ARRAY_INTERFACE:
            self._swap.use(entries, name)
            entries[0].is_refused = True  # its memory is shared from now on, with no known end
        if (name.startswith(_LISTS) or name == _UNSCALE) and not self._swap.fit_together(entries):
            parts = list(self._parts(args, kwargs))
            if len(parts) > 1:
                return self._in_parts(func, name, parts)
        return self._call(func, name, args, kwargs, entries)

    def _note_hidden(self, values: Any) -> None:
        """Record that other code may write the memory of `values` from now on without increasing a version counter."""
        for entry in self._entries_of(values):
            entry.has_hidden_writers = True

    def _call(
        self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any], entries: Sequence[HostedStorage]
    ) -> Any:
        self._swap.use(entries, name)
        for entry in self._entries_of(_may_write(func, name, args, kwargs)):
            entry.host_is_current = False
        if self._swap.sees_saves() or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        begin = torch._C._autograd._get_sequence_nr()
        out = func(*args, **kwargs)
        self._swap.use_at(_nodes_since(begin, out), entries)
        return out

    def _entries_of(self, values: Any) -> list[HostedStorage]:
        found: dict[int, HostedStorage] = {}
        find_all = self._swap.find_all
        stack = [values]
        with torch._C.DisableTorchFunction():  # other modes may lie below this one
            while stack:
                value = stack.pop()
                if isinstance(value, Tensor):
                    for entry in find_all(value):
                        found[id(entry)] = entry
                elif isinstance(value, (tuple, list)):
                    stack.extend(reversed(value))
                elif isinstance(value, dict):
                    stack.extend(value.values())
        return list(found.values())

    # --- lists of tensors

    def _parts(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Yield the arguments of calls that together equal one call with `args`: all lists are cut at the same indexes. Yields
        a single call if torch may choose its kernels by the whole list."""
        tensors = args[0] if args and isinstance(args[0], (tuple, list)) else ()
        length = len(tensors)
        alike = len({(t.dtype, t.device) for t in tensors}) == 1
        alike = alike and all(t.layout is torch.strided and t.is_contiguous() for t in tensors)
        lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (tuple, list))]
        if length < 2 or not alike or any(len(one) != length for one in lists):
            yield tuple(args), kwargs
            return
        start = 0
        while start < length:
            end = start + 1
            while end < length and self._swap.fit_together(self._entries_of(_cut((*args, *kwargs.values()), start, end + 1))):
                end += 1
            yield _cut(args, start, end), dict(zip(kwargs, _cut(tuple(kwargs.values()), start, end), strict=True))
            start = end

    def _in_parts(self, func: Callable[..., Any], name: str, parts: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> Any:
        results: list[Any] = []
        returned = None
        for args, kwargs in parts:
            returned = self._call(func, name, args, kwargs, self._entries_of((args, kwargs)))
            if returned is not None:
                results.extend(returned)
        return None if returned is None else type(returned)(results)


def _cut(values: Sequence[Any], start: int, end: int) -> tuple[Any, ...]:
    return tuple(value[start:end] if isinstance(value, (tuple, list)) else value for value in values)


def _is_pickled(caller: FrameType) -> bool:
    """True if a pickler, not `copy.copy`, requests the storage. A pickler requests all storages before it reads their bytes."""
    reduces = caller.f_back
    if caller.f_code is not _TYPED_STORAGE or reduces is None or reduces.f_code is not _REDUCE:
        return False
    whose = None if reduces.f_back is None else reduces.f_back.f_back  # the caller of `__reduce_ex__`
    return whose is None or whose.f_globals.get("__name__") != "copy"


def _nodes_since(begin: int, out: Any) -> Iterator[Node]:
    """Yield the autograd nodes that lead to `out` and were made since sequence number `begin`."""
    outs = out if isinstance(out, (tuple, list)) else (out,)
    stack = [t.grad_fn for t in outs if isinstance(t, Tensor)]
    known = set()
    while stack:
        node = stack.pop()
        if node is None or node in known or node.name().endswith("AccumulateGrad") or node._sequence_nr() < begin:
            continue
        known.add(node)
        yield node
        stack.extend(before for before, _ in node.next_functions)


def _may_write(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the arguments that the call may write without increasing their version counters.

    Operators for lists increase no counter under a dispatch mode, fused optimizers never do, and custom operators may not. A
    tensor made by `.data` has a counter of its own.
    """
    if isinstance(func, torch._ops.OpOverload):
        return (args, kwargs) if func._schema.is_mutable else ()
    if isinstance(func, torch._ops.OpOverloadPacket):
        overloads = (getattr(func, name) for name in func.overloads())
        return (args, kwargs) if any(one._schema.is_mutable for one in overloads) else ()
    if "out" in kwargs:
        return kwargs["out"]
    if name not in _WRITES_SELF and (not name.endswith("_") or name.endswith("__")):
        return ()
    takes_lists = any(isinstance(value, (tuple, list)) for value in (*args, *kwargs.values()))
    if takes_lists and not (name.startswith(_LISTS) or name == _UNSCALE):
        return (args, kwargs)
    return (args[:1], kwargs)


def _backward(
    loss: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    _run_backward(loss, gradient, retain_graph, create_graph, inputs=inputs)


def _for_modes_too(function: Any) -> Any:
    """Return a copy of a Python function of torch without its check for torch function modes, so that it runs under one."""
    asks = {name: (lambda *tensors: False) for name in function.__code__.co_names if name.startswith("has_torch_function")}
    copied = types.FunctionType(
        function.__code__, {**function.__globals__, **asks}, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


_run_backward = _for_modes_too(torch.autograd.backward)

_BACKWARD: dict[Any, Callable[..., Any]] = {
    Tensor.backward: _backward,
    torch.autograd.backward: _run_backward,
    torch.autograd.grad: _for_modes_too(torch.autograd.grad),
}
"""Functions that run an autograd graph, each with a replacement that runs under a mode."""
