"""Repeated blocks of a model, and the same model with torch's checkpointing around them.

blocks = blocks_of(model)               # the outermost modules with parameters in its lists and sequences
checkpoint_blocks(model, Checkpointing(Fraction(1, 2)))   # every second block saves its inputs, and runs again in backward
groups_of(model)                        # parameters that FSDP gathers together
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Outermost blocks of `model`: modules with parameters in its lists and sequences. If it has none: the model itself."""
    found: list[nn.Module] = []
    waiting = [model]
    while waiting:
        module = waiting.pop(0)
        repeats = isinstance(module, (nn.ModuleList, nn.Sequential))
        for child in module.children():
            is_block = (
                repeats and any(True for _ in child.parameters()) and not isinstance(child, (nn.ModuleList, nn.Sequential))
            )
            (found if is_block else waiting).append(child)
    return found or [model]


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """Torch's checkpointing of a model's blocks."""

    share: Fraction = Fraction(1)
    """Share of the blocks, evenly spread, including the first."""
    selective: bool = False
    """True if a block keeps attention and every second product, as torchtitan's "selective op" does."""

    @property
    def name(self) -> str:
        if self.selective:
            return "selective checkpointing"
        return "torch checkpointing" if self.share == 1 else f"checkpointing {self.share}"


def checkpoint_blocks(model: nn.Module, how: Checkpointing) -> None:
    """Run blocks under `torch.utils.checkpoint`, not reentrant, like torchtitan and Hugging Face. A compiled block stays
    compiled: its compiled code runs again.

    The random state is not restored, because it does not matter for shapes.
    """
    contexts = _selective_contexts if how.selective else with_function_modes
    for number, block in enumerate(blocks_of(model)):
        if math.ceil((number + 1) * how.share) > math.ceil(number * how.share):
            block.forward = partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
            )


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def with_function_modes(inner: AbstractContextManager[Any] | None = None) -> Contexts:
    """Return contexts for a checkpointed block's forward and recomputation, which keep torch function modes on in autograd's
    engine. `inner`: entered within them."""
    modes = _get_current_function_mode_stack()

    @contextmanager
    def again() -> Iterator[None]:
        with ExitStack() as stack:
            for mode in (*modes, *([] if inner is None else [inner])):
                stack.enter_context(mode)
            yield

    return nullcontext(), again()


_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def _selective_contexts() -> Contexts:
    counts: Counter[bool] = Counter()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        counts[context.is_recompute] += op in _PRODUCTS
        kept = "scaled_dot_product" in op.name() or (op in _PRODUCTS and counts[context.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    forward, again = create_selective_checkpoint_contexts(policy)
    return forward, with_function_modes(again)[1]


def groups_of(model: nn.Module) -> list[list[Parameter]]:
    """Parameters that FSDP2 gathers together if `fully_shard` gets each block and then `model`: each block's, then the rest."""
    seen: set[int] = set()
    groups: list[list[Parameter]] = []
    for module in (*blocks_of(model), model):
        groups.append([p for p in module.parameters() if id(p) not in seen])
        seen.update(map(id, groups[-1]))
    return groups
