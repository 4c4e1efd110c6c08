"""Random training programs: lists of instructions on a few slots that hold square tensors, so that any list is a program.

    program = [("sin", 3, 0, 1), ("mul_", 1, 5, 0), ("backward", 1, 2, 0), ...]      # drawn by hypothesis
    run(program, torch.device("cpu"))                                                 # as plain PyTorch runs it
    with device.compute(): run(program, device.torch_device, manager)                 # with hooks, entered again and again

What torch refuses is an outcome like any other, and the program goes on after it.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SIDE = 8
"""Every value is a SIDE x SIDE tensor of float32: 256 bytes."""

BUFFER_PARTS = 3
"""Few enough that each part exceeds a quarter of its buffer, and is therefore not moved alone."""

# --- what programs are made of


class SavesBoth(torch.autograd.Function):
    """Saves its input, its result and a tensor that only the context knows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.sin()
        ctx.save_for_backward(x, out)
        ctx.scale = x.detach().abs() + 1
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x, out = ctx.saved_tensors
        gradient: Tensor = grads[0] * (x.cos() + out * 0.5) / ctx.scale
        return gradient


class WritesWhatItSaved(torch.autograd.Function):
    """Function whose backward uses its saved tensor as scratch space, as hand-written memory savers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            x.mul_(0.5)
        gradient: Tensor = grads[0] * 2 + x.detach()
        return gradient


class FillsAPart(torch.autograd.Function):
    """Fill a part of a buffer that others fill too, unseen by autograd, and save it, as a memory planner's kernel does.

    `way` 0: save a view of the buffer, whose version counter no such write moves. 1: save a view with its own counter. 2: save
    all that was filled so far.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor, part: int, way: int) -> Tensor:
        begin, end = part * SIDE, (part + 1) * SIDE
        buffer.data[begin:end] = x.sin()
        saved = (buffer[begin:end], buffer.data[begin:end], buffer[:end])[way]
        ctx.save_for_backward(saved)
        return buffer.data[begin:end] * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (saved,) = ctx.saved_tensors
        return grads[0] * saved[-SIDE:], None, None, None


def block(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x * y).exp() - F.dropout(y, 0.2)


def chunks(x: Tensor) -> Tensor:
    """In-place operators on chunks of one storage; each chunk is saved and has its own version counter."""
    return torch.cat([chunk.tanh_() * 1.5 for chunk in (x * 2).unsafe_chunk(4, 1)], 1)


def gated(x: Tensor, y: Tensor) -> Tensor:
    """Save one half of a storage while the other is written."""
    a, b = torch.cat((x, y), 1).unsafe_split(SIDE, 1)
    return F.silu(a) * b.mul_(2)


def cell(x: Tensor, y: Tensor) -> Tensor:
    """An LSTM cell as torch writes it out on a CPU."""
    i, f, g, o = torch.cat((x, y, x * y, y), 1).unsafe_chunk(4, 1)
    state = f.sigmoid_() * y + i.sigmoid_() * g.tanh_()
    return o.sigmoid_() * state.tanh()


def storage_of(x: Tensor) -> Tensor:
    """Other tensor on the storage of `x`, independent of its version counter."""
    t = x.new_empty(0)
    with torch.no_grad():
        t.set_(x.detach().untyped_storage(), x.storage_offset(), x.size(), x.stride())
    return t


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "exp": lambda x: torch.exp(torch.tanh(x)),
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "silu": F.silu,
    "mish": F.mish,
    "softmax": lambda x: torch.softmax(x, -1),
    "norm": lambda x: F.layer_norm(x, (SIDE,)),
    "dropout": lambda x: F.dropout(x, 0.3),
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.9, training=True),
    "scalar": lambda x: 1.7 / (x * x + 1.3),
    "reduce": lambda x: x * x.square().mean(),
    "saves both": SavesBoth.apply,
    "writes what it saved": WritesWhatItSaved.apply,
    "half": lambda x: (x.to(torch.bfloat16) * 1.5).to(torch.float32),
    "indices": lambda x: torch.gather(x, 0, x.argsort(0)),
    "chunks": chunks,
    "chain": lambda x: (x * 2).add_(1).neg_().tanh_().mul_(0.5),
    "chain refused": lambda x: (x * 0.5).exp_().add_(1),  # exp's saved tensor was overwritten: backward refuses
    "inplace": lambda x: F.dropout(F.silu(F.leaky_relu(x * 2, 0.3, inplace=True), inplace=True), 0.2, inplace=True),
}
VIEWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "t": lambda x, y: x.t(),
    "same": lambda x, y: x.view(-1).view(SIDE, SIDE) if x.is_contiguous() else x[:],
    "row": lambda x, y: x[3:4].expand(SIDE, SIDE),
    "offset": lambda x, y: torch.cat((x, y))[3 : 3 + SIDE],
    "strided": lambda x, y: torch.cat((x, y), 1)[:, ::2],
    "unbind": lambda x, y: torch.stack((x, y)).unbind(0)[1],
    "conj": lambda x, y: torch.complex(x, y).conj().imag,
    "neg": lambda x, y: torch._neg_view(x),
    "alias": lambda x, y: x.detach(),
    "data": lambda x, y: x.data,
    "set_": lambda x, y: storage_of(x),
    "data of a half": lambda x, y: torch.cat((x, y), 1).data[:, SIDE:],
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": torch.mul,
    "sub": torch.sub,
    "matmul": lambda x, y: x @ y * 0.3,
    "where": lambda x, y: torch.where(x > 0, x * y, y),
    "block": block,
    "checkpoint": lambda x, y: checkpoint(block, x, y, use_reentrant=False),
    "gated": gated,
    "cell": cell,
    "conj product": lambda x, y: (torch.complex(x, y).conj() * torch.complex(y, x)).real,
    "reentrant": lambda x, y: checkpoint(block, x, y, use_reentrant=True),
}
INPLACE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add_": lambda x, y: x.add_(1),
    "mul_": lambda x, y: x.mul_(y),
    "rows_": lambda x, y: x[2:5].mul_(0.5),
    "relu_": lambda x, y: x.relu_(),
    "detached_": lambda x, y: x.detach().mul_(0.9),
    "copy_": lambda x, y: x.t().copy_(y),
    "neg view_": lambda x, y: torch._neg_view(x).mul_(y),
    "conj view_": lambda x, y: torch.view_as_complex(x.view(SIDE, SIDE // 2, 2)).conj().imag.mul_(0.5),
    "tanh_": lambda x, y: x.tanh_(),
    "data mul_": lambda x, y: x.data.mul_(0.5),
    "data rows": lambda x, y: x.data[2:5].copy_(y.detach()[2:5].clone()),
    "set_ add_": lambda x, y: storage_of(x).add_(0.5),
}
NAMES = [*UNARY, *UNARY, *BINARY, *VIEWS, *INPLACE, "linear", "no_grad", "no_grad write", "batch", "cycle"]
NAMES += ["halves", "halves", "buffer", "buffer", "buffers", "buffers", "data mul_", "data rows", "set_ add_"]
NAMES += ["backward", "retain", "retain", "double", "double", "train", "outside"]

WRITING = {*INPLACE, "no_grad write", "train", "buffer", "buffers", "backward", "retain", "double"}
"""Instructions that can change bytes that existed before."""

Instruction = tuple[str, int, int, int]
"""A name, two operands and the slot for the result."""

SLOTS = 4
LEAVES = 2

operands = st.integers(0, SLOTS + LEAVES - 1)
programs = st.lists(st.tuples(st.sampled_from(NAMES), operands, operands, st.integers(0, SLOTS - 1)), min_size=12, max_size=40)


class Mark:
    """True while a node of autograd exists."""


class Run:
    """Run of a program: its tensors, and everything observable from outside.

    A result replaces the earlier tensor of its slot. Most saved tensors are therefore held by the graph alone.
    """

    def __init__(self, device: torch.device, manager: AbstractContextManager[object]) -> None:
        self.seen: list[object] = []
        self._marks: list[weakref.ref[Mark]] = []
        self._device = device
        self._manager = manager
        self._inside = True
        self._oldest = torch.ones((), device=device, requires_grad=True) * 1
        self._weight = nn.Parameter(torch.randn(SIDE, SIDE, device=device))
        self._buffer: Tensor | None = None
        self._part = 0
        self._leaves = [self._randn(grad=True) for _ in range(LEAVES)]
        self._slots = [leaf * 0.5 for leaf in self._leaves for _ in range(SLOTS // LEAVES)]

    def __call__(self, program: list[Instruction], left_out: Collection[int], after: Callable[[int, str], None]) -> None:
        """Runs all but the instructions `left_out`, and calls `after` with number and name of each one that ran."""
        endings = [("retain", slot, slot, slot) for slot in range(SLOTS)]  # they share graphs
        for number, instruction in enumerate([*program, *endings]):
            # The manager is entered and left repeatedly: tensors saved inside are used outside, and the other way round.
            inside = self._inside and number < len(program)
            if number not in left_out:
                with self._manager if inside else nullcontext():
                    self._guarded(instruction)
                after(number, instruction[0])
        for t in self._slots:
            self._look(t)
        self._slots.clear()
        # A GPU's backward runs on a thread of autograd's. That thread frees a node when it takes the next one, the latest op
        # first. After this one, it holds nothing of a backward that raised.
        self._oldest.backward()

    @property
    def graphs_are_gone(self) -> bool:
        return all(mark() is None for mark in self._marks)

    def _guarded(self, instruction: Instruction) -> None:
        try:
            self._do(*instruction)
        except RuntimeError as error:
            self.seen.append((instruction[0], type(error).__name__, normalised(str(error))))
            error.__traceback__ = None  # it holds frames that hold graphs

    def _do(self, name: str, i: int, j: int, k: int) -> None:
        operands = [*self._slots, *self._leaves]
        x, y = operands[i], operands[j]
        del operands
        if name in UNARY:
            self._put(k, UNARY[name](x))
        elif name in BINARY:
            self._put(k, BINARY[name](x, y))
        elif name in VIEWS:
            self._put(k, VIEWS[name](x, y))
        elif name in INPLACE:
            INPLACE[name](x, y)
        elif name == "linear":
            self._put(k, F.linear(x, self._weight.t() if j % 2 else self._weight))
        elif name == "no_grad":
            with torch.no_grad():
                self._put(k, x * y + 1)
        elif name == "no_grad write":
            with torch.no_grad():
                x.add_(y, alpha=0.5)
        elif name == "batch":
            self._put(k, self._randn(grad=False) * self._leaves[0])
        elif name == "halves":
            halves = torch.cat((x, y), 1).unsafe_split(SIDE, 1)
            self._put(k, halves[0])
            self._put((k + 1) % SLOTS, halves[1])
        elif name == "buffer":
            self._put(k, self._fill(x, way=i % 3, again=j == 0))
        elif name == "buffers":
            for part, source in enumerate((x, y, x)):
                self._put((k + part) % SLOTS, self._fill(source, way=(i + j * part) % 3, again=False))
        elif name == "cycle":
            out = block(x, y)
            self._mark(out)
            ring: list[object] = [out]
            ring.append(ring)  # only the collector frees this graph
        elif name == "train":
            self._train()
        elif name == "outside":
            self._inside = not self._inside
        else:
            self._differentiate(name, x, y, k)

    def _differentiate(self, name: str, x: Tensor, y: Tensor, k: int) -> None:
        leaves = [self._weight, *self._leaves]
        loss = (x * y).sum()
        if not loss.requires_grad:
            return
        if name == "double":
            grads = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
            for grad in grads:
                if grad is not None:
                    self._put(k, grad)
            return
        loss.backward(retain_graph=name == "retain")
        for leaf in leaves:
            self._look(leaf.grad)

    def _fill(self, x: Tensor, *, way: int, again: bool) -> Tensor:
        """Fill the next part of the buffer, or the latest one `again`. A full buffer is left to the graphs that saved it."""
        if self._buffer is None:
            self._buffer, self._part = torch.zeros(BUFFER_PARTS * SIDE, SIDE, device=self._device), 0
        elif not again:
            self._part += 1
        filled: Tensor = FillsAPart.apply(x, self._buffer, self._part, way)  # type: ignore[no-untyped-call]  # torch's own
        if self._part == BUFFER_PARTS - 1:
            self._buffer = None
        return filled

    def _train(self) -> None:
        with torch.no_grad():
            for leaf in (self._weight, *self._leaves):
                if leaf.grad is not None:
                    leaf.sub_(leaf.grad, alpha=0.1)
                    leaf.grad = None

    def _randn(self, *, grad: bool) -> Tensor:
        return torch.randn(SIDE, SIDE, device=self._device, requires_grad=grad)

    def _put(self, slot: int, t: Tensor) -> None:
        self._slots[slot] = t
        self._mark(t)
        self._look(t)

    def _mark(self, t: Tensor) -> None:
        if t.grad_fn is not None:
            mark = Mark()
            metadata: Any = t.grad_fn.metadata  # a property, which torch's stub takes for a method
            metadata[mark] = None  # lives as long as the node
            self._marks.append(weakref.ref(mark))

    def _look(self, t: Tensor | None) -> None:
        self.seen.append(None if t is None else bits(t))


def bits(t: Tensor) -> bytes:
    plain = t.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


def normalised(message: str) -> str:
    """Remove the name of the op that wrote: if no tensor holds the storage any more, only eager knows its latest writer."""
    return re.sub(r", which is output \d+ of [\w:]+,", "", message)


def run(
    program: list[Instruction],
    device: torch.device,
    manager: AbstractContextManager[object] | None = None,
    *,
    left_out: Collection[int] = (),
    after: Callable[[int, str], None] = lambda number, name: None,
    collect: bool = False,
) -> Run:
    torch.manual_seed(11)
    this = Run(device, manager or nullcontext())
    this(program, left_out, after)
    if collect:
        gc.collect()
    return this
