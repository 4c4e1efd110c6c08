"""What people put around a model to tune it: adapters, quantised weights, 8-bit optimizers, fused layers.

Each has the bits of the same program without us, on plain tensors. A row of docs/integrations.md names its test here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
import torch.nn.functional as F
from diffusers import DiTTransformer2DModel
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.optim import AdamW8bit

from chameleon_mm.state import swapped_state
from chameleon_mm.units import KIB
from tests._frameworks import Program
from tests._plain_models import language
from tests._quantised_models import save, tuned
from tests.test_ranks import REPOSITORY, outcomes, wrong

# --- adapters

ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("plain", {}),
    "DoRA": ("plain", {"use_dora": True}),
    "QLoRA, bnb 4-bit": ("bnb 4-bit", {}),
    "QDoRA, bnb 4-bit": ("bnb 4-bit", {"use_dora": True}),
    "QLoRA, bnb 8-bit": ("bnb 8-bit", {}),
    "QLoRA, torchao 8-bit": ("torchao 8-bit", {}),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n.startswith("QDoRA") else []) for n in ADAPTERS])
def test_adapters_give_the_same_bits(name: str, tmp_path: Path) -> None:
    how, lora = ADAPTERS[name]
    save(tmp_path)
    Program(lambda: tuned(tmp_path, how, **lora), language()).check(1100)


# --- optimizers whose state has eight bits


def wide() -> nn.Module:
    """Weights of more than the 4,096 elements from which on state is quantised."""
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 8))


def to_ones(model: nn.Module) -> Tensor:
    loss: Tensor = (model(torch.randn(64, 64)) - 1).square().mean()
    return loss


@pytest.mark.parametrize(
    ("make", "optimizer_state", "budget_kib"),
    [
        pytest.param(bitsandbytes.optim.AdamW8bit, False, 360, id="bitsandbytes"),
        pytest.param(bitsandbytes.optim.AdamW8bit, True, 360, id="bitsandbytes, state on the host"),
        pytest.param(AdamW8bit, True, 720, id="torchao"),
    ],
)
def test_optimizers_of_8_bits_give_the_same_bits(
    make: Any, optimizer_state: bool, budget_kib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of bitsandbytes leaves as the bytes that it is. That of torchao is of a wrapper subclass, and stays."""
    monkeypatch.setattr(swapped_state, "MIN_BYTES", 4 * KIB)
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step
        report = Program(wide, to_ones, make, optimizer_state=optimizer_state).check(budget_kib)
    leaves = optimizer_state and make is bitsandbytes.optim.AdamW8bit
    assert bool(report.state_bytes_swapped_out) is leaves


# --- layers


def test_float8_training_gives_the_same_bits() -> None:
    Program(lambda: convert_to_float8_training(wide(), config=Float8LinearConfig(emulate=True)), to_ones).check(300)


@torch.library.custom_op("chameleon_mm_tests::flash", mutates_args=())
def flash(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> tuple[Tensor, Tensor, Tensor]:
    """Attention as flash-attn's operator gives it: the result, the logarithms of the sums, and the state of its dropout."""
    state = torch.randint(1 << 30, (2,))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    sums = scores.logsumexp(-1)
    return ((scores - sums[..., None]).exp() * kept(scores, state, dropout)) @ v, sums, state


def kept(scores: Tensor, state: Tensor, dropout: float) -> Tensor:
    generator = torch.Generator().manual_seed(int(state[0]))
    return (torch.rand(scores.shape, generator=generator) >= dropout) / (1 - dropout)


@torch.library.custom_op("chameleon_mm_tests::flash_backward", mutates_args=())
def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, state: Tensor, dropout: float
) -> tuple[Tensor, Tensor, Tensor]:
    scale = q.shape[-1] ** -0.5
    probabilities = (q @ k.transpose(-1, -2) * scale - sums[..., None]).exp()
    mask = kept(probabilities, state, dropout)
    of_scores = probabilities * (grad @ v.transpose(-1, -2) * mask - (grad * out).sum(-1, keepdim=True)) * scale
    return of_scores @ k, of_scores.transpose(-1, -2) @ q, (probabilities * mask).transpose(-1, -2) @ grad


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.dropout = inputs[3]


flash.register_autograd(
    lambda ctx, grad, *_: (*flash_backward(grad, *ctx.saved_tensors, ctx.dropout), None), setup_context=_save
)


class Attention(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed, _, _ = flash(q, k, v, 0.1)
        out: Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return out


def test_an_operator_as_flash_attentions_gives_the_same_bits() -> None:
    """flash-attn itself needs a GPU: this operator saves what its own saves, dropout's state too."""
    Program(
        lambda: nn.Sequential(*(Attention() for _ in range(3))),
        lambda model: (model(torch.randn(4, 24, 32)) - 1).square().mean(),
    ).check(300)


def diffusion_transformer() -> nn.Module:
    model: Any = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=2, dropout=0.1,
        sample_size=8, patch_size=2, num_embeds_ada_norm=1000,
    )  # fmt: skip
    model.requires_grad_(False)
    adapters = LoraConfig(r=4, lora_dropout=0.1, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
    made: nn.Module = inject_adapter_in_model(adapters, model)
    return made.train()


def denoising(model: nn.Module) -> Tensor:
    clean, noise, when = torch.randn(4, 4, 8, 8), torch.randn(4, 4, 8, 8), torch.randint(1000, (4,))
    share = (when / 1000).view(-1, 1, 1, 1)
    predicted = model((1 - share) * clean + share * noise, timestep=when, class_labels=torch.randint(10, (4,))).sample
    return F.mse_loss(predicted, noise)


def test_adapters_of_a_diffusion_transformer_give_the_same_bits() -> None:
    Program(diffusion_transformer, denoising).check(690)


# --- programs of their own


@pytest.mark.slow
def test_ligers_kernels_give_the_same_bits() -> None:
    """In Triton's interpreter, which a process chooses before it imports Triton."""
    command = [sys.executable, "-m", "tests._liger"]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert {"_rms_norm_forward_kernel", "_swiglu_forward_kernel", "_triton_rope"} <= set(told["kernels"]), told
    assert told["bytes_swapped_out"] > 0


@pytest.mark.slow
@pytest.mark.timeout(3000)  # of a test that hangs: how fast the machine is decides nothing
def test_ranks_give_the_same_bits(tmp_path: Path) -> None:
    """Adapters under FSDP2, and DeepSpeed's ZeRO of stages 1 and 2 with accumulation, clipping and bfloat16, on two ranks."""
    for rank, outcome in enumerate(outcomes(2, "tests._rank_stack", tmp_path)):
        assert wrong(outcome["programs"]) == [], f"rank {rank}"
        for name, zero in outcome["zero"].items():
            assert zero["different"] == [], f"rank {rank}, {name}"
            assert zero["bytes_swapped_out"] > 0 and zero["plan_cache_hits"] > 0 and zero["problems"] == [], (
                f"rank {rank}, {name}"
            )
