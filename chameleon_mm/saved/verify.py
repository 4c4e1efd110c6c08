"""Verify mode: compares what goes out with what comes back, by checksum, on the device.

    checksum = StorageChecksum(t, step, checksums)  # at save: which tensor, by which operator, in which step
    checksum.close(buffer)           # when its copy out is queued
    checksum.check(buffer)           # when it is used again: SwapMismatch if one bit differs

Costs a pass over the bytes each way and a host sync for every check: for finding out, not for training. A storage of which only
some bytes are saved when it is copied is not checked, unless those are gathered: its owner may write the others meanwhile.
"""

from __future__ import annotations

from torch import Tensor

from chameleon_mm.errors import SwapMismatch
from chameleon_mm.saved.checksums import Checksums, ChecksumSlot


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
        out, back = self._checksums.read([self._sum, self._checksums.start(buffer)])
        if out != back:
            raise SwapMismatch(
                f"a saved tensor came back other than it went out: {self._what}; {buffer.numel()} bytes, checksum expected "
                f"{out:#x}, got {back:#x}. Somebody wrote to the host copy, a copy was not ordered, or memory is faulty"
            )
