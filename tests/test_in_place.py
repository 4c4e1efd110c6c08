"""A saved storage stays where it is, and its memory alone goes: Note [In place].

Whoever refers to a storage keeps its memory: nothing that somebody holds is ever empty, and what nobody holds does go. Bits are
compared with plain PyTorch's.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.device.holders import held_alone
from chameleon_mm.plan.rule import Limits
from chameleon_mm.swap.executor import Executor
from chameleon_mm.swap.handles import KeptTensor, SwappedView
from chameleon_mm.swap.host_copy import State
from tests._programs import assert_same, saved_by, swapping_executor

pytestmark = pytest.mark.usefixtures("no_gc")

SIDE = 96
NBYTES = SIDE * SIDE * 4


def executor(device: Device, *, leaving_bytes: int | None = 0) -> Executor:
    """Compute waits for every copy out at the next hook."""
    pool, limits = cm.PinnedPool("16MiB", device=device), Limits(ahead_bytes=0, leaving_bytes=leaving_bytes)
    return swapping_executor(device, pool, limits, min_bytes=1024, pack_below_bytes=0)


def made(device: Device) -> Tensor:
    return torch.randn(SIDE, SIDE, device=device.torch_device)


def hook(swapper: Executor, times: int = 1) -> None:
    """Save a tensor that stays, in an operator after the others, so many times."""
    for _ in range(times):
        torch.ones(1, requires_grad=True).exp()
        assert isinstance(swapper.save(torch.ones(1)), KeptTensor)


def one_saved(device: Device) -> tuple[Executor, Tensor, Tensor, SwappedView]:
    """An executor, a tensor, its bytes as they are now, and its handle."""
    swapper, y = executor(device), made(device)
    return swapper, y, y.clone(), saved_by(swapper, y)


# --- who holds a storage

Holder = Callable[[Tensor], Any]


class Hidden(torch.autograd.Function):
    """Keep an argument on the context, unknown to autograd."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.kept = y.detach()
        return y * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def in_a_context(y: Tensor) -> Any:
    return Hidden.apply(y.detach().requires_grad_())  # type: ignore[no-untyped-call]  # torch annotates no `apply`


def in_a_closure(y: Tensor) -> Any:
    row = y[3]
    return lambda: row


def in_a_cycle(y: Tensor) -> Any:
    cycle: list[Any] = [y]
    cycle.append(cycle)
    return cycle


def in_a_hook_of_a_module(y: Tensor) -> Any:
    layer, seen = nn.Identity(), []
    layer.register_forward_hook(lambda module, given, out: seen.append(out))
    layer(y)
    return seen


def by_other_hooks(y: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
        return (y.detach().requires_grad_() * 2).sin()


def in_a_bucket(y: Tensor) -> Any:
    """Return views of one flat tensor, as DDP keeps them."""
    flat = y.detach().view(-1)
    return [flat[: SIDE * 4].view(4, SIDE), flat[SIDE * 4 :]]


HOLDERS: dict[str, Holder] = {
    "the tensor": lambda y: y,
    "a view": lambda y: y[::2],
    "a detached one": lambda y: y.detach(),
    "data": lambda y: y.data,
    "the storage in Python": lambda y: y.untyped_storage(),
    "set_": lambda y: torch.empty(0, device=y.device).set_(y.untyped_storage()),
    "a closure": in_a_closure,
    "a cycle": in_a_cycle,
    "a module's forward hook": in_a_hook_of_a_module,
    "the context of a function": in_a_context,
    "other hooks": by_other_hooks,
    "a bucket": in_a_bucket,
    "an optimizer": lambda y: torch.optim.SGD([y.detach().requires_grad_()]),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", HOLDERS)
def test_what_somebody_holds_is_never_empty_and_goes_once_nobody_does(name: str, sim: cm.SimDevice) -> None:
    with sim.compute():
        swapper, y, expected, handle = one_saved(sim)
        before = sim.allocated_bytes()
        held, ref, tensor = HOLDERS[name](y), weakref.ref(y.untyped_storage()), weakref.ref(y)  # a weak reference holds nothing
        del y
        for _ in range(3):
            hook(swapper)
        record, storage = handle.claim.saved, ref()
        states = [record.state]  # it was copied, and stays
        assert storage is not None
        assert storage.nbytes() == NBYTES
        assert torch.equal(torch.empty(0).set_(storage, 0, (SIDE, SIDE), (SIDE, 1)), expected)
        assert torch.equal(swapper.use(handle), expected)
        del held, storage
        gc.collect()
        hook(swapper)
        states.append(record.state)
        assert states == [State.RESTORED, State.ON_HOST]
        assert tensor() is None
        assert sim.allocated_bytes() <= before - NBYTES
        assert torch.equal(swapper.use(handle), expected)


def ddp_steps(device: Device) -> list[Tensor]:
    """Return gradients of steps whose loss is of the gradients that the step before left in the buckets."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Linear(SIDE, SIDE), nn.Tanh()).to(device.torch_device)
    model = DistributedDataParallel(layers, gradient_as_bucket_view=True)
    seen = []
    for _ in range(4):
        x = torch.randn(SIDE, SIDE, device=device.torch_device)
        old = [p.grad for p in layers.parameters() if p.grad is not None]
        loss = model(x).square().sum() + sum((p * g).sum() for p, g in zip(layers.parameters(), old, strict=False))
        for p in layers.parameters():
            p.grad = None
        loss.backward()
        seen += [p.grad.clone() for p in layers.parameters() if p.grad is not None]
    return seen


def test_steps_that_save_what_lies_in_ddps_buckets_are_plain_pytorchs(sim: cm.SimDevice) -> None:
    """Its reducer holds a bucket in C++ alone, and gathers the gradients of the next backward in it."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        expected = ddp_steps(sim)
        with sim.compute(), cm.save_on_cpu(device=sim, min_bytes=1024):
            got = ddp_steps(sim)
    finally:
        dist.destroy_process_group()
    assert len(got) == 16
    assert_same(expected, got)


def test_the_result_of_a_use_counts_as_a_holder(sim: cm.SimDevice) -> None:
    """A node, or a hook on it, may keep the result that it receives."""
    with sim.compute():
        swapper = executor(sim)
        y = made(sim)
        expected = y.clone()
        handle, other = saved_by(swapper, y), saved_by(swapper, y.detach())
        del y
        hook(swapper, times=2)
        given = swapper.use(handle)
        record = handle.claim.saved
        assert not record.drop_restored()
        hook(swapper)
        assert torch.equal(given, expected)
        del given
        hook(swapper)
        assert record.state is State.ON_HOST
        assert torch.equal(swapper.use(other), expected)


def test_all_views_come_back_with_one_copy(device: Device) -> None:
    with device.compute():
        swapper = executor(device)
        y = torch.randn(SIDE, SIDE, dtype=torch.complex64, device=device.torch_device)
        views = [y, y.t(), y[3:], y.conj(), y.imag, y.conj().imag, y.view(-1)[7::3]]
        expected = [(v.clone(), v.stride(), v.storage_offset(), v.is_conj(), v.is_neg()) for v in views]
        handles = [saved_by(swapper, v) for v in views]
        assert len({id(handle.claim) for handle in handles}) == 1
        storage = y.untyped_storage()._cdata
        del y, views
        hook(swapper)
        device.synchronize()  # the copy has ended
        hook(swapper)
        assert handles[0].claim.saved.state is State.ON_HOST
        used = [swapper.use(handle) for handle in handles]
        assert {t.untyped_storage()._cdata for t in used} == {storage}  # the saved storage
        for t, (value, *geometry) in zip(used, expected, strict=True):
            assert torch.equal(t, value)
            assert [t.stride(), t.storage_offset(), t.is_conj(), t.is_neg()] == geometry


def test_a_storage_that_had_no_object_in_python_goes_too() -> None:
    """The Python object that we make for it counts as one reference for ever."""
    t = torch.empty(8)
    alias = t.detach()
    holder = SimpleNamespace(storage=t.untyped_storage())
    assert not held_alone(holder, 1)
    del t
    assert held_alone(holder, 1)
    del alias
    assert held_alone(holder)


def test_nobody_else_holds_it_under_dynamos_evaluator_either() -> None:
    """Under dynamo's evaluator, calls hold more references to their arguments."""
    holder = SimpleNamespace(storage=torch.empty(8).untyped_storage())

    def asked() -> bool:
        return held_alone(holder)

    @torch.compile(backend="eager")
    def compiled(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        found.append(torch.compiler.disable(asked)())
        return x + 1

    found: list[bool] = []
    compiled(torch.ones(2))
    assert found == [True]
    assert held_alone(holder)
    other = holder.storage
    assert not held_alone(holder)
    assert other.nbytes() == 32


BORROWED: dict[str, Callable[[], Tensor]] = {
    "NumPy": lambda: torch.from_numpy(torch.randn(SIDE, SIDE).numpy().copy()),
    "a buffer": lambda: torch.frombuffer(bytearray(NBYTES), dtype=torch.float32).normal_().view(SIDE, SIDE),
    "DLPack": lambda: torch.utils.dlpack.from_dlpack(torch.randn(SIDE, SIDE)),
}


@pytest.mark.parametrize("name", BORROWED)
def test_memory_that_torch_did_not_allocate_stays_and_is_counted(name: str, sim: cm.SimDevice) -> None:
    with sim.compute():
        swapper = executor(sim)
        y = BORROWED[name]()
        assert isinstance(swapper.save(y * 1), SwappedView)
        handle = swapper.save(y)
        assert isinstance(handle, KeptTensor)
        assert swapper.metrics.totals.kept_by_reason == {"borrowed": 1}
        assert torch.equal(swapper.use(handle), y)
        swapper, y, expected, later = one_saved(sim)
        y.numpy()  # an array made by NumPy after the save stays, too
        del y
        hook(swapper, times=2)
        assert later.claim.saved.state is State.RESTORED
        assert torch.equal(swapper.use(later), expected)


# --- whole programs


def test_a_use_on_another_stream_has_memory_of_its_own(sim: cm.SimDevice) -> None:
    with sim.compute():
        swapper = executor(sim)
        other = sim.new_compute_stream("other")
        y = made(sim)
        expected = y.clone()
        handle, again = saved_by(swapper, y), saved_by(swapper, y.detach())
        del y
        hook(swapper, times=2)
        held = swapper.use(handle)  # back on this stream
        with sim.stream(other):
            elsewhere = swapper.use(again)
            assert torch.equal(elsewhere, expected)
        assert elsewhere.untyped_storage()._cdata != held.untyped_storage()._cdata
        del elsewhere
        assert torch.equal(held, expected)
        sim.synchronize()
