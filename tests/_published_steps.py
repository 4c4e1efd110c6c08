"""Steps that others have measured and published, predicted: `[steps]` of published_figures.toml says what each is.

A model is the nearest that is at hand: Hugging Face's own code, the built-in Llama with another norm or loss, or a GPT.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from chameleon_mm.device import SPECS
from chameleon_mm.plan.swap_all import swap_all
from chameleon_mm.plan.trace import TensorKind
from chameleon_mm.plan.unswapped_memory import peak_memory
from chameleon_mm.tools import hub_models
from chameleon_mm.tools.adapters import Adapters, adapted
from chameleon_mm.tools.blocks import Checkpointing
from chameleon_mm.tools.demo import GPT, GPTConfig
from chameleon_mm.tools.prediction import link_of
from chameleon_mm.tools.sharding import Shards, shardable, sharded
from chameleon_mm.tools.step_on_shapes import StepRequest, record_step
from chameleon_mm.tools.workload import BUILT_IN, Build, Llama, LlamaShape, RMSNorm, Workload
from chameleon_mm.units import GIB

TOLD: dict[str, Any] = tomllib.loads(Path(__file__).with_name("published_figures.toml").read_text(encoding="utf-8"))
GPUS = {**SPECS, "h100-96": replace(SPECS["h100"], name="H100 96GB", hbm_bytes=96 * GIB, hbm_gbps=2400.0)}
"""The H100 of 96 GB is that of torchtitan's tables. Its arithmetic at 500 W is not published: taken as an H100's."""


@dataclass(frozen=True)
class Outcome:
    step_us: float
    peak_bytes: int
    parameter_bytes: int
    host_bytes: int


@cache
def predicted(name: str) -> Outcome:
    step = TOLD["steps"][name]
    build, gpu = MODELS[step["model"]](step["rows"], step["seq"]), GPUS[step["gpu"]]
    if "lora" in step:
        rank, *modules = step["lora"]
        build = adapted(build, Adapters(rank=rank, modules=tuple(modules), bits=step.get("bits")))
    shards = Shards(ranks=step["ranks"], dtype=torch.float32) if "ranks" in step else None
    recorded = record_step(StepRequest(
        build=build if shards is None else shardable(build, shards), spec=gpu, dtype=torch.bfloat16, min_bytes=1 << 16,
        optimizer=step.get("optimizer", "adamw-fused"), compiled=1.0 if step.get("compiled") else None,
        checkpointed=_checkpointing(step),
    ))  # fmt: skip
    trace = (recorded if shards is None else sharded(recorded, shards)).trace
    parameters = int(trace.tensor_bytes[trace.tensor_kind == TensorKind.PARAMETER].sum())
    if not step.get("offloaded"):
        return Outcome(trace.duration_us, peak_memory(trace).nbytes, parameters, 0)
    plan = swap_all(trace, link_of(gpu))
    return Outcome(plan.step_us, plan.peak_bytes, parameters, plan.host_bytes)


def _checkpointing(step: dict[str, Any]) -> Checkpointing | None:
    if step.get("selective"):
        return Checkpointing(selective=True)
    return Checkpointing(Fraction(1, step["checkpointed"])) if "checkpointed" in step else None


# --- Models: functions of the number of rows and their length


def _llama(shape: LlamaShape, rows: int, seq: int, *, fused_norm: bool = False, tied: bool = False, chunks: int = 1) -> Build:
    """Builder of a Llama. fused_norm: its norms are one kernel. chunks: of the rows whose loss is computed at once."""

    def build() -> Workload:
        model, ids = Llama(shape), torch.zeros(rows, seq, dtype=torch.int64)
        if tied:
            model.head.weight = model.tokens.weight
        norms = [(m, name) for m in model.modules() for name, child in m.named_children() if isinstance(child, RMSNorm)]
        for module, name in norms if fused_norm else ():
            setattr(module, name, nn.RMSNorm(shape.width))
        loss = partial(model.loss, ids) if chunks == 1 else partial(_chunked_loss, model, ids, chunks)
        return Workload(about="llama", model=model, loss=loss)

    return build


def _chunked_loss(model: Llama, ids: Tensor, chunks: int) -> Tensor:
    head, model.head = model.head, nn.Identity()  # type: ignore[assignment]  # until the loss is made
    parts = [head(part) for part in model(ids).chunk(chunks, dim=1)]
    model.head = head
    targets = F.pad(ids, (0, 1), value=-100)[:, 1:].chunk(chunks, dim=1)
    losses = [
        F.cross_entropy(part.float().flatten(0, 1), of_it.flatten(), ignore_index=-100, reduction="sum")
        for part, of_it in zip(parts, targets, strict=True)
    ]
    return sum(losses[1:], losses[0])


def _mpt(width: int, heads: int, rows: int, seq: int) -> Build:
    """Builder of a GPT without dropout, of MosaicML's sizes; theirs has no biases and no table of positions."""

    def build() -> Workload:
        model = GPT(GPTConfig(layers=32, width=width, heads=heads, vocabulary=50368, context=seq)).eval()
        ids = torch.zeros(rows, seq, dtype=torch.int64)
        return Workload(about="mpt", model=model, loss=partial(model.loss, ids, ids))

    return build


def _hugging_face(config: Any, rows: int, seq: int) -> Build:
    """Builder of transformers' model of `config`. Of Qwen3 the loss is the mean of the last token's logits, as axolotl has."""

    def build() -> Workload:
        attention = hub_models.fused_attention(transformers, config)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
        ids = torch.zeros(rows, seq, dtype=torch.int64)

        def loss() -> Any:
            if config.model_type == "qwen3":
                return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits.float().mean()
            return model(input_ids=ids, labels=ids, use_cache=False).loss

        return Workload(about="hugging face", model=model.train(), loss=loss)

    return build


QWEN3_8B = transformers.Qwen3Config(
    hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, intermediate_size=12288, num_key_value_heads=8,
    head_dim=128, vocab_size=151936, max_position_embeddings=40960, tie_word_embeddings=False,
)  # fmt: skip
LLAMA_7B = transformers.LlamaConfig(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=11008, vocab_size=32000
)
SHAPES: dict[str, Any] = {
    **BUILT_IN,
    "llama-3.2-3b": LlamaShape(layers=28, width=3072, heads=24, kv_heads=8, ffn=8192, vocabulary=128256, context=131072),
    "qwen3-14b": LlamaShape(layers=40, width=5120, heads=40, kv_heads=8, ffn=17408, vocabulary=151936, context=40960),
}
MODELS: dict[str, Callable[[int, int], Build]] = {
    "hf qwen3-8b": partial(_hugging_face, QWEN3_8B),
    "hf llama-7b": partial(_hugging_face, LLAMA_7B),
    **{name: partial(_llama, shape) for name, shape in SHAPES.items() if isinstance(shape, LlamaShape)},
    **{f"{name}, fused norm": partial(_llama, SHAPES[name], fused_norm=True) for name in ("llama-13b", "llama-3-8b")},
    "llama-3.2-3b": partial(_llama, SHAPES["llama-3.2-3b"], tied=True),
    "llama-3.2-3b, 8 chunks": partial(_llama, SHAPES["llama-3.2-3b"], tied=True, chunks=8),
    "mpt-3b": partial(_mpt, 2560, 20),
    "mpt-7b": partial(_mpt, 4096, 32),
}
