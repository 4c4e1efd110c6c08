"""Random numbers of the device: from its own generator's seed and offset, as on a GPU, by the CPU's generator.

    draws = Draws(device, generator)      nothing is drawn yet
    draws.generator()                     a CPU generator for one operator; the device's offset has moved on

The same seed gives the same numbers, saving and restoring the generator's state repeats them. They are not a GPU's numbers.
"""

from __future__ import annotations

import torch

PER_OPERATOR = 4
"""Amount by which one operator advances the offset. Torch's own operators advance it by a multiple of four."""


class Draws:
    """Source of one operator's random numbers."""

    def __init__(self, device: torch.device, generator: torch.Generator | None) -> None:
        self.device = device
        self.given = generator

    def generator(self) -> torch.Generator:
        source = self.source()
        offset = source.get_offset()
        source.set_offset(offset + PER_OPERATOR)
        return generator_at(source.initial_seed(), offset)

    def source(self) -> torch.Generator:
        """Return the operator's generator if it was given one, else the device's default."""
        if self.given is not None:
            return self.given
        import torch.cuda  # initialised: there is a tensor of the device

        return torch.cuda.default_generators[self.device.index]


def generator_at(seed: int, offset: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + offset) % (1 << 62))
