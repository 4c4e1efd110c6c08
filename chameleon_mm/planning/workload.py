"""The work of one training step: a model and how its loss comes about.

build: Build = source_of(...)           # checked; nothing built yet
with shapes_alone():
    workload = build()                  # weights and batch are fake: shapes without memory
    workload.loss().backward()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from chameleon_mm.errors import ChameleonError


class ModelUnusable(ChameleonError, ValueError):
    """A model that was asked for cannot be found, built or run without a GPU and without its numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One step's model and batch. `loss()` runs forward and returns the scalar to go backward from."""

    about: str
    """Description for people: what it is, with its batch."""
    model: nn.Module
    loss: Callable[[], Tensor]
    notes: tuple[str, ...] = ()
    """Notes on the figures, a sentence each."""


Build = Callable[[], Workload]
"""Builds it, on the CPU, in torch's default dtype. Call it under `shapes_alone`."""
