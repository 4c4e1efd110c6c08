"""Small training programs with compiled parts. Each is built anew, with `compiled` in place of `torch.compile`.

model, loss_of = PROGRAMS[name](compiled)      # compiled(f, **options): torch.compile with the backend of the test
loss_of(number).backward()                     # step `number` of the training of `model`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 32
PLACE = [torch.device("cpu")]
"""The last one: where batches are."""
Compile = Callable[..., Any]
Loss = Callable[[int], Tensor]
Program = Callable[[Compile], tuple[nn.Module, Loss]]


def rows(number: int, count: int = 48, *, width: int = WIDTH) -> Tensor:
    """The batch of step `number`, the same in each run."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(number)).to(PLACE[-1])


class Block(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor] = F.gelu, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self.up(self.norm(x))))  # type: ignore[no-any-return]  # a module's call is Any


class Stack(nn.Module):
    """Blocks one after another, each called by `call(block, x)`."""

    def __init__(self, *blocks: nn.Module, call: Callable[[Any, Tensor], Tensor] = lambda block, x: block(x)) -> None:
        super().__init__()
        self.blocks, self.call = nn.ModuleList(blocks), call

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


def mean_square(run: Any, *, counts: tuple[int, ...] = (48,)) -> Loss:
    return lambda number: run(rows(number, counts[number % len(counts)])).square().mean()


# --- what is compiled


def per_block(
    compiled: Compile, *, counts: tuple[int, ...] = (48,), block: Callable[[], nn.Module] = Block, **options: Any
) -> Any:
    model = Stack(block(), block())
    return model, mean_square(Stack(*(compiled(one, **options) for one in model.blocks)), counts=counts)


def whole(compiled: Compile, *, counts: tuple[int, ...] = (48,), block: Callable[[], nn.Module] = Block, **options: Any) -> Any:
    model = Stack(block(), block())
    return model, mean_square(compiled(model, **options), counts=counts)


def by_method(compiled: Compile) -> Any:
    model = Stack(Block(), Block())
    for block in model.blocks:
        block.forward = compiled(block.forward)
    return model, mean_square(model)


def among_eager(compiled: Compile) -> Any:
    model = Stack(Block(), Block(), Block())
    return model, mean_square(Stack(model.blocks[0], compiled(model.blocks[1]), model.blocks[2]))


def two_in_flight(compiled: Compile) -> Any:
    model = Block()
    run = compiled(model)
    return model, lambda number: (run(rows(number)) * run(rows(number + 100))).mean()


def micro_batches(compiled: Compile) -> Any:
    model = Block()
    run = compiled(model)

    def loss_of(number: int) -> Tensor:
        run(rows(number + 100)).square().mean().backward()
        return run(rows(number)).square().mean()  # type: ignore[no-any-return]  # torch types modules as Any

    return model, loss_of


def function(compiled: Compile) -> Any:
    model = nn.ModuleList([nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)])
    gate = compiled(lambda a, b: F.silu(a) * b)
    return model, lambda number: model[2](gate(model[0](rows(number)), model[1](rows(number)))).square().mean()


def full_loss(compiled: Compile) -> Any:
    model = Block()
    loss = compiled(lambda y, at: F.cross_entropy(y.float(), at), fullgraph=True)
    return model, lambda number: loss(model(rows(number)), rows(number).argmax(1))


def teacher(compiled: Compile) -> Any:
    model, other = Block(), Block().requires_grad_(False)
    both = nn.ModuleList([model, other])
    learn, teach = compiled(model), compiled(other)

    def loss_of(number: int) -> Tensor:
        with torch.no_grad():
            wanted = teach(rows(number))
        return (learn(rows(number)) - wanted).square().mean()  # type: ignore[no-any-return]  # torch types modules as Any

    return both, loss_of


def evaluated_between(compiled: Compile) -> Any:
    model = Stack(Block(), nn.Dropout(0.1), Block())
    run = compiled(model)

    def loss_of(number: int) -> Tensor:
        model.eval()
        with torch.no_grad():
            run(rows(number + 100))
        model.train()
        return run(rows(number)).square().mean()  # type: ignore[no-any-return]  # torch types modules as Any

    return model, loss_of


# --- what it does


def breaks(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return F.gelu(x)


def by_autocast(compiled: Compile, *, inside: bool) -> Any:
    class Cast(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, torch.bfloat16):
                return super().forward(x)

    if inside:
        return per_block(compiled, block=Cast)
    model = Stack(Block(), Block())
    run = compiled(model)

    def loss_of(number: int) -> Tensor:
        x = rows(number)
        with torch.autocast(x.device.type, torch.bfloat16):
            return run(x).float().square().mean()  # type: ignore[no-any-return]  # torch types modules as Any

    return model, loss_of


def checkpointed(block: Any, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]  # torch types modules as Any


def checkpoint_around(compiled: Compile) -> Any:
    model = Stack(Block(), Block())
    return model, mean_square(Stack(*(compiled(block) for block in model.blocks), call=checkpointed))


def checkpoint_inside(compiled: Compile) -> Any:
    model = Stack(Block(), Block(), call=checkpointed)
    return model, mean_square(compiled(model))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.route, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.route(x).softmax(-1)
        best, out = weights.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            at = (best == number).nonzero().squeeze(1)
            out = out.index_add(0, at, expert(x[at]) * weights[at, number, None])
        return x + out


def expert_blocks(compiled: Compile) -> Any:
    model = Experts()
    called = Experts()
    called.route, called.experts = model.route, nn.ModuleList(compiled(one, dynamic=True) for one in model.experts)
    return model, mean_square(called)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).view(2, -1, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]  # torch types modules as Any


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.proj = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight
        angles = torch.arange(x.shape[0], device=x.device)[:, None] * 0.1
        first, second = self.proj(x).chunk(2, -1)
        return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


class Images(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 8, 3, padding=1), norm(8), nn.Linear(8 * 8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.norm(self.conv(x.view(-1, 1, 4, WIDTH // 4)))), 2)
        return self.head(y.flatten(1))  # type: ignore[no-any-return]  # torch types modules as Any


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.mean: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls.add_(1)
            self.mean.lerp_(x.mean(0), 0.1)
        return super().forward(x - self.mean)


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.base(x) + 2 * self.b(self.a(x)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.lstm(x.view(4, -1, WIDTH))[0]).reshape(x.shape)


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, out = torch.zeros_like(x[:16]), []
        for part in x.split(16):
            state = self.cell(part, state)
            out.append(state)
        return torch.cat(out)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, WIDTH)
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(self.table(x.argmax(1)))
        return F.log_softmax(y @ self.table.weight.t(), -1)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x)).relu_()
        y = y * 2
        y.add_(1)
        return self.down(y)  # type: ignore[no-any-return]  # torch types modules as Any


class WritesItsInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(1.5))


class Several(nn.Module):
    """Returns views and results that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.block(x)
        return {"halves": y.chunk(2, -1), "turned": y.t(), "unused": y.exp(), "number": 3}


def several(compiled: Compile) -> Any:
    model = Several()
    run = compiled(model)

    def loss_of(number: int) -> Tensor:
        got = run(rows(number))
        return (got["halves"][0] * got["halves"][1]).mean() + got["turned"].sin().mean()  # type: ignore[no-any-return]  # torch types modules as Any

    return model, loss_of


def writes_its_input(compiled: Compile) -> Any:
    model = WritesItsInput()
    run = compiled(model)
    return model, lambda number: run(rows(number) * 2).square().mean()


def tied(compiled: Compile) -> Any:
    model = Tied()
    return model, mean_square(compiled(model))


PROGRAMS: dict[str, Program] = {
    "per block": per_block,
    "whole": whole,
    "by method": by_method,
    "among eager": among_eager,
    "function": function,
    "dynamic per block": lambda compiled: per_block(compiled, counts=(48, 32, 48, 40), dynamic=True),
    "dynamic whole": lambda compiled: whole(compiled, counts=(48, 32, 48, 40), dynamic=True),
    "compiled again": lambda compiled: whole(compiled, counts=(48, 48, 48, 32), dynamic=False),
    "becomes dynamic": lambda compiled: per_block(compiled, counts=(48, 48, 32, 40)),
    "graph break in blocks": lambda compiled: per_block(compiled, block=lambda: Block(breaks)),
    "graph break in the whole": lambda compiled: whole(compiled, block=lambda: Block(breaks)),
    "experts": expert_blocks,
    "experts, whole": lambda compiled: whole(compiled, block=Experts),
    "LSTM": lambda compiled: whole(compiled, block=Recurrent),
    "GRU cells": lambda compiled: whole(compiled, block=Cells),
    "convolution": lambda compiled: per_block(compiled, block=lambda: Images(lambda n: nn.GroupNorm(2, n))),
    "batch norm": lambda compiled: whole(compiled, block=lambda: Images(nn.BatchNorm2d)),
    "buffers in place": lambda compiled: per_block(compiled, block=Counting),
    "full loss": full_loss,
    "LoRA": lambda compiled: per_block(compiled, block=LowRank),
    "dropout": lambda compiled: whole(compiled, block=lambda: Block(lambda x: F.dropout(F.gelu(x), 0.2))),
    "autocast around": lambda compiled: by_autocast(compiled, inside=False),
    "autocast inside": lambda compiled: by_autocast(compiled, inside=True),
    "checkpoint around": checkpoint_around,
    "checkpoint inside": checkpoint_inside,
    "attention": lambda compiled: per_block(compiled, block=Attention),
    "rotary": lambda compiled: whole(compiled, block=Rotary),
    "tied": tied,
    "in place": lambda compiled: per_block(compiled, block=InPlace),
    "writes its input": writes_its_input,
    "several results": several,
    "two in flight": two_in_flight,
    "micro-batches": micro_batches,
    "teacher": teacher,
    "evaluated between": evaluated_between,
}
