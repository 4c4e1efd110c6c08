"""Storages shared by several saved tensors without a shared version counter: each comes back as it was when it was saved.

The reference is plain PyTorch: the same program on plain tensors, with none of our code and no dispatch mode around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.swap.calling_thread import this_thread
from chameleon_mm.swap.handles import SavedBytes
from tests._programs import assert_same, same

pytestmark = pytest.mark.usefixtures("no_gc")

ROWS, COLUMNS = 16, 32

Program = Callable[[], list[Tensor]]
"""Program that builds its tensors from a seed, runs forward under the installed hooks, and returns the loss and the leaves."""


def _leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def unsafe_chunks_written_in_turn() -> list[Tensor]:
    x = _leaf(ROWS, COLUMNS)
    parts: list[Any] = [(part.tanh_() * 1.0).sum() for part in (x * 2).unsafe_chunk(4, 1)]
    return [torch.stack(parts).sum(), x]


def slice_written_through_data() -> list[Tensor]:
    x = _leaf(ROWS, COLUMNS)
    y = x * 2
    half = ROWS // 2
    loss = (y[:half] * y[:half]).sum().tanh().sin()
    y.data[half:].fill_(7)
    return [loss + (y[half:] * y[half:]).sum(), x]


def data_saved_and_written() -> list[Tensor]:
    x, w = _leaf(ROWS, COLUMNS), _leaf(ROWS, COLUMNS)
    y = (x * 2).detach()
    first, second = y.data[: ROWS // 2], y.data[ROWS // 2 :]
    loss = (w[: ROWS // 2] * first).sum().tanh().sin()
    second.mul_(3)
    return [loss + (w[ROWS // 2 :] * second).sum(), w]


def set_over_one_storage() -> list[Tensor]:
    w = _leaf(ROWS, COLUMNS)
    whole = torch.randn(2 * ROWS, COLUMNS)
    one, other = (
        torch.empty(0).set_(whole.untyped_storage(), n * ROWS * COLUMNS, (ROWS, COLUMNS), (COLUMNS, 1)) for n in range(2)
    )
    del whole
    one.add_(1)
    loss = (w * one).sum().tanh().sin()
    other.add_(1)
    return [loss + (w * other).sum(), w]


class FillsItsSlice(torch.autograd.Function):
    """Function that saves one slice of a buffer, which it fills without moving the version counter, as a user's kernel does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor, number: int) -> Tensor:
        buffer[number].data.copy_(x * x)
        ctx.save_for_backward(buffer[number])
        return x * 0.5

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (squares,) = ctx.saved_tensors
        return grad * squares, None, None


def buffer_filled_slice_by_slice() -> list[Tensor]:
    x = _leaf(ROWS, COLUMNS)
    buffer, y = torch.zeros(3, ROWS, COLUMNS), x
    for number in range(len(buffer)):
        y = FillsItsSlice.apply(y, buffer, number).sin()  # type: ignore[no-untyped-call]  # torch annotates no apply
    return [y.sum(), x]


def buffer_of_many_slices() -> list[Tensor]:
    """Save so many slices that the copy is begun again until it waits for the storage's last use."""
    x = _leaf(4, COLUMNS)
    buffer, y = torch.zeros(24, 4, COLUMNS), x
    for number in range(len(buffer)):
        y = FillsItsSlice.apply(y, buffer, number).sin()  # type: ignore[no-untyped-call]  # as above
    return [y.sum(), x]


def half_written_by_the_operator_that_saves_the_other() -> list[Tensor]:
    """It saves the other, then a clone of the one, then writes the one and saves it: the first copy may begin in between."""
    x = _leaf(ROWS, COLUMNS)
    a, b = (x * 2).unsafe_chunk(2, 1)
    return [a.hypot_(b).sum(), x]


class WritesBetweenOperators(torch.autograd.Function):
    """Save the tensor written after the operator that it called, which is the last one that autograd has counted."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, other: Tensor) -> Tensor:
        with torch.enable_grad():
            (other.detach().requires_grad_() * 2).sin()
        a.mul_(3)
        ctx.mark_dirty(a)
        ctx.save_for_backward(a)
        return a

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (a,) = ctx.saved_tensors
        return grad * a, None


class WritesUnseenBetweenOperators(WritesBetweenOperators):
    """Variant that autograd does not see: no version counter moves."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, other: Tensor) -> Tensor:
        with torch.enable_grad():
            (other.detach().requires_grad_() * 2).sin()
        a.data.mul_(3)
        ctx.save_for_backward(a)
        return a * 1


def _one_half_saved_the_other_given_to(
    function: type[WritesBetweenOperators], x: Tensor, halves: Sequence[Tensor]
) -> list[Tensor]:
    a, b = halves
    saved = b.sin().sum()
    out: Tensor = function.apply(a, torch.ones(3))  # type: ignore[no-untyped-call]  # as above
    return [saved + out.sum(), x]


def other_half_saved_before_it_is_written() -> list[Tensor]:
    x = _leaf(ROWS, COLUMNS)
    return _one_half_saved_the_other_given_to(WritesBetweenOperators, x, (x * 2).unsafe_chunk(2, 1))


def half_written_unseen_by_a_function_that_runs_operators() -> list[Tensor]:
    x = _leaf(ROWS, COLUMNS)
    return _one_half_saved_the_other_given_to(WritesUnseenBetweenOperators, x, (x * 2).chunk(2, 1))


PROGRAMS: dict[str, Program] = {
    "unsafe chunks": unsafe_chunks_written_in_turn,
    "slice through .data": slice_written_through_data,
    ".data": data_saved_and_written,
    "set_": set_over_one_storage,
    "buffer": buffer_filled_slice_by_slice,
    "large buffer": buffer_of_many_slices,
    "in place, beside the other": half_written_by_the_operator_that_saves_the_other,
    "saved, then written between": other_half_saved_before_it_is_written,
    "written unseen between operators": half_written_unseen_by_a_function_that_runs_operators,
}


def run(
    program: Program, hooks: Callable[[], AbstractContextManager[Any]], copied: Callable[[], None] = lambda: None
) -> list[Tensor]:
    """Return loss and gradients. `copied` waits for copies: later uses read the copies, not their sources."""
    torch.manual_seed(0)
    with hooks():
        loss, *leaves = program()
    copied()
    loss.backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_save_on_cpu_has_eagers_bits(name: str, sim: cm.SimDevice) -> None:
    expected = run(PROGRAMS[name], nullcontext)
    with cm.PinnedPool("64MiB", device=sim) as pool:
        with sim.compute():
            got = run(PROGRAMS[name], partial(cm.save_on_cpu, device=sim, min_bytes=0, pool=pool), sim.synchronize)
            sim.synchronize()
        assert_same(expected, got)
        assert pool.stats().num_live == 0


@pytest.mark.parametrize("plans", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_step_of_a_session_has_eagers_bits(name: str, plans: bool, sim: cm.SimDevice) -> None:
    expected = run(PROGRAMS[name], nullcontext)
    with sim.compute(), cm.SwapSession("64MiB", "64MiB", sim, 0, plans=plans) as session:
        for _ in range(4):
            with session.step():
                got = run(PROGRAMS[name], nullcontext, sim.synchronize)
            assert_same(expected, got)


def _red(sim: cm.SimDevice) -> list[str]:
    """The programs that do not have eager's bits now."""
    red = []
    for name, program in PROGRAMS.items():
        expected = run(program, nullcontext)
        with cm.PinnedPool("64MiB", device=sim) as pool, sim.compute():
            got = run(program, partial(cm.save_on_cpu, device=sim, min_bytes=0, pool=pool), sim.synchronize)
            if not same(expected, got):
                red.append(name)
    return red


def test_without_the_rule_of_counters_it_goes_red(sim: cm.SimDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: compares version numbers of different counters."""

    def by_number(self: SavedBytes, later: SavedBytes, *, same_bytes: bool = False) -> bool:
        return self.expected == later.expected and not self.moved

    monkeypatch.setattr(SavedBytes, "copy_includes", by_number)
    red = _red(sim)
    assert {"unsafe chunks", "set_", "buffer"} <= set(red)


def test_a_thread_has_a_number_that_no_earlier_one_had() -> None:
    """The system's thread numbers are reused: an operator of an ended thread would be one of its successor's."""
    numbers: list[int] = []
    for _ in range(20):
        thread = Thread(target=lambda: numbers.append(this_thread.number))
        thread.start()
        thread.join()
    assert len(set(numbers)) == 20


def test_without_the_rule_of_bytes_it_goes_red(sim: cm.SimDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: takes a copy of other bytes under the same counter for one of these."""
    monkeypatch.setattr(SavedBytes, "covers", lambda self, other: True)
    assert {"slice through .data", "buffer"} <= set(_red(sim))


# --- what may be shared is shared


def bytes_out(sim: cm.SimDevice, forward: Callable[[Tensor], Tensor]) -> int:
    """Return the bytes that `save_on_cpu` copies out for the tensors that `forward` makes of a leaf."""
    with cm.PinnedPool("64MiB", device=sim) as pool, sim.compute():
        hooks = cm.save_on_cpu(device=sim, min_bytes=0, pool=pool)
        x = _leaf(ROWS, COLUMNS)
        with hooks:
            loss = forward(x).sum()
        loss.backward()
        sim.synchronize()
        return hooks._executor.metrics.totals.bytes_swapped_out


WHOLE = 2 * ROWS * COLUMNS * 4
"""Bytes of a product that is saved in two halves."""


def test_what_one_operator_saves_of_a_storage_is_one_copy(sim: cm.SimDevice) -> None:
    w = nn.Parameter(torch.randn(COLUMNS, 2 * COLUMNS))

    def both_in_one(x: Tensor) -> Tensor:
        a, b = (x @ w).chunk(2, 1)
        return a * b

    def gated(x: Tensor) -> Tensor:
        gate, up = (x @ w).chunk(2, 1)
        return gate.sin() * up

    def gated_in_turn(x: Tensor) -> Tensor:
        gate, up = (x @ w).chunk(2, 1)
        return up * gate.sin()

    assert bytes_out(sim, both_in_one) == WHOLE
    # The other storage is sin's result. As only a part of the product's was saved, its copy waits for the next hook.
    assert bytes_out(sim, gated) == bytes_out(sim, gated_in_turn) == WHOLE + WHOLE // 2


def test_a_part_that_comes_late_has_the_storage_copied_again(sim: cm.SimDevice) -> None:
    """Under one counter, a part written before cannot be told from one written since."""
    w = nn.Parameter(torch.randn(COLUMNS, 2 * COLUMNS))

    def late_half(x: Tensor) -> Tensor:
        a, b = (x @ w).chunk(2, 1)
        return a.sin().exp().tanh() * b.cos()

    assert bytes_out(sim, late_half) == 2 * WHOLE + 3 * WHOLE // 2  # the product twice; exp's result, tanh's, cos's


def test_a_loop_over_slices_does_not_copy_the_storage_for_each(sim: cm.SimDevice) -> None:
    w = nn.Parameter(torch.randn(COLUMNS, COLUMNS))
    slices = 64
    expected: list[Tensor] | None = None
    with sim.compute(), cm.SwapSession("64MiB", "64MiB", sim, 0) as session:
        for moved_at_most in (6, 2):
            torch.manual_seed(0)
            before = session.report().bytes_swapped_out
            with session.step():
                loss = torch.zeros(())
                for part in torch.randn(slices, ROWS, COLUMNS):
                    loss = loss + (part @ w).sin().sum()
                loss.backward()
            assert w.grad is not None
            assert expected is None or torch.equal(w.grad, expected[0])
            expected, w.grad = [w.grad], None
            moved = session.report().bytes_swapped_out - before
            assert moved <= moved_at_most * slices * ROWS * COLUMNS * 4


def test_a_plan_moves_a_storage_once_that_is_saved_in_parts(sim: cm.SimDevice) -> None:
    """The recorded step copies a late part again; the plan begins the copy when all of it was saved."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(64, 192) for _ in range(4)])

    def forward(x: Tensor) -> Tensor:
        for layer in model:
            q, k, v = layer(x).chunk(3, 1)
            x = q.sin() + k.cos() + v.tanh() * 0.5
        return x.sum()

    def step() -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        loss = forward(torch.randn(256, 64))
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = step()
    model.zero_grad()
    storage = 256 * 192 * 4
    moved = []
    with sim.compute(), cm.SwapSession("1200KiB", "64MiB", sim, 0, model=model) as session:
        for _ in range(6):
            before = session.report().bytes_swapped_out
            with session.step():
                got = step()
            assert_same(expected, got)
            moved.append(session.report().bytes_swapped_out - before)
    report = session.report()
    assert report.to_dict()["plans"] >= 1
    saved_once = 4 * (storage + 2 * 256 * 64 * 4)
    assert 0 < moved[-1] <= saved_once
