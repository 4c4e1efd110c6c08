"""Training with swapping is bit-identical to plain PyTorch's: losses, gradients, weights, RNG state. Sim always, CUDA too.

The reference runs on plain tensors, outside of `device.compute()`. `reproducible` only sets flags of torch's, for both.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.device.reproducible import reproducible


class Block(nn.Module):
    """Pre-norm attention and MLP with dropout: what a transformer saves for backward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)), 0.1, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1, self.training)


class Transformer(nn.Module):
    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32, 2) for _ in range(3))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.RReLU()
    )


@dataclass
class Case:
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]


CASES = {
    "transformer": Case(Transformer, (4, 16, 32)),
    "transformer, recomputed": Case(lambda: Transformer(recompute=True), (4, 16, 32)),
    "convolutional": Case(convolutional, (4, 2, 12, 12)),
    "recurrent": Case(lambda: nn.GRU(16, 24, num_layers=2, dropout=0.1), (6, 4, 16)),
}

Swapping = Callable[[Device, nn.Module], AbstractContextManager[object]]


def session(device: Device, model: nn.Module) -> cm.SwapSession:
    return cm.SwapSession(hbm_budget=device.allocated_bytes() + (1 << 20), host_budget="64MiB", device=device, min_bytes=256)


def stateless(device: Device, model: nn.Module) -> cm.save_on_cpu:
    return cm.save_on_cpu(pin_memory=True, device=device, min_bytes=0, pool=cm.PinnedPool("64MiB", device=device))


@dataclass
class Outcome:
    """Everything that training leaves behind."""

    tensors: list[Tensor]
    rng: list[Tensor]


def train(case: Case, device: Device, swapping: Swapping | None, *, steps: int = 4, micro_batches: int = 2) -> Outcome:
    torch.manual_seed(7)
    kept: list[Tensor] = []
    # On a GPU convolutions and attention would differ from one unswapped run to the next.
    with reproducible(), nullcontext() if swapping is None else device.compute():
        model = case.model().to(device.torch_device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with nullcontext() if swapping is None else swapping(device, model) as manager:
            for _ in range(steps):
                with manager.step() if isinstance(manager, cm.SwapSession) else nullcontext():
                    for _ in range(micro_batches):
                        out = model(torch.randn(case.shape, device=device.torch_device))
                        loss = (out[0] if isinstance(out, tuple) else out).square().mean()
                        loss.backward()
                        kept.append(loss.detach())
                    kept.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
                    optimizer.step()
                    optimizer.zero_grad()
        kept.extend(p.detach() for p in model.parameters())
        kept.extend(b.detach() for b in model.buffers())
    rng = [torch.get_rng_state()]
    if device.torch_device.type == "cuda":
        rng.append(torch.cuda.get_rng_state(device.torch_device))
    return Outcome([t.cpu() for t in kept], rng)


def assert_same_bits(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    for number, (a, b) in enumerate(zip(left, right, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape
        same = (
            torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) if a.dim() else bits(a) == bits(b)
        )
        assert same, f"tensor {number} of {len(left)} differs"


def bits(scalar: Tensor) -> list[int]:
    return scalar.reshape(1).view(torch.uint8).tolist()


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("swapping", [session, stateless])
@pytest.mark.parametrize("name", CASES)
def test_swapped_training_is_bit_identical(name: str, swapping: Swapping, device: Device) -> None:
    plain = train(CASES[name], device, None)
    swapped = train(CASES[name], device, swapping)
    assert_same_bits(plain.tensors, swapped.tensors)
    assert_same_bits(plain.rng, swapped.rng)


def test_the_comparison_sees_one_bit(sim: Device) -> None:
    plain = train(CASES["recurrent"], sim, None, steps=1)
    other = [t.clone() for t in plain.tensors]
    last = other[-1].view(torch.uint8)
    last[0] ^= 1
    with pytest.raises(AssertionError, match="differs"):
        assert_same_bits(plain.tensors, other)


@pytest.mark.usefixtures("no_gc")
def test_activations_are_really_swapped(sim: Device) -> None:
    reports: list[cm.SwapReport] = []

    def reporting(device: Device, model: nn.Module) -> cm.SwapSession:
        made = session(device, model)
        made_session.append(made)
        return made

    made_session: list[cm.SwapSession] = []
    train(CASES["transformer"], sim, reporting)
    reports.append(made_session[0].report())
    assert reports[0].bytes_swapped_out > 0
    assert reports[0].bytes_swapped_in > 0
    assert made_session[0].pool.stats().num_live == 0
