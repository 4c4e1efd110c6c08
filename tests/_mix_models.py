"""Eight small models for random mixes, each with a hazard of recomputation, and their plain training.

    seen = train(MODELS["moe"], steps=2)                             # plain PyTorch: nothing of ours, no dispatch mode
    seen = train(MODELS["moe"], steps=2, session=mixed(Mix(7)))      # the same program in a session

`seen` has every loss, gradient, weight, buffer and state of the optimizer, and the state of the generator after each step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import chameleon_mm as cm

WIDTH = 16


class Attention(nn.Module):
    """Attention written out, on views of one product: chunks, transposes, dropout of softmax's result."""

    def __init__(self, width: int = WIDTH, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        scores = (q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)  # autograd's thread has no default device
        mixed = F.dropout(F.softmax(scores.masked_fill(later, float("-inf")), -1), 0.1, self.training) @ v
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norm1(x)), 0.1, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1, self.training)


class Checkpointed(nn.Module):
    """Blocks that torch's own checkpoints recompute, in both ways, between ones that they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x * 1.5)
        x = checkpoint(self.blocks[1], x, use_reentrant=False)
        again: Tensor = checkpoint(self.blocks[2], x.sin(), use_reentrant=True)
        return again.exp().tanh()


class Convolutions(nn.Module):
    """Batch norm with moving statistics and without, ReLU in place, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.norm3 = nn.BatchNorm2d(4, track_running_stats=False)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)), inplace=True)
        x = self.norm3(F.max_pool2d(x, 2))
        x = self.norm2(self.conv2(x)).add_(x).relu_()
        out: Tensor = self.last(x.mean((2, 3)))
        return out


class Experts(nn.Module):
    """Routes tokens to the two best of four experts: gathers, scatters, shapes that depend on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = F.softmax(self.gate(x), -1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            out = out.index_add(0, token, expert(x[token]) * weights[token, place, None])
        return out + x


class Tied(nn.Module):
    """The embedding's weight is the last layer's, too; a table is added; logits are capped."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(24, WIDTH), nn.Parameter(torch.randn(6, WIDTH))
        self.middle = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.dropout(self.embed(ids) + self.place, 0.2, self.training)
        return torch.tanh(F.linear(F.silu(self.middle(x)) * x, self.embed.weight) / 5) * 5


class Recurrent(nn.Module):
    """Two layers, with dropout between them by torch's generator: cuDNN's own dropout has a state of the process, by which two
    runs differ in plain PyTorch, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = (nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out, (hidden, _) = self.lower(x)
        out, (_, cell) = self.upper(F.dropout(out, 0.2, self.training))
        return out * torch.sigmoid(cell[-1])[:, None] + hidden[0][:, None]  # type: ignore[no-any-return]  # as above


class Vision(nn.Module):
    """Patches by unfolding, a class token, one product for q, k and v that is taken apart by permute and unbind."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Linear(2 * 16, WIDTH), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.patch(F.unfold(pictures, 4, stride=4).transpose(1, 2))
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1)
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(batch, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, WIDTH)
        x = x + self.out(mixed) * self.scale
        left, right = x.split(WIDTH // 2, -1)
        out: Tensor = (F.gelu(left) * right)[:, 0]
        return out


class Case(NamedTuple):
    """Model and its training data."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD


def _squares(*shape: int) -> Callable[[nn.Module], Tensor]:
    def loss(model: nn.Module) -> Tensor:
        out: Tensor = model(torch.randn(*shape))
        return out.square().mean()

    return loss


def _half(model: nn.Module) -> Tensor:
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        out = model(torch.randn(2, 5, WIDTH))
    return out.float().square().mean()  # type: ignore[no-any-return]  # a module's call is Any


def _words(model: nn.Module) -> Tensor:
    logits: Tensor = model(torch.randint(0, 24, (3, 6)))
    return F.cross_entropy(logits.flatten(0, 1), torch.randint(0, 24, (18,)))


MODELS: dict[str, Case] = {
    "dropout transformer": Case(lambda: nn.Sequential(Block(), Block()), _squares(2, 5, WIDTH), torch.optim.AdamW),
    "in-place convolutions": Case(Convolutions, _squares(2, 2, 8, 8)),
    "autocast": Case(lambda: nn.Sequential(Block(), nn.SiLU(), Block()), _half),
    "checkpoint inside": Case(Checkpointed, _squares(2, 5, WIDTH)),
    "experts": Case(Experts, _squares(12, WIDTH), torch.optim.AdamW),
    "tied weights": Case(Tied, _words),
    "recurrent": Case(Recurrent, _squares(2, 4, WIDTH)),
    "vision": Case(Vision, _squares(2, 2, 8, 8)),
}


def bits(t: Tensor) -> bytes:
    # A copy: recipes assume that memory seen by NumPy may be written to.
    return t.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def train(
    case: Case,
    steps: int,
    session: Callable[[nn.Module], cm.SwapSession] | None = None,
    *,
    micro_batches: int = 1,
    device: str = "cpu",
) -> tuple[list[Any], cm.SwapSession | None]:
    """Return all observable results of a few steps, and the session, if there was one. `device`: torch's."""
    with torch.device(device) if device != "cpu" else nullcontext():
        return _train(case, steps, session, micro_batches)


def _train(
    case: Case, steps: int, session: Callable[[nn.Module], cm.SwapSession] | None, micro_batches: int
) -> tuple[list[Any], cm.SwapSession | None]:
    torch.manual_seed(3)
    model = case.build()
    optimizer: Any = case.optimizer(model.parameters(), lr=0.05)
    seen: list[Any] = []
    opened = None if session is None else session(model)
    with opened or nullcontext():
        for _ in range(steps):
            with opened.step() if opened else nullcontext():
                for _ in range(micro_batches):
                    loss = case.loss(model)
                    loss.backward()
                    seen.append(bits(loss))
                    del loss
                seen.extend(None if p.grad is None else bits(p.grad) for p in model.parameters())
                optimizer.step()
                optimizer.zero_grad()
                seen.append(bits(torch.get_rng_state()))
                if torch.get_default_device().type == "cuda":
                    seen.append(bits(torch.cuda.get_rng_state()))
            seen.extend(bits(t) for t in (*model.parameters(), *model.buffers()))
            seen.extend(bits(t) for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
    return seen, opened
