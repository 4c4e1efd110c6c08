"""Choose how much each compiled region saves, when torch partitions its graph into forward and backward, before compiling.

    with partitioned(FirstChoice(shares)):   # for regions that compile on this thread, by any backend of AOTAutograd
        torch traced forward and backward as one graph:
            share = choose(graph)            # torch's `activation_memory_budget` for this region: the first that fits

Torch calls `joint_custom_pass` with each such graph. The pass marks the graph with the share; torch's own setting stays.
Torch's cache of partitioned graphs ignores the mark, so it is off meanwhile. Inductor's cache of code stays on.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._functorch import config  # loads nothing of dynamo
from torch.utils._pytree import tree_leaves

from chameleon_mm.units import format_size, format_size_up

Choose = Callable[[fx.GraphModule], "float | None"]

_log = logging.getLogger(__name__)


@contextmanager
def compiled_partition(*activation_memory_budget: float) -> Iterator[None]:
    """Context in which torch compiles regions on this thread with this `activation_memory_budget`. 1: save what torch saves by
    default. 0: save only the inputs. Backward recomputes the rest. Several values apply to the regions in the order of their
    compilation; the last value applies to all that follow.

    A program compiled in this context has the same bits as in a session with the same choice. Regions compiled earlier do not
    change. Raises `ValueError` without a value, or for a value outside of 0 to 1.
    """
    if not activation_memory_budget or not all(0 <= share <= 1 for share in activation_memory_budget):
        raise ValueError(
            f"compiled_partition: expected values from 0 to 1, got {activation_memory_budget}; each is torch's "
            f"activation_memory_budget"
        )
    coming = list(activation_memory_budget)
    with partitioned(lambda _: coming.pop(0) if len(coming) > 1 else coming[0]):
        yield


def partition_is_torchs_own() -> bool:
    """True if torch's `activation_memory_budget` has its default on this thread."""
    return bool(config.activation_memory_budget == 1)


@contextmanager
def partitioned(choose: Choose) -> Iterator[None]:
    """Context in which regions that compile on this thread save as much as `choose` decides. The compile raises its errors."""
    joint_pass = _JointPass(choose)
    try:
        yield
    finally:
        joint_pass.end()


class _JointPass:
    """Pass of torch over joint graphs, and the settings of this thread that it replaces (torch 2.11: of the process)."""

    def __init__(self, choose: Choose) -> None:
        self._choose, self._thread, self.ended = choose, threading.get_ident(), False
        self.before = config.joint_custom_pass, config.activation_memory_budget_runtime_estimator
        own: Any = self, _Uncached(self.before[1])
        config.joint_custom_pass, config.activation_memory_budget_runtime_estimator = own

    def __call__(self, graph: fx.GraphModule, inputs: Any) -> fx.GraphModule:
        from torch._inductor.custom_graph_pass import CustomRuntimeEstimator  # loaded already, because torch compiles

        CustomRuntimeEstimator.register(_Uncached)
        if callable(self.before[0]):
            graph = self.before[0](graph, inputs)
        if not self.ended and threading.get_ident() == self._thread and (share := self._choose(graph)) is not None:
            next(iter(graph.graph.nodes)).meta["memory_budget"] = float(share)  # on an input, which no pass removes
        return graph

    def end(self) -> None:
        """Restore the settings, unless they were changed since. Contexts of several threads may end in any order."""
        self.ended = True
        if config is None:  # the interpreter's end has cleared this module
            return  # type: ignore[unreachable]  # not to mypy
        while isinstance(found := config.joint_custom_pass, _JointPass) and found.ended:
            config.joint_custom_pass, config.activation_memory_budget_runtime_estimator = found.before


class _Uncached:
    """Torch's estimate of a node's time, unchanged. Setting it tells torch not to cache the result."""

    def __init__(self, estimator: Any) -> None:
        self._estimator = estimator

    def __call__(self, node: fx.Node) -> float:
        from torch._functorch.partitioners import estimate_runtime

        with config.patch(activation_memory_budget_runtime_estimator=self._estimator):
            return float(estimate_runtime(node))

    def uuid(self) -> None:
        """Return no key, so that nothing is cached."""


# --- the choice


class Divided(NamedTuple):
    """Estimate for a region compiled with one partition, without inputs and parameters of the region."""

    peak_bytes: int
    """Maximum bytes at the same time, with all results on the device."""
    saved_bytes: int
    remade: int
    """Number of operators of forward that run again in backward."""

    def __str__(self) -> str:
        return f"peak {format_size(self.peak_bytes)}, {format_size(self.saved_bytes)} saved, {self.remade} operators remade"


def divided(graph: fx.GraphModule, share: float) -> Divided:
    """Return the estimate for a joint graph with an `activation_memory_budget` of `share`, by torch's own partitioner. Takes
    about 1 ms per operator. The graph does not change."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    nodes = fx.Graph()
    nodes.output(nodes.graph_copy(graph.graph, {}))
    results = tree_leaves([node.args for node in nodes.find_nodes(op="output")])
    # The graph returns the results of forward, then a gradient for each of its inputs.
    num_results = len(results) - sum(map(_is_input, nodes.nodes))
    given = _given(nodes)
    with config.patch(activation_memory_budget=share), _use_lazy_graph_module(True):  # no code: it never runs
        parts = min_cut_rematerialization_partition(fx.GraphModule(graph, nodes), (), num_fwd_outputs=num_results)
    forward, backward = (part.graph for part in parts)
    saved = storages_of([node for node in backward.find_nodes(op="placeholder") if not node.name.startswith("tangents")])
    again = {node.name for node in forward.nodes} & {node.name for node in backward.nodes if node.op == "call_function"}
    saved_bytes = sum(nbytes for storage, nbytes in saved.items() if storage not in given)
    return Divided(max(_peak_bytes(forward, given), _peak_bytes(backward, given)), saved_bytes, len(again))


def _given(graph: fx.Graph) -> dict[int, int]:
    """Return the storages of the inputs and parameters of a joint graph, which its views of them share."""
    return storages_of(list(filter(_is_input, graph.nodes)))


def _is_input(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.name.startswith("primals")


def storages_of(nodes: Sequence[fx.Node]) -> dict[int, int]:
    """Return the bytes of each storage that `nodes` make or read."""
    found = dict[int, int]()
    for tensor in tree_leaves([node.meta.get("val") for node in nodes]):
        if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
            nbytes: Any = (storage := tensor.untyped_storage()).nbytes()
            found[storage._cdata] = nbytes if isinstance(nbytes, int) else nbytes.node.hint or 0
    return found


def _peak_bytes(graph: fx.Graph, given: Collection[int]) -> int:
    """Return the peak in bytes while `graph` runs, without the storages `given`. Storages live from first to last operator."""
    held = {node: storages_of([node]) for node in graph.nodes}
    nbytes, last = dict[int, int](), dict[int, int]()
    more_bytes = [0] * (len(held) + 1)  # by node: increase over the previous node
    for at, node in enumerate(held):
        new = {storage: size for storage, size in held[node].items() if storage not in given and storage not in nbytes}
        nbytes |= new
        more_bytes[at] += sum(new.values())
        last |= {storage: at for used in (node, *node.all_input_nodes) for storage in held[used]}
    for storage, size in nbytes.items():
        more_bytes[last[storage] + 1] -= size
    return max(accumulate(more_bytes))


def _is_set(nodes: Sequence[fx.Node]) -> bool:
    """True if an `activation_memory_budget` was set for a region, on this thread or around its code."""
    custom = ({**node.meta, **(node.meta.get("custom") or {})} for node in nodes)
    marks = {"memory_budget", "_region_activation_memory_budget"}
    return not partition_is_torchs_own() or any(not marks.isdisjoint(meta) for meta in custom)


class FirstChoice:
    """Choice for each region when it compiles: torch's own partition if it fits, else the first of `shares` that fits, else the
    one of those that needs least."""

    def __init__(self, shares: Sequence[float], warn: Callable[..., None] = logging.Logger.warning) -> None:
        """`warn(log, message, *values)` logs a warning."""
        self._shares, self._warn = shares, warn
        self.budget_bytes: int | None = None
        self.resident_bytes = self.beside_bytes = self.spare_bytes = 0
        """Bytes for all (None: unknown, torch's own stays); of them what stays on the device, and what other things take. Bytes
        of the budget in addition, which plans leave free."""
        self.fixed: float | None = None
        """Share for all regions that compile from now on; None: chosen for each region."""
        self.shares, self.lines = list[float](), list[str]()
        """Shares by region in the order of compilation, for `compiled_partition`, and lines with estimates."""
        self.most_bytes, self.fits = 0, True
        """Maximum bytes that a region needs with its choice, by estimate; True if all regions fit."""

    def __call__(self, graph: fx.GraphModule) -> float | None:
        nodes = list(graph.graph.nodes)
        is_set = _is_set(nodes)
        self.shares.append(1.0 if is_set else self._chosen(graph, nodes) if self.fixed is None else self.fixed)
        return None if is_set else self.shares[-1]

    def _chosen(self, graph: fx.GraphModule, nodes: Sequence[fx.Node]) -> float:
        if self.budget_bytes is None:
            return 1.0
        given = _given(graph.graph)
        room_bytes = max(0, self.budget_bytes - max(self.resident_bytes, sum(given.values())) - self.beside_bytes)
        undivided_bytes = _peak_bytes(graph.graph, given)  # without recomputation: more than with torch's own partition
        if undivided_bytes <= room_bytes:
            self.most_bytes = max(self.most_bytes, undivided_bytes)
            self._note(nodes, f"torch's own, which needs less than {format_size(undivided_bytes)} of {format_size(room_bytes)}")
            return 1.0
        little = min(filter(None, self._shares))  # at 0, backward begins by recomputing everything at once
        tried = {1.0: (own := divided(graph, 1.0))}
        for share in self._shares:
            if min(one.peak_bytes for one in tried.values()) <= room_bytes:
                break
            # Saving less lowers the peak of each tried share by at most the bytes no longer saved.
            least_bytes = max(one.peak_bytes - one.saved_bytes for one in tried.values()) + share * own.saved_bytes
            if least_bytes <= room_bytes or share == little:
                tried[share] = divided(graph, share)
        chosen = min(tried, key=lambda share: max(tried[share].peak_bytes, room_bytes))  # the first that fits, if any
        self.most_bytes = max(self.most_bytes, tried[chosen].peak_bytes)
        if self.fits and (lack_bytes := tried[chosen].peak_bytes - room_bytes) > 0:
            self.fits, budget_bytes = False, self.budget_bytes + self.spare_bytes
            self._warn(
                _log,
                "chameleon_mm: hbm_budget: expected %s or more for the compiled region in %s, which has %s on the device at "
                "once, whatever it saves, got %s; no plan will keep this budget: raise it, compile smaller parts, or "
                "lower the batch",
                format_size_up(ceil((self.budget_bytes + lack_bytes) * budget_bytes / self.budget_bytes)), _place(nodes),
                format_size(tried[chosen].peak_bytes), format_size(budget_bytes),
            )  # fmt: skip
        said = "torch's own" if chosen == 1 else f"activation_memory_budget {chosen:g}"
        estimates = "; ".join(f"{share:g}: {one}" for share, one in tried.items())
        self._note(nodes, f"{said}, for {format_size(room_bytes)}; estimates by that value: {estimates}")
        return chosen

    def _note(self, nodes: Sequence[fx.Node], text: str) -> None:
        self.lines.append(f"{_place(nodes)}, compile {torch._guards.CompileContext.current_compile_id()}: {text}")
        _log.info("chameleon_mm: partition of a compiled region: %s", self.lines[-1])


def _place(nodes: Sequence[fx.Node]) -> str:
    """Function, file and line of a region's first operator that has them."""
    places = (re.search(r'File "(.*?)", line (\d+), in (.*)', node.meta.get("stack_trace") or "") for node in nodes)
    place = next(filter(None, places), None)
    return "a region" if place is None else f"{place[3]} at {Path(place[1]).name}:{place[2]}"
