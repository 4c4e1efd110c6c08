"""Records of a trace, one at a time: for reading and writing. `Trace` keeps the same in columns.

tick   0        1        2        3        4 ...          every operator and every hook of the step is one tick
       op       save     op       save     op
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class StepPhase(enum.IntEnum):
    """Part of a step that an operator belongs to. With several micro-batches forward and backward alternate."""

    FORWARD = 0
    """Begins with the step, and with the first save after a backward."""
    BACKWARD = 1
    """Begins with the first operator that autograd's engine runs; ends when its graph task does."""
    OPTIMIZER = 2
    """Begins after the last backward of the step; ends with it."""


class TensorKind(enum.IntEnum):
    """Purpose of a storage."""

    PARAMETER = 0
    BUFFER = 1
    GRADIENT = 2
    """Gradient of a parameter, as the optimizer reads it."""
    OPTIMIZER = 3
    """State that an optimizer keeps from step to step."""
    INPUT = 4
    """On the device before the step, none of the above."""
    ACTIVATION = 5
    """Made in the step and saved by autograd."""
    TEMPORARY = 6
    """Made in the step, and neither saved nor kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRecord:
    """One operator that ran."""

    tick: int
    name: str
    """Name as torch has it: "aten::mm"."""
    content: int
    """64-bit hash of its name, its tensors' shapes, strides and dtypes, and its plain arguments: the same in every process."""
    phase: StepPhase
    duration_us: float
    """Time on the device until the next operator could begin; stalls on copies are not in it."""
    reads: tuple[int, ...]
    """Numbers of the storages of its tensor arguments."""
    writes: tuple[int, ...]
    """Numbers of the storages that it returned or changed."""
    inner_bytes: int
    """Device memory that it allocates and frees again before it ends: at most so much beside its inputs and results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """One storage. Its memory is there from tick `born` to tick `dies`, both included, where nothing is swapped."""

    nbytes: int
    kind: TensorKind
    born: int
    """Tick at which it is made; -1: before the step."""
    released: int
    """Last tick before its first use during which somebody beside a handle of ours held it, so that dropping it after that tick
    frees its memory. NEVER: nobody saved it, or somebody held it until it was used."""
    sendable: int
    """Number of the first hook at which the operator that saved it is over, so that it may be copied; NEVER: not saved."""
    dies: int
    """Last tick of its life; the number of ticks: it outlives the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookRecord:
    """One call of autograd's two hooks."""

    tick: int
    use: bool
    """Whether it is a use; False: a save."""
    tensor: int
    """Number of the storage; -1: one that nobody may move (a parameter, a small one)."""
    feature: int
    """64-bit hash of what the light profiler knows of this call: shape, dtype and more. Comparable within a process alone."""
