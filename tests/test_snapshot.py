"""Snapshots in host memory: after a restore, training continues as in plain PyTorch, wherever the state is.

The reference is plain PyTorch on the same device, with nothing of ours around it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.state.hosted import Where
from chameleon_mm.state.optimizer_swap import OptimizerSwap
from chameleon_mm.state.rerun import MAX_RETRIES
from chameleon_mm.state.swapped_state import SwappedState
from chameleon_mm.state.tensor_copy import Copier, TensorCopy
from tests._fakes import Faults, refusing
from tests._mix_models import bits
from tests._programs import same
from tests._snapshots import OPTIMIZERS, RUNS, Training, away, opened, plainly, read, session_of, steps
from tests.test_run_step import SHORT, Fails

pytestmark = pytest.mark.usefixtures("no_gc")


@pytest.mark.parametrize(("kind", "name"), RUNS)
def test_training_goes_on_from_it_with_plain_pytorchs_bits(kind: str, name: str, device: Device) -> None:
    expected = plainly(name, device.torch_device, range(6))
    with device.compute():
        training, session = opened(name, device, kind, plans="foreach" in name, recompute=False)
        with session.pool, session:
            steps(session, training, range(3))
            there = away(session, training)
            assert [count > 0 for count in there] == [kind == "parameters", kind != "neither"]
            session.snapshot()
            assert away(session, training) == there
            for detour in ((7, 8), (9,)):  # gradients exist after the first of them, and not after the second
                steps(session, training, detour)
                if kind != "neither":
                    training.optimizer.param_groups[0]["lr"] = 0.5
                session.restore()
            steps(session, training, range(3, 6))
        assert same(training.outcome(), expected)
    assert session.pool.stats().live_bytes == 0
    report = session.report()
    assert (report.snapshots, dict(report.rows())["snapshots"].split(",")[0]) == (1, "1")


def test_what_hooks_of_state_dict_make_of_parameters_that_are_away(device: Device, tmp_path: Path) -> None:
    def turned(module: nn.Module, entries: dict[str, Any], *_: object) -> None:
        entries["turned"] = entries["0.weight"].t()

    with device.compute():
        training = Training("SGD, momentum", device.torch_device)
        training.model.register_state_dict_post_hook(turned)
        session = session_of(training, device, "parameters")
        with session.pool, session:
            steps(session, training, range(2))
            saved = read(session.snapshot().write(tmp_path / "run").wait())
        assert torch.equal(saved["model"]["turned"], training.model.get_parameter("0.weight").detach().t().cpu())


@pytest.mark.parametrize("kind", ["optimizer", "parameters"])
def test_state_and_gradients_that_are_newer_go_and_those_that_are_gone_come_back(kind: str, device: Device) -> None:
    name = "AdamW, foreach"
    with device.compute():
        training, session = opened(name, device, kind)
        with session.pool, session:
            first = session.snapshot()
            before = training.outcome()
            steps(session, training, range(3))
            second = session.snapshot()
            after = training.outcome()
            session.restore(first)
            assert not training.optimizer.state
            assert all(p.grad is None for p in training.model.parameters())
            assert same(training.outcome(), before)
            training.optimizer.param_groups[0]["of somebody's"] = 1
            session.restore(second)
            assert "of somebody's" not in training.optimizer.param_groups[0]
            assert same(training.outcome(), after)
            training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
            training.optimizer.state[next(training.model.parameters())]["more"] = torch.zeros(3)
            steps(session, training, (3, 4))
            session.restore()
            assert same(training.outcome(), after)
            steps(session, training, (3,))
            first.release()
            second.release()
        assert same(training.outcome(), plainly(name, device.torch_device, range(4)))


def test_one_that_finds_no_device_memory_is_restored_once_there_is_some(
    sim: cm.SimDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_from, faults = Copier.made_from, Faults(torch.OutOfMemoryError)

    def fails(copier: Copier, copied: TensorCopy) -> Tensor:
        faults.hit(SHORT)
        return made_from(copier, copied)

    with sim.compute():
        training, session = opened("AdamW, foreach", sim, "optimizer")
        with session.pool, session:
            steps(session, training, range(3))
            session.snapshot()
            before = training.outcome()
            monkeypatch.setattr(Copier, "made_from", fails)
            for fail_at in (2, 20):  # a gradient; state
                training.optimizer.zero_grad()
                training.optimizer.state.clear()
                faults.begin(fail_at)
                with pytest.raises(torch.OutOfMemoryError, match="injected"):
                    session.restore()
                session.restore()
                assert same(training.outcome(), before)


def test_restoring_takes_no_more_device_memory_than_the_window(sim: cm.SimDevice) -> None:
    """State that is away is written on the host."""
    with sim.compute():
        training, session = opened("AdamW, foreach", sim, "parameters")
        with session.pool, session:
            steps(session, training, range(4))  # no gradients are left
            sim.reset_peaks()
            there = sim.allocated_bytes()
            session.snapshot()
            session.restore()
            assert sim.peak_allocated_bytes() <= there + 4 * 1024  # the scalar tensors that are copied in between, at most


# --- tensors of every kind


class Odd(nn.Module):
    """Parameters and buffers of many kinds."""

    def __init__(self, at: torch.device) -> None:
        super().__init__()
        self.tied = self.weight = nn.Parameter(torch.randn(6, 4, device=at))
        self.turned = nn.Parameter(torch.randn(6, 4, device=at).t())
        self.column = nn.Parameter(torch.randn(6, 4, device=at)[:, 1])
        self.table = nn.Embedding(5, 3, sparse=True, device=at)
        self.register_buffer("bf16", torch.tensor([1.0, -0.0, float("nan")], dtype=torch.bfloat16, device=at))
        self.register_buffer("phases", torch.randn(3, dtype=torch.complex64, device=at))
        self.register_buffer("flags", torch.tensor([True, False], device=at))
        self.register_buffer("nothing", torch.empty(0, 3, device=at))
        self.register_buffer("scalar", torch.tensor(7, device=at))
        self.register_buffer("repeated", torch.tensor([2.0], device=at).expand(4), persistent=False)
        self.register_buffer("on_host", torch.arange(5))
        self.register_buffer("fleeting", torch.ones(2, device=at), persistent=False)
        self.register_buffer("absent", None)
        self.extra = 3

    def get_extra_state(self) -> object:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]


def test_tensors_of_every_kind(device: Device, tmp_path: Path) -> None:
    at = device.torch_device
    with device.compute():
        model = Odd(at)
        model.table(torch.tensor([1, 3], device=at)).sum().backward()
        (model.weight.sum() * 2 + model.turned.sum()).backward()
        sparse = model.table.weight.grad
        assert sparse is not None and sparse.is_sparse
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        expected = {name: (t.detach().cpu().clone(), t.stride()) for name, t in tensors.items()}
        gradients = {name: p.grad.clone().cpu() for name, p in model.named_parameters() if p.grad is not None}
        with cm.SwapSession("1GiB", "1MiB", device, model=model) as session:
            snapshot = session.snapshot()
            written = snapshot.write(tmp_path / "odd").wait()
            with torch.no_grad():
                for name, t in tensors.items():
                    if name != "repeated":
                        t.zero_()
            model.turned.grad = None
            model.column.grad = torch.ones(6, device=at)
            session.restore()
            for name, (value, stride) in expected.items():
                got = model.get_parameter(name) if name in dict(model.named_parameters()) else model.get_buffer(name)
                assert got is tensors[name]
                assert got.stride() == stride
                assert bits(got) == bits(value), name
            for name, p in model.named_parameters():
                assert (p.grad is None) == (name not in gradients)
                if p.grad is not None:
                    assert torch.equal(p.grad.to_dense().cpu(), gradients[name].to_dense())
            snapshot.release()
            assert session.pool.stats().live_bytes == 0
    saved = read(written)
    assert sum(file.stat().st_size for file in written.iterdir()) < 100_000  # tensors alone, not the chunk that they lie in
    assert list(saved["not_in_state_dict"]) == ["repeated", "fleeting"]
    resumed = Odd(torch.device("cpu"))
    resumed.extra = 0
    resumed.load_state_dict(saved["model"])
    assert (resumed.extra, resumed.tied is resumed.weight) == (3, True)
    assert {name: bits(t) for name, t in resumed.state_dict().items() if isinstance(t, Tensor)} == {
        name: bits(value) for name, (value, _) in expected.items() if name not in ("repeated", "fleeting")
    } | {"tied": bits(expected["tied"][0]), "weight": bits(expected["tied"][0])}
    assert {name: bits(t.to_dense()) for name, t in saved["gradients"].items()} == {
        name: bits(t.to_dense()) for name, t in gradients.items()
    }


# --- host memory


def test_its_memory_goes_back_when_it_is_released_replaced_or_dropped(device: Device) -> None:
    with device.compute():
        training, session = opened("SGD", device, "neither")
        pool = session.pool
        with session:
            first = session.snapshot()
            assert pool.stats().requested_bytes == first.nbytes == model_bytes(training.model)
            second = session.snapshot()
            assert pool.stats().requested_bytes == 2 * first.nbytes  # the first is the caller's now
            del first
            assert pool.stats().requested_bytes == second.nbytes
            second.release()
            second.release()
            assert (second.released, pool.stats().live_bytes) == (True, 0)
            session.snapshot()
            assert pool.stats().requested_bytes == second.nbytes
            kept = session.snapshot()
        assert pool.stats().requested_bytes == kept.nbytes  # a snapshot that is held outlives the session
        kept.release()
    assert pool.stats().live_bytes == 0


def model_bytes(model: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


def test_it_lies_in_ordinary_memory_where_no_more_can_be_pinned(device: Device) -> None:
    with device.compute():
        training, session = opened("SGD", device, "neither", host_budget="64KiB")
        with session:
            before = training.outcome()
            session.snapshot()
            assert session.pool.stats().reserved_bytes <= 64 * 1024
            training.step(0)
            session.restore()
            assert same(training.outcome(), before)
    assert session.pool.stats().num_live == 0


def test_one_that_finds_no_memory_leaves_nothing(sim: cm.SimDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults(cm.HostMemoryExhausted)
    allocate = cm.PinnedPool.allocate_pageable

    def fails(pool: cm.PinnedPool, nbytes: Any) -> Any:
        faults.hit()
        return allocate(pool, nbytes)

    with sim.compute():
        training, session = opened("SGD, momentum", sim, "optimizer")
        with session.pool as pool, session:
            steps(session, training, (0,))
            there = pool.stats().live_bytes
            kept = session.snapshot()
            before = pool.stats().live_bytes
            pool.limit_bytes = pool.stats().reserved_bytes
            monkeypatch.setattr(cm.PinnedPool, "allocate_pageable", fails)
            monkeypatch.setattr(cm.PinnedPool, "allocate", refusing(cm.HostMemoryExhausted))
            faults.begin(20)
            with pytest.raises(cm.HostMemoryExhausted):
                session.snapshot()
            monkeypatch.undo()
            assert pool.stats().live_bytes == before
            assert not pool._ledger.pageable
            outcome = training.outcome()
            steps(session, training, (1,))
            session.restore()  # the one before is still the latest
            assert same(training.outcome(), outcome)
            kept.release()
            del kept
            assert pool.stats().live_bytes <= there


# --- steps that run again


@pytest.mark.ci
@pytest.mark.parametrize(("kind", "name"), [run for run in RUNS if run[0] != "neither"])
def test_a_step_whose_optimizer_had_begun_is_repaired_and_run_again(kind: str, name: str, device: Device) -> None:
    expected = plainly(name, device.torch_device, range(3))
    with device.compute():
        training, session = opened(name, device, kind)
        with session.pool, session:
            steps(session, training, (0,))
            for number in (1, 2):
                session.run_step(Fails(1, partial(training.step, number)), snapshot=True)
        assert same(training.outcome(), expected)
    report = session.report()
    assert (report.steps, report.steps_run_again, report.snapshots) == (3, 2, 2)


def test_a_step_that_fails_before_its_optimizer_runs_again_without_one(device: Device) -> None:
    """Under swapped parameters, which come and go in it: that is no change of theirs."""
    name = "AdamW, fused"
    expected = plainly(name, device.torch_device, range(3))
    with device.compute():
        training, session = opened(name, device, "parameters")
        with session.pool, session:
            for number in range(3):
                if number:
                    fails = Fails(1)
                    training.model[-4].register_full_backward_hook(lambda *_, fails=fails: fails())
                session.run_step(partial(training.step, number))
        assert same(training.outcome(), expected)
    assert (session.report().steps_run_again, session.report().snapshots) == (2, 0)


def test_a_step_that_fails_between_two_buckets_is_repaired(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "AdamW, foreach"
    expected = plainly(name, device.torch_device, range(3))
    leave, faults = OptimizerSwap.leave, Faults(torch.OutOfMemoryError)

    def fails(swap: OptimizerSwap, params: list[Any]) -> Any:
        faults.hit(SHORT)
        return leave(swap, params)

    with device.compute():
        training, session = opened(name, device, "parameters")
        with session.pool, session:
            monkeypatch.setattr(OptimizerSwap, "leave", fails)
            for number in range(3):
                faults.begin(3)
                session.run_step(partial(training.step, number), snapshot=True)
                assert faults.over
        assert same(training.outcome(), expected)


def test_a_step_that_never_fits_leaves_everything_as_it_was(sim: cm.SimDevice) -> None:
    with sim.compute():
        training, session = opened("AdamW, fused", sim, "optimizer")

        def never() -> None:
            training.step(5)
            raise torch.OutOfMemoryError(SHORT)

        with session.pool, session:
            steps(session, training, range(2))
            before = training.outcome()
            with pytest.raises(torch.OutOfMemoryError, match=f"run {MAX_RETRIES + 1} times"):
                session.run_step(never, snapshot=True)
            assert same(training.outcome(), before)


def test_an_optimizer_that_the_session_does_not_know_is_an_obstacle(sim: cm.SimDevice) -> None:
    with sim.compute():
        training = Training("AdamW, fused", sim.torch_device)
        other = torch.optim.SGD(training.model.parameters(), lr=0.1)
        session = session_of(training, sim, "optimizer")

        def both() -> None:
            training.step(0)
            other.step()

        def replaces() -> None:
            training.model[0].weight = nn.Parameter(torch.zeros(128, 128))

        with session.pool, session:
            with pytest.raises(torch.OutOfMemoryError, match="not run again, because an optimizer of the model's had begun"):
                session.run_step(Fails(1, both), snapshot=True)
            with pytest.raises(torch.OutOfMemoryError, match="a parameter of the model had been replaced by another"):
                session.run_step(Fails(1, replaces), snapshot=True)


# --- bad input


def test_one_of_another_model_or_optimizer_is_refused(sim: cm.SimDevice) -> None:
    with sim.compute():
        training, session = opened("AdamW, foreach", sim, "optimizer")
        with session:
            steps(session, training, range(2))
            snapshot = session.snapshot()
        with cm.SwapSession("1GiB", device=sim, model=training.model, pool=session.pool) as alone:
            modelled = alone.snapshot()
            with pytest.raises(ValueError, match="got one with an optimizer's state; restore what"):
                alone.restore(snapshot)
        elsewhere = cm.SimDevice()
        cases: list[tuple[Callable[[Training], Any], str]] = [
            (lambda it: it.model.add_module("more", nn.Linear(2, 2)), "got one without more.weight"),
            (lambda it: it.model.__delitem__(0), "got one without 3.weight"),
            (lambda it: delattr(it.model[-1], "fleeting"), "got one with 15.fleeting, which the model has not"),
            (lambda it: it.model[0].double(), r"got one whose 0.weight is \(128, 128\) of float32.*here.*float64"),
            (lambda it: setattr(it, "make", OPTIMIZERS["SGD"]), "got one of the optimizer AdamW, here SGD"),
            (
                lambda it: setattr(it, "make", lambda params: OPTIMIZERS["AdamW, foreach"](list(params)[:-1])),
                r"got one whose optimizer has groups of \[16\] parameters, here \[15\]",
            ),
            (
                lambda it: setattr(it, "make", lambda params: OPTIMIZERS["AdamW, foreach"](list(params)[::-1])),
                "got one whose optimizer has the parameters in another order",
            ),
        ]
        for change, message in cases:
            other = Training("AdamW, foreach", sim.torch_device)
            change(other)
            other.optimizer = other.make(other.model.parameters())
            again = session_of(other, sim, "optimizer")
            with again:
                before = other.outcome()
                with pytest.raises(ValueError, match=f"expected a snapshot of this session's model and optimizer, {message}"):
                    again.restore(snapshot)
                assert same(other.outcome(), before)
        another = session_of(training, sim, "optimizer")
        with another:
            with pytest.raises(ValueError, match="got one without an optimizer's state"):
                another.restore(modelled)
            steps(another, training, range(2))
            another.restore(snapshot)  # another session's, of the same model
            assert same(training.outcome(), plainly("AdamW, foreach", sim.torch_device, range(2)))
    far = cm.SwapSession("1GiB", device=elsewhere, model=training.model, optimizer=training.optimizer)
    with elsewhere.compute(), far, pytest.raises(ValueError, match="got one of another device"):
        far.restore(snapshot)


def test_when_and_what_it_may_be_called_with(sim: cm.SimDevice, tmp_path: Path) -> None:
    with sim.compute():
        training, session = opened("SGD", sim, "neither")
        for call in (session.snapshot, session.restore):
            with pytest.raises(cm.SessionClosedError, match="expected an open session, got one that is new"):
                call()
        with session:
            with pytest.raises(ValueError, match="the session has taken none; call session"):
                session.restore()
            with pytest.raises(TypeError, match=r"snapshot: expected a Snapshot or None, got 'latest' \(str\)"):
                session.restore("latest")  # type: ignore[arg-type]  # what is tested
            with pytest.raises(ValueError, match=r"run_step\(snapshot=True\): expected a session that knows the optimizer"):
                session.run_step(lambda: None, snapshot=True)
            with session.step():
                with pytest.raises(cm.SessionClosedError, match="in step"):
                    session.snapshot()
                with pytest.raises(cm.SessionClosedError, match="in step"):
                    session.restore()
            snapshot = session.snapshot()
            with pytest.raises(TypeError, match="expected the path of a folder, got 3"):
                snapshot.write(3)  # type: ignore[arg-type]  # what is tested
            with pytest.raises(ValueError, match="expected a name in an existing folder"):
                snapshot.write(tmp_path / "none" / "file.pt")
            snapshot.release()
            for use in (session.restore, lambda: snapshot.write(tmp_path / "file.pt")):
                with pytest.raises(ValueError, match="got one that was released; take another"):
                    use()
        with cm.SwapSession("1GiB", device=sim) as without, pytest.raises(ValueError, match=r"SwapSession\(model=model\)"):
            without.snapshot()
        lazy = nn.LazyLinear(3)
        with cm.SwapSession("1GiB", device=sim, pool=session.pool) as lazily:
            lazily._model_swap = type(lazily._model_swap)(lazy, None, "keep")
            lazily._model_swap.bind(lazily._executor, 1 << 30)
            with pytest.raises(ValueError, match="plain tensors in memory, got UninitializedParameter"):
                lazily.snapshot()
        training.model.get_parameter("0.weight").untyped_storage().resize_(0)
        freed = cm.SwapSession("1GiB", device=sim, model=training.model, pool=session.pool)
        with freed, pytest.raises(ValueError, match=r"got 0\.weight without memory, which somebody else frees"):
            freed.snapshot()
    assert list(tmp_path.iterdir()) == []
    assert session.pool.stats().live_bytes == 0


# --- wherever it is


@pytest.mark.ci
@pytest.mark.parametrize("restored_at", list(Where))
@pytest.mark.parametrize("taken_at", list(Where))
def test_parameters_and_state_wherever_they_are(taken_at: Where, restored_at: Where, device: Device) -> None:
    name = "SGD, momentum"
    with device.compute():
        training, session = opened(name, device, "parameters")
        with session.pool, session:
            steps(session, training, range(2))
            put(session, training, taken_at)
            session.snapshot()
            steps(session, training, (7,))
            put(session, training, restored_at)
            session.restore()
            steps(session, training, (2,))
        assert same(training.outcome(), plainly(name, device.torch_device, range(3)))


def put(session: cm.SwapSession, training: Training, where: Where) -> None:
    """Have a parameter and the state of one be there, as far as that is up to anybody: by what a step would do."""
    swap = session._model_swap._parameters
    assert swap is not None
    entry = next(entry for entry in swap.window.entries if entry.kind == "parameter")
    (_, state), *_ = next(held for held in training.optimizer.state.values() if isinstance(held, SwappedState)).away()
    with torch._C.DisableTorchFunction(), swap._home.entered() as compute:
        for hosted in (entry, state):
            if hosted.where is Where.LEAVING:
                hosted.reclaim()
            if where is not Where.ON_HOST and hosted.where is Where.ON_HOST:
                hosted.swap_in(compute)
            if where in (Where.ON_DEVICE, Where.LEAVING):
                hosted.arrive(compute)
            if where is Where.LEAVING:
                hosted.host_is_current = False
                hosted.swap_out()
                swap._home.budget.reclaim.add(hosted)
            if where is Where.ON_HOST and hosted.where is not where:
                hosted.arrive(compute)
                hosted.host_is_current = False
                hosted.swap_out()
                hosted.reclaim()
            assert hosted.where is where


def test_a_graph_that_saved_a_parameter_raises_eagers_error_after_a_restore(device: Device) -> None:
    with device.compute():
        training = Training("SGD", device.torch_device)
        with session_of(training, device, "neither") as session:
            session.snapshot()
            loss = training.model(torch.randn(8, 128, device=device.torch_device)).sum()
            session.restore()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
