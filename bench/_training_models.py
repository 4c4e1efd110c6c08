"""Models of the training benchmark, one of each family, with data: small, in plain torch, with blocks that may be checkpointed.

work = llama(Shape(...)); work = gpt2(Sizes(...))     # vit, resnet, video_dit as gpt2
model, loss = work.make(device, checkpointed)         # weights from torch's generator
loss(*work.batch(device)).backward()                  # data from the same one

llama   RMS norm, RoPE, SwiGLU, no biases (_llama.py)
gpt2    LayerNorm, GELU, dropout, learned positions, biases; the vocabulary is the 256 bytes (tools/demo.py)
vit     patches by a convolution, a class token, LayerNorm, GELU, attention to all patches
resnet  bottlenecks of convolutions with batch norm, ReLU in place, three stages; no max pooling, whose backward has no
        deterministic kernel on a GPU
video   latents of 17 frames: attention within frames, along them and to a caption (tools/video_models.py)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from chameleon_mm.bench._llama import DTYPES, Shape, Stack, noise
from chameleon_mm.bench._stand_in import computes_on_cpu
from chameleon_mm.device.protocols import Device
from chameleon_mm.tools.blocks import blocks_of
from chameleon_mm.tools.demo import GPT, VOCABULARY, GPTConfig
from chameleon_mm.tools.video_models import VideoDiT, VideoShape

CLASSES = 10

PATCHES = 16
"""Patches along a side of a ViT's image."""

STAGES = 3
"""Stages of a ResNet: each after the first has twice the width at half the side."""

DROPOUT = 0.1
"""Share of values that a GPT-2 drops, after the embedding and after each branch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a model other than the Llama, and of one batch. Raises `ValueError` for sizes that cannot be built."""

    layers: int
    """Blocks; for a ResNet, in each stage."""
    width: int
    """Width of the residual stream; for a ResNet, inside the first stage's bottlenecks."""
    heads: int = 1
    """Attention heads; a ResNet has none."""
    seq: int
    """Tokens of a row; for an image, pixels of a side; for a video, latents of a side."""
    batch: int
    """Rows or images of a step."""
    dtype: str

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "seq", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}: expected 1 or more, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"--width: expected a multiple of heads ({self.heads}), got {self.width}")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}")


Loss = Callable[..., Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model of one size, with its data."""

    about: str
    """Description for a table's footer."""
    params: Mapping[str, Any]
    """Sizes, for programs."""
    make: Callable[[torch.device, bool], tuple[nn.Module, Loss]]
    """Device, True to checkpoint blocks -> a new model, and the loss of a batch."""
    batch: Callable[[torch.device], tuple[Tensor, ...]]
    """Device -> a new batch."""


def compiled(work: Workload, backend: str) -> Workload:
    """The same with each block compiled by `backend`, anew for each model that is made."""

    def make(device: torch.device, checkpointed: bool) -> tuple[nn.Module, Loss]:
        torch.compiler.reset()
        model, loss = work.make(device, checkpointed)
        for block in blocks_of(model):
            (block.block if isinstance(block, Checkpointed) else block).compile(backend=backend)
        return model, loss

    return replace(work, about=f"{work.about}, each block compiled by {backend}", make=make)


def backend_for(device: Device) -> str:
    """torch.compile's backend: on the stand-in one that runs torch's own kernels, as Inductor's need a GPU."""
    return "aot_eager" if computes_on_cpu(device) else "inductor"


# --- the families


def llama(shape: Shape) -> Workload:
    """The stack of Llama-shaped blocks."""

    def make(device: torch.device, checkpointed: bool) -> tuple[nn.Module, Loss]:
        model = Stack(shape, device=device, checkpointed=checkpointed)
        return model, model.loss

    return Workload(
        about=f"{shape.layers} blocks, width {shape.width}, {shape.heads} heads, ffn {shape.ffn}, {shape.batch} rows of "
        f"{shape.seq} tokens, {shape.dtype}",
        params=asdict(shape),
        make=make,
        batch=lambda device: (noise(shape, device), noise(shape, device)),
    )


def gpt2(sizes: Sizes) -> Workload:
    """A GPT-2 over bytes."""

    def make(device: torch.device, checkpointed: bool) -> tuple[nn.Module, Loss]:
        config = GPTConfig(layers=sizes.layers, width=sizes.width, heads=sizes.heads, context=sizes.seq, dropout=DROPOUT)
        return _of_blocks(GPT(config, device=device), DTYPES[sizes.dtype], checkpointed)

    def batch(device: torch.device) -> tuple[Tensor, ...]:
        ids = torch.randint(0, VOCABULARY, (sizes.batch, sizes.seq + 1), device=device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    size = f"{sizes.layers} blocks, width {sizes.width}, {sizes.heads} heads, dropout {DROPOUT}"
    about = f"GPT-2: {size}, {sizes.batch} rows of {sizes.seq} tokens, {sizes.dtype}"
    return Workload(about=about, params=asdict(sizes), make=make, batch=batch)


def _of_blocks(model: GPT | VideoDiT, dtype: torch.dtype, checkpointed: bool) -> tuple[nn.Module, Loss]:
    model = model.to(dtype)
    model.blocks = _blocks(model.blocks, checkpointed)
    return model, model.loss


def vit(sizes: Sizes) -> Workload:
    """A ViT over noise. Raises `ValueError` for a side that cannot be cut into patches."""
    if sizes.seq % PATCHES:
        raise ValueError(f"--seq: expected a multiple of {PATCHES} pixels for vit, got {sizes.seq}")
    about = f"ViT: {sizes.layers} blocks, width {sizes.width}, {sizes.heads} heads, {PATCHES} x {PATCHES} patches"
    return _of_images(about, sizes, ViT)


def resnet(sizes: Sizes) -> Workload:
    """A ResNet over noise. Raises `ValueError` for a side that cannot be halved as often as it has stages."""
    if sizes.seq % (1 << (STAGES - 1)):
        raise ValueError(f"--seq: expected a multiple of {1 << (STAGES - 1)} pixels for resnet, got {sizes.seq}")
    return _of_images(f"ResNet: {STAGES} stages of {sizes.layers} bottlenecks, width {sizes.width}", sizes, ResNet)


def video_dit(sizes: Sizes) -> Workload:
    """A video diffusion transformer over noise. Raises `ValueError` for an odd side."""
    if sizes.seq % 2:
        raise ValueError(f"--seq: expected an even number of latents for video-dit, got {sizes.seq}")
    sides, dtype = (sizes.seq, sizes.seq), DTYPES[sizes.dtype]
    of = {"layers": sizes.layers, "width": sizes.width, "heads": sizes.heads}
    shape = VideoShape(**of, sides=sides, caption=77, caption_width=512)

    def make(device: torch.device, checkpointed: bool) -> tuple[nn.Module, Loss]:
        with device:
            return _of_blocks(shape.model(), dtype, checkpointed)

    return Workload(
        about=f"video DiT: {sizes.layers} blocks, width {sizes.width}, {sizes.heads} heads, {sizes.batch} of {shape.about}, "
        f"{sizes.dtype}",
        params=asdict(sizes),
        make=make,
        batch=lambda device: shape.batch(sizes.batch, dtype=dtype, device=device),
    )


def _of_images(about: str, sizes: Sizes, kind: Callable[[Sizes, bool], ViT | ResNet]) -> Workload:
    dtype = DTYPES[sizes.dtype]

    def make(device: torch.device, checkpointed: bool) -> tuple[nn.Module, Loss]:
        with device:
            model = kind(sizes, checkpointed).to(dtype)
        return model, lambda images, labels: F.cross_entropy(model(images).float(), labels)

    def batch(device: torch.device) -> tuple[Tensor, ...]:
        images = torch.randn(sizes.batch, 3, sizes.seq, sizes.seq, dtype=dtype, device=device)
        return images, torch.randint(0, CLASSES, (sizes.batch,), device=device)

    about = f"{about}, {sizes.batch} images of {sizes.seq} pixels a side, {sizes.dtype}"
    return Workload(about=about, params=asdict(sizes), make=make, batch=batch)


# --- the models


class Checkpointed(nn.Module):
    """Block that saves only its inputs and runs again in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *inputs: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(self.block, *inputs, use_reentrant=False))


def _blocks(blocks: nn.ModuleList, checkpointed: bool) -> nn.ModuleList:
    return nn.ModuleList(Checkpointed(block) for block in blocks) if checkpointed else blocks


class ViT(nn.Module):
    """A ViT: images [b, 3, side, side] to logits [b, CLASSES], from a class token."""

    def __init__(self, sizes: Sizes, checkpointed: bool) -> None:
        super().__init__()
        width, patch = sizes.width, sizes.seq // PATCHES
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + PATCHES * PATCHES, width))
        self.blocks = _blocks(nn.ModuleList(ViTBlock(width, sizes.heads) for _ in range(sizes.layers)), checkpointed)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)  # [b, 16 * 16, width]
        x = torch.cat((self.token.expand(len(images), -1, -1), patches), dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x[:, 0])))


class ViTBlock(nn.Module):
    """Attention to all patches, then two layers with a GELU, each on a normalised copy of the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        # [b, tokens, 3 * width] -> three of [b, heads, tokens, width / heads], views of one storage
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + cast(Tensor, self.down(F.gelu(self.up(self.mlp_norm(x)))))


class ResNet(nn.Module):
    """A ResNet: images [b, 3, side, side] to logits [b, CLASSES], with a stem for small images."""

    def __init__(self, sizes: Sizes, checkpointed: bool) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        width = sizes.width
        for stage in range(STAGES):
            for position in range(sizes.layers):
                inner, stride = sizes.width << stage, 2 if stage and not position else 1
                blocks.append(Bottleneck(width, inner, stride))
                width = 4 * inner
        self.stem = _normed_conv(3, sizes.width, 3)
        self.blocks = _blocks(nn.ModuleList(blocks), checkpointed)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.stem(images), inplace=True)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(x.mean((2, 3))))


class Bottleneck(nn.Module):
    """Convolutions of 1, 3 and 1 pixels, each with batch norm, and a shortcut."""

    def __init__(self, width: int, inner: int, stride: int) -> None:
        super().__init__()
        outer = 4 * inner
        self.first, self.second = _normed_conv(width, inner, 1), _normed_conv(inner, inner, 3, stride)
        self.third = _normed_conv(inner, outer, 1)
        self.shortcut = nn.Identity() if width == outer and stride == 1 else _normed_conv(width, outer, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.second(F.relu(self.first(x), inplace=True)), inplace=True)
        return F.relu(self.third(h) + self.shortcut(x), inplace=True)


def _normed_conv(a: int, b: int, kernel: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(nn.Conv2d(a, b, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(b))
