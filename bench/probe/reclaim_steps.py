"""A chain of layers whose results are swapped out, by each way of giving device memory back, and its memory over time.

    curve = watched(device, "record_stream" | "Python" | "allocator", budget_bytes)
    curve.active, curve.reserved                 # bytes after each layer, forward and backward, of the last step

In the last step the model makes tensors for a moment, in the middle of forward, where no hook of autograd runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from chameleon_mm.bench._measure import free_unused
from chameleon_mm.device import CudaDevice
from chameleon_mm.device.cuda.allocator_hook import helper
from chameleon_mm.session import SwapSession
from chameleon_mm.units import MIB

WAYS = ("no swapping", "record_stream", "Python", "allocator")

LAYER_BYTES = 12 * MIB
"""From 10 MiB on torch's allocator asks the driver for each block by itself."""

LAYERS = 24
SURPRISE = 6
"""Tensors of a layer's size, alive at once, that the last step makes beside the chain."""

STEPS = 3


class WithoutHook(CudaDevice):
    """A GPU in whose allocator nothing reclaims."""

    def allocator_hook(self) -> None:
        return None


@dataclass(slots=True, kw_only=True)
class Curve:
    """Memory over the last step."""

    way: str
    start_bytes: int
    """Bytes allocated before the steps."""
    active: list[int] = field(default_factory=list)
    """Bytes of blocks that are allocated, or were freed and wait for another stream, as after `record_stream`."""
    reserved: list[int] = field(default_factory=list)
    peak_active_bytes: int = 0
    peak_reserved_bytes: int = 0
    retries: int = 0
    """Allocations for which torch's allocator gave its cache back first, over all steps."""
    by_allocator_bytes: int = 0
    loss: float = 0.0


def has_helper() -> bool:
    """Whether the C++ helper is there."""
    return helper() is not None


def watched(way: str, budget_bytes: int | None = None) -> Curve:
    """Run the steps by `way`. A session has `budget_bytes` beside what is there before."""
    torch.cuda.synchronize()
    free_unused()
    device = CudaDevice() if way == "allocator" else WithoutHook()
    torch.manual_seed(0)
    x = torch.randn(LAYER_BYTES // 4, device="cuda", requires_grad=True)
    curve = Curve(way=way, start_bytes=device.allocated_bytes())
    retries = _stat("num_alloc_retries")
    with _way(way, device, curve, budget_bytes) as step:
        for number in range(STEPS):
            last = number == STEPS - 1
            if last:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            with step():
                curve.loss = _step(x, partial(_sample, curve) if last else lambda: None, surprise=last)
            x.grad = None
        torch.cuda.synchronize()
        curve.peak_active_bytes = _stat("active_bytes.all.peak")
        curve.peak_reserved_bytes = torch.cuda.max_memory_reserved()
    curve.retries = _stat("num_alloc_retries") - retries
    return curve


def _step(x: Tensor, sample: Callable[[], None], *, surprise: bool) -> float:
    y = x
    for layer in range(LAYERS):
        y = torch.tanh(y * 1.01)
        if surprise and layer == LAYERS // 2:
            with torch.no_grad():
                beside = []
                for _ in range(SURPRISE):
                    beside.append(y * 2)
                    sample()
                del beside
        sample()
        y.register_hook(lambda grad: sample())
    loss = y.square().mean()
    loss.backward()
    sample()
    return float(loss.detach())


def _sample(curve: Curve) -> None:
    stats = torch.cuda.memory_stats()
    curve.active.append(stats["active_bytes.all.current"])
    curve.reserved.append(stats["reserved_bytes.all.current"])


def _stat(name: str) -> int:
    return int(torch.cuda.memory_stats()[name])


@contextmanager
def _way(
    way: str, device: CudaDevice, curve: Curve, budget_bytes: int | None
) -> Iterator[Callable[[], AbstractContextManager[object]]]:
    if way == "no swapping":
        yield nullcontext
        return
    if way == "record_stream":
        with _CopiedOut() as hooks:
            yield nullcontext
        del hooks
        return
    assert budget_bytes is not None
    session = SwapSession(curve.start_bytes + budget_bytes, device=device, min_bytes=MIB, plans=False)
    with session.pool, session:
        yield session.step
        curve.by_allocator_bytes = session.report().bytes_reclaimed_by_allocator


class _CopiedOut(torch.autograd.graph.saved_tensors_hooks):
    """Copies every saved tensor out on a stream of its own, and leaves its block to `record_stream`, as is usual."""

    def __init__(self) -> None:
        self._d2h = torch.cuda.Stream()
        super().__init__(self._save, self._use)

    def _save(self, t: Tensor) -> Tensor | tuple[Tensor, torch.cuda.Event]:
        if t.numel() * t.element_size() < MIB or t.is_leaf:
            return t
        host = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
        self._d2h.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._d2h):
            host.copy_(t, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._d2h)
        t.record_stream(self._d2h)
        return host, done

    def _use(self, saved: Tensor | tuple[Tensor, torch.cuda.Event]) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        host, done = saved
        torch.cuda.current_stream().wait_event(done)
        return host.to("cuda", non_blocking=True)
