"""Training steps whose memory is compared between a simulator and a real allocator: four models, each with its data.

    training = Training(MODELS["gpt"], device)
    training.step()                         # forward, backward, optimizer, gradients dropped

Weights and data are drawn on the CPU and then moved, so that two devices have the same. Attention is by products and a softmax,
and AdamW by lists of tensors, on every device: left to choose, torch takes other operators on each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from chameleon_mm.device.protocols import Device
from chameleon_mm.tools.demo import GPT, VOCABULARY, GPTConfig


class Job(NamedTuple):
    """Model and data, on the CPU, and the function that computes a scalar from them."""

    model: nn.Module
    batch: tuple[Tensor, ...]
    loss: Callable[..., Tensor]


class Training:
    """Steps of one job on one device, from a fixed seed. Use inside `device.compute()`."""

    def __init__(self, make: Callable[[], Job], device: Device) -> None:
        torch.manual_seed(0)
        job = make()
        self.model = job.model.to(device.torch_device)
        self._batch = tuple(t.to(device.torch_device) for t in job.batch)
        self._loss = job.loss
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)

    def step(self) -> None:
        with sdpa_kernel(SDPBackend.MATH):
            loss = self._loss(self.model, *self._batch)
            loss.backward()
        del loss
        self.optimizer.step()
        self.optimizer.zero_grad()


def _mlp() -> Job:
    layers = [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.GELU())]
    return Job(nn.Sequential(*layers), (torch.randn(2048, 128),), lambda model, x: model(x).square().mean())


def _gpt(dropout: float = 0.0) -> Job:
    model = GPT(GPTConfig(layers=3, width=64, heads=2, context=256, dropout=dropout))
    ids = torch.randint(0, VOCABULARY, (4, 257))
    return Job(model, (ids[:, :-1].contiguous(), ids[:, 1:].contiguous()), lambda model, x, y: model.loss(x, y))


class ConvNet(nn.Module):
    """Convolutions with batch norm, at halved sizes; then an average and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 16, 32)
        pairs = list(pairwise(widths))
        self.convolutions = nn.ModuleList(nn.Conv2d(before, after, 3, padding=1) for before, after in pairs)
        self.norms = nn.ModuleList(nn.BatchNorm2d(after) for _, after in pairs)
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.max_pool2d(F.relu(norm(convolution(x))), 2)
        return cast(Tensor, self.head(x.mean((2, 3))))


def _conv() -> Job:
    data = torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,))
    return Job(ConvNet(), data, lambda model, x, y: F.cross_entropy(model(x), y))


class RecurrentNet(nn.Module):
    """Recurrence of a linear layer and tanh, one step after the other, as eager code writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.size(1), self.width)
        for at in x:
            state = torch.tanh(self.inner(at) + self.outer(state))
        return state


def _recurrent() -> Job:
    return Job(RecurrentNet(128), (torch.randn(16, 512, 128),), lambda model, x: model(x).square().mean())


MODELS: Mapping[str, Callable[[], Job]] = {
    "mlp": _mlp,
    "gpt": _gpt,
    "gpt, dropout": partial(_gpt, 0.1),
    "conv": _conv,
    "recurrent": _recurrent,
}
