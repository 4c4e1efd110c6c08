"""What models really save for backward: the material that codecs are measured on.

    for source in sources(torch_device): source.name, source.tensors        # one (n,) uint8 per storage, with its dtype

The demo's GPT, trained for some steps on Python's own sources, then one forward pass under hooks: as it is, under autocast,
and cast to bf16. Parameters are left out, as swapping leaves them out; a storage counts once, whatever its views are.
Beside that what the demo does not save: masks as a GPU's dropout keeps them, and the upcasts of an RMS norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from chameleon_mm.demo.model import GPT, GPTConfig
from chameleon_mm.demo.training import draw_rows, read_text
from chameleon_mm.saved.handles import flat_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The model that saves, and how long it is trained before."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 256
    batch: int = 8
    steps: int = 12


class Saved(NamedTuple):
    """One storage that autograd holds."""

    dtype: torch.dtype
    raw: Tensor
    """(n,) uint8."""


class Source(NamedTuple):
    """Where tensors come from."""

    name: str
    tensors: list[Saved]


def sources(device: torch.device, shape: Shape | None = None) -> list[Source]:
    """All sources, on `device`. Seeds torch's default generators."""
    shape = shape or Shape()
    torch.manual_seed(0)
    config = GPTConfig(layers=shape.layers, width=shape.width, heads=shape.heads, context=shape.context)
    model = GPT(config, device=device)
    rows = [
        (ids.to(device), targets.to(device))
        for ids, targets in draw_rows(read_text(), steps=shape.steps + 1, batch=shape.batch, context=shape.context)
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for ids, targets in rows[:-1]:
        model.loss(ids, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    ids, targets = rows[-1]

    def loss() -> Tensor:
        return model.loss(ids, targets)

    def under_autocast() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return loss()

    found = [Source("GPT, fp32", saved_by(loss)), Source("GPT, autocast", saved_by(under_autocast))]
    model.to(torch.bfloat16)
    with torch.no_grad():
        hidden = model.tokens(ids) + model.positions[: ids.shape[1]]
        for block in model.blocks:
            hidden = block(hidden)
    found.append(Source("GPT, bf16", saved_by(loss)))
    # As a model with an RMS norm in fp32 has it (Llama's, as it is usually written): the norm saves the upcast.
    norm = nn.Parameter(torch.ones(shape.width, device=device))
    found.append(Source("RMS norm of bf16", saved_by(lambda: _rms_norm(hidden.clone().requires_grad_(), norm))))
    # A GPU's dropout saves its mask as booleans, the CPU's as numbers: this is the operator behind the former.
    masked = [torch.ops.aten.native_dropout(hidden, model.config.dropout, True)[1] for _ in range(shape.layers)]
    found.append(Source("dropout masks", [_saved(mask) for mask in masked]))
    return found


def saved_by(forward: Callable[[], Tensor]) -> list[Saved]:
    """What autograd saves of `forward`, each storage once, parameters left out."""
    kept: dict[int, Tensor] = {}

    def on_save(t: Tensor) -> Tensor:
        if t.numel() and not isinstance(t, nn.Parameter) and not isinstance(t._base, nn.Parameter):
            kept.setdefault(t.untyped_storage()._cdata, t)
        return t

    with saved_tensors_hooks(on_save, lambda t: t):
        result = forward()
    found = [_saved(t.detach()) for t in kept.values()]
    del result  # until here, or storages would be freed and their numbers used again
    return found


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    upcast = x.float()
    return (weight * (upcast * torch.rsqrt(upcast.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)).sum()


def _saved(t: Tensor) -> Saved:
    return Saved(t.dtype, flat_bytes(t.untyped_storage()))
