"""Trainings by people's frameworks, as plain PyTorch runs them and with one line of ours, and what is compared of the two.

seen = Seen()                            # losses, gradient norms, weights, optimizer state, random state
plain = train(...)                       # the framework's own script on CPU tensors: nothing of ours
swapped = train(..., SwapCallback(...))  # the same script and one line more
assert differences(plain, swapped) == []
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import chameleon_mm as cm
from chameleon_mm.state.parameter_swap import plain_parts
from tests._plain_training import Outcome, differences, image
from tests._random_models import far_ahead
from tests.test_pins import BLOCKS, acts, blocks, dropped_modules

STEPS = 20


def swapping(hbm_budget: str, **more: Any) -> dict[str, Any]:
    """Arguments of a session in which nearly everything that a tiny model saves may move."""
    return {"hbm_budget": hbm_budget, "host_budget": "64MiB", "device": cm.SimDevice(), "min_bytes": 256, **more}


class Seen:
    """Results of a training, each with its dtype, shape, strides and bytes."""

    def __init__(self) -> None:
        self.outcome: Outcome = {}
        torch.manual_seed(11)
        random.seed(11)
        np.random.seed(11)

    def note(self, what: str, value: Tensor | float) -> None:
        """A tensor of a wrapper subclass counts as the plain ones that it wraps."""
        for part in plain_parts(torch.as_tensor(value)):
            self.outcome[f"{len(self.outcome)}: {what}"] = image(part)

    def finish_attached(self, swap: Any, model: nn.Module, *optimizers: torch.optim.Optimizer) -> tuple[Outcome, Any]:
        """The same of a loop, once what it attached (None: nothing) is detached, and what it attached."""
        if swap is not None:
            swap.detach()
        check_nothing_left(model)
        return self.finish(model, *optimizers), swap

    def finish(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> Outcome:
        """With the random states, weights, buffers and the optimizers' states."""
        self.note("random state", torch.get_rng_state())
        self.note("random state of Python", hash(random.getstate()))
        for name, value in model.state_dict(keep_vars=True).items():
            self.note(name, value)
        for optimizer in optimizers:
            for number, state in optimizer.state_dict()["state"].items():
                for name, value in state.items():
                    for inner, part in value.items() if isinstance(value, dict) else [(name, value)]:  # bitsandbytes nests
                        self.note(f"{inner} of parameter {number}", part)
        return self.outcome


def check_same(
    plain: Outcome, swapped: Callable[[str], tuple[Outcome, cm.SwapReport]], budget_kib: int, steps: int = STEPS
) -> cm.SwapReport:
    """Trains within ever larger budgets, until steps have a plan to follow (where operators take more inside of themselves than
    on most machines, the first is too small): in each, the bits are the same, and each step was found."""
    for share in (1, 1.15, 1.3, 1.5, 2, 2.5, 3):
        outcome, report = swapped(f"{int(budget_kib * share)}KiB")
        assert differences(plain, outcome) == []
        assert report.steps == steps, report
        assert report.bytes_swapped_out > 0, report
        assert report.problems == (), report
        if report.plan_cache_hits:
            return report
    raise AssertionError(f"expected a budget within which a step follows a plan, got none; of the last: {report}")


def check_callback(callback: Callable[..., Any], train: Callable[[Any], Outcome], budget_kib: int) -> None:
    """`train` with a callback has the bits of `train(None)`."""

    def swapped(budget: str) -> tuple[Outcome, cm.SwapReport]:
        swap = callback(**swapping(budget))
        return train(swap), swap.report()

    check_same(train(None), swapped, budget_kib)


KEEP, NEVER_RECOMPUTE = ["*3.act"], ["*.down"]
"""Pins of a model of `blocks()`, under whatever name a framework's module has for it."""


class Noted(nn.Module):
    """`blocks()` with their loss. After each forward it notes the blocks whose activation's input is on the device."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.blocks = blocks()
        self.there: list[set[int]] = []

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = self.blocks(x)
        self.there.append({number for number, act in enumerate(acts(self)) if act.is_there})
        return {"loss": out.square().mean()}


def check_pins(callback: Callable[..., Any], train: Callable[[Noted, Any], None], budget: str) -> None:
    """What a callback's pins name stays on the device, or is never recomputed, and neither without them; a pin that names
    nothing is an error."""

    def trained(**pins: Any) -> tuple[list[set[int]], set[str], Outcome]:
        model, swap = Noted(), callback(**swapping(budget, device=far_ahead(), min_bytes="16KiB", **pins))
        train(model, swap)
        weights = {name: image(p) for name, p in model.named_parameters()}
        return model.there, dropped_modules(swap.attachment.session), weights

    there, dropped, weights = trained(keep=KEEP, never_recompute=NEVER_RECOMPUTE)
    assert all(3 in noted and len(noted) < BLOCKS for noted in there), there
    assert not any(name.endswith(".down") for name in dropped), dropped
    loose, loosely_dropped, same = trained()
    assert not all(3 in noted for noted in loose), "it would have stayed anyway"
    assert any(name.endswith(".down") for name in loosely_dropped), loosely_dropped
    plain = Noted()
    train(plain, None)
    expected = {name: image(p) for name, p in plain.named_parameters()}
    assert differences(expected, weights) == differences(expected, same) == []
    for option in ("keep", "never_recompute"):
        with pytest.raises(
            ValueError, match=rf"{option}: expected a pin that names a module .*'\*.atc', .* near names: .*\.act"
        ):
            train(Noted(), callback(**swapping(budget, **{option: ["*.atc"]})))


def check_loop(train: Callable[[str | None], tuple[Outcome, Any]], budget_kib: int, steps: int = STEPS) -> cm.SwapReport:
    """`train` within a budget has the bits of `train(None)`; it returns what it attached as well."""

    def swapped(budget: str) -> tuple[Outcome, cm.SwapReport]:
        outcome, swap = train(budget)
        return outcome, swap.report()

    return check_same(train(None)[0], swapped, budget_kib, steps)


@dataclass(frozen=True)
class Program:
    """A model, what it is trained on and by which optimizer, in a loop as people write it."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    """Called with the parameters and a learning rate."""
    steps: int = 6
    optimizer_state: bool = False
    """The optimizer's state is in host memory between its steps."""

    def __call__(self, budget: str | None) -> tuple[Outcome, Any]:
        """Train within `budget`; None: as it is, without us."""
        seen = Seen()
        model = self.build()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = self.optimizer(trained, lr=1e-3)
        given = (optimizer,) if self.optimizer_state else ()
        swap = None if budget is None else cm.attach(model, *given, **swapping(budget))
        for _ in range(self.steps):
            loss = self.loss(model)
            loss.backward()
            seen.note("loss", loss)
            seen.note("norm", nn.utils.clip_grad_norm_(trained, 0.5))
            optimizer.step()
            optimizer.zero_grad()
        return seen.finish_attached(swap, model, optimizer)

    def check(self, budget_kib: int) -> cm.SwapReport:
        """It has the same bits within a budget."""
        return check_loop(self, budget_kib, self.steps)


def check_nothing_left(model: nn.Module) -> None:
    """No hook of ours is left: not of modules, of optimizers, of autograd, nor a dispatch mode."""
    ours = [hook for hook in _global_optimizer_post_hooks.values() if "chameleon_mm" in getattr(hook, "__module__", "")]
    ours += [
        hook for part in model.modules() for hook in part._forward_pre_hooks.values() if "chameleon_mm" in type(hook).__module__
    ]
    assert ours == []
    assert _get_current_dispatch_mode_stack() == []
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
