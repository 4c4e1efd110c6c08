"""Verify mode: what goes out against what comes back, by checksum, on the device.

    seal = Seal(t, step)             # at save: which tensor, by which operator, in which step
    seal.close(buffer)               # when its copy out is queued
    seal.check(buffer)               # when it is used again: SwapMismatch if one bit differs

Costs a pass over the bytes each way and a host sync for every check: for finding out, not for training.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chameleon_mm.errors import SwapMismatch

_WORD_BYTES = 8
_CHUNK_WORDS = 1 << 20
_ODD = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed odd number: neighbouring positions get unlike weights


class Seal:
    """The checksum of one saved storage, and what to call it."""

    __slots__ = ("_sum", "_what")

    def __init__(self, t: Tensor, step: int) -> None:
        node = t.grad_fn
        operator = "an operator outside autograd" if node is None else node.name()
        self._what = f"{tuple(t.shape)} {t.dtype}, result of {operator}, saved in step {step}"
        self._sum: Tensor | None = None

    def close(self, buffer: Tensor) -> None:
        """Note the checksum of a flat uint8 tensor, on the current stream."""
        self._sum = checksum(buffer)

    def check(self, buffer: Tensor) -> None:
        """Compare with what went out; waits for the device. Raises `SwapMismatch`."""
        assert self._sum is not None
        out, back = int(self._sum), int(checksum(buffer))
        if out != back:
            raise SwapMismatch(
                f"a saved tensor came back other than it went out: {self._what}; {buffer.numel()} bytes, checksum expected "
                f"{out:#x}, got {back:#x}. Somebody wrote to the host copy, a copy was not ordered, or memory is faulty"
            )


def checksum(buffer: Tensor) -> Tensor:
    """A 64-bit sum of the words of a flat uint8 tensor, each weighted by its position: a 0-dim int64 on its device.

    Weights are odd, so that no change of a single word goes unseen; words that trade places change the sum too.
    """
    whole = buffer.numel() // _WORD_BYTES * _WORD_BYTES
    total = torch.zeros((), dtype=torch.int64, device=buffer.device)
    with torch.no_grad():
        for position, words in enumerate(torch.split(buffer[:whole].view(torch.int64), _CHUNK_WORDS)):
            first = position * _CHUNK_WORDS
            places = torch.arange(first, first + words.numel(), dtype=torch.int64, device=buffer.device)
            total = total + (words * (2 * places * _ODD + 1)).sum()
        tail = buffer[whole:].to(torch.int64)
        return total + (tail * (torch.arange(tail.numel(), dtype=torch.int64, device=buffer.device) * 512 + 1)).sum() * _ODD
