"""A buffer at the very edge of its allocation, with canaries on its other side.

m = Memory.random(nbytes, place, at_end=True)        canaries | part |
kernel(m.part)                                       beyond the end lies nothing of ours: a tool sees an access there
m.holds(expected)                                    the part as expected, the canaries as they were
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CANARY_BYTES = 64
"""A multiple of 16: a buffer behind it is aligned."""


@dataclass(frozen=True, slots=True)
class Memory:
    """An allocation, a part of it at its front or at its end, and what all of it held before."""

    whole: Tensor
    begin: int
    nbytes: int
    before: Tensor
    """On the host."""

    @classmethod
    def random(cls, nbytes: int, place: torch.device, *, at_end: bool, shift: int = 0) -> Memory:
        """`nbytes` in an allocation that holds nothing else but canaries on the other side. `shift` bytes off a boundary."""
        begin = shift + CANARY_BYTES if at_end else shift
        before = torch.randint(0, 256, (begin + nbytes + (0 if at_end else CANARY_BYTES),), dtype=torch.uint8)
        return cls(before.to(place, copy=True), begin, nbytes, before)

    @property
    def part(self) -> Tensor:
        """(nbytes,) uint8."""
        return self.whole[self.begin : self.begin + self.nbytes]

    def expected(self) -> Tensor:
        """A copy on the host of the part as it was, to be made what it should become."""
        return self.before[self.begin : self.begin + self.nbytes].clone()

    def holds(self, part: Tensor) -> bool:
        """Whether the part is now `part`, on the host, and the rest as it was."""
        wanted = self.before.clone()
        wanted[self.begin : self.begin + self.nbytes] = part
        return torch.equal(self.whole.cpu(), wanted)

    def is_intact(self) -> bool:
        return torch.equal(self.whole.cpu(), self.before)

    def canaries_live(self) -> bool:
        """Whether everything but the part is as it was."""
        return self.holds(self.part.cpu())
