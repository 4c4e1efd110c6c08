"""Program that several tests run, executors and sessions to swap it, and threads to run it on.

deep(x)                    a chain whose every link saves something that nobody else keeps
leaf(device), opened(device)  what it runs on, and a session in which all that it saves may move
swapping_executor(device, pool)  an executor alone, in which all may move; saved_by(executor, t): what swaps t in it
gradient(device, x)        what it gives without one
on_a_thread(work), at_once(works)  `work` elsewhere, to its end; several, from one moment on
assert_same(a, b), same(a, b)  as many tensors in both, and equal ones
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.plan.rule import Limits
from chameleon_mm.swap.classify import ProtectedStorages
from chameleon_mm.swap.executor import Executor
from chameleon_mm.swap.handles import SwappedView
from chameleon_mm.swap.swap_outs import PACK_BELOW_BYTES
from chameleon_mm.units import MIB


def deep(x: Tensor, links: int = 4) -> Tensor:
    """Chain in which each link saves two tensors that only autograd keeps."""
    for _ in range(links):
        x = torch.tanh(x * 1.5).exp() - 1
    return x


def leaf(device: Device) -> Tensor:
    return torch.randn(64, 64, device=device.torch_device, requires_grad=True)


def gradient(device: Device, x: Tensor, program: Callable[[Tensor], Tensor] = deep) -> Tensor:
    with device.compute():
        return torch.autograd.grad(program(x).sum(), x)[0]


def opened(device: Device) -> cm.SwapSession:
    return cm.SwapSession(device.allocated_bytes() + 16 * MIB, "8MiB", device, min_bytes=0)


def swapping_executor(
    device: Device,
    pool: cm.PinnedPool,
    limits: Limits | None = None,
    *,
    min_bytes: int = 0,
    pack_below_bytes: int = PACK_BELOW_BYTES,
) -> Executor:
    """Executor of the default rule. Compute waits for every copy out at the next hook, unless `limits` say otherwise."""
    limits, protected = limits or Limits(leaving_bytes=0), ProtectedStorages()
    executor = Executor(device, pool, min_bytes=min_bytes, limits=limits, protected=protected)
    executor.outs.pack_below_bytes = pack_below_bytes
    return executor


def saved_by(swapper: Executor, t: Tensor) -> SwappedView:
    handle = swapper.save(t)
    assert isinstance(handle, SwappedView)
    return handle


def at_once(works: Iterable[Callable[[], object]]) -> None:
    """Run each of `works` to its end on a thread of its own, all started at once. Raise the first error."""
    works, raised = list(works), list[BaseException]()
    start = threading.Barrier(len(works))

    def body(work: Callable[[], object]) -> None:
        try:
            start.wait()
            work()
        except BaseException as error:  # noqa: BLE001 - handed to the test, which is on another thread
            raised.append(error)

    threads = [threading.Thread(target=body, args=(work,), name="other") for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised.pop(0)


def on_a_thread(work: Callable[[], object]) -> None:
    """Run `work` on a thread to its end. Raise its error."""
    at_once([work])


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(x.device == y.device and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def assert_same(expected: list[Tensor], got: list[Tensor]) -> None:
    assert expected and same(expected, got)
