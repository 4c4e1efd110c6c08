"""Peers of the training benchmark: ways to hold activations, each a context around a run.

    with peer.over_run(device, model, budget) as around:       # budget: HBM bytes, for those that keep one
        for each step:
            with around.step():
                with around.forward(): loss = model.loss(x, target)
                loss.backward(); optimizer.step(); optimizer.zero_grad()

A peer may not change the numbers that it is compared by: all peers run the same model, data and optimizer.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Self

import torch
from torch import Tensor, nn

from chameleon_mm.api.save_on_cpu import save_on_cpu
from chameleon_mm.api.session import SwapSession
from chameleon_mm.device.protocols import Device
from chameleon_mm.errors import InfeasibleBudget
from chameleon_mm.pool.pool import PinnedPool
from chameleon_mm.tools.blocks import TRIALS, Checkpointing, Survey, blocks_of, checkpoint_blocks, fullest, part_levels
from chameleon_mm.units import format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """Contexts that a peer puts around each step, and around each forward inside it."""

    step: Callable[[], AbstractContextManager[Any]] = nullcontext
    forward: Callable[[], AbstractContextManager[Any]] = nullcontext
    session: SwapSession | None = None
    """Session of the steps, which knows its plan; None: there is no session."""


SHARES = {1 / 2: "half", 1 / 4: "quarter", 1 / 8: "eighth"}
"""Budgets to try, as shares of the activation memory of the run without swapping, with their names."""

FILLED_SHARES = (1 / 2, 1 / 4)
"""Budgets that are also filled by checkpointing: an eighth is less than it takes for every block."""

FILLING_STEPS = 2 + TRIALS
"""Steps in which a peer finds out what fills its budget: two with every block checkpointed, as the first makes the optimizer's
state, then the trials."""

UNPLANNED_SHARE = 1 / 4
"""Budget that is also tried without plans."""

PLANNED, SWAP_ONLY, UNPLANNED = "planned", "swap only", "unplanned"
"""Ways to keep a budget: plans that swap and recompute; plans that only swap; the default rule, by which everything moves."""

_RULES = {
    PLANNED: "it records one step, plans, and follows the better of its plans, which swap and recompute",
    SWAP_ONLY: "recompute=False: the same, but its plans only swap",
    UNPLANNED: "plans=False: everything moves",
}

OverRun = Callable[[Device, nn.Module, int], AbstractContextManager[Around]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Way to hold activations."""

    key: str
    """Value of the row's `peer`, for programs."""
    name: str
    note: str
    """Description for the table's footer."""
    over_run: OverRun
    """Device, model and HBM budget in bytes -> a context around the run."""
    checkpointed: bool = False
    ours: bool = False
    """True if the peer is chameleon_mm: its losses must equal those without swapping, or the benchmark fails."""
    share: float | None = None
    """Share of the unswapped run's activation memory that the peer may use. None: it keeps no budget."""
    unavailable: Callable[[], str | None] = lambda: None
    """Return the reason why the peer cannot run here, or None. May import the peer's library: not before its turn."""
    way: str | None = None
    """Way in which the peer keeps its budget: `PLANNED`, `SWAP_ONLY` or `UNPLANNED`. None: it keeps no budget."""

    @property
    def filling(self) -> bool:
        """True if the peer finds out what fills its budget before its steps are steady."""
        return self.share is not None and self.way is None

    @property
    def planned(self) -> bool:
        """True if the peer records, plans and tries plans before its steps are steady."""
        return self.way in (PLANNED, SWAP_ONLY)


def peers(device: Device) -> tuple[Peer, ...]:
    """All peers; the first is the reference of the others.

    Those of other libraries come last: the memory that they pin stays in torch's cache until the process ends.
    """
    stock_note = "torch.autograd.graph.save_on_cpu(pin_memory=True)"
    stock = Peer(key="torch_save_on_cpu", name="torch save_on_cpu", note=stock_note, over_run=_stock)
    if device.simulated:
        modelled_note = (
            "torch's save_on_cpu(pin_memory=True) needs CUDA: here a pair of hooks issues the copies that it would, "
            "one per save, parameters included, both ways on the compute stream"
        )
        stock = Peer(key="torch_save_on_cpu_modelled", name="torch, modelled", note=modelled_note, over_run=_modelled)
    every = "torch.utils.checkpoint of every block, non-reentrant"
    ours = "chameleon_mm.api.save_on_cpu: everything worth moving is moved"
    return (
        Peer(key="no_swap", name="no swap", note="torch as it comes", over_run=_nothing),
        Peer(key="checkpoint", name="checkpointing", note=every, over_run=_nothing, checkpointed=True),
        *(_filling_peer(share, selective=selective) for share in FILLED_SHARES for selective in (False, True)),
        *(_session_peer(share, way) for share in SHARES for way in (PLANNED, SWAP_ONLY)),
        _session_peer(UNPLANNED_SHARE, UNPLANNED),
        Peer(key="chameleon_save_on_cpu", name="our save_on_cpu", note=ours, over_run=_ours_on_cpu, ours=True),
        stock,
        *(
            Peer(
                key=extra,
                name=f"{name} offloading",
                note=f"{module}: {note}",
                over_run=over_run,
                unavailable=partial(_missing, device, name, module, extra),
            )
            for extra, name, module, note, over_run in _LIBRARIES
        ),
    )


def compiled_peers(device: Device) -> tuple[Peer, ...]:
    """Peers of a model whose blocks are compiled; the first is the reference of the others."""
    no_swap, checkpoint, *_ = peers(device)
    alone = (
        Peer(
            key=f"activation_memory_budget_{share:g}",
            name=f"memory budget {share:g}",
            note=f"torch._functorch.config.activation_memory_budget = {share:g}, without us",
            over_run=partial(_memory_budget, share=share),
        )
        for share in (0.5, 0.0)
    )
    return (no_swap, checkpoint, *alone, *(_session_peer(share, way) for share in SHARES for way in (PLANNED, SWAP_ONLY)))


def _missing(device: Device, name: str, module: str, extra: str) -> str | None:
    """Reason why `module` of the library `name` cannot run on `device`, as one line; None: it can."""
    if device.simulated:
        return f"needs CUDA: {name} copies on streams of torch.cuda, which a simulator does not see"
    try:
        import_module(module)
    except ImportError as error:
        return f"needs {name}: pip install 'chameleon-mm[{extra}]' ({' '.join(str(error).split())})"
    return None


def session_key(share: float, way: str) -> str:
    """Key of the session that may use `share` of the activation memory, and keeps that budget in `way`."""
    key = f"swap_session_{SHARES[share]}"
    return key if way == PLANNED else f"{key}_{way.replace(' ', '_')}"


def _session_peer(share: float, way: str) -> Peer:
    name = SHARES[share]
    article, key, over_run = "an" if name.startswith("e") else "a", session_key(share, way), partial(_session, way=way)
    note = f"chameleon_mm.SwapSession; its budget leaves {article} {name} of the unswapped activation memory; {_RULES[way]}"
    return Peer(key=key, name=f"{name}, {way}", note=note, over_run=over_run, ours=True, share=share, way=way)


def _filling_peer(share: float, *, selective: bool) -> Peer:
    name = SHARES[share]
    what = "every block, which keeps products and attentions: as many" if selective else "as few blocks"
    return Peer(
        key=f"checkpoint_{'selective' if selective else 'part'}_{name}",
        name=f"{name}, {'selective' if selective else 'some blocks'}",
        note=f"torch.utils.checkpoint of {what} as a budget allows that leaves a {name} of the unswapped activation memory",
        over_run=partial(_filled, selective=selective),
        share=share,
    )


@contextmanager
def _nothing(device: Device, model: nn.Module, hbm_budget: int) -> Iterator[Around]:
    yield Around()


@contextmanager
def _filled(device: Device, model: nn.Module, hbm_budget: int, *, selective: bool) -> Iterator[Around]:
    filling = _Filling(device, blocks_of(model.get_submodule("blocks")), hbm_budget, selective=selective)
    try:
        yield Around(step=filling.step)
    finally:
        filling.undo()


class _Filling:
    """Checkpointing that fills a budget: tries a level in each of the first steps, then keeps the last that fits."""

    def __init__(self, device: Device, blocks: list[nn.Module], hbm_budget: int, *, selective: bool) -> None:
        self._device, self._hbm_budget = device, hbm_budget
        self._blocks = blocks
        self._survey = Survey() if selective else None
        self._levels = [Checkpointing(survey=self._survey)]
        self._search: Generator[int, int, int] | None = None
        self._steps = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of one step. Raises `InfeasibleBudget` after the second if the budget is too small for any level."""
        if self._steps == 0:
            self._try(self._levels[0])
        if self._steps <= FILLING_STEPS:
            self._device.reset_peaks()
        yield
        self._steps += 1
        if 1 < self._steps <= FILLING_STEPS:
            self._device.synchronize()
            self._next(self._device.peak_allocated_bytes())

    def _next(self, peak_bytes: int) -> None:
        """Choose the level of the next step, once that of this one took so much."""
        try:
            if self._search is not None:
                at = self._search.send(peak_bytes)
            elif self._steps == 2:
                if peak_bytes > self._hbm_budget:
                    raise InfeasibleBudget(
                        f"with every block checkpointed the step takes {format_size(peak_bytes)}, more than the budget"
                    )
                self._levels = part_levels(len(self._blocks)) if self._survey is None else self._survey.levels()
                self._search = fullest(len(self._levels) - 1, self._hbm_budget, peak_bytes)
                at = next(self._search)
            else:
                return
        except StopIteration as end:
            self._search, at = None, end.value
        self._try(self._levels[at])

    def undo(self) -> None:
        """Give the blocks their own forwards again: those of a checkpoint hold the blocks in a cycle."""
        for block in self._blocks:
            vars(block).pop("forward", None)

    def _try(self, how: Checkpointing) -> None:
        self.undo()
        checkpoint_blocks(self._blocks, how, preserve_rng_state=True)


@contextmanager
def _memory_budget(device: Device, model: nn.Module, hbm_budget: int, *, share: float) -> Iterator[Around]:
    with import_module("torch._functorch.config").patch(activation_memory_budget=share):
        yield Around()


@contextmanager
def _session(device: Device, model: nn.Module, hbm_budget: int, *, way: str) -> Iterator[Around]:
    session = SwapSession(hbm_budget, device=device, model=model, plans=way != UNPLANNED, recompute=way == PLANNED)
    with session.pool, session:  # the pool ends with the run: the next peer needs the host memory that it pinned
        yield Around(step=session.step, session=session)


@contextmanager
def _ours_on_cpu(device: Device, model: nn.Module, hbm_budget: int) -> Iterator[Around]:
    with PinnedPool(max_bytes=None, device=device) as pool:
        hooks = save_on_cpu(device=device, pool=pool)  # one object for the whole run: it learns the order of use
        yield Around(forward=lambda: hooks)


@contextmanager
def _stock(device: Device, model: nn.Module, hbm_budget: int) -> Iterator[Around]:
    yield Around(forward=lambda: torch.autograd.graph.save_on_cpu(pin_memory=True))


@contextmanager
def _trl(device: Device, model: nn.Module, hbm_budget: int) -> Iterator[Around]:
    # TRL's trainers call it so. Its warning is off, because it needs Accelerate's state.
    offloading = import_module(_TRL).get_act_offloading_ctx_manager(model, warn_if_no_head=False)
    yield Around(forward=lambda: offloading)


@contextmanager
def _torchtune(device: Device, model: nn.Module, hbm_budget: int) -> Iterator[Around]:
    offloading = import_module(_TORCHTUNE).OffloadActivations()
    yield Around(forward=lambda: offloading)


_TRL, _TORCHTUNE = "trl.models.activation_offloading", "torchtune.training"
_LIBRARIES: tuple[tuple[str, str, str, str, OverRun], ...] = (
    (
        "trl", "TRL", _TRL,
        "its OffloadActivations, with streams, pinned memory and without the head, as its trainers use it", _trl,
    ),
    ("torchtune", "torchtune", _TORCHTUNE, "its OffloadActivations, with streams and pinned memory", _torchtune),
)  # fmt: skip
"""Offloading of other libraries, as installed: extra that brings it, name, module, note, context."""


@contextmanager
def _modelled(device: Device, model: nn.Module, hbm_budget: int) -> Iterator[Around]:
    with ModelledSaveOnCpu(device) as model_of_stock:
        yield Around(forward=model_of_stock.hooks)


class _Saved:
    """Object that autograd holds in place of a saved tensor. When it is freed, its host memory returns to the cache."""

    __slots__ = ("__weakref__", "dtype", "host", "shape")

    def __init__(self, host: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
        self.host, self.shape, self.dtype = host, shape, dtype


class ModelledSaveOnCpu:
    """Issues the copies of torch's `save_on_cpu(pin_memory=True)` through the device protocol.

        on save:  pinned memory (cached by power of two, as torch's host allocator does); compute.copy(host, tensor)
        on use:   buffer = compute.alloc(); compute.copy(buffer, host)

    Both are on the compute stream, which orders every copy, including reuse of host memory. Compute waits for each copy: that
    time could be hidden. As in torch's, two views of a storage are two copies, parameters are copied, too, and the tensors
    returned are contiguous. Strides are lost, and the rounding of operators may change with them.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._pinned: list[Tensor] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._device.synchronize()
        self._free.clear()
        while self._pinned:
            self._device.free_pinned(self._pinned.pop())

    def hooks(self) -> AbstractContextManager[None]:
        """Context for one forward."""
        return torch.autograd.graph.saved_tensors_hooks(self._on_save, self._on_use)

    @torch.no_grad()
    def _on_save(self, tensor: Tensor) -> _Saved:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        host = self._take(flat.numel())
        if flat.numel():
            self._device.current_stream().copy(host[: flat.numel()], flat)
        saved = _Saved(host, tensor.shape, tensor.dtype)
        weakref.finalize(saved, self._free[host.numel()].append, host)
        return saved

    @torch.no_grad()
    def _on_use(self, saved: _Saved) -> Tensor:
        nbytes = saved.shape.numel() * saved.dtype.itemsize
        stream = self._device.current_stream()
        buffer = stream.alloc(nbytes)
        if nbytes:
            stream.copy(buffer, saved.host[:nbytes])
        return buffer.view(saved.dtype).view(saved.shape)

    def _take(self, nbytes: int) -> Tensor:
        size = 1 << max(nbytes - 1, 0).bit_length()
        if not self._free[size]:
            self._pinned.append(self._device.alloc_pinned(size))
            return self._pinned[-1]
        return self._free[size].pop()
