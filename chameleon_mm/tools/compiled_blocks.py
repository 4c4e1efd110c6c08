"""Compiled blocks of a step on shapes only: AOTAutograd's graphs, run as the kernels that Inductor would make.

    compile_blocks(model, activation_memory_budget=1.0)      # each repeated block is a compiled region, as by `block.compile()`

AOTAutograd traces a block's forward and backward together and splits them by torch's own min-cut partition. This determines the
saved tensors, and so the movable ones. Equal blocks share compiled code, as in torch. No single kernel of a block is
recomputed.

    realized     a node whose result is stored: a reduction, a result for a product, attention or a caller, and an elementwise
                 node that reads much and has several users
    inlined      any other elementwise node: computed again in each kernel that uses it
    kernel       a product or attention alone; or realized nodes over the same elements, which share what they read

The rules and both limits are those of Inductor's lowering (`torch/_inductor/ir.py`, `should_realize_on_reuse`) and scheduler
(`can_fuse`). A kernel reads each stored input once and writes each result once. Ignored: Inductor reuses memory of dead inputs
for results, tunes, and fuses elementwise nodes into some products.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._functorch import config as functorch
from torch._functorch import partitioners
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.flop_counter import flop_registry

from chameleon_mm.record.dispatch_state import compiled_region
from chameleon_mm.replayable import ELEMENTWISE, base_name
from chameleon_mm.tools.blocks import blocks_of
from chameleon_mm.tools.shape_operators import makes_views


def compile_blocks(model: nn.Module, *, activation_memory_budget: float) -> tuple[str, ...]:
    """Compile the blocks of `model` under that setting of torch, for steps on shapes alone. Returns sentences on the figures.

    The blocks belong to this copy of the model, and no longer compute.
    """
    codes: dict[Any, Callable[..., Any]] = {}
    blocks = blocks_of(model)
    for block in blocks:
        block.forward = _compiled(block, codes, activation_memory_budget)
    return (
        f"{len(blocks)} blocks are compiled, each for itself, as by block.compile(); all else runs eagerly",
        "kernels are fused by Inductor's rules; that it reuses dead inputs for results, and tunes, is left out",
    )


def _compiled(block: nn.Module, codes: dict[Any, Callable[..., Any]], budget: float) -> Callable[..., Any]:
    original, held = block.forward, {**dict(block.named_parameters()), **dict(block.named_buffers())}

    def functional(tensors: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
        with _reparametrize_module(block, tensors):
            return original(*args, **kwargs)

    def region(gm: fx.GraphModule, example_inputs: Any) -> Any:  # torch gives both by name
        return Region(gm)

    def forward(*args: Any, **kwargs: Any) -> Any:
        key = _code_key(block), torch.is_grad_enabled(), str(tree_map(_shape_key, (held, args, kwargs)))
        if key not in codes:
            table = select_decomp_table()
            code = aot_function(functional, region, region, min_cut_rematerialization_partition, decompositions=table)
            # The first call compiles, on fake tensors of its own: modes and hooks around it would disturb the trace.
            with (
                _disable_current_modes(),
                saved_tensors_hooks(_itself, _itself),
                FakeTensorMode(),
                functorch.patch(activation_memory_budget=budget),
                attention_known(),
            ):
                code(*tree_map(_like, (held, args, kwargs)))
            codes[key] = code
        return codes[key](held, args, kwargs)

    return forward


@contextmanager
def attention_known() -> Iterator[None]:
    """Context in which torch's partitioner treats the CPU's fused attention like CUDA's FlashAttention: it knows the FLOPs, and
    recomputes it only if necessary. Otherwise a small `activation_memory_budget` recomputes attention as if it took no time."""
    aten = torch.ops.aten
    forward, backward = aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward
    cpu, cpu_backward = (getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{end}") for end in ("", "_backward"))
    ops = partitioners.get_default_op_list()
    known = replace(ops, compute_intensive_ops=ops.compute_intensive_ops | {cpu})
    with (
        patch.dict(flop_registry, {cpu: flop_registry[forward], cpu_backward: flop_registry[backward]}),
        patch.object(partitioners, "get_default_op_list", lambda: known),
    ):
        yield


def _code_key(block: nn.Module) -> tuple[Any, ...]:
    """Return the facts on which the compiled code of `block` depends besides its inputs: classes and plain attributes."""
    plain = (int, float, bool, str, type(None), torch.dtype)
    return tuple(
        (name, type(module), tuple((key, value) for key, value in sorted(vars(module).items()) if isinstance(value, plain)))
        for name, module in block.named_modules()
    )


def _itself(t: Tensor) -> Tensor:
    return t


def _like(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, requires_grad=value.requires_grad)


def _shape_key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    return value if isinstance(value, (int, float, bool, str, type(None))) else type(value)


# --- Kernels of one graph


@dataclass(eq=False)
class Kernel:
    """Nodes of a graph that run as one kernel."""

    nodes: list[fx.Node] = field(default_factory=list)
    """Nodes whose results the kernel stores."""
    reads: dict[fx.Node, None] = field(default_factory=dict)
    """Stored values that the kernel reads."""
    numel: int = 0
    """Number of elements of the kernel's loops; for a reduction, elements that it reads."""
    reduced: tuple[int, ...] | None = None
    """Shape of the results of reductions over those elements; None: no reduction."""


_REDUCTIONS = frozenset({
    "sum", "mean", "amax", "amin", "var_mean", "var", "prod", "any", "all", "argmax", "argmin", "max", "min", "std",
})  # fmt: skip
"""Reductions that remain after Inductor's decompositions."""

_ELEMENTWISE = ELEMENTWISE | {
    "aten::bernoulli", "aten::embedding", "aten::rand", "aten::rand_like", "aten::randn", "prims::convert_element_type",
    "prims::iota",
}  # fmt: skip
"""Operators that compute each element by itself and may lack torch's tag `pointwise`."""


def is_view(node: fx.Node) -> bool:
    """True if the node makes a view, or takes a result out of a tuple."""
    if node.op != "call_function":
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    return makes_views(node.target) or node.target.overloadpacket.__name__ in ("_unsafe_view", "detach", "alias")


def _kind(node: fx.Node) -> str:
    """`stored`: an input or a constant; `view`; `reduction`; `elementwise`; `alone`: a kernel of its own."""
    if node.op != "call_function":
        return "stored"
    if is_view(node):
        return "view"
    if not isinstance(node.target, torch._ops.OpOverload):
        return "alone"  # an operator of higher order
    name = node.target.overloadpacket.__name__
    if name in _REDUCTIONS and isinstance(node.args[0], fx.Node):
        return "reduction"
    elementwise = torch.Tag.pointwise in node.target.tags or base_name(node.target.name()) in _ELEMENTWISE
    return "elementwise" if elementwise else "alone"


class Fusion:
    """Kernels of a graph by Inductor's rules."""

    def __init__(self, graph: fx.Graph) -> None:
        self.kinds = {node: _kind(node) for node in graph.nodes}
        self._leaves: dict[fx.Node, dict[fx.Node, None]] = {}
        self.kernels: list[Kernel] = []
        self._kernel_of: dict[fx.Node, Kernel] = {}
        self._readers: dict[fx.Node, set[Kernel]] = {}
        for node in graph.nodes:
            kind = self.kinds[node]
            if kind == "stored" or (kind == "elementwise" and not self._is_realized(node)):
                continue
            if kind != "view":
                self._place(node, kind)

    def base(self, node: fx.Node) -> fx.Node:
        """Return the node of whose result `node` is a view."""
        while self.kinds[node] == "view":
            node = node.all_input_nodes[0]
        return node

    def leaves(self, node: fx.Node) -> dict[fx.Node, None]:
        """Stored values that computing `node` reads, with all inlined nodes in between."""
        found = self._leaves.get(node)
        if found is None:
            found = self._leaves[node] = {}
            for given in map(self.base, node.all_input_nodes):
                inlined = self.kinds[given] == "elementwise" and not self._is_realized(given)
                found.update(self.leaves(given) if inlined else {given: None})
        return found

    def users(self, node: fx.Node) -> Iterator[fx.Node]:
        """Nodes that use `node` or a view of it."""
        for user in node.users:
            if self.kinds[user] == "view":
                yield from self.users(user)
            else:
                yield user

    def _is_realized(self, node: fx.Node) -> bool:
        """True if the result of an elementwise node is stored."""
        users = dict.fromkeys(self.users(node))
        if any(self.kinds[user] in ("alone", "stored") for user in users):
            return True
        reads = len(self.leaves(node))
        most = inductor.realize_reads_threshold if len(users) > 1 else inductor.realize_acc_reads_threshold
        return most is not None and reads > most

    def _place(self, node: fx.Node, kind: str) -> None:
        reads = self.leaves(node)
        kernel, joined = Kernel([node], dict(reads)), None
        if kind != "alone":
            kernel.numel = prod(_shape(node.args[0] if kind == "reduction" else node))
            kernel.reduced = _shape(node) if kind == "reduction" else None
            joined = next((earlier for earlier in self._candidates(reads) if self._may_join(earlier, kernel)), None)
        if joined is None:
            self.kernels.append(kernel)
        else:
            kernel = self._join(joined, node, kernel)
        self._kernel_of[node] = kernel
        for read in reads:
            self._readers.setdefault(read, set()).add(kernel)

    def _candidates(self, reads: dict[fx.Node, None]) -> list[Kernel]:
        """Kernels that make or read one of `reads`, the latest first."""
        near = {kernel for read in reads for kernel in self._readers.get(read, ())}
        near |= {self._kernel_of[read] for read in reads if read in self._kernel_of}
        return [kernel for kernel in reversed(self.kernels) if kernel in near and self.kinds[kernel.nodes[0]] != "alone"]

    def _may_join(self, earlier: Kernel, new: Kernel) -> bool:
        if earlier.reduced is not None and new.reduced is not None and earlier.reduced != new.reduced:
            return False
        reduced = earlier.reduced if earlier.reduced is not None else new.reduced
        same = earlier.numel == new.numel or (reduced is not None and new.reduced is None and new.numel == prod(reduced))
        # Not if another kernel reads a result of `earlier` and makes a value that `new` reads.
        return same and not any(self._depends(read, earlier) for read in new.reads)

    def _depends(self, node: fx.Node, kernel: Kernel) -> bool:
        """True if `node`, made by another kernel, needs a result of `kernel`."""
        waiting, seen = [node], {kernel}
        while waiting:
            made_by = self._kernel_of.get(waiting.pop())
            if made_by is None or made_by in seen:
                continue
            seen.add(made_by)
            if any(self._kernel_of.get(read) is kernel for read in made_by.reads):
                return True
            waiting.extend(made_by.reads)
        return False

    def _join(self, earlier: Kernel, node: fx.Node, new: Kernel) -> Kernel:
        earlier.reads.update((read, None) for read in new.reads if read not in earlier.nodes)
        earlier.nodes.append(node)
        earlier.reduced = earlier.reduced if earlier.reduced is not None else new.reduced
        earlier.numel = max(earlier.numel, new.numel)
        return earlier

    def in_order(self) -> list[Kernel]:
        """The kernels, each after those whose results it reads."""
        # Lists, not sets, whose order varies between runs: the order determines the peak.
        needs = {kernel: [self._kernel_of[read] for read in kernel.reads if read in self._kernel_of] for kernel in self.kernels}
        return list(TopologicalSorter(needs).static_order())


def _shape(node: Any) -> tuple[int, ...]:
    value = node.meta["val"]
    return tuple(value.shape) if isinstance(value, Tensor) else tuple(value[0].shape)


# --- Regions: the graphs as autograd calls them
#
# A fused kernel is an operator of ours, so that recorder, simulated device and fake tensors see it.

_LIBRARY = torch.library.Library("chameleon_mm", "DEF")  # lives as long as the process, as the operator does
_LIBRARY.define("fused(Tensor[] reads, int[] numbers, ScalarType[] dtypes) -> Tensor[]")


def _fused(reads: Sequence[Tensor], numbers: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Results of a fused kernel, uninitialised. `numbers`: for each, its dimensions, its sizes and its strides."""
    results, at = [], 0
    for dtype in dtypes:
        dims = numbers[at]
        sizes, strides = numbers[at + 1 : at + 1 + dims], numbers[at + 1 + dims : at + 1 + 2 * dims]
        results.append(torch.empty_strided(sizes, strides, dtype=dtype))
        at += 1 + 2 * dims
    return results


_LIBRARY.impl("fused", _fused, "CPU")
torch.library.register_fake("chameleon_mm::fused", _fused, lib=_LIBRARY)


class Region:
    """Graph of a block, run as kernels on shapes alone."""

    def __init__(self, gm: fx.GraphModule) -> None:
        graph, fusion = gm.graph, Fusion(gm.graph)
        self._constants = {node: getattr(gm, str(node.target)) for node in graph.nodes if node.op == "get_attr"}
        self.kernels, self.kinds = fusion.in_order(), fusion.kinds
        self._inputs = [node for node in graph.nodes if node.op == "placeholder"]
        (self._output,) = (node for node in graph.nodes if node.op == "output")
        last: dict[fx.Node, int] = {}
        for i, kernel in enumerate(self.kernels):
            last.update((node, i) for node in (*kernel.reads, *kernel.nodes))
        for node in map(fusion.base, self._output.all_input_nodes):
            last.pop(node, None)  # it lives on
        self._dies: list[list[fx.Node]] = [[] for _ in self.kernels]
        """Values that die with each kernel."""
        for node, i in last.items():
            self._dies[i].append(node)

    _boxed_call = True
    """Mark of torch: arguments are passed in a list, which the callee empties, so that none outlives its last use."""

    def __call__(self, args: list[Any]) -> Any:
        """Run the graph on `args`. Returns its results, uninitialised."""
        values: dict[fx.Node, Any] = self._constants | dict(zip(self._inputs, args, strict=True))
        args.clear()
        with compiled_region():
            for kernel, dies in zip(self.kernels, self._dies, strict=True):
                self._launch(kernel, values)
                for node in dies:
                    del values[node]
            return tree_map(lambda value: self._value(value, values), self._output.args[0])

    def _launch(self, kernel: Kernel, values: dict[fx.Node, Any]) -> None:
        first = kernel.nodes[0]
        if self.kinds[first] == "alone":
            args, kwargs = fx.map_arg((first.args, first.kwargs), lambda node: self._value(node, values))
            values[first] = first.target(*args, **kwargs)  # type: ignore[operator]  # an operator
            return
        reads = [t for node in kernel.reads for t in tree_flatten(values[node])[0] if isinstance(t, Tensor)]
        flat, nest = tree_flatten([node.meta["val"] for node in kernel.nodes])
        numbers = [number for t in flat for number in (t.dim(), *t.shape, *t.stride())]
        made = torch.ops.chameleon_mm.fused(reads, numbers, [t.dtype for t in flat])
        values.update(zip(kernel.nodes, tree_unflatten(made, nest), strict=True))

    def _value(self, value: Any, values: dict[fx.Node, Any]) -> Any:
        """Return the value of a stored node or of its view; return any other value unchanged."""
        if not isinstance(value, fx.Node) or self.kinds[value] != "view":
            return values[value] if isinstance(value, fx.Node) else value
        args, kwargs = fx.map_arg((value.args, value.kwargs), lambda given: self._value(given, values))
        return value.target(*args, **kwargs)  # type: ignore[operator]  # a function
