"""Storages on their way out that the device's allocator itself reclaims during an allocation: on the simulator, and with
torch's own allocator on CUDA. The reference is plain PyTorch on a device with enough memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.bench._measure import free_unused
from chameleon_mm.device import Device, native
from chameleon_mm.device.cuda import CudaDevice
from chameleon_mm.device.cuda.cuda_device import CudaAllocatorHook
from chameleon_mm.device.sim.machine import SimStream
from chameleon_mm.swap.executor import Executor
from chameleon_mm.swap.handles import SwappedView
from chameleon_mm.units import MIB
from tests._lending_device import GreedyDevice, LendingDevice, SimHeldStorage
from tests._memory_limit import fraction_of_memory
from tests._native import BUILDS, helper
from tests._ordering import SLOW_LINK, OnCuda, OnSim, executor, randn, saved
from tests.cuda_stand_in import control
from tests.observed import SimRaceError

pytestmark = pytest.mark.usefixtures("no_gc")

LAYERS, SIDE = 8, 512
LAYER_BYTES = SIDE * SIDE * 4
SURPRISE = 4
"""Tensors of a layer's size that are made in the last step alone, between two hooks."""

CAPACITY = {"sim": 12 * MIB, "cuda": (10 if control.is_loaded() else 14) * MIB}
"""Bytes of the device, of which the parameters and their gradients take 4 MiB. Torch's allocator adds two MiB at a time; on a
GPU it also holds workspaces of two threads' products."""


class Training:
    """Training that saves a tensor per layer. The last step also makes a temporary tensor that no plan foresees."""

    def __init__(self, at: torch.device) -> None:
        torch.manual_seed(0)
        self.weights = [(torch.randn(SIDE, SIDE) / SIDE**0.5).to(at).requires_grad_() for _ in range(LAYERS // 4)]
        self.x = torch.randn(SIDE, SIDE).to(at)
        self.at = at
        self.losses: list[float] = []

    def step(self, *, surprise: bool) -> None:
        x = self.x
        for i in range(LAYERS):
            x = torch.tanh(x * 1.1) if i % 4 else torch.tanh(x @ self.weights[i // 4])
        if surprise:
            with torch.no_grad():
                sums = [torch.ones_like(t).sum() for t in [torch.ones_like(x) for _ in range(SURPRISE)]]
                assert float(torch.stack(sums).sum()) == SURPRISE * x.numel()
        loss = x.square().mean()
        loss.backward()
        with torch.no_grad():
            for weight in self.weights:
                assert weight.grad is not None
                weight.sub_(0.1 * weight.grad)
                weight.grad = None
        self.losses.append(loss.item())


def plainly(at: torch.device) -> Training:
    training = Training(at)
    for number in range(4):
        training.step(surprise=number == 3)
    return training


@contextmanager
def cuda(monkeypatch: pytest.MonkeyPatch, *, hook: bool) -> Iterator[CudaDevice]:
    """GPU of whose memory the process may hold 10 MiB."""
    if hook:
        helper("reclaim", monkeypatch)
    else:
        monkeypatch.setattr(native, "CACHE", BUILDS / "none")
    free_unused()
    device = CudaDevice()
    with fraction_of_memory(torch.cuda.memory_reserved(device.index) + CAPACITY["cuda"], device.index):
        yield device


@contextmanager
def simulated(monkeypatch: pytest.MonkeyPatch, *, hook: bool) -> Iterator[cm.SimDevice]:
    yield (LendingDevice if hook else cm.SimDevice)(SLOW_LINK, CAPACITY["sim"])


def run(device: Device, *, budget_bytes: int, surprise: bool = True, plans: bool = False) -> tuple[Training, cm.SwapReport]:
    with device.compute():
        training = Training(device.torch_device)
        session = cm.SwapSession(budget_bytes, host_budget="64MiB", device=device, min_bytes=4096, plans=plans, recompute=False)
        with session.pool, session:
            for number in range(4):
                with session.step():
                    training.step(surprise=surprise and number == 3)
        return training, session.report()


def assert_plain(training: Training, plain: Training) -> None:
    assert training.losses == plain.losses
    assert all(torch.equal(got, expected) for got, expected in zip(training.weights, plain.weights, strict=True))


@pytest.mark.parametrize(
    ("kind", "on"), [("sim", simulated), pytest.param("cuda", cuda, marks=pytest.mark.gpu)], ids=["sim", "cuda"]
)
def test_a_step_that_would_run_out_between_two_hooks_does_not(
    kind: str, on: Callable[..., AbstractContextManager[Device]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with on(monkeypatch, hook=True) as device:
        before = failures()
        training, report = run(device, budget_bytes=device.allocated_bytes() + CAPACITY[kind])
        assert failures() == before
    assert_plain(training, plainly(training.at))
    if kind == "sim" or control.is_loaded():  # on a GPU copies may be done by then
        assert report.bytes_reclaimed_by_allocator >= LAYER_BYTES
        assert f"{report.bytes_reclaimed_by_allocator // MIB}.00 MiB of it inside of an allocation" in str(report)
        assert report.bytes_reclaimed >= report.bytes_reclaimed_by_allocator
        del training
        with on(monkeypatch, hook=False) as device, pytest.raises(torch.OutOfMemoryError):
            run(device, budget_bytes=device.allocated_bytes() + CAPACITY[kind])


def failures() -> list[int]:
    """Return how often torch's allocator retried after it released its cache, and how often it ran out of memory."""
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.memory_stats()[name] for name in ("num_alloc_retries", "num_ooms")]


@pytest.mark.parametrize("plans", [False, True])
@pytest.mark.parametrize("kind", ["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_training_is_plain_pytorchs_where_the_allocator_takes_all_that_is_lent(
    kind: str, plans: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "cuda":
        helper("reclaim", monkeypatch)
        # Limits of nothing: at every miss of its pools torch's allocator takes all that is lent.
        monkeypatch.setattr(CudaAllocatorHook, "set_limits", lambda self, *_: self._hook.set_limits(0, 1 << 40, False))
    device: Device = CudaDevice() if kind == "cuda" else GreedyDevice(SLOW_LINK)
    before = device.allocated_bytes()
    training, report = run(device, budget_bytes=before + 9 * MIB, surprise=False, plans=plans)
    assert_plain(training, plainly(training.at))
    assert report.bytes_swapped_out
    assert kind == "cuda" or report.bytes_reclaimed_by_allocator > 4 * LAYER_BYTES
    assert device.allocated_bytes() == before + 2 * LAYER_BYTES + LAYER_BYTES  # weights and input, and nothing of ours


# --- ordering: Note [Reclaim]


def test_without_the_wait_the_simulator_names_both_accesses(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_wait(self: SimHeldStorage) -> bool:
        monkeypatch.setattr(type(self.owner), "wait", lambda stream, event: None)
        try:
            return reclaim(self)
        finally:
            monkeypatch.setattr(type(self.owner), "wait", wait)

    reclaim, wait = SimHeldStorage.reclaim, SimStream.wait
    monkeypatch.setattr(SimHeldStorage, "reclaim", without_wait)
    with pytest.raises(
        SimRaceError, match=r"\(the block is reused\) is not ordered after read .* by d2h copy of 1048576 bytes"
    ):
        run(LendingDevice(SLOW_LINK, CAPACITY["sim"]), budget_bytes=CAPACITY["sim"])


def lent(machine: OnSim | OnCuda, swapper: Executor, t: Tensor) -> SwappedView:
    """A handle of `t`'s storage, which is lent to the allocator."""
    if isinstance(machine, OnCuda) and not control.is_loaded():  # on a GPU the copy is else done by the next hook
        with machine.on(swapper.context.out_queue.stream):
            torch.cuda._sleep(400_000_000)  # 0.2 s
    handle = saved(machine, swapper, t)
    swapper.save(randn(machine, 8, requires_grad=True))
    assert handle.claim.saved.slot.lent is not None
    return handle


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> OnSim | OnCuda:
    if request.param == "cuda":
        helper("reclaim", monkeypatch)
        return OnCuda()
    machine = OnSim()
    machine.device = machine._sim = LendingDevice(SLOW_LINK)
    return machine


@pytest.fixture
def swapper(machine: OnSim | OnCuda) -> Iterator[Executor]:
    with machine.device.compute():
        yield executor(machine, cm.PinnedPool("1MiB", device=machine.device), leaving_bytes=None)


def test_nothing_is_lent_once_another_stream_may_have_worked_with_it(machine: OnSim | OnCuda, swapper: Executor) -> None:
    """Only that stream would wait for the copy, and the other stream's kernels may still read."""
    handle = lent(machine, swapper, randn(machine, 128, 128).clone())
    other = machine.other_stream()
    other.wait(machine.device.current_stream().record())
    with machine.on(other):
        swapper.save(randn(machine, 8, 8, requires_grad=True) * 2)
        swapper.save(randn(machine, 8, requires_grad=True))
    assert not handle.claim.saved.slot.lent
    assert swapper.metrics.totals.bytes_reclaimed_by_allocator == 0
    machine.device.synchronize()


@pytest.mark.parametrize("end", ["use", "drop"])
def test_a_lent_storage_is_used_and_dropped_like_any_other(end: str, machine: OnSim | OnCuda, swapper: Executor) -> None:
    kept = randn(machine, 128, 128)
    before = machine.device.allocated_bytes()
    handle = lent(machine, swapper, kept.clone())
    if end == "use":
        assert torch.equal(swapper.use(handle), kept)
    del handle
    swapper.save(randn(machine, 8, requires_grad=True))
    machine.device.synchronize()
    swapper.save(randn(machine, 8, requires_grad=True))
    assert swapper.context.pool.stats().live_bytes == 0
    assert machine.device.allocated_bytes() == before


def test_a_storage_of_which_a_part_stays_is_not_lent(machine: OnSim | OnCuda, swapper: Executor) -> None:
    """The allocator would reclaim all of it, and its first bytes are nowhere else."""
    kept = randn(machine, 128, 128)
    handle = saved(machine, swapper, kept.clone())
    storage = handle.claim.saved
    storage.op_is_over = True
    swapper.outs.swap_out_planned(storage, storage.nbytes // 2)
    swapper.save(randn(machine, 8, requires_grad=True))
    swapper.save(randn(machine, 8, requires_grad=True))
    assert not storage.slot.lent
    storage.reclaim()
    assert torch.equal(swapper.use(handle), kept)


def test_a_save_of_a_lent_storage_takes_it_back(machine: OnSim | OnCuda, swapper: Executor) -> None:
    """The session has one more tensor over the storage, unknown to the allocator."""
    kept = randn(machine, 128, 128).clone()
    first = lent(machine, swapper, kept)
    kept.add_(1)
    expected = kept.clone()
    second = saved(machine, swapper, kept)
    assert second.claim.saved is first.claim.saved
    assert second.claim.saved.slot.lent is None
    del kept, first
    assert torch.equal(swapper.use(second), expected)


def test_nothing_is_lent_while_a_step_is_recorded(machine: OnSim | OnCuda) -> None:
    with machine.device.compute():
        at = machine.device.torch_device
        session = cm.SwapSession("1GiB", "64MiB", machine.device, min_bytes=4096)
        was_lent = []
        with session.pool, session, session.step():
            x = torch.randn(256, 256, device=at, requires_grad=True)
            for _ in range(6):
                x = torch.tanh(x)
                was_lent += [one.slot.lent is not None for one in session._executor.registry.all()]
            x.sum().backward()
        assert session.report().steps_by_phase == {"recorded": 1}
        assert session.report().bytes_swapped_out
        assert was_lent
        assert not any(was_lent)
