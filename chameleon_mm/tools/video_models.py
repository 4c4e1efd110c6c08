"""A video diffusion transformer in plain eager code, as Open-Sora-Plan trains: for `plan`, `bench training` and the example.

    shape = VIDEO_MODELS["video-dit-2b"]
    model = shape.model()
    loss = model.loss(*shape.batch(rows))

Latents of a video [b, channels, frames, height, width] become patches of 1 x 2 x 2. Each block attends within a frame, then
along the frames at one place, then to the caption, and has an MLP. The time shifts, scales and gates them (adaLN-single, arXiv
2310.00426). The model is trained to predict the velocity between noise and latents (rectified flow, arXiv 2209.03003).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chameleon_mm.tools.image_models import mlp, waves

_PATCH = 2
"""Side of a patch in latents; a patch is of one frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoShape:
    layers: int
    width: int
    heads: int
    frames: int = 17
    """Frames of latents; Open-Sora-Plan's trained VAE makes 17 of 65. No encoder is part of these models."""
    sides: tuple[int, int]
    """Height and width in latents, an eighth of the pixels; even."""
    channels: int = 4
    caption: int = 300
    """Tokens of a caption, of `caption_width` each, as a frozen text encoder gives them."""
    caption_width: int = 4096

    @property
    def about(self) -> str:
        """Size of one row of the batch, as text."""
        return f"{self.channels} x {self.frames} x {self.sides[0]} x {self.sides[1]} latents"

    def model(self) -> VideoDiT:
        return VideoDiT(self)

    def batch(self, rows: int, **factory: torch.dtype | torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Latents and noise [rows, channels, frames, height, width], captions [rows, tokens, width], times [rows] of 0 to 1."""
        video = (rows, self.channels, self.frames, *self.sides)
        made: dict[str, Any] = factory
        latents, noise = torch.randn(video, **made), torch.randn(video, **made)
        return latents, noise, torch.randn(rows, self.caption, self.caption_width, **made), torch.rand(rows, **made)


class Attention(nn.Module):
    """Attention of `x` [b, s, width] to itself, or to `other` [b, t, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(x if other is None else other).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return cast(Tensor, self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


class VideoBlock(nn.Module):
    """Attention within frames, along frames and to the caption, then an MLP, on tokens [b, frames, places, width]."""

    def __init__(self, shape: VideoShape) -> None:
        super().__init__()
        width = shape.width
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.spatial, self.temporal, self.caption = (Attention(width, shape.heads) for _ in range(3))
        self.mlp = mlp(width, "tanh")
        self.offsets = nn.Parameter(torch.zeros(9, width))

    def forward(self, x: Tensor, caption: Tensor, time: Tensor) -> Tensor:
        """`time`: [b, 9, width], a shift, a scale and a gate for each of three parts."""
        parts = (time + self.offsets)[:, :, None, None].chunk(9, dim=1)
        shifts, scales, gates = ([part[:, 0] for part in parts[i::3]] for i in range(3))
        frames, places = x.shape[1:3]
        within = self.spatial((self.norm(x) * (1 + scales[0]) + shifts[0]).flatten(0, 1))
        x = x + gates[0] * within.unflatten(0, (-1, frames))
        along = self.temporal((self.norm(x) * (1 + scales[1]) + shifts[1]).transpose(1, 2).flatten(0, 1))
        x = x + gates[1] * along.unflatten(0, (-1, places)).transpose(1, 2)
        x = x + self.caption(x.flatten(1, 2), caption).unflatten(1, (frames, places))
        return cast(Tensor, x + gates[2] * self.mlp(self.norm(x) * (1 + scales[2]) + shifts[2]))


class VideoDiT(nn.Module):
    def __init__(self, shape: VideoShape) -> None:
        super().__init__()
        width, places = shape.width, shape.sides[0] * shape.sides[1] // _PATCH**2
        self.patches = nn.Conv3d(shape.channels, width, (1, _PATCH, _PATCH), (1, _PATCH, _PATCH))
        self.positions = nn.Parameter(0.02 * torch.randn(1, shape.frames, places, width))
        self.times = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, 9 * width))
        self.captions = nn.Sequential(nn.Linear(shape.caption_width, width), nn.GELU("tanh"), nn.Linear(width, width))
        self.blocks = nn.ModuleList(VideoBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, _PATCH**2 * shape.channels)

    def forward(self, latents: Tensor, captions: Tensor, times: Tensor) -> Tensor:
        """latents [b, channels, frames, height, width], captions [b, tokens, width], times [b] -> as the latents."""
        height, width = latents.shape[-2:]
        x = self.patches(latents).flatten(3).permute(0, 2, 3, 1) + self.positions
        time = self.times(waves(1000 * times.float()).to(x.dtype)).unflatten(-1, (9, -1))
        captions = self.captions(captions)
        for block in self.blocks:
            x = block(x, captions, time)
        # [b, f, h / 2 * w / 2, 2 * 2 * c] -> [b, c, f, h, w]
        x = self.head(self.norm(x)).unflatten(-1, (_PATCH, _PATCH, -1)).unflatten(2, (height // _PATCH, width // _PATCH))
        return cast(Tensor, x.permute(0, 6, 1, 2, 4, 3, 5).reshape(latents.shape))

    def loss(self, latents: Tensor, noise: Tensor, captions: Tensor, times: Tensor) -> Tensor:
        """Mean square error of the velocity that is predicted at `times`, a float32 scalar."""
        at = times[:, None, None, None, None]
        predicted = self((1 - at) * latents + at * noise, captions, times)
        return F.mse_loss(predicted.float(), (noise - latents).float())


VIDEO_MODELS = {"video-dit-2b": VideoShape(layers=28, width=1920, heads=24, sides=(60, 80))}
"""About Open-Sora-Plan's (arXiv 2412.00131) at 65 frames of 480 x 640 pixels: its layers and width, rounded to two billion."""
