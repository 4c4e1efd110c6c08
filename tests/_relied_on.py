"""Trains the programs of `_relied_on_programs.py` plainly, in sessions and with random mixes, and compares.

    plainly(case)                                    # each step's bits, or its error, in plain PyTorch
    got = trained(case, Budget(0.7))                 # the same program in a session with 0.7 of what it takes
    got = trained(case, Mixed(3))                    # with what becomes of each storage drawn by chance
    assert complaint(case, got) is None

A case is a program and when it writes: in each step, or in every fourth one. `complaint` knows the promise: plain
PyTorch's bits in each step; the named error in the very step of a write, where the case allows it; eager's refusal where
eager refuses.
After an error the model goes on with the parameters and buffers that plain PyTorch's has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache

import torch
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.device import SPECS, Device
from chameleon_mm.device.sim import CostModel
from tests._mix_models import bits
from tests._mixes import Mix, Proofs, mixed, totals_of
from tests._relied_on_programs import PROGRAMS, Program, When

STEPS = 6
"""Steps of a run: the first is recorded, every fourth contains a write, and two follow the first write."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A program, and when it writes."""

    program: type[Program]
    when: When

    @property
    def named_error(self) -> bool:
        """True if a step that writes may end with the named error."""
        if self.when is When.EACH or self.program.eager_refuses:
            return False
        allowed = self.program.named_error
        return not self.program.seen if allowed is None else allowed

    def __str__(self) -> str:
        return f"{self.program.__name__}-{self.when.value}"


CASES = tuple(Case(program, when) for program in PROGRAMS for when in program.whens)


# --- training


@dataclasses.dataclass(frozen=True)
class Refused:
    """A step's error."""

    kind: str
    text: str

    @property
    def in_place(self) -> bool:
        """True if this is eager's refusal of an in-place write."""
        return self.kind == "RuntimeError" and "modified by an inplace operation" in self.text


Step = tuple[bytes | None, ...] | Refused
"""The gradients, parameters and buffers of a step, or its error."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """Link, and memory as a share of the bytes that an unswapped step takes in addition to the model."""

    share: float
    link: str = "slow"


@dataclasses.dataclass(frozen=True)
class Mixed:
    """A mix that drops much, by its seed."""

    seed: int
    proofs: Proofs = Proofs.FIRST
    drop: float | None = 0.9
    held: float | None = 0.4


Setting = Budget | Mixed

SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)
LINKS = ("default", "slow", "slowest")
ROOMY_BYTES = 1 << 32

_HOST = ("launch_us", "view_us", "event_us", "copy_us", "triton_launch_us", "packed_tensor_us")


def device_of(link: str, kind: str = "sim") -> Device:
    """Simulated H200 with its link, or with slower ones: small steps then recompute, as large ones do on a GPU. Or CUDA."""
    if kind == "cuda":
        torch.cuda.empty_cache()
        return cm.CudaDevice()
    if link == "default":
        return cm.SimDevice("h200")
    if link == "slow":
        return cm.SimDevice(dataclasses.replace(SPECS["h200"], h2d_gbps=4.0, d2h_gbps=4.0, duplex_gbps=6.0))
    spec = dataclasses.replace(SPECS["h200"], h2d_gbps=1.0, d2h_gbps=1.0, duplex_gbps=1.5)
    free = dict.fromkeys(_HOST, 0.0)  # a host that takes no time
    return cm.SimDevice(spec, cost=CostModel(spec=spec, shortest_kernel_us=1e-3, **free))


@dataclasses.dataclass
class Trained:
    """Result of a run."""

    steps: list[Step]
    states: list[list[Tensor]]
    """Copies, on the host, of parameters and buffers after each step of plain PyTorch."""
    recomputed: int = 0
    """Storages that were dropped, to be recomputed."""
    proofs: int = 0
    """Number of recipes that ran while their original was held and used."""
    peak_bytes: int = 0
    base_bytes: int = 0
    """Bytes that the model takes."""


def named_error() -> str:
    """Name of the error that a step may end with."""
    return cm.RecomputeMismatch.__name__


@cache
def plainly(case: Case, kind: str = "sim") -> Trained:
    """The reference: torch alone."""
    with torch.device("cuda") if kind == "cuda" else nullcontext():
        return _train(case, _fresh(case), STEPS, None, None)


@cache
def roomy(case: Case, link: str, kind: str = "sim", steps: int = STEPS) -> Trained:
    """Train in a session that has room for everything."""
    return _in_session(case, link, kind, lambda device, model, base: _planned(device, model, base + ROOMY_BYTES), steps)


def taken_bytes(case: Case, link: str, kind: str) -> int:
    """Memory that an unswapped step takes in addition to the model."""
    unswapped = roomy(Case(case.program, case.program.whens[-1]), link, kind, steps=2)
    return unswapped.peak_bytes - unswapped.base_bytes


def trained(case: Case, setting: Setting, kind: str = "sim", steps: int = STEPS) -> Trained:
    """Train `case` in a session. `kind`: "sim" or "cuda"."""
    if isinstance(setting, Mixed):
        mix = Mix(setting.seed, proofs=setting.proofs, drop=setting.drop, held=setting.held)
        return _in_session(case, "default", kind, lambda device, model, _: mixed(mix, device=device, model=model), steps)
    room_bytes = int(setting.share * taken_bytes(case, setting.link, kind))
    return _in_session(case, setting.link, kind, lambda device, model, base: _planned(device, model, base + room_bytes), steps)


Opening = Callable[[Device, nn.Module, int], cm.SwapSession]


def _planned(device: Device, model: nn.Module, budget_bytes: int) -> cm.SwapSession:
    return cm.SwapSession(budget_bytes, "64MiB", device, min_bytes=1, model=model)


def _in_session(case: Case, link: str, kind: str, opening: Opening, steps: int) -> Trained:
    device = device_of(link, kind)
    plain = plainly(case, kind)
    with device.compute(), torch.device("cuda") if kind == "cuda" else nullcontext():
        model = _fresh(case)
        base_bytes = device.allocated_bytes()
        session = opening(device, model, base_bytes)
        done = _train(case, model, steps, session, plain)
    assert session.pool.stats().num_live == 0
    totals = totals_of(session)
    done.recomputed, done.proofs = totals.recomputed, totals.proofs
    done.peak_bytes, done.base_bytes = session.report().peak_hbm_bytes, base_bytes
    return done


def _fresh(case: Case) -> Program:
    torch.manual_seed(0)
    return case.program()


def _train(case: Case, model: Program, steps: int, session: cm.SwapSession | None, plain: Trained | None) -> Trained:
    done = Trained([], [])
    state = [*model.parameters(), *model.buffers()]
    with session or nullcontext():
        for number in range(steps):
            outcome: Step | None = None
            try:
                with session.step() if session else nullcontext():
                    model.step(number, case.program.writes_in(number, case.when))
            except RuntimeError as error:
                outcome = Refused(type(error).__name__, " ".join(str(error).split()))
                error.__traceback__ = None  # it holds frames that hold graphs
            if outcome is None:
                outcome = tuple(None if t is None else bits(t) for t in (*(p.grad for p in model.parameters()), *state))
            elif plain is not None:
                with torch.no_grad():
                    for t, right in zip(state, plain.states[number], strict=True):
                        t.copy_(right)
            done.steps.append(outcome)
            if plain is None:
                done.states.append([t.detach().to("cpu", copy=True) for t in state])  # kept: no later test finds them
            model.zero_grad()
        # When the next backward begins, autograd releases the tensors of a backward that raised.
        (torch.ones((), requires_grad=True) * 1).backward()
    return done


def complaint(case: Case, got: Trained, *, kind: str = "sim", named: bool | None = None) -> str | None:
    """Return the broken part of the promise, or None. `named` overrides the case: True if a step that writes may end with the
    named error."""
    allowed = case.named_error if named is None else named
    broken = []
    for number, (right, step) in enumerate(zip(plainly(case, kind).steps, got.steps, strict=False)):
        if isinstance(step, Refused):
            if isinstance(right, Refused) and right.in_place and step.in_place:
                continue
            if step.kind == named_error() and allowed and case.program.writes_in(number, case.when):
                continue
            what = "refused in eager's words" if step.in_place else "an error"
            broken.append(f"step {number}: {what}: {step.kind}: {step.text[:160]}")
        elif isinstance(right, Refused):
            broken.append(f"step {number}: not refused, as eager does: {right.text[:80]}")
        elif step != right:
            differ = [place for place, (a, b) in enumerate(zip(right, step, strict=True)) if a != b]
            broken.append(f"step {number}: other bits in {differ} of {len(right)} gradients, parameters and buffers")
    return "; ".join(broken) or None
