"""Image models whose step can be predicted: a ViT, a DiT and a ResNet, in plain eager code.

    model = IMAGE_MODELS["vit-l16"].model()
    loss = model.loss(*IMAGE_MODELS["vit-l16"].batch(rows))

Only shapes count. Sizes and saved tensors are those of the published models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chameleon_mm.tools.demo import Attention

CLASSES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageShape:
    """A stack of equal layers on patches of a square image. For a ResNet `layers` is None: its stages are fixed."""

    about: str
    """Size of one row of the batch, as text."""
    layers: int | None
    width: int
    heads: int
    side: int
    """Side of the image, in pixels or in latents."""
    channels: int
    patch: int
    make: Callable[[ImageShape], ImageModel]

    @property
    def tokens(self) -> int:
        return (self.side // self.patch) ** 2

    def model(self) -> ImageModel:
        return self.make(self)

    def batch(self, rows: int) -> tuple[Tensor, Tensor]:
        """Images [rows, channels, side, side] and their classes, int64 [rows]."""
        return torch.zeros(rows, self.channels, self.side, self.side), torch.zeros(rows, dtype=torch.int64)


class ImageModel(nn.Module):
    def loss(self, images: Tensor, classes: Tensor) -> Tensor:
        """Mean cross-entropy of the classes, a float32 scalar."""
        return F.cross_entropy(self(images).float(), classes)


def mlp(width: int, approximate: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate), nn.Linear(4 * width, width))


def waves(times: Tensor) -> Tensor:
    """Times [b] as cosines and sines of 128 frequencies: float32 [b, 256]."""
    angles = times[:, None].float() * torch.exp(torch.arange(128, device=times.device) / -14.0)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class ViTBlock(nn.Module):
    def __init__(self, shape: ImageShape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention, self.mlp = Attention(shape.width, shape.heads, causal=False), mlp(shape.width, "none")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return cast(Tensor, x + self.mlp(self.norm2(x)))


class ViT(ImageModel):
    """Vision transformer (arXiv 2010.11929), with a class token."""

    def __init__(self, shape: ImageShape) -> None:
        super().__init__()
        self.patches = nn.Conv2d(shape.channels, shape.width, shape.patch, stride=shape.patch)
        self.first = nn.Parameter(torch.zeros(1, 1, shape.width))
        self.positions = nn.Parameter(torch.zeros(1, shape.tokens + 1, shape.width))
        self.blocks = nn.ModuleList(ViTBlock(shape) for _ in range(shape.layers or 0))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(len(x), -1, -1), x), dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)[:, 0]))


class DiTBlock(nn.Module):
    """Attention and MLP, shifted, scaled and gated by the condition (adaLN-Zero)."""

    def __init__(self, shape: ImageShape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width, eps=1e-6, elementwise_affine=False)
        self.attention, self.mlp = Attention(shape.width, shape.heads, causal=False), mlp(shape.width, "tanh")
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(shape.width, 6 * shape.width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition)[:, None].chunk(6, dim=-1)
        x = x + gate1 * self.attention(self.norm(x) * (1 + scale1) + shift1)
        return cast(Tensor, x + gate2 * self.mlp(self.norm(x) * (1 + scale2) + shift2))


class DiT(ImageModel):
    """Diffusion transformer (arXiv 2212.09748) on latents: predicts the noise, and as many channels of its variance."""

    positions: Tensor

    def __init__(self, shape: ImageShape) -> None:
        super().__init__()
        self.patches = nn.Conv2d(shape.channels, shape.width, shape.patch, stride=shape.patch)
        self.register_buffer("positions", torch.zeros(1, shape.tokens, shape.width))
        self.times = nn.Sequential(nn.Linear(256, shape.width), nn.SiLU(), nn.Linear(shape.width, shape.width))
        self.classes = nn.Embedding(CLASSES + 1, shape.width)
        self.blocks = nn.ModuleList(DiTBlock(shape) for _ in range(shape.layers or 0))
        self.norm = nn.LayerNorm(shape.width, eps=1e-6, elementwise_affine=False)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(shape.width, 2 * shape.width))
        self.head = nn.Linear(shape.width, shape.patch**2 * 2 * shape.channels)

    def forward(self, latents: Tensor, times: Tensor, classes: Tensor) -> Tensor:
        """latents [b, channels, side, side], times [b], classes [b] -> [b, tokens, patch**2 * 2 * channels]."""
        x = self.patches(latents).flatten(2).transpose(1, 2) + self.positions
        condition = self.times(waves(times).to(x.dtype)) + self.classes(classes)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(condition)[:, None].chunk(2, dim=-1)
        return cast(Tensor, self.head(self.norm(x) * (1 + scale) + shift))

    def loss(self, images: Tensor, classes: Tensor) -> Tensor:
        """Return the mean square error of all predictions, a float32 scalar. The published loss also weighs the variance."""
        predicted = self(images, classes, classes)  # classes in place of times: int64 [rows], too
        return F.mse_loss(predicted.float(), torch.zeros_like(predicted).float())


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1 beside the input, each with a batch norm."""

    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        wide = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(given, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide),
        )  # fmt: skip
        beside = nn.Sequential(nn.Conv2d(given, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))
        self.beside = nn.Identity() if given == wide else beside

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.beside(x), inplace=True)


class ResNet(ImageModel):
    """ResNet (arXiv 1512.03385) of 50 layers, the stride in the 3 x 3 convolutions, as torchvision has it."""

    def __init__(self, shape: ImageShape) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(shape.channels, shape.width, 7, 2, 3, bias=False), nn.BatchNorm2d(shape.width), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        blocks, given = [], shape.width
        for stage, depth in enumerate((3, 4, 6, 3)):
            for place in range(depth):
                width = shape.width << stage
                blocks.append(Bottleneck(given, width, 2 if stage and not place else 1))
                given = 4 * width
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(given, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.blocks(self.stem(images)).mean((2, 3))))


IMAGE_MODELS = {
    "vit-l16": ImageShape(about="224 x 224 pixels", layers=24, width=1024, heads=16, side=224, channels=3, patch=16, make=ViT),
    "dit-xl2": ImageShape(
        about="32 x 32 latents of 4 channels", layers=28, width=1152, heads=16, side=32, channels=4, patch=2, make=DiT
    ),
    "resnet-50": ImageShape(
        about="224 x 224 pixels", layers=None, width=64, heads=1, side=224, channels=3, patch=1, make=ResNet
    ),
}  # fmt: skip
