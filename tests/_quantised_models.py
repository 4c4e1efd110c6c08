"""A tiny Llama whose frozen weights are quantised by the libraries people use, with adapters of peft's on all its layers.

save(folder)                                  # weights of its own, none is downloaded
model = tuned(folder, "bnb 4-bit")            # loaded and quantised as a script for QLoRA does it
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig
from transformers import BitsAndBytesConfig, LlamaForCausalLM, TorchAoConfig

from tests._plain_models import VOCABULARY, hugging_face

QUANTISED: dict[str, Callable[[], Any]] = {
    "bnb 4-bit": lambda: BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    ),
    "bnb 8-bit": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "torchao 8-bit": lambda: TorchAoConfig(Int8WeightOnlyConfig(version=2)),
}


def save(folder: Path, layers: int = 2) -> Path:
    """Save a model with random weights to `folder`."""
    torch.manual_seed(1)
    model: Any = hugging_face(
        "LlamaConfig", "LlamaForCausalLM", vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        attention_dropout=0.1,
    )()  # fmt: skip
    model.save_pretrained(folder)
    return folder


def tuned(folder: Path, how: str, **lora: Any) -> nn.Module:
    """Load the saved model, quantised (`how` of `QUANTISED`) or as it is ("plain"), and add adapters; the rest is frozen."""
    if how == "plain":
        model = LlamaForCausalLM.from_pretrained(folder)
    else:
        model = LlamaForCausalLM.from_pretrained(folder, quantization_config=QUANTISED[how](), device_map="cpu")
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    given = {"r": 2, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **lora}
    made: nn.Module = get_peft_model(model, LoraConfig(**given))
    return made.train()
