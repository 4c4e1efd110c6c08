"""TRL's trainers with one line of ours give the bits that they give without."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import chameleon_mm as cm
from tests._frameworks import Seen, check_callback, check_nothing_left, swapping
from tests._plain_models import VOCABULARY, llama
from tests._plain_training import Outcome
from tests.test_frameworks_transformers import CHECKPOINTING, Notes, examples, settings

SwapCallback = cm.integrations.trl.SwapCallback


def tokenizer() -> PreTrainedTokenizerFast:
    """One word for each token, made here: none is downloaded."""
    words = {f"w{number}": number for number in range(VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "w0")), pad_token="w1", eos_token="w2")


def words(rows: int, first: int, count: int) -> list[str]:
    """Texts of so many words each, from token number `first` of the examples on."""
    return [" ".join(f"w{token}" for token in row["input_ids"][first : first + count].tolist()) for row in examples(rows)]


def trainer(model: nn.Module, folder: Path, callbacks: list[Any], **args: Any) -> Any:
    config = SFTConfig(**settings(folder, max_grad_norm=0.5, **args))
    data = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in examples(24)])
    return SFTTrainer(model, config, train_dataset=data, processing_class=tokenizer(), callbacks=callbacks)


def preferring(model: nn.Module, folder: Path, callbacks: list[Any], **args: Any) -> Any:
    """Direct preference optimization, whose reference model runs beside the one that is trained."""
    columns = {"prompt": words(24, 0, 6), "chosen": words(24, 6, 9), "rejected": words(24, 15, 9)}
    config = DPOConfig(**settings(folder, max_grad_norm=0.5, **args))
    return DPOTrainer(
        model,
        copy.deepcopy(model),
        config,
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def reinforcing(model: nn.Module, folder: Path, callbacks: list[Any], **args: Any) -> Any:
    """Group-relative policy optimization: the model generates, within a step of training, what it is trained on."""

    def lengths(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text) % 7) for text in completions]

    config = GRPOConfig(**settings(folder, max_grad_norm=0.5, num_generations=2, max_completion_length=8, **args))
    return GRPOTrainer(
        model,
        lengths,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": words(24, 0, 6)}),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def trained(folder: Path, swap: Any = None, build: Any = trainer, **args: Any) -> Outcome:
    seen = Seen()
    model = llama(2)()
    made = build(model, folder, [Notes(seen), *([swap] if swap is not None else [])], **args)
    made.train()
    check_nothing_left(model)
    return seen.finish(model, made.optimizer)


@pytest.mark.parametrize(("checkpointing", "budget_kib"), [(False, 6500), (True, 3490)])
def test_fine_tuning_gives_the_same_bits(checkpointing: bool, budget_kib: int, tmp_path: Path) -> None:
    args = {
        "gradient_accumulation_steps": 2,
        f"{CHECKPOINTING}_checkpointing": checkpointing,
        "bf16": checkpointing,
    }
    check_callback(SwapCallback, lambda swap: trained(tmp_path, swap, **args), budget_kib)


@pytest.mark.parametrize(("build", "budget_kib"), [(preferring, 3000), (reinforcing, 1500)])
def test_learning_from_preferences_and_rewards_gives_the_same_bits(build: Any, budget_kib: int, tmp_path: Path) -> None:
    check_callback(SwapCallback, lambda swap: trained(tmp_path, swap, build), budget_kib)


def test_its_own_offload_beside_ours_is_refused(tmp_path: Path) -> None:
    made = trainer(llama(2)(), tmp_path, [SwapCallback(**swapping("1MiB"))])
    made.args.activation_offloading = True  # past the constructor, which asks for an accelerator by then
    with pytest.raises(ValueError, match="activation_offloading=False, got True"):
        made.train()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
