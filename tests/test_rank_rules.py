"""Rules that keep ranks in step, each shown in one process: no plan and no retry repeats a collective, budgets are compared
without a wait, and reports of ranks become one."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.tensor import DTensor, Replicate

import chameleon_mm as cm
from chameleon_mm import replayable
from chameleon_mm.device.operators import OpCall, OpFacts
from chameleon_mm.record.retry import OomRetry
from chameleon_mm.replayable import base_name
from chameleon_mm.report.report import Ranks
from chameleon_mm.swap.classify import unwrapped
from chameleon_mm.units import GIB, MIB
from tests._mixes import Mix, Proofs, mixed, totals_of

ALL = replayable.DEFAULT | replayable.PRODUCTS
COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor", "symm_mem")


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """The only rank of a job."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()


# --- nothing repeats a collective


def talk(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Forward of a model that talks to other ranks and saves the results of functional and in-place collectives."""
    total = functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x.sin().detach(), "sum", group.group_name))
    rows = functional.wait_tensor(torch.ops._c10d_functional.all_gather_into_tensor(x.cos().detach(), 1, group.group_name))
    in_place = x.tanh().detach()
    dist.all_reduce(in_place)
    # Squares save their argument, and products both factors: if dropped, each would have to be recomputed.
    out: Tensor = (x * total).square() + (x * rows).square() + (x * in_place).square()
    return out


def collectives_of(group: dist.ProcessGroup, mix: Mix | None) -> tuple[Counter[str], bytes, cm.SwapSession | None]:
    """Collectives of three steps, the bits of the gradient, and the session in which everything that may be is dropped."""
    torch.manual_seed(3)
    x = torch.randn(64, 64, requires_grad=True)
    session = None if mix is None else mixed(mix)
    with torch.autograd.profiler.profile() as profile:  # gloo itself records them, for any caller
        if session is None:
            for _ in range(3):
                talk(x * 1.5, group).sum().backward()
        else:
            with session:
                for _ in range(3):
                    with session.step():
                        talk(x * 1.5, group).sum().backward()
    assert x.grad is not None
    counts = Counter(event.name for event in profile.function_events if event.name.startswith("gloo:"))
    return counts, x.grad.numpy().tobytes(), session


def all_dropped(admitted: frozenset[str]) -> Mix:
    return Mix(1, drop=1.0, held=0.0, proofs=Proofs.NEVER, admitted=admitted)


def test_what_collectives_gave_is_never_recomputed(alone: dist.ProcessGroup) -> None:
    expected, bits, _ = collectives_of(alone, None)
    assert sum(expected.values()) == 3 * 3
    got, same_bits, session = collectives_of(alone, all_dropped(ALL))
    assert got == expected
    assert same_bits == bits
    assert session is not None and totals_of(session).recomputations > 0
    assert session.pool.stats().num_live == 0


def test_a_list_that_admits_a_collective_would_be_noticed(alone: dist.ProcessGroup) -> None:
    """The mutant of the test above: with the operators on the list, there are more of them in backward."""
    expected, _, _ = collectives_of(alone, None)
    admitted = ALL | {"_c10d_functional::all_reduce", "_c10d_functional::wait_tensor"}
    got, _, _ = collectives_of(alone, all_dropped(admitted))
    assert sum(got.values()) > sum(expected.values())


def operators_that_talk() -> list[Any]:
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.partition(".")
        namespace, _, short = base.partition("::")
        if namespace in COLLECTIVES:
            packet = getattr(getattr(torch.ops, namespace), short)
            found.append(getattr(packet, overload or "default"))
    return found


def test_no_operator_of_torchs_that_talks_may_run_again() -> None:
    talking = operators_that_talk()
    assert len(talking) > 40
    assert [op for op in talking if OpFacts.of(op).repeatable] == []
    assert [op for op in talking if base_name(op.name()) in ALL | replayable.VIEWS] == []


class Fails:
    """An operator's overload that finds no memory, each time."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.runs += 1
        raise torch.OutOfMemoryError("Tried to allocate 1.50 MiB")


@pytest.mark.parametrize(
    ("operator", "count", "runs"),
    [("collective", 1, 1), ("custom", 1, 2), ("custom", 2, 1), ("torch's own", 2, 2)],
)
def test_out_of_memory_repeats_nothing_that_may_talk(
    operator: str, count: int, runs: int, sim: cm.SimDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A custom operator may be an unknown collective: among several ranks it runs once."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: count)
    facts = {
        "collective": OpFacts.of(torch.ops._c10d_functional.all_reduce.default),
        "custom": OpFacts("theirs", kernel=True, repeatable=True, is_torchs_own=False),
        "torch's own": OpFacts.of(torch.ops.aten.mul.Tensor),
    }[operator]
    fails = Fails()
    with pytest.raises(torch.OutOfMemoryError):
        OomRetry(sim, lambda nbytes, busy: False).run(OpCall(facts, fails, (torch.ones(4),), {}, device_type="cpu"))
    assert fails.runs == runs


def test_an_operator_of_somebody_elses_is_known_as_that() -> None:
    with torch.library._scoped_library("chameleon_test", "FRAGMENT") as library:
        library.define("exchange(Tensor x) -> Tensor")
        assert not OpFacts.of(torch.ops.chameleon_test.exchange.default).is_torchs_own
    assert OpFacts.of(torch.ops.aten.mul.Tensor).is_torchs_own


# --- what wrappers of distributed tensors hold


def gradient_through_dtensors() -> Tensor:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    torch.manual_seed(0)
    weight = torch.randn(64, 64, requires_grad=True)
    local = weight * 2.0
    out: Any = DTensor.from_local(local, mesh, [Replicate()])
    del local
    for _ in range(4):
        out = (out * out.exp().tanh()).sin()
    out.to_local().sum().backward()
    assert weight.grad is not None
    return weight.grad


def test_what_a_dtensor_made_of_an_activation_holds_moves(alone: dist.ProcessGroup, sim: cm.SimDevice) -> None:
    """torch makes the local part a leaf that requires a gradient, which no leaf of the model's is."""
    plain = gradient_through_dtensors()
    session = cm.SwapSession("1GiB", "64MiB", sim, min_bytes=1024, plans=False)
    with session, session.step():
        assert torch.equal(gradient_through_dtensors(), plain)
    report = session.report()
    assert "leaf" not in report.kept_by_reason
    assert report.bytes_swapped_out >= 2 * 64 * 64 * 4  # both factors of the product
    assert session.pool.stats().num_live == 0


def test_what_dtensors_hold_is_swapped_by_plan(alone: dist.ProcessGroup, sim: cm.SimDevice) -> None:
    plain = gradient_through_dtensors()
    session = cm.SwapSession("1GiB", "64MiB", sim, min_bytes=1024)
    with session:
        for _ in range(3):
            with session.step():
                assert torch.equal(gradient_through_dtensors(), plain)
    report = session.report()
    assert report.steps_by_phase == {"recorded": 1, "planned": 2}
    assert sum(report.planned_bytes.values()) >= 3 * 64 * 64 * 4  # all that autograd saves is known to the plan


def test_what_dtensors_hold_may_be_dropped_and_recomputed(alone: dist.ProcessGroup) -> None:
    plain = gradient_through_dtensors()
    session = mixed(all_dropped(ALL))
    with session:
        for _ in range(3):
            with session.step():
                assert torch.equal(gradient_through_dtensors(), plain)
    assert totals_of(session).recomputations > 0
    assert session.pool.stats().num_live == 0


def test_a_collective_is_waited_for_before_its_result_is_copied(alone: dist.ProcessGroup) -> None:
    """Its operator waits only when it runs, after autograd has saved its argument."""
    result = functional.AsyncCollectiveTensor(torch.ops._c10d_functional.all_reduce(torch.ones(4), "sum", alone.group_name))
    assert not result.completed
    parts = unwrapped(result)
    assert parts is not None and parts[0]["elem"] is result.elem
    assert result.completed


# --- budgets


class Elsewhere:
    """A store, as one rank of two after the other sees it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: Any) -> None:
        self._patch = monkeypatch
        self._patch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)

    def enter(self, number: int, hbm_budget_bytes: int, host_budget_bytes: int | None = None) -> tuple[str, ...]:
        self._patch.setattr(Ranks, "number", number)
        self._patch.setattr(Ranks, "of", 2)
        ranks = Ranks(host_budget_bytes=host_budget_bytes)
        ranks.enter(hbm_budget_bytes)
        return ranks.problems


@pytest.mark.parametrize(
    ("mine", "said"),
    [(16 * GIB, "16.0 GiB here and 20.0 GiB there"), (20 * GIB + 1024, "21474837504 B here and 21474836480 B there")],
)
def test_a_rank_with_another_budget_than_the_first_says_so(
    mine: int, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Elsewhere(monkeypatch, HashStore())
    assert ranks.enter(0, 20 * GIB) == ()
    with caplog.at_level(logging.WARNING):
        (problem,) = ranks.enter(1, mine)
    assert "rank 1" in problem and "rank 0" in problem
    assert said in problem
    assert [record.getMessage() for record in caplog.records] == [f"chameleon_mm: {problem}"]


def test_the_same_budgets_are_no_problem_and_each_session_is_compared_with_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Elsewhere(monkeypatch, HashStore())
    assert ranks.enter(1, 20 * GIB, GIB) == ranks.enter(0, 20 * GIB, GIB) == ()
    assert ranks.enter(0, 8 * GIB) == ranks.enter(1, 8 * GIB) == ()
    assert ranks.enter(1, 8 * GIB, 2 * GIB) == ()
    (problem,) = ranks.enter(0, 8 * GIB, GIB)
    assert "host_budget is 1.00 GiB here and 2.00 GiB there" in problem
    assert "hbm_budget" not in problem


class Gone:
    """A store whose server ended."""

    def add(self, key: str, by: int) -> int:
        raise dist.DistNetworkError("the connection was closed")


def test_a_store_that_is_gone_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Elsewhere(monkeypatch, Gone()).enter(1, GIB) == ()


def test_a_rank_that_never_comes_is_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `add` and `compare_set` are called on the store: neither waits for a key."""
    store = HashStore()
    store.set_timeout(timedelta(milliseconds=1))
    assert Elsewhere(monkeypatch, store).enter(1, GIB) == ()


def test_a_machine_too_small_for_all_of_its_ranks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chameleon_mm.report.report.local_ranks", lambda: 8)
    monkeypatch.setattr("chameleon_mm.report.report.available_host_bytes", lambda: 400 * GIB)
    ranks = Ranks(host_budget_bytes=64 * GIB)
    ranks.enter(GIB)
    (problem,) = ranks.problems
    assert "8 ranks" in problem and "512.0 GiB together" in problem and "50.0 GiB at most" in problem
    for budget in (50 * GIB, None):
        fits = Ranks(host_budget_bytes=budget)
        fits.enter(GIB)
        assert fits.problems == ()


def test_a_session_has_it_in_its_report_before_the_first_step(monkeypatch: pytest.MonkeyPatch, sim: cm.SimDevice) -> None:
    ranks = Elsewhere(monkeypatch, HashStore())
    ranks.enter(0, 32 * MIB)
    monkeypatch.setattr(Ranks, "number", 1)
    monkeypatch.setattr(Ranks, "of", 2)
    with cm.SwapSession("16MiB", "8MiB", sim) as session:
        report = session.report()
    assert report.steps == 0
    assert "16.0 MiB here and 32.0 MiB there" in report.problems[0]


# --- one report


def trained(rank: int, count: int, monkeypatch: pytest.MonkeyPatch, *, budget: int = 9 * MIB, layers: int = 8) -> cm.SwapReport:
    monkeypatch.setattr(Ranks, "number", rank)
    monkeypatch.setattr(Ranks, "of", count)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: None)
    device = cm.SimDevice()
    session = cm.SwapSession(device.allocated_bytes() + budget, "64MiB", device)
    x = torch.randn(512, 512, requires_grad=True)
    with session:
        for _ in range(4):
            with session.step():
                out: Tensor = x
                for _ in range(layers):
                    out = torch.tanh(out * 1.5).exp() - 1
                out.sum().backward()
                del out
                x.grad = None
    report = session.report()
    assert report.plan_digests.keys() == {"operators", "sizes", "plan"}
    return report


def test_digests_of_ranks_are_equal_where_they_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    zero, same = (trained(rank, 2, monkeypatch).plan_digests for rank in range(2))
    assert zero == same
    tight = trained(1, 2, monkeypatch, budget=7 * MIB).plan_digests
    assert {name for name in zero if zero[name] != tight[name]} == {"plan"}
    longer = trained(1, 2, monkeypatch, layers=9).plan_digests
    assert {name for name in zero if zero[name] != longer[name]} == {"operators", "sizes", "plan"}


@pytest.mark.parametrize("name", ["\udcff", "a\ud800b", "<\udfff>"])
def test_a_hostile_name_is_escaped_in_each_report(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = trained(0, 1, monkeypatch)
    report.device, report.problems = name, (f"thread {name}",)
    text = str(report)
    assert "\\ud" in text and text.encode("utf-8")
    report.save_html(tmp_path / "page.html")
    report.save_trace(tmp_path / "trace.json")
    assert "\\ud" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["otherData"]["device"] == name
