"""A host budget that is changed in the middle of training: it holds from the next step on, nothing is recorded again, the bits
are eager's, and pinned memory goes back."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.pinned import PinnedPool
from chameleon_mm.units import KIB, MIB
from tests.test_budget_change import Training
from tests.test_changing_steps import LONG_ROWS, MIN_BYTES, PLAIN, Work

pytestmark = pytest.mark.usefixtures("no_gc")

SHARE = 0.7
"""Of the unswapped peak: the budget of device memory throughout."""

ENOUGH = 512 * KIB
"""Host budget that plans which only swap can do with."""


def pinned_in_step(training: Training) -> int:
    """Run the next step. Returns the most pinned memory that there was at its allocations and its end."""
    pool = training.session.pool
    seen = [pool.stats().reserved_bytes]
    note = training.model.register_forward_hook(lambda *_: seen.append(pool.stats().reserved_bytes))
    assert training.step() <= training.session.hbm_budget
    note.remove()
    return max(*seen, pool.stats().reserved_bytes)


@pytest.mark.parametrize(
    ("recompute", "sizes"), [(True, (0, 64 * KIB, MIB, "64MiB")), (False, (ENOUGH, MIB, "20MiB", "64MiB"))]
)
def test_ten_changes_in_forty_steps(recompute: bool, sizes: tuple[int | str, ...]) -> None:
    training = Training(SHARE, [PLAIN] * 40, recompute=recompute)
    session, rng = training.session, Random(7)
    changed_at = set(rng.sample(range(2, 40), 10))
    with session:
        for number in range(40):
            if number in changed_at:
                session.host_budget = rng.choice(sizes)
            assert pinned_in_step(training) <= session.host_budget == session.pool.limit_bytes
    training.assert_exact()
    report = session.report()
    assert report.steps_by_phase == {"recorded": 1, "planned": 39}
    assert report.budget_misses == 0
    if not recompute:  # else an audit that makes room may take ordinary memory for it
        assert (report.fallbacks, report.pageable_swap_outs) == (0, 0)


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
    """A graph of the step before lives on: nothing of it is lost, nothing else is pinned meanwhile, and then its chunk goes."""
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
            session._executor.budget.reclaim_all(())
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


def test_the_report_tells_what_the_plans_want() -> None:
    training = Training(SHARE, [PLAIN] * 4, recompute=False)
    with training.session as session:
        assert session.report().host_bytes_wanted is None
        for _ in range(4):
            training.step()
        wanted = session.report().host_bytes_wanted
        assert wanted is not None
        assert 0 < wanted <= session.pool.stats().peak_live_bytes
        session.hbm_budget = training.bytes_of(1.2)
        assert session.report().host_bytes_wanted == 0


def test_the_limit_of_a_given_pool_is_its_own() -> None:
    pool = PinnedPool("64MiB", cm.SimDevice())
    session = cm.SwapSession("1GiB", pool=pool)
    with session, pytest.raises(ValueError, match=r"pool of its own.*set pool\.limit_bytes"):
        session.host_budget = "1MiB"
    pool.limit_bytes = "1MiB"
    assert session.host_budget == MIB
