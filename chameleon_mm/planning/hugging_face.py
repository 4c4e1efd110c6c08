"""A causal language model of Hugging Face's, by its configuration: no weights are read, none are made.

    hugging_face("./config.json", batch=1, seq=4096, dtype=torch.bfloat16)()
    hugging_face("Qwen/Qwen3-8B", ...)()                    # from its cache, or the network

Built with random weights under fake tensors, labels = input_ids, no cache of keys and values.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from chameleon_mm.planning.builtin import BUILT_IN
from chameleon_mm.planning.workload import Build, ModelUnusable, Workload, said_by, told_as

_MOST_TOKENS = 4096
"""Tokens of a row where nobody says how many: contexts of 128k are what a model can read, not what it is trained on."""


def hugging_face(text: str, *, batch: int, seq: int | None, dtype: torch.dtype, layers: int | None = None) -> Build:
    """The model whose configuration is the file or folder `text`, or is published under that name.

    Raises `ModelUnusable` without transformers, and for a configuration that cannot be read.
    """
    if find_spec("transformers") is None:
        raise ModelUnusable(
            f"MODEL: expected a built-in model ({', '.join(BUILT_IN)}) or module:function, got {text!r}; a Hugging Face "
            f"configuration needs transformers, which is not installed: pip install 'chameleon-mm[plan]'"
        )
    transformers: Any = importlib.import_module("transformers")  # as Any: type checkers would follow all of it
    config = _config(transformers, text)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelUnusable(
            f"MODEL: expected the configuration of a causal language model, got {text!r}, a {type(config).__name__}; give "
            f"it as module:function"
        )
    if layers is not None:
        config = _with_layers(config, text, layers)
    longest = getattr(config, "max_position_embeddings", None)
    tokens = min(longest or _MOST_TOKENS, _MOST_TOKENS) if seq is None else seq
    notes = ["rows are whole: no padding, so attention needs no mask"]
    if longest is not None and tokens > longest:
        notes.append(f"rows are longer than the {longest} tokens that the model can read")
    if getattr(config, "quantization_config", None) is not None:
        notes.append("its quantization_config is ignored: weights are trained, and planned, as they are before it")

    def build() -> Workload:
        with told_as(f"{text}: transformers could not build it under fake tensors"):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=_attention(transformers, config)
            )
        model.train()
        ids = torch.zeros(batch, tokens, dtype=torch.int64)

        def loss() -> Tensor:
            found: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
            return found

        name = type(model).__name__
        about = f"{text} ({name}), {batch} x {tokens} tokens"
        return Workload(about=about, model=model, loss=loss, notes=tuple(notes))

    return build


def _with_layers(config: Any, text: str, layers: int) -> Any:
    """The configuration with another number of layers, kinds of layers repeated as they come."""
    told: dict[str, Any] = config.to_dict()
    if "num_hidden_layers" not in told:
        raise ModelUnusable(
            f"--largest layers: expected a configuration with num_hidden_layers, got {text!r}, a {type(config).__name__} "
            f"without; search for another size"
        )
    kinds = told.get("layer_types")
    told["num_hidden_layers"] = layers
    if kinds:
        told["layer_types"] = [kinds[i % len(kinds)] for i in range(layers)]
    return type(config).from_dict(told)


def _attention(transformers: Any, config: Any) -> str:
    """The name of fused causal attention without a mask, which is what whole rows get on a GPU.

    There transformers looks at the mask and leaves it out if it hides nothing; of fake tensors it cannot, so it would keep one,
    a matrix of scores in size, for each layer.
    """
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "eager"  # torch's fused attention caps no scores
    name = "chameleon_mm_causal"
    sdpa = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
    transformers.AttentionInterface.register(name, sdpa)
    transformers.AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
    return name


def _config(transformers: Any, text: str) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(text)
    except Exception as error:  # the hub's client raises what its network does, and the answer is the same
        if Path(text).exists():
            expected, way_out = "a configuration that transformers can read", "is it a config.json, or a folder with one?"
            reason = said_by(error)
        else:
            expected = "a built-in model, module:function, or a Hugging Face configuration"
            way_out = "a name needs the network, or an earlier download"
            reason = next(iter(said_by(error).split(". ")))  # the rest is advice about the hub
        raise ModelUnusable(f"MODEL: expected {expected}, got {text!r}: {reason}; {way_out}") from error
