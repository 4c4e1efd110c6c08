"""Budget that changes in the middle of training: it holds from the next step on, nothing is recorded again, the bits are
eager's. Of device memory first, then of the host's."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.bench._lengths_run import SMALL_GPU as GPU
from chameleon_mm.device.sim import CostModel
from chameleon_mm.pool.pool import PinnedPool
from chameleon_mm.swap.host_copy import State
from chameleon_mm.units import KIB, MIB
from tests._programs import same
from tests.test_changing_steps import LONG_ROWS, MIN_BYTES, PLAIN, Work, net, run, step

pytestmark = pytest.mark.usefixtures("no_gc", "short_search")

SHARES = (0.55, 0.62, 0.7, 0.8, 0.9, 1.1)


SHARE = 0.7
"""Budget of device memory, where it stays the same, as a share of the unswapped peak."""
ENOUGH = 512 * KIB
"""Host budget that plans which only swap can do with."""


class Training:
    """The net of the tests of changing steps, in a session."""

    def __init__(self, share: float, works: list[Work], **given: Any) -> None:
        self.unswapped_bytes = max(run(works[:3]).peaks)
        self.works = works
        self.device = cm.SimDevice(GPU, cost=CostModel(spec=GPU, matmul_efficiency=1.0))
        torch.manual_seed(0)
        with self.device.compute():
            self.model, self.optimizer = net()
        self.session = cm.SwapSession(self.bytes_of(share), "64MiB", self.device, MIN_BYTES, model=self.model, **given)
        self.losses: list[float] = []

    def bytes_of(self, share: float) -> int:
        return int(self.unswapped_bytes * share)

    def step(self) -> int:
        """Run the next step. Returns its peak."""
        number = len(self.losses)
        self.device.reset_peaks()
        with self.session.step():
            self.losses += step(self.works, self.model, self.optimizer, number)
        return self.device.peak_allocated_bytes()

    def assert_exact(self) -> None:
        """Assert that the steps so far have plain PyTorch's results."""
        plain = run(self.works[: len(self.losses)], plain=True)
        assert self.losses == plain.seen
        assert same(list(self.model.parameters()), plain.parameters)


def pinned_in_step(training: Training) -> int:
    """Run the next step, within the budget of device memory. Return the maximum of pinned memory at its allocations and its
    end."""
    pool = training.session.pool
    seen = [pool.stats().reserved_bytes]
    note = training.model.register_forward_hook(lambda *_: seen.append(pool.stats().reserved_bytes))
    assert training.step() <= training.session.hbm_budget
    note.remove()
    return max(*seen, pool.stats().reserved_bytes)


HOST_SIZES: dict[bool, tuple[int | str, ...]] = {True: (0, 64 * KIB, MIB, "64MiB"), False: (ENOUGH, MIB, "20MiB", "64MiB")}
"""Host budgets, keyed by whether steps may recompute."""


@pytest.mark.ci
@pytest.mark.parametrize(("recompute", "steps"), [(True, 60), (False, 40)])
@pytest.mark.parametrize("which", ["hbm_budget", "host_budget"])
def test_a_change_every_few_steps(which: str, recompute: bool, steps: int) -> None:
    training = Training(SHARE, [PLAIN] * steps, recompute=recompute)
    session, rng = training.session, Random(3)
    changed_at = set(rng.sample(range(2, steps), steps // 5))
    with session:
        for number in range(steps):
            if number in changed_at and which == "hbm_budget":
                session.hbm_budget = training.bytes_of(rng.choice(SHARES))
            elif number in changed_at:
                session.host_budget = rng.choice(HOST_SIZES[recompute])
            assert pinned_in_step(training) <= session.host_budget == session.pool.limit_bytes
    training.assert_exact()
    report = session.report()
    assert report.detailed_steps == 1
    assert report.steps_by_phase == {"recorded": 1, "planned": steps - 1}
    assert (report.budget_misses, report.oom_retries) == (0, 0)
    assert report.hbm_budget_bytes == session.hbm_budget
    if not recompute:  # else an audit that makes room may take ordinary memory for it
        assert (report.fallbacks, report.pageable_swap_outs) == (0, 0)


def test_a_raised_budget_swaps_less_and_the_report_is_about_it() -> None:
    training = Training(0.6, [PLAIN] * 8, recompute=False)
    with training.session as session:
        assert session.report().host_bytes_wanted is None
        for _ in range(4):
            training.step()
        wanted = session.report().host_bytes_wanted
        assert wanted is not None and 0 < wanted <= session.pool.stats().peak_live_bytes
        before = session.report().bytes_swapped_out
        training.step()
        at_low = session.report().bytes_swapped_out - before
        session.hbm_budget = f"{training.bytes_of(1.2)}B"
        assert session.report().host_bytes_wanted == 0
        before = session.report().bytes_swapped_out
        training.step()
        assert 0 == session.report().bytes_swapped_out - before < at_low
        session.hbm_budget = training.bytes_of(0.65)
        training.step()
        assert session.report().budget_held is not False
        assert session.report().hbm_budget_bytes == training.bytes_of(0.65)
    training.assert_exact()


@pytest.mark.parametrize("recompute", [True, False])
def test_a_budget_that_no_plan_reaches_is_refused_and_the_old_one_holds(recompute: bool) -> None:
    training = Training(0.7, [PLAIN] * 6, recompute=recompute)
    session = training.session
    budget = session.hbm_budget
    with session:
        for _ in range(3):
            training.step()
        with pytest.raises(cm.InfeasibleBudget) as refusal:
            session.hbm_budget = training.device.allocated_bytes() + 64 * 1024
        smallest = refusal.value.smallest_bytes
        assert smallest is not None
        assert session.hbm_budget == budget
        assert training.step() <= budget
        session.hbm_budget = smallest
        assert training.step() <= smallest
        with pytest.raises(cm.InfeasibleBudget, match="never move"):
            session.hbm_budget = training.device.allocated_bytes() // 2
        assert training.step() <= smallest
    training.assert_exact()


def test_the_limit_of_a_given_pool_is_its_own() -> None:
    pool = PinnedPool("64MiB", cm.SimDevice())
    session = cm.SwapSession("1GiB", pool=pool)
    with session, pytest.raises(ValueError, match=r"pool of its own.*set pool\.limit_bytes"):
        session.host_budget = "1MiB"
    pool.limit_bytes = "1MiB"
    assert session.host_budget == MIB


@pytest.mark.parametrize("which", ["hbm_budget", "host_budget"])
def test_a_change_inside_of_a_step_or_after_the_session_is_refused(which: str) -> None:
    training = Training(0.7, [PLAIN] * 2)
    before = getattr(training.session, which)
    with training.session as session:
        with session.step(), pytest.raises(cm.SessionClosedError, match=f"{which}: expected to be set between steps"):
            setattr(session, which, "1GiB")
        training.step()
    with pytest.raises(cm.SessionClosedError, match=f"{which}: expected to be set between steps"):
        setattr(session, which, "1GiB")
    assert getattr(session, which) == before
    training.assert_exact()


def test_what_was_restored_goes_where_the_budget_is_passed_already() -> None:
    """An input is allocated between two checks. Storages that the host also holds make room for it."""
    device = cm.SimDevice()
    model, x = nn.Sequential(*(nn.Tanh() for _ in range(6))), torch.randn(256, 256, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), x)[0]
    with device.compute():
        session = cm.SwapSession(device.allocated_bytes() + (2 << 20), "64MiB", device, MIN_BYTES, plans=False)
        with session:
            loss = model(x).sum()
            executor = session._executor
            executor.budget._reclaim_until(lambda: False, ())
            away = [saved for saved in executor.registry.all() if saved.state is State.ON_HOST]
            assert len(away) > 3
            for saved in away:
                executor.ins.restore(saved, device.current_stream())
            aside = torch.empty(2 << 20, dtype=torch.uint8)
            assert device.allocated_bytes() > session.hbm_budget
            executor.budget.check_memory()
            assert all(saved.state is State.ON_HOST for saved in away)
            del aside
            assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


@pytest.mark.gpu
def test_a_lowered_budget_gives_reserved_memory_back_to_the_driver() -> None:
    device = cm.CudaDevice()
    torch.manual_seed(0)
    width, rows = 512, 4096  # 8 MiB for each activation
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(width, width), nn.Tanh()))).to(device.torch_device)
    x = torch.randn(rows, width, device=device.torch_device)
    expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))

    def train(session: cm.SwapSession) -> int:
        device.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with session.step():
            model(x).square().mean().backward()
            grads = [p.grad for p in model.parameters()]
            assert all(got is not None and torch.equal(got, grad) for got, grad in zip(grads, expected, strict=True))
            model.zero_grad()
        return torch.cuda.max_memory_allocated()

    torch.cuda.empty_cache()
    model.zero_grad()
    session = cm.SwapSession("1GiB", "256MiB", device, model=model)
    with session:
        peak = [train(session) for _ in range(3)][-1]
        reserved = torch.cuda.memory_reserved()
        assert reserved >= peak
        recorded = session.report().detailed_steps
        session.hbm_budget = int(peak * 0.7)
        assert torch.cuda.memory_reserved() < reserved // 2
        assert all(train(session) <= session.hbm_budget for _ in range(3))
        assert torch.cuda.memory_reserved() < reserved
    assert session.report().detailed_steps == recorded


# --- the host budget: pinned memory goes back, too


def test_a_lowered_host_budget_gives_chunks_back() -> None:
    training = Training(SHARE, [PLAIN] * 10, recompute=False)
    session = training.session
    with session:
        for _ in range(4):
            training.step()
        assert session.pool.stats().reserved_bytes >= 16 * MIB
        session.host_budget = ENOUGH
        assert session.pool.stats().reserved_bytes <= ENOUGH
        for budget in (64 * MIB, ENOUGH, 64 * MIB):
            session.host_budget = budget
            training.step()
    training.assert_exact()


def test_less_than_plans_need_is_refused_with_nothing_changed_and_what_is_named_is_enough_for_all() -> None:
    works = [PLAIN, Work(rows=LONG_ROWS)] * 6
    training = Training(0.9, works, recompute=False)
    session = training.session
    session.hbm_budget = training.bytes_of(0.75)
    with session:
        for _ in range(6):
            training.step()
        before, plans = session.pool.stats(), session.report().plans
        with pytest.raises(cm.InfeasibleBudget, match="host_budget: expected") as refusal:
            session.host_budget = 4 * KIB
        smallest = refusal.value.smallest_host_bytes
        assert smallest is not None
        assert session.pool.stats() == before
        assert (session.host_budget, session.report().plans) == (64 * MIB, plans)
        with pytest.raises(cm.InfeasibleBudget):
            session.host_budget = smallest - 1
        training.step()
        session.host_budget = smallest
        assert session.report().host_bytes_wanted == smallest
        for _ in range(2):
            assert pinned_in_step(training) <= smallest
    training.assert_exact()
    assert session.report().detailed_steps == 2


def test_what_is_still_saved_keeps_its_pinned_memory_until_it_is_used() -> None:
    """A graph of the step before lives on: no data is lost, nothing is pinned meanwhile, and then its chunk is freed."""
    x = torch.randn(256, 256)

    def models() -> list[nn.Sequential]:
        torch.manual_seed(0)
        return [nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh()))) for _ in range(2)]

    def grads(model: nn.Module) -> list[Tensor]:
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    first, second = models()
    loss = first(x).square().mean()
    second(x).square().mean().backward()
    loss.backward()
    expected = [grads(first), grads(second)]
    device = cm.SimDevice()
    with device.compute():
        first, second = models()
        with cm.SwapSession("64MiB", "32MiB", device, MIN_BYTES, plans=False) as session:
            with session.step():
                loss = first(x).square().mean()
            session._executor.budget._reclaim_until(lambda: False, ())
            held = session.pool.stats()
            assert held.num_live > 3
            session.host_budget = 1 * MIB
            assert session.pool.stats().reserved_bytes == held.reserved_bytes > session.host_budget
            with session.step():
                refused = second(x).square().mean()
                assert session.pool.stats().num_live <= held.num_live
                refused.backward()
                loss.backward()
            del loss, refused
            assert session.pool.stats().reserved_bytes <= session.host_budget
            with session.step():
                second(x).square().mean()
            assert session.pool.stats().reserved_bytes <= session.host_budget
        assert session.report().fallbacks > 0
    for model, plain in ((first, expected[0]), (second, expected[1])):
        assert all(torch.equal(a, b) for a, b in zip(grads(model), plain, strict=True))


@pytest.mark.parametrize("which", ["hbm_budget", "host_budget"])
def test_before_the_session_it_is_the_budget_that_the_session_begins_with(which: str) -> None:
    training = Training(0.9 if which == "hbm_budget" else SHARE, [PLAIN] * 4)
    setattr(training.session, which, training.bytes_of(0.65) if which == "hbm_budget" else MIB)
    with training.session:
        for _ in range(4):
            assert pinned_in_step(training) <= training.session.host_budget
    training.assert_exact()
