"""Six small trainings, one a page of the gallery: llm, lora, dit, vit, resnet, moe. Plain PyTorch and Hugging Face.

    chameleon-mm run --device sim:h100 --hbm-budget 60MiB --html llm.html --trace llm.json docs/gallery/trainings.py llm

Needs transformers; `lora` needs peft, and `dit` diffusers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

STEPS = 6
TEXT = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1024, "num_hidden_layers": 8}

Batch = Mapping[str, Tensor]
Training = tuple[nn.Module, Callable[[], Batch]]


def _tokens() -> Batch:
    ids = torch.randint(TEXT["vocab_size"], (4, 256))
    return {"input_ids": ids, "labels": ids}


def _images(rows: int = 8) -> Batch:
    return {"pixel_values": torch.randn(rows, 3, 64, 64), "labels": torch.randint(10, (rows,))}


def llm() -> Training:
    return LlamaForCausalLM(LlamaConfig(intermediate_size=704, use_cache=False, **TEXT)), _tokens


def lora() -> Training:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llm()[0], LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")), _tokens


def moe() -> Training:
    return MixtralForCausalLM(MixtralConfig(intermediate_size=352, num_local_experts=4, use_cache=False, **TEXT)), _tokens


def vit() -> Training:
    width = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_hidden_layers": 8}
    config = ViTConfig(image_size=64, patch_size=4, num_labels=10, **width)
    return ViTForImageClassification(config), _images


def resnet() -> Training:
    config = ResNetConfig(embedding_size=32, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], num_labels=10)
    return ResNetForImageClassification(config), lambda: _images(32)


def dit() -> Training:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=64, in_channels=4, num_layers=8, sample_size=32, num_embeds_ada_norm=1000
    )

    class Denoiser(nn.Module):
        """Predicts the noise of latents at a random time."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, latents: Tensor, noise: Tensor, time: Tensor, label: Tensor) -> dict[str, Tensor]:
            share = (time / 1000).view(-1, 1, 1, 1)
            told = self.model((1 - share) * latents + share * noise, timestep=time, class_labels=label).sample
            return {"loss": (told - noise).square().mean()}

    def batch() -> Batch:
        latents, noise = torch.randn(2, 4, 4, 32, 32)
        return {"latents": latents, "noise": noise, "time": torch.randint(1000, (4,)), "label": torch.randint(10, (4,))}

    return Denoiser(), batch


def main(name: str) -> None:
    torch.manual_seed(0)
    model, batch = {one.__name__: one for one in (llm, lora, dit, vit, resnet, moe)}[name]()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    for _ in range(STEPS):
        loss = model(**batch())["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1])
