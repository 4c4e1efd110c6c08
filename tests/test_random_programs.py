"""Random training programs give what eager gives: the same gradients, bit for bit, or the same error.

    program = [("sin", 3, 0, 1), ("mul_", 1, 5, 0), ("backward", 1, 2, 0), ...]      # drawn by hypothesis
    run(program, eager) == run(program, swapped)                                      # and no block is left behind

A program works on a few slots that hold square tensors, so that any list of such instructions is a program. What eager refuses
is an outcome like any other, and the program goes on after it.
"""

from __future__ import annotations

import dataclasses
import gc
import re
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import chameleon_mm as cm
from chameleon_mm.device import SPECS, Device
from chameleon_mm.device.reproducible import reproducible
from chameleon_mm.executor import Executor, ProtectedStorages
from chameleon_mm.policy import DefaultRule, Limits
from chameleon_mm.transfer import Thresholds

SIDE = 8
"""Every value is a SIDE x SIDE tensor of float32: 256 bytes."""

SLOW_LINK = dataclasses.replace(SPECS["h200"], h2d_gbps=0.05, d2h_gbps=0.05, duplex_gbps=0.08)
"""Copies are still on their way when the next operators, uses and drops come."""

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
    """A backward that uses its saved tensor as scratch space, as hand-written memory savers do."""

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


def block(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x * y).exp() - F.dropout(y, 0.2)


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "exp": lambda x: torch.exp(torch.tanh(x)),
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
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
}
VIEWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "t": lambda x, y: x.t(),
    "same": lambda x, y: x.view(-1).view(SIDE, SIDE) if x.is_contiguous() else x[:],
    "row": lambda x, y: x[3:4].expand(SIDE, SIDE),
    "offset": lambda x, y: torch.cat((x, y))[3 : 3 + SIDE],
    "strided": lambda x, y: torch.cat((x, y), 1)[:, ::2],
    "unbind": lambda x, y: torch.stack((x, y)).unbind(0)[1],
    "conj": lambda x, y: torch.complex(x, y).conj().imag,
    "alias": lambda x, y: x.detach(),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": torch.mul,
    "sub": torch.sub,
    "matmul": lambda x, y: x @ y * 0.3,
    "where": lambda x, y: torch.where(x > 0, x * y, y),
    "block": block,
    "checkpoint": lambda x, y: checkpoint(block, x, y, use_reentrant=False),
    "reentrant": lambda x, y: checkpoint(block, x, y, use_reentrant=True),
}
INPLACE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add_": lambda x, y: x.add_(1),
    "mul_": lambda x, y: x.mul_(y),
    "rows_": lambda x, y: x[2:5].mul_(0.5),
    "relu_": lambda x, y: x.relu_(),
    "detached_": lambda x, y: x.detach().mul_(0.9),
    "copy_": lambda x, y: x.t().copy_(y),
}
NAMES = [*UNARY, *UNARY, *BINARY, *VIEWS, *INPLACE, "linear", "no_grad", "no_grad write", "batch", "cycle"]
NAMES += ["backward", "backward", "retain", "double", "double", "train", "outside"]

Instruction = tuple[str, int, int, int]
"""A name, two operands and the slot for the result."""

SLOTS = 4
LEAVES = 2

operands = st.integers(0, SLOTS + LEAVES - 1)
programs = st.lists(st.tuples(st.sampled_from(NAMES), operands, operands, st.integers(0, SLOTS - 1)), min_size=12, max_size=40)


class Mark:
    """Tells whether a node of autograd's is still there."""


class Run:
    """One run of a program: its tensors, and everything that could be seen of it from outside.

    A result goes into a slot, and what was there is dropped: most of what is saved is then held by the graph alone.
    """

    def __init__(self, device: Device, manager: AbstractContextManager[object]) -> None:
        self.seen: list[object] = []
        self._marks: list[weakref.ref[Mark]] = []
        self._device = device
        self._manager = manager
        self._inside = True
        self._oldest = torch.ones((), device=device.torch_device, requires_grad=True) * 1
        self._weight = nn.Parameter(torch.randn(SIDE, SIDE, device=device.torch_device))
        self._leaves = [self._randn(grad=True) for _ in range(LEAVES)]
        self._slots = [leaf * 0.5 for leaf in self._leaves for _ in range(SLOTS // LEAVES)]

    def __call__(self, program: list[Instruction]) -> None:
        for instruction in program:
            # The manager is entered and left again and again: what is saved inside is used outside, and the other way round.
            with self._manager if self._inside else nullcontext():
                self._guarded(instruction)
        for slot in range(SLOTS):
            self._guarded(("backward", slot, slot, slot))
        self._slots.clear()
        # A GPU's backward runs on a thread of autograd's, which lets go of a node when it takes the next, the latest op first:
        # after this one nothing is left there of a backward that raised.
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

    def _train(self) -> None:
        with torch.no_grad():
            for leaf in (self._weight, *self._leaves):
                if leaf.grad is not None:
                    leaf.sub_(leaf.grad, alpha=0.1)
                    leaf.grad = None

    def _randn(self, *, grad: bool) -> Tensor:
        return torch.randn(SIDE, SIDE, device=self._device.torch_device, requires_grad=grad)

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
    return t.detach().resolve_neg().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def normalised(message: str) -> str:
    """Without the name of the op that wrote: of a tensor that nobody holds, only eager knows the latest."""
    return re.sub(r", which is output \d+ of [\w:]+,", "", message)


# --- the ways to run one


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a program is swapped."""

    session: bool
    min_bytes: int
    pool_bytes: int
    slow_link: bool
    leaving_bytes: int
    short: bool
    """Whether there is no room for anything that could be on the host."""
    packs: bool
    collect: bool


def settings_drawn() -> st.SearchStrategy[Setting]:
    return st.builds(
        Setting,
        session=st.booleans(),
        min_bytes=st.sampled_from([0, 0, 300]),  # 300: only what is larger than one value moves
        pool_bytes=st.sampled_from([1 << 20, 1 << 20, 16 << 10]),  # 16 KiB: four blocks, and then everything stays
        slow_link=st.booleans(),
        leaving_bytes=st.sampled_from([0, 1 << 20]),
        short=st.booleans(),
        packs=st.booleans(),
        collect=st.booleans(),
    )


def fresh(kind: str, setting: Setting) -> Device:
    if kind == "cuda":
        return cm.CudaDevice()
    return cm.SimDevice(SLOW_LINK if setting.slow_link else "h200")


class Reentered:
    """Hooks that can be entered again and again, with a budget that is always exceeded."""

    def __init__(self, device: Device, pool: cm.PinnedPool, setting: Setting) -> None:
        self._executor = Executor(
            device,
            pool,
            rule=DefaultRule(min_bytes=setting.min_bytes),
            limits=Limits(
                hbm_budget_bytes=1 if setting.session else None,
                leaving_bytes=setting.leaving_bytes,
                free_share=0.0 if setting.short and not setting.session else None,
            ),
            protected=ProtectedStorages(),
            thresholds=Thresholds() if setting.packs else Thresholds.direct(),
        )
        self._hooks: list[torch.autograd.graph.saved_tensors_hooks] = []

    def __enter__(self) -> None:
        hooks = torch.autograd.graph.saved_tensors_hooks(self._executor.save, self._executor.use)
        hooks.__enter__()
        self._hooks.append(hooks)

    def __exit__(self, *error: object) -> None:
        self._hooks.pop().__exit__(*error)


@pytest.fixture(scope="module", autouse=True)
def _unfrozen() -> Iterator[None]:
    """`collecting` freezes what is there before each program; the tests of other modules find it as it was."""
    yield
    gc.unfreeze()


@contextmanager
def collecting(*, always: bool) -> Iterator[None]:
    """No garbage collection, or one at almost every allocation: then claims end in the middle of any line of ours."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()  # the next collection looks through what this program leaves, not through all of torch
    if always:
        gc.set_threshold(1, 2, 2)
    else:
        gc.disable()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()


def check(program: list[Instruction], setting: Setting, kind: str) -> None:
    with reproducible():
        with collecting(always=setting.collect):
            eager = run(program, fresh(kind, setting), nullcontext(), collect=setting.collect)
            gone = eager.graphs_are_gone
        device = fresh(kind, setting)
        pool = cm.PinnedPool(setting.pool_bytes, device=device)
        with collecting(always=setting.collect):
            swapped = run(program, device, Reentered(device, pool, setting), collect=setting.collect)
            live = pool.stats().num_live
    assert swapped.seen == eager.seen
    # Where eager itself leaves something behind (after a failed double backward, or garbage in cycles), so may we.
    assert live == 0 or not gone


def run(program: list[Instruction], device: Device, manager: AbstractContextManager[object], *, collect: bool) -> Run:
    torch.manual_seed(11)
    with device.compute():
        this = Run(device, manager)
        this(program)
    if collect:
        gc.collect()
    return this


KINDS = ["sim", pytest.param("cuda", marks=pytest.mark.gpu)]
QUIET = {"deadline": None, "database": None, "suppress_health_check": [HealthCheck.too_slow]}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, derandomize=True, **QUIET)  # type: ignore[arg-type]  # mypy takes a dict's values for one type
@given(program=programs, setting=settings_drawn())
def test_random_programs_give_what_eager_gives(kind: str, program: list[Instruction], setting: Setting) -> None:
    check(program, setting, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@seed(20260101)
@settings(max_examples=1000, **QUIET)  # type: ignore[arg-type]  # as above
@given(program=programs, setting=settings_drawn())
def test_a_thousand_more_random_programs(kind: str, program: list[Instruction], setting: Setting) -> None:
    check(program, setting, kind)


# --- what such programs have found


def swapping(device: Device) -> cm.save_on_cpu:
    return cm.save_on_cpu(device=device, pool=cm.PinnedPool("1MiB", device=device), min_bytes=0)


@pytest.mark.parametrize("alive", [True, False])
def test_a_write_between_a_first_and_a_double_backward_is_noticed(alive: bool, device: Device) -> None:
    """What backward saves again came out of our hook: it must carry the version counter of what went in."""
    said = []
    for manager in (nullcontext(), swapping(device)):
        x = torch.ones(64, device=device.torch_device, requires_grad=True)
        with device.compute(), manager:
            y = x * 2
            (grad,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
            alias = y.detach()
            if not alive:
                del y
            alias.add_(1)
            del alias
            with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
                torch.autograd.grad(grad.sum(), x)
            said.append(normalised(str(caught.value)))
    assert said[0] == said[1]


def test_a_backward_that_writes_its_saved_tensor_cannot_run_twice(device: Device) -> None:
    for manager in (nullcontext(), swapping(device)):
        x = torch.ones(64, device=device.torch_device, requires_grad=True)
        with device.compute(), manager:
            out = UNARY["writes what it saved"](x * 2).exp().sum()
            torch.autograd.grad(out, x, retain_graph=True)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(out, x)


def test_nested_tensors_without_strides_stay(sim: cm.SimDevice) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its own older kind of nested tensors a prototype
        nested = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(2, 4)])
    executor = Executor(
        sim, cm.PinnedPool("1MiB", device=sim), rule=DefaultRule(min_bytes=0), limits=Limits(), protected=ProtectedStorages()
    )
    handle = executor.save(nested)
    assert torch.equal(executor.use(handle).values(), nested.values())
    assert executor.meter.totals.kept_by_reason == {"layout": 1}


def test_a_storage_emptied_before_its_copy_is_left_to_who_emptied_it(sim: cm.SimDevice) -> None:
    """As FSDP does with what it gathers: emptied after forward, filled again before backward."""
    x = torch.randn(64, requires_grad=True)
    with sim.compute():
        (expected,) = torch.autograd.grad((x * 2).sin().exp().sum(), x)
        with swapping(sim):
            y = x * 2
            out = y.sin()
            nbytes = y.untyped_storage().nbytes()
            y.untyped_storage().resize_(0)
            out = out.exp().sum()
        y.untyped_storage().resize_(nbytes)
        y.data.copy_(x.detach() * 2)
        assert torch.equal(torch.autograd.grad(out, x)[0], expected)


def test_hooks_end_with_the_session_even_inside_a_step(sim: cm.SimDevice) -> None:
    session = cm.SwapSession("1GiB", "1MiB", sim, min_bytes=0)
    step = session.step()
    with session:
        step.__enter__()
    step.__exit__(None, None, None)  # too late, and harmless
    assert session.report().steps == 0
    x = torch.randn(64, requires_grad=True)
    (x * 2).sin().exp().exp().sum().backward()
    assert session.pool.stats().peak_live_bytes == 0


# --- long runs


def forward(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(2):
        x = torch.tanh(x @ w).exp() - 1
    return x.sum()


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("keep_one", [True, False])
@pytest.mark.parametrize("session", [True, False])
def test_what_is_remembered_stays_flat_without_steps(
    session: bool, keep_one: bool, backward: bool, sim: cm.SimDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody says where a step ends, and one graph may be kept for ever: 500 iterations must not pile anything up."""
    monkeypatch.setattr("chameleon_mm.executor.executor.LONGEST_UNNAMED_STEP", 256)
    weight = nn.Parameter(torch.randn(8, 8) * 0.1)
    manager = cm.SwapSession("1MiB", "1MiB", sim, min_bytes=0) if session else swapping(sim)
    kept: list[Tensor] = []
    remembered: list[int] = []
    with collecting(always=False), sim.compute(), manager:
        for iteration in range(500):
            out = forward(torch.randn(8, 8), weight)
            if keep_one and not kept:
                kept.append(out)
            elif backward:
                out.backward()
            del out
            weight.grad = None
            if iteration in (200, 499):
                remembered.append(footprint(manager))
    assert remembered[1] - remembered[0] < 32 << 10  # a cut step's numbers; without bounds it is ten times that


def footprint(root: object) -> int:
    """Bytes of all that is reachable from `root` and is of the swap path itself: its objects, containers and numbers."""
    seen: dict[int, object] = {}
    todo = [root]
    while todo:
        it = todo.pop()
        module = type(it).__module__
        plain = isinstance(it, (int, tuple, list, dict, deque, weakref.ref))
        own = module.startswith("chameleon_mm.") and not module.startswith("chameleon_mm.device.")
        if id(it) not in seen and (plain or own):
            seen[id(it)] = it
            todo.extend(gc.get_referents(it))
    return sum(sys.getsizeof(it) for it in seen.values())
