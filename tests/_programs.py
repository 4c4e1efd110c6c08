"""A program that several tests run, and a thread to run it on.

deep(x)                    a chain whose every link saves something that nobody else keeps
leaf(device), opened(device)  what it runs on, and a session in which all that it saves may move
gradient(device, x)        what it gives without one
on_a_thread(work)          `work` elsewhere, to its end
assert_same(a, b)          as many tensors in both, and equal ones
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.units import MIB


def deep(x: Tensor, links: int = 4) -> Tensor:
    """A chain whose every link saves two tensors that nobody else keeps."""
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


def on_a_thread(work: Callable[[], object]) -> None:
    """Runs `work` on a thread to its end; raises here what it raised."""
    raised: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - handed to the test, which is on another thread
            raised.append(error)

    thread = threading.Thread(target=body, name="other")
    thread.start()
    thread.join()
    if raised:
        raise raised.pop()


def assert_same(expected: list[Tensor], got: list[Tensor]) -> None:
    assert len(expected) == len(got) > 0
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
