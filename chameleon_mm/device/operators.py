"""Facts about an operator's behaviour on a GPU, from its schema and torch's table of kernels. For dispatch modes.

view, empty            -> no kernel: host time only
composite              -> decomposed first, as autograd does outside inference mode: runs_in_parts, run_in_parts
mutated, overwrites    -> the arguments that are written, and whether they are read before
host_reads             -> the host needs the result, so it waits
repeatable, random     -> whether a failed call may run again, and whether its generator is restored first

    composite_on("aten::matmul", "cpu")           True: no dense CPU kernel, so torch runs the composite one
    composite_on("aten::silu_backward", "cpu")    False: runs its CPU kernel, although a composite one exists

Below autograd, torch runs the first kernel that exists of: the device's, CompositeExplicitAutogradNonFunctional,
CompositeExplicitAutograd, CompositeImplicitAutograd. Only the last one calls operators that autograd also sees. At autograd's
keys it runs if the device has no kernel and there is no CompositeExplicitAutograd kernel. So a dispatch mode sees a composite
operator whole in inference mode only, and any other operator always. (c10's `OperatorEntry::computeDispatchTableEntry`.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from chameleon_mm import replayable
from chameleon_mm.units import allocated_size, round_up

GPU = "cuda"
"""Device type for which a step of fake tensors is recorded."""

CUDA_KERNELS = frozenset({"aten::_fused_rms_norm", "aten::mish_backward", "aten::silu_backward"})
"""Operators with both a composite and a CUDA kernel. A torch build without CUDA cannot tell.

From torch's CUDA build: all names of `torch._C._dispatch_get_all_op_names()` for which `_dispatch_has_kernel_for_dispatch_key`
is true for both "CompositeImplicitAutograd" and "CUDA". From 2.11; the declarations of 2.13 give the same set
(torchgen/packaged/ATen/native/native_functions.yaml). `tests/test_composite.py` compares with both.
"""

_IMPLICIT = "CompositeImplicitAutograd"
_BEFORE_IMPLICIT = ("CompositeExplicitAutogradNonFunctional", "CompositeExplicitAutograd")

_HOST_READS = {
    "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive",
    "unique_dim_consecutive", "repeat_interleave", "bincount",
}  # fmt: skip
"""Operators whose result, or the size of it, the host needs at once: on a GPU each waits for the stream."""

_UNINITIALISED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}

_NO_KERNEL = _UNINITIALISED | {"set_", "resize_", "resize_as_", "_unsafe_view", "lift", "detach"}
"""Operators that launch no kernel, besides the views, which schemas identify."""

_ASKS_FOR_SHAPE = {
    "empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like",
    "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros",
}  # fmt: skip
"""Operators that make a tensor like their argument without reading its elements."""

_OVERWRITES = {
    "fill_", "zero_", "copy_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_",
    "_foreach_zero_", "_foreach_copy_",
}  # fmt: skip
"""Operators that write their first argument without reading it."""

_GATHERS = {"embedding", "index", "index_select", "gather"}
"""Operators that read no more of their source than they return."""

_COPIES = {"copy_", "_to_copy", "clone", "_foreach_copy_"}
"""Operators that only copy; a copy crosses the link if one end is host memory."""

BATCH_NORMS = frozenset(name.removeprefix("aten::") for name in replayable.BATCH_NORMS)
"""Batch norms whose writes are known: the arguments `_RUNNING` (running statistics), if the argument `_TRAINING` is true."""
_RUNNING, _TRAINING = slice(3, 5), 5

_HIDDEN_WRITES = BATCH_NORMS | {
    "_batch_norm_impl_index", "batch_norm_update_stats", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts",
}  # fmt: skip
"""Operators that update running statistics although their schema does not say so. `c10d` operators hide writes, too."""

_COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor", "symm_mem"}
"""Namespaces whose operators communicate with other processes: a second run here would wait for a second run there."""

_TORCHS_OWN = {"aten", "prims"}
"""Namespaces whose operators have a tag if they draw random numbers. Others may lack the tag although they draw."""

_CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
"""Key of the kernel in which a composite operator calls other operators."""

FlopFormula = Callable[..., int]


def composite_on(name: str, device_type: str) -> bool:
    """True if dense tensors on this type of device run the operator's composite kernel. name: with namespace and overload."""
    return (
        _has(name, _IMPLICIT)
        and not any(_has(name, key) for key in _BEFORE_IMPLICIT)
        and not _has(name, torch._C._dispatch_key_for_device(device_type))
        and not (device_type == GPU and name in CUDA_KERNELS and not torch.backends.cuda.is_built())
    )


def _has(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


@dataclass(frozen=True, slots=True)
class OpFacts:
    name: str
    composite: bool = False
    """True if dense tensors run it decomposed into other operators, because the device has no kernel for it."""
    kernel: bool = False
    """True if it launches a kernel: it is not a view, a bare allocation or a shape query."""
    question: bool = False
    """True if it only queries properties of a tensor: it computes nothing and returns no tensor."""
    uninitialised: bool = False
    copies: bool = False
    asks_for_shape: bool = False
    """True if it reads no element of its arguments."""
    gathers: bool = False
    host_reads: bool = False
    in_place: bool = False
    """True if it returns only its arguments."""
    overwrites: bool = False
    """True if it writes its mutated arguments without reading them."""
    mutated: tuple[int, ...] = ()
    mutated_names: tuple[str, ...] = ()
    repeatable: bool = False
    """True if a failed call may run again: it writes no argument and does not communicate with other processes."""
    is_torchs_own: bool = True
    """True if it is part of torch, so its effects are known. Others may communicate although their schema does not say so."""
    hidden_writes: bool = False
    """True if it may write to arguments although its schema does not say so."""
    random: bool = False
    flops: FlopFormula | None = None

    @staticmethod
    def of(func: torch._ops.OpOverload[Any, Any] | torch._ops.HigherOrderOperator, device_type: str = "cpu") -> OpFacts:
        """Return the facts of an overload on a device of this type ("cuda" works without a GPU). A higher-order operator has no
        schema and gets the safe assumptions."""
        if isinstance(func, torch._ops.HigherOrderOperator):
            return OpFacts(func.name(), kernel=True, random=True)
        schema = func._schema
        namespace, _, name = schema.name.partition("::")
        aliases = [r.alias_info for r in schema.returns]
        written = [(i, a) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        is_view = any(a is not None for a in aliases) and not written
        gives_tensors = any("Tensor" in str(r.type) for r in schema.returns)
        runs = gives_tensors or bool(written) or name in _HOST_READS
        # `prim` operators are all queries. The dispatcher's table lacks them, and a lookup there raises.
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


def running_statistics(facts: OpFacts, args: Sequence[Any]) -> list[Any]:
    """Running statistics (or placeholders for them) in the arguments of one of the `BATCH_NORMS`; empty for other operators."""
    return [t for t in args[_RUNNING] if t is not None] if facts.name in BATCH_NORMS else []


def updated_statistics(facts: OpFacts, args: Sequence[Any]) -> list[Tensor]:
    """Running statistics that one of the `BATCH_NORMS` writes to; empty for other operators."""
    return running_statistics(facts, args) if facts.name in BATCH_NORMS and any(args[_TRAINING : _TRAINING + 1]) else []


def without_updates(facts: OpFacts, args: Sequence[Any]) -> Sequence[Any]:
    """Return arguments with which the call makes the same results without updating running statistics, which it does not read.
    Returns `args` if it updates none."""
    return (*args[: _RUNNING.start], None, None, *args[_RUNNING.stop :]) if updated_statistics(facts, args) else args


class OpFactsCache(dict[Any, OpFacts]):
    """Facts by operator, for one device type: `facts[func]` reads an operator's schema on first use."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type

    def __missing__(self, func: Any) -> OpFacts:
        facts = self[func] = OpFacts.of(func, self._device_type)
        return facts


def runs_in_parts(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if this call is to run as the operators of its composite kernel. A call with a nested, sparse or other tensor runs
    whole: its layout may have its own kernel."""
    if not facts.composite:
        return False
    tensors = (t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor))
    return all(t.layout is torch.strided and not (t.is_nested or t.is_quantized or t.is_mkldnn) for t in tensors)


def run_in_parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: TorchDispatchMode) -> Any:
    """Run a composite operator as the operators of which it consists. `mode` sees these."""
    with mode:
        # Not `decompose`: it prefers Python decompositions, whose bits may differ from eager's.
        return func._op_dk(_COMPOSITE, *args, **kwargs)


def _flop_formula(func: torch._ops.OpOverload[Any, Any]) -> FlopFormula | None:
    """Floating-point operations as a function of the operator's arguments and `out_val`; None if torch has no formula. Torch
    counts all of causal attention, of which fused kernels compute half."""
    from torch.utils import flop_counter  # imports triton if installed; only simulated and recorded steps need it

    formula: FlopFormula | None = flop_counter.flop_registry.get(func.overloadpacket)
    # Fused attention of CPU builds is missing in torch's registry: use the formulas of the CUDA one.
    if func.overloadpacket.__name__ == _CPU_FLASH:
        formula = lambda *args, **_: int(flop_counter.sdpa_flop_count(*(t.shape for t in args[:3])))  # noqa: E731 - one of two formulas
    if func.overloadpacket.__name__ == f"{_CPU_FLASH}_backward":
        formula = lambda *args, **_: int(flop_counter.sdpa_backward_flop_count(*(t.shape for t in args[:4])))  # noqa: E731 - one of two formulas
    causal = next((i for i, a in enumerate(func._schema.arguments) if a.name == "is_causal"), None)
    if formula is None or causal is None:
        return formula
    whole = formula

    def computed(*args: Any, **kwargs: Any) -> int:
        is_causal = kwargs.get("is_causal", args[causal] if causal < len(args) else False)
        return whole(*args, **kwargs) // (2 if is_causal else 1)

    return computed


# --- Call of an operator: its plain input tensors, mutated tensors and written tensors.
#
# For dispatch modes: the simulated compute and the recorder see the same calls.
#
# A mode's handler must run them as eager does. `conj()`, `mH` and `imag` of a complex tensor may be views with a bit set, which
# dispatch keys resolve before a kernel reads them. During the handler torch excludes all keys above the mode's, these included.
# So an operator that makes such a view internally computes with numbers that are not conjugated. Example: `linalg.pinv` of a
# complex matrix is wrong in its first digit under a dispatch mode that does nothing. `lazy_bits_resolved` corrects this.

_Key = torch._C.DispatchKey
_RESOLVE = (_Key.Conjugate, _Key.Negative, _Key.ZeroTensor)

Tensors = dict[int, Tensor]
"""Distinct tensors by their id."""


def lazy_bits_resolved() -> torch._C._ForceDispatchKeyGuard:
    """Return a context in which operators resolve the bits of views that they make, as outside dispatch modes."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _RESOLVE:
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def may_have_lazy_bits(tensors: Iterable[Tensor]) -> bool:
    """True if an operator on `tensors` may make views with such a bit: some are complex, or have the negative bit."""
    return any(t.is_complex() or t.is_neg() for t in tensors)


class OpCall:
    """A call of an operator that is not composite. Only its tensors on `device_type` count, fake ones included."""

    __slots__ = ("args", "device_type", "facts", "func", "inputs", "kwargs", "mutated", "out", "written")

    def __init__(self, facts: OpFacts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, device_type: str) -> None:
        self.facts, self.func, self.args, self.kwargs, self.device_type = facts, func, args, kwargs, device_type
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
        """Run it, once. Afterwards `written` has the returned and mutated tensors."""
        with lazy_bits_resolved() if may_have_lazy_bits(self.inputs.values()) else nullcontext():
            self.out = self.func(*self.args, **self.kwargs)
        self.written = dict(self.mutated)
        collect_tensors((self.out,), self.device_type, self.written)
        return self.out

    def read(self) -> list[Tensor]:
        """Tensors that the operator reads, without those that it only overwrites or whose shape it queries."""
        if self.facts.asks_for_shape:
            return []
        if self.facts.overwrites:
            return [t for key, t in self.inputs.items() if key not in self.mutated]
        return list(self.inputs.values())

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the written tensors. It decides the rate of a product: half precision in gives half precision out."""
        for t in (*self.written.values(), *self.inputs.values()):
            return t.dtype
        return torch.float32

    @property
    def non_blocking(self) -> bool:
        """True if a copy has `non_blocking` set: `copy_(self, src, non_blocking)`, or by keyword."""
        by_place = self.facts.name in ("copy_", "_foreach_copy_") and len(self.args) > 2 and self.args[2]
        return bool(self.kwargs.get("non_blocking") or by_place)

    def link_bytes(self, owns: Callable[[Tensor], bool]) -> tuple[int, int]:
        """Bytes that the call copied to the host, and from the host, after it has run. `owns`: as `Device.owns`."""
        if not self.facts.copies:
            return 0, 0
        given = (*self.args, *self.kwargs.values())
        if self.facts.name == "_foreach_copy_":
            pairs = list(zip(given[1], given[0], strict=True))
        else:
            pairs = [(given[1 if self.facts.name == "copy_" else 0], self.out)]
        out_bytes = back_bytes = 0
        for pair in pairs:
            if not all(isinstance(t, Tensor) and t.layout is torch.strided for t in pair):
                continue
            (was_ours, was_host), (is_ours, is_host) = ((owns(t), t.is_cpu and not owns(t)) for t in pair)
            nbytes = touched_bytes(pair[1])
            out_bytes += nbytes * (was_ours and is_host)
            back_bytes += nbytes * (was_host and is_ours)
        return out_bytes, back_bytes

    def flops(self) -> int:
        """Floating-point operations of the call, after it has run; 0 if torch has no formula."""
        formula = self.facts.flops
        return 0 if formula is None else self.ask(formula, out_val=self.out)

    def ask(self, formula: Callable[..., int], **more: Any) -> int:
        """Evaluate a formula on the operator's arguments; 0 if their sizes are not numbers.

        A formula reads sizes. An irregular dimension of a nested tensor has no size, a symbolic dimension has no number, and a
        subclass may refuse. The operator runs with such tensors, so the formula must not fail. For plain tensors, which have
        sizes, an error is raised.
        """
        try:
            return int(formula(*self.args, **self.kwargs, **more))
        except Exception:
            tensors = (t for t in tree_iter((self.args, *self.kwargs.values(), *more.values())) if isinstance(t, Tensor))
            if all(type(t) in (Tensor, Parameter) and t.layout is torch.strided and not t.is_nested for t in tensors):
                raise
            return 0

    def touched_bytes(self) -> int:
        """Bytes read and written by the call, after it has run, counted per tensor."""
        written = sum(map(touched_bytes, self.written.values()))
        read = sum(map(touched_bytes, self.read()))
        return written + (min(read, 2 * written) if self.facts.gathers else read)


def collect_tensors(values: Iterable[Any], device_type: str, found: Tensors) -> None:
    """Add to `found` the strided tensors on `device_type` in nested arguments. For sparse tensors: their indices and values;
    for nested tensors: their common buffer."""
    for value in values:
        if isinstance(value, Tensor):
            if value.device.type == device_type:
                if value.layout is torch.strided and not value.is_nested:
                    found[id(value)] = value
                else:
                    collect_tensors(_parts(value), device_type, found)
        elif isinstance(value, (tuple, list)):
            collect_tensors(value, device_type, found)


def touched_bytes(t: Tensor) -> int:
    """Bytes of `t` that an operator touches: those of its elements, or the span from first to last element if that is less."""
    count = t.numel()
    if count == 0 or t.is_contiguous():
        return count * t.element_size()
    reach = 1 + sum(int(stride) * (int(size) - 1) for size, stride in zip(t.shape, t.stride(), strict=True))
    return min(count, reach) * t.element_size()


def _parts(sparse: Tensor) -> tuple[Tensor, ...]:
    if sparse.is_nested:
        return (sparse.values(),)
    if sparse.layout is torch.sparse_coo:
        return sparse._indices(), sparse._values()
    if sparse.layout in (torch.sparse_csr, torch.sparse_bsr):
        return sparse.crow_indices(), sparse.col_indices(), sparse.values()
    if sparse.layout in (torch.sparse_csc, torch.sparse_bsc):
        return sparse.ccol_indices(), sparse.row_indices(), sparse.values()
    return ()  # MKL-DNN layout: has no storage


# --- Scratch memory of operators, by formula: device memory that they allocate and free while they run.
#
# On a GPU the recorder measures it for every operator. The simulator runs CPU kernels, whose scratch memory says nothing about
# a GPU's, and fake tensors run no kernel. So formulas from torch's sources cover the operators whose scratch memory decides
# peaks. Not covered: convolutions and matrix products, whose libraries choose a workspace at run time; sorting and scanning,
# whose scratch memory is cub's; operators that need only a few KiB.

_FOREACH_CHUNK = 65_536
"""Elements per block of a `_foreach` kernel: kChunkSize of aten/src/ATen/native/cuda/MultiTensorApply.cuh."""

_UNSORTED_INDICES = 3072
"""Maximum number of indices for which an embedding's backward does not sort them."""

_ROWS_PER_PARTIAL_SUM = 10
"""NROWS_PER_THREAD of aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu."""


def inner_bytes(call: OpCall) -> int:
    """Maximum bytes that a GPU's allocator counts while `call` runs, without its inputs and results."""
    formula = _FORMULAS.get(call.facts.name)
    if formula is None or call.func.namespace != "aten":
        return 0
    return call.ask(lambda *args, **kwargs: sum(allocated_size(int(nbytes)) for nbytes in formula(*args, **kwargs)))


def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> list[int]:
    """Bytes of: a bool per element (it is -inf); a bool per row (all are -inf); the 0 that fills such rows. From
    aten/src/ATen/native/transformers/attention.cpp. The CUDA build's allocator counts the same."""
    size = x.size(dim) if x.dim() else 1
    return [x.numel(), x.numel() // size if size else 0, (x.dtype if dtype is None else dtype).itemsize]


def _foreach_norm(tensors: list[Tensor], *_: object, **__: object) -> list[int]:
    """Bytes of the partial norms: for every tensor, one per chunk of the longest tensor. From
    aten/src/ATen/native/cuda/ForeachReduceOp.cu."""
    chunks = max(-(-t.numel() // _FOREACH_CHUNK) for t in tensors)
    return [len(tensors) * chunks * _summing_dtype(tensors[0].dtype).itemsize]


def _embedding_dense_backward(
    grad: Tensor, indices: Tensor, num_weights: int, _padding_idx: int, scale_grad_by_freq: bool, **_: object
) -> list[int]:
    """Bytes of: sorted indices and their origins, with the sort's scratch memory; their segments; one gradient row per partial
    sum, in the dtype of sums. From aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu."""
    n = indices.numel()
    if n <= _UNSORTED_INDICES and not scale_grad_by_freq:
        return []
    segments = min(n, num_weights)
    partial_sums = n // _ROWS_PER_PARTIAL_SUM + segments
    of_indices = [*[n] * (6 if scale_grad_by_freq else 5), n, segments, segments, partial_sums]
    rows = partial_sums * grad.size(-1) * _summing_dtype(grad.dtype).itemsize
    return [*(count * indices.dtype.itemsize for count in of_indices), rows]


def _flash_attention_backward(
    _grad: Tensor, query: Tensor, key: Tensor, *_: object, attn_mask: Tensor | None = None, **__: object
) -> list[int]:
    """Bytes of: the query's gradient in float32; one float32 per row; gradients of keys and values for every query head, if
    keys have fewer heads. Rows are rounded up to 128, their length to 32 or 64. Only in half precision and without a mask: else
    another kernel runs. From `mha_bwd` in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp."""
    if query.dtype not in (torch.float16, torch.bfloat16) or attn_mask is not None:
        return []
    batch, heads, rows, width = query.shape
    rows, rounded_width = round_up(rows, 128), round_up(width, 32 if width <= 128 else 64)
    expanded = batch * heads * key.size(2) * width * key.dtype.itemsize if key.size(1) != heads else 0
    return [batch * heads * rows * rounded_width * 4, batch * heads * rows * 4, expanded, expanded]


def _summing_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


_FORMULAS: dict[str, Callable[..., list[int]]] = {
    "_safe_softmax": _safe_softmax,
    "_foreach_norm": _foreach_norm,
    "embedding_dense_backward": _embedding_dense_backward,
    # The CPU name of attention; the sizes are those of the GPU kernel.
    "_scaled_dot_product_flash_attention_for_cpu_backward": _flash_attention_backward,
}
"""Functions from an operator's arguments to the sizes in bytes of its internal allocations, by the operator's name."""
