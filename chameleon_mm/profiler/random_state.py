"""Snapshot of random number generators, to draw the same numbers again: for an operator or a step that runs again."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Generator, Tensor

from chameleon_mm.device import Device


class RandomState:
    """The states of torch's default generators, the host's and the device's where it has its own, and of `generators`."""

    __slots__ = ("_device", "_device_state", "_host_state", "_others")

    def __init__(self, device: Device, generators: Iterable[Generator] = ()) -> None:
        self._device = device.torch_device
        self._others = [(generator, generator.get_state()) for generator in generators]
        self._host_state = torch.get_rng_state()
        self._device_state: Tensor | None = None
        if self._device.type != "cpu":
            self._device_state = torch.get_device_module(self._device).get_rng_state(self._device)

    def restore(self) -> None:
        torch.set_rng_state(self._host_state)
        if self._device_state is not None:
            torch.get_device_module(self._device).set_rng_state(self._device_state, self._device)
        for generator, state in self._others:
            generator.set_state(state)
