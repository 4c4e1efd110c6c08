"""Bytes that the library trusts without a check, and the writes that break this trust: the table of docs/guarantees.md.

Each test writes where a row of the table assumes no write. The reference is the same program in plain PyTorch, on plain tensors
of the same device: its bits, or eager's error. Rows that tests in other files break are named in the table alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.plan.rule import Limits
from chameleon_mm.state import optimizer_swap as state_swapping
from chameleon_mm.swap.executor import Executor
from chameleon_mm.swap.handles import KeptTensor, SavedBytes, SwappedView
from chameleon_mm.swap.host_copy import State
from chameleon_mm.swap.recipe import Recipe, Recomputed
from chameleon_mm.swap.slot import Slot
from tests._mixes import totals_of
from tests._programs import on_a_thread, same, swapping_executor
from tests.observed import SimLifetimeError
from tests.test_optimizer_state import OPTIMIZERS, Counting, Training, hosted, session_of
from tests.test_recompute_exact import dropping, grads, leaf, outcome

SIDE = 96
REFUSED = "modified by an inplace operation"

Write = Callable[[Tensor], object]
Settle = Callable[[], object]


def _nothing() -> None:
    pass


def result(program: Callable[[torch.device, Settle], list[Tensor]], at: torch.device, settle: Settle = _nothing) -> Any:
    """Return the bits of a program's results, or the text of its error. `settle` waits for copies."""
    torch.manual_seed(0)
    try:
        return [t.detach().cpu().clone() for t in program(at, settle)]
    except RuntimeError as error:
        return REFUSED if REFUSED in str(error) else str(error)


def swapped(program: Callable[[torch.device, Settle], list[Tensor]], device: Device) -> Any:
    """The same where every saved storage goes to the host."""
    pool = cm.PinnedPool("8MiB", device=device)
    hooks = cm.save_on_cpu(device=device, pool=pool, min_bytes=0)
    with device.compute(), hooks:
        return result(program, device.torch_device, device.synchronize)


def alike(got: Any, expected: Any) -> bool:
    if isinstance(got, str) or isinstance(expected, str):
        return bool(got is expected or (isinstance(got, str) and isinstance(expected, str) and got == expected))
    return same(got, expected)


# --- forms already copied out: the counter of each save is compared at its use


def _by_operator(y: Tensor) -> None:
    with torch.no_grad():
        y.mul_(3)


def _by_view(y: Tensor) -> None:
    with torch.no_grad():
        y[1:].t().add_(1)


def _by_out(y: Tensor) -> None:
    with torch.no_grad():
        torch.add(y, 1, out=y)


def _by_thread(y: Tensor) -> None:
    on_a_thread(lambda: _by_operator(y))


SEEN: dict[str, Write] = {"operator": _by_operator, "view": _by_view, "out=": _by_out, "thread": _by_thread}


def after_the_copy(write: Write, *, in_backward: bool = False) -> Callable[[torch.device, Settle], list[Tensor]]:
    """Write to a saved tensor that the model holds, once its copy is on the host."""

    def program(at: torch.device, settle: Settle) -> list[Tensor]:
        x = torch.randn(SIDE, SIDE, device=at, requires_grad=True)
        y = x * 2
        out = y.sin()
        loss = out.exp().cos().sum()
        settle()
        if in_backward:

            def hook(gradient: Tensor) -> None:
                write(y)

            out.register_hook(hook)
        else:
            write(y)
        loss.backward()
        assert x.grad is not None
        return [x.grad, y]

    return program


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("way", SEEN)
def test_a_write_after_the_copy_is_refused_as_eager_refuses_it(way: str, in_backward: bool, device: Device) -> None:
    program = after_the_copy(SEEN[way], in_backward=in_backward)
    assert result(program, device.torch_device) == REFUSED
    assert swapped(program, device) == REFUSED


def test_without_the_counter_a_write_after_the_copy_passes(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwappedView, "check_version", lambda self: None)
    assert swapped(after_the_copy(_by_operator), device) != REFUSED


# --- a device copy that the model holds is used as it is: it is what eager uses


def _by_pointer(y: Tensor) -> None:
    if y.device.type == "cpu":
        ctypes.memset(y.data_ptr(), 0, y.nbytes // 2)
    else:
        y.data.zero_()


def _by_set(y: Tensor) -> None:
    torch.empty(0, device=y.device).set_(y.untyped_storage(), 0, y.shape, y.stride()).mul_(3)


def _by_data_on_a_thread(y: Tensor) -> None:
    on_a_thread(lambda: y.data.mul_(3))


UNSEEN: dict[str, Write] = {
    ".data": lambda y: y.data.mul_(3),
    "set_": _by_set,
    "pointer": _by_pointer,
    "thread": _by_data_on_a_thread,
}


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("way", UNSEEN)
def test_what_the_model_holds_is_used_itself_with_what_was_written(way: str, in_backward: bool, device: Device) -> None:
    program = after_the_copy(UNSEEN[way], in_backward=in_backward)
    expected = result(program, device.torch_device)
    assert not isinstance(expected, str)
    assert alike(swapped(program, device), expected)


def test_memory_that_goes_under_the_model_goes_red(sim: cm.SimDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    program = after_the_copy(UNSEEN[".data"])
    monkeypatch.setattr(Slot, "is_alone", lambda self: True)
    with pytest.raises(SimLifetimeError, match="while its storage has no memory"):
        swapped(program, sim)


# --- prefetched storages, and copies that another use has had


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("written", [False, True])
def test_a_write_after_the_prefetch(written: bool, checked: bool, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor reaches the memory. Its counter may still move, by an alias without memory, and eager refuses the use."""
    if not checked:
        monkeypatch.setattr(SavedBytes, "check", lambda self: None)
    pool, limits = cm.PinnedPool("8MiB", device=device), Limits(ahead_bytes=0, leaving_bytes=0)
    executor = swapping_executor(device, pool, limits, min_bytes=1, pack_below_bytes=0)
    with device.compute():
        y = torch.randn(SIDE, SIDE, device=device.torch_device)
        expected, counter = y.clone(), y.detach()
        handle = executor.save(y)
        assert isinstance(handle, SwappedView)
        counter.data = torch.empty(0, device=device.torch_device)
        del y
        torch.ones(1, device=device.torch_device, requires_grad=True).exp()
        assert isinstance(executor.save(torch.nn.Parameter(torch.ones(1, device=device.torch_device))), KeptTensor)
        executor.end_step(completed=False)
        saved = handle.claim.saved
        assert saved.state is State.ON_HOST
        executor.ins.prefetch(saved, executor.streams.current())
        if written:
            counter.add_(1)
        if written and checked:
            with pytest.raises(RuntimeError, match=REFUSED):
                executor.use(handle)
        else:
            assert torch.equal(executor.use(handle), expected)


class WritesWhatItSaved(torch.autograd.Function):
    """Writes in backward to a tensor that another node has saved, too."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return y * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        y.mul_(2)
        return gradients[0]


def written_by_a_node(at: torch.device, settle: Settle) -> list[Tensor]:
    x = torch.randn(SIDE, SIDE, device=at, requires_grad=True)
    y = x * 2
    first = y.sin()
    loss = first.sum() + WritesWhatItSaved.apply(y).exp().sum()  # type: ignore[no-untyped-call]  # torch annotates no apply
    del y
    settle()
    loss.backward()
    assert x.grad is not None
    return [x.grad]


def test_a_node_that_writes_a_copy_is_seen_by_the_next_use(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert result(written_by_a_node, device.torch_device) == REFUSED
    assert swapped(written_by_a_node, device) == REFUSED
    use = Executor.use
    monkeypatch.setattr(Executor, "use", lambda self, handle: use(self, handle).data)  # with a counter of its own
    assert swapped(written_by_a_node, device) != REFUSED


# --- kept products: what a replay makes besides


def two_results() -> list[Tensor]:
    """Autograd saves both results of an operator: the values left, and the mask."""
    x = leaf()
    left, kept = torch.native_dropout(x * 2, 0.5, True)
    loss = left.sin().exp()
    del left, kept
    return grads(loss.sum(), x)


@pytest.mark.usefixtures("each_watch")
def test_what_a_replay_makes_besides_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, session = outcome(two_results, 2), dropping()
    assert outcome(two_results, 2, session) == expected
    totals = totals_of(session)
    assert 0 < totals.recomputations < totals.recomputed
    replay = Recipe.replay

    def spoiled(self: Recipe, storages: Any) -> Recomputed:
        recomputed = replay(self, storages)
        for _, storage in recomputed.siblings:
            if storage is not recomputed.storage:
                torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
        return recomputed

    monkeypatch.setattr(Recipe, "replay", spoiled)
    found = outcome(two_results, 2, dropping())
    assert isinstance(found, str)
    assert found.startswith("RecomputeMismatch")


# --- optimizer state at rest


def meddled(training: Training, step: Callable[[int], None], hold: Callable[[Tensor], Any]) -> None:
    """Write to state between steps by something that was taken from it after an earlier step."""
    for number in range(4):
        step(number)
        if number == 0:
            held = hold(training.optimizer.state[next(training.model.parameters())]["exp_avg"])
        elif number == 2:
            held.fill_(0)


HOLD: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda t: t.view(-1)[5:],
    "data": lambda t: t.data,
    "tensor": lambda t: t,
}


def state_written(how: str, device: Device) -> bool:
    """True if a session gives plain PyTorch's bits."""
    plain = Training(OPTIMIZERS["AdamW"], device.torch_device)
    meddled(plain, plain.step, HOLD[how])
    with device.compute():
        training = Training(OPTIMIZERS["AdamW"], device.torch_device)
        session = session_of(training, device, plans=False)

        def step(number: int) -> None:
            with session.step():
                training.step(number)

        with session.pool, session:
            meddled(training, step, HOLD[how])
            assert hosted(training.optimizer)
        return same(training.outcome(), plain.outcome())


@pytest.mark.parametrize("how", HOLD)
def test_who_holds_state_at_rest_may_write_it(how: str, device: Device) -> None:
    assert state_written(how, device)


def counting(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return Counting(params)


def test_a_step_that_counts_for_all_parameters_is_not_split(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def exact() -> bool:
        plain = Training(counting, device.torch_device)
        with device.compute():
            training = Training(counting, device.torch_device)
            session = session_of(training, device, plans=False)
            with session.pool, session:
                for number in range(2):
                    plain.step(number)
                    with session.step():
                        training.step(number)
                    assert hosted(training.optimizer)
            return same(training.outcome(), plain.outcome())

    assert exact()
    monkeypatch.setattr(state_swapping, "is_splittable", lambda optimizer: True)
    assert not exact()
