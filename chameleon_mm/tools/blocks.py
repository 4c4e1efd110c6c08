"""Repeated blocks of a model, and the same model with torch's checkpointing around them.

blocks = blocks_of(model)               # the outermost modules with parameters in its lists and sequences
checkpoint_blocks(blocks, Checkpointing(Fraction(1, 2)))   # every second block saves its inputs, and runs again in backward
checkpoint_blocks(blocks, Checkpointing(survey=survey))    # all do; then survey.levels(): what to keep of them, ever more
groups_of(model)                        # parameters that FSDP gathers together
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Outermost blocks of `model`: modules with parameters in its lists and sequences. If it has none: the model itself."""
    found: list[nn.Module] = []
    waiting, lists = [model], (nn.ModuleList, nn.Sequential)
    while waiting:
        module = waiting.pop(0)
        repeats = isinstance(module, lists)
        for child in module.children():
            is_block = repeats and any(True for _ in child.parameters()) and not isinstance(child, lists)
            (found if is_block else waiting).append(child)
    return found or [model]


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """Torch's checkpointing of a model's blocks."""

    share: Fraction = Fraction(1)
    """Share of the blocks, evenly spread, including the first."""
    selective: bool = False
    """True if a block keeps attention and every second product, as torchtitan's "selective op" does."""
    survey: Survey | None = None
    """Learns what `kept` may name, where nothing is kept."""
    kept: frozenset[tuple[int, int]] = frozenset()
    """Products and attentions that are kept: number of the block, number of the operator among those of the block's forward."""

    @property
    def name(self) -> str:
        if self.selective or self.survey is not None:
            return "selective checkpointing"
        return "torch checkpointing" if self.share == 1 else f"checkpointing {self.share}"


def part_levels(blocks: int) -> list[Checkpointing]:
    """All of so many blocks checkpointed, then ever fewer, at last one."""
    return [Checkpointing(Fraction(count, blocks)) for count in range(blocks, 0, -1)]


@dataclass(slots=True, eq=False)
class Survey:
    """Products and attentions of checkpointed blocks, by number of the block and of the operator, as a step that kept none ran
    them."""

    work: dict[tuple[int, int], int] = field(default_factory=dict)
    """Arithmetic for an element of the result: of the same memory, what has more of it is better kept."""
    again: set[tuple[int, int]] = field(default_factory=set)
    """Those that ran again in backward. The last of a block may not: nothing is saved of its result."""

    def levels(self) -> list[Checkpointing]:
        """What to keep, ever more: nothing, then the costliest of each block, one block after the other, then the next."""
        order = sorted(self.again, key=lambda at: (-self.work[at], at[1], at[0]))
        return [Checkpointing(survey=self, kept=frozenset(order[:count])) for count in range(len(order) + 1)]


TRIALS = 4
"""Levels that are tried at most."""


def fullest(last: int, budget_bytes: int, least_bytes: int) -> Generator[int, int, int]:
    """Search for the last of the levels 0 to `last` that keeps within the budget, where each takes more than the one before.
    Yields levels to try, and takes the peak bytes of each. Level 0 takes `least_bytes`; it is the answer if none fits."""
    low, low_bytes, high, high_bytes = 0, least_bytes, last + 1, 0
    for _ in range(TRIALS):
        if high - low < 2 or low_bytes > budget_bytes:
            break
        at = last if not high_bytes else low + (budget_bytes - low_bytes) * (high - low) // max(1, high_bytes - low_bytes)
        at = min(max(at, low + 1), high - 1)
        peak_bytes = yield at
        if peak_bytes <= budget_bytes:
            low, low_bytes = at, peak_bytes
        else:
            high, high_bytes = at, peak_bytes
    return low


def checkpoint_blocks(blocks: Sequence[nn.Module], how: Checkpointing, *, preserve_rng_state: bool = False) -> None:
    """Run blocks under `torch.utils.checkpoint`, not reentrant, as torchtitan and Hugging Face do. A block that is compiled
    stays so: its compiled code runs again.

    `preserve_rng_state`: as torch's. On shapes alone it does not matter.
    """
    for number, block in enumerate(blocks):
        if math.ceil((number + 1) * how.share) > math.ceil(number * how.share):
            contexts: Callable[[], Contexts] = _selective_contexts if how.selective else with_function_modes
            if how.kept:
                contexts = partial(_keeping_contexts, how.kept, number)
            elif how.survey is not None:
                contexts = partial(_surveying_contexts, how.survey, number)
            block.forward = partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=preserve_rng_state, context_fn=contexts
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


def _work(op: Any, args: Sequence[Any]) -> int:
    """Arithmetic for an element of the result of a product, a convolution or an attention; 0: `op` is none."""
    if "scaled_dot_product" in op.name():
        return 4 * int(args[1].shape[-2])
    if op is torch.ops.aten.convolution.default:
        return 2 * int(args[1][0].numel())
    if op in (*_PRODUCTS, torch.ops.aten.bmm.default):
        return 2 * int(args[-1].shape[-2])
    return 0


class _Surveyed(TorchDispatchMode):
    """Calls `note` with the number of each product and attention, and its work."""

    def __init__(self, note: Callable[[int, int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates no argument of it
        self._note, self._count = note, 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if work := _work(op, args):
            self._note(self._count, work)
            self._count += 1
        return op(*args, **(kwargs or {}))


def _surveying_contexts(survey: Survey, block: int) -> Contexts:
    forward = _Surveyed(lambda number, work: survey.work.update({(block, number): work}))
    return forward, with_function_modes(_Surveyed(lambda number, work: survey.again.add((block, number))))[1]


def _keeping_contexts(kept: frozenset[tuple[int, int]], block: int) -> Contexts:
    counts = Counter[bool]()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if not _work(op, args):
            return CheckpointPolicy.PREFER_RECOMPUTE
        at = block, counts[context.is_recompute]  # before torch 2.13 it asks in backward, too
        counts[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if at in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return _selective(policy)


def _selective_contexts() -> Contexts:
    counts: Counter[bool] = Counter()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        counts[context.is_recompute] += op in _PRODUCTS
        kept = "scaled_dot_product" in op.name() or (op in _PRODUCTS and counts[context.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return _selective(policy)


def _selective(policy: Callable[..., CheckpointPolicy]) -> Contexts:
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
