"""Tiny models of well-known families with random weights, and the loss of each.

    case = CASES["llama"]
    model = case.build()                          # Hugging Face's own code, a few layers of it; no weights are loaded
    loss = case.loss(model)                       # of a batch that it draws itself

Dropout is on wherever the model has it, so that a step draws random numbers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 97


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Model and its training data."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]
    steps: int = 4
    """More than two: the first is recorded, and a similar one follows a plan."""
    micro_batches: int = 1
    autocast: bool = False
    """True if forward runs in bfloat16 where autocast permits it."""
    learning_rate: float = 1e-2


def hugging_face(config: str, model: str, **sizes: Any) -> Callable[[], nn.Module]:
    """A model of transformers by the names of its two classes. Attention is written out where `eager` asks for it."""

    def build() -> nn.Module:
        transformers: Any = importlib.import_module("transformers")  # as Any: type checkers would follow all of it
        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**sizes))
        return made.train()

    return build


def recomputed(build: Callable[[], nn.Module], *, reentrant: bool) -> Callable[[], nn.Module]:
    """The same model with its layers under `torch.utils.checkpoint`."""

    def checkpointed() -> nn.Module:
        model: Any = build()
        name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"  # the older name
        enable = getattr(model, f"{name}_checkpointing_enable")
        enable(**{f"{name}_checkpointing_kwargs": {"use_reentrant": reentrant}})
        model.config.use_cache = False
        checked: nn.Module = model
        return checked

    return checkpointed


def tokens(rows: int, columns: int) -> Tensor:
    return torch.randint(VOCABULARY, (rows, columns))


def language(rows: int = 4, columns: int = 24, **more: Any) -> Callable[[nn.Module], Tensor]:
    """The loss of a model that predicts its own input."""

    def loss(model: nn.Module) -> Tensor:
        ids = tokens(rows, columns)
        value: Tensor = model(input_ids=ids, labels=ids, **more).loss
        return value

    return loss


def translation(model: nn.Module) -> Tensor:
    value: Tensor = model(input_ids=tokens(4, 20), labels=tokens(4, 12)).loss
    return value


def pictures(channels: int, side: int) -> Callable[[nn.Module], Tensor]:
    def loss(model: nn.Module) -> Tensor:
        value: Tensor = model(pixel_values=torch.randn(4, channels, side, side), labels=torch.randint(5, (4,))).loss
        return value

    return loss


def unet() -> nn.Module:
    diffusers: Any = importlib.import_module("diffusers")
    made: nn.Module = diffusers.UNet2DModel(
        sample_size=8, in_channels=2, out_channels=2, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8, dropout=0.1,
    )  # fmt: skip
    return made.train()


def denoising(model: nn.Module) -> Tensor:
    """Return the loss of a diffusion model, which predicts the added noise."""
    clean, noise, when = torch.randn(4, 2, 8, 8), torch.randn(4, 2, 8, 8), torch.randint(1000, (4,))
    share = (when / 1000).view(-1, 1, 1, 1)
    return F.mse_loss(model((1 - share) * clean + share * noise, when).sample, noise)


class Experts(nn.Module):
    """A mixture of four experts, two for each row: gathers, scatters, and sizes that depend on the numbers."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.gate = nn.Linear(width, 4)
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(4))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).flatten(0, 1)
        weights, chosen = F.softmax(self.gate(x), -1).topk(2, -1)
        out = torch.zeros_like(x)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            row, rank = (chosen == expert).nonzero(as_tuple=True)
            gate, value = up(x[row]).chunk(2, -1)
            out = out.index_add(0, row, down(F.silu(gate) * value) * weights[row, rank, None])
        loss: Tensor = F.cross_entropy(self.head(F.dropout(x + out, 0.1)), ids.flatten())
        return loss


def fixed_batch(model: nn.Module) -> Tensor:
    """Use the same rows in every step: the experts' share of them, and so the sequence, changes little between steps."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        ids = tokens(4, 24)
    loss: Tensor = model(ids)
    return loss


def llama(layers: int) -> Callable[[], nn.Module]:
    return hugging_face(
        "LlamaConfig", "LlamaForCausalLM", vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        attention_dropout=0.1,
    )  # fmt: skip


def gpt2(layers: int) -> Callable[[], nn.Module]:
    return hugging_face(
        "GPT2Config", "GPT2LMHeadModel", vocab_size=VOCABULARY, n_embd=32, n_layer=layers, n_head=4, n_positions=32,
        bos_token_id=0, eos_token_id=0, loss_type="ForCausalLMLoss",
    )  # fmt: skip


MIXTRAL = hugging_face(
    "MixtralConfig", "MixtralForCausalLM", vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, attention_dropout=0.1, num_local_experts=4,
    num_experts_per_tok=2, output_router_logits=True, router_jitter_noise=0.01,
)  # fmt: skip
MAMBA = hugging_face(
    "MambaConfig", "MambaForCausalLM", vocab_size=VOCABULARY, hidden_size=24, state_size=4, num_hidden_layers=3,
    time_step_rank=4,
)  # fmt: skip
BERT = hugging_face(
    "BertConfig", "BertForMaskedLM", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=64, max_position_embeddings=32, attn_implementation="eager",
)  # fmt: skip
T5 = hugging_face(
    "T5Config", "T5ForConditionalGeneration", vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
    feed_forward_proj="gated-gelu", decoder_start_token_id=0, pad_token_id=0,
)  # fmt: skip
VIT = hugging_face(
    "ViTConfig", "ViTForImageClassification", image_size=16, patch_size=4, hidden_size=32, num_hidden_layers=2,
    num_attention_heads=4, intermediate_size=64, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, num_labels=5,
)  # fmt: skip
RESNET = hugging_face(
    "ResNetConfig", "ResNetForImageClassification", embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], num_labels=5,
    layer_type="basic",
)  # fmt: skip

CASES = {
    "llama": Case(build=llama(2), loss=language()),
    "llama, recomputed": Case(build=recomputed(llama(3), reentrant=False), loss=language()),
    "llama, autocast": Case(build=llama(2), loss=language(), autocast=True),
    "mixtral": Case(build=MIXTRAL, loss=language(), learning_rate=1e-4),
    "mamba": Case(build=MAMBA, loss=language(columns=8)),
    "bert": Case(build=BERT, loss=language()),
    "gpt-2": Case(build=gpt2(2), loss=language()),
    "gpt-2, recomputed": Case(build=recomputed(gpt2(3), reentrant=True), loss=language()),
    "gpt-2, micro-batches": Case(build=gpt2(2), loss=language(rows=2), micro_batches=3),
    "t5": Case(build=T5, loss=translation),
    "vit": Case(build=VIT, loss=pictures(3, 16)),
    "resnet": Case(build=RESNET, loss=pictures(3, 32)),
    "u-net": Case(build=unet, loss=denoising),
    "u-net, autocast, micro-batches": Case(build=unet, loss=denoising, autocast=True, micro_batches=2),
    "experts": Case(build=Experts, loss=fixed_batch, learning_rate=1e-4),
}
