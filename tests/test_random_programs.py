"""Random training programs give what plain PyTorch gives: the same gradients, bit for bit, or the same error.

The reference is torch alone: no hooks, no dispatch mode, no simulated device. What programs are made of: `_random_programs.py`;
which writes they may not have, because torch itself does not notice them: `_unseen_writes.py`.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.device import SPECS, Device
from chameleon_mm.device.reproducible import reproducible
from chameleon_mm.follow.plan_follower import plan_steps
from chameleon_mm.plan.rule import Limits
from chameleon_mm.swap.swap_outs import PACK_BELOW_BYTES
from tests._lending_device import GreedyDevice
from tests._programs import swapping_executor
from tests._random_programs import Instruction, Run, normalised, programs, run
from tests._unseen_writes import unseen_writes

SLOW_LINK = dataclasses.replace(SPECS["h200"], h2d_gbps=0.05, d2h_gbps=0.05, duplex_gbps=0.08)
"""Copies are still on their way when the next operators, uses and drops come."""

STEPS = 2
"""In a session: the first is recorded, the second follows its plan where there is one."""

KIB = 1 << 10

# --- the ways to run one


@dataclasses.dataclass(frozen=True)
class Setting:
    """Setting under which a program is swapped."""

    min_bytes: int
    pool_bytes: int
    slow_link: bool
    leaving_bytes: int
    room_bytes: int
    """Budget of the session above the memory that a program begins with."""
    short: bool
    """True if there is no room for anything that could be on the host."""
    packs: bool
    collect: bool


def settings_drawn() -> st.SearchStrategy[Setting]:
    return st.builds(
        Setting,
        min_bytes=st.sampled_from([0, 0, 300]),  # 300: only storages larger than one value move
        pool_bytes=st.sampled_from([1 << 20, 1 << 20, 16 * KIB]),  # 16 KiB: four blocks, and then everything stays
        slow_link=st.booleans(),
        leaving_bytes=st.sampled_from([0, 1 << 20]),
        room_bytes=st.sampled_from([1, 12 * KIB, 24 * KIB]),  # 1: always exceeded
        short=st.booleans(),
        packs=st.booleans(),
        collect=st.booleans(),
    )


def fresh(kind: str, setting: Setting) -> Device:
    if kind == "cuda":
        return cm.CudaDevice()
    # In about half of the programs the allocator reclaims lent memory at once.
    return (cm.SimDevice if setting.packs else GreedyDevice)(SLOW_LINK if setting.slow_link else "h200")


class Reentered:
    """The hooks of `save_on_cpu`, or of a session, that can be entered again and again."""

    def __init__(self, device: Device, pool: cm.PinnedPool, setting: Setting, *, session: bool) -> None:
        budget = device.allocated_bytes() + setting.room_bytes
        limits = Limits(hbm_budget_bytes=budget if session or setting.short else None, leaving_bytes=setting.leaving_bytes)
        pack_below_bytes = PACK_BELOW_BYTES if setting.packs else 0
        self.executor = swapping_executor(device, pool, limits, min_bytes=setting.min_bytes, pack_below_bytes=pack_below_bytes)
        self.adaptation = plan_steps(self.executor, pool) if session else None
        self._hooks: list[torch.autograd.graph.saved_tensors_hooks] = []

    def __enter__(self) -> None:
        hooks = torch.autograd.graph.saved_tensors_hooks(self.executor.save, self.executor.use)
        hooks.__enter__()
        self._hooks.append(hooks)

    def __exit__(self, *error: object) -> None:
        self._hooks.pop().__exit__(*error)

    @contextmanager
    def step(self) -> Iterator[None]:
        self.executor.begin_step(timed=True)
        try:
            yield
        finally:
            self.executor.end_step(completed=True)


@contextmanager
def collecting(*, always: bool) -> Iterator[None]:
    """No garbage collection, or one at almost every allocation: then claims end in the middle of any line of ours."""
    thresholds = gc.get_threshold()
    gc.collect()
    if always:
        gc.set_threshold(1, 2, 2)
    else:
        gc.disable()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()


@dataclasses.dataclass
class Tally:
    """Totals over many programs, which show that a test tested something."""

    programs: int = 0
    restricted: int = 0
    """From which a write was left out."""
    refused: int = 0
    """In which plain PyTorch raised."""
    bytes_swapped_out: int = 0
    planned_steps: int = 0


def check(program: list[Instruction], setting: Setting, kind: str, tally: Tally) -> None:
    """Plain PyTorch, then `save_on_cpu`, then the steps of a session."""
    where = torch.device("cuda" if kind == "cuda" else "cpu")
    # On a GPU two runs of one program may differ for reasons of their own. On a CPU nothing is set.
    with reproducible() if kind == "cuda" else nullcontext():
        left_out = unseen_writes(program, where)
        with collecting(always=setting.collect):
            plain = run(program, where, left_out=left_out, collect=setting.collect)
            gone = plain.graphs_are_gone
        tally.programs += 1
        tally.restricted += bool(left_out)
        tally.refused += any(isinstance(one, tuple) for one in plain.seen)
        for session in (False, True):
            device = fresh(kind, setting)
            pool = cm.PinnedPool(setting.pool_bytes, device=device)
            with device.compute():
                manager = Reentered(device, pool, setting, session=session)
            for _ in range(STEPS if session else 1):
                with collecting(always=setting.collect):
                    swapped = swap(program, device, manager, left_out, session=session, collect=setting.collect)
                    live = pool.stats().num_live
                assert swapped.seen == plain.seen
                # Torch itself may leave tensors (after a failed double backward, or as garbage in cycles); then so may we.
                assert live == 0 or not gone
                del swapped
            adaptation = manager.adaptation
            tally.planned_steps += 0 if adaptation is None else adaptation.plan_cache_hits
            tally.bytes_swapped_out += manager.executor.metrics.totals.bytes_swapped_out


def swap(
    program: list[Instruction], device: Device, manager: Reentered, left_out: frozenset[int], *, session: bool, collect: bool
) -> Run:
    with device.compute(), manager.step() if session else nullcontext():
        return run(program, device.torch_device, manager, left_out=left_out, collect=collect)


KINDS = ["sim", pytest.param("cuda", marks=pytest.mark.gpu)]


def check_many(kind: str, *, programs_drawn: int, begin: int) -> None:
    """On failure hypothesis prints the shortest program that it found, and how to run that one again."""
    tally = Tally()

    @seed(begin)
    @settings(
        max_examples=programs_drawn, deadline=None, database=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
    )
    @given(program=programs, setting=settings_drawn())
    def each(program: list[Instruction], setting: Setting) -> None:
        check(program, setting, kind, tally)

    each()
    assert tally.bytes_swapped_out > 0
    assert tally.planned_steps > 0
    assert 0 < tally.refused < tally.programs
    assert tally.restricted < tally.programs / 2


BEGINS = [0, *(pytest.param(begin, marks=[pytest.mark.slow, pytest.mark.thorough]) for begin in range(1, 6))]


@pytest.mark.ci
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("begin", BEGINS)
def test_random_programs_give_what_plain_pytorch_gives(begin: int, kind: str) -> None:
    check_many(kind, programs_drawn=50, begin=begin)


# --- what such programs have found


def swapping(device: Device) -> cm.save_on_cpu:
    return cm.save_on_cpu(device=device, pool=cm.PinnedPool("1MiB", device=device), min_bytes=0)


@pytest.mark.parametrize("alive", [True, False])
def test_a_write_between_a_first_and_a_double_backward_is_noticed(alive: bool, device: Device) -> None:
    """A tensor that backward saves again came out of our hook: it must carry the version counter of the original."""
    said = []
    for manager in (nullcontext(), swapping(device)):
        x = torch.ones(64, device=device.torch_device, requires_grad=True)
        with device.compute(), manager:
            y = x * 2
            (grad,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
            alias = y.detach()
            if not alive:
                del y
            alias.add_(1)
            del alias
            with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
                torch.autograd.grad(grad.sum(), x)
            said.append(normalised(str(caught.value)))
    assert said[0] == said[1]


def test_a_storage_emptied_before_its_copy_is_left_to_who_emptied_it(sim: cm.SimDevice) -> None:
    """FSDP does this to gathered parameters: they are emptied after forward and filled again before backward."""
    x = torch.randn(64, requires_grad=True)
    with sim.compute():
        (expected,) = torch.autograd.grad((x * 2).sin().exp().sum(), x)
        with swapping(sim):
            y = x * 2
            out = y.sin()
            nbytes = y.untyped_storage().nbytes()
            y.untyped_storage().resize_(0)
            out = out.exp().sum()
        y.untyped_storage().resize_(nbytes)
        y.data.copy_(x.detach() * 2)
        assert torch.equal(torch.autograd.grad(out, x)[0], expected)


def test_hooks_end_with_the_session_even_inside_a_step(sim: cm.SimDevice) -> None:
    session = cm.SwapSession("1GiB", "1MiB", sim, min_bytes=0)
    step = session.step()
    with session:
        step.__enter__()
    step.__exit__(None, None, None)  # too late, and harmless
    assert session.report().steps == 0
    x = torch.randn(64, requires_grad=True)
    (x * 2).sin().exp().exp().sum().backward()
    assert session.pool.stats().peak_live_bytes == 0


# --- long runs


def forward(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(2):
        x = torch.tanh(x @ w).exp() - 1
    return x.sum()


@pytest.mark.ci
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("keep_one", [True, False])
@pytest.mark.parametrize("session", [True, False])
def test_what_is_remembered_stays_flat_without_steps(
    session: bool, keep_one: bool, backward: bool, sim: cm.SimDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps have no marked end, and one graph may be kept for ever. 250 iterations must not accumulate anything."""
    monkeypatch.setattr("chameleon_mm.swap.executor.LONGEST_UNNAMED_STEP", 128)
    weight = nn.Parameter(torch.randn(8, 8) * 0.1)
    manager = cm.SwapSession("1MiB", "1MiB", sim, min_bytes=0) if session else swapping(sim)
    kept: list[Tensor] = []
    remembered: list[int] = []
    with collecting(always=False), sim.compute(), manager:
        for iteration in range(250):
            out = forward(torch.randn(8, 8), weight)
            if keep_one and not kept:
                kept.append(out)
            elif backward:
                out.backward()
            del out
            weight.grad = None
            if iteration in (100, 249):
                remembered.append(footprint(manager))
    assert remembered[1] - remembered[0] < 16 << 10  # a cut step's numbers; without bounds it is ten times that


def footprint(root: object) -> int:
    """Bytes of all that is reachable from `root` and is of the swap path itself: its objects, containers and numbers."""
    seen: dict[int, object] = {}
    todo = [root]
    while todo:
        it = todo.pop()
        module = type(it).__module__
        plain = isinstance(it, (int, tuple, list, dict, deque, weakref.ref))
        own = module.startswith("chameleon_mm.") and not module.startswith("chameleon_mm.device.")
        if id(it) not in seen and (plain or own):
            seen[id(it)] = it
            todo.extend(gc.get_referents(it))
    return sum(sys.getsizeof(it) for it in seen.values())
