"""The N-th pin, allocation, copy, event or wait of a step fails, or is interrupted, for every N: nothing leaks, the next step
is right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device import SPECS
from chameleon_mm.device.sim import SimEvent, SimStream
from chameleon_mm.swap import swap_outs
from chameleon_mm.swap.copy_queue import CopyQueue, Move
from chameleon_mm.swap.metrics import Metrics
from chameleon_mm.units import KIB
from tests._fakes import Faults
from tests._programs import deep

pytestmark = pytest.mark.usefixtures("no_gc", "short_search")

BASELINE_BYTES = 2 * 4608
"""The input and the expected gradient, 32 * 33 * 4 bytes each, rounded up to 512."""


class Fault(RuntimeError):
    """Error of an injected failure."""


SITES: dict[str, tuple[type, str]] = {
    "pin": (cm.SimDevice, "alloc_pinned"),
    "allocation": (SimStream, "alloc"),
    "resize": (SimStream, "resize"),
    "copy": (SimStream, "copy"),
    "event": (SimStream, "record"),
    "wait": (SimStream, "wait"),
    "query": (SimEvent, "query"),
    "free": (SimStream, "free"),
    "pack": (SimStream, "pack"),
    "unpack": (SimStream, "unpack"),
}
"""Calls of the swap path to a device. Events are recorded after copies: those fail with the copy under way."""


@contextmanager
def faults_at(site: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    faults = Faults(Fault)
    owner, name = SITES[site]
    real: Callable[..., Any] = getattr(owner, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        faults.hit()
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, call)
        yield faults


SLOW_LINK = dataclasses.replace(SPECS["h200"], h2d_gbps=0.1, d2h_gbps=0.1, duplex_gbps=0.15)
"""Slow enough that small storages wait for each other, and travel together."""


MODES = ("plain", "packed")
"""Each storage for itself; several together, over a slow link."""


class Trainer:
    """Small step that swaps out, reclaims, prefetches and swaps in on demand, and drops a graph."""

    def __init__(self, mode: str) -> None:
        self.device = cm.SimDevice(SLOW_LINK if mode == "packed" else "h200", hbm_bytes="1GiB")
        with self.device.compute():
            torch.manual_seed(0)
            self.x = torch.randn(32, 33, requires_grad=True)
            budget = self.device.allocated_bytes() + 64 * 1024
        self.session = cm.SwapSession(
            hbm_budget=budget,
            host_budget="1MiB",
            device=self.device,
            min_bytes=0,
            plans=mode == "plain",  # planned storages travel alone, as they are
        )
        self.expected = self._gradient()

    def _gradient(self) -> Tensor:
        with self.device.compute():
            dropped = torch.tanh(self.x * 3)
            y = deep(self.x)
            del dropped
            (grad,) = torch.autograd.grad(y.sum(), self.x)
        return grad

    def step(self) -> bool:
        """Run a step. Return True if the gradient is right."""
        with self.session.step():
            return torch.equal(self._gradient(), self.expected)


def attempt(site: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch, fail_at: int, mode: str) -> bool:
    """Run once with the N-th call failing. Return True if there was an N-th call."""
    monkeypatch.setattr(swap_outs, "GROUP_BYTES", 8 * KIB)
    trainer = Trainer(mode)
    with faults_at(site, monkeypatch) as faults, trainer.session:
        faults.fail_at, faults.error = fail_at, error
        for _ in range(2):
            try:
                assert trainer.step(), f"{site} {fail_at}: a wrong number"
            except (Fault, KeyboardInterrupt, cm.TransferFailed, torch.OutOfMemoryError) as caught:
                caught.__traceback__ = None  # its frames hold the graph
                del caught
        with suppress(Fault, KeyboardInterrupt):
            trainer.session.report()  # an error caught while a dropped graph was cleared away is raised here, at the latest
        reached = faults.over
        faults.fail_at = None
        assert trainer.step(), f"{site} {fail_at}: the next step is wrong"
        assert trainer.session.pool.stats().num_live == 0, f"{site} {fail_at}: a block leaked"
        trainer.device.synchronize()
        assert trainer.device.allocated_bytes() <= BASELINE_BYTES, f"{site} {fail_at}: device memory leaked"
    return reached


EACH_UP_TO, STRIDE = 12, 7
"""Calls of a site that fail one by one, and the stride for the calls after them. The stride divides neither an operator's nor a
step's number of calls."""

ONLY_IN = {"allocation": "packed", "free": "packed", "pack": "packed", "unpack": "packed"}
QUICK = {"allocation", "copy", *ONLY_IN}
"""Sites that are quick to go through; of the others there are many in a step."""
CASES = [
    pytest.param(site, mode, marks=() if site in QUICK or (mode == "plain" and site != "query") else pytest.mark.slow)
    for site in SITES
    for mode in MODES
    if ONLY_IN.get(site, mode) == mode
]


@pytest.mark.ci
@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt], ids=["fails", "is interrupted"])
@pytest.mark.parametrize(
    ("each_up_to", "stride"),
    [(EACH_UP_TO, STRIDE), pytest.param(inf, 1, marks=[pytest.mark.slow, pytest.mark.thorough])],
    ids=["some", "every single one"],
)
@pytest.mark.parametrize(("site", "mode"), CASES)
def test_faults_at_every_site(
    site: str, mode: str, each_up_to: float, stride: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the first calls fails in its turn, then every `stride`-th."""
    fail_at = 1
    while attempt(site, error, monkeypatch, fail_at, mode):
        fail_at += 1 if fail_at < each_up_to else stride
    assert fail_at > 1, "the site was never reached: nothing was tested"


def test_a_refused_move_is_not_waited_for_by_the_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no end event: taken for one still under way, it would be looked at again for the rest of the session."""
    device = cm.SimDevice()
    queue, metrics = CopyQueue(device, "d2h", out=True, outstanding=1), Metrics()
    metrics.begin_step(device.current_stream(), timed=True)
    host = device.alloc_pinned(2 * 4096)
    buffers = [device.current_stream().alloc(4096) for _ in range(2)]
    for n, buffer in enumerate(buffers):
        ready = device.current_stream().record()
        move = queue.submit(Move(buffer.untyped_storage(), host[n * 4096 : (n + 1) * 4096], [ready], timed=True))
        metrics.moved(move, "out", 4096)
    assert not move.begun, "the first copy was complete already: nothing was left to refuse"
    device.synchronize()
    with faults_at("copy", monkeypatch) as faults:
        faults.fail_at = 1
        queue.hand_over()
    assert move.failed
    device.synchronize()
    assert len(metrics.resolve()) == 1
    assert not metrics._moves
