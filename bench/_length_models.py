"""Models that take batches of any length, and distributions of lengths as in training.

model = MODELS["llama"]()
loss = model(tokens)                     # (rows, length), int64: loss of the next token, or of masked tokens
lengths_of("log-normal", 200, Random(0))
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SHORTEST, LONGEST = 20, 2048
MEDIAN_LENGTH, SIGMA = 180, 0.9
"""Median and width of the log-normal distribution: about those of instruction data, with its tail of long answers."""
DISTRIBUTIONS = ("uniform", "log-normal")


class LengthModel(nn.Module):
    """A model that returns the loss of a batch of tokens."""

    vocabulary = 256


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, is_causal: bool, bias: bool) -> None:
        super().__init__()
        self.projections, self.out = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        self.heads, self.is_causal = heads, is_causal

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.projections(x).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return cast(Tensor, self.out(attended.transpose(1, 2).reshape(rows, length, width)))


class _LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(width), _Attention(width, heads, is_causal=True, bias=False)
        self.ffn_norm = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        h = self.ffn_norm(x)
        return cast(Tensor, x + self.down(F.silu(self.gate(h)) * self.up(h)))


class _Decoder(LengthModel):
    """Blocks between an embedding and a head; the loss is of the next token."""

    def __init__(self, width: int, layers: int, make_block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.vocabulary, width)
        self.blocks = nn.ModuleList(make_block() for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, self.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.reshape(-1, self.vocabulary), tokens[:, 1:].reshape(-1))


class Llama(_Decoder):
    """Pre-norm blocks with SwiGLU."""

    def __init__(self, width: int = 64, layers: int = 3, heads: int = 4) -> None:
        super().__init__(width, layers, lambda: _LlamaBlock(width, heads))


class _MixtureBlock(nn.Module):
    """Attention, then each token through two of several experts. The number of tokens per expert depends on the data."""

    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(width), _Attention(width, heads, is_causal=True, bias=False)
        self.ffn_norm, self.router = nn.RMSNorm(width), nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        h = self.ffn_norm(x).flatten(0, 1)
        weights, chosen = self.router(h).softmax(-1).topk(2)
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(h[token]) * weights[token, place, None])
        return x + out.view_as(x)


class Mixture(_Decoder):
    """Pre-norm blocks with a mixture of experts."""

    def __init__(self, width: int = 64, layers: int = 3, heads: int = 4, experts: int = 6) -> None:
        super().__init__(width, layers, lambda: _MixtureBlock(width, heads, experts))


class _BertBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.norm = _Attention(width, heads, is_causal=False, bias=True), nn.LayerNorm(width)
        self.up, self.down, self.ffn_norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + F.dropout(self.attention(x), 0.1, self.training))
        return cast(Tensor, self.ffn_norm(x + F.dropout(self.down(F.gelu(self.up(x))), 0.1, self.training)))


class Bert(LengthModel):
    """Post-norm blocks with dropout and learned positions; the loss is of every seventh token, which is masked."""

    def __init__(self, width: int = 64, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(self.vocabulary, width), nn.Embedding(LONGEST, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(_BertBlock(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, self.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        is_masked = (torch.arange(tokens.shape[1], device=tokens.device) % 7 == 0).expand_as(tokens)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.embedding(tokens.masked_fill(is_masked, 0)) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        targets = tokens.masked_fill(~is_masked, -100)
        return F.cross_entropy(self.head(x).reshape(-1, self.vocabulary), targets.reshape(-1))


MODELS: dict[str, Callable[[], LengthModel]] = {"llama": Llama, "bert": Bert, "mixture": Mixture}


def lengths_of(distribution: str, steps: int, rng: Random, *, longest: int = LONGEST) -> list[int]:
    """Length of each of `steps` batches, from `SHORTEST` to `longest`. Raises `ValueError` for an unknown distribution."""
    if distribution == "uniform":
        return [rng.randint(SHORTEST, longest) for _ in range(steps)]
    if distribution == "log-normal":
        scale = longest / LONGEST
        drawn = (int(scale * MEDIAN_LENGTH * rng.lognormvariate(0.0, SIGMA)) for _ in range(steps))
        return [min(longest, max(SHORTEST, length)) for length in drawn]
    raise ValueError(f"--distribution: expected one of {', '.join(DISTRIBUTIONS)}, got {distribution!r}")


def batch_of(model: LengthModel, shape: tuple[int, int], number: int) -> Tensor:
    """Random tokens of step `number`: (rows, length), int64, on the CPU."""
    return torch.randint(0, model.vocabulary, shape, generator=torch.Generator().manual_seed(number))


def training_step(model: LengthModel, optimizer: torch.optim.Optimizer, batch: Tensor) -> float:
    """Run a step and free its gradients. Returns its loss."""
    loss = model(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())
