"""An optimizer's step, taken apart: a few parameters at a time, so that the state of no more than those has to be there.

    for bucket in buckets_of(optimizer, bytes_of, bucket_bytes):
        with alone(optimizer, bucket):           # the optimizer has these parameters and no others
            raw_step(optimizer)

The optimizers of `torch.optim` that are named here update each parameter from its own gradient and state, with nothing that is
counted once a step for all. Their kernels for many tensors do the same arithmetic whatever the tensors beside: so the result is
the same, bit for bit. Others are not taken apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import _default_to_fused_or_foreach

SPLITTABLE = (
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


class Bucket(NamedTuple):
    """Parameters of one group that are stepped together."""

    group: dict[str, Any]
    params: list[Tensor]


def is_splittable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step is one of those that may be taken apart."""
    return any(isinstance(optimizer, kind) and type(optimizer).step is kind.step for kind in SPLITTABLE)


def raw_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The step of the optimizer's class, without the hooks that torch calls around it."""
    step = type(optimizer).step
    raw: Callable[..., Any] = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    return raw


def buckets_of(optimizer: torch.optim.Optimizer, bytes_of: Callable[[Tensor], int], bucket_bytes: int) -> list[Bucket]:
    """The parameters that have a gradient, in order, up to `bucket_bytes` of state together; `bytes_of(p)` is that of one."""
    buckets = []
    for group in optimizer.param_groups:
        with_grad = [p for p in group["params"] if p.grad is not None]
        if not with_grad:
            continue
        settled = _settled(group, with_grad)
        params: list[Tensor] = []
        nbytes = 0
        for p in with_grad:
            if params and nbytes + bytes_of(p) > bucket_bytes:
                buckets.append(Bucket(settled, params))
                params, nbytes = [], 0
            params.append(p)
            nbytes += bytes_of(p)
        buckets.append(Bucket(settled, params))
    return buckets


def _settled(group: dict[str, Any], params: list[Tensor]) -> dict[str, Any]:
    """The group, with one call for each tensor chosen where torch chooses that for all of its parameters.

    Where torch would take many tensors in one call, it does so for any part of them, too; or has reasons that are no part's.
    """
    if "foreach" not in group or group["foreach"] is not None or group.get("fused"):
        return group
    _, foreach = _default_to_fused_or_foreach(params, group.get("differentiable", False), use_fused=False)
    return group if foreach else {**group, "foreach": False}


@contextmanager
def alone(optimizer: torch.optim.Optimizer, bucket: Bucket) -> Iterator[None]:
    """Context in which `optimizer` has the parameters of `bucket` alone."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**bucket.group, "params": bucket.params}]
    try:
        yield
    finally:
        optimizer.param_groups = groups
