"""A program that several tests run, and a thread to run it on.

deep(x)                    a chain whose every link saves something that nobody else keeps
on_a_thread(work)          `work` elsewhere, to its end
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor


def deep(x: Tensor) -> Tensor:
    """A chain whose every link saves something that nobody else keeps."""
    for _ in range(4):
        x = torch.tanh(x * 1.5).exp() - 1
    return x


def on_a_thread(work: Callable[[], None]) -> None:
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
