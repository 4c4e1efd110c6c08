"""Programs that train small models and access their parameters in every way that users do.

    seen = PROGRAMS["tied"](Plain(at))                # nothing of ours around it
    seen = PROGRAMS["tied"](Swapped(device, ...))     # the same lines in a session that swaps parameters

A program makes its model by `loop.model(...)` and its optimizer by `loop.optimizer(...)`, runs each step in
`with loop.step():`, and returns what it saw on the way; what it leaves in the model is compared besides.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.state import hosted
from chameleon_mm.units import allocated_size

WIDTH, LAYERS, ROWS = 48, 6, 8

Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


class Plain:
    """Plain PyTorch on one torch device."""

    def __init__(self, at: torch.device) -> None:
        self.at = at
        self.trained: nn.Module | None = None
        self.stepped: torch.optim.Optimizer | None = None

    def model(self, build: Callable[[], nn.Module]) -> nn.Module:
        torch.manual_seed(0)
        self.trained = build().to(self.at)
        return self.trained

    def optimizer(self, make: Make = adamw) -> torch.optim.Optimizer:
        assert self.trained is not None
        self.stepped = make(p for p in self.trained.parameters() if p.requires_grad)
        return self.stepped

    def step(self) -> AbstractContextManager[object]:
        return nullcontext()

    def batch(self, number: int, *shape: int) -> Tensor:
        x = torch.randn(shape or (ROWS, WIDTH), generator=torch.Generator().manual_seed(number))
        return x.to(self.at, copy=True)

    def ids(self, number: int, *shape: int) -> Tensor:
        made = torch.randint(40, shape, generator=torch.Generator().manual_seed(number))
        return made.to(self.at, copy=True)


class Swapped(Plain):
    """The same in a session that swaps parameters, which begins with the first step."""

    def __init__(self, device: Device, room_bytes: int, *, with_optimizer: bool = True, **given: Any) -> None:
        """`room_bytes`: budget in addition to the memory that the device holds when the session begins, parameters excluded."""
        super().__init__(device.torch_device)
        self.device, self._room_bytes, self._given = device, room_bytes, given
        self.budget: int | None = None
        """Budget that replaces the one computed from `room_bytes`."""
        self._with_optimizer = with_optimizer
        self.session: cm.SwapSession | None = None
        self._stack = ExitStack()
        self.peaks: list[int] = []

    @contextmanager
    def step(self) -> Iterator[object]:
        session = self.opened()
        self.device.reset_peaks()
        with session.step():
            yield session
        self.peaks.append(self.device.peak_allocated_bytes())

    def opened(self) -> cm.SwapSession:
        if self.session is None:
            assert self.trained is not None
            # Keeps sizes, not storages: a reference to a storage would keep its parameter on the device.
            sizes = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in self.trained.parameters()}
            movable = sum(allocated_size(nbytes) for nbytes in sizes.values() if nbytes >= hosted.MIN_BYTES)
            # A window has room for three of the largest; cuDNN keeps all of an LSTM's weights in one storage.
            room = max(self._room_bytes, 4 * max(sizes.values()))
            budget = self.device.allocated_bytes() - movable + room
            self.session = cm.SwapSession(
                budget if self.budget is None else self.budget,
                None if "pool" in self._given else "64MiB",
                self.device,
                min_bytes=1024,
                model=self.trained,
                optimizer=self.stepped if self._with_optimizer else None,
                parameters="swap",
                **self._given,
            )
            if (state := self.session._model_swap._state) is not None:
                state.home.min_bytes = hosted.MIN_BYTES
            self._stack.enter_context(self.session.pool)
            self._stack.enter_context(self.session)
        return self.session

    def close(self) -> None:
        self._stack.close()


Program = Callable[[Plain], list[Tensor]]
PROGRAMS: dict[str, Program] = {}


def program(name: str) -> Callable[[Program], Program]:
    def note(function: Program) -> Program:
        PROGRAMS[name] = function
        return function

    return note


def mlp() -> nn.Module:
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers)


def linears(model: nn.Module) -> list[nn.Linear]:
    return [layer for layer in model.modules() if isinstance(layer, nn.Linear)]


Loss = Callable[[nn.Module, int], Tensor]
"""The loss of a model in the step of this number."""


def train(
    loop: Plain,
    make: Make = adamw,
    build: Callable[[], nn.Module] = mlp,
    steps: int = 4,
    loss_of: Loss | None = None,
) -> list[Tensor]:
    loop.model(build)
    loop.optimizer(make)
    return go_on(loop, steps, loss_of)


def go_on(loop: Plain, steps: int, loss_of: Loss | None = None) -> list[Tensor]:
    """Train the model of `loop` for some more steps. `loss_of` None: a mean of squares."""
    model, optimizer = loop.trained, loop.stepped
    assert model is not None
    assert optimizer is not None
    seen = []
    for number in range(steps):
        with loop.step():
            loss = model(loop.batch(number)).square().mean() if loss_of is None else loss_of(model, number)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
    return seen


OPTIMIZERS: dict[str, Make] = {
    "AdamW, foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "AdamW, one by one": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True, foreach=False),
    "SGD, foreach": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, foreach=True),
    "SGD, fused": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, fused=True),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.5, centered=True),
    "LBFGS-like closure": lambda params: torch.optim.SGD(params, lr=1e-2),
}
for _name, _make in OPTIMIZERS.items():
    PROGRAMS[_name] = partial(train, make=_make)


@program("accumulation, clipped, gradients kept")
def _accumulated(loop: Plain) -> list[Tensor]:
    model, optimizer = loop.model(mlp), loop.optimizer()
    seen = []
    for number in range(4):
        with loop.step():
            for part in range(3):
                (model(loop.batch(10 * number + part)).square().mean() * 30).backward()
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=number % 2 == 0))
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad(set_to_none=number == 2)
    return seen


class Tied(nn.Module):
    """An embedding whose weight is also the head's, and is seen through views."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(F.gelu(self.mix(F.dropout(self.embed(ids), 0.1))))
        half = x @ self.mix.weight[: WIDTH // 2].t()
        loss: Tensor = self.head(x).square().mean() + half.mean() + self.embed.weight.t()[0].sum()
        return loss


@program("tied")
def _tied(loop: Plain) -> list[Tensor]:
    return train(loop, build=Tied, loss_of=lambda model, number: model(loop.ids(number, 4, 12)))


@program("frozen, trained later")
def _frozen(loop: Plain) -> list[Tensor]:
    def half_frozen() -> nn.Module:
        model = mlp()
        for p in list(model.parameters())[:6]:
            p.requires_grad_(False)
        return model

    model, optimizer = loop.model(half_frozen), loop.optimizer()
    seen = []
    for number in range(5):
        with loop.step():
            if number == 3:
                thawed = [p.requires_grad_(True) for p in list(model.parameters())[:2]]
                optimizer.add_param_group({"params": thawed, "lr": 0.1})
            loss = model(loop.batch(number)).square().mean()
            loss.backward()
            if number > 2:
                (model(loop.batch(50 + number)) * 0.1).mean().backward()
            optimizer.step()
            if number != 3:
                optimizer.zero_grad()
            seen.append(loss.detach())
    return seen


def _checkpointed(loop: Plain, *, reentrant: bool) -> list[Tensor]:
    def loss_of(model: nn.Module, number: int) -> Tensor:
        layers = list(model.children())
        x = loop.batch(number).requires_grad_()
        length = 4 if number < 2 else len(layers)  # more than there is room for at once
        for start in range(0, len(layers), length):
            x = checkpoint(nn.Sequential(*layers[start : start + length]), x, use_reentrant=reentrant)
        return x.square().mean()

    return train(loop, loss_of=loss_of)


PROGRAMS["checkpointed"] = lambda loop: _checkpointed(loop, reentrant=False)
PROGRAMS["checkpointed, reentrant"] = lambda loop: _checkpointed(loop, reentrant=True)


class Held(torch.autograd.Function):
    """Function that holds its weight outside of autograd, and uses it in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return gradients[0] @ ctx.weight, gradients[0].t() @ x


held: Callable[[Tensor, Tensor], Tensor] = Held.apply


@program("custom functions")
def _custom(loop: Plain) -> list[Tensor]:
    def loss_of(model: nn.Module, number: int) -> Tensor:
        x = loop.batch(number)
        for layer in linears(model):
            x = F.relu(held(x, layer.weight) + layer.bias)
        return x.square().mean()

    return train(loop, loss_of=loss_of)


@program("gradient penalty")
def _penalty(loop: Plain) -> list[Tensor]:
    model, optimizer = loop.model(mlp), loop.optimizer()
    seen = []
    for number in range(4):
        with loop.step():
            x = loop.batch(number).requires_grad_()
            out = model(x).square().sum()
            (slope,) = torch.autograd.grad(out, x, create_graph=True)
            by_weight = torch.autograd.grad(out, list(model.parameters())[:4], create_graph=True)
            loss = out * 1e-3 + slope.square().mean() + sum(g.square().mean() for g in by_weight)
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(cast(Tensor, loss).detach())
    return seen


class Mixed(nn.Module):
    """Modules with their own ways of reading parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3, padding=1)
        self.batch_norm = nn.BatchNorm1d(8)
        self.recurrent = nn.GRU(WIDTH, WIDTH // 2, num_layers=2, batch_first=True, bidirectional=True)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, 2)
        self.bag = nn.EmbeddingBag(40, 8, mode="sum")
        self.free = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(2)])
        self.by_name = nn.ParameterDict({"scale": nn.Parameter(torch.ones(WIDTH, WIDTH))})

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = self.batch_norm(self.conv(x)).flatten(0, 1).view(2, -1, WIDTH)
        y, _ = self.recurrent(y)
        y, _ = self.attention(y, y, y)
        y = self.normed(y @ self.free[0] @ torch.cat([*self.free], 1)[:, :WIDTH])
        z = torch.einsum("btw,vw->btv", y, self.by_name["scale"] * self.free[1])
        loss: Tensor = self.bilinear(y, z).mean() + self.bag(ids).square().mean()
        return loss


@program("modules of many kinds")
def _mixed(loop: Plain) -> list[Tensor]:
    return train(
        loop, build=Mixed, loss_of=lambda model, number: model(loop.batch(number, 4, 4, WIDTH), loop.ids(number, 4, 6))
    )


@program("written by hand")
def _written(loop: Plain) -> list[Tensor]:
    model, optimizer = loop.model(mlp), loop.optimizer()
    average = [p.detach().clone() for p in model.parameters()]
    seen = []
    for number in range(5):
        with loop.step():
            loss = model(loop.batch(number)).square().mean()
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.99)
                    p.data.add_(1e-3)
                    assert p.grad is not None
                    p.grad[0] = 0
                    p.grad.data.mul_(2)
                first, second = list(model.parameters())[:4:2]
                first[0].copy_(second[1])
                torch._foreach_mul_([first, second], 0.9)
                torch.add(second, 1e-3, out=second)
                first.view(-1)[:5] += 1
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            with torch.no_grad():
                torch._foreach_lerp_(average, list(model.parameters()), 0.1)
            seen.append(loss.detach())
            seen.append(torch.stack([p.sum() for p in model.parameters()]).detach())
        held = first.data
        held[1] += 0.5
        (0.0 * first.detach().numpy(force=True)).sum()
        del held
    return [*seen, *average]


@program("read between steps")
def _read(loop: Plain) -> list[Tensor]:
    model, optimizer = loop.model(mlp), loop.optimizer()
    seen = []
    for number in range(4):
        with loop.step():
            model(loop.batch(number)).square().mean().backward()
            optimizer.step()
        seen.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
        seen.append(nn.utils.parameters_to_vector([cast(Tensor, p.grad) for p in model.parameters()]).clone())
        with torch.no_grad():
            seen.append(model(loop.batch(100 + number)))
        seen.append(torch.func.functional_call(model, dict(model.named_parameters()), (loop.batch(7),)).detach())
        other = copy.deepcopy(model)
        seen.extend(p.detach().clone() for p in other.parameters())
        if number == 1:
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=True)
            seen.extend(t.to(loop.at) for t in loaded["model"].values())  # torch.save writes swapped ones as the host's
        if number == 2:
            model.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
        optimizer.zero_grad()
    return seen


@program("replaced")
def _replaced(loop: Plain) -> list[Tensor]:
    """Replace the data of parameters, gradients, and a parameter itself."""
    model, optimizer = loop.model(mlp), loop.optimizer()
    layers = linears(model)
    seen = []
    for number in range(5):
        with loop.step():
            loss = model(loop.batch(number)).square().mean()
            loss.backward()
            if number == 1:
                layers[0].weight.data = layers[0].weight.data * 2
                layers[1].weight.grad = torch.ones_like(layers[1].weight)
                layers[2].weight.grad = None
            optimizer.step()
            if number % 2:
                optimizer.zero_grad()
            seen.append(loss.detach())
        if number == 2:
            with torch.no_grad():
                layers[3].weight.set_(loop.batch(50, WIDTH, WIDTH).untyped_storage(), 0, (WIDTH, WIDTH), (WIDTH, 1))
            layers[4].weight.data, layers[5].weight.data = layers[5].weight.data, layers[4].weight.data
    return seen


@program("scaled")
def _scaled(loop: Plain) -> list[Tensor]:
    """Use a gradient scaler that finds infinite gradients, and skips a step for them."""
    model, optimizer = loop.model(mlp), loop.optimizer()
    scaler = torch.amp.GradScaler(loop.at.type, init_scale=64.0, growth_interval=2)
    seen = []
    for number in range(6):
        with loop.step():
            with torch.autocast(loop.at.type, torch.bfloat16):
                loss = model(loop.batch(number)).float().square().mean()
            if number == 2:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append(torch.tensor(scaler.get_scale()))
    return [torch.nan_to_num(value) for value in seen]


@program("hooks of a user's own")
def _hooked(loop: Plain) -> list[Tensor]:
    model, optimizer = loop.model(mlp), loop.optimizer()
    seen: list[Tensor] = []
    for p in list(model.parameters())[::2]:
        p.register_hook(lambda grad: grad * 0.5)
        p.register_post_accumulate_grad_hook(lambda p: seen.append(cast(Tensor, p.grad).sum()))
    cast(nn.Sequential, model)[2].register_forward_hook(lambda module, args, out: out + cast(Tensor, module.weight).sum())
    cast(nn.Sequential, model)[4].register_full_backward_hook(lambda module, ins, outs: seen.append(cast(Any, outs)[0].sum()))
    for number in range(3):
        with loop.step():
            model(loop.batch(number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen


@program("sizes and branches that vary")
def _varied(loop: Plain) -> list[Tensor]:
    def loss_of(model: nn.Module, number: int) -> Tensor:
        layers = list(model.children())
        x = loop.batch(number, 4 + 5 * (number % 3), WIDTH)
        for at in range(0, len(layers), 2):
            if (at // 2 + number) % 3:
                x = layers[at + 1](layers[at](x))
        return x.square().mean()

    return train(loop, steps=8, loss_of=loss_of)


class Passes(TorchFunctionMode):
    """A user's mode that changes nothing. `through`: it calls the function from a function of its own."""

    def __init__(self, *, through: bool) -> None:
        super().__init__()
        self._through = through

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._call(func, args, kwargs or {}) if self._through else func(*args, **(kwargs or {}))


@program("modes of a user's own")
def _modes(loop: Plain) -> list[Tensor]:
    model, optimizer, seen = loop.model(mlp), loop.optimizer(adamw), []
    for number in range(7):  # a session begins with the first step, outside of these modes
        x = loop.batch(number)
        modes: Any = (nullcontext(), torch.device(x.device), Passes(through=False), Passes(through=True))
        with modes[number % 4], loop.step():
            loss = model(x).square().mean()
            seen.append(copy.deepcopy(linears(model)[0].weight).detach())  # asks for its storage, as a pickler does
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    return seen


@program("aliases from before")
def _aliased(loop: Plain) -> list[Tensor]:
    """Tensors over a parameter's memory, made before the session, some with version counters of their own."""
    model, optimizer = loop.model(mlp), loop.optimizer()
    first, second, third = (layer.weight for layer in linears(model)[:3])
    alias, part, flat = first.data, second.data[3], third.detach().view(-1)
    held = shared = copied = flat
    seen = []
    for number in range(4):
        with loop.step():
            loss = model(loop.batch(number)).square().mean() + (first.T @ second.mT).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            alias.mul_(0.9)
            part += 0.01
            flat[:7] = 0.5
            with torch.no_grad():
                second.real = second.real * 1.01
            seen += [loss.detach(), alias.sum(), second.detach().H.sum(), flat.norm()]
            if number == 1:
                held = cast(Any, torch.empty(0, device=loop.at)).set_(linears(model)[3].weight.detach())
                copied = copy.copy(linears(model)[5].weight.detach())
                shared = torch.utils.dlpack.from_dlpack(linears(model)[4].weight.detach())
            held[0] = 0.25
            shared[1] = 0.125
            copied[2] = 0.0625
    return seen


@program("gradients that are used and have graphs")
def _gradients_used(loop: Plain) -> list[Tensor]:
    model, optimizer = loop.model(mlp), loop.optimizer()
    params = list(model.parameters())
    seen = []
    for number in range(5):
        with loop.step():
            model(loop.batch(number)).square().mean().backward(create_graph=number == 2)
            gradients = [cast(Tensor, p.grad) for p in params]
            # Saved by autograd, and added to by the backward that uses them.
            penalty = sum((g * p).square().sum() for g, p in zip(gradients, params, strict=True))
            seen.append(cast(Tensor, penalty).detach())
            del gradients
            cast(Tensor, penalty).backward()
            del penalty
            for p in params if number == 2 else ():
                p.grad = None if p.grad is None else p.grad.detach()
            optimizer.step()
            optimizer.zero_grad()
    return seen
