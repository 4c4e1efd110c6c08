"""One training run, swapped or not: the same lines for both, so that nothing but the swapping can differ.

seed; model; AdamW
with session_of(model) as session:            # Unswapped, or a SwapSession
    for kind, ids, targets in schedule, rows:
        with session.step():
            training:    forward; backward; clip the gradient; optimizer step; gradients dropped
            evaluation:  forward
every loss, every gradient norm, the final weights and the random state -> RunResult, on the CPU
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states

from chameleon_mm.demo.model import GPT, GPTConfig
from chameleon_mm.demo.schedule import StepKind, schedule
from chameleon_mm.device.protocols import Device
from chameleon_mm.device.reproducible import reproducible

Rows = Sequence[tuple[Tensor, Tensor]]


class Session(Protocol):
    """What a run needs of a `SwapSession`."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> object: ...

    def step(self) -> AbstractContextManager[object]: ...


class Unswapped:
    """The session of a run that swaps nothing: torch as it comes."""

    def __init__(self, model: nn.Module) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One run: the model, the text is given apart. Raises `ValueError` for what cannot be run."""

    model: GPTConfig
    steps: int
    batch: int
    """Rows per step."""
    seed: int = 0
    """Of weights, dropout and rows."""
    lr: float = 1e-3
    max_norm: float = 1.0
    """The gradient is scaled down to this norm where it is longer."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}: expected 1 or more, got {value}")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed: expected 0 to 2**63 - 1, got {self.seed}")
        if not 0.0 < self.lr < float("inf"):
            raise ValueError(f"lr: expected a finite rate above 0, got {self.lr}")

    @property
    def kinds(self) -> tuple[StepKind, ...]:
        """Of each step, in order."""
        return schedule(self.steps, self.model.context)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What one run gave. Tensors are on the CPU and outlive the device's own."""

    kinds: tuple[StepKind, ...]
    """Of each step."""
    losses: Tensor
    """[steps], in the loss's own dtype."""
    grad_norms: Tensor
    """[training steps], before clipping."""
    weights: dict[str, Tensor]
    """Every parameter and buffer after the last step."""
    random_states: tuple[Tensor, ...]
    """State of the CPU's generator and of the device's, after the last step."""
    step_us: tuple[float, ...]
    """Time of each step on the compute stream, by device events (simulated time on the simulator)."""
    step_peak_bytes: tuple[int, ...]
    """Most device memory allocated at once in each step, model and optimizer included."""
    model_bytes: int
    """Parameters and buffers."""
    peak_bytes: int
    """Most device memory allocated at once, in steps and before them."""


def train(
    config: TrainConfig,
    rows: Rows,
    device: Device,
    session_of: Callable[[GPT], Session] = Unswapped,
    *,
    on_step: Callable[[], None] = lambda: None,
) -> RunResult:
    """Train from `config.seed` on `device`, one step per element of `rows`, inside `session_of(model)`.

    Seeds torch's default generators and resets the device's peaks, also before each step. `on_step` is called as each step has
    been enqueued. Raises what the session and the device raise: `torch.OutOfMemoryError` where the run does not fit, and
    `ValueError` for another number of rows than of steps.
    """
    gc.collect()  # a cycle of torch's keeps the last run's optimizer and with it the model: it is not this run's memory
    device.reset_peaks()
    with reproducible(), device.compute():
        torch.manual_seed(config.seed)
        model = GPT(config.model, device=device.torch_device)
        # fused: one kernel, on a GPU and on the CPU that the simulator prices. By default torch would take a dozen small
        # operators for every parameter there, and a simulated step of a small model would be about launching those.
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, fused=True)
        # Before the first step, for a copy out of pageable memory makes the host wait. copy=True: the simulator's device is
        # the CPU, and a row must become device memory there too.
        batches = [
            (kind, _to_device(ids, kind, device), _to_device(targets, kind, device))
            for kind, (ids, targets) in zip(config.kinds, rows, strict=True)
        ]
        losses, grad_norms, peaks = [], [], [device.peak_allocated_bytes()]
        marks = [device.current_stream().record(timed=True)]
        with session_of(model) as session:
            for kind, ids, targets in batches:
                device.reset_peaks()
                with session.step():
                    if kind.training:
                        loss = model.loss(ids, targets)
                        loss.backward()
                        grad_norms.append(nn.utils.clip_grad_norm_(model.parameters(), config.max_norm))
                        optimizer.step()
                        optimizer.zero_grad()
                    else:
                        loss = _evaluate(model, ids, targets)
                    # Kept on the device: reading a loss here would make the host wait and hide what swapping costs it.
                    losses.append(loss.detach())
                marks.append(device.current_stream().record(timed=True))
                peaks.append(device.peak_allocated_bytes())
                on_step()
        marks[-1].synchronize()
    device.synchronize()
    # Outside compute(): these copies are the host's, not part of what the simulator prices and counts.
    parameter = next(model.parameters())
    return RunResult(
        kinds=config.kinds,
        losses=torch.stack([_to_host(loss) for loss in losses]),
        grad_norms=torch.stack([_to_host(norm) for norm in grad_norms]),  # the first step is always a training one
        weights={name: _to_host(value) for name, value in model.state_dict().items()},
        random_states=(torch.get_rng_state(), *get_device_states(parameter)[1]),
        step_us=tuple(end.elapsed_us(start) for start, end in pairwise(marks)),
        step_peak_bytes=tuple(peaks[1:]),
        model_bytes=sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        peak_bytes=max(peaks),
    )


def _evaluate(model: GPT, ids: Tensor, targets: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        loss = model.loss(ids, targets)
    model.train()
    return loss


def _to_device(rows: Tensor, kind: StepKind, device: Device) -> Tensor:
    """As many bytes of each row as steps of this kind have."""
    return rows[:, : kind.length].contiguous().to(device.torch_device, copy=True)


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
