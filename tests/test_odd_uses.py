"""Odd uses of sessions and hooks: each has a defined result, bitwise exact, or an error that names the fix.

threads that leave what another entered, or never leave; generators that are dropped inside; nesting, of one's own and with
other people's hooks; tensors of two devices; checkpoints; torch.func
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import chameleon_mm as cm
from chameleon_mm.device import Device
from tests._fakes import Unwatched
from tests._programs import deep, gradient, leaf, on_a_thread, opened

pytestmark = pytest.mark.usefixtures("no_gc")


def swapping(device: Device) -> cm.save_on_cpu:
    return cm.save_on_cpu(pool=cm.PinnedPool("8MiB", device=device), min_bytes=0)


def hooks_act(pool: cm.PinnedPool, x: Tensor) -> bool:
    """True if a tensor saved now, on this thread, moves to `pool`."""
    before = pool.stats().num_live
    out = deep(x)
    after = pool.stats().num_live
    del out
    return after > before


# --- threads


def test_hooks_left_on_a_thread_that_never_entered_them(device: Device) -> None:
    manager, others = swapping(device), swapping(device)
    x = leaf(device)
    with device.compute(), manager:

        def leaves() -> None:
            with others:
                with pytest.raises(RuntimeError, match="got other, which is not: hooks are each thread's own; leave it where"):
                    manager.__exit__(None, None, None)
                assert hooks_act(others.pool, x)

        on_a_thread(leaves)
        assert hooks_act(manager.pool, x)
    with device.compute():
        assert not hooks_act(manager.pool, x)
    with pytest.raises(RuntimeError, match="expected to be left on a thread that is inside"):
        manager.__exit__(None, None, None)


def test_a_session_left_on_another_thread(device: Device) -> None:
    session, others = opened(device), swapping(device)
    x = leaf(device)
    expected = gradient(device, x)
    with session:

        def leaves() -> None:
            with others:
                with pytest.raises(cm.SessionClosedError, match=r"entered it \(MainThread\), got other: .*; leave it there"):
                    session.__exit__(None, None, None)
                assert hooks_act(others.pool, x)

        on_a_thread(leaves)
        with session.step():
            assert torch.equal(torch.autograd.grad(deep(x).sum(), x)[0], expected)
    assert session.report().steps == 1
    assert session.report().bytes_swapped_out > 0


def test_a_thread_that_ends_without_leaving_a_session() -> None:
    device = Unwatched()
    session = opened(device)
    x = leaf(device)
    expected = gradient(device, x)
    made: list[Tensor] = []

    def enters() -> None:
        session.__enter__()
        made.append(deep(x).sum())

    on_a_thread(enters)
    assert torch.equal(torch.autograd.grad(made.pop(), x)[0], expected)
    with swapping(device) as _, session.step():  # still open for every holder
        pass
    session.__exit__(None, None, None)  # its hooks ended with the thread: nothing is taken from this one
    assert session.report().steps == 1
    assert session.pool.stats().num_live == 0


def test_a_thread_that_ends_without_leaving_hooks(device: Device) -> None:
    manager = swapping(device)
    x = leaf(device)
    expected = gradient(device, x)
    made: list[Tensor] = []

    def enters() -> None:
        manager.__enter__()
        with device.compute():
            made.append(deep(x).sum())

    on_a_thread(enters)
    with device.compute():
        assert not hooks_act(manager.pool, x)
        assert torch.equal(torch.autograd.grad(made.pop(), x)[0], expected)
        with manager:
            assert hooks_act(manager.pool, x)
        assert not hooks_act(manager.pool, x)
    assert manager.pool.stats().num_live == 0


def test_a_step_on_another_thread_is_exact_and_swaps_what_that_thread_may(device: Device) -> None:
    """Hooks are on the thread that entered the session: elsewhere a step is a step, in which nothing is saved for us."""
    session = opened(device)
    x = leaf(device)
    expected = gradient(device, x)

    def steps() -> None:
        with device.compute(), session.step():
            assert not hooks_act(session.pool, x)
            assert torch.equal(torch.autograd.grad(deep(x).sum(), x)[0], expected)

    with session:
        on_a_thread(steps)
        with session.step():
            assert hooks_act(session.pool, x)
    assert session.report().steps == 2


# --- generators


def test_a_generator_that_is_dropped_inside_a_step(device: Device) -> None:
    session = opened(device)
    x = leaf(device)

    def paused() -> Iterator[Tensor]:
        with session, session.step():
            yield deep(x)

    generator = paused()
    out = next(generator)
    assert session.pool.stats().num_live > 0
    del generator, out
    with device.compute():
        assert not hooks_act(session.pool, x)
    assert session.pool.stats().num_live == 0
    assert session.report().steps == 0
    with pytest.raises(cm.SessionClosedError, match="got one that is closed"):
        session.__enter__()


@pytest.mark.parametrize("at", [0, 1], ids=["recorded", "planned"])
def test_an_exception_that_ends_a_session_before_the_generator_of_its_steps(at: int, device: Device) -> None:
    """The loop's body raises, and the generator that holds the step is freed only after the session was left.

    Torch stores the mode flag when a recorder's dispatch mode is entered, and restores it when the mode is left.
    """
    before = is_in_torch_dispatch_mode()
    session = opened(device)
    x = leaf(device)

    def steps() -> Generator[cm.SwapSession]:
        while True:
            with session.step() as step:
                yield step

    generator = steps()
    with pytest.raises(RuntimeError, match="the user's own") as caught, session:
        for number, _ in enumerate(generator):
            deep(x).sum().backward()
            if number == at:
                raise RuntimeError("the user's own")
    assert caught.value.__context__ is None  # the session's end had no trouble of its own
    assert session.report().steps == at
    generator.close()
    del caught
    assert is_in_torch_dispatch_mode() == before
    assert session.report().steps == at
    assert session.pool.stats().num_live == 0


def test_two_generators_that_leave_in_the_order_they_entered(device: Device) -> None:
    """Torch removes the innermost hooks, regardless of which generator leaves. Results are exact and no hooks remain."""
    managers = swapping(device), swapping(device)
    x = leaf(device)
    expected = gradient(device, x)

    def inside(manager: cm.save_on_cpu) -> Generator[Tensor]:
        with manager:
            yield deep(x).sum()
            yield deep(x).sum()

    with device.compute():
        first, second = inside(managers[0]), inside(managers[1])
        outs = [next(first), next(second), next(first)]
        first.close()
        outs.append(next(second))
        second.close()
        assert all(torch.equal(torch.autograd.grad(out, x)[0], expected) for out in outs)
        outs.clear()
        assert not any(hooks_act(manager.pool, x) for manager in managers)
    assert [manager.pool.stats().num_live for manager in managers] == [0, 0]


# --- other people's hooks


def as_numpy(t: Tensor) -> Any:
    return t.detach().cpu().numpy(), t.device


def from_numpy(packed: Any) -> Tensor:
    array, where = packed
    return torch.from_numpy(array).to(where)


OTHERS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "identity": lambda: saved_tensors_hooks(lambda t: t.detach(), lambda t: t),
    "to numpy": lambda: saved_tensors_hooks(as_numpy, from_numpy),
    "another tensor": lambda: saved_tensors_hooks(lambda t: t.detach() * 2, lambda t: t),
    "torch's save_on_cpu": torch.autograd.graph.save_on_cpu,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_hooks_inside_a_session_act_on_what_they_cover(name: str, device: Device) -> None:
    """The innermost hooks act, and get back their own result. Those of "another tensor" return a wrong one on purpose."""
    others = OTHERS[name]
    x = leaf(device)

    def program(t: Tensor) -> Tensor:
        t = deep(t)
        with others():
            t = deep(t)
        return deep(t)

    expected = gradient(device, x, program)
    assert (name == "another tensor") is not torch.equal(expected, gradient(device, x, lambda t: deep(deep(deep(t)))))
    session = opened(device)
    with session:
        for _ in range(2):
            with session.step():
                assert torch.equal(torch.autograd.grad(program(x).sum(), x)[0], expected)
    assert session.report().bytes_swapped_in > 0
    assert session.pool.stats().num_live == 0


@pytest.mark.parametrize("name", OTHERS)
def test_a_session_inside_other_hooks_acts_on_what_it_covers(name: str, device: Device) -> None:
    others = OTHERS[name]
    x = leaf(device)

    def program(t: Tensor, inner: AbstractContextManager[object]) -> Tensor:
        with others():
            t = deep(t)
            with inner:
                t = deep(t)
            return deep(t).sum()

    with device.compute():
        (expected,) = torch.autograd.grad(program(x, saved_tensors_hooks(lambda t: t.detach(), lambda t: t)), x)
        manager = swapping(device)
        out = program(x, manager)
        assert manager.pool.stats().num_live > 0
        assert torch.equal(torch.autograd.grad(out, x)[0], expected)
        del out
    assert manager.pool.stats().num_live == 0


def test_where_hooks_are_disabled_a_session_does_not_begin(device: Device) -> None:
    session, manager = opened(device), swapping(device)
    x = leaf(device)
    with disable_saved_tensors_hooks("not in here"):
        with pytest.raises(RuntimeError, match="not in here"), session:
            raise AssertionError("the session began")
        with pytest.raises(RuntimeError, match="not in here"), manager:
            raise AssertionError("hooks were installed")
    expected = gradient(device, x)
    with session, session.step():  # later it does
        assert torch.equal(torch.autograd.grad(deep(x).sum(), x)[0], expected)
    with device.compute(), manager:
        assert hooks_act(manager.pool, x)
    assert session.report().bytes_swapped_in > 0


def test_hooks_cannot_be_disabled_inside_a_session_and_it_goes_on(device: Device) -> None:
    session = opened(device)
    x = leaf(device)
    expected = gradient(device, x)
    with session, session.step():
        with pytest.raises(RuntimeError, match="not in here"), disable_saved_tensors_hooks("not in here"):
            raise AssertionError("hooks were disabled")
        assert torch.equal(torch.autograd.grad(deep(x).sum(), x)[0], expected)
    assert session.report().bytes_swapped_in > 0


# --- checkpoints


CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "selective": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    ),
}


def dense(x: Tensor, weight: Tensor) -> Tensor:
    return torch.dropout(deep(x @ weight), 0.1, train=True)


def program_with(kind: str, inner: Callable[[], AbstractContextManager[object]]) -> Callable[[Tensor, Tensor], Tensor]:
    """Two checkpoints, one inside another. Hooks may be entered within the recomputed function."""

    def again(x: Tensor, weight: Tensor) -> Tensor:
        with inner():
            return dense(x, weight)

    def outer(x: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = CHECKPOINTS[kind](again, dense(x, weight), weight)
        return y

    def program(x: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = CHECKPOINTS[kind](again, deep(x), weight)
        if kind != "selective":  # which torch refuses to nest
            y = CHECKPOINTS[kind](outer, y, weight)
        return deep(y).sum()

    return program


@pytest.mark.ci
@pytest.mark.parametrize("early_stop", [True, False], ids=["early stop", "to the end"])
@pytest.mark.parametrize("where", ["around", "inside", "both"])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpoints_around_and_inside(kind: str, where: str, early_stop: bool, device: Device) -> None:
    manager, inner = swapping(device), swapping(device)
    leaves = (leaf(device), leaf(device))

    def gradients(around: AbstractContextManager[object], inside: Callable[[], AbstractContextManager[object]]) -> list[Tensor]:
        torch.manual_seed(8)
        with device.compute(), set_checkpoint_early_stop(early_stop):
            with around:
                out = program_with(kind, inside)(*leaves)
            return [*torch.autograd.grad(out, leaves)] if kind != "reentrant" else by_backward(out)

    def by_backward(out: Tensor) -> list[Tensor]:
        """The reentrant kind refuses `autograd.grad`."""
        out.backward()
        found = []
        for t in leaves:
            assert t.grad is not None
            found.append(t.grad)
            t.grad = None
        return found

    expected = gradients(nullcontext(), nullcontext)
    got = gradients(manager if where != "inside" else nullcontext(), (lambda: inner) if where != "around" else nullcontext)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert (manager.pool.stats().num_live, inner.pool.stats().num_live) == (0, 0)
    assert (manager.pool.stats().peak_live_bytes > 0) is (where != "inside")


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_session_inside_a_checkpoint_is_computed_again(kind: str, device: Device) -> None:
    """Each recomputation enters a new session, so a function that makes its own session may be computed again."""
    x, weight = leaf(device), leaf(device)

    def swapped(t: Tensor, weight: Tensor) -> Tensor:
        with opened(device) as session, session.step():
            return deep(t @ weight)

    def gradients(function: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor | None, Tensor | None]:
        with device.compute():
            x.grad = weight.grad = None
            CHECKPOINTS[kind](function, x, weight).sum().backward()
            return x.grad, weight.grad

    expected = gradients(lambda t, w: deep(t @ w))
    got = gradients(swapped)
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(expected, got, strict=True))


# --- two devices


class HalfOfThem(cm.SimDevice):
    """Device that owns single-precision tensors; all others stand for tensors of another device."""

    def owns(self, tensor: Tensor) -> bool:
        return tensor.dtype is torch.float32 and super().owns(tensor)


def test_a_model_on_two_simulated_devices() -> None:
    device = HalfOfThem()
    first = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32))
    second = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16)).double()

    def gradients() -> list[Tensor]:
        x = torch.linspace(-1, 1, 64).view(4, 16)
        (second(first(x).double()).float() - x).square().mean().backward()
        found = [p.grad for p in (*first.parameters(), *second.parameters())]
        first.zero_grad()
        second.zero_grad()
        return [grad for grad in found if grad is not None]

    with device.compute():
        expected = gradients()
    session = opened(device)
    with session:
        for _ in range(2):
            with session.step():
                assert all(torch.equal(a, b) for a, b in zip(expected, gradients(), strict=True))
    report = session.report()
    assert report.kept_by_reason["other_device"] > 0
    assert report.bytes_swapped_in > 0
    assert session.pool.stats().num_live == 0


@pytest.mark.gpu
def test_a_model_on_a_gpu_and_the_cpu() -> None:
    device = cm.CudaDevice()
    x = torch.randn(64, 64, requires_grad=True)

    def program(t: Tensor) -> Tensor:
        return deep(deep(deep(t).to(device.torch_device)).cpu())

    expected = gradient(device, x, program)
    session = opened(device)
    with session:
        for _ in range(2):
            with session.step():
                assert torch.equal(torch.autograd.grad(program(x).sum(), x)[0], expected)
    report = session.report()
    assert report.kept_by_reason["other_device"] > 0
    assert report.bytes_swapped_in > 0
    assert session.pool.stats().num_live == 0


# --- torch.func


REFUSED: dict[str, Callable[[Tensor], object]] = {
    "grad": torch.func.grad(lambda t: deep(t).sum()),
    "vjp": lambda t: torch.func.vjp(deep, t)[1](t),
    "jacrev": torch.func.jacrev(lambda t: deep(t[0, :4])),
    "hessian": torch.func.hessian(lambda t: deep(t[0, :4]).sum()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_transforms_that_refuse_hooks_say_so_in_torchs_words_and_leave_the_session_usable(name: str, device: Device) -> None:
    x = leaf(device)
    with device.compute(), saved_tensors_hooks(lambda t: t.detach(), lambda t: t), pytest.raises(RuntimeError) as theirs:
        REFUSED[name](x.detach())
    expected = gradient(device, x)
    session = opened(device)
    with session, session.step():
        out = deep(x).sum()
        with pytest.raises(RuntimeError) as ours:
            REFUSED[name](x.detach())
        assert str(ours.value) == str(theirs.value)
        assert torch.equal(torch.autograd.grad(out, x)[0], expected)
        assert torch.equal(torch.autograd.grad(deep(x).sum(), x)[0], expected)
        del out, ours
    assert session.report().bytes_swapped_in > 0
    assert session.pool.stats().num_live == 0


class _Cube(torch.autograd.Function):
    """Function whose backward is another custom function, which saves its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return _Product.apply(grad, 3 * x * x)  # type: ignore[no-untyped-call]  # torch annotates no apply


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return grad * b, grad * a


def test_a_saved_tensor_without_storage_stays(sim: cm.SimDevice) -> None:
    """`vectorize=True` gives a backward gradients that are batched by the older vmap, and have no storage to be asked for."""

    def jacobian() -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(64, requires_grad=True)
        rows = torch.autograd.functional.jacobian(lambda x: _Cube.apply(x).sin(), x, vectorize=True, create_graph=True)  # type: ignore[no-untyped-call]  # torch annotates neither
        assert isinstance(rows, Tensor)
        return rows.detach()

    expected = jacobian()
    with sim.compute(), cm.save_on_cpu(device=sim, min_bytes=0):
        assert torch.equal(jacobian(), expected)
    with sim.compute(), cm.SwapSession("8MiB", device=sim, min_bytes=0) as session:
        for _ in range(3):
            with session.step():
                assert torch.equal(jacobian(), expected)
    assert session.report().kept_by_reason["no_storage"] >= 3
