"""Verify mode: compares what goes out with what comes back, by checksum, on the device.

    checksums = Checksums(device, scratch_bytes(budget))      # all the device memory that it ever takes
    checksum = StorageChecksum(t, step, checksums)  # at save: which tensor, by which operator, in which step
    checksum.record(buffer)          # when its copy out is queued
    checksum.verify(buffer)          # when it is used again: SwapMismatch if one bit differs

Costs a pass over the bytes each way and a host sync for every check: for finding out, not for training.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from chameleon_mm.device import Device, Stream
from chameleon_mm.errors import SwapMismatch
from chameleon_mm.units import KIB, MIB

_WORD_BYTES = 8
_ODD = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed odd number: neighbouring positions get unlike weights
_ODD_OF_TAIL = 0x2545F4914F6CDD1D  # another, so that no word is weighted as the bytes behind the last whole one are

_SUMS = 512
"""Number of checksums that are kept on the device; those beyond are read by the host at once."""

_LEAST_BYTES = 16 * KIB
_MOST_BYTES = 16 * MIB


def scratch_bytes(hbm_budget_bytes: int | None) -> int:
    """Device memory that checksums take of a budget: a thousandth, within limits. Larger pieces cost fewer launches."""
    return _MOST_BYTES if hbm_budget_bytes is None else min(_MOST_BYTES, max(_LEAST_BYTES, hbm_budget_bytes // 1024))


class Checksums:
    """Takes checksums of buffers in device memory of its own, which is allocated once: what a budget counts on is there.

    A checksum is a 64-bit sum of words, each weighted by its position. Weights are odd, so that no change of a single word goes
    unseen; words that trade places change the sum too. Not thread-safe.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        """`nbytes`: all the device memory that is taken; 16 KiB or more."""
        self.nbytes = max(nbytes, _LEAST_BYTES) // _WORD_BYTES * _WORD_BYTES
        self._device = device
        self._piece_words = (self.nbytes // _WORD_BYTES - _SUMS - 2) // 2
        self._scratch: Tensor | None = None
        self._alloc_stream: Stream | None = None
        self._free = deque(range(_SUMS))

    def prepare(self) -> None:
        """Allocate now, on the current stream. Raises `torch.OutOfMemoryError`."""
        if self._scratch is not None:
            return
        self._alloc_stream = self._device.current_stream()
        scratch = self._alloc_stream.alloc(self.nbytes).view(torch.int64)
        with torch.no_grad():
            weights = scratch[: self._piece_words]
            torch.arange(self._piece_words, out=weights)
            weights.mul_(_signed(2 * _ODD)).add_(1)
        self._scratch = scratch

    def of(self, buffer: Tensor) -> int:
        """Checksum of a flat uint8 tensor, ordered after the current stream's work. The host waits for it."""
        return self._read(self._take(buffer, _SUMS))

    def start(self, buffer: Tensor) -> ChecksumSlot:
        """Take a checksum as `of` does, without a wait as long as there is a free slot for it."""
        if not self._free:
            return ChecksumSlot(self, None, self.of(buffer))
        slot = self._free.popleft()
        return ChecksumSlot(self, self._take(buffer, slot), 0)

    def read(self, slot: int) -> int:
        """Value in a slot. The host waits for it."""
        return self._read(slot)

    def free_slot(self, slot: int) -> None:
        """Free a slot. Any thread may do so, at any moment."""
        self._free.append(slot)

    def _take(self, buffer: Tensor, slot: int) -> int:
        self.prepare()
        assert self._scratch is not None and self._alloc_stream is not None
        current = self._device.current_stream()
        if current is not self._alloc_stream:
            current.wait(self._alloc_stream.record())  # orders this use of the scratch memory after the one before
        most, scratch = self._piece_words, self._scratch
        weights, products = scratch[:most], scratch[most : 2 * most]
        sums = scratch[2 * most :]
        total, part = sums[slot : slot + 1], sums[_SUMS + 1 : _SUMS + 2]
        whole = buffer.numel() // _WORD_BYTES * _WORD_BYTES
        with torch.no_grad():
            total.zero_()
            for begin in range(0, whole, most * _WORD_BYTES):
                words = buffer[begin : min(whole, begin + most * _WORD_BYTES)].view(torch.int64)
                weighted = products[: words.numel()]
                torch.add(weights[: words.numel()], _signed(2 * (begin // _WORD_BYTES) * _ODD), out=weighted)
                torch.sum(weighted.mul_(words), 0, keepdim=True, out=part)
                total.add_(part)
            if whole < buffer.numel():
                tail = products[: buffer.numel() - whole]
                tail.copy_(buffer[whole:])
                torch.sum(tail.mul_(weights[: tail.numel()]).mul_(_ODD_OF_TAIL), 0, keepdim=True, out=part)
                total.add_(part)
        if current is not self._alloc_stream:
            self._alloc_stream.wait(current.record())  # ... and the next one after this
        return slot

    def _read(self, slot: int) -> int:
        assert self._scratch is not None and self._alloc_stream is not None
        current = self._device.current_stream()
        if current is not self._alloc_stream:
            current.wait(self._alloc_stream.record())  # orders the read after the sum
        return int(self._scratch[2 * self._piece_words + slot].item())


class ChecksumSlot:
    """A checksum on the device, or on the host where no slot was free. Its end frees its slot."""

    __slots__ = ("_checksums", "_slot", "_sum")

    def __init__(self, checksums: Checksums, slot: int | None, known: int) -> None:
        self._checksums = checksums
        self._slot = slot
        self._sum = known

    def read(self) -> int:
        """Value of the checksum. The host waits for it."""
        return self._sum if self._slot is None else self._checksums.read(self._slot)

    def __del__(self) -> None:
        if self._slot is not None:
            self._checksums.free_slot(self._slot)


class StorageChecksum:
    """The checksum of one saved storage, and a description of the storage for the error."""

    __slots__ = ("_checksums", "_sum", "_what")

    def __init__(self, t: Tensor, step: int, checksums: Checksums) -> None:
        node = t.grad_fn
        operator = "an operator outside autograd" if node is None else node.name()
        self._what = f"{tuple(t.shape)} {t.dtype}, result of {operator}, saved in step {step}"
        self._checksums = checksums
        self._sum: ChecksumSlot | None = None

    def close(self, buffer: Tensor) -> None:
        """Note the checksum of a flat uint8 tensor, on the current stream."""
        self._sum = self._checksums.start(buffer)

    def check(self, buffer: Tensor) -> None:
        """Compare with what went out; waits for the device. Raises `SwapMismatch`."""
        assert self._sum is not None
        out, back = self._sum.read(), self._checksums.of(buffer)
        if out != back:
            raise SwapMismatch(
                f"a saved tensor came back other than it went out: {self._what}; {buffer.numel()} bytes, checksum expected "
                f"{out:#x}, got {back:#x}. Somebody wrote to the host copy, a copy was not ordered, or memory is faulty"
            )


def _signed(number: int) -> int:
    """`number` modulo 2**64, as an int64 has it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
