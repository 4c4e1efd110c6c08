"""Steps of one chain of operators under hooks, and the hooks' host time for each saved tensor.

peer = peers(device, saves)["stays, save_on_cpu"]
sample = peer()          # fresh hooks; warm-up; then the median step: us per save, us per use, share that left the device

forward:  saves operators, each of which saves its input     host time inside of the hook / saves = us per save
backward: as many uses                                       the same                             = us per use
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from chameleon_mm.api.save_on_cpu import save_on_cpu
from chameleon_mm.api.session import SwapSession
from chameleon_mm.bench._measure import undisturbed
from chameleon_mm.bench._training_run import planned_warmup_steps
from chameleon_mm.bench.profiler import keep
from chameleon_mm.device.protocols import Device, Event, Stream
from chameleon_mm.plan.timing import LinkCost
from chameleon_mm.swap.swap_outs import PACK_BELOW_BYTES
from chameleon_mm.units import KIB

TENSOR_BYTES = 4 * KIB
"""Bytes of each saved tensor: few, because the measured host work for a tensor does not depend on its size."""

PLANNED_SHARE = 0.1
"""Share of the chain's bytes that a session that plans may hold: nearly all tensors leave the device by its plan."""

FAR = LinkCost(d2h_gbps=1e-6, h2d_gbps=1e-6, duplex_gbps=2e-6)
"""Rates of a link so slow that plans swap nothing: they drop and recompute all tensors that do not fit."""

UNPLANNED_STEPS = 2
"""Steps under `save_on_cpu` before the timed ones: the first pins memory, the second follows the order of the first."""

TIMED_STEPS = 5

IDENTITY = "hooks that do nothing"

BY_HAND = "moves, copies by hand"
"""Way with only the device calls that any swap needs, in order: no budget, no plan, one size, no views."""

DROPPED = "dropped, recomputed"
"""Way in which a plan drops tensors instead of moving them: their operators run again in backward."""


class Sample(NamedTuple):
    """Figures of a peer in one round."""

    save_us: float
    use_us: float
    left: float
    """Share of the saved tensors that left the device: to the host, or dropped."""


Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""Functions that autograd calls to save and to use a tensor."""

Step = Callable[[Hooks], tuple[float, float]]
"""A forward under hooks, and its backward: us per save and per use."""

Peer = Callable[[], Sample]


def peers(device: Device, saves: int) -> Mapping[str, Peer]:
    """All ways by name; the first is the reference of the others."""
    with device.compute():
        leaf = torch.zeros(TENSOR_BYTES // 4, device=device.torch_device, requires_grad=True)
    step = partial(_step, leaf, saves)
    on_cpu, session = partial(_on_cpu, device, saves, step), partial(_planned, device, saves, step)
    return {
        IDENTITY: partial(_identity, device, step),
        "stays, save_on_cpu": partial(on_cpu, min_bytes=2 * TENSOR_BYTES),
        "stays, session": partial(session, budget=None, min_bytes=2 * TENSOR_BYTES),
        BY_HAND: partial(_by_hand, device, saves, step),
        "moves by the rule, alone": partial(on_cpu, min_bytes=1),
        "moves by the rule, packed": partial(on_cpu, min_bytes=1, packs=True),
        "moves by plan, alone": partial(session, budget=PLANNED_SHARE, min_bytes=1),
        "moves by plan, packed": partial(session, budget=PLANNED_SHARE, min_bytes=1, packs=True),
        DROPPED: partial(session, budget=PLANNED_SHARE, min_bytes=1, link=FAR),
    }


class _Timed:
    """Hook that adds up its own time. The operators around it take far longer, and vary by more than a hook takes."""

    def __init__(self, hook: Callable[[Any], Any]) -> None:
        self._hook = hook
        self.ns = 0

    def __call__(self, argument: Any) -> Any:
        began = time.perf_counter_ns()
        result = self._hook(argument)
        self.ns += time.perf_counter_ns() - began
        return result


def _step(leaf: Tensor, saves: int, hooks: Hooks) -> tuple[float, float]:
    save, use = map(_Timed, hooks)
    with saved_tensors_hooks(save, use):
        y = leaf
        for _ in range(saves):
            y = y.sin()
        total = y.sum()
    total.backward()
    leaf.grad = None
    return save.ns / 1e3 / saves, use.ns / 1e3 / saves


def _identity(device: Device, step: Step) -> Sample:
    with device.compute(), quiet(device):
        return _sample([step((keep, keep)) for _ in range(UNPLANNED_STEPS + TIMED_STEPS)], left=0.0)


class _ByHand:
    """Copies each tensor to its own place in pinned memory and back, on separate streams; the next save frees its block."""

    def __init__(self, device: Device, host: Sequence[Tensor]) -> None:
        self._device, self._host = device, host
        self._d2h, self._h2d = device.new_stream("d2h"), device.new_stream("h2d")
        self._saved = 0
        self._leaving: tuple[Tensor, Event] | None = None

    def save(self, t: Tensor) -> tuple[int, torch.Size]:
        compute, number = self._device.current_stream(), self._saved % len(self._host)
        self._saved += 1
        self._let_go(compute)
        self._d2h.wait(compute.record())  # the operator that wrote the tensor -> its copy
        with torch.no_grad():
            flat = t.detach().view(torch.uint8)
        self._d2h.copy(self._host[number], flat)
        self._leaving = flat, self._d2h.record()
        return number, t.shape

    def use(self, saved: tuple[int, torch.Size]) -> Tensor:
        number, shape = saved
        compute = self._device.current_stream()
        self._let_go(compute)
        buffer = compute.alloc(TENSOR_BYTES)
        self._h2d.wait(compute.record())  # the last use of the block -> the copy into it
        self._h2d.copy(buffer, self._host[number])
        compute.wait(self._h2d.record())  # the copy -> the node that reads it
        return buffer.view(torch.float32).view(shape)

    def _let_go(self, compute: Stream) -> None:
        if self._leaving is not None:
            compute.wait(self._leaving[1])  # the copy out -> the next allocation in its block, and the copy back
            compute.free(self._leaving[0])
            self._leaving = None


def _by_hand(device: Device, saves: int, step: Step) -> Sample:
    memory = device.alloc_pinned(saves * TENSOR_BYTES)
    hooks = _ByHand(device, memory.split(TENSOR_BYTES))
    try:
        with device.compute(), quiet(device):
            return _sample([step((hooks.save, hooks.use)) for _ in range(UNPLANNED_STEPS + TIMED_STEPS)], left=1.0)
    finally:
        device.synchronize()
        del hooks
        device.free_pinned(memory)


def _on_cpu(device: Device, saves: int, step: Step, *, min_bytes: int, packs: bool = False) -> Sample:
    hooks = save_on_cpu(device=device, min_bytes=min_bytes)
    hooks._executor.outs.pack_below_bytes = PACK_BELOW_BYTES if packs else 0
    own = hooks._hooks.pack_hook, hooks._hooks.unpack_hook
    with hooks.pool, device.compute():
        with quiet(device):
            taken = [step(own) for _ in range(UNPLANNED_STEPS)]
            before = hooks._executor.metrics.totals.bytes_swapped_out  # no report has the bytes moved: there is no session
            taken += [step(own) for _ in range(TIMED_STEPS)]
        moved_bytes = hooks._executor.metrics.totals.bytes_swapped_out - before
        return _sample(taken, left=moved_bytes / (TIMED_STEPS * saves * TENSOR_BYTES))


def _planned(
    device: Device,
    saves: int,
    step: Step,
    *,
    budget: float | None,
    min_bytes: int,
    packs: bool = False,
    link: LinkCost | None = None,
) -> Sample:
    """`packs`: False: each tensor has its own copy, as tensors of 1 MiB or more. `link`: link that plans assume, in a session
    that recomputes; None: a session that only swaps."""
    chain_bytes = saves * TENSOR_BYTES
    # Added to the chain's share: the current gradient, the tensors that backward brings back, the few bytes of the sum.
    hbm = None if budget is None else device.allocated_bytes() + int(budget * chain_bytes) + 16 * TENSOR_BYTES
    session = SwapSession(hbm, device=device, min_bytes=min_bytes, recompute=link is not None)
    session._executor.outs.pack_below_bytes = PACK_BELOW_BYTES if packs else 0
    if link is not None and session._adaptation is not None:
        session._adaptation._link_cost = lambda: link  # no public argument: only this benchmark forces the choice
    taken: list[tuple[float, float]] = []
    own = session._save, session._use
    with session.pool, session:
        with quiet(device):
            for _ in range(planned_warmup_steps(device)):
                with session.step():
                    step(own)
            before = session.report()
            for _ in range(TIMED_STEPS):
                with session.step():
                    taken.append(step(own))
        after = session.report()
        followed = after.plan_cache_hits - before.plan_cache_hits
        if followed != TIMED_STEPS:
            raise RuntimeError(
                f"bench hooks: expected {TIMED_STEPS} steps that follow a plan, got {followed}; take more --saves"
            )
        swapped, dropped = (getattr(after, name) - getattr(before, name) for name in ("bytes_swapped_out", "bytes_recomputed"))
    return _sample(taken, left=(swapped + dropped) / (TIMED_STEPS * chain_bytes))


def _sample(taken: list[tuple[float, float]], *, left: float) -> Sample:
    last = taken[-TIMED_STEPS:]
    return Sample(median(save for save, _ in last), median(use for _, use in last), left)


@contextmanager
def quiet(device: Device) -> Iterator[None]:
    """Run undisturbed (`undisturbed`). The device is idle at the beginning and at the end."""
    device.synchronize()
    gc.collect()
    with undisturbed():
        yield
        device.synchronize()
