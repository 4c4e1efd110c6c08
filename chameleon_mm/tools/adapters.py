"""Low-rank adapters on a model with frozen weights, and these weights packed into fewer bits, as shapes.

build = adapted(build, Adapters(rank=8, modules=("q_proj", "v_proj"), bits=4))

y = linear(x) + B(A(x)) * s     the operators of peft's LoRA without dropout; only A and B are trained
4 or 8 bits                     per element, and a float32 scale per 64 elements, as in bitsandbytes' NF4

A packed weight is unpacked before each product, in forward and again in backward, and never saved unpacked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chameleon_mm.tools.workload import Build, ModelUnusable, Workload

BITS = {"4bit": 4, "8bit": 8}

_BLOCK = 64
"""Elements that share a scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    rank: int
    modules: tuple[str, ...] = ()
    """Names of linear modules that get an adapter, or ends of their paths; empty: all except the model's output."""
    bits: int | None = None
    """Bits per element of the frozen linear weights, except the output's; None: they keep their dtype."""


def parse_adapters(text: str, quantise: str | None) -> Adapters:
    """Parse "R" or "R:name,name". Raises `ValueError` for anything else."""
    rank, _, names = text.partition(":")
    if not re.fullmatch(r"[1-9][0-9]*", rank) or (":" in text and not all(names.split(","))):
        raise ValueError(f"--lora: expected a rank, or a rank and names of modules such as 8:q_proj,v_proj, got {text!r}")
    modules = tuple(names.split(",")) if names else ()
    return Adapters(rank=int(rank), modules=modules, bits=None if quantise is None else BITS[quantise])


def adapted(build: Build, adapters: Adapters) -> Build:
    """Return a builder of the same model with adapters. It raises `ModelUnusable` if a name matches no linear module."""

    def build_adapted() -> Workload:
        workload = build()
        _adapt(workload.model, adapters)
        bits = "" if adapters.bits is None else f", frozen linear weights of {adapters.bits} bits"
        note = f"adapters of rank {adapters.rank}, without dropout; all else is frozen{bits}"
        return replace(workload, notes=(*workload.notes, note))

    return build_adapted


def _adapt(model: nn.Module, adapters: Adapters) -> None:
    linears = {path: module for path, module in model.named_modules() if type(module) is nn.Linear}
    if linears and "." not in (last := list(linears)[-1]):  # outside all blocks: a language model's output
        del linears[last]
    found = {name: {p for p in linears if p == name or p.endswith(f".{name}")} for name in adapters.modules}
    if nothing := [name for name, paths in found.items() if not paths]:
        known = ", ".join(sorted({path.rpartition(".")[2] for path in linears}))
        raise ModelUnusable(f"--lora: expected names of linear modules ({known}), got {nothing[0]!r}, which matches none")
    model.requires_grad_(False)
    for path, linear in linears.items():
        if adapters.bits is not None:
            _pack(linear, adapters.bits)
        if not found or any(path in paths for paths in found.values()):
            _add_adapter(linear, adapters.rank)
    for module in model.modules():  # as peft does: a checkpointed block needs an input that requires a gradient
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda module, args, out: out.requires_grad_())
            break


def _add_adapter(linear: Any, rank: int) -> None:
    linear.lora_a = nn.Linear(linear.in_features, rank, bias=False)
    linear.lora_b = nn.Linear(rank, linear.out_features, bias=False)
    original = linear.forward
    linear.forward = lambda x: original(x) + linear.lora_b(linear.lora_a(x)) * 2.0


def _pack(linear: Any, bits: int) -> None:
    """Replace the weight by its packed bytes and its scales."""
    weight, bias = linear.weight, linear.bias
    linear.weight = nn.Parameter(torch.zeros(weight.numel() * bits // 8, dtype=torch.uint8), requires_grad=False)
    linear.scales = nn.Parameter(torch.zeros(-(-weight.numel() // _BLOCK), dtype=torch.float32), requires_grad=False)
    shape, dtype = weight.shape, weight.dtype

    def forward(x: Tensor) -> Tensor:
        out: Tensor = _PackedLinear.apply(x, linear.weight, linear.scales, shape, dtype)  # type: ignore[no-untyped-call]  # torch's
        return out if bias is None else out + bias

    linear.forward = forward


class _PackedLinear(torch.autograd.Function):
    """`F.linear` with a packed frozen weight. Backward reads the packed bytes and unpacks them again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.shape, ctx.dtype = shape, dtype
        return F.linear(x, torch.ops.chameleon_mm_shapes.unpack(packed, scales, list(shape), dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        weight = torch.ops.chameleon_mm_shapes.unpack(*ctx.saved_tensors, list(ctx.shape), ctx.dtype)
        return grads[0] @ weight, None, None, None, None


@torch.library.custom_op("chameleon_mm_shapes::unpack", mutates_args=())
def _unpack(packed: Tensor, scales: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Read packed bytes and scales and write the weight, in one kernel. Scales and weights are zeros here."""
    return packed.new_zeros(shape, dtype=dtype)


@_unpack.register_fake
def _(packed: Tensor, scales: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    return packed.new_empty(shape, dtype=dtype)
