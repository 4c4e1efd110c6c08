"""Model of the training benchmark: a stack of Llama-shaped blocks in plain eager code.

    x = x + out(attention(rope(q), rope(k), v))          # q, k, v = projections of rms_norm(x)
    x = x + down(silu(gate(h)) * up(h))                  # h = rms_norm(x)
    loss = mean((x - target)**2)                         # no vocabulary: its size would hide the blocks'

A block saves 54 bytes per token and unit of width in bf16 at ffn = 3.5 * width; `Shape.layer_saved_bytes` has the terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the stack and of one batch. Raises `ValueError` for sizes that cannot be built."""

    layers: int
    width: int
    heads: int
    ffn: int
    """Width inside the SwiGLU."""
    seq: int
    """Tokens per row."""
    batch: int
    """Rows per step."""
    dtype: str

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "ffn", "seq", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}: expected 1 or more, got {getattr(self, name)}")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"--width: expected a multiple of 2 * heads ({2 * self.heads}, RoPE turns pairs), got {self.width}"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}")

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def layer_state_bytes(self) -> int:
        """Parameters, gradients and AdamW's two moments of one block, all in `dtype`: 4 * (4 * width**2 + 3 * width * ffn)."""
        return 4 * DTYPES[self.dtype].itemsize * (4 * self.width**2 + 3 * self.width * self.ffn)

    @property
    def layer_saved_bytes(self) -> int:
        """Bytes that one block saves from forward to backward, without swapping; `e` is the size of `dtype`.

        Norms, twice: the input in fp32 (4 width), its quotient in `dtype` (e width), the result (e width). Attention: q and k
        after RoPE, v, the output, and the output with heads side by side (5e width; kernels with that layout save the last).
        SwiGLU: gate, silu(gate), up, their product (4e ffn).
        """
        e = DTYPES[self.dtype].itemsize
        per_token = 2 * (4 + 2 * e) * self.width + 5 * e * self.width + 4 * e * self.ffn
        return self.tokens * per_token


class RMSNorm(nn.Module):
    """x / sqrt(mean(x**2) + eps) * weight, with statistics in fp32."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return scaled.to(x.dtype) * self.weight


class Rope(nn.Module):
    """Rotary position embedding of [batch, heads, seq, head_width], halves rotated against each other."""

    cos: Tensor
    sin: Tensor

    def __init__(self, seq: int, head_width: int, base: float = 10_000.0) -> None:
        super().__init__()
        rates = base ** (-torch.arange(0, head_width, 2).float() / head_width)
        angles = torch.arange(seq).float()[:, None] * rates
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * self.cos - second * self.sin, second * self.cos + first * self.sin), dim=-1)


class Block(nn.Module):
    """Attention, then SwiGLU, each on a normalised copy of the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention_norm, self.ffn_norm = RMSNorm(width), RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, shape.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.ffn, width, bias=False)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        h = self.attention_norm(x)
        # [batch, seq, width] -> [batch, heads, seq, width / heads]
        q, k, v = (linear(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(rope(q), rope(k), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + cast(Tensor, self.down(F.silu(self.gate(h)) * self.up(h)))


class Stack(nn.Module):
    """Stack of `shape.layers` blocks. With `checkpointed`, each saves only its input and runs again in backward."""

    def __init__(self, shape: Shape, *, device: torch.device, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        with device:
            self.rope = Rope(shape.seq, shape.width // shape.heads)
            self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.to(DTYPES[shape.dtype])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, self.rope, use_reentrant=False) if self.checkpointed else block(x, self.rope)
        return x

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self(x).float(), target.float())


def noise(shape: Shape, device: torch.device) -> Tensor:
    """Random inputs or targets: [batch, seq, width]."""
    return torch.randn(shape.batch, shape.seq, shape.width, dtype=DTYPES[shape.dtype], device=device)
