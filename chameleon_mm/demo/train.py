"""A run of the demo's training on a device of the library, swapped or not: nothing but the swapping can differ.

program = Program(...)                        # the training itself
with session_of(program) as session:          # Unswapped, or a SwapSession
    for each step:
        with session.step():
            program.step(number)
its numbers, the time and the peak of each step -> RunResult

`first_difference` compares two runs bit for bit: step by step first, for the earliest difference explains the rest, then the
final weights by name and the random state.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from chameleon_mm.demo.program import Numbers, Program, Rows, TrainConfig
from chameleon_mm.device.protocols import Device
from chameleon_mm.device.reproducible import reproducible

if TYPE_CHECKING:
    from chameleon_mm.session import SwapSession


def first_difference(reference: Numbers, other: Numbers) -> str | None:
    """One line that names the first value in which `other` differs from `reference` by a bit; None if none does.

    Bits are compared, not numbers: two NaNs of the same bits are equal, 0.0 and -0.0 are not.
    """
    return next(_differences(reference, other), None)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two CPU tensors have the same dtype, shape and bits."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _differences(reference: Numbers, other: Numbers) -> Iterator[str]:
    if len(reference.losses) != len(other.losses):
        yield f"number of steps: {len(reference.losses)} against {len(other.losses)}"
    norms = zip(reference.grad_norms, other.grad_norms, strict=False)
    for step, (kind, *losses) in enumerate(zip(reference.kinds, reference.losses, other.losses, strict=False), start=1):
        # Only a training step has a gradient; a run that ended early may lack its last one.
        pairs = {"loss": losses, "gradient norm": next(norms, ()) if kind.training else ()}
        for what, pair in pairs.items():
            if pair and not same_bits(*pair):
                yield f"{what} of step {step}: {_value(pair[0])} against {_value(pair[1])}"
    for name in sorted(reference.weights.keys() | other.weights.keys()):
        a, b = reference.weights.get(name), other.weights.get(name)
        if a is None or b is None:
            yield f"weight {name}: only in the {'second' if a is None else 'first'} run"
        elif not same_bits(a, b):
            yield f"weight {name}: {_where(a, b)}"
    for index, name in enumerate(("CPU", "device")):
        states = reference.random_states[index : index + 1], other.random_states[index : index + 1]
        if len(states[0]) != len(states[1]) or not all(map(same_bits, *states)):
            yield f"random state of the {name}'s generator after the last step"


def _bits(tensor: Tensor) -> Tensor:
    # reshape before view: a 0-dim tensor cannot be viewed in a narrower dtype.
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _value(scalar: Tensor) -> str:
    return f"{scalar.item():.9g} (bits {bytes(_bits(scalar).tolist())[::-1].hex()})"


def _where(a: Tensor, b: Tensor) -> str:
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}"
    differs = (_bits(a).view(-1, a.element_size()) != _bits(b).view(-1, b.element_size())).any(dim=1)
    first = int(differs.nonzero()[0])
    return (
        f"{int(differs.sum())} of {a.numel()} values differ, the first at flat index {first}: "
        f"{_value(a.reshape(-1)[first])} against {_value(b.reshape(-1)[first])}"
    )


class Unswapped:
    """The session of a run that swaps nothing: torch as it comes."""

    def __init__(self, program: Program) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult(Numbers):
    """Result of one run: its numbers, its peak and its times."""

    step_us: tuple[float, ...]
    """Time of each step on the compute stream, by device events (simulated time on the simulator)."""
    step_peak_bytes: tuple[int, ...]
    """Peak of device memory in each step, model and optimizer included."""
    model_bytes: int
    """Bytes of parameters and buffers."""
    peak_bytes: int
    """Peak of device memory, in steps and before them."""


def train(
    config: TrainConfig,
    rows: Rows,
    device: Device,
    session_of: Callable[[Program], SwapSession | Unswapped] = Unswapped,
    *,
    on_host: bool = False,
    on_step: Callable[[], None] = lambda: None,
) -> RunResult:
    """Train from `config.seed` on `device`, one step per element of `rows`, inside `session_of(program)`.

    `on_host`: the model stays on the host until the session moves it.
    Seeds torch's default generators and resets the device's peaks, also before each step. `on_step` is called as each step has
    been enqueued. Raises what the session and the device raise: `torch.OutOfMemoryError` where the run does not fit, and
    `ValueError` for another number of rows than of steps.
    """
    gc.collect()  # a cycle of torch's keeps the last run's optimizer and with it the model: it is not this run's memory
    device.reset_peaks()
    with reproducible(), ExitStack() as stack:
        if on_host:  # outside of `compute()`, within which what is made is the device's
            program = Program(config, rows, device.torch_device, on_host=True)
        stack.enter_context(device.compute())
        if not on_host:
            program = Program(config, rows, device.torch_device)
        program.place()
        peaks = [device.peak_allocated_bytes()]
        marks = [device.current_stream().record(timed=True)]
        with session_of(program) as session:
            peaks[0] = device.peak_allocated_bytes()
            for number in range(config.steps):
                device.reset_peaks()
                with session.step():
                    program.step(number)
                marks.append(device.current_stream().record(timed=True))
                peaks.append(device.peak_allocated_bytes())
                on_step()
        marks[-1].synchronize()
    device.synchronize()
    # Outside compute(): these copies are the host's, not part of what the simulator prices and counts.
    numbers = program.numbers()
    return RunResult(
        **{field.name: getattr(numbers, field.name) for field in fields(numbers)},
        step_us=tuple(end.elapsed_us(start) for start, end in pairwise(marks)),
        step_peak_bytes=tuple(peaks[1:]),
        model_bytes=sum(tensor.nbytes for tensor in (*program.model.parameters(), *program.model.buffers())),
        peak_bytes=max(peaks),
    )
