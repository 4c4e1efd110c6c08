"""Small programs that write tensors that autograd does not rely on but a recomputation might: each is right in plain PyTorch.

    program.step(number, write=True)                 # a forward that writes at some point, and a backward
    PROGRAMS                                         # all of them

A program's class says what plain PyTorch does with the write, and whether the write is an operator. Those of the last part
write what autograd saved, and eager refuses them. How they are trained: `_relied_on.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.dlpack import from_dlpack

from tests._unseen_kernels import (
    OPERATORS,
    AddOver,
    Embed,
    FusedCrossEntropy,
    Gate,
    Rotary,
    ScaleMarked,
    ScaleUnmarked,
    apply,
    custom_said,
    custom_unsaid,
    on_another_thread,
    overwrite,
    scale,
)

ROWS, SIDE = 256, 160
"""Most tensors are 256 x 160 and take 160 KiB, or 80 KiB in float16: storages below 64 KiB take another way."""

EVERY = 4


class When(enum.Enum):
    """Steps that write."""

    EACH = "each"
    FOURTH = "fourth"

    def writes(self, number: int) -> bool:
        return self is When.EACH or number % EVERY == EVERY - 1


# --- what programs are made of


class Program(nn.Module):
    """A model whose step is a forward, a write at some point, and a backward."""

    seen: ClassVar[bool] = False
    """True if torch dispatches an operator for each write, where that counts: any but `.data` on other threads and in hooks."""
    eager_refuses: ClassVar[bool] = False
    named_error: ClassVar[bool | None] = None
    """True if the named error may end a step that writes, when only some steps do. None: true if the write is unseen."""
    whens: ClassVar[tuple[When, ...]] = (When.EACH, When.FOURTH)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, SIDE) / 4)
        self.write = False
        """True if this step writes. Read by hooks, which are made once."""
        self.number = 0

    @classmethod
    def writes_in(cls, number: int, when: When) -> bool:
        """True if the program writes in that step."""
        return when.writes(number)

    def step(self, number: int, write: bool) -> None:
        self.number, self.write = number, write
        loss: Tensor = self()
        loss.backward()

    def batch(self, which: int = 0, *shape: int) -> Tensor:
        """Random numbers, the same in each run of a step."""
        generator = torch.Generator(torch.get_default_device()).manual_seed(50 * self.number + which)
        return torch.randn(shape or (ROWS, 16), generator=generator)

    def embedded(self, which: int = 0) -> Tensor:
        """Return an activation in float16 that cannot be recomputed and of which autograd saves nothing."""
        h: Tensor = apply(Embed, self.batch(which), self.weight)
        return h


def waves(h: Tensor, scales: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0)) -> Tensor:
    """Apply functions of which autograd saves results made of `h`, in float32, and not `h`."""
    return torch.stack([torch.sin(h.float() * k).mean() for k in scales]).sum()


class Reads(Program):
    """Reads `h`, writes it, reads it again: autograd did not save it."""

    way: ClassVar[Way]
    later: ClassVar[tuple[float, ...]] = (1.5, 2.5)

    def forward(self) -> Tensor:
        h = self.embedded()
        loss = waves(h)
        if self.write and self.way.replaces:
            h = self.way.write(h)
        elif self.write:
            self.way.write(h)
        return loss + h.float().mean() + waves(self.embedded(1), self.later)


class Way(NamedTuple):
    """A way to halve a tensor."""

    write: Callable[[Tensor], Any]
    seen: bool = False
    replaces: bool = False
    """True if the returned tensor replaces the written one."""


def _moves_the_counter(h: Tensor) -> None:
    scale(h, 0.5)
    torch.autograd.graph.increment_version(h)


def _by_set(h: Tensor) -> None:
    with torch.no_grad():
        torch.empty(0, dtype=h.dtype).set_(h.detach().untyped_storage(), 0, h.shape, h.stride()).mul_(0.5)


WAYS: dict[str, Way] = {
    "PointerAfterRead": Way(lambda h: scale(h, 0.5)),  # a kernel is given a pointer
    "PointerAtTheEnd": Way(lambda h: scale(h, 0.5)),  # the same with little in forward after the write
    "FunctionUnmarked": Way(lambda h: apply(ScaleUnmarked, h, 0.5), replaces=True),  # `mark_dirty` is missing
    "FunctionMarked": Way(lambda h: apply(ScaleMarked, h, 0.5), replaces=True),
    "PointerThenVersion": Way(_moves_the_counter),
    "OperatorUnsaid": Way(lambda h: OPERATORS.scale_unsaid(h.detach(), 0.5)),  # its schema says that it reads
    "OperatorSaid": Way(lambda h: OPERATORS.scale_said_(h.detach(), 0.5), seen=True),
    "CustomUnsaid": Way(lambda h: custom_unsaid(h.detach(), 0.5)),  # without `mutates_args`
    "CustomSaid": Way(lambda h: custom_said(h.detach(), 0.5), seen=True),
    "DlpackAlias": Way(lambda h: from_dlpack(h.detach()).mul_(0.5)),  # another storage on the same memory
    "NumpyAlias": Way(lambda h: np.multiply(h.detach().numpy(), np.float16(0.5), out=h.detach().numpy())),
    "Data": Way(lambda h: h.data.mul_(0.5), seen=True),  # which has a version counter of its own
    "SetAlias": Way(_by_set, seen=True),
    "Operator": Way(lambda h: h.mul_(0.5), seen=True, replaces=True),
    "OnAThread": Way(lambda h: on_another_thread(lambda: h.detach().mul_(0.5)).join(), seen=True),
    "DataOnAThread": Way(lambda h: on_another_thread(lambda: h.data.mul_(0.5)).join()),
    "PointerOnAThread": Way(lambda h: on_another_thread(lambda: scale(h, 0.5)).join()),
}
"""Threads are joined before forward goes on."""

READS = [type(name, (Reads,), {"way": way, "seen": way.seen}) for name, way in WAYS.items()]
READS[1].later = (1.5,)  # type: ignore[attr-defined]  # a program that reads


class JoinedBeforeBackward(Program):
    """Write by an operator on a thread that runs during the rest of forward and is joined before backward."""

    seen = True

    def writing(self, h: Tensor) -> None:
        h.detach().mul_(0.5)

    def step(self, number: int, write: bool) -> None:
        self.number, self.write = number, write
        h = self.embedded()
        loss = waves(h)
        thread = on_another_thread(lambda: self.writing(h)) if write else None
        loss = loss + waves(self.embedded(1), (1.5,))
        if thread is not None:
            thread.join()
        loss.backward()


class PointerJoinedBeforeBackward(JoinedBeforeBackward):
    """The same through a pointer."""

    seen = False

    def writing(self, h: Tensor) -> None:
        scale(h, 0.5)


def scale_data(x: Tensor, by: float) -> None:
    x.data.mul_(by)


class Undone(Program):
    """Scales through a pointer, reads, and scales back: before and after the bytes are the same."""

    scaled = staticmethod(scale)

    def forward(self) -> Tensor:
        h = self.embedded() + self.weight[0].half()
        if self.write:
            self.scaled(h, 2.0)
        loss = waves(h)
        if self.write:
            self.scaled(h, 0.5)
        return loss + h.float().mean()


class UndoneByData(Undone):
    """The same through `.data`."""

    seen = True
    scaled = staticmethod(scale_data)


class BetweenMadeAndRead(Program):
    """Write an intermediate between the operator that made it and the one that reads it; neither saves it."""

    scaled = staticmethod(scale)

    def forward(self) -> Tensor:
        made = self.embedded() * 1.5
        if self.write:
            self.scaled(made, 0.5)
        return waves(made + 1)


class DataBetweenMadeAndRead(BetweenMadeAndRead):
    """The same through `.data`."""

    seen = True
    scaled = staticmethod(scale_data)


class BetweenMadeAndSaved(Program):
    """Write an activation between the operator that made it and the one that saves it. Autograd saved the bytes after the
    write."""

    def written(self, made: Tensor) -> Tensor:
        scale(made, 0.5)
        return made

    def forward(self) -> Tensor:
        h = self.embedded()
        losses = []
        for k in (1.0, 2.0, 3.0, 4.0):
            made = h.float() * k
            losses.append(torch.sin(self.written(made) if self.write else made).mean())
            del made
        return torch.stack(losses).sum()


class FunctionBetweenMadeAndSaved(BetweenMadeAndSaved):
    """Variant with a custom Function that marks its write."""

    def written(self, made: Tensor) -> Tensor:
        halved: Tensor = apply(ScaleMarked, made, 0.5)
        return halved


class MicroBatches(Program):
    """Two micro-batches in a step, each with a write through a pointer."""

    def step(self, number: int, write: bool) -> None:
        self.number, self.write = number, write
        for which in range(2):
            h = self.embedded(which)
            loss = waves(h)
            if write:
                scale(h, 0.5)
            (loss + h.float().mean()).backward()


class MicroBatchesInFlight(Program):
    """Run both micro-batches' forwards, a write of a tensor that the first one read, then both backwards."""

    seen = True

    def step(self, number: int, write: bool) -> None:
        self.number, self.write = number, write
        first, second = self.embedded(), self.embedded(1)
        losses = [waves(first), waves(second)]
        if write:
            with torch.no_grad():
                first.mul_(0.5)
        for loss in reversed(losses):
            loss.backward()


class Checkpointed(Program):
    """A checkpoint around the block that writes through a pointer, and the same block without one after it."""

    reentrant: ClassVar[bool] = False

    def block(self, h: Tensor) -> Tensor:
        made = h * 1.5
        loss = waves(made)
        if self.write:
            scale(made, 0.5)
        return loss + made.float().mean()

    def forward(self) -> Tensor:
        h = self.embedded() * 0.5
        inside: Tensor = checkpoint(self.block, h, use_reentrant=self.reentrant)
        return inside + self.block(h)


class CheckpointedReentrant(Checkpointed):
    """The same with torch's older checkpoint."""

    reentrant = True


# --- kernels that people have


class Rotated(Program):
    """In-place rotary kernel on q and k, from which others were made before."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k = (nn.Linear(SIDE, SIDE, bias=False) for _ in range(2))

    def forward(self) -> Tensor:
        h = self.embedded().float()
        q, k = self.to_q(h), self.to_k(h)
        norms = waves(q * 1.5) + waves(k * 1.5)
        angle = torch.arange(SIDE // 2) * (torch.arange(ROWS)[:, None] / ROWS)
        cos, sin = angle.cos(), angle.sin()
        if self.write:
            q, k = apply(Rotary, q, k, cos, sin)
        scores = torch.softmax(q @ k.t() / SIDE, -1)
        return norms + scores.square().sum()


class ResidualByPointer(Program):
    """residual += x in a fused kernel that marks the residual dirty."""

    marked: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(2))

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        added: Tensor = apply(AddOver, residual, x, self.marked)
        return added

    def forward(self) -> Tensor:
        residual = self.embedded().float() * 1.5
        for layer in self.layers:
            x = layer(torch.sin(residual * 0.7))
            residual = self.add(residual, x) if self.write else residual + x
        return torch.sin(residual * 0.3).square().mean()


class ResidualUnmarked(ResidualByPointer):
    """The same kernel without `mark_dirty`."""

    marked = False


class ResidualByOperator(ResidualByPointer):
    """residual += x as Python has it."""

    seen = True

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        residual += x
        return residual


class LossOverLogits(Program):
    """Fused cross entropy that writes its gradient over the logits, from which a z-loss was made before."""

    pointer: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(SIDE, SIDE)

    def forward(self) -> Tensor:
        logits = self.head(torch.sin(self.embedded().float()))
        z_loss = waves(logits)
        target = torch.arange(ROWS) * (self.number + 1) % SIDE
        loss: Tensor = apply(FusedCrossEntropy, logits, target, self.write, self.pointer)
        return loss + z_loss


class LossOverLogitsByData(LossOverLogits):
    """The same by an operator on `.data`."""

    seen = True
    pointer = False


class GateOverSaved(Program):
    """Gate whose backward writes over its saved tensor, from which another activation was made before."""

    pointer: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)

    def forward(self) -> Tensor:
        h = self.embedded().float()
        a, b = self.up(h), self.gate(h)
        others = waves(a) + waves(b)
        gated: Tensor = apply(Gate, a, b, self.write, self.pointer)
        return others + gated.square().mean()


class GateOverSavedByOperator(GateOverSaved):
    """The same by operators in place."""

    seen = True
    pointer = False


class Hidden(Program):
    """Hidden states in a list. A hook on the last one scales them by operators as backward begins."""

    seen = True

    def writing(self, h: Tensor) -> None:
        h.detach().mul_(0.5)

    def forward(self) -> Tensor:
        hidden = [self.embedded(which) for which in range(2)]
        loss = torch.stack([waves(h, (1.0, 2.0, 3.0)) for h in hidden]).sum()
        last = self.embedded(2).float()
        write = self.write

        def scale_all(_: Tensor) -> None:
            if write:
                for h in hidden:
                    self.writing(h)

        last.register_hook(scale_all)
        return loss + last.sin().mean()


class HiddenByPointer(Hidden):
    """The same through a pointer."""

    seen = False

    def writing(self, h: Tensor) -> None:
        scale(h, 0.5)


class HiddenByNumpy(Hidden):
    """The same by NumPy."""

    seen = False

    def writing(self, h: Tensor) -> None:
        h.detach().numpy()[:] *= np.float16(0.5)


class HiddenAfterBackward(Program):
    """Hidden states that are scaled in place after one backward, while another loss made of them is to come."""

    seen = True

    def step(self, number: int, write: bool) -> None:
        self.number, self.write = number, write
        hidden = [self.embedded(which) for which in range(2)]
        later = torch.stack([waves(h.detach() * 1.5 + self.weight[0].half(), (1.0, 2.0, 3.0)) for h in hidden]).sum()
        torch.stack([waves(h) for h in hidden]).sum().backward()
        if write:
            with torch.no_grad():
                for h in hidden:
                    h.mul_(0.5)
        later.backward()


# --- what hooks and optimizers write


class Book(Program):
    """A codebook that forward reads and a tensor's hook scales by operators, while backward runs."""

    seen = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("book", torch.randn(SIDE, SIDE) / 12)
        self.body, self.tail = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)
        self.shift = nn.Parameter(torch.zeros(SIDE))
        self.book: Tensor

    def writing(self) -> None:
        with torch.no_grad():
            self.book.mul_(0.9)

    def hooked(self, last: Tensor) -> Tensor:
        last.register_hook(self.on_gradient)
        return last

    def on_gradient(self, *_: Any) -> None:
        if self.write:
            self.writing()

    def forward(self) -> Tensor:
        x, z = self.batch(0, SIDE, SIDE), self.batch(1, SIDE, SIDE)
        t, v = torch.tanh(z @ self.book.t()), self.body(x)
        loss = torch.stack([(v * torch.sigmoid(t * k)).square().mean() for k in (1, 2, 3, 4)]).sum()
        del t, v
        return loss + self.hooked((self.tail(self.body(x)) + self.shift).sin().mean())


class BookByData(Book):
    """Variant through `.data`. A trial of the library had wrong bits here: it must be right, without an error."""

    named_error = False

    def writing(self) -> None:
        self.book.data.mul_(0.9)


class BookByPointer(Book):
    """The same through a pointer."""

    seen = False

    def writing(self) -> None:
        scale(self.book, 0.9)


class BookInFullHook(Book):
    """A module's full backward hook keeps the moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.tail.register_full_backward_hook(self.on_gradient)

    def hooked(self, last: Tensor) -> Tensor:
        return last


class BookAfterAccumulation(Book):
    """A parameter's post-accumulate-grad hook keeps the moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.shift.register_post_accumulate_grad_hook(self.on_gradient)

    def hooked(self, last: Tensor) -> Tensor:
        return last


class BookInForward(Book):
    """The moving average is kept in forward, after the codebook was read."""

    def hooked(self, last: Tensor) -> Tensor:
        if self.write:
            with torch.no_grad():
                self.book.mul_(0.9).add_(self.batch(2, SIDE, SIDE), alpha=0.1)
        return last


class BookByPointerInForward(Book):
    """A kernel keeps it in forward."""

    seen = False

    def hooked(self, last: Tensor) -> Tensor:
        if self.write:
            overwrite(self.book, (self.book * 0.9 + self.batch(2, SIDE, SIDE) * 0.1).contiguous())
        return last


class BookSet(Book):
    """The codebook is put on other memory by `set_`, in forward."""

    def hooked(self, last: Tensor) -> Tensor:
        if self.write:
            with torch.no_grad():
                self.book.set_(self.book * 0.9)  # type: ignore[call-overload]  # torch's stub has storages alone
        return last


class BookSetInBackward(Book):
    """The codebook is put on other memory by `set_`, in a hook."""

    def writing(self) -> None:
        with torch.no_grad():
            self.book.set_(self.book * 0.9)  # type: ignore[call-overload]  # torch's stub has storages alone


class Centres(Program):
    """Class centres that move to the features of their class after the loss has read them."""

    seen = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centres", torch.randn(10, SIDE))
        self.centres: Tensor

    def forward(self) -> Tensor:
        features = self.embedded()
        labels = torch.arange(ROWS) * (self.number + 3) % 10

        def move(*_: Tensor) -> None:
            if self.write:
                with torch.no_grad():
                    self.centres.mul_(0.9).index_add_(0, labels, features.detach().float(), alpha=0.01)

        return self.moved(waves((features - self.centres[labels]).half()), move)

    def moved(self, loss: Tensor, move: Callable[..., None]) -> Tensor:
        move()
        return loss


class CentresInBackward(Centres):
    """The same in a hook of the features."""

    def moved(self, loss: Tensor, move: Callable[..., None]) -> Tensor:
        last = self.embedded(1).float()
        last.register_hook(move)
        return loss + last.sin().mean()


class UpdatedInBackward(Program):
    """The optimizer's step of a bias is a hook in backward; gates were made of the layer's output, detached."""

    seen = True

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(SIDE))
        self.other = nn.Linear(16, SIDE)
        self.bias.register_post_accumulate_grad_hook(self.update)

    def update(self, p: Tensor) -> None:
        assert p.grad is not None
        if self.write:
            with torch.no_grad():
                p.sub_(p.grad, alpha=50.0)
            p.grad = None

    def forward(self) -> Tensor:
        shifted = self.batch(1, SIDE, SIDE) + self.bias
        gates, other = torch.tanh(shifted.detach()), self.other(self.batch(0, SIDE, 16))
        loss = torch.stack([(other * torch.sigmoid(gates * k)).square().mean() for k in (1, 2, 3, 4)]).sum()
        return loss + shifted.mean()


class UpdatedByDataInBackward(UpdatedInBackward):
    """The same through `.data`."""

    seen = False
    named_error = False

    def update(self, p: Tensor) -> None:
        assert p.grad is not None
        if self.write:
            p.data.sub_(p.grad, alpha=50.0)
            p.grad = None


class TiedUpdatedInBackward(Program):
    """Tied weights, updated by a hook in backward; gates were made of the embedding, detached."""

    seen = True

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(SIDE, SIDE))
        self.other = nn.Linear(16, SIDE)
        self.table.register_post_accumulate_grad_hook(self.update)

    def update(self, p: Tensor) -> None:
        assert p.grad is not None
        if self.write:
            with torch.no_grad():
                p.sub_(p.grad, alpha=5.0)
            p.grad = None

    def forward(self) -> Tensor:
        ids = torch.arange(ROWS) * (self.number + 3) % SIDE
        with torch.no_grad():
            gates = F.embedding(ids, self.table)
        other = self.other(self.batch())
        loss = torch.stack([(other * torch.sigmoid(gates * k)).square().mean() for k in (1, 2, 3)]).sum()
        logits = F.linear(torch.sin(F.embedding(ids, self.table)), self.table)
        return loss + F.cross_entropy(logits, ids.flip(0))


class ActorCritic(Program):
    """Two losses and two optimizers: the second loss was made of an activation, detached, whose weights the first one moves."""

    seen = True
    fused: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.critic = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)
        self.first: Any = torch.optim.SGD(self.encoder.parameters(), lr=0.5, fused=self.fused)
        self.second: Any = torch.optim.SGD(self.critic.parameters(), lr=0.5, fused=self.fused)

    def step(self, number: int, write: bool) -> None:
        self.number, self.write = number, write
        features = self.encoder(self.batch(0, SIDE, SIDE))
        policy = features.mean()
        seen, value = torch.tanh(features.detach()), self.critic(self.batch(1, SIDE, SIDE))
        error = torch.stack([(value * torch.sigmoid(seen * k)).square().mean() for k in (1, 2, 3, 4)]).sum()
        del features, seen, value
        policy.backward()
        if write:
            self.first.step()
        error.backward()
        if write:
            self.second.step()


class ActorCriticFused(ActorCritic):
    """The same with fused optimizers."""

    fused = True


# --- what eager refuses


class SavedByOperator(Program):
    """Write a tensor that autograd saved, by an operator."""

    seen = True
    eager_refuses = True

    def written(self, made: Tensor, loss: Tensor) -> Tensor:
        with torch.no_grad():
            made.mul_(0.5)
        return loss

    def forward(self) -> Tensor:
        made = self.embedded().float()
        loss = torch.sin(made).mean() + waves(made, (2.0, 3.0, 4.0, 5.0))
        return self.written(made, loss) if self.write else loss


class SavedMarked(SavedByOperator):
    """Write a tensor that autograd saved, by a custom Function that marks it."""

    seen = False

    def written(self, made: Tensor, loss: Tensor) -> Tensor:
        return loss + apply(ScaleMarked, made, 0.5).mean()  # type: ignore[no-any-return]  # what a function returns is


class SavedThenVersion(SavedByOperator):
    """Write a tensor that autograd saved, by a kernel that moves the version counter."""

    seen = False

    def written(self, made: Tensor, loss: Tensor) -> Tensor:
        _moves_the_counter(made)
        return loss


class SavedInBackward(Book):
    """A hook writes a buffer that autograd saved and has yet to use."""

    eager_refuses = True

    def forward(self) -> Tensor:
        x = self.batch(0, SIDE, SIDE)
        loss = torch.stack([(self.body(x) * self.book * k).sin().square().mean() for k in (1, 2, 3, 4)]).sum()
        return loss + self.hooked((self.tail(self.body(x)) + self.shift).sin().mean())


def _all(kind: type[Program]) -> Iterator[type[Program]]:
    """Subclasses that have a step of their own."""
    for one in kind.__subclasses__():
        if one is not Reads:
            yield one
        yield from _all(one)


PROGRAMS = tuple(_all(Program))
