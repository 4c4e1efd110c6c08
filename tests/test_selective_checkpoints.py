"""Tensors that selective checkpoints keep: swapped where torch shows them to hooks, else counted and reported; eager's bits."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import chameleon_mm as cm
from chameleon_mm.units import KIB, MIB
from tests._fakes import Unwatched
from tests._programs import assert_same, on_a_thread

pytestmark = pytest.mark.usefixtures("no_gc")

SHOWS = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
STEPS, BLOCKS, ROWS, WIDTH = 4, 4, 1024, 64
KEPT_BYTES = BLOCKS * ROWS * 5 * WIDTH * 4
"""Results of the two products of each block."""
MODE: Any = torch.utils.checkpoint._CachingTorchDispatchMode
any_checkpoint: Any = checkpoint  # its arguments differ among releases of torch

PRODUCTS = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]


def keeps_products(ctx: Any, op: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def contexts(**how: Any) -> Callable[[], Any]:
    return partial(create_selective_checkpoint_contexts, keeps_products, **how)


Wrap = Callable[[nn.Module], Callable[[Tensor], Tensor]]


def called(block: nn.Module, **how: Any) -> Callable[[Tensor], Tensor]:
    """Return a checkpointed block as a partial that may precede the session, such as Hugging Face's."""
    return partial(any_checkpoint, block, **{"use_reentrant": False, "context_fn": contexts(), **how})


class Writes(nn.Module):
    """Block that writes the tensors that the policy keeps."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x) @ torch.eye(WIDTH)
        return y.mul_(0.5).sin()


class InOwnMode:
    """A context of the user's own around torch's."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __enter__(self) -> None:
        self._inner.__enter__()

    def __exit__(self, *raised: object) -> None:
        self._inner.__exit__(*raised)


def in_own_modes() -> Any:
    return tuple(map(InOwnMode, create_selective_checkpoint_contexts(PRODUCTS)))


WRAPS: dict[str, Wrap] = {
    "a partial": called,
    "a list of operators": partial(called, context_fn=partial(create_selective_checkpoint_contexts, PRODUCTS)),
    "torch's wrapper of modules": lambda block: checkpoint_wrapper(block, context_fn=contexts()),
    "no early stop": partial(called, early_stop=False),
    "in another checkpoint": lambda block: partial(checkpoint, called(block), use_reentrant=False),
}
if SHOWS:
    WRAPS["a decorator"] = any_checkpoint(use_reentrant=False, context_fn=contexts())
    WRAPS["True by the user"] = partial(called, respect_saved_tensors_hooks=True)

STAY: dict[str, Wrap] = {
    "contexts of their own": partial(called, context_fn=in_own_modes),
    "that may be written": partial(called, context_fn=contexts(allow_cache_entry_mutation=True)),
    "that are written": lambda block: called(Writes(block), context_fn=contexts(allow_cache_entry_mutation=True)),
}
if SHOWS:
    STAY["False by the user"] = partial(called, respect_saved_tensors_hooks=False)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))


def train(
    wrap: Wrap, session: cm.SwapSession | None = None, *, device: cm.SimDevice | None = None, steps: int = STEPS
) -> list[Tensor]:
    """Losses, gradients and weights of a model of a few wrapped blocks: in plain PyTorch without `session` and `device`."""
    torch.manual_seed(3)
    blocks = [block() for _ in range(BLOCKS)]
    model, wrapped = nn.ModuleList(blocks), [wrap(one) for one in blocks]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen: list[Tensor] = []
    with session or (device.compute() if device else nullcontext()), warnings.catch_warnings():
        if session is None:
            warnings.simplefilter("ignore", FutureWarning)
        for _ in range(steps):
            x = torch.randn(ROWS, WIDTH, requires_grad=True)
            with session.step() if session else nullcontext():
                y = x
                for one in wrapped:
                    y = y + one(y)
                loss = y.square().mean()
                loss.backward()
                with _disable_current_modes():  # the test's own copies are on no device
                    seen += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
                optimizer.step()
                optimizer.zero_grad()
    return [*seen, *(p.detach().clone() for p in model.parameters())]


def peak_bytes(wrap: Wrap) -> int:
    """Device memory that the model takes without a session."""
    device = cm.SimDevice()
    train(wrap, device=device)
    return device.peak_allocated_bytes()


@pytest.mark.ci
@pytest.mark.parametrize("device", [cm.SimDevice, Unwatched], ids=["simulated", "unwatched"])
@pytest.mark.parametrize("name", WRAPS)
def test_what_they_keep_is_planned_where_torch_shows_it_and_told_where_not(
    name: str, device: Callable[[], cm.SimDevice]
) -> None:
    """The budget is too small for the kept tensors, unless they may leave."""
    expected = train(WRAPS[name])
    session = cm.SwapSession(peak_bytes(WRAPS[name]) * 3 // 4, "64MiB", device(), min_bytes=4 * KIB)
    assert_same(expected, train(WRAPS[name], session))
    report = session.report()
    assert report.plans > 0
    assert report.steps_by_phase.get("planned", 0) > 0
    if SHOWS:
        assert report.problems == ()
        assert report.bytes_swapped_in > KEPT_BYTES
        assert report.budget_held is not False
    else:
        (problem,) = report.problems
        assert problem.startswith(f"selective checkpoints kept up to {KEPT_BYTES / MIB:.2f} MiB where no hook")
        assert "train with torch 2.14 or newer" in problem
    assert session.pool.stats().num_live == 0


@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")  # torch's own, where we do not choose
@pytest.mark.parametrize("name", STAY)
def test_what_may_not_leave_stays_and_is_told(name: str) -> None:
    expected = train(STAY[name])
    session = cm.SwapSession(peak_bytes(STAY[name]) * 5 // 8, "64MiB", cm.SimDevice(), min_bytes=4 * KIB)
    assert_same(expected, train(STAY[name], session))
    (problem,) = session.report().problems
    assert problem.startswith("selective checkpoints kept up to ")
    assert ("leave out respect_saved_tensors_hooks=False" in problem) is SHOWS
    assert session.report().plans > 0
    assert session.pool.stats().num_live == 0


def test_steps_over_the_budget_by_what_they_keep_are_planned_once() -> None:
    """A plan above the budget is, unlike one that turned out too small, no reason to plan again in each step."""
    wrap = STAY["False by the user"] if SHOWS else WRAPS["a partial"]
    expected = train(wrap, steps=8)
    session = cm.SwapSession(peak_bytes(wrap) * 5 // 8, "64MiB", cm.SimDevice(), min_bytes=4 * KIB)
    assert_same(expected, train(wrap, session, steps=8))
    report = session.report()
    assert (report.steps_by_phase["planned"], report.budget_held) == (7, False)
    assert report.plans <= 6
    assert report.peak_hbm_bytes < peak_bytes(wrap)


def test_without_selective_checkpoints_nothing_is_told_and_nothing_too_small_is_planned() -> None:
    session = cm.SwapSession("1MiB", "64MiB", cm.SimDevice(), min_bytes=4 * KIB)
    with session, session.step():
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        checkpoint(block(), x, use_reentrant=False).sum().backward()
    assert (session.report().problems, session.report().plans) == ((), 0)


def test_an_error_for_a_kept_tensor_that_was_written_is_raised_as_in_eager() -> None:
    session = cm.SwapSession("64MiB", "64MiB", cm.SimDevice(), min_bytes=4 * KIB)
    for inside in (None, session):
        with pytest.raises(RuntimeError, match=r"mutated|modified by an inplace operation"):
            train(lambda block: called(Writes(block)), inside)
    assert session.pool.stats().num_live == 0


@pytest.mark.usefixtures("flags_of_modes")
def test_torchs_mode_is_its_own_again_after_the_last_session_whatever_the_order() -> None:
    own = dict(vars(MODE))
    first, second = (cm.SwapSession("64MiB", "64MiB", cm.SimDevice(), min_bytes=4 * KIB) for _ in range(2))
    started, leave = threading.Event(), threading.Event()

    def beside() -> None:
        with second:
            started.set()
            assert leave.wait(60)

    thread = threading.Thread(target=beside)
    with first:
        thread.start()
        assert started.wait(60)
        assert "__enter__" in vars(MODE)
    assert "__enter__" in vars(MODE)
    leave.set()
    thread.join()
    assert dict(vars(MODE)) == own


def test_another_thread_keeps_what_it_keeps() -> None:
    """Hooks are each thread's own: its checkpoints are no affair of the session."""
    expected = train(WRAPS["a partial"])
    session = cm.SwapSession("64MiB", "64MiB", cm.SimDevice(), min_bytes=4 * KIB)
    found: list[Tensor] = []
    with session:
        on_a_thread(lambda: found.extend(train(WRAPS["a partial"])))
    assert_same(expected, found)
    assert not any("selective" in problem for problem in session.report().problems)
    assert session.report().bytes_swapped_out == 0
