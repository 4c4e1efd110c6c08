"""What an operator does to a GPU, from its schema, read once per operator.

view, empty            -> no kernel: host time only
composite              -> taken apart first, as autograd does outside of inference mode
mutated, overwritten   -> which arguments are written, and whether they are read before
host_reads             -> the host needs the result, so it waits
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_HOST_READS = {
    "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive",
    "unique_dim_consecutive", "repeat_interleave", "bincount",
}  # fmt: skip
"""Operators whose result, or its size, the host needs before it goes on: on a GPU each waits for the stream."""

_UNINITIALISED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
"""Operators that allocate and write nothing."""

_NO_KERNEL = _UNINITIALISED | {"set_", "resize_", "resize_as_", "_unsafe_view", "lift", "detach"}
"""Operators that launch nothing, besides the views, which their schemas tell."""

_OVERWRITES = {
    "fill_", "zero_", "copy_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_",
    "_foreach_zero_", "_foreach_copy_",
}  # fmt: skip
"""Operators that write their first argument without reading it."""

_GATHERS = {"embedding", "index", "index_select", "gather"}
"""Operators that read no more of their source than they return."""

_COPIES = {"copy_", "_to_copy", "clone"}
"""Operators that are one copy, over the link where an end is pinned memory."""

_CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
"""Where an operator that is made of others has its kernel."""

FlopFormula = Callable[..., int]


@dataclass(frozen=True, slots=True)
class OpFacts:
    """One operator overload."""

    name: str
    composite: bool
    kernel: bool
    """Whether it launches one: no view, no bare allocation, no question about a shape."""
    uninitialised: bool
    copies: bool
    gathers: bool
    host_reads: bool
    in_place: bool
    """Whether it returns nothing but what it was given."""
    overwrites: bool
    """Whether what it mutates is not read."""
    mutated: tuple[int, ...]
    mutated_names: tuple[str, ...]
    flops: FlopFormula | None

    @staticmethod
    def of(func: torch._ops.OpOverload[Any, Any]) -> OpFacts:
        schema = func._schema
        name = schema.name.partition("::")[2]
        aliases = [r.alias_info for r in schema.returns]
        written = [(i, a) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        is_view = any(a is not None for a in aliases) and not written
        gives_tensors = any("Tensor" in str(r.type) for r in schema.returns)
        return OpFacts(
            name,
            composite=torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), COMPOSITE.name),
            kernel=not is_view and name not in _NO_KERNEL and (gives_tensors or bool(written) or name in _HOST_READS),
            uninitialised=name in _UNINITIALISED,
            copies=name in _COPIES,
            gathers=name in _GATHERS,
            host_reads=name in _HOST_READS,
            in_place=bool(written) and all(a is not None for a in aliases),
            overwrites=name in _OVERWRITES or all(a.kwarg_only for _, a in written),
            mutated=tuple(i for i, a in written if not a.kwarg_only),
            mutated_names=tuple(a.name for _, a in written),
            flops=_flop_formula(func),
        )


def _flop_formula(func: torch._ops.OpOverload[Any, Any]) -> FlopFormula | None:
    """Floating-point operations as a function of the operator's arguments and `out_val`; None where torch counts none."""
    from torch.utils import flop_counter  # imports triton where there is one: only a simulated step needs it

    # The fused attention of CPU builds, which torch's registry lacks: same formulas as its CUDA one.
    if func.overloadpacket.__name__ == _CPU_FLASH:
        return lambda *args, **_: int(flop_counter.sdpa_flop_count(*(t.shape for t in args[:3])))
    if func.overloadpacket.__name__ == f"{_CPU_FLASH}_backward":
        return lambda *args, **_: int(flop_counter.sdpa_backward_flop_count(*(t.shape for t in args[:4])))
    formula: FlopFormula | None = flop_counter.flop_registry.get(func.overloadpacket)
    return formula
