"""Models known by name, which need nothing but torch: a Llama, as plain eager code writes it, and a GPT-2.

    BUILT_IN["llama-7b"]            sizes, as published
    built_in("llama-7b", batch=1, seq=None)()

    x = embedding(ids)
    per layer:  x = x + out(attention(rope(q), rope(k), v))     # q, k, v = projections of norm(x); fewer heads of k and v
                x = x + down(silu(gate(h)) * up(h))             # h = norm(x): RMSNorm and RoPE are several operators each
    loss = cross_entropy(head(norm(x)) in float32, the next token)

A Llama's operators are those of Hugging Face's. A GPT-2's are not, and say so (`_GPT2_SAVES`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chameleon_mm.demo.model import GPT, GPTConfig
from chameleon_mm.planning.workload import Build, ModelUnusable, Workload


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt2Shape:
    """Sizes of a GPT-2, whose positions are learned: a row longer than its context it cannot read."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 50257
    context: int = 1024


BUILT_IN: dict[str, LlamaShape | Gpt2Shape] = {
    "llama-7b": LlamaShape(layers=32, width=4096, heads=32, kv_heads=32, ffn=11008, vocabulary=32000, context=4096),
    "llama-13b": LlamaShape(layers=40, width=5120, heads=40, kv_heads=40, ffn=13824, vocabulary=32000, context=4096),
    "llama-70b": LlamaShape(layers=80, width=8192, heads=64, kv_heads=8, ffn=28672, vocabulary=32000, context=4096),
    "llama-3-8b": LlamaShape(layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256, context=8192),
    "gpt2": Gpt2Shape(layers=12, width=768, heads=12),
    "gpt2-medium": Gpt2Shape(layers=24, width=1024, heads=16),
    "gpt2-large": Gpt2Shape(layers=36, width=1280, heads=20),
    "gpt2-xl": Gpt2Shape(layers=48, width=1600, heads=25),
}
"""The Llama 2 papers' sizes (arXiv 2307.09288), Llama 3's (arXiv 2407.21783), GPT-2's by its published configurations."""


_GPT2_SAVES = (
    "this gpt2 has the fused GELU, and its loss in the dtype of its logits; Hugging Face's, with GELU written out and the loss "
    "in float32, saves more"
)


class Gpt2(GPT):
    """The demo's GPT with GPT-2's vocabulary."""

    def __init__(self, shape: Gpt2Shape) -> None:
        super().__init__(GPTConfig(layers=shape.layers, width=shape.width, heads=shape.heads, context=shape.context))
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight


def built_in(name: str, *, batch: int, seq: int | None, layers: int | None = None) -> Build:
    """The model called `name`, `batch` rows of `seq` tokens (None: as many as its context has), of `layers` layers (None: its
    own number).

    Raises `ModelUnusable` for a row that it cannot read.
    """
    shape = BUILT_IN[name] if layers is None else replace(BUILT_IN[name], layers=layers)
    tokens = shape.context if seq is None else seq
    if isinstance(shape, Gpt2Shape) and tokens > shape.context:
        raise ModelUnusable(f"--seq: expected {shape.context} tokens at most, all that {name} can read, got {tokens}")

    def build() -> Workload:
        about = f"{name}{'' if layers is None else f' of {layers} layers'}, {batch} x {tokens} tokens"
        ids = torch.zeros(batch, tokens, dtype=torch.int64)
        if isinstance(shape, LlamaShape):
            llama = Llama(shape)
            return Workload(about=about, model=llama, loss=lambda: llama.loss(ids))
        gpt = Gpt2(shape)
        return Workload(about=about, model=gpt, loss=lambda: gpt.loss(ids, ids), notes=(_GPT2_SAVES,))

    return build
