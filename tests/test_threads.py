"""Several threads and several streams at once: the same bits as one after the other, and nothing left behind.

On a GPU the forward runs on the caller's thread and the backward on one of autograd's; here threads of our own stand for both,
and a barrier makes them meet where they could get in each other's way.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.device import SPECS, Device
from chameleon_mm.plan.rule import Limits
from chameleon_mm.swap.copy_queue import CopyQueue
from chameleon_mm.swap.executor import Executor
from chameleon_mm.swap.handles import SwappedView
from chameleon_mm.swap.saved_storage import SavedStorage
from tests._programs import at_once, on_a_thread, saved_by, swapping_executor

pytestmark = pytest.mark.usefixtures("no_gc", "flags_of_modes")

THREADS = 8
STEPS = 4
BYTES = 64 * 1024

SLOW_LINK = dataclasses.replace(SPECS["h200"], h2d_gbps=0.5, d2h_gbps=0.5, duplex_gbps=0.8)
"""Slow enough that no copy completes by luck before a required wait."""


# --- little models


@dataclasses.dataclass
class Problem:
    """A model and its batches, all made before any thread starts: the generator of random numbers is one for all."""

    model: nn.Module
    batches: list[Tensor]

    @classmethod
    def number(cls, seed: int, device: Device) -> Problem:
        torch.manual_seed(seed)
        width = 8 + 4 * seed
        model = nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, width), nn.Tanh())
        return cls(model.to(device.torch_device), [torch.randn(16, width, device=device.torch_device) for _ in range(STEPS)])

    def train(self, session: cm.SwapSession | None, hooks: cm.save_on_cpu | None) -> None:
        for batch in self.batches:
            with session.step() if session else nullcontext():
                with hooks or nullcontext():
                    loss = (self.model(batch) - batch).square().mean()
                loss.backward()
                with torch.no_grad():
                    for p in self.model.parameters():
                        assert p.grad is not None
                        p.sub_(p.grad, alpha=0.1)
                        p.grad = None

    def weights(self) -> list[Tensor]:
        return [p.detach() for p in self.model.parameters()]


def serial(device: Device) -> list[Problem]:
    problems = [Problem.number(seed, device) for seed in range(THREADS)]
    with device.compute():
        for problem in problems:
            problem.train(None, None)
    return problems


def assert_same(expected: list[Problem], got: list[Problem]) -> None:
    for number, (left, right) in enumerate(zip(expected, got, strict=True)):
        for a, b in zip(left.weights(), right.weights(), strict=True):
            assert torch.equal(a, b), f"thread {number}"


@pytest.mark.parametrize("shared", [True, False], ids=["one manager", "a manager each"])
def test_eight_threads_share_a_device_and_a_pool(shared: bool, device: Device) -> None:
    expected = serial(device)
    problems = [Problem.number(seed, device) for seed in range(THREADS)]
    pool = cm.PinnedPool("8MiB", device=device, chunk_bytes="1MiB")
    hooks = [cm.save_on_cpu(device=device, pool=pool, min_bytes=0) for _ in range(THREADS)]

    def work(number: int) -> None:
        with device.compute():
            problems[number].train(None, hooks[0 if shared else number])

    at_once(partial(work, number) for number in range(THREADS))
    assert_same(expected, problems)
    assert pool.stats().num_live == 0
    assert pool.stats().peak_live_bytes > 0


@pytest.mark.parametrize("shared", [True, False], ids=["one pool", "a pool each"])
def test_eight_sessions_on_one_device(shared: bool, device: Device) -> None:
    expected = serial(device)
    problems = [Problem.number(seed, device) for seed in range(THREADS)]
    budget = device.allocated_bytes() + (64 << 20)
    pool = cm.PinnedPool("8MiB", device=device) if shared else None
    host = None if shared else "1MiB"
    sessions = [cm.SwapSession(budget, host, device, min_bytes=0, model=problem.model, pool=pool) for problem in problems]

    def work(number: int) -> None:
        with sessions[number]:
            problems[number].train(sessions[number], None)

    at_once(partial(work, number) for number in range(THREADS))
    assert_same(expected, problems)
    assert [session.pool.stats().num_live for session in sessions] == [0] * THREADS
    assert all(session.report().bytes_swapped_out > 0 for session in sessions)


# --- one claim, two threads


def executor(device: Device, pool: cm.PinnedPool) -> Executor:
    return swapping_executor(device, pool, Limits(leaving_bytes=0, ahead_bytes=1 << 20))


def test_a_storage_saved_again_at_the_moment_its_last_handle_dies(sim: cm.SimDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = cm.PinnedPool("1MiB", device=sim)
    swapper = executor(sim, pool)
    t = torch.randn(64)
    again: list[SwappedView] = []
    ended, turns = swapper.has_ended, iter([True])

    def ending(saved: SavedStorage) -> None:
        """Another thread gets its turn in the middle of the end."""
        if next(turns, False):
            on_a_thread(lambda: again.append(saved_by(swapper, t)))
        ended(saved)

    monkeypatch.setattr(swapper, "has_ended", ending)
    first = saved_by(swapper, t)
    del first
    assert torch.equal(swapper.use(again[0]), t)
    again.clear()
    assert not swapper.registry.all()


# --- streams


def op(swapper: Executor) -> None:
    """Run a differentiable op and a hook: tensors saved before may now be copied."""
    torch.ones(1, requires_grad=True).exp()
    swapper.save(torch.randn(8, requires_grad=True))


@pytest.mark.parametrize("saved_on", ["its own stream", "another stream", "both"])
def test_a_dropped_block_is_safe_from_the_stream_that_owns_it(saved_on: str) -> None:
    """Saved on one stream, allocated on another: the block is free for the owner only after the copy and the other's
    kernels."""
    device = cm.SimDevice(SLOW_LINK)
    swapper = executor(device, cm.PinnedPool("1MiB", device=device))
    side = device.new_compute_stream("side")
    with device.compute():
        kept = torch.randn(BYTES // 4)
        t = kept * 2
        expected = kept * 2
        handles = [saved_by(swapper, t)] if saved_on != "another stream" else []
        side.wait(device.current_stream().record())
        if saved_on != "its own stream":
            with device.stream(side):
                t.sin()
                handles.append(saved_by(swapper, t))
                op(swapper)
        del t
        op(swapper)
        saved = handles[0].claim.saved
        assert all(handle.claim.saved is saved for handle in handles)
        saved.reclaim()
        assert saved.device is None  # the block went back, and the simulator checks how
        device.current_stream().wait(side.record())
        assert all(torch.equal(swapper.use(handle), expected) for handle in handles)


def test_a_block_read_twice_is_handed_on_after_the_later_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Swapped in, dropped under pressure, its second copy back still queued when the handle dies: the first may be running."""
    monkeypatch.setattr("chameleon_mm.swap.executor.CopyQueue", partial(CopyQueue, outstanding=1))
    device = cm.SimDevice(SLOW_LINK)
    pool = cm.PinnedPool(BYTES, device=device)  # one block: the next owner gets the same bytes
    swapper = executor(device, pool)
    other = device.new_compute_stream("other")
    with device.compute():
        main = device.current_stream()
        other.wait(main.record())
        handle = saved_by(swapper, torch.randn(BYTES // 4))
        op(swapper)
        saved = handle.claim.saved
        saved.reclaim()
        saved.swap_in(main)
        saved.arrive(main)
        saved.drop_restored()
        saved.swap_in(main)  # after the first, which is still on its way
        assert saved.copy is not None and saved.copy.back is not None and not saved.copy.back.begun
        del handle, saved
        assert pool.stats().num_live == 0
        with device.stream(other):  # ordered after nothing that main waited for
            second = saved_by(executor(device, pool), torch.randn(BYTES // 4))
            second.claim.saved.swap_out()
        device.synchronize()
