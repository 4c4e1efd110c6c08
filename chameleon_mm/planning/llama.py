"""A Llama, as plain eager code writes it: RMSNorm and RoPE of several operators, fused attention, SwiGLU.

x = embedding(ids)
per layer:  x = x + out(attention(rope(q), rope(k), v))     # q, k, v = projections of norm(x); fewer heads of k and v
            x = x + down(silu(gate(h)) * up(h))             # h = norm(x)
loss = cross_entropy(head(norm(x)) in float32, the next token)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes of a Llama."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    """Heads of keys and of values, a divisor of `heads`."""
    ffn: int
    """Width inside the SwiGLU."""
    vocabulary: int
    context: int
    """Tokens of a row that it is trained on, unless somebody says otherwise."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x**2) + eps) * weight, all but the last product in float32."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention, in which each head of k and v is shared by heads / kv_heads of q."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        kv_width = shape.kv_heads * self.head_width
        self.grouped = shape.kv_heads < shape.heads
        self.q = nn.Linear(shape.width, shape.width, bias=False)
        self.k = nn.Linear(shape.width, kv_width, bias=False)
        self.v = nn.Linear(shape.width, kv_width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # [b, s, heads * d] -> [b, heads, s, d]
        q, k, v = (linear(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        q, k = q * cos + _turned(q) * sin, k * cos + _turned(k) * sin
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return cast(Tensor, self.out(mixed.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    """Attention, then SwiGLU, each on a normalised copy of the residual stream."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(shape.width), RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.gate, self.up = (nn.Linear(shape.width, shape.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.ffn, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        h = self.ffn_norm(x)
        return x + cast(Tensor, self.down(F.silu(self.gate(h)) * self.up(h)))


class Llama(nn.Module):
    """`loss` maps ids int64 [b, s] to the mean cross-entropy of each next token, a float32 scalar."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        cos, sin = _rotation(ids.shape[1], self.head_width, x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return cast(Tensor, self.head(self.norm(x)))

    def loss(self, ids: Tensor) -> Tensor:
        logits = self(ids).float()
        targets = F.pad(ids, (0, 1), value=-100)[:, 1:]  # the last token has no next one
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def _turned(x: Tensor) -> Tensor:
    """Tensor with the halves of its last dimension rotated against each other by a right angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _rotation(seq: int, head_width: int, like: Tensor, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, [seq, head_width] each, in the dtype of `like`."""
    rates = base ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angles = torch.arange(seq, dtype=torch.float32)[:, None] * rates
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)
