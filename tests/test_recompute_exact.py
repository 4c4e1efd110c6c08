"""Storages that are dropped and recomputed change no bit: random mixes over eight models, and odd programs with all dropped.

The reference is torch alone: no hooks, no dispatch mode, no simulated device. `Proofs.NEVER` shows what recipes are worth by
themselves: nothing stands beside the original first.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

import chameleon_mm as cm
from chameleon_mm import replayable
from chameleon_mm.record.calls import CallWatch
from chameleon_mm.swap.handles import flat_bytes
from chameleon_mm.swap.recipe_runner import RecipeRunner
from tests._fakes import Unwatched
from tests._mix_models import MODELS, Case, bits, train
from tests._mixes import Mix, Proofs, executor_of, mixed, totals_of
from tests._native import unnoted
from tests._programs import on_a_thread

pytestmark = pytest.mark.usefixtures("each_watch")

ALL = replayable.DEFAULT | replayable.PRODUCTS

PER_CHUNK = 25
CHUNKS = 5
"""Mixes of each of eight models: 5 x 25 x 8 = 1,000."""


# --- random mixes


@cache
def plainly(name: str, steps: int, micro_batches: int = 1) -> list[Any]:
    seen, _ = train(MODELS[name], steps, micro_batches=micro_batches)
    return seen


def check_mix(name: str, seed: int, *, steps: int = 2, micro_batches: int = 1, **given: Any) -> cm.SwapSession:
    mix = Mix(seed)
    seen, session = train(MODELS[name], steps, lambda model: mixed(mix, model=model, **given), micro_batches=micro_batches)
    assert seen == plainly(name, steps, micro_batches), f"mix {seed} ({mix.proofs}) of {name} has other bits"
    assert session is not None
    assert session.pool.stats().num_live == 0
    return session


@pytest.mark.parametrize("name", MODELS)
def test_a_random_mix_changes_no_bit(name: str) -> None:
    totals = totals_of(check_mix(name, 0, steps=3))
    assert totals.recomputed + totals.proofs > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_a_random_mix_on_cuda_changes_no_bit(name: str) -> None:
    """Against plain PyTorch on CUDA tensors: on the stand-in they are computed by the CPU's kernels."""
    expected, _ = train(MODELS[name], 2, device="cuda")
    mix = Mix(0)
    seen, session = train(MODELS[name], 2, lambda model: mixed(mix, model=model, device="cuda"), device="cuda")
    assert seen == expected, f"a mix ({mix.proofs}) of {name} has other bits"
    assert session is not None
    assert totals_of(session).recomputed + totals_of(session).proofs > 0
    assert session.pool.stats().num_live == 0


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("name", MODELS)
def test_a_thousand_random_mixes_change_no_bit(name: str, chunk: int) -> None:
    made = 0
    for seed in range(1000 + chunk * PER_CHUNK, 1000 + (chunk + 1) * PER_CHUNK):
        made += totals_of(check_mix(name, seed)).recomputations
    assert made > PER_CHUNK


@pytest.mark.parametrize("name", ["tied weights", "recurrent"])
def test_gradients_of_several_micro_batches_accumulate(name: str) -> None:
    assert totals_of(check_mix(name, 5, steps=3, micro_batches=3)).recomputations > 0


@pytest.mark.parametrize("name", ["dropout transformer", "autocast"])
def test_a_budget_that_evicts_what_was_recomputed(name: str) -> None:
    """Restored storages leave again under pressure, and are recomputed for their next use."""
    mix = Mix(0, drop=0.7, held=0.2, proofs=Proofs.FIRST, admitted=ALL)
    device = cm.SimDevice()

    def session(model: nn.Module) -> cm.SwapSession:
        return mixed(mix, device.allocated_bytes() + (64 << 10), device=device, min_bytes=64)

    seen, opened = train(MODELS[name], 5, session)
    assert seen == plainly(name, 5)
    assert opened is not None
    totals = totals_of(opened)
    assert totals.recomputations > 0
    assert totals.bytes_swapped_in > 0


# --- odd programs, all of whose storages are dropped

SIDE = 64
LARGE = 160
"""Side of a square whose bytes a recipe does not copy."""


def outside(*shape: int, grad: bool = False) -> Tensor:
    """Random numbers that no step has made, as a batch or a parameter."""
    with _disable_current_modes(), unnoted():
        return torch.randn(*(shape or (SIDE, SIDE)), requires_grad=grad)


def leaf(*shape: int) -> Tensor:
    return outside(*shape, grad=True)


Program = Callable[[], list[Tensor]]
Outcome = list[list[bytes]] | str


def outcome(program: Program, steps: int, session: cm.SwapSession | None = None) -> Outcome:
    """Return the bits of each step's results, or the error."""
    torch.manual_seed(5)
    seen: list[list[bytes]] = []
    try:
        if session is None:
            return [[bits(t) for t in program()] for _ in range(steps)]
        with session:
            for _ in range(steps):
                with session.step():
                    seen.append([bits(t) for t in program()])
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return seen


def check(
    program: Program, *, drops: bool = True, proofs: Proofs = Proofs.NEVER, steps: int = 3, held: float = 0.0
) -> cm.SwapSession:
    """Plain PyTorch and a session that drops all it can give the same. `drops`: whether it can drop anything."""
    expected = outcome(program, steps)
    session = mixed(Mix(1, drop=1.0, held=held, proofs=proofs, admitted=ALL))
    assert outcome(program, steps, session) == expected
    assert (totals_of(session).recomputed > 0) == drops, totals_of(session).not_recomputed_by_reason
    return session


def grads(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    loss.backward()
    return [t.grad for t in leaves if t.grad is not None]


def retained() -> list[Tensor]:
    x = leaf()
    loss = F.dropout((x * 2).sin().exp(), 0.3).tanh().sum()
    loss.backward(retain_graph=True)
    first = x.grad
    assert first is not None
    kept = first.clone()
    return [kept, *grads(loss, x)]


def differentiated_twice() -> list[Tensor]:
    x, w = leaf(), leaf()
    loss = F.dropout((x @ w).sin() * x, 0.3).exp().mean()
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    return [g.detach(), *grads((g * g.sin()).sum(), x, w)]


def several_in_flight() -> list[Tensor]:
    x = leaf()
    losses = [F.dropout((x * number).sin().exp(), 0.2).tanh().sum() for number in range(1, 5)]
    seen = []
    for number in (2, 0, 3, 1):
        losses[number].backward()
        assert x.grad is not None
        seen.append(x.grad.clone())
    return seen


def dropped_graph() -> list[Tensor]:
    x = leaf()
    (x * 2).sin().exp().tanh().sum()
    return grads((x * 3).sin().exp().tanh().sum(), x)


def error_in_forward() -> list[Tensor]:
    x = leaf()
    try:
        (x * 2).sin().exp() @ torch.ones(3)
    except RuntimeError as error:
        error.__traceback__ = None
    return grads((x * 3).sin().exp().tanh().sum(), x)


class RaisesOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, raises: list[bool]) -> Tensor:
        ctx.raises = raises
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.raises.pop():
            raise ValueError("an error of the user's")
        return gradients[0], None


def error_in_backward() -> list[Tensor]:
    x = leaf()
    raises = [False, True]
    loss = RaisesOnce.apply((x * 3).sin().exp().tanh(), raises).sin().exp().sum()  # type: ignore[no-untyped-call]  # torch's
    with pytest.raises(ValueError, match="of the user's"):
        loss.backward(retain_graph=True)
    return grads(loss, x)


def on_another_thread() -> list[Tensor]:
    x = leaf()
    loss = F.dropout((x * 3).sin().exp(), 0.2).tanh().sum()
    on_a_thread(loss.backward)
    assert x.grad is not None
    return [x.grad]


def scaled() -> list[Tensor]:
    model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.GELU(), nn.Dropout(0.1), nn.Linear(SIDE, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    seen = []
    for number in range(3):
        loss = model(outside() * 10.0 ** (25 * (number == 1))).square().sum()  # the second one overflows
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen += [loss.detach(), torch.tensor(scaler.get_scale())]
    return seen + [p.detach().clone() for p in model.parameters()]


def result_written() -> list[Tensor]:
    x = leaf()
    y = (x * 2).exp()
    z = y.sin()
    y.add_(1)
    return grads(z.sum(), x)


def batch_written(side: int) -> Program:
    """Write after forward to a batch, or a bias, that autograd did not save."""

    def program() -> list[Tensor]:
        x, batch = leaf(side, side), outside(side, side)
        z = (x + batch).sin().exp().tanh()
        batch.zero_()
        return grads(z.sum(), x)

    return program


def written_while_relied_on() -> list[Tensor]:
    """Autograd has saved the source for a part of the graph that no backward comes to: eager does not mind the write."""
    x = leaf(LARGE, LARGE)
    source = x * 2
    beside = source.sin()
    z = (source + 1).exp().sin()
    other = x.sin()  # storages saved before are dropped here
    source.detach().zero_()
    seen = grads(z.sum() + other.sum(), x)
    del beside
    return seen


def two_optimizers() -> list[Tensor]:
    """A detached feature outlives the backward of the weight that it was made from, and its update within that backward."""
    x, w, head = leaf(LARGE, LARGE), leaf(LARGE, LARGE), leaf(LARGE, LARGE)
    feature = x @ w
    loss, other = (feature * 2).sum(), (feature.detach() * head).sin().sum()
    del feature

    def update(weight: Tensor) -> None:
        with torch.no_grad():
            weight.mul_(0.5)

    w.register_post_accumulate_grad_hook(update)
    loss.backward()
    return grads(other, w, head)


def relied_on_by_a_graph_that_goes() -> list[Tensor]:
    """Autograd has saved the source for a part of the graph that is dropped. The model has it, and a hook writes to it."""
    x = leaf(LARGE, LARGE)
    source = x * 2
    beside = source.sin()
    z = (source + 1).sin()
    other = x.sin()  # storages saved before are dropped here
    del beside
    z.register_hook(lambda g: (source.detach().zero_(), None)[1])
    return grads(z.sum() + other.sum(), x)


def written_before_a_second_backward() -> list[Tensor]:
    """A kept graph: autograd has used the source for good, and a hook of the second backward writes to it."""
    x = leaf(LARGE, LARGE)
    source = x * 2
    first = source.sin().sum()
    second = (source + 1).sin().exp()
    other = x.sin()  # storages saved before are dropped here
    first.backward(retain_graph=True)
    second.register_hook(lambda g: (source.detach().zero_(), None)[1])
    return grads(second.sum() + other.sum(), x)


class ScalesWhatItSaved(torch.autograd.Function):
    """Its backward writes over its own saved tensor, to save memory: Liger's SwiGLU does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        x.zero_()
        return gradients[0] * 3


def written_by_its_own_node() -> list[Tensor]:
    """An early backward reaches the function, and a later one the tensors made from its input."""
    x = leaf(LARGE, LARGE)
    source = x * 2
    early = ScalesWhatItSaved.apply(source)  # type: ignore[no-untyped-call]  # torch's own
    late = (source + 1).sin().exp()
    early.sum().backward()
    return [*torch.autograd.grad(late.sum(), source), *([] if x.grad is None else [x.grad])]


def held_and_written_in_backward() -> list[Tensor]:
    """The model has a list of hidden states, and scales one of them in a hook."""
    x = leaf(LARGE, LARGE)
    states = [x * 2]
    z = (states[0] + 1).sin()
    other = x.sin()  # storages saved before are dropped here
    z.register_hook(lambda g: (states[0].detach().zero_(), None)[1])
    return grads(z.sum() + other.sum(), x)


def batch_written_through_data() -> list[Tensor]:
    x, batch = leaf(LARGE, LARGE), outside(LARGE, LARGE)
    z = (x + batch).sin().exp().tanh()
    batch.data.zero_()
    return grads(z.sum(), x)


def autocast_in_backward() -> list[Tensor]:
    x, w = leaf(), leaf()
    loss = ((x @ w).sin() @ w).exp().tanh().sum()
    with torch.autocast("cpu", torch.bfloat16):
        return grads(loss, x, w)


class AddsToSines(TorchDispatchMode):
    """A mode of the user's that computes something else."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out + 1 if func is torch.ops.aten.sin.default else out


def in_a_mode_of_the_users() -> list[Tensor]:
    x = leaf()
    with AddsToSines():  # type: ignore[no-untyped-call]  # torch annotates no argument of it
        z = (x * 2).sin().exp().tanh()
        return grads(z.sum(), x)


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        inner = x.exp()
        out = inner.sin() * x
        ctx.save_for_backward(x, inner)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x, inner = ctx.saved_tensors
        gradient: Tensor = gradients[0] * (inner.cos() * inner * x + inner.sin())
        return gradient


def function_of_ones_own() -> list[Tensor]:
    x = leaf()
    return grads(OwnFunction.apply((x * 0.5).tanh()).exp().sum(), x)  # type: ignore[no-untyped-call]  # torch's own


class WritesUnseen(torch.autograd.Function):
    """Double the input through raw memory, which moves no counter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.detach().numpy()[:] *= 2
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def written_unseen() -> list[Tensor]:
    x = leaf()
    y = x * 2
    z = WritesUnseen.apply(y).sin() + y.exp().sin()  # type: ignore[no-untyped-call]  # torch's own
    del y
    return grads(z.sum(), x)


# --- what decides bits without being an argument


def other_default_dtype() -> list[Tensor]:
    x = leaf(SIDE)
    places = torch.arange(SIDE)
    z = (x * (places / 3).sin()).sin() + torch.ones(SIDE) * x.exp()
    torch.set_default_dtype(torch.float64)
    try:
        return grads(z.sum(), x)
    finally:
        torch.set_default_dtype(torch.float32)


def other_precision() -> list[Tensor]:
    a, b = leaf(SIDE // 2, 8 * SIDE), outside(8 * SIDE, SIDE // 2)
    torch.set_float32_matmul_precision("medium")
    z = (a @ b).sin().exp()
    torch.set_float32_matmul_precision("highest")
    return [*grads(z.sum(), a), torch.ones(1) * (torch.get_float32_matmul_precision() == "highest")]


def deterministic_since() -> list[Tensor]:
    x = leaf()
    z = (torch.empty(SIDE, SIDE).fill_(2) * x).sin().exp()
    torch.use_deterministic_algorithms(True)
    try:
        return grads(z.sum(), x)
    finally:
        torch.use_deterministic_algorithms(False)


def own_generator() -> list[Tensor]:
    """Pass the generator by name, and by position, as this operator takes it."""
    generator = torch.Generator()
    generator.manual_seed(3)
    x = leaf()
    masked = x * torch.empty(SIDE, SIDE).bernoulli_(0.5, generator=generator)
    noise = torch.zeros(SIDE, SIDE)
    z = torch.ops.aten.rrelu_with_noise(masked * 2, noise, 0.1, 0.9, True, generator).sin()
    del masked
    seen = grads(z.sum(), x)
    return [*seen, generator.get_state(), torch.get_rng_state()]


# --- kinds of tensors


def chunks_with_counters() -> list[Tensor]:
    x = leaf()
    a, b = (x * 2).unsafe_chunk(2, 1)
    c, d = torch.cat((x, x), 1).unsafe_split(SIDE, 1)
    z = a.sin() * b.mul_(2).exp() + c[:, : SIDE // 2].exp() * d.tanh_()[:, : SIDE // 2].sin()
    del a, b, c, d
    return grads(z.sum(), x)


def views_of_results_in_place() -> list[Tensor]:
    x = leaf()
    y = x * 2
    y[: SIDE // 2].neg_()
    y.t()[3:5].mul_(0.5)
    z = y.sin() * y.view(-1).flip(0).view(SIDE, SIDE).exp()
    del y
    return grads(z.sum(), x)


def set_and_resized() -> list[Tensor]:
    x = leaf()
    m = torch.empty(1)
    m.resize_(SIDE, SIDE)
    m.copy_(torch.ones(SIDE, SIDE))
    n = torch.empty(0)
    n.set_(m)  # type: ignore[call-overload]  # a stub of torch's
    z = ((x * m).sin() + (x * n).exp()).tanh()
    del m, n
    return grads(z.sum(), x)


def negated() -> list[Tensor]:
    x = leaf()
    y = torch._neg_view(x * 2)
    return grads((y * y.sin()).exp().sum(), x)


def conjugated() -> list[Tensor]:
    x = leaf(SIDE, SIDE, 2)
    y = torch.view_as_complex(x * 2).conj()
    return grads((y.imag * y.real.sin() + (y * y).abs()).sum(), x)


def out_variants_and_lists() -> list[Tensor]:
    x = leaf()
    out = torch.empty(SIDE, SIDE)
    base = outside()
    torch.add(base, 1, out=out)
    several = [base * 1, base * 2]
    torch._foreach_mul_(several, 3.0)
    torch._foreach_add_(several, several)
    z = (x * out).sin() + (x * several[0]).sin() * several[1]
    del out, several
    return grads(z.sum(), x)


def scalars() -> list[Tensor]:
    x = leaf()
    factor, count = torch.tensor(2.5), torch.arange(SIDE)
    z = torch.where(x > 0, x * factor, 1.5).sin() + (count * 2.5).sin() * x + (count / 7) * x.exp()
    factor.fill_(7)
    return grads(z.sum(), x)


def sparse_and_nested() -> list[Tensor]:
    x, y = leaf(16), leaf(6, 8)
    places = torch.arange(16)[None]
    sparse = torch.sparse_coo_tensor(places, x * 2, (16,), check_invariants=True).to_dense().sin()
    nested = torch.nested.to_padded_tensor(torch.nested.as_nested_tensor([y * 2, (y * 3)[:4]]).sin(), 0.0).exp()
    return grads(sparse.sum() + nested.sum(), x, y)


def sparse_written() -> list[Tensor]:
    """An operator in place on a sparse tensor writes to the storage of its values."""
    x = leaf(SIDE * SIDE)
    values, places = torch.ones(SIDE * SIDE) * 2, torch.arange(SIDE * SIDE)[None]
    sparse = torch.sparse_coo_tensor(places, values, (SIDE * SIDE,), check_invariants=True, is_coalesced=True)
    sparse.mul_(3)
    z = (values * x).sin().exp()
    del values, sparse
    return grads(z.sum(), x)


def of_no_elements() -> list[Tensor]:
    x = leaf(0, 4)
    return grads((x * 2).sin().exp().sum(), x)


def long_chain() -> list[Tensor]:
    x = leaf(8)
    y: Tensor = x
    for _ in range(100):
        y = (y * 1.01).sin()
    return grads(y.sum(), x)


def made_without_gradients() -> list[Tensor]:
    x = leaf()
    with torch.no_grad():
        m = (x * 2).sigmoid()
    z = (x * m).sin() * m
    del m
    return grads(z.sum(), x)


def vectorised() -> list[Tensor]:
    x, w = leaf(8, SIDE), outside(SIDE)
    y = torch.func.vmap(lambda row: (row * 2).sin() * w)(x * 1).exp()
    tangent = torch.func.jvp(lambda a: (a * a).sin(), (y,), (y * 2,))[1]
    return grads((y + tangent).sum(), x)


PROGRAMS: list[Program] = [
    retained,
    differentiated_twice,
    several_in_flight,
    dropped_graph,
    error_in_forward,
    error_in_backward,
    on_another_thread,
    scaled,
    batch_written(SIDE // 2),
    batch_written(LARGE),
    batch_written_through_data,
    written_while_relied_on,
    two_optimizers,
    written_by_its_own_node,
    relied_on_by_a_graph_that_goes,
    written_before_a_second_backward,
    autocast_in_backward,
    in_a_mode_of_the_users,
    function_of_ones_own,
    other_default_dtype,
    other_precision,
    deterministic_since,
    own_generator,
    chunks_with_counters,
    views_of_results_in_place,
    set_and_resized,
    negated,
    conjugated,
    out_variants_and_lists,
    scalars,
    sparse_and_nested,
    sparse_written,
    long_chain,
    made_without_gradients,
    vectorised,
]


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("held", [0.0, 0.5], ids=["", "held"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__qualname__.partition(".")[0])
def test_an_odd_program_gives_what_plain_pytorch_gives(program: Program, held: float) -> None:
    check(program, held=held)


@pytest.mark.parametrize("program", [of_no_elements, result_written], ids=lambda program: program.__name__)
def test_what_nothing_can_be_dropped_of_gives_the_same(program: Program) -> None:
    """If the result is written, eager raises an error; so do we, with the same text."""
    check(program, drops=program is not of_no_elements)


def test_proofs_leave_a_write_alone_that_nobody_tells_of() -> None:
    """A custom Function writes through raw memory to another operator's result: only the proof can find it."""
    session = check(written_unseen, proofs=Proofs.FIRST, drops=False)
    assert totals_of(session).not_recomputed_by_reason["other bits than the original"] > 0


def test_a_write_that_begins_later_is_an_error_in_the_step_in_which_it_happens() -> None:
    """The same program writes in its third step alone: the recipe is proven by then, and is banned from then on."""
    count = [0]

    def program() -> list[Tensor]:
        count[0] += 1
        x = leaf()
        y = x * 2
        if count[0] % 6 == 3:
            y.detach().numpy()[:] *= 2
        z = y.sin()
        del y
        return grads(z.exp().sum(), x)

    torch.manual_seed(5)
    expected = [[bits(t) for t in program()] for _ in range(6)]
    count[0] = 0
    mix = Mix(1, drop=1.0, held=0.0, proofs=Proofs.FIRST, admitted=ALL)
    torch.manual_seed(5)
    seen: list[Any] = []
    with mixed(mix) as session:
        for _ in range(6):
            try:
                with session.step():
                    seen.append([bits(t) for t in program()])
            except cm.RecomputeMismatch as error:
                seen.append(str(error))
    assert "result of aten::exp" in seen[2]  # by way of `y`, which stays: NumPy was given its address
    assert "recompute=False" in seen[2]
    assert seen[:2] + seen[3:] == expected[:2] + expected[3:]
    assert "aten::exp" in mix.plan.banned
    assert totals_of(session).not_recomputed_by_reason["other bits than the original"] > 0


def mismatched(x: Tensor, *hooks: Callable[[Tensor], None]) -> Tensor:
    """A loss in whose backward something is recomputed with other bits."""
    y = x * 2
    y.detach().numpy()[:] *= 2
    z = y.sin()
    for hook in hooks:
        z.register_hook(hook)
    return z.exp().sum()


def dropping() -> cm.SwapSession:
    return mixed(Mix(1, drop=1.0, held=0.0, proofs=Proofs.NEVER, admitted=ALL))


def test_a_mismatch_comes_behind_the_callbacks_of_others() -> None:
    """DDP ends its reduction in one: an error before it would break the next step."""
    called: list[str] = []

    def queues(gradient: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: called.append("theirs"))

    x = leaf()
    x.register_hook(queues)  # after ours, which the first use queued
    with dropping() as session, pytest.raises(cm.RecomputeMismatch), session.step():
        mismatched(x, queues).backward()
    assert called == ["theirs", "theirs"]


def test_a_mismatch_is_raised_by_its_own_backward() -> None:
    """Another one that ends meanwhile, on another thread, returns."""
    outcomes: list[str] = []

    with dropping() as session, session.step():
        clean = (leaf() * 2).sin().exp().sum()

        def run() -> None:
            clean.backward()
            outcomes.append("returned")

        def ends(gradient: Tensor) -> None:
            on_a_thread(run)

        with pytest.raises(cm.RecomputeMismatch):
            x = leaf()
            x.register_hook(ends)
            mismatched(x).backward()
    assert outcomes == ["returned"]


def test_a_mismatch_keeps_nothing_alive(no_gc: None) -> None:
    def run() -> weakref.ref[Any]:
        session = dropping()
        try:
            with session, session.step():
                mismatched(leaf()).backward()
        except cm.RecomputeMismatch:
            return weakref.ref(session._executor)
        pytest.fail("expected a mismatch, got none")

    assert run()() is None


def test_what_a_backward_that_raised_has_recomputed_is_compared_as_the_step_ends() -> None:
    """No callback of autograd runs then. The program continues with the gradients that it has."""
    ends: list[bool] = []

    def raises(gradient: Tensor) -> None:
        raise ValueError("an error of the user's")

    def program(*, writes: bool) -> list[Tensor]:
        x = leaf()
        x.register_hook(raises)
        y = x * 2
        if writes:
            y.detach().numpy()[:] *= 2
        z = y.sin()
        del y
        with pytest.raises(ValueError, match="of the user's"):
            z.exp().sum().backward()
        ends.append(writes)
        return []

    with dropping() as session:
        with session.step():
            program(writes=False)
        with pytest.raises(cm.RecomputeMismatch), session.step():
            program(writes=True)
        with session.step():
            program(writes=False)
    assert ends == [False, True, False]


# --- what a recipe must not rest on


def test_no_memory_for_the_copy_of_a_small_input_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[str] = []

    def without_memory(storage: torch.UntypedStorage) -> Tensor:
        caller = sys._getframe(1).f_code.co_name
        if caller == RecipeRunner.copied.__name__:
            raised.append(caller)
            raise torch.OutOfMemoryError("no memory for a copy")
        return flat_bytes(storage)

    monkeypatch.setattr("chameleon_mm.swap.recipe_runner.flat_bytes", without_memory)
    shift = nn.Parameter(torch.ones(8))

    def program() -> list[Tensor]:
        x = leaf(8, 8)
        return grads((x + shift).sin().exp().sum(), x)

    session = check(program)
    refusals = totals_of(session).not_recomputed_by_reason["no memory for a copy of a small input"]
    assert 0 < refusals <= len(raised)


class Sharded(nn.Module):
    """A layer whose parameter is freed after its forward and fetched again later, as FSDP does: no counter moves."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(LARGE, LARGE))
        self.full = self.shift.detach().clone()

    def free(self) -> None:
        self.shift.data.untyped_storage().resize_(0)

    def fetch(self, *, filled: bool = True) -> None:
        self.shift.data.untyped_storage().resize_(self.full.untyped_storage().nbytes())
        with torch.no_grad(), _disable_current_modes(), unnoted():  # a collective on a stream of its own
            self.shift.data.copy_(self.full if filled else torch.full_like(self.full, torch.nan))


@pytest.mark.parametrize("moving", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_is_recomputed_unless_it_reads_running_statistics(training: bool, moving: bool) -> None:
    """Those that it updates move once a step: the last results are what they are after it."""

    def program() -> list[Tensor]:
        x, mean, variance = leaf(8, 4, 6, 6), outside(4), outside(4).abs()
        z = F.batch_norm(x * 2, mean if moving else None, variance if moving else None, training=training or not moving).sin()
        return [*grads(z.sum(), x), mean, variance]

    totals = totals_of(check(program))
    refused = totals.not_recomputed_by_reason["a batch norm that reads running statistics"]
    assert (refused > 0) == (moving and not training)
    assert totals.recomputations > 0


def test_running_statistics_that_a_batch_norm_updated_are_not_recomputed() -> None:
    def program() -> list[Tensor]:
        x, mean, variance = leaf(8, 4, 6, 6), outside(4), outside(4).abs()
        y = F.batch_norm(x * 2, mean, variance, training=True)
        return [*grads((y * (mean * 2).sin().view(4, 1, 1)).exp().sum(), x), mean, variance]  # saves what is made of them

    assert totals_of(check(program)).not_recomputed_by_reason["running statistics of a batch norm"] > 0


@pytest.mark.parametrize("filled", [True, False], ids=["fetched", "on its way"])
@pytest.mark.parametrize("fetched", [True, False], ids=["in time", "late"])
def test_a_parameter_that_is_resharded_is_in_no_recipe(fetched: bool, filled: bool) -> None:
    model = Sharded()

    def program() -> list[Tensor]:
        model.fetch()
        x = leaf(LARGE, LARGE)
        z = (x + model.shift).sin().exp().tanh()  # the parameter is not saved
        model.free()
        if fetched:
            model.fetch(filled=filled)
        seen = grads(z.sum(), x)
        model.free()
        return seen

    session = check(program, steps=4)
    reasons = totals_of(session).not_recomputed_by_reason
    assert reasons["a parameter that no step has seen keep its size"] == 4
    assert totals_of(session).recomputations > 0


def test_a_parameter_that_is_resharded_later_is_in_no_recipe() -> None:
    """Autograd does not save it: eager does not mind that it goes."""
    model, count = Sharded(), [0]

    def program() -> list[Tensor]:
        model.fetch()
        count[0] += 1
        x = leaf(LARGE, LARGE)
        z = (x + model.shift).sin().exp().tanh()
        if count[0] % 3 == 0:
            model.free()
        return grads(z.sum(), x)

    assert totals_of(check(program)).not_recomputed_by_reason["an input that others may write to"] > 0


def external() -> list[Tensor]:
    """Memory that NumPy allocated, and that it writes to, once the step has used it."""
    x = leaf(LARGE, LARGE)
    array = outside(LARGE, LARGE).numpy().copy()
    z = (x + torch.from_numpy(array)).sin().exp()
    array[:] = 0
    return grads(z.sum(), x)


def filled_unseen() -> list[Tensor]:
    """Memory filled without an operator, such as by a user's kernel."""
    x = leaf()
    y = torch.empty(SIDE, SIDE)
    y.numpy()[:] = 3
    z = (x + y).sin().exp()
    del y
    return grads(z.sum(), x)


@pytest.mark.parametrize(("program", "reason"), [(external, "an input that is gone"), (filled_unseen, "seen to fill")])
def test_memory_that_others_fill_is_in_no_recipe(program: Program, reason: str) -> None:
    reasons = totals_of(check(program)).not_recomputed_by_reason
    assert any(reason in one for one in reasons), reasons


def test_what_the_model_holds_and_a_hook_writes_is_in_no_recipe() -> None:
    session = check(held_and_written_in_backward, drops=False, held=1.0)
    assert totals_of(session).not_recomputed_by_reason["an input that the model holds"] > 0


def test_a_batch_that_a_hook_writes_in_backward_is_in_no_recipe() -> None:
    """Writes in backward are not watched, and autograd does not save the batch."""

    def program() -> list[Tensor]:
        x, batch = leaf(LARGE, LARGE), outside(LARGE, LARGE)
        z = (x + batch).sin()
        other = x.sin()  # storages saved before are dropped here
        z.register_hook(lambda g: (batch.zero_(), None)[1])
        return grads(z.sum() + other.sum(), x)

    assert totals_of(check(program, drops=False)).not_recomputed_by_reason["an input that others may write to"] > 0


def test_a_held_storage_that_only_an_alias_is_left_of_is_not_held() -> None:
    """Without the tensor as which it was made, no counter shows writes: if held, its new bytes would be read."""

    def program() -> list[Tensor]:
        x = leaf()
        y = outside() * 2
        alias = y.detach()
        del y
        z = (x + alias).sin()
        other = x.sin()
        z.register_hook(lambda g: (alias.zero_(), None)[1])
        return grads(z.sum() + other.sum(), x)

    check(program, held=1.0, drops=False)


# --- graphs and memory


def test_a_graph_of_an_earlier_step_is_used_in_a_later_one() -> None:
    torch.manual_seed(5)
    x = leaf()

    def forward() -> Tensor:
        return F.dropout((x * 2).sin().exp(), 0.3).tanh().sum()

    expected = torch.autograd.grad(forward(), x)[0]
    torch.manual_seed(5)
    leaf()
    session = dropping()
    with session:
        with session.step():
            loss = forward()
        with session.step():
            forward()
            state = torch.get_rng_state()
            (got,) = torch.autograd.grad(loss, x)
            assert torch.equal(torch.get_rng_state(), state)
        del loss
    assert torch.equal(got, expected)
    assert totals_of(session).recomputations > 0


@pytest.mark.parametrize("last_first", [True, False])
def test_handles_may_go_in_any_order(last_first: bool) -> None:
    """Sources' handles before those of tensors made from them, and the other way round."""
    session = mixed(Mix(1, drop=1.0, held=0.3, proofs=Proofs.NEVER, admitted=ALL))
    executor = executor_of(session)
    with session, session.step():
        x = leaf()
        y: Tensor = x
        handles = []
        for _ in range(6):
            y = (y * 1.5).sin()
            handles.append(executor.save(y))
        expected = y.detach().clone()
        del y
        executor.save(leaf(2))
        last = handles.pop()
        if last_first:
            handles.reverse()
        while handles:
            handles.pop()
        assert torch.equal(executor.use(last), expected)
        del last
    assert session.pool.stats().num_live == 0
    assert executor.registry.all() == []


KEPT = {"StepFigures", "CopySpan", "Access", "Extent"}
"""Types of objects kept of each step, and of those that the simulator lists: copies, and accesses to a page of checksums until
it is set to zero."""


def live_objects() -> int:
    """Number of tensors, and of our objects and functions except `KEPT`."""
    found = 0
    for one in gc.get_objects():
        module = one.__module__ if type(one) is FunctionType else type(one).__module__
        found += issubclass(type(one), Tensor) or (str(module).startswith("chameleon_mm") and type(one).__name__ not in KEPT)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dropout transformer", "in-place convolutions", "recurrent"])
def test_no_memory_grows_without_the_collector(name: str, no_gc: None) -> None:
    case, device = MODELS[name], cm.SimDevice()
    model = case.build()
    session = mixed(Mix(2, drop=0.8, held=0.3, proofs=Proofs.FIRST, admitted=ALL), device=device, model=model)
    objects, nbytes = [], []
    with session:
        for number in range(30):
            with session.step():
                case.loss(model).backward()
                model.zero_grad()
            device.synchronize()
            nbytes.append(device.allocated_bytes())  # handles storages that died meanwhile
            if number % 5 == 4:
                objects.append(live_objects())
    assert totals_of(session).recomputations > 30
    assert max(nbytes[10:]) <= max(nbytes[:10])
    # An object that stays in each step would add 10. The first ten steps fill caches.
    assert max(objects[4:]) < max(objects[2:4]) + 5
    assert executor_of(session).registry.all() == []
    assert session.pool.stats().num_live == 0


# --- company


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_part_that_dynamo_compiled(backend: str) -> None:
    def build() -> nn.Module:
        torch._dynamo.reset()
        middle = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU())
        compiled: Any = torch.compile(middle, backend=backend)
        return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), compiled, nn.Linear(32, 16), nn.SiLU())

    def loss(model: nn.Module) -> Tensor:
        out: Tensor = model(torch.randn(8, 16))
        return out.square().mean()

    import torch._dynamo

    case = Case(build, loss)
    expected, _ = train(case, 3)
    before = torch._dynamo.utils.counters["frames"]["ok"]
    mix = Mix(1, drop=1.0, held=0.2, proofs=Proofs.FIRST, admitted=ALL)
    got, session = train(case, 3, lambda model: mixed(mix, device=Unwatched(), model=model))
    assert got == expected
    assert session is not None
    assert totals_of(session).recomputations > 0
    assert torch._dynamo.utils.counters["frames"]["ok"] > before
    torch._dynamo.reset()


class _HookOfAnotherThread(torch.autograd.Function):
    """Has another thread run a hook's end in the middle of a backward."""

    session: cm.SwapSession

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        on_a_thread(executor_of(_HookOfAnotherThread.session).recording.leave_if_needed)
        return grads[0]


def test_a_watch_does_not_stay_where_another_thread_hooks_in_the_middle_of_a_backward() -> None:
    session = _HookOfAnotherThread.session = mixed(
        Mix(1, drop=1.0, held=0.0, proofs=Proofs.EACH, admitted=ALL), device=Unwatched()
    )
    x = leaf()
    with session:
        for _ in range(2):
            with session.step():
                # In backward, the uses of tensors made after it come before it: they leave the watch, which autograd restores.
                _HookOfAnotherThread.apply((x * 2).sin()).exp().tanh().sum().backward()  # type: ignore[no-untyped-call]  # torch's
    assert not [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, CallWatch)]


def test_two_threads_with_a_step_each_and_one_session() -> None:
    """Operators of one thread run while hooks of the other do."""
    errors: list[BaseException] = []
    x = leaf()
    expected = torch.autograd.grad((x * 2).sin().exp().tanh().sum(), x)[0]
    session = mixed(Mix(1, drop=1.0, held=0.0, proofs=Proofs.EACH, admitted=ALL), device=Unwatched())

    def other() -> None:
        try:
            with torch.autograd.graph.saved_tensors_hooks(executor_of(session).save, executor_of(session).use):
                for _ in range(20):
                    (got,) = torch.autograd.grad((x * 2).sin().exp().tanh().sum(), x)
                    assert torch.equal(got, expected)
        except BaseException as error:  # noqa: BLE001 - raised on the test's own thread
            errors.append(error)

    with session:
        thread = threading.Thread(target=other)
        with session.step():
            thread.start()
            for _ in range(20):
                (got,) = torch.autograd.grad((x * 2).sin().exp().tanh().sum(), x)
                assert torch.equal(got, expected)
            thread.join()
    assert not [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, CallWatch)]
    assert not errors, errors[0]
    assert session.pool.stats().num_live == 0
