"""Kinds of a step's storages: as model and optimizer say, else by what the storage was seen to do.

named:   a parameter, a buffer, the gradient of a parameter, an optimizer's state
seen:    there before, lives on, written in forward           -> buffer (running statistics)
         lives on, written after the last backward            -> optimizer state
         there before                                         -> input
         made in the step: saved by autograd                  -> activation
                           else                               -> temporary
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from chameleon_mm.device.op_call import Tensors, collect_tensors
from chameleon_mm.profiler.storages import TracedStorage
from chameleon_mm.trace import TensorKind


def kinds_of(
    model: nn.Module | None, optimizers: Iterable[Optimizer], device_type: str
) -> Iterator[tuple[torch.UntypedStorage, TensorKind]]:
    """Storages that a model and optimizers name, with their kinds. Of two kinds for one storage the later stands."""
    named: list[tuple[Iterable[Any], TensorKind]] = []
    if model is not None:
        named.append((model.buffers(), TensorKind.BUFFER))
        named.append((model.parameters(), TensorKind.PARAMETER))
        named.append(((parameter.grad for parameter in model.parameters()), TensorKind.GRADIENT))
    for optimizer in optimizers:
        named.extend((state.values(), TensorKind.OPTIMIZER) for state in optimizer.state.values())
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        named.append((parameters, TensorKind.PARAMETER))
        named.append(((parameter.grad for parameter in parameters), TensorKind.GRADIENT))
    for tensors, kind in named:
        for storage in storages_of(tensors, device_type):
            yield storage, kind


def storages_of(values: Iterable[Any], device_type: str) -> list[torch.UntypedStorage]:
    """Storages of the tensors in a nest of values, wrapper subclasses by what they wrap; anything else is passed over."""
    found: Tensors = {}
    collect_tensors(_plain(values), device_type, found)
    return [t.untyped_storage() for t in found.values()]


def _plain(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        wrapper: Any = value  # the stub's protocol class cannot be a Tensor for mypy
        if is_traceable_wrapper_subclass(wrapper):
            names, _ = wrapper.__tensor_flatten__()
            yield from _plain(getattr(wrapper, name) for name in names)
        elif isinstance(value, Tensor):
            yield value


def kind_seen(traced: TracedStorage, *, last_backward_op: int, last_backward_tick: int) -> TensorKind:
    """Kind of a storage by what it did, once its step is over. -1 for both: the step had no backward."""
    if traced.kind is not None:
        return traced.kind
    before = traced.born < 0
    written_after_backward = 0 <= last_backward_op < traced.last_write
    if written_after_backward and not traced.dead and (before or traced.born > last_backward_tick):
        return TensorKind.OPTIMIZER
    if before:
        written_in_forward = traced.first_write >= 0 and not traced.dead
        return TensorKind.BUFFER if written_in_forward else TensorKind.INPUT
    return TensorKind.ACTIVATION if traced.saved else TensorKind.TEMPORARY
