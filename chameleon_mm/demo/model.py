"""The demo's model: a GPT over bytes, small enough to read in one sitting.

x = dropout(tokens[ids] + positions[:t])
for block in blocks:                          # pre-norm: the residual stream itself is never normalised
    x = x + dropout(attention(norm(x)))
    x = x + dropout(mlp(norm(x)))
logits = head(norm(x))                        # 256 of them: the vocabulary is the byte
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Shape of a `GPT`. Raises `ValueError` for a shape that cannot be built."""

    layers: int
    width: int
    heads: int
    """Attention heads; each is `width / heads` wide."""
    context: int
    """The most bytes the model looks back on, and the length of a training row."""
    dropout: float = 0.1
    """Share of values dropped after the embedding and after each residual branch, 0 <= dropout < 1."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}: expected 1 or more, got {value}")
        if self.width % self.heads:
            raise ValueError(f"width: expected a multiple of heads ({self.heads}), got {self.width}")


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # [b, t, 3w] -> three of [b, heads, t, w / heads], views of one storage
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return cast(Tensor, self.out(mixed.transpose(1, 2).reshape(batch, length, width)))


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return cast(Tensor, x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x))))))


class GPT(nn.Module):
    """A byte-level GPT: `forward` maps ids [batch, length] (int64, 0..255) to logits [batch, length, 256].

    Weights are drawn from torch's default generator of `device`: seed it first.
    """

    def __init__(self, config: GPTConfig, *, device: torch.device | None = None) -> None:
        super().__init__()
        self.config = config
        with device or torch.get_default_device():
            self.tokens = nn.Embedding(VOCABULARY, config.width)
            self.positions = nn.Parameter(torch.zeros(config.context, config.width))
            self.dropout = nn.Dropout(config.dropout)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.norm = nn.LayerNorm(config.width)
            self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:  # torch's own draws for an embedding are too wide for a head of the same weight
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.tokens(ids) + self.positions[: ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy per byte, in nats (a scalar)."""
        return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())
