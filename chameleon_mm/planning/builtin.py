"""Models known by name, which need nothing but torch.

    BUILT_IN["llama-7b"]            sizes, as published
    built_in("llama-7b", batch=1, seq=None)()

A Llama's operators are those of Hugging Face's. A GPT-2's are not, and say so (`_GPT2_SAVES`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from chameleon_mm.demo.model import GPT, GPTConfig
from chameleon_mm.planning.llama import Llama, LlamaShape
from chameleon_mm.planning.workload import Build, ModelUnusable, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt2Shape:
    """Sizes of a GPT-2, whose positions are learned: a row longer than its context it cannot read."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 50257
    context: int = 1024


BUILT_IN: dict[str, LlamaShape | Gpt2Shape] = {
    "llama-7b": LlamaShape(layers=32, width=4096, heads=32, kv_heads=32, ffn=11008, vocabulary=32000, context=4096),
    "llama-13b": LlamaShape(layers=40, width=5120, heads=40, kv_heads=40, ffn=13824, vocabulary=32000, context=4096),
    "llama-70b": LlamaShape(layers=80, width=8192, heads=64, kv_heads=8, ffn=28672, vocabulary=32000, context=4096),
    "llama-3-8b": LlamaShape(layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256, context=8192),
    "gpt2": Gpt2Shape(layers=12, width=768, heads=12),
    "gpt2-medium": Gpt2Shape(layers=24, width=1024, heads=16),
    "gpt2-large": Gpt2Shape(layers=36, width=1280, heads=20),
    "gpt2-xl": Gpt2Shape(layers=48, width=1600, heads=25),
}
"""The Llama 2 papers' sizes (arXiv 2307.09288), Llama 3's (arXiv 2407.21783), GPT-2's by its published configurations."""


_GPT2_SAVES = (
    "this gpt2 has the fused GELU, and its loss in the dtype of its logits; Hugging Face's, with GELU written out and the loss "
    "in float32, saves more"
)


class Gpt2(GPT):
    """The demo's GPT with GPT-2's vocabulary."""

    def __init__(self, shape: Gpt2Shape) -> None:
        super().__init__(GPTConfig(layers=shape.layers, width=shape.width, heads=shape.heads, context=shape.context))
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight


def built_in(name: str, *, batch: int, seq: int | None) -> Build:
    """The model called `name`, `batch` rows of `seq` tokens (None: as many as its context has).

    Raises `ModelUnusable` for a row that it cannot read.
    """
    shape = BUILT_IN[name]
    tokens = shape.context if seq is None else seq
    if isinstance(shape, Gpt2Shape) and tokens > shape.context:
        raise ModelUnusable(f"--seq: expected {shape.context} tokens at most, all that {name} can read, got {tokens}")

    def build() -> Workload:
        about = f"{name}, {batch} x {tokens} tokens"
        ids = torch.zeros(batch, tokens, dtype=torch.int64)
        if isinstance(shape, LlamaShape):
            llama = Llama(shape)
            return Workload(about=about, model=llama, loss=lambda: llama.loss(ids))
        gpt = Gpt2(shape)
        return Workload(about=about, model=gpt, loss=lambda: gpt.loss(ids, ids), notes=(_GPT2_SAVES,))

    return build
