"""What several tests run on and run: a device as a GPU is to dispatch modes, a program, a thread.

Unwatched()                a simulated device without a dispatch mode of its own
deep(x)                    a chain whose every link saves something that nobody else keeps
on_a_thread(work)          `work` elsewhere, to its end
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import chameleon_mm as cm


class Unwatched(cm.SimDevice):
    """Installs nothing but hooks on a thread, as a GPU does. Its copies are still late and its memory still poisoned."""

    @contextmanager
    def compute(self) -> Iterator[cm.SimDevice]:
        yield self


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
