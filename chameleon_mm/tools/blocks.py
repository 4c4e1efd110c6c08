"""Repeated blocks of a model: which they are, and the same model with torch's checkpointing around them.

blocks = blocks_of(model)               # the outermost modules with parameters in its lists and sequences
checkpoint_blocks(model, every=2)       # every second block: it saves its inputs, and runs again in backward
groups_of(model)                        # parameters that FSDP gathers together
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.nn import Parameter
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint


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


def checkpoint_blocks(model: nn.Module, *, every: int = 1) -> None:
    """Run each `every`-th block, the first included, under `torch.utils.checkpoint`, not reentrant, as torchtitan and Hugging
    Face do. A block that is compiled stays so: its compiled code runs again.

    The state of random numbers is not restored: on shapes alone it does not matter.
    """
    for block in blocks_of(model)[::every]:
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, context_fn=with_function_modes
        )


def with_function_modes() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of a checkpointed block's forward and of its recomputation: autograd's engine drops modes over functions."""
    modes = _get_current_function_mode_stack()

    @contextmanager
    def again() -> Iterator[None]:
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            yield

    return nullcontext(), again()


def groups_of(model: nn.Module) -> list[list[Parameter]]:
    """Parameters that FSDP2 gathers together if `fully_shard` gets each block and then `model`: each block's, then the rest."""
    seen: set[int] = set()
    groups: list[list[Parameter]] = []
    for module in (*blocks_of(model), model):
        groups.append([p for p in module.parameters() if id(p) not in seen])
        seen.update(map(id, groups[-1]))
    return groups
