"""Facts about what an operator does to a GPU, from its schema and torch's table of kernels: for dispatch modes.

view, empty            -> no kernel: host time only
composite              -> taken apart first, as autograd does outside of inference mode: runs_in_parts, run_in_parts
mutated, overwritten   -> which arguments are written, and whether they are read before
host_reads             -> the host needs the result, so it waits
repeatable, random     -> whether one that failed may run again, and whether its generator goes back first

    composite_on("aten::matmul", "cpu")           no dense kernel of the CPU's own: torch runs the composite one
    composite_on("aten::silu_backward", "cpu")    has one, and a composite kernel beside it: runs as it is
    own_kernel_for("aten::matmul", tensors)       nested tensors have a kernel of their own where dense ones have none

Below autograd torch runs the first kernel that there is of: the device's own, CompositeExplicitAutogradNonFunctional,
CompositeExplicitAutograd, CompositeImplicitAutograd. Only the last is made of operators that autograd sees, too. Above, at
autograd's keys, it is taken if no kernel of the device and no CompositeExplicitAutograd is there, so that a dispatch mode sees
a composite operator whole in inference mode alone, and any other always. (c10's `OperatorEntry::computeDispatchTableEntry`.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from chameleon_mm.trace import replayable

GPU = "cuda"
"""Type of device that a step of fake tensors is recorded for."""

CUDA_KERNELS = frozenset({"aten::_fused_rms_norm", "aten::mish_backward", "aten::silu_backward"})
"""Operators that have a composite kernel and one of CUDA's: what a build of torch without CUDA cannot say.

From torch's CUDA build: all names of `torch._C._dispatch_get_all_op_names()` that `_dispatch_has_kernel_for_dispatch_key` has a
kernel of for both "CompositeImplicitAutograd" and "CUDA". 2.11 has these, and the declarations of 2.13 say the same
(torchgen/packaged/ATen/native/native_functions.yaml). `tests/test_composite.py` compares with both.
"""

_IMPLICIT = "CompositeImplicitAutograd"
_BEFORE_IMPLICIT = ("CompositeExplicitAutogradNonFunctional", "CompositeExplicitAutograd")

_HOST_READS = {
    "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive",
    "unique_dim_consecutive", "repeat_interleave", "bincount",
}  # fmt: skip
"""Operators whose result, or its size, the host needs before it goes on: on a GPU each waits for the stream."""

_UNINITIALISED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}

_NO_KERNEL = _UNINITIALISED | {"set_", "resize_", "resize_as_", "_unsafe_view", "lift", "detach"}
"""Operators that launch nothing, besides the views, which their schemas tell."""

_ASKS_FOR_SHAPE = {
    "empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like",
    "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros",
}  # fmt: skip
"""Operators that make a tensor like the one that they are given, and read nothing of it."""

_OVERWRITES = {
    "fill_", "zero_", "copy_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_",
    "_foreach_zero_", "_foreach_copy_",
}  # fmt: skip
"""Operators that write their first argument without reading it."""

_GATHERS = {"embedding", "index", "index_select", "gather"}
"""Operators that read no more of their source than they return."""

_COPIES = {"copy_", "_to_copy", "clone"}
"""Operators that are one copy, over the link where an end is pinned memory."""

BATCH_NORMS = frozenset(name.removeprefix("aten::") for name in replayable.BATCH_NORMS)
"""Batch norms of which it is known what they write to: arguments `_RUNNING`, the running statistics, if `_TRAINING` says so."""
_RUNNING, _TRAINING = slice(3, 5), 5

_HIDDEN_WRITES = BATCH_NORMS | {
    "_batch_norm_impl_index", "batch_norm_update_stats", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts",
}  # fmt: skip
"""Operators that update running statistics and do not say so; those of `c10d` do not say either what they write to."""

_COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor", "symm_mem"}
"""Namespaces whose operators talk to other processes: one that runs twice here would be waited for twice there."""

_TORCHS_OWN = {"aten", "prims"}
"""Namespaces whose operators say by a tag whether they draw random numbers; another's may not know of the tag."""

_CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
"""Key of the kernel in which an operator that is made of others calls them."""

FlopFormula = Callable[..., int]


def composite_on(name: str, device_type: str) -> bool:
    """Whether dense tensors on a device of this type run the operator's composite kernel. name: with namespace and overload."""
    return (
        _has(name, _IMPLICIT)
        and not any(_has(name, key) for key in _BEFORE_IMPLICIT)
        and not _has(name, torch._C._dispatch_key_for_device(device_type))
        and not (device_type == GPU and name in CUDA_KERNELS and not torch.backends.cuda.is_built())
    )


def own_kernel_for(name: str, tensors: Iterable[Tensor]) -> bool:
    """Whether one of `tensors` is nested, sparse or in another layout that has a kernel of its own for the operator."""
    return any(_has(name, key) for t in tensors for key in _keys_beside_dense(t))


def _keys_beside_dense(t: Tensor) -> tuple[str, ...]:
    backend = torch._C._dispatch_key_for_device(t.device.type)
    if t.is_nested:
        return f"NestedTensor{backend}", "CompositeImplicitAutogradNestedTensor"
    if t.is_quantized:
        return (f"Quantized{backend}",)
    if t.is_mkldnn:
        return (f"Mkldnn{backend}",)
    if t.layout is torch.sparse_coo:
        return (f"Sparse{backend}",)
    return () if t.layout is torch.strided else (f"SparseCsr{backend}",)


def _has(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


@dataclass(frozen=True, slots=True)
class OpFacts:
    """Facts about one operator overload."""

    name: str
    composite: bool = False
    """Whether dense tensors run it as the operators that it is made of: the device has no kernel of its own for it."""
    kernel: bool = False
    """Whether it launches one: no view, no bare allocation, no question about a shape."""
    question: bool = False
    """Whether it only asks what a tensor is: nothing runs, and nothing is made."""
    uninitialised: bool = False
    copies: bool = False
    asks_for_shape: bool = False
    """Whether it reads no element of what it is given."""
    gathers: bool = False
    host_reads: bool = False
    in_place: bool = False
    """Whether it returns nothing but what it was given."""
    overwrites: bool = False
    """Whether what it mutates is not read."""
    mutated: tuple[int, ...] = ()
    mutated_names: tuple[str, ...] = ()
    repeatable: bool = False
    """Whether one that failed may run again: it writes nothing that it was given, and talks to nobody."""
    is_torchs_own: bool = True
    """Whether torch made it, so that all of it is known; another's may talk to other processes whatever its schema says."""
    hidden_writes: bool = False
    """Whether it may write to what it is given although its schema does not say so."""
    random: bool = False
    flops: FlopFormula | None = None

    @staticmethod
    def of(func: torch._ops.OpOverload[Any, Any] | torch._ops.HigherOrderOperator, device_type: str = "cpu") -> OpFacts:
        """Facts of an overload where it runs on a device of this type, "cuda" on a machine without one, too; of a higher-order
        operator, which has no schema, what is safe to assume of any."""
        if isinstance(func, torch._ops.HigherOrderOperator):
            return OpFacts(func.name(), kernel=True, random=True)
        return _from_schema(func, device_type)


def running_statistics(facts: OpFacts, args: Sequence[Any]) -> list[Any]:
    """Running statistics that one of the `BATCH_NORMS` is given, or whatever stands for them; of other operators none."""
    return [t for t in args[_RUNNING] if t is not None] if facts.name in BATCH_NORMS else []


def updated_statistics(facts: OpFacts, args: Sequence[Any]) -> list[Tensor]:
    """Running statistics that one of the `BATCH_NORMS` writes to; of other operators none."""
    return running_statistics(facts, args) if facts.name in BATCH_NORMS and any(args[_TRAINING : _TRAINING + 1]) else []


class OpFactsCache(dict[Any, OpFacts]):
    """Facts by operator, for one type of device: `facts[func]` reads an operator's schema the first time."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type

    def __missing__(self, func: Any) -> OpFacts:
        facts = self[func] = OpFacts.of(func, self._device_type)
        return facts


def runs_in_parts(facts: OpFacts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call runs the composite kernel: not where an argument's layout has a kernel of its own."""
    if not facts.composite:
        return False
    return not own_kernel_for(func.name(), (t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)))


def run_in_parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: TorchDispatchMode) -> Any:
    """Run a composite operator as the operators that it is made of, which `mode` sees."""
    with mode:
        # Not `decompose`: that prefers Python decompositions, which need not give eager's bits.
        return func._op_dk(_COMPOSITE, *args, **kwargs)


def _from_schema(func: torch._ops.OpOverload[Any, Any], device_type: str) -> OpFacts:
    schema = func._schema
    namespace, _, name = schema.name.partition("::")
    aliases = [r.alias_info for r in schema.returns]
    written = [(i, a) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    is_view = any(a is not None for a in aliases) and not written
    gives_tensors = any("Tensor" in str(r.type) for r in schema.returns)
    runs = gives_tensors or bool(written) or name in _HOST_READS
    # `prim` are questions alone, which the dispatcher's table does not have: to ask it about one raises.
    composite = namespace != "prim" and composite_on(func.name(), device_type)
    return OpFacts(
        name,
        composite=composite,
        kernel=not is_view and name not in _NO_KERNEL and runs,
        question=not composite and not runs,
        uninitialised=name in _UNINITIALISED,
        copies=name in _COPIES,
        asks_for_shape=name in _ASKS_FOR_SHAPE,
        gathers=name in _GATHERS,
        host_reads=name in _HOST_READS,
        in_place=bool(written) and all(a is not None for a in aliases),
        overwrites=name in _OVERWRITES or all(a.kwarg_only for _, a in written),
        mutated=tuple(i for i, a in written if not a.kwarg_only),
        mutated_names=tuple(a.name for _, a in written),
        is_torchs_own=namespace in _TORCHS_OWN,
        repeatable=not schema.is_mutable and name not in _HIDDEN_WRITES and namespace not in _COLLECTIVES,
        hidden_writes=name in _HIDDEN_WRITES or (namespace == "c10d" and not written),
        random=torch.Tag.nondeterministic_seeded in func.tags or namespace not in _TORCHS_OWN,
        flops=_flop_formula(func),
    )


def _flop_formula(func: torch._ops.OpOverload[Any, Any]) -> FlopFormula | None:
    """Floating-point operations as a function of the operator's arguments and `out_val`; None where torch counts none."""
    from torch.utils import flop_counter  # imports triton where there is one: simulated and recorded steps alone need it

    # The fused attention of CPU builds, which torch's registry lacks: same formulas as its CUDA one.
    if func.overloadpacket.__name__ == _CPU_FLASH:
        return lambda *args, **_: int(flop_counter.sdpa_flop_count(*(t.shape for t in args[:3])))
    if func.overloadpacket.__name__ == f"{_CPU_FLASH}_backward":
        return lambda *args, **_: int(flop_counter.sdpa_backward_flop_count(*(t.shape for t in args[:4])))
    formula: FlopFormula | None = flop_counter.flop_registry.get(func.overloadpacket)
    return formula
