"""Hugging Face's `Trainer` and TRL's trainers with one line of ours give the bits that they give without."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import chameleon_mm as cm
from tests._frameworks import STEPS, Noted, Seen, check_callback, check_nothing_left, check_pins, swapping
from tests._plain_models import BERT, MIXTRAL, VOCABULARY, llama
from tests._plain_training import Outcome, differences
from tests.test_pins import ROWS, WIDTH

pytestmark = pytest.mark.usefixtures("short_search")

SwapCallback = cm.integrations.transformers.SwapCallback


class Notes(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by mypy
    """Record the logs of `Trainer` in each step."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        for name in ("loss", "grad_norm", "eval_loss"):
            if name in logs:
                self._seen.note(name, torch.tensor(logs[name], dtype=torch.float64))


def examples(rows: int, columns: int = 24) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(VOCABULARY, (columns,), generator=generator) for _ in range(rows)]
    return [{"input_ids": row, "labels": row} for row in ids]


def settings(folder: Path, **args: Any) -> dict[str, Any]:
    """Return arguments of a trainer, extended or overridden by `args`."""
    return {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 1, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "learning_rate": 1e-3, "seed": 5,
        **args,
    }  # fmt: skip


def trainer(model: nn.Module, folder: Path, callbacks: list[TrainerCallback], **args: Any) -> Any:
    arguments = TrainingArguments(**settings(folder, **args))
    return Trainer(model, arguments, train_dataset=examples(24), eval_dataset=examples(4), callbacks=callbacks)


def trained(build: Any, folder: Path, swap: Any = None, make: Any = trainer, **args: Any) -> Outcome:
    seen = Seen()
    model = build()
    made = make(model, folder, [Notes(seen), *([swap] if swap is not None else [])], **args)
    made.train()
    check_nothing_left(model)
    return seen.finish(model, made.optimizer)


MODELS = {"llama": llama(2), "bert": BERT, "mixtral": MIXTRAL}
CHECKPOINTING = "activation" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient"  # the older name
OPTIONS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "clipping": {"max_grad_norm": 0.5},
    "checkpointing": {f"{CHECKPOINTING}_checkpointing": True},
    "bf16": {"bf16": True},
    "neftune": {"neftune_noise_alpha": 5},
}
"""Options of its arguments: all but the last are combined in `thorough`."""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "options", "budget_kib"),
    [
        ("llama", ("accumulation", "clipping", "bf16"), 600),
        pytest.param("llama", ("checkpointing",), 550, marks=pytest.mark.slow),
        pytest.param("llama", ("neftune", "clipping"), 600, marks=pytest.mark.slow),
        pytest.param("bert", ("clipping", "checkpointing", "bf16"), 575, marks=pytest.mark.slow),
        pytest.param("mixtral", ("accumulation", "checkpointing", "bf16"), 1110, marks=pytest.mark.slow),
        *(
            pytest.param(name, options, 400, marks=[pytest.mark.slow, pytest.mark.thorough])
            for name in MODELS
            for n in range(5)
            for options in itertools.combinations(list(OPTIONS)[:-1], n)
        ),
    ],
)
def test_a_trainer_gives_the_same_bits(name: str, options: tuple[str, ...], budget_kib: int, tmp_path: Path) -> None:
    args = {key: value for option in options for key, value in OPTIONS[option].items()}
    check_callback(SwapCallback, lambda swap: trained(MODELS[name], tmp_path, swap, **args), budget_kib)


@pytest.mark.slow
def test_evaluation_and_prediction_in_between_do_no_harm(tmp_path: Path) -> None:
    class Predicts(TrainerCallback):  # type: ignore[misc]  # mypy does not follow transformers
        trainer: Any

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % 7 == 0:
                self.trainer.predict(examples(3))

    def train(swap: Any) -> Outcome:
        seen, model, predicts = Seen(), MODELS["llama"](), Predicts()
        callbacks = [Notes(seen), predicts, *([swap] if swap is not None else [])]
        made = trainer(model, tmp_path, callbacks, eval_strategy="steps", eval_steps=3, eval_on_start=True)
        predicts.trainer = made
        made.train()
        made.evaluate()
        check_nothing_left(model)
        return seen.finish(model, made.optimizer)

    check_callback(SwapCallback, train, 600)


@pytest.mark.slow
def test_a_checkpoint_is_written_and_resumed_from(tmp_path: Path) -> None:
    def train(folder: Path, *, attached: bool) -> Outcome:
        for steps, resumed in ((4, False), (8, True)):
            seen, model = Seen(), MODELS["llama"]()
            swap = [SwapCallback(optimizer_state=True, **swapping("2MiB"))] if attached else []
            made = trainer(model, folder, [Notes(seen), *swap], max_steps=steps, save_strategy="steps", save_steps=4)
            made.train(resume_from_checkpoint=resumed or None)
        return seen.finish(model, made.optimizer)

    assert differences(train(tmp_path / "plain", attached=False), train(tmp_path / "swapped", attached=True)) == []


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_bits(tmp_path: Path) -> None:
    args = {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 4}

    def train(swap: Any) -> Outcome:
        torch._dynamo.reset()
        return trained(MODELS["llama"], tmp_path, swap, **args)

    plain = train(None)
    swap = SwapCallback(**swapping("2MiB"))
    assert differences(plain, train(swap)) == []
    assert swap.report().steps == 4
    assert swap.report().bytes_swapped_out > 0


@pytest.mark.ci
def test_pins_hold_in_a_trainer(tmp_path: Path) -> None:
    rows = [{"x": row} for row in torch.randn(ROWS * 4, WIDTH, generator=torch.Generator().manual_seed(3))]

    def train(model: Noted, swap: Any) -> None:
        args = TrainingArguments(**settings(tmp_path, max_steps=4, per_device_train_batch_size=ROWS, logging_strategy="no"))
        Trainer(model, args, train_dataset=rows, callbacks=[] if swap is None else [swap]).train()

    check_pins(SwapCallback, train, "2200KiB")


# --- TRL


TrlCallback = cm.integrations.trl.SwapCallback


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of one token per word: none is downloaded."""
    words = {f"w{number}": number for number in range(VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "w0")), pad_token="w1", eos_token="w2")


def words(rows: int, first: int, count: int) -> list[str]:
    """Texts of so many words each, from token number `first` of the examples on."""
    return [" ".join(f"w{token}" for token in row["input_ids"][first : first + count].tolist()) for row in examples(rows)]


def tuning(model: nn.Module, folder: Path, callbacks: list[Any], **args: Any) -> Any:
    config = SFTConfig(**settings(folder, max_grad_norm=0.5, **args))
    data = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in examples(24)])
    return SFTTrainer(model, config, train_dataset=data, processing_class=tokenizer(), callbacks=callbacks)


def preferring(model: nn.Module, folder: Path, callbacks: list[Any], **args: Any) -> Any:
    """Direct preference optimization, whose reference model runs next to the trained one."""
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
    """Group-relative policy optimization: within a training step, the model generates its own training data."""

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


@pytest.mark.ci
@pytest.mark.parametrize(("checkpointing", "budget_kib"), [(False, 6500), pytest.param(True, 3490, marks=pytest.mark.slow)])
def test_fine_tuning_gives_the_same_bits(checkpointing: bool, budget_kib: int, tmp_path: Path) -> None:
    args = {
        "gradient_accumulation_steps": 2,
        f"{CHECKPOINTING}_checkpointing": checkpointing,
        "bf16": checkpointing,
    }
    check_callback(TrlCallback, lambda swap: trained(llama(2), tmp_path, swap, tuning, **args), budget_kib)


@pytest.mark.slow
def test_packed_rows_give_the_same_bits(tmp_path: Path) -> None:
    """TRL fills each row of 24 tokens with texts one after the other."""
    args = {"packing": True, "packing_strategy": "wrapped", "max_length": 24}
    check_callback(TrlCallback, lambda swap: trained(llama(2), tmp_path, swap, tuning, **args), 3000)


@pytest.mark.slow
@pytest.mark.parametrize(("build", "budget_kib"), [(preferring, 3000), (reinforcing, 1500)])
def test_learning_from_preferences_and_rewards_gives_the_same_bits(build: Any, budget_kib: int, tmp_path: Path) -> None:
    check_callback(TrlCallback, lambda swap: trained(llama(2), tmp_path, swap, build), budget_kib)


def test_its_own_offload_beside_ours_is_refused(tmp_path: Path) -> None:
    made = tuning(llama(2)(), tmp_path, [TrlCallback(**swapping("1MiB"))])
    made.args.activation_offloading = True  # past the constructor, which asks for an accelerator by then
    with pytest.raises(ValueError, match="activation_offloading=False, got True"):
        made.train()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


VALUES = {
    "swap_step_us", "swap_tokens_per_s", "swap_peak_at_least_bytes", "swap_budget_bytes", "swap_bytes_out", "swap_stall_us",
}  # fmt: skip


def test_the_trainers_own_logs_and_its_reporters_have_the_figures_of_each_step(tmp_path: Path) -> None:
    """`Reports` stands before the callback, as wandb's and TensorBoard's do."""
    told: list[dict[str, float]] = []

    class Reports(TrainerCallback):  # type: ignore[misc]  # mypy does not follow transformers
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            told.append(dict(logs))

    class Derived(SwapCallback):  # type: ignore[valid-type, misc]  # a variable
        def on_train_begin(self, *given: Any, **more: Any) -> None:
            super().on_train_begin(*given, **more)

    def train(*callbacks: Any) -> list[dict[str, float]]:
        seen = Seen()
        options = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 3, "gradient_accumulation_steps": 2}
        made = trainer(MODELS["llama"](), tmp_path, [Reports(), *callbacks], **options)
        made.train()
        made.evaluate(metric_key_prefix="last")
        seen.finish(made.model, made.optimizer)
        made.state.save_to_json(str(tmp_path / "state.json"))
        return list(made.state.log_history)

    plain = train()
    told.clear()
    swap = Derived(**swapping("600KiB"))
    history = train(swap)
    steps = swap.report().step_figures
    losses = [log for log in history if "loss" in log]
    assert len(losses) == len(steps) == 6
    for log, figures in zip(losses, steps, strict=True):
        assert log.keys() >= VALUES
        assert log["swap_step_us"] == figures.step_us is not None
        assert figures.tokens == 2 * 24 * 2  # rows, their tokens, micro-batches; an evaluation's are not among them
        assert log["swap_tokens_per_s"] == 1e6 * 96 / figures.step_us
        assert log["swap_peak_at_least_bytes"] == figures.peak_hbm_bytes
        known = figures.peak_hbm_at_most_bytes == figures.peak_hbm_bytes
        assert log.pop("swap_peak_bytes", None) == (figures.peak_hbm_bytes if known else None)
        assert log["swap_budget_bytes"] == figures.hbm_budget_bytes == 600 * 1024
        assert log["swap_bytes_out"] == figures.bytes_out > 0
        assert log["swap_stall_us"] == figures.stall_us
    own = [{name: value for name, value in log.items() if name not in VALUES} for log in history]
    for log in told:
        log.pop("swap_peak_bytes", None)
    timed = {"train_runtime", "eval_runtime", "last_runtime"}
    assert [log.keys() for log in own] == [log.keys() for log in plain]
    for mine, theirs in zip(own, plain, strict=True):
        assert {n: v for n, v in mine.items() if not n.endswith("_per_second") and n not in timed} == {
            n: v for n, v in theirs.items() if not n.endswith("_per_second") and n not in timed
        }
    assert [log.keys() & VALUES for log in history] == [set(VALUES) if "loss" in log else set() for log in history]
    assert [log.keys() & VALUES for log in told] == [log.keys() & VALUES for log in history]
    assert "swap_step_us" in (tmp_path / "state.json").read_text()
