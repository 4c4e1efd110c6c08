"""The drop-in: torch's own call, a pool of one's own or shared, bounded memory while it forwards."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.plan.rule import DEFAULT_BUDGET_SHARE
from chameleon_mm.units import KIB, MIB, allocated_size
from tests._mix_models import Block, Tied
from tests._programs import deep, gradient
from tests._random_models import RandomNet

pytestmark = pytest.mark.usefixtures("no_gc")


def swapped(device: Device, manager: cm.save_on_cpu, x: Tensor) -> Tensor:
    with device.compute():
        with manager:
            out = deep(x).sum()
        return torch.autograd.grad(out, x)[0]


@pytest.fixture
def x(device: Device) -> Tensor:
    return torch.randn(64, 64, device=device.torch_device, requires_grad=True)


# --- torch's call


def test_the_signature_begins_with_torchs() -> None:
    theirs = list(inspect.signature(torch.autograd.graph.save_on_cpu.__init__).parameters.values())[1:]
    ours = list(inspect.signature(cm.save_on_cpu.__init__).parameters.values())[1:]
    assert [(p.name, p.kind, p.default) for p in ours[: len(theirs)]] == [(p.name, p.kind, p.default) for p in theirs]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is None for p in ours[len(theirs) :])


@pytest.mark.parametrize(
    ("positional", "keywords"),
    [
        ((), {}),
        ((True,), {}),
        ((True, "cuda"), {}),
        ((), {"pin_memory": True}),
        ((), {"pin_memory": False, "device_type": "cuda"}),
        ((True,), {"device_type": "xpu"}),
    ],
)
def test_torchs_arguments_are_accepted_and_harmless(
    positional: tuple[bool, str], keywords: dict[str, object], device: Device, x: Tensor
) -> None:
    pool = cm.PinnedPool("8MiB", device=device)
    manager = cm.save_on_cpu(*positional, device=device, min_bytes=0, pool=pool, **keywords)  # type: ignore[arg-type]  # as a caller may
    assert torch.equal(swapped(device, manager, x), gradient(device, x))
    assert pool.stats().peak_live_bytes > 0
    assert pool.stats().num_live == 0


# --- bad input


def test_a_pool_of_another_device_is_refused_by_name() -> None:
    one, other = cm.SimDevice("h200"), cm.SimDevice("a100")
    pool = cm.PinnedPool("1MiB", device=one)
    with pytest.raises(ValueError, match=r"pool: expected one of simulated A100.*, got one of simulated H200; pass device"):
        cm.save_on_cpu(device=other, pool=pool)


# --- the pool


def test_a_manager_keeps_its_own_pool_between_entries(device: Device, x: Tensor) -> None:
    manager = cm.save_on_cpu(device=device, min_bytes=0)
    for _ in range(3):
        swapped(device, manager, x)
    stats = manager.pool.stats()
    assert stats.num_live == 0
    assert stats.reserved_bytes == 16 << 20, "one chunk"


def test_nothing_is_pinned_before_the_first_save(device: Device) -> None:
    manager = cm.save_on_cpu(device=device)
    with manager:
        pass
    assert manager.pool.stats().peak_reserved_bytes == 0


# --- hooks


def test_the_hooks_are_gone_after_the_block_even_by_an_exception(device: Device, x: Tensor) -> None:
    manager = cm.save_on_cpu(device=device, min_bytes=0)
    with pytest.raises(RuntimeError, match="the user's own"), manager:
        raise RuntimeError("the user's own")
    with device.compute():
        deep(x).sum().backward()
    assert manager.pool.stats().peak_live_bytes == 0


def test_small_tensors_stay_by_default(device: Device, x: Tensor) -> None:
    pool = cm.PinnedPool("8MiB", device=device)
    manager = cm.save_on_cpu(pool=pool)  # 1 MiB
    assert torch.equal(swapped(device, manager, x), gradient(device, x))
    assert pool.stats().peak_live_bytes == 0


# --- memory


def test_device_memory_is_bounded_while_the_graph_is_alive(sim: cm.SimDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link's activation is A. Every link of `deep` makes three and saves two; only autograd holds them.

    Unswapped, a graph of n links holds 2nA (tanh's result and exp's result), and the chain's own result beside it.
    Swapped, what is held once forward is over is
      LEAVING_BYTES                 copies on their way out (8A here): more make compute wait for the oldest
      + 2A                          the last link's saves, whose copies begin at the next hook at the earliest
      + A                           the result.
    """
    nbytes, links = MIB, 24
    leaving_bytes = 8 * nbytes
    # Needs the module's full name: in the package that name is the class.
    monkeypatch.setattr(importlib.import_module("chameleon_mm.api.save_on_cpu"), "LEAVING_BYTES", leaving_bytes)
    x = torch.randn(nbytes // 4, requires_grad=True)
    with sim.compute():
        plain = deep(x, links)
        before = sim.allocated_bytes()
        held_plain = before - nbytes  # x was counted with its first use
        del plain
        floor = sim.allocated_bytes()
        with cm.save_on_cpu(pool=cm.PinnedPool("256MiB", device=sim)):
            out = deep(x, links)
        held_swapped = sim.allocated_bytes() - floor
        del out
    assert floor == nbytes
    assert held_plain >= 2 * links * nbytes
    assert held_swapped <= leaving_bytes + 3 * nbytes
    assert leaving_bytes + 3 * nbytes < held_plain / 2  # the bound says something


# --- it fits wherever hooks fit that copy at save and back at use, plus the bound that its docstring names

# takes = synchronous(model)                       # peak of such hooks on the simulator, and the terms of the bound
# SimDevice(hbm_bytes=enough / 0.9)                # no more than that: never out of memory, and plain eager's bits


class Convolutions(nn.Module):
    """Blocks as in a ResNet: an activation in place, a residual, batch norms and their buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1)
            )
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = F.relu(x + block(x))
        return F.avg_pool2d(x, 4).mean((2, 3))


class Gated(nn.Module):
    """Halves of one storage, and the last position of a sequence: the rest of a storage comes back with the saved part."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(32, 256) for _ in range(3))
        self.back = nn.ModuleList(nn.Linear(128, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for wide, back in zip(self.wide, self.back, strict=True):
            a, b = wide(x).chunk(2, -1)
            x = x + back(torch.tanh(a) * b)
        return x[:, -1]


def transformer() -> nn.Module:
    return nn.Sequential(*(Block(32) for _ in range(6)))


Make = Callable[[], nn.Module]
Batch = Callable[[int], Tensor]


def random_model(seed: int) -> tuple[Make, Batch]:
    width = RandomNet(seed).width
    return (lambda: RandomNet(seed)), lambda rows: torch.randn(32 * rows, width)


MODELS: dict[str, tuple[Make, Batch]] = {
    "transformer": (transformer, lambda rows: torch.randn(rows, 32, 32)),
    "transformer, bfloat16": (lambda: transformer().bfloat16(), lambda rows: torch.randn(rows, 32, 32, dtype=torch.bfloat16)),
    "tied weights, float64": (lambda: Tied().double(), lambda rows: torch.randint(24, (64 * rows, 6))),
    "convolutions": (Convolutions, lambda rows: torch.randn(rows, 3, 16, 16)),
    "gated": (Gated, lambda rows: torch.randn(rows, 32, 32)),
    **{f"random {seed}": random_model(seed) for seed in (18, 19, 20)},
}
ROWS = (2, 2, 3, 1)
"""Rows of each step's batch: the third is larger than the first two have shown."""


def train(
    make: Make,
    batch: Batch,
    hooks: AbstractContextManager[object] | None,
    *,
    device: cm.SimDevice | None,
) -> list[Tensor]:
    """Steps of plain SGD; losses and final parameters. With no device: plain eager."""
    torch.manual_seed(0)
    with device.compute() if device is not None else torch.enable_grad():
        model = make()
        manager = hooks or nullcontext()
        losses = []
        for rows in ROWS:
            x = batch(rows)
            with manager:
                loss = model(x).square().mean()
            del x
            loss.backward()
            losses.append(loss.detach())
            del loss
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad, alpha=0.1)
            model.zero_grad()
        return [*losses, *(p.detach() for p in model.parameters())]


class Synchronous(torch.autograd.graph.saved_tensors_hooks):
    """torch's own algorithm (`torch.autograd.graph.save_on_cpu`) on simulated host memory, and the terms of the bound."""

    def __init__(self, device: cm.SimDevice, min_bytes: int) -> None:
        self._device, self._min_bytes = device, min_bytes
        self._small: dict[StorageWeakRef, int] = {}
        """Bytes of the storages below `min_bytes` that this pass saved. Parameters are there in any case."""
        self.most_small_bytes = 0
        self._saved: dict[int, dict[int, int]] = {}
        """Bytes of each storage, keyed by the operator's number and by the storage."""
        self._used: dict[int, int] = {}
        """Bytes of storages beyond those of the views used, keyed by backward's node."""
        super().__init__(self._pack, self._unpack)

    def __enter__(self) -> None:
        self._small.clear()
        super().__enter__()

    def _pack(self, t: Tensor) -> tuple[Tensor, int]:
        storage = t.untyped_storage()
        if storage.nbytes() < self._min_bytes and not isinstance(t, nn.Parameter):
            self._small[StorageWeakRef(storage)] = allocated_size(storage.nbytes())
            self.most_small_bytes = max(self.most_small_bytes, sum(self._small.values()))
        self._saved.setdefault(torch._C._autograd._get_sequence_nr(), {})[id(storage)] = storage.nbytes() + 512
        nbytes = t.numel() * t.element_size()
        host = self._device.alloc_pinned(max(nbytes, 1))[:nbytes].view(t.dtype).view(t.shape)
        with torch.no_grad():
            host.copy_(t)
        beside = storage.nbytes() - nbytes
        return host, 512 + beside + (nbytes if 4 * nbytes <= storage.nbytes() else 0)

    def _unpack(self, packed: tuple[Tensor, int]) -> Tensor:
        host, beside = packed
        node = torch._C._current_autograd_node()
        key = node._sequence_nr()
        self._used[key] = self._used.get(key, 0) + beside
        return torch.empty_like(host).copy_(host)

    @property
    def bound_bytes(self) -> int:
        """Terms 1 to 3 of the docstring of `save_on_cpu`, sizes rounded up as they are allocated."""
        largest = max(sum(storages.values()) for storages in self._saved.values())
        return largest + max(self._used.values()) + self.most_small_bytes


@dataclass(frozen=True)
class Takes:
    """Memory that synchronous hooks take for a model's steps."""

    peak_bytes: int
    bound_bytes: int

    @property
    def enough_bytes(self) -> int:
        """peak + terms 1 to 3."""
        return self.peak_bytes + self.bound_bytes


def synchronous(make: Make, batch: Batch, min_bytes: int) -> Takes:
    device = cm.SimDevice()
    hooks = Synchronous(device, min_bytes)
    train(make, batch, hooks, device=device)
    return Takes(device.peak_allocated_bytes(), hooks.bound_bytes)


@pytest.mark.ci
@pytest.mark.parametrize("min_bytes", [0, 3 * KIB, 12 * KIB])
@pytest.mark.parametrize("name", MODELS)
def test_it_fits_where_synchronous_hooks_fit_with_plain_eagers_bits(name: str, min_bytes: int) -> None:
    make, batch = MODELS[name]
    takes = synchronous(make, batch, min_bytes)
    unswapped = cm.SimDevice()
    train(make, batch, None, device=unswapped)
    expected = train(make, batch, None, device=None)
    device = cm.SimDevice(hbm_bytes=int(takes.enough_bytes / DEFAULT_BUDGET_SHARE) + 1)
    got = train(make, batch, cm.save_on_cpu(device=device, min_bytes=min_bytes), device=device)
    assert device.peak_allocated_bytes() <= takes.enough_bytes
    assert all(map(torch.equal, got, expected))
    if not name.startswith("random") and not min_bytes:  # the bound says something: they do not fit as they are
        assert takes.enough_bytes < unswapped.peak_allocated_bytes()


def test_what_earlier_passes_have_shown_is_used(sim: cm.SimDevice) -> None:
    """With room for half of the activations, the second pass uses more memory than the first, which knows nothing."""
    held = []
    device = cm.SimDevice(hbm_bytes=24 * MIB)
    with device.compute():
        manager = cm.save_on_cpu(device=device)
        x = torch.randn(MIB // 4, requires_grad=True)
        for _ in range(2):
            device.reset_peaks()
            with manager:
                y = x
                for _ in range(16):
                    y = torch.tanh(y * 1.5)
            y.sum().backward()
            del y
            held.append(device.peak_allocated_bytes())
    # x, its gradient, an operator's input, result and saved tensor, and the gradient that goes back: at most 6 of them
    assert held[0] <= 6 * MIB
    assert held[0] < held[1] <= 24 * MIB * DEFAULT_BUDGET_SHARE
