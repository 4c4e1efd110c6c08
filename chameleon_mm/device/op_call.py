"""One call of an operator: the plain tensors that go in, those it mutates, those it writes.

    call = OpCall(OpFacts.of(func), func, args, kwargs, device_type="cuda")     # inputs and mutated are known
    out = call.run()                                                            # written is known
    call.flops(), call.touched_bytes()                                          # what it asks of a GPU

For dispatch modes: the simulated compute and the recorder see the same calls.

A mode's handler has to run them as eager would. A complex tensor's `conj()`, `mH` and `imag` may be views with a bit set, which
dispatch keys resolve before a kernel reads them. For the length of the handler torch excludes all keys above the mode's, these
among them: an operator that makes such a view inside itself then computes with numbers that are not conjugated. `linalg.pinv`
of a complex matrix is wrong in its first digit under any dispatch mode that does nothing at all. So `lazy_bits_resolved`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from chameleon_mm.device.operators import OpFacts, updated_statistics

_Key = torch._C.DispatchKey
_RESOLVE = (_Key.Conjugate, _Key.Negative, _Key.ZeroTensor)

Tensors = dict[int, Tensor]
"""Distinct tensors by their id."""


def lazy_bits_resolved() -> torch._C._ForceDispatchKeyGuard:
    """A context in which operators resolve the bits of what they make, as they do outside of dispatch modes."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _RESOLVE:
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def may_have_lazy_bits(tensors: Iterable[Tensor]) -> bool:
    """Whether an operator that is given `tensors` may make views with such a bit: they begin with complex numbers."""
    return any(t.is_complex() or t.is_neg() for t in tensors)


class OpCall:
    """A call of an operator that is not composite. Of its tensors those count whose memory is of `device_type`, fake or not."""

    __slots__ = ("args", "device_type", "facts", "func", "inputs", "kwargs", "mutated", "out", "written")

    def __init__(self, facts: OpFacts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, device_type: str) -> None:
        self.facts = facts
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.device_type = device_type
        self.out: Any = None
        self.inputs: Tensors = {}
        self.mutated: Tensors = {}
        self.written: Tensors = {}
        collect_tensors(args, device_type, self.inputs)
        if kwargs:
            collect_tensors(kwargs.values(), device_type, self.inputs)
        if facts.mutated_names:
            collect_tensors((args[i] for i in facts.mutated if i < len(args)), device_type, self.mutated)
            collect_tensors((kwargs[name] for name in facts.mutated_names if name in kwargs), device_type, self.mutated)
        if facts.hidden_writes:
            collect_tensors(updated_statistics(facts, args), device_type, self.mutated)

    def run(self) -> Any:
        """Run it, once: what it returned and mutated is `written` afterwards. Torch function modes do not see it, as they see
        no operator that C++ calls."""
        resolved = lazy_bits_resolved() if may_have_lazy_bits(self.inputs.values()) else nullcontext()
        with torch._C.DisableTorchFunction(), resolved:
            self.out = self.func(*self.args, **self.kwargs)
        self.written = dict(self.mutated)
        collect_tensors((self.out,), self.device_type, self.written)
        return self.out

    def read(self) -> list[Tensor]:
        """Tensors that the operator reads: not those that it only overwrites, or whose shape it asks for."""
        if self.facts.asks_for_shape:
            return []
        if self.facts.overwrites:
            return [t for key, t in self.inputs.items() if key not in self.mutated]
        return list(self.inputs.values())

    @property
    def dtype(self) -> torch.dtype:
        """dtype of what is written, which decides the rate of a product: half precision in, half precision out."""
        for t in (*self.written.values(), *self.inputs.values()):
            return t.dtype
        return torch.float32

    @property
    def non_blocking(self) -> bool:
        """Whether a copy asks the host not to wait: `copy_(self, src, non_blocking)`, or by name."""
        return bool(self.kwargs.get("non_blocking") or (self.facts.name == "copy_" and len(self.args) > 2 and self.args[2]))

    def flops(self) -> int:
        """Floating-point operations of the call, once it has run; 0 where torch counts none."""
        formula = self.facts.flops
        return 0 if formula is None else self.ask(formula, out_val=self.out)

    def ask(self, formula: Callable[..., int], **more: Any) -> int:
        """Number that a formula gives for the operator's own arguments; 0 where their sizes are no numbers.

        A formula asks for sizes. An irregular dimension of a nested tensor has none, a symbolic one no number, and a subclass
        may refuse. The operator runs with them, so the formula must not fail. Plain tensors have sizes: an error for them is
        raised.
        """
        try:
            return int(formula(*self.args, **self.kwargs, **more))
        except Exception:
            if have_plain_sizes((self.args, *self.kwargs.values(), *more.values())):
                raise
            return 0

    def touched_bytes(self) -> int:
        """Bytes read and written by the call, once it has run, each tensor's by its own count."""
        written = sum(_nbytes(t) for t in self.written.values())
        read = sum(_nbytes(t) for t in self.read())
        return written + (min(read, 2 * written) if self.facts.gathers else read)


def collect_tensors(values: Iterable[Any], device_type: str, found: Tensors) -> None:
    """The strided tensors of a kind of device in a nest of arguments; of sparse ones their indices and values, of nested ones
    the buffer that holds them all."""
    for value in values:
        if isinstance(value, Tensor):
            if value.device.type == device_type:
                if value.layout is torch.strided and not value.is_nested:
                    found[id(value)] = value
                else:
                    collect_tensors(_parts(value), device_type, found)
        elif isinstance(value, (tuple, list)):
            collect_tensors(value, device_type, found)


def have_plain_sizes(values: Iterable[Any]) -> bool:
    """True if all tensors in a nest of arguments are torch's own strided ones."""
    for value in values:
        if isinstance(value, Tensor):
            if type(value) not in (Tensor, Parameter) or value.layout is not torch.strided or value.is_nested:
                return False
        elif isinstance(value, (tuple, list)) and not have_plain_sizes(value):
            return False
    return True


def _nbytes(t: Tensor) -> int:
    """Bytes of a tensor's elements, those that a stride of 0 repeats counted once, roughly: never more than its storage has."""
    return min(t.numel() * t.element_size(), t.untyped_storage().nbytes())


def _parts(sparse: Tensor) -> tuple[Tensor, ...]:
    if sparse.is_nested:
        return (sparse.values(),)
    if sparse.layout is torch.sparse_coo:
        return sparse._indices(), sparse._values()
    if sparse.layout in (torch.sparse_csr, torch.sparse_bsr):
        return sparse.crow_indices(), sparse.col_indices(), sparse.values()
    if sparse.layout in (torch.sparse_csc, torch.sparse_bsc):
        return sparse.ccol_indices(), sparse.row_indices(), sparse.values()
    return ()  # MKL-DNN's own layout: no storage to look at
