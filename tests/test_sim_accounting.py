"""Memory that the simulator counts as allocated: the live storages, rounded as the caching allocator rounds, and no more."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from chameleon_mm.device.sim import SimDevice
from chameleon_mm.units import round_up
from tests._programs import on_a_thread

pytestmark = pytest.mark.usefixtures("no_gc")

KB = 1024
"""float32 [16, 16]: every tensor of the little programs below has this size."""


def square() -> Tensor:
    return torch.ones(16, 16)


def alive_bytes() -> int:
    """Every CPU storage that the collector can reach a tensor of, counted once."""
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.is_cpu and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            storages[storage._cdata] = round_up(storage.nbytes(), 512)
    return sum(storages.values())


def test_sizes_are_rounded_up_as_the_caching_allocator_does(sim: SimDevice) -> None:
    for nbytes, counted in [(0, 0), (1, 512), (512, 512), (513, 1024)]:
        buffer = sim.current_stream().alloc(nbytes)
        assert sim.allocated_bytes() == counted
        del buffer


def test_a_forward_and_backward_term_by_term(sim: SimDevice) -> None:
    with sim.compute():
        x, w = square().requires_grad_(), square().requires_grad_()
        assert sim.read_memory()[:3] == (2 * KB, 2 * KB, 2 * KB)
        y = x @ w  # saves x and w
        z = y.exp()  # saves its result
        loss = z.sum()  # 512 bytes for one number
        assert sim.allocated_bytes() == 4 * KB + 512
        del y  # not saved
        assert sim.allocated_bytes() == 3 * KB + 512
        del z  # held by the graph
        assert sim.allocated_bytes() == 3 * KB + 512
        sim.reset_peaks()
        loss.backward()
        # x, w (2 KB) and loss (512); its gradient (512), held to the end and expanded without memory; that times z (1 KB),
        # after which z goes; and from it the gradients of x and w (2 KB).
        assert sim.peak_allocated_bytes() == 2 * KB + 512 + 512 + KB + 2 * KB
        del loss
        assert sim.allocated_bytes() == 4 * KB  # x, w and their gradients


def test_the_odometer_never_turns_back(sim: SimDevice) -> None:
    with sim.compute():
        for count in range(1, 5):
            square()
            assert sim.read_memory()[:3] == (0, count * KB, KB)


def test_every_live_storage_is_counted_and_no_dead_one(sim: SimDevice) -> None:
    """Against a walk of the collector's objects, throughout training with views, in-place operators, dropout and foreach."""
    before = alive_bytes()
    with sim.compute():
        model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(32, 4))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(3):
            x = torch.randn(8, 16)
            parts = model(x).chunk(2, dim=1)
            loss = F.mse_loss(parts[0].t().contiguous(), parts[1].t().clone().clamp_(max=1))
            del parts
            loss.backward()
            assert sim.allocated_bytes() == alive_bytes() - before
            optimizer.step()
            assert sim.allocated_bytes() == alive_bytes() - before
            optimizer.zero_grad()
            del x, loss
            assert sim.allocated_bytes() == alive_bytes() - before


def test_out_of_memory_leaves_the_ledger_as_it_was() -> None:
    sim = SimDevice(hbm_bytes=4 * KB)
    with sim.compute():
        kept = [square() for _ in range(3)]
        before = sim.read_memory()
        attempts: list[Callable[[], Tensor]] = [lambda: kept[0].repeat(2, 1), lambda: sim.current_stream().alloc(1025)]
        for too_much in attempts:
            with pytest.raises(torch.OutOfMemoryError, match=r"capacity of 4\.00 KiB, of which 1\.00 KiB is free; 3\.00 KiB"):
                too_much()
            assert sim.read_memory() == before
            assert sim.peak_allocated_bytes() == 3 * KB
        kept.append(square())
        assert sim.allocated_bytes() == 4 * KB
        kept.pop()
        buffer = sim.current_stream().alloc(1024)
        assert buffer.numel() == 1024


def test_what_died_on_another_thread_while_an_operator_ran_makes_room() -> None:
    sim = SimDevice(hbm_bytes=2 * KB)
    with sim.compute():
        others, x = [square()], square()

        class DropsWhileRunning(TorchDispatchMode):
            def __init__(self) -> None:
                super().__init__()  # type: ignore[no-untyped-call]  # torch annotates no argument of it

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                on_a_thread(others.clear)
                return func(*args)

    # Below the simulator's mode, so it runs in the middle of the operator.
    with DropsWhileRunning(), sim.compute():
        y = x + 1
    assert not others
    assert sim.allocated_bytes() == 2 * KB == sim.peak_allocated_bytes()
    del y


def test_out_arguments_and_resizes_are_charged(sim: SimDevice) -> None:
    with sim.compute():
        a, out = square(), torch.empty(0)
        torch.add(a, a, out=out)
        assert sim.allocated_bytes() == 2 * KB
        assert torch.equal(out, a + a)
        out.resize_(32, 16)
        assert sim.allocated_bytes() == 3 * KB
        out.untyped_storage().resize_(0)  # past every dispatcher: seen at the next operator that is given it
        out.view(-1)
        assert sim.allocated_bytes() == KB


def test_data_and_set_swaps_are_charged_as_what_they_hold(sim: SimDevice) -> None:
    with sim.compute():
        a, b = square(), torch.ones(32, 16)
        a.data = b
        assert sim.allocated_bytes() == 2 * KB
        del b
        c = torch.empty(0).set_(a.untyped_storage())
        del a
        assert sim.allocated_bytes() == 2 * KB
        del c
        assert sim.allocated_bytes() == 0


def test_sparse_gradients_count_their_parts(sim: SimDevice) -> None:
    with sim.compute():
        table = nn.Embedding(16, 16, sparse=True)
        table(torch.tensor([1, 3])).sum().backward()
        grad = table.weight.grad
        assert grad is not None and grad.layout is torch.sparse_coo
        # The table; 2 x 8 bytes of indices; values of 2 x 64.
        assert sim.allocated_bytes() == KB + 512 + 512


def test_a_subclass_counts_what_it_wraps(sim: SimDevice) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    with sim.compute():
        pair = TwoTensor(square(), square())
        doubled = pair + pair
        assert sim.allocated_bytes() == 4 * KB
        assert all(torch.equal(getattr(doubled, part), square() * 2) for part in ("a", "b"))
        del pair
        assert sim.allocated_bytes() == 2 * KB


def test_fake_and_meta_tensors_count_nothing(sim: SimDevice) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with sim.compute():
        meta = torch.ones(64, device="meta") * 2
        with FakeTensorMode():
            fake = torch.ones(64) * 2
        assert sim.allocated_bytes() == 0
        assert meta.shape == fake.shape


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_only_the_result_is_kept(sim: SimDevice, mode: type[torch.no_grad | torch.inference_mode]) -> None:
    with sim.compute(), mode():
        y = square()
        for _ in range(4):
            y = F.linear(y, y).exp()
        assert sim.allocated_bytes() == KB
        assert sim.peak_allocated_bytes() <= 3 * KB


def test_threads_share_one_device_and_its_mode_is_entered_once() -> None:
    """A backward on another thread, and `compute()` inside of `compute()`: every operator is priced once."""

    def work(sim: SimDevice, *, nested: bool, thread: bool) -> float:
        def backward() -> None:
            with sim.compute():
                if nested:
                    with sim.compute():
                        loss.backward()
                else:
                    loss.backward()

        with sim.compute():
            x = square().requires_grad_()
            loss = x.sin().cos().sum()
        if thread:
            on_a_thread(backward)
        else:
            backward()
        assert x.grad is not None
        return sim.host_us

    expected = work(SimDevice(), nested=False, thread=False)
    assert work(SimDevice(), nested=True, thread=False) == pytest.approx(expected)
    assert work(SimDevice(), nested=True, thread=True) == pytest.approx(expected)
