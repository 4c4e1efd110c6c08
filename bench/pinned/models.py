"""Models at full size for recording what they save: a GPT, a mixture of experts and a ResNet. The Llama is in `_llama`.

    GPT(...).loss(tokens, targets)                 # dropout, GELU, biases, a vocabulary: many sizes, all following the length
    MoE(...).loss(x, routed=counts)                # counts[layer][expert]: tokens that the router sent there
    ResNet50().loss(images, labels)

Written as plain eager code writes them, since what autograd saves follows from that. They run on fake tensors: shapes, storages
and lifetimes are real, arithmetic is not done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chameleon_mm.bench._llama import RMSNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTShape:
    """GPT-2 large by default."""

    layers: int = 36
    width: int = 1280
    heads: int = 20
    vocabulary: int = 50257
    dropout: float = 0.1


class GPT(nn.Module):
    """Pre-norm blocks with biases, GELU and dropout, and a loss over the vocabulary."""

    def __init__(self, shape: GPTShape, longest: int) -> None:
        super().__init__()
        width = shape.width
        self.embed, self.place = nn.Embedding(shape.vocabulary, width), nn.Embedding(longest, width)
        self.drop = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(_GPTBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, shape.vocabulary, bias=False)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.embed(tokens) + self.place(places))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class _GPTBlock(nn.Module):
    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(mixed))
        return x + cast(Tensor, self.drop(self.down(F.gelu(self.up(self.norm2(x))))))


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEShape:
    """Half the width and half the layers of Mixtral 8x7B; two of eight experts for each token, as there."""

    layers: int = 16
    width: int = 2048
    heads: int = 16
    ffn: int = 5632
    experts: int = 8
    chosen: int = 2


class MoE(nn.Module):
    """Attention, then SwiGLU experts that each take the tokens routed to them."""

    def __init__(self, shape: MoEShape) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_MoEBlock(shape) for _ in range(shape.layers))

    def loss(self, x: Tensor, target: Tensor, routed: Sequence[Sequence[int]]) -> Tensor:
        """`x` and `target` are [tokens, width]; `routed[layer][expert]` says how many of the tokens go there."""
        for block, counts in zip(self.blocks, routed, strict=True):
            x = block(x, counts)
        return F.mse_loss(x.float(), target.float())


class _MoEBlock(nn.Module):
    def __init__(self, shape: MoEShape) -> None:
        super().__init__()
        width = shape.width
        self.heads, self.chosen = shape.heads, shape.chosen
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.router = nn.Linear(width, shape.experts, bias=False)
        self.gate, self.up, self.down = (
            nn.ModuleList(nn.Linear(a, b, bias=False) for _ in range(shape.experts))
            for a, b in ((width, shape.ffn), (width, shape.ffn), (shape.ffn, width))
        )

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        # [tokens, width] -> [1, heads, tokens, width / heads]
        qkv = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(0, 1).unsqueeze(0) for part in qkv)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(0).transpose(0, 1).flatten(1)
        x = x + self.out(mixed)
        h = self.norm2(x)
        weights = torch.topk(self.router(h).float().softmax(-1), self.chosen).values.flatten()  # [tokens * chosen]
        mixture = torch.zeros_like(h)
        for expert, count in enumerate(counts):
            # Which tokens they are decides no size; how many does.
            where = torch.zeros(count, dtype=torch.long, device=x.device)
            taken = h[where]
            done = self.down[expert](F.silu(self.gate[expert](taken)) * self.up[expert](taken))
            mixture = mixture.index_add(0, where, done * weights[where].to(done.dtype)[:, None])
        return x + mixture


class ResNet50(nn.Module):
    """Bottleneck blocks 3, 4, 6, 3; a block is 1x1, 3x3, 1x1, each with batch norm (He et al., arXiv 1512.03385, table 1)."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        width = 64
        for stage, count in enumerate((3, 4, 6, 3)):
            for position in range(count):
                stride = 2 if stage and position == 0 else 1
                blocks.append(_Bottleneck(width, 64 << stage, stride))
                width = 256 << stage
        self.stem = _conv(3, 64, 7, 2)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, classes)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(images), inplace=True), 3, stride=2, padding=1)
        return F.cross_entropy(self.head(self.blocks(x).mean((2, 3))).float(), labels)


class _Bottleneck(nn.Module):
    def __init__(self, width: int, inner: int, stride: int) -> None:
        super().__init__()
        outer = 4 * inner
        self.first, self.second, self.third = _conv(width, inner, 1), _conv(inner, inner, 3, stride), _conv(inner, outer, 1)
        self.shortcut = nn.Identity() if width == outer and stride == 1 else _conv(width, outer, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x), inplace=True)
        h = F.relu(self.second(h), inplace=True)
        return F.relu(self.third(h) + self.shortcut(x), inplace=True)


def _conv(a: int, b: int, kernel: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(nn.Conv2d(a, b, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(b))
