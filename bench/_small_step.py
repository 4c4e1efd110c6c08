"""Host time of a small model's step in a session that has nothing to swap, and of the same step without a session.

each round:     a new session, its warm-up, then some steps; as many without one; as many under hooks that do nothing
x no session  = step / step without a session in the same round, each the mean of its steps

The session times one step in 16, and that cost is in the mean.

Hooks that do nothing show the time that autograd itself takes to call hooks.

If the model is small, a GPU waits for its host: the session's host time then makes the step longer. The model is an MLP with
two norms, whose step takes a host a few milliseconds at most. None of its saved tensors is large enough to be worth moving.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from chameleon_mm.api.session import SwapSession
from chameleon_mm.bench._hooks_peers import IDENTITY
from chameleon_mm.bench._measure import Cell, Column, Figure, Results, Waived, interleave, undisturbed
from chameleon_mm.bench._report import Bound, median_of
from chameleon_mm.bench.profiler import keep
from chameleon_mm.device.protocols import Device

MAX_RATIO = 1.03
NO_SESSION, SESSION = "no session", "session, nothing to swap"
WAYS = (NO_SESSION, IDENTITY, SESSION)
WARMUP_STEPS, TIMED_STEPS = 32, 64
WIDTH, ROWS, BLOCKS = 128, 8, 2

_ON_A_SIMULATOR = Waived("on a simulator the host does the device's work and keeps its clock: its time says nothing of a GPU's")

_COLUMNS = (
    Column(key="step", title="host ms", formula="time until a step is launched / steps", on_stand_in=True),
    Column(key="ratio", title="x no session", formula="step / step without a session in the same round", on_stand_in=True),
)


def small_step(device: Device, *, repeats: int, seed: int) -> tuple[Results, Bound]:
    """Measure the table, and the bound on the ratio. On a simulator both are waived."""
    table = Results("training", device, _COLUMNS)
    rows: dict[str, dict[str, Cell]]
    if device.simulated:
        rows = {name: {column.key: _ON_A_SIMULATOR for column in _COLUMNS} for name in WAYS}
    else:
        taken = interleave({name: partial(_sample, device, name, seed) for name in WAYS}, repeats=repeats)
        figure = partial(Figure.of, simulated=False)
        rows = {name: {"step": figure([us / 1e3 for us in found], "ms")} for name, found in taken.items()}
        rows[NO_SESSION]["ratio"] = Waived("the others are compared with it")
        for name in (IDENTITY, SESSION):
            pairs = zip(taken[name], taken[NO_SESSION], strict=True)
            rows[name]["ratio"] = figure([us / plain for us, plain in pairs], "x")
        about = f"small model: an MLP of width {WIDTH} with {BLOCKS} norms, {ROWS} rows, SGD"
        table.notes.append(f"{about}; {WARMUP_STEPS} steps of warm-up")
    for name, cells in rows.items():
        table.add(name, {"way": name, "width": WIDTH, "rows": ROWS}, cells)
    found = median_of(rows[SESSION]["ratio"])
    name = "small model, nothing to swap: host time of a step over no session"
    return table, Bound(name=name, limit=MAX_RATIO, found=found, on_stand_in=True)


def _sample(device: Device, name: str, seed: int) -> float:
    """Host time of a step in microseconds: the mean of `TIMED_STEPS` steps."""
    torch.manual_seed(seed)
    wide = partial(nn.Linear, WIDTH, WIDTH)
    blocks = [(wide(), nn.GELU(), nn.LayerNorm(WIDTH), wide(), nn.ReLU()) for _ in range(BLOCKS)]
    model = nn.Sequential(*chain.from_iterable(blocks)).to(device.torch_device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    x = torch.randn(ROWS, WIDTH, device=device.torch_device)
    if name == NO_SESSION:
        return _timed(device, partial(_step, model, optimizer, x))
    if name == IDENTITY:
        with saved_tensors_hooks(keep, keep):
            return _timed(device, partial(_step, model, optimizer, x))
    session = SwapSession(device=device, model=model)
    with session.pool, session:
        return _timed(device, partial(_step_of, session, model, optimizer, x))


def _timed(device: Device, step: Callable[[], None]) -> float:
    for _ in range(WARMUP_STEPS):
        step()
        device.synchronize()
    taken = []
    with undisturbed():
        for _ in range(TIMED_STEPS):
            began = time.perf_counter_ns()
            step()
            taken.append((time.perf_counter_ns() - began) / 1e3)
            device.synchronize()  # the next step's launches find an empty queue
    return fmean(taken)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _step_of(session: SwapSession, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    with session.step():
        _step(model, optimizer, x)
