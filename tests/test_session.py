"""Phases and errors of a session, its budget at every step, and what it learns. Afterwards nothing of it remains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.device import SPECS, Device
from chameleon_mm.pool.host_memory import available_host_bytes
from chameleon_mm.units import MIB
from tests._programs import deep, gradient, leaf, on_a_thread
from tests._runs import Run, run_steps

pytestmark = pytest.mark.usefixtures("no_gc")

KIB = 1 << 10


def opened(device: Device, **changed: object) -> cm.SwapSession:
    """A session in which every saved storage of `deep` moves, in every step."""
    settings: dict[str, object] = {"hbm_budget": device.allocated_bytes() + 16 * MIB, "host_budget": "16MiB", "min_bytes": 0}
    settings["plans"] = False  # a plan would leave most of it where it is
    return cm.SwapSession(device=device, **{**settings, **changed})  # type: ignore[arg-type]  # keyword by keyword


# --- phases


def test_a_step_outside_the_session_is_refused(device: Device) -> None:
    session = opened(device)
    with pytest.raises(cm.SessionClosedError, match=r"got one that is new; use it inside `with session:`"), session.step():
        raise AssertionError("the step began")
    with session:
        pass
    with pytest.raises(cm.SessionClosedError, match="got one that is closed"), session.step():
        raise AssertionError("the step began")


def test_a_step_inside_a_step_is_refused_and_harms_neither(device: Device) -> None:
    session = opened(device)
    x = leaf(device)
    expected = gradient(device, x)
    with session:
        with session.step():
            with pytest.raises(cm.SessionClosedError, match="got one that is in step"), session.step():
                raise AssertionError("the step began")
            assert torch.equal(torch.autograd.grad(deep(x).sum(), x)[0], expected)
        with session.step():
            assert torch.equal(torch.autograd.grad(deep(x).sum(), x)[0], expected)
    assert session.report().steps == 2


def test_a_session_is_entered_once(device: Device) -> None:
    session = opened(device)
    with session:
        with pytest.raises(cm.SessionClosedError, match="got one that is open; make another"):
            session.__enter__()
        with session.step():
            pass
    with pytest.raises(cm.SessionClosedError, match="got one that is closed; make another"):
        session.__enter__()
    assert session.report().steps == 1


def test_nested_sessions_are_exact_and_the_innermost_acts(device: Device) -> None:
    outer, inner = opened(device), opened(device)
    x = leaf(device)
    expected = gradient(device, x, lambda t: deep(deep(t)))
    with outer, outer.step():
        half = deep(x)
        outside = outer.pool.stats().num_live
        with inner, inner.step():
            out = deep(half).sum()
            assert outer.pool.stats().num_live == outside > 0
            assert inner.pool.stats().num_live > 0
        assert torch.equal(torch.autograd.grad(out, x)[0], expected)
        del half, out
    assert (outer.pool.stats().num_live, inner.pool.stats().num_live) == (0, 0)
    assert (outer.report().steps, inner.report().steps) == (1, 1)


# --- bad input: refused before anything began


def assert_nothing_began(session: cm.SwapSession, device: Device) -> None:
    with device.compute():
        deep(leaf(device)).sum().backward()  # no hook is installed: nothing is counted, nothing moves
    report = session.report()
    assert (report.steps, report.timed_steps, report.kept_by_reason, report.bytes_swapped_out) == (0, 0, {}, 0)
    assert session.pool.stats().peak_reserved_bytes == 0


def test_a_budget_below_the_models_bytes_is_infeasible_before_anything_began(device: Device) -> None:
    model = nn.Linear(256, 256, bias=False).to(device.torch_device)  # 256 KiB
    session = opened(device, hbm_budget=256 * KIB, model=model)
    with pytest.raises(cm.InfeasibleBudget, match=r"hbm_budget: expected more than .* got 256.0 KiB; raise the budget"):
        session.__enter__()
    assert_nothing_began(session, device)


def test_a_parameter_shared_by_two_layers_counts_once(sim: cm.SimDevice) -> None:
    tied = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    tied[1].weight = tied[0].weight
    with opened(sim, hbm_budget=300 * KIB, model=tied):
        pass


def test_a_budget_below_what_is_allocated_is_infeasible_until_that_is_gone(sim: cm.SimDevice) -> None:
    with sim.compute():
        held = torch.zeros(MIB)
    session = opened(sim, hbm_budget="2MiB")
    with pytest.raises(cm.InfeasibleBudget, match=r"than the 4\.00 MiB"):
        session.__enter__()
    assert_nothing_began(session, sim)
    del held
    with session, session.step():
        pass
    assert session.report().steps == 1


# --- None decides


def test_a_pool_brings_its_device_and_its_limit(device: Device) -> None:
    pool = cm.PinnedPool("2MiB", device=device)
    session = cm.SwapSession(pool=pool)
    assert session.pool is pool
    assert session.device is device
    with pytest.raises(ValueError, match="host_budget: expected none beside a pool"):
        cm.SwapSession(host_budget="1MiB", pool=pool)
    with pytest.raises(ValueError, match="pool: expected one of"):
        cm.SwapSession(device=cm.SimDevice(), pool=pool)


def test_none_decides(sim: cm.SimDevice) -> None:
    session = cm.SwapSession(device=sim)
    assert session.hbm_budget_bytes == sim.capacity * 9 // 10
    assert 0 < session.pool.limit_bytes < available_host_bytes() * 3 // 4
    x = leaf(sim)
    with session, session.step():
        deep(x).sum().backward()
    kept = session.report().kept_by_reason
    assert kept["small"] == 8  # 16 KiB each: below 1 MiB


# --- the report at any time


def test_a_report_at_any_time(device: Device) -> None:
    session = opened(device)
    reports = [session.report()]
    x = leaf(device)
    with session:
        reports.append(session.report())
        with session.step():
            out = deep(x).sum()
            reports.append(session.report())
            out.backward()
            del out
            reports.append(session.report())
        reports.append(session.report())
    reports.append(session.report())
    assert [report.steps for report in reports] == [0, 0, 0, 0, 1, 1]
    for earlier, later in pairwise(reports):
        assert earlier.bytes_swapped_in <= later.bytes_swapped_in
    for earlier, later in pairwise(reports[1:]):  # before it opens, a session has no peak of its own
        assert earlier.peak_hbm_bytes <= later.peak_hbm_bytes
    assert all(str(report) for report in reports)


def test_a_report_from_another_thread_in_the_middle_of_a_step(device: Device) -> None:
    session = opened(device)
    x = leaf(device)
    reports: list[cm.SwapReport] = []
    with session, session.step():
        out = deep(x).sum()
        on_a_thread(lambda: reports.append(session.report()))
        assert reports[0].bytes_swapped_out == session.report().bytes_swapped_out > 0
        out.backward()
        del out


# --- remains of a session


def test_an_exception_in_a_step_leaves_no_block_and_the_next_step_is_right(device: Device) -> None:
    session = opened(device)
    x = leaf(device)
    expected = gradient(device, x)

    def fails() -> None:
        out = deep(x)
        assert session.pool.stats().num_live > 0
        raise RuntimeError(f"the user's own, after {out.shape}")

    with session:
        for fail in (False, True, False):
            if fail:
                with pytest.raises(RuntimeError, match="the user's own") as caught, session.step():
                    fails()
                caught.value.__traceback__ = None  # it holds the frame that holds the graph
                del caught
            else:
                with session.step():
                    assert torch.equal(torch.autograd.grad(deep(x).sum(), x)[0], expected)
            assert session.pool.stats().num_live == 0
    report = session.report()
    assert report.steps == 2
    assert "2 completed, 3 timed" in str(report)


def test_a_graph_outlives_its_session_exactly(device: Device) -> None:
    session = opened(device)
    x = leaf(device)
    with device.compute():
        expected = torch.autograd.grad(deep(x).sum(), x)[0]
        with session, session.step():
            out = deep(x).sum()
        assert session.pool.stats().num_live > 0
        assert torch.equal(torch.autograd.grad(out, x)[0], expected)
    del out
    assert session.pool.stats().num_live == 0


# --- the budget


@dataclass(frozen=True)
class Workload:
    """A model and its batch; `activation_bytes` is the size of its largest saved tensor."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    activation_bytes: int


def block() -> nn.Module:
    """Pre-norm attention and MLP."""
    return nn.TransformerEncoderLayer(64, 2, 256, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)


SLOW_LINK = dataclasses.replace(SPECS["h200"], h2d_gbps=1.0, d2h_gbps=1.0, duplex_gbps=1.5)
"""Slow enough that a copy takes far longer than the operator next to it: a storage on its way out stays until a wait."""

LINKS = {"fast link": SPECS["h200"], "slow link": SLOW_LINK}

MLP = Workload(lambda: nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(128, 128), nn.GELU()))), (2048, 128), MIB)
TRANSFORMER = Workload(lambda: nn.Sequential(*(block() for _ in range(6))), (32, 64, 64), 2 * MIB)


def train(
    work: Workload, device: cm.SimDevice, budget: int | None = None, *, shares: tuple[int, ...] = (1,) * 4, **given: Any
) -> Run:
    """A step with each n-th part of the batch that `shares` names. Returns the losses."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = work.model()
        model.batch = torch.randn(work.shape)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> list[Tensor]:
        loss = model(model.batch[: len(model.batch) // shares[number]]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach()]

    return run_steps(device, make, step, len(shares), budget, host_budget="256MiB", min_bytes=64 * KIB, **given)


@pytest.mark.ci
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("work", [MLP, TRANSFORMER], ids=["mlp", "transformer"])
def test_half_of_the_unswapped_peak_holds_at_every_step(work: Workload, link: str, sim: cm.SimDevice) -> None:
    """Why it must hold.

    A later step is the previous one again. At each look the guard leaves `need` free: what was allocated between this look
    and the next one last time, an upper bound of the climb in between. So allocated <= budget - need at the look, and
    <= budget until the next one, as long as there is something left to give back.

    In the first step no climb is known. Then every look waits for all copies out and drops what they copied, and nothing
    comes back ahead of its use. What stays is what the model itself holds.
    """
    plain = train(work, sim)
    budget = max(plain.peaks) // 2
    swapped = train(work, cm.SimDevice(LINKS[link]), budget)
    assert max(swapped.peaks) <= budget
    assert all(torch.equal(a, b) for a, b in zip(plain.seen, swapped.seen, strict=True))
    report = swapped.report
    assert report.peak_hbm_bytes <= budget == report.hbm_budget_bytes
    assert (report.budget_misses, report.oom_retries, report.fallbacks) == (0, 0, 0)
    assert swapped.session.pool.stats().num_live == 0


@pytest.mark.ci
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("shares", [(4, 4, 1, 4, 1), (1, 2, 4, 1, 2), (1, 3, 1, 2, 1)])
def test_the_budget_holds_when_the_batch_changes_from_step_to_step(
    shares: tuple[int, ...], link: str, sim: cm.SimDevice
) -> None:
    """A larger step than the one learned from shows at its first climbs, early in forward, while there is still room."""
    budget = max(train(MLP, sim).peaks) // 2
    plain = train(MLP, cm.SimDevice(), shares=shares)
    swapped = train(MLP, cm.SimDevice(LINKS[link]), budget, shares=shares)
    assert max(swapped.peaks) <= budget < max(plain.peaks)
    assert all(torch.equal(a, b) for a, b in zip(plain.seen, swapped.seen, strict=True))


def test_the_first_step_holds_no_more_than_the_model_does(sim: cm.SimDevice) -> None:
    """However slow the link. The MLP's terms, with A for one activation, P for the parameters:

    P + A     parameters and the batch (`fixed_bytes`)
    P         gradients, as backward makes them
    A         the saved tensor of the current op, whose copy out begins at the next hook; in backward the one swapped in
    A         the one of the op before, until its copy is waited for; in backward the one used before
    A + A     what the current op reads and writes; in backward the gradients of its output and its input
    A         one temporary of the loss, or of an operator's backward
    """
    device, fixed_bytes = cm.SimDevice(SLOW_LINK), list[int]()
    swapped = train(MLP, device, 64 * MIB, shares=(1,), before=lambda number: fixed_bytes.append(device.allocated_bytes()))
    parameters = fixed_bytes[0] - MLP.activation_bytes
    bound = fixed_bytes[0] + parameters + 5 * MLP.activation_bytes
    assert swapped.peaks[0] <= bound
    plain = train(MLP, sim, shares=(1,))
    assert bound < plain.peaks[0] // 2  # the bound says something


def test_an_order_that_is_not_the_reverse_is_learned(sim: cm.SimDevice) -> None:
    """Two graphs, the first one's backward first, as in pipelines: at its end, the reverse order predicts no further use."""
    x, y = (torch.randn(512, 512, requires_grad=True) for _ in range(2))
    session = cm.SwapSession(12 * MIB, "64MiB", sim, plans=False)
    on_demand: list[int] = []
    with session:
        for _ in range(3):
            with session.step():
                first, second = deep(x).sum(), deep(y).sum()
                first.backward()
                second.backward()
                x.grad = y.grad = None
                del first, second
            on_demand.append(session.report().swap_ins_on_demand - sum(on_demand))
    assert on_demand[0] > 1
    assert on_demand[1:] == [1, 1]  # the first use of backward, which no use comes before
